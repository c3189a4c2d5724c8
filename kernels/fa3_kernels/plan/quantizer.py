"""The options of the e4m3 quantiser, and the constants that its kernel and its twin share.

:mod:`fa3_kernels.gluon.quantize` and :mod:`fa3_kernels.twin.quantize` do what is stated here:

    y = rotation(x - mean),   descale = clamp(max|y| norm / 448),   stored = e4m3(y * (norm * (1 / descale)))

norm is 1, or 1 / sqrt(head_dim) with a rotation: the butterflies stay unnormalised and the factor costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from fa3_kernels.plan.config import MAX_HEAD_DIM, require
from fa3_reference.rules import is_integer
from fa3_reference.scales import Rounding as Scale, random_signs

Scope = Literal["block", "head", "query_head"]

E4M3_MAX = 448.0
# A descale and 1 / descale must both be normal numbers. An Inf in the data gives 2^126; 448 * 2^126 is beyond binary32,
# so that Inf stays Inf.
MIN_DESCALE = 2.0**-126
MAX_DESCALE = 2.0**126
ROTATED_HEAD_DIMS = (32, 64, 128, 256)
# the order of the K mean's sum, which the twin describes
MEAN_CHUNK_ROWS = 128
MEAN_TREE_ROWS = 32
MEAN_FINAL_ROWS = 64
_MAX_TILE_ROWS = 128
_MIN_TILE_ROWS = 32


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Says how q, k and v become e4m3.

    Parameters
    ----------
    block_rows : int or (int, int, int)
        Rows that share a descale in scope "block", for all or for q, k and v; multiples of 32. One pass over the data
        for 32, 64 and 128, two otherwise.
    scope : {"block", "head", "query_head"}
        "head" is one descale per (sequence, kv head), which for q holds for all query heads of the kv head, as
        FlashAttention-3 takes it. "query_head" is the same, but each query head of q has a descale of its own.
    scale : {"amax", "power_of_two"}
        descale = max / 448, or that rounded up to a power of two.
    rotate : bool
        Random-sign Hadamard rotation of q and k.
    subtract_k_mean : bool
        Subtract from k its mean over the tokens of each (sequence, kv head); the result then holds the LSE correction.
    seed : int
        Seed of the rotation's signs, see :func:`fa3_reference.scales.random_signs`.

    Raises
    ------
    ValueError
        Whenever a value breaks its rule; the message states both.
    """

    block_rows: int | tuple[int, int, int] = 128
    scope: Scope = "block"
    scale: Scale = "amax"
    rotate: bool = False
    subtract_k_mean: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options: every rule is whether it is kept, and its words with the value."""
        rows = self.block_rows if isinstance(self.block_rows, tuple) else (self.block_rows,) * 3
        is_legal = len(rows) == 3 and all(is_integer(n, 1) and n % _MIN_TILE_ROWS == 0 for n in rows)
        rules = (
            (is_legal, f"block_rows must be one or three positive multiples of 32, got {self.block_rows!r}"),
            (self.scope in get_args(Scope), f"scope must be one of {', '.join(get_args(Scope))}, got {self.scope!r}"),
            (self.scale in get_args(Scale), f"scale must be 'amax' or 'power_of_two', got {self.scale!r}"),
            (isinstance(self.rotate, bool), f"rotate must be True or False, got {self.rotate!r}"),
            (
                isinstance(self.subtract_k_mean, bool),
                f"subtract_k_mean must be True or False, got {self.subtract_k_mean!r}",
            ),
            (is_integer(self.seed, 0), f"seed must be an integer >= 0, got {self.seed!r}"),
        )
        for ok, rule in rules:
            require(ok, rule)

    @property
    def descale_rows(self) -> tuple[int, int, int]:
        """Return the rows per descale of q, k and v; 0 is the whole sequence."""
        if self.scope != "block":
            return (0, 0, 0)
        rows = self.block_rows
        return rows if isinstance(rows, tuple) else (rows, rows, rows)

    def norm(self, head_dim: int) -> float:
        """Return the factor of operands: 1 / sqrt(head_dim) rounded to binary32 with a rotation, else 1."""
        return float(np.float32(1 / np.sqrt(head_dim))) if self.rotate else 1.0

    def signs(self, head_dim: int) -> np.ndarray:
        """Return the rotation's signs, float32 +-1 (head_dim,)."""
        return random_signs(head_dim, self.seed).astype(np.float32)


