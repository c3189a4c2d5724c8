"""What a kernel was compiled for: tile shape, schedule switches and number formats.

Fields that change bits: dtype, out_dtype, tile_n, promotion_interval, num_splits (and tile_m where infinities or NaN
meet masked tiles). The rest is schedule only and must never change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from fa3_reference.problem import DTYPES, AttentionProblem, Dtype

OutDtype = Literal["fp16", "bf16"]
KERNEL_HEAD_DIMS = (64, 128, 256)
K_STEP = {"fp16": 16, "bf16": 16, "e4m3": 32}  # keys or channels per wgmma instruction
WARPGROUP_ROWS = 64  # rows of the M dimension of one wgmma (PTX ISA, wgmma shapes)


@dataclass(frozen=True, slots=True)
class Config:
    """One compiled kernel.

    Parameters
    ----------
    dtype, out_dtype
        Operand format; output format (e4m3 kernels write bf16 unless told otherwise, 16-bit ones their own).
    head_dim : int
        64, 128 or 256; smaller problems are zero-padded up to it.
    tile_m, tile_n : int
        Query rows (64 per consumer warpgroup) and keys (a multiple of 32) of a tile.
    promotion_interval : int
        e4m3 only: keys after which the P V partial is added to the fp32 accumulator; divides tile_n, multiple of 32.
        0 chains through the tensor core's 13-bit accumulator, as FlashAttention-3 does.
    num_splits : int
        Parts the key blocks are cut into, merged by the deterministic combine.
    pack_gqa : bool
        Fold the query heads of one kv head into the rows of a tile, head fastest.
    num_stages, num_consumer_warpgroups, pingpong, intra_wg_overlap, pv_from_registers, producer_regs, consumer_regs
        Schedule only.

    Raises
    ------
    ValueError
        Whenever a field breaks its rule.
    """

    dtype: Dtype
    head_dim: int
    tile_m: int
    tile_n: int
    out_dtype: OutDtype
    promotion_interval: int = 0
    num_splits: int = 1
    pack_gqa: bool = False
    num_stages: int = 2
    num_consumer_warpgroups: int = 2
    pingpong: bool = True
    intra_wg_overlap: bool = True
    pv_from_registers: bool = True
    producer_regs: int = 24
    consumer_regs: int = 240

    def __post_init__(self) -> None:
        rules = (
            (self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}"),
            (self.head_dim in KERNEL_HEAD_DIMS, f"head_dim must be one of {KERNEL_HEAD_DIMS}, got {self.head_dim}"),
            (
                self.num_consumer_warpgroups in (1, 2, 3),
                f"num_consumer_warpgroups must be 1, 2 or 3, got {self.num_consumer_warpgroups}",
            ),
            (
                self.tile_m == WARPGROUP_ROWS * self.num_consumer_warpgroups,
                f"tile_m must be 64 rows per consumer warpgroup, got {self.tile_m} for {self.num_consumer_warpgroups}",
            ),
            (
                self.tile_n % 32 == 0 and 32 <= self.tile_n <= 256,
                f"tile_n must be a multiple of 32 in [32, 256], got {self.tile_n}",
            ),
            (self.out_dtype in get_args(OutDtype), f"out_dtype must be fp16 or bf16, got {self.out_dtype!r}"),
            (
                self.dtype == "e4m3" or self.out_dtype == self.dtype,
                f"a {self.dtype} kernel writes {self.dtype}, got out_dtype {self.out_dtype!r}",
            ),
            (1 <= self.num_splits <= 256, f"num_splits must lie in [1, 256], got {self.num_splits}"),
            (2 <= self.num_stages <= 8, f"num_stages must lie in [2, 8], got {self.num_stages}"),
            (self._promotion_ok(), self._promotion_rule()),
        )
        for ok, rule in rules:
            if not ok:
                raise ValueError(rule)

    def _promotion_ok(self) -> bool:
        interval = self.promotion_interval
        if interval == 0:
            return True
        return self.dtype == "e4m3" and interval > 0 and interval % 32 == 0 and self.tile_n % interval == 0

    def _promotion_rule(self) -> str:
        return (
            "promotion_interval must be 0, or for e4m3 a multiple of 32 that divides tile_n, "
            f"got {self.promotion_interval} with dtype {self.dtype} and tile_n {self.tile_n}"
        )

    @property
    def p_offset_log2(self) -> int:
        """log2 of the factor on P: 8 for e4m3, so that P spans [0, 256] and small weights survive; else 0."""
        return 8 if self.dtype == "e4m3" else 0


# By (is e4m3, head_dim, prefers 128 rows): tile_m, tile_n; powers of two in n, as Gluon needs.
_TILES: dict[tuple[bool, int, bool], tuple[int, int]] = {
    (False, 64, False): (192, 128),
    (False, 64, True): (128, 128),
    (False, 128, False): (128, 128),
    (False, 128, True): (128, 128),
    (False, 256, False): (128, 64),
    (False, 256, True): (128, 64),
    (True, 64, False): (192, 128),
    (True, 64, True): (128, 128),
    (True, 128, False): (128, 128),
    (True, 128, True): (128, 128),
    (True, 256, False): (128, 128),
    (True, 256, True): (128, 128),
}
# By (is e4m3, head_dim, consumer warpgroups): registers per thread of the producer and of a consumer. The e4m3 producer is
# a whole warpgroup, which transposes V; at head_dim 256 the consumers need what it could use.
_REGISTERS: dict[tuple[bool, int, int], tuple[int, int]] = {
    **{(False, d, 2): (24, 240) for d in KERNEL_HEAD_DIMS},
    **{(False, d, 3): (24, 160) for d in KERNEL_HEAD_DIMS},
    (True, 64, 2): (40, 232),
    (True, 64, 3): (32, 160),
    (True, 128, 2): (40, 232),
    (True, 256, 2): (24, 240),
}


def kernel_head_dim(head_dim: int) -> int:
    """Smallest kernel head_dim that holds ``head_dim``; ValueError above 256.

    >>> kernel_head_dim(80)
    128
    """
    for size in KERNEL_HEAD_DIMS:
        if head_dim <= size:
            return size
    raise ValueError(f"head_dim must be at most {KERNEL_HEAD_DIMS[-1]}, got {head_dim}")


def _prefers_128_rows(problem: AttentionProblem) -> bool:
    """Whether tiles of 192 rows do not pay, where registers would allow them.

    With 160 registers a window, or a causal mask with varlen, spills. Causal, since a taller tile visits more hidden keys:
    on an H200 192 rows take 1.31 x the time at 1k, 1.00 x at 4k and 0.94 x at 16k, in e4m3 0.97 x at 2k and 0.86 x at 16k.
    """
    needs_registers = problem.window != (-1, -1) or (problem.is_varlen and problem.causal)
    pays_from = 2048 if problem.dtype == "e4m3" else 4096
    return needs_registers or problem.seqlen_q <= 128 or (problem.causal and problem.seqlen_q < pays_from)


def default_config(problem: AttentionProblem, *, tile: tuple[int, int] | None = None, **changes) -> Config:
    """Return the shipped configuration for a problem, with ``changes`` applied; ``tile`` replaces (tile_m, tile_n).

    e4m3 promotes every 128 keys, or every tile of fewer: the chained accumulator loses 10 % of the output at 8k keys when
    V has mean 1. ValueError for a number of rows that no registers are set aside for.
    """
    head_dim = kernel_head_dim(max(problem.head_dim, problem.head_dim_v))
    fp8 = problem.dtype == "e4m3"
    tile_m, tile_n = tile or _TILES[fp8, head_dim, _prefers_128_rows(problem)]
    warpgroups = tile_m // WARPGROUP_ROWS
    if (fp8, head_dim, warpgroups) not in _REGISTERS:
        rows = " or ".join(str(WARPGROUP_ROWS * n) for e4m3, d, n in _REGISTERS if (e4m3, d) == (fp8, head_dim))
        raise ValueError(f"tile_m must be {rows} for {problem.dtype} at head_dim {head_dim}, got {tile_m}")
    producer_regs, consumer_regs = _REGISTERS[fp8, head_dim, warpgroups]
    config = Config(
        dtype=problem.dtype,
        head_dim=head_dim,
        tile_m=tile_m,
        tile_n=tile_n,
        out_dtype="bf16" if problem.dtype != "fp16" else "fp16",
        promotion_interval=min(128, tile_n) if fp8 else 0,
        num_consumer_warpgroups=warpgroups,
        producer_regs=producer_regs,
        consumer_regs=consumer_regs,
    )
    return replace(config, **changes) if changes else config
