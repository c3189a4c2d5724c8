"""Islands of the forward, which are shapes and configurations, and their colonies of rows and channels.

:mod:`fa3verify.search.grounds` makes islands for a kernel, and :mod:`fa3verify.search.forward.judge` judges colonies.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from fa3_kernels.plan.config import Config, OutDtype
from fa3_kernels.plan.families import OURS
from fa3_reference.bounds.steps import LOG2_E
from fa3_reference.formats import FORMATS, decode
from fa3_reference.problem import AttentionProblem, Descale, Dtype, Operands
from fa3verify.files import Json
from fa3verify.search.colony import Colony, Environment, Place, Rng, rounded


@dataclass(frozen=True, slots=True)
class Island:
    """Holds one shape and configuration.

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
        Switches of the problem. Under the causal mask the first row sees ``keys - rows + 1`` keys, the last one all.
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
        """Return the configuration of the twin."""
        return _config(self)

    @property
    def head_dim(self) -> int:
        return self.rows * self.width

    @property
    def is_chained(self) -> bool:
        """Tell whether scores are sums of so many products that the tensor core's truncation decides their errors.

        The guide does not know these errors.
        """
        return self.width > 4

    @property
    def problems(self) -> int:
        """Count the rows of all batches."""
        return self.batch * self.rows

    @property
    def tiles(self) -> int:
        return -(-self.keys // self.tile_n)

    @property
    def descales(self) -> int:
        """Count the descales of K, and of V."""
        return -(-self.tiles // self.descale_tiles) if self.descale_tiles else 1

    @property
    def visible(self) -> np.ndarray:
        """Return the keys that each row sees, bool (problems, keys), read-only."""
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


@dataclass(slots=True)
class ForwardColony(Colony):
    """Holds genes of one island, values of its operand format as float64.

    ``q`` (problems, width), ``k`` (problems, keys, width) and ``q_descale`` float32 (problems,) make a row's scores,
    ``v`` (columns, keys) holds channels of V. A row with a channel is one individual, and all pairs are judged.
    """

    AXES: ClassVar = {"q": 0, "k": 0, "q_descale": 0, "v": 1}

    island: Island
    q: np.ndarray
    k: np.ndarray
    q_descale: np.ndarray
    v: np.ndarray

    @classmethod
    def normal(cls, island: Island, rng: Rng) -> ForwardColony:
        """Return standard normal operands, times powers of two that the descales of e4m3 take back.

        K stays below 2: each row's Q is 0 in the channels of other rows, and a bound may charge even such a product of
        0 by the exponent of K.
        """
        is_fp8 = island.dtype == "e4m3"
        gain = 64.0 if is_fp8 else 1.0

        def draw(gain: float, *shape: int) -> np.ndarray:
            return rounded(gain * rng.standard_normal(shape), island.dtype)

        def descale(gain: float, count: int) -> np.ndarray:
            return np.full(count, 1 / gain if is_fp8 else 1.0, np.float32)

        softcap = float(np.exp2(rng.uniform(-6, 6))) if island.softcap else 0.0
        scale = (1.0 if is_fp8 else 2.0) * island.width**-0.5
        return cls(
            island,
            Environment(scale, softcap, descale(0.5, island.descales), descale(gain, island.descales)),
            draw(gain, island.problems, island.width),
            draw(0.5, island.problems, island.keys, island.width),
            descale(gain, island.problems),
            draw(gain, island.columns, island.keys),
        )

    @property
    def operands(self) -> Operands:
        """Return the arrays a kernel sees: Q is 0 in the channels that other rows own, and heads are one."""
        island = self.island
        storage = FORMATS[self.island.dtype].dtype
        batch = island.batch
        rows = island.rows
        q = np.zeros((batch, rows, rows, island.width), storage)
        q[:, np.arange(rows), np.arange(rows)] = self.q.reshape(batch, rows, island.width)
        k = self.k.reshape(batch, rows, island.keys, island.width).transpose(0, 2, 1, 3).astype(storage)
        v = np.repeat(self.v.T.astype(storage)[None, :, None], batch, axis=0)
        arrays = (q.reshape(batch, rows, 1, -1), k.reshape(batch, island.keys, 1, -1), v)
        if island.dtype != "e4m3":
            return Operands(*arrays)
        block = island.tile_n * island.descale_tiles
        shared = (self.environment.k_descale, self.environment.v_descale)
        k_descale, v_descale = (Descale(np.tile(values, (batch, 1, 1)), block) for values in shared)
        return Operands(*arrays, Descale(self.q_descale.reshape(batch, 1, rows), 1), k_descale, v_descale)

    @property
    def raw_scores(self) -> np.ndarray:
        """Return q . k, float64 (problems, keys)."""
        return np.einsum("rw,rkw->rk", self.q, self.k)

    def per_key(self, descale: np.ndarray) -> np.ndarray:
        """Return the descale of every key, float64 (keys,)."""
        block = self.island.tile_n * self.island.descale_tiles or self.island.keys
        return np.repeat(descale.astype(np.float64), block)[: self.island.keys]

    @property
    def factors(self) -> np.ndarray:
        """Return the factors that take raw scores to log2 units before the softcap, float64 (problems, keys)."""
        scale = self.environment.softmax_scale * LOG2_E
        return scale * self.q_descale.astype(np.float64)[:, None] * self.per_key(self.environment.k_descale)

    def alone(self, place: Place) -> tuple[ForwardColony, Place]:
        """Return a colony of the same size with one individual in its place and zeros elsewhere."""
        row, column = place
        lone = self.copied()
        others = np.arange(self.island.problems) != row
        channels = np.arange(self.island.columns) != column
        lone.q[others] = 0
        lone.k[others] = 0
        lone.q_descale[others] = 1
        lone.v[channels] = 0
        return lone, place

    def to_json(self, place: Place) -> Json:
        """Return one individual, exactly, operands as codes; :func:`individual` reads it back."""
        row, column = place
        environment = self.environment
        fmt = FORMATS[self.island.dtype]
        operands = {"q": self.q[row], "k": self.k[row], "v": self.v[column]}
        return {
            "island": asdict(self.island),
            "row": row,
            "column": column,
            "softmax_scale": environment.softmax_scale,
            "softcap": environment.softcap,
            "q_descale": float(self.q_descale[row]),
            "k_descale": environment.k_descale.tolist(),
            "v_descale": environment.v_descale.tolist(),
        } | {name: x.astype(fmt.dtype).view(fmt.bits_dtype).tolist() for name, x in operands.items()}


def individual(values: Json) -> tuple[ForwardColony, Place]:
    """Return an individual of :meth:`ForwardColony.to_json` in its place, which is its row and its column.

    Raises
    ------
    ValueError
        For values that are missing, or that do not fit their island.
    """
    try:
        island = Island(**values["island"])
        row = int(values["row"])
        column = int(values["column"])
        colony, place = ForwardColony.normal(island, np.random.default_rng(0)).alone((row, column))
        for target, name in ((colony.q[row], "q"), (colony.k[row], "k"), (colony.v[column], "v")):
            target[...] = decode(np.array(values[name]), FORMATS[island.dtype])
        colony.q_descale[row] = values["q_descale"]
        descales = (np.array(values[name], np.float32) for name in ("k_descale", "v_descale"))
        colony.environment = Environment(values["softmax_scale"], values["softcap"], *descales)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"an individual is incomplete or damaged: {error}") from None
    return colony, place
