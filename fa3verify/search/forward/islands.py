"""Islands: shapes and configurations of a kernel in which inputs are bred apart from each other, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from fa3_kernels.plan.config import Config, OutDtype
from fa3_kernels.plan.traits import OURS
from fa3_reference.problem import AttentionProblem, Dtype


@dataclass(frozen=True, slots=True)
class Island:
    """One shape and configuration.

    The problems of an island are judged at once: a row owns ``width`` channels of Q and K to itself, so that its scores
    depend on no other row, and every row meets every channel of V. Rows of one batch share their wgmma steps.

    Parameters
    ----------
    keys, tile_n : int
        Keys, and keys of a tile.
    width : int
        Channels of Q and K that a row owns: 1 or 2 make scores that are all but exact, 16 and more make chains.
    batch, rows, columns : int
        Batches, rows of each, and channels of V.
    softcap, causal : bool
        With causal the rows see from ``keys - rows + 1`` to all keys.
    descale_tiles : int
        e4m3: key tiles that share a descale of K and V; 0 for one descale.
    family : str
        Of the twin that is judged: ours, or one whose operations differ.
    """

    name: str
    dtype: Dtype
    keys: int
    tile_n: int
    width: int = 1
    batch: int = 1
    rows: int = 16
    columns: int = 32
    num_splits: int = 1
    promotion_interval: int = 0
    out_dtype: OutDtype = ""  # type: ignore[assignment]
    softcap: bool = False
    causal: bool = False
    descale_tiles: int = 0
    family: str = OURS

    @property
    def config(self) -> Config:
        """Configuration of the twin."""
        return _config(self)

    @property
    def head_dim(self) -> int:
        return self.rows * self.width

    @property
    def is_chained(self) -> bool:
        """Tell whether scores are sums of so many products that what the tensor core cuts decides their errors, of
        which the guide knows nothing.
        """
        return self.width > 4

    @property
    def problems(self) -> int:
        """Rows of all batches."""
        return self.batch * self.rows

    @property
    def tiles(self) -> int:
        return -(-self.keys // self.tile_n)

    @property
    def descales(self) -> int:
        """Descales of K, and of V."""
        return -(-self.tiles // self.descale_tiles) if self.descale_tiles else 1

    @property
    def visible(self) -> np.ndarray:
        """Keys each row sees, bool (problems, keys), read-only."""
        return _visible(self)

    def problem(self, softmax_scale: float, softcap: float) -> AttentionProblem:
        """Return all rows as one problem."""
        return AttentionProblem(
            *(self.batch, 1, 1, self.rows, self.keys, self.head_dim, self.columns),
            dtype=self.dtype,
            causal=self.causal,
            softcap=softcap if self.softcap else 0.0,
            softmax_scale=softmax_scale,
        )


@cache
def _config(island: Island) -> Config:
    switches = (island.out_dtype, island.promotion_interval, island.num_splits)
    head_dim = 64 if island.head_dim <= 64 else 128
    return Config(island.dtype, head_dim, 64, island.tile_n, *switches, family=island.family)


@cache
def _visible(island: Island) -> np.ndarray:
    _, stop = island.problem(1.0, 1.0).visible_keys(np.arange(island.rows), island.rows, island.keys)
    visible = np.tile(np.arange(island.keys) < stop[:, None], (island.batch, 1))
    visible.flags.writeable = False
    return visible


# Few keys let a single operation's error stand alone, whole tiles let errors of one sign add up, several tiles and
# splits rescale, and a row of more than 16 or 32 channels is a chain of its own.
_SIXTEEN_BITS = (
    Island("few", "fp16", 16, 16),
    Island("tile", "fp16", 128, 128),
    Island("two tiles", "fp16", 32, 16),
    Island("tiles", "fp16", 256, 64),
    Island("splits", "fp16", 96, 16, num_splits=3),
    Island("chains", "fp16", 16, 16, 32, batch=16, rows=1),
    Island("softcap", "fp16", 32, 16, softcap=True),
    Island("causal", "fp16", 96, 32, causal=True),
)
_EIGHT_BITS = (
    Island("few", "e4m3", 32, 32, 2),
    Island("tile", "e4m3", 128, 128, rows=32, promotion_interval=128),
    Island("two tiles", "e4m3", 128, 64, 2, promotion_interval=64, descale_tiles=1),
    Island("chained tiles", "e4m3", 96, 32, 2, descale_tiles=1),
    Island("parts", "e4m3", 256, 128, rows=32, promotion_interval=64, out_dtype="fp16"),
    Island("splits", "e4m3", 192, 32, rows=32, num_splits=4, promotion_interval=32, descale_tiles=2),
    Island("chains", "e4m3", 32, 32, 64, batch=16, rows=1, out_dtype="fp16"),
    Island("softcap", "e4m3", 32, 32, 2, softcap=True),
    Island("causal", "e4m3", 96, 32, rows=32, promotion_interval=32, causal=True),
)

ISLANDS: tuple[Island, ...] = (
    *_SIXTEEN_BITS,
    *(replace(island, dtype="bf16") for island in _SIXTEEN_BITS),
    *_EIGHT_BITS,
    *(Island("tanh", dtype, 32, 16, rows=32, softcap=True, family="flash3") for dtype in ("fp16", "bf16")),
    Island("tanh", "e4m3", 32, 32, width=2, softcap=True, family="flash3"),
)


def islands_of(dtype: str) -> tuple[Island, ...]:
    return tuple(island for island in ISLANDS if island.dtype == dtype)


def island_of(dtype: str, name: str) -> Island:
    """Return the island of that name; ValueError where there is none."""
    for island in islands_of(dtype):
        if island.name == name:
            return island
    raise ValueError(f"there is no island {name!r} for {dtype!r}")
