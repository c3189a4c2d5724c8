"""Our own family: the kernels that this package builds, and which tile a launch takes.

The measurements behind each choice below stand in reports/decisions/0029-one-file-a-family.md.
"""

from __future__ import annotations

from fa3_kernels.plan import tile_times
from fa3_kernels.plan.families.flash3 import REGISTERS
from fa3_kernels.plan.families.record import Backward, Shipped, Size, Sizes, Traits, broken
from fa3_kernels.plan.order import OUR_BACKWARD_ORDER
from fa3_reference.problem import AttentionProblem

OURS = "gluon"
_WIDE = Shipped(192, 128)
_SQUARE = Shipped(128, 128)
_NARROW = Shipped(128, 64)
_ALWAYS = (True, True)
_INTEGERS = (_ALWAYS, _ALWAYS)
SIZES: Sizes = {
    (False, 64): Size(_WIDE, _SQUARE, integer_max=_INTEGERS, early_exponentials=0.38),
    (False, 96): Size(_SQUARE, _SQUARE, holds_queries=True, early_exponentials=0.38),
    (False, 128): Size(_SQUARE, _SQUARE, early_exponentials=0.38),
    (False, 160): Size(_SQUARE, _SQUARE, query_slots=1, early_exponentials=0.38, scales_late=True),
    (False, 192): Size(_NARROW, _SQUARE, query_slots=1, holds_queries=True, early_exponentials=0.38),
    (False, 256): Size(
        Shipped(128, 64, pingpong=False), _NARROW, query_slots=1, integer_max=_INTEGERS, early_exponentials=0.38
    ),
    (True, 64): Size(_WIDE, _SQUARE, chained_queries=(True, False), integer_max=((False, True), (True, False))),
    (True, 96): Size(_SQUARE, _SQUARE, rows=(128,), integer_max=_INTEGERS, early_exponentials=0.24),
    (True, 128): Size(
        _SQUARE,
        _SQUARE,
        rows=(128,),
        chained_queries=_ALWAYS,
        slices=2,
        integer_max=_INTEGERS,
        early_exponentials=0.24,
    ),
    (True, 160): Size(
        _SQUARE,
        _SQUARE,
        rows=(128,),
        chained_queries=(True, False),
        slices=3,
        holds_partials=False,
        integer_max=_INTEGERS,
        early_exponentials=0.24,
    ),
    (True, 192): Size(
        _SQUARE,
        _SQUARE,
        rows=(128,),
        chained_queries=(True, False),
        slices=3,
        holds_partials=False,
        integer_max=_INTEGERS,
        early_exponentials=0.24,
    ),
    (True, 256): Size(
        _SQUARE,
        _SQUARE,
        rows=(128,),
        registers=(24, 240),
        query_slots=1,
        slices=4,
        holds_partials=False,
        integer_max=_INTEGERS,
        early_exponentials=0.24,
    ),
}


def _tile(problem: AttentionProblem, size: Size) -> Shipped:
    """Return the tile with which a launch ends first, by :mod:`fa3_kernels.plan.tile_times`.

    Two sizes of 16 bits are decided by measurements instead: at head_dim 256 warpgroups take turns where keys are
    hidden, and at 192 a tile has more keys where V is narrow. Tiles of three warpgroups leave a thread 160 registers,
    with which a window spills, and so does a causal mask over packed sequences: such launches have the smaller tile.
    """
    hides_keys = problem.causal or problem.is_windowed
    if size is SIZES[False, 256]:
        return size.other if hides_keys else size.shipped
    if size is SIZES[False, 192]:
        return size.other if problem.head_dim_v <= 128 else size.shipped
    needs_registers = problem.is_windowed or (problem.is_varlen and problem.causal)
    if needs_registers or problem.seqlen_q <= 128:
        return size.other
    tiles = {(tile.tile_m, tile.tile_n): tile for tile in (size.shipped, size.other)}
    listed = () if problem.is_varlen else tile_times.of(problem, *FAMILIES[OURS].compiled_head_dims(problem))
    known = [time for time in listed if (time.tile_m, time.tile_n) in tiles]
    if len(known) < 2:
        return size.shipped
    best = min(known, key=lambda time: min(tile_times.cycles_of(problem, time)))
    return tiles[best.tile_m, best.tile_n]


def _refuses_backward(problem: AttentionProblem) -> str:
    """Return the rules that a problem's gradients break, in words; empty if there are none."""
    return broken(
        (problem.dtype == "e4m3", "gradients are of 16 bits"),
        (problem.head_dim % 8 != 0 or problem.head_dim_v % 8 != 0, "head_dim must be a multiple of 8"),
    )


FAMILIES = {
    OURS: Traits(
        "Gluon",
        "this package",
        SIZES,
        _tile,
        # with three warpgroups the producer is a single warp; with one it has the registers that the consumer leaves
        REGISTERS | {(False, 3): (24, 160), (False, 1): (48, 240), (True, 1): (48, 240)},
        pads_head_dim=True,
        builds_powers_of_two=True,
        promotes=True,
        pads_group=True,
        named_rings=True,
        joins_warps=True,
        output_in_v=False,
        other_registers=(24, 16),
        is_serialised=True,
        step_stalls=(50, 60),
        is_built_here=True,
        is_reproduced=True,
        features=frozenset(
            {
                "causal",
                "window",
                "softcap",
                "varlen",
                "gqa",
                "head_dim_v",
                "query_head_descale",
                "block_descale",
            }
        ),
        serving=frozenset(
            {
                "sinks",
                "attention_chunk",
                "paged",
                "seqused_k",
                "append",
                "rotary",
                "leftpad",
                "leftpad in pages",
                "batch_idx",
            }
        ),
        choices=frozenset({"num_splits", "pack_gqa", "promotion_interval", "out_dtype"}),
        backward=Backward(
            tiles={
                64: ((128, 128), (128, 128)),
                96: ((64, 128), (64, 128)),
                128: ((64, 128), (64, 128)),
                160: ((64, 64), (64, 64)),
                192: ((64, 64), (64, 64)),
                256: ((64, 64), (64, 64)),
            },
            order=OUR_BACKWARD_ORDER,
            features=frozenset({"causal", "window", "softcap", "varlen", "gqa", "head_dim_v", "lse_gradient"}),
            refuses=_refuses_backward,
        ),
    ),
}