def tile_rows(descale_rows: int, head_dim: int) -> int:
    """Return the rows of a tile: all rows that share a descale if they fit, otherwise a divisor of their number.

    ``descale_rows`` 0 means that the whole sequence shares a descale.

    >>> [tile_rows(rows, 128) for rows in (0, 32, 64, 128, 192, 256)]
    [128, 32, 64, 128, 64, 128]
    """
    if 0 < descale_rows <= _MAX_TILE_ROWS:
        return descale_rows & -descale_rows
    # several tiles share a descale, so that the data are read in two passes anyway: a tile is what registers can hold
    largest = _MAX_TILE_ROWS // 2 if head_dim > 128 else _MAX_TILE_ROWS
    return min(descale_rows & -descale_rows, largest) if descale_rows else largest


def lse_factor(softmax_scale: float | None, head_dim: int) -> np.float32:
    """Return softmax_scale, by default 1 / sqrt(head_dim), rounded to binary32; ValueError unless finite and > 0."""
    if softmax_scale is None:
        return np.float32(1 / np.sqrt(head_dim))
    require(0 < softmax_scale < np.inf, f"softmax_scale must be finite and > 0, got {softmax_scale!r}")
    return np.float32(softmax_scale)


def padded_head_dim(head_dim: int) -> int:
    """Return how many channels a kernel computes with: a power of two, at least 32."""
    return max(32, 1 << (head_dim - 1).bit_length())


class TileForm(NamedTuple):
    """Says how the threads of a program hold a tile of ``parts`` times ``rows`` rows."""

    rows: int
    parts: int
    lanes: int  # that share a row
    registers: int  # of a thread

    @property
    def threads(self) -> int:
        return self.rows * self.lanes


def tile_form(rows: int, channels: int, rotate: bool) -> TileForm:
    """Choose how threads hold a tile of ``rows`` times ``channels``, which is rotated or not.

    A rotated row lies in one thread, up to 128 channels. Measured on an H200 at head_dim 256, four lanes a row with two
    rounds of shuffles reach 0.79 of the copy bandwidth, and two lanes with one round 0.87. A rotated tile of more than
    128 * 128 elements would leave room for one program on a multiprocessor; in two parts there is room for two (0.66
    and 0.73). The registers are the fewest without a spill, except for tiles in two parts, where shared memory is the
    limit.
    """
    lanes = max(1, channels // (128 if rotate else 64))
    if rotate and rows * channels > 128 * 128:
        return TileForm(rows // 2, 2, lanes, 248)
    return TileForm(rows, 1, lanes, 168 if channels // lanes == 128 else 128)


def check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], options: QuantizeOptions) -> None:
    """Refuse shapes the quantiser does not take.

    Parameters
    ----------
    q, k, v : shapes
        (batch, seqlen, nheads, head_dim), or (total, nheads, head_dim) for packed sequences.

    Raises
    ------
    ValueError
        If the shapes do not fit each other, or a head_dim is illegal.
    """
    fits = len(q) in (3, 4) and len(k) == len(v) == len(q) and k[:-1] == v[:-1] and k[-1] == q[-1]
    fits = fits and (len(q) == 3 or q[0] == k[0])
    require(fits, f"k must fit q {q}, and v must fit k but for head_dim_v, got {k} and {v}")
    require(min(q) > 0 and min(k[-2:]) > 0, f"q and the heads of k must not be empty, got {q} and {k}")
    require(q[-2] % k[-2] == 0, f"nheads must be a multiple of nheads_kv, got {q[-2]} and {k[-2]}")
    for name, dim in (("head_dim", q[-1]), ("head_dim_v", v[-1])):
        is_size = 0 < dim <= MAX_HEAD_DIM and dim % 16 == 0
        require(is_size, f"{name} must be a multiple of 16 and at most {MAX_HEAD_DIM}, got {dim}")
    is_rotated = not options.rotate or q[-1] in ROTATED_HEAD_DIMS
    require(is_rotated, f"a rotation needs head_dim in {ROTATED_HEAD_DIMS}, got {q[-1]}")
