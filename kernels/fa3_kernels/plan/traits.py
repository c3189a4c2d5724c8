"""What tells one family of kernels from another: the table that configurations, simulator, tuner and error bound read.

A family is a kernel of a stated version. Ours is the only one that is built here; of the others stand what their
sources say and what ptxas made of the binaries that they ship.

>>> [traits_of(name).takes_keys(176) for name in ("gluon", "flash3")]
[False, True]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fa3_kernels.plan.family import Shipped, Size, Sizes, Traits
from fa3_reference.bounds.model import SoftmaxOrder
from fa3_reference.problem import AttentionProblem


def _prefers_128_rows(problem: AttentionProblem) -> bool:
    """Whether tiles of 192 rows do not pay, where registers would allow them.

    With 160 registers a window, or a causal mask with varlen, spills. Causal, since a taller tile visits more hidden
    keys: on an H200 192 rows take 1.31 x the time at 1k, 1.00 x at 4k and 0.94 x at 16k, in e4m3 0.97 x at 2k and 0.86
    x at 16k.
    """
    needs_registers = problem.window != (-1, -1) or (problem.is_varlen and problem.causal)
    pays_from = 2048 if problem.dtype == "e4m3" else 4096
    return needs_registers or problem.seqlen_q <= 128 or (problem.causal and problem.seqlen_q < pays_from)


_WIDE, _SQUARE, _NARROW = Shipped(192, 128), Shipped(128, 128), Shipped(128, 64)
_ALWAYS, _NEVER = (True, True), (False, False)
# Integer maxima take fewer instructions, but ptxas orders the rest of a step differently. On an H200 at 2k and 16k
# keys, against floats: fp16 head_dim 64 +2 %, 128 -2 %, 256 +1 to 5 %; e4m3 head_dim 64 promoted +9 % dense and -5 %
# masked, chained -7 % and +4 %; 128 +1 to 3 %; 256 chained +7 to 10 %, promoted not to be had (its wgmma are serialised
# for want of registers). Exponentials in front of the wait for P V: 26 of 66, 12 of 34, 8 of 18 (fp16_d128), 16 of 66
# (e4m3_d64_dense_chained). The e4m3 producer is a whole warpgroup, which transposes V; at head_dim 256 the consumers
# need what it could use.
_OURS: Sizes = {
    (False, 64): Size(_WIDE, _SQUARE, (71, 0), integer_max=(_ALWAYS, _ALWAYS), early_exponentials=0.38),
    (False, 128): Size(_SQUARE, _SQUARE, (69, 0), early_exponentials=0.38),
    (False, 256): Size(
        _NARROW, _NARROW, (119, 0), query_slots=1, integer_max=(_ALWAYS, _ALWAYS), early_exponentials=0.38
    ),
    (True, 64): Size(_WIDE, _SQUARE, (61, 73), integer_max=((False, True), (True, False)), early_exponentials=0.24),
    (True, 128): Size(
        _SQUARE, _SQUARE, (80, 84), (128,), slices=2, integer_max=(_ALWAYS, _ALWAYS), early_exponentials=0.24
    ),
    (True, 256): Size(
        _SQUARE, _SQUARE, (100, 77), (128,), (24, 240), query_slots=1, slices=2, holds_partials=False,
        integer_max=(_ALWAYS, _NEVER), early_exponentials=0.24,
    ),
}  # fmt: skip
# FlashAttention-3, dense and causal: tiles, P through shared memory and turns (UseSchedulerBarrier) by upstream
# hopper/tile_size.h; exponentials in front of the wait: 17 of 90 and 25 of 66; 17 of 42; 35 of 114; 8 of 66; at 64
# none.
_FLASH3: Sizes = {
    (is_fp8, head_dim): Size(
        dense, causal, _OURS[is_fp8, head_dim].other_instructions, query_slots=1, early_exponentials=early
    )
    for is_fp8, head_dim, dense, causal, early in (
        (False, 64, Shipped(192, 192, pv_from_registers=False), Shipped(192, 128), 0.0),
        (False, 128, Shipped(128, 176), Shipped(128, 128), 0.28),
        (False, 256, Shipped(128, 80, pingpong=False), Shipped(128, 80, pingpong=False), 0.4),
        (True, 64, Shipped(192, 160, pingpong=False), Shipped(192, 160, pingpong=False), 0.0),
        (True, 128, Shipped(128, 224), Shipped(128, 224), 0.31),
        (True, 256, Shipped(128, 128), Shipped(128, 128), 0.12),
    )
}
# FlashAttention-4: flash_attn/cute/interface.py. What ptxas made of it was not read; its step is FlashAttention-3's.
_FLASH4: Sizes = {
    (False, d): replace(_FLASH3[False, d], shipped=tile, other=tile)
    for d, tile in {64: _WIDE, 128: _SQUARE, 256: Shipped(128, 80, pingpong=False)}.items()
}
# A producer that transposes V is a warpgroup.
_REGISTERS = {
    (is_fp8, consumers): registers
    for is_fp8, two in ((False, (24, 240)), (True, (40, 232)))
    for consumers, registers in ((1, (56, 255)), (2, two), (3, (32, 160)))
}
_FLASH3_TRAITS = Traits(
    "FlashAttention-3",
    "fa3-fwd 0.0.3",
    _FLASH3,
    takes_other=lambda problem: problem.causal,
    registers=_REGISTERS,
    order=SoftmaxOrder(maxima="unscaled"),
    keeps_subnormals=False,
)
OURS = "gluon"
FAMILIES: Mapping[str, Traits] = {
    OURS: Traits(
        "Gluon",
        "this package",
        _OURS,
        _prefers_128_rows,
        _REGISTERS | {(False, 3): (24, 160)},  # whose producer is a single warp
        pads_head_dim=True,
        builds_powers_of_two=True,
        promotes=True,
        pads_group=True,
        named_rings=True,
        joins_warps=True,
        output_in_v=False,
        order=SoftmaxOrder(row_sum="pairs"),
        other_registers=(24, 16),
        is_serialised=True,
        step_stalls=(50, 60),
        has_lockstep=True,
        is_built_here=True,
    ),
    "flash3": _FLASH3_TRAITS,
    "flash4": replace(
        _FLASH3_TRAITS, title="FlashAttention-4", version="flash-attn 4.0.0b36", sizes=_FLASH4, dtypes=("fp16", "bf16"),
        tile_order="a CTA each",
    ),
}  # fmt: skip


def traits_of(family: str) -> Traits:
    """Return the traits of a family; ValueError for an unknown one."""
    if family not in FAMILIES:
        raise ValueError(f"kernel family must be one of {', '.join(FAMILIES)}, got {family!r}")
    return FAMILIES[family]
