"""This module says what tells one family of kernels from another: the table that configurations, simulator, tuner and
error bound read.

A family is a kernel of a stated version. Ours is the only one that is built here; of the others stand what their
sources say and what ptxas made of the binaries that they ship.

>>> [traits_of(name).takes_keys(176) for name in ("gluon", "flash3")]
[False, True]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fa3_kernels.plan import tile_times
from fa3_kernels.plan.family import Backward, Shipped, Size, Sizes, Traits
from fa3_kernels.plan.heuristics import (
    flash2_splits,
    flash3_mask,
    flash3_packs,
    flash3_sequence_splits,
    flash3_splits,
)
from fa3_kernels.plan.learned import SUFFIX, traits_of_file
from fa3_kernels.plan.order import OUR_BACKWARD_ORDER, BackwardOrder, Order
from fa3_kernels.plan.serving import sglang_tile, vllm_tile
from fa3_reference.problem import AttentionProblem


def _our_tile(problem: AttentionProblem, size: Size) -> Shipped:
    """The tile with which a launch ends first (:mod:`fa3_kernels.plan.tile_times`), but where that was measured to be
    another: at 256 in 16 bits, turns where keys are hidden, and at 192 more keys where V is narrow.

    With 160 registers a window, or a causal mask with varlen, spills. Without turns head_dim 256 takes 0.97 to 1.01 x
    the time dense, and 0.99 to 1.03 x causal.
    """
    is_hidden = problem.causal or problem.window != (-1, -1)
    if size is _OURS[False, 256]:
        return size.other if is_hidden else size.shipped
    if size is _OURS[False, 192]:
        return size.other if problem.head_dim_v <= 128 else size.shipped
    needs_registers = problem.window != (-1, -1) or (problem.is_varlen and problem.causal)
    if needs_registers or problem.seqlen_q <= 128:
        return size.other
    tiles = {(tile.tile_m, tile.tile_n): tile for tile in (size.shipped, size.other)}
    listed = () if problem.is_varlen else tile_times.of(problem, *FAMILIES[OURS].compiled_head_dims(problem))
    known = [time for time in listed if (time.tile_m, time.tile_n) in tiles]
    if len(known) < 2:
        return size.shipped
    best = min(known, key=lambda time: min(tile_times.cycles_of(problem, time)))
    return tiles[best.tile_m, best.tile_n]


def _broken(*rules: tuple[bool, str]) -> str:
    """The rules that are broken, in words; empty where none is."""
    return "; ".join(rule for is_broken, rule in rules if is_broken)


def _flash3_tile(problem: AttentionProblem, size: Size) -> Shipped:
    """Upstream hopper/tile_size.h for 16 bits."""
    is_causal, is_local = flash3_mask(problem)
    if problem.head_dim <= 64 < problem.head_dim_v:
        return _FLASH3_WIDE_V
    if problem.dtype != "e4m3" and 128 < problem.head_dim <= 192 and problem.head_dim_v <= 128 and not is_local:
        return _FLASH3_NARROW_V
    has_own_causal = size in (_FLASH3[False, 64], _FLASH3[False, 128])
    return size.other if is_local or (is_causal and has_own_causal) else size.shipped


def _flash3_refuses(problem: AttentionProblem) -> str:
    """Windows of e4m3, and pairs of head_dim for which no kernel is compiled."""
    d = problem.head_dim
    v = problem.head_dim_v
    is_fp8 = problem.dtype == "e4m3"
    is_pair = d == v or (128 < d <= 192 and 96 < v <= 128) or (d <= 64 < v and not is_fp8)
    is_pair = (d, v) == (576, 512) if problem.qv else is_pair and max(d, v) <= 256
    return _broken(
        (is_fp8 and flash3_mask(problem)[1], "no build with windows for e4m3 was recorded"),
        (not is_pair, f"no kernel has head_dim {d} with head_dim_v {v} for {problem.dtype}"),
    )


def _dew_refuses(problem: AttentionProblem) -> str:
    """A softcap as well, which no launch of that build was given."""
    unknown = _broken((problem.softcap > 0, "no launch of this build with softcap was recorded"))
    return _flash3_refuses(problem) or unknown


_WIDE = Shipped(192, 128)
_WIDE_SHARED = Shipped(192, 128, pv_from_registers=False)
_SQUARE = Shipped(128, 128)
_NARROW = Shipped(128, 64)
_SHORT = Shipped(64, 64, pingpong=False, pv_from_registers=False)
_NARROW_FREE = Shipped(128, 64, pingpong=False)
_ALWAYS = (True, True)
_NEVER = (False, False)
# Integer maxima take fewer instructions, but ptxas orders the rest of a step differently. On an H200 at 2k and 16k
# keys, against floats: fp16 head_dim 64 +2 %, 128 -2 %, 256 +1 to 5 %; e4m3 head_dim 64 promoted +9 % dense and -5 %
# masked, chained -7 % and +4 %; 128 +1 to 3 %; 256 chained +7 to 10 %, promoted not to be had (its wgmma are serialised
# for want of registers). Exponentials in front of the wait for P V: 26 of 66, 12 of 34, 8 of 18 (fp16_d128), none where
# chained e4m3 sums of head_dim 64 leave registers for Q. The e4m3 producer is a whole warpgroup, which transposes V; at
# head_dim 256 the consumers need what it could use. Of e4m3, registers leave O of 96 channels one partial sum as wide,
# and O of 192 as of 256 partial sums of 64 channels that go round; both take 128 keys a tile as 128 and 256 do, so that
# their bits are the same, and 192 holds two tiles of Q.
# Q in registers, on an H200 at 1k, 4k and 16k keys, against Q in shared memory: head_dim 96 +4, +2 and +1 % dense, 0
# causal; 80 +5, +7 and +13 % dense; 192 +9, +4 and +2 % dense, +7, -1 and -3 % causal; 128 -2 to +1 %. 64 in tiles of
# 128 rows +6 % at 1k causal, which does not ship yet. Chained e4m3, at 16k and 4k dense, 4k and 1k causal: 128 +6, +5,
# +3 and +2 %; 64 +7, +6, -2 and 0 %; 192 +4, +3, 0 and -3 %; 96 0 to 1 %.
_OURS: Sizes = {
    (False, 64): Size(_WIDE, _SQUARE, (71, 0), integer_max=(_ALWAYS, _ALWAYS), early_exponentials=0.38),
    (False, 96): Size(_SQUARE, _SQUARE, (92, 0), holds_queries=True, early_exponentials=0.38),
    (False, 128): Size(_SQUARE, _SQUARE, (69, 0), early_exponentials=0.38),
    (False, 192): Size(_NARROW, _SQUARE, (89, 0), query_slots=1, holds_queries=True, early_exponentials=0.38),
    (False, 256): Size(
        _NARROW_FREE, _NARROW, (119, 0), query_slots=1, integer_max=(_ALWAYS, _ALWAYS), early_exponentials=0.38
    ),
    (True, 64): Size(
        _WIDE,
        _SQUARE,
        (63, 70),
        chained_queries=(True, False),
        integer_max=((False, True), (True, False)),
    ),
    (True, 96): Size(_SQUARE, _SQUARE, (86, 86), (128,), integer_max=(_ALWAYS, _ALWAYS), early_exponentials=0.24),
    (True, 128): Size(
        _SQUARE,
        _SQUARE,
        (66, 82),
        (128,),
        chained_queries=_ALWAYS,
        slices=2,
        integer_max=(_ALWAYS, _ALWAYS),
        early_exponentials=0.24,
    ),
    (True, 192): Size(
        _SQUARE,
        _SQUARE,
        (89, 143),
        (128,),
        chained_queries=(True, False),
        slices=3,
        holds_partials=False,
        integer_max=(_ALWAYS, _ALWAYS),
        early_exponentials=0.24,
    ),
    (True, 256): Size(
        _SQUARE,
        _SQUARE,
        (74, 154),
        (128,),
        (24, 240),
        query_slots=1,
        slices=4,
        holds_partials=False,
        integer_max=(_ALWAYS, _ALWAYS),
        early_exponentials=0.24,
    ),
}
# FlashAttention-3: tiles, P through shared memory and turns (UseSchedulerBarrier) by upstream hopper/tile_size.h, and
# those of windows, which _flash3_tile chooses between; exponentials in front of the wait: 17 of 90 and 25 of 66; 17 of
# 42; 35 of 114; 8 of 66; at 64 none; at 96 and 192 it is not known.
_FLASH3: Sizes = {
    (is_fp8, head_dim): Size(
        dense,
        other,
        instructions,
        query_slots=1,
        early_exponentials=early,
    )
    for is_fp8, head_dim, instructions, dense, other, early in (
        (False, 64, (71, 0), Shipped(192, 192, pv_from_registers=False), Shipped(192, 128), 0.0),
        (False, 96, (69, 0), Shipped(192, 144, pv_from_registers=False), _WIDE_SHARED, 0.0),
        (False, 128, (69, 0), Shipped(128, 176), Shipped(128, 128), 0.28),
        (False, 192, (119, 0), Shipped(128, 112, pingpong=False), Shipped(128, 96, pingpong=False), 0.0),
        (False, 256, (119, 0), Shipped(128, 80, pingpong=False), Shipped(128, 64, pingpong=False), 0.4),
        (True, 64, (61, 73), Shipped(192, 160, pingpong=False), Shipped(192, 160, pingpong=False), 0.0),
        (True, 96, (80, 82), Shipped(192, 128, pingpong=False), Shipped(192, 128, pingpong=False), 0.0),
        (True, 128, (80, 82), Shipped(128, 224), Shipped(128, 224), 0.31),
        (True, 192, (100, 77), Shipped(128, 160), Shipped(128, 160), 0.0),
        (True, 256, (100, 77), Shipped(128, 128), Shipped(128, 64), 0.12),
    )
}
# Q and K of 64 channels, and V of 512 that is the rest of K (qv).
_ABSORBED = Size(_SHORT, _SHORT, rows=(64,))
_FLASH3_SERVING: Sizes = {**_FLASH3, (False, 576): _ABSORBED}
_DEW_SIZES = tuple((False, d) for d in (64, 128, 192, 256))
_FLASH3_WIDE_V = Shipped(128, 96)  # 16 bits, head_dim 64 with a larger head_dim_v
_FLASH3_NARROW_V = Shipped(128, 128, pingpong=False)  # 16 bits, head_dim 192 with head_dim_v of at most 128
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
    "fa3-fwd 0.0.3; fp16 and windows as dew-flash-attn-cu13 0.3.6",
    _FLASH3_SERVING,
    tile=_flash3_tile,
    registers=_REGISTERS,
    pads_head_dim=True,
    order=Order(
        factor="of_float32",
        descales="product_first",
        softcap="tanh",
        maxima="unscaled",
        row_sum="running",
        lse="natural",
        lse_without_keys=float("inf"),
        hides_nan=True,
        compiles_masked_apart=True,
        keeps_subnormals=False,
        combine="flash3",
    ),
    splits=flash3_splits,
    sequence_splits=flash3_sequence_splits,
    packs=flash3_packs,
    is_reproduced=True,
    features=frozenset({"causal", "window", "softcap", "varlen", "gqa", "head_dim_v"}),
    serving=frozenset({"qv", "seqused_k", "append", "rotary", "leftpad", "batch_idx"}),
    choices=frozenset({"num_splits", "pack_gqa"}),
    refuses=_flash3_refuses,
)


def _serving_refuses(problem: AttentionProblem) -> str:
    """Return what no output of a serving build was compared of."""
    sizes = (576, 512) if problem.qv else (128, 128)
    is_fp8 = problem.dtype == "e4m3"
    is_other = problem.window != (-1, -1) or problem.sinks
    return _broken(
        ((problem.head_dim, problem.head_dim_v) != sizes, "head_dim 128, and 64 with V of 512, alone were compared"),
        (problem.softcap > 0, "no output with softcap was compared"),
        (not any(seq.seqlen_k for seq in problem.sequences()), "no output without a key was compared"),
        (is_fp8 and is_other, "no output of e4m3 with windows or sinks was compared"),
    )


def _serving(
    title: str,
    version: str,
    sizes: Sizes,
    tile: Callable[[AttentionProblem], Shipped],
    **changes: Any,
) -> Traits:
    """Return FlashAttention-3 as somebody else builds it, to serve: tiles of 64 rows, key tiles that begin where a
    window does, and no fp16 that was recorded.
    """
    rows = {key: size if size is _ABSORBED else replace(size, rows=(64, 128, 192)) for key, size in sizes.items()}
    return replace(
        _FLASH3_TRAITS,
        title=f"FlashAttention-3 of {title}",
        version=version,
        sizes=rows,
        tile=lambda problem, size: size.shipped if size is _ABSORBED else tile(problem),
        dtypes=("bf16", "e4m3"),
        order=replace(
            _FLASH3_TRAITS.order, key_tiles="from_window", contracts_promotion=False, sinks_without_keys=False
        ),
        features=frozenset({"causal", "window", "varlen", "gqa"}),
        refuses=_serving_refuses,
        **changes,
    )


def _flash3_backward_refuses(problem: AttentionProblem) -> str:
    """Return what no recorded gradient decides."""
    return _broken(
        (problem.dtype == "e4m3", "gradients are of 16 bits"),
        (problem.softcap > 0, "it takes no softcap"),
        (problem.head_dim_v != problem.head_dim, "head_dim_v must be head_dim"),
        (problem.head_dim % 8 != 0, "head_dim must be a multiple of 8"),
        (any(seq.seqlen_k == 0 for seq in problem.sequences()), "no gradients without keys were recorded"),
    )


_FLASH3_BACKWARD = Backward(
    # upstream hopper/flash_bwd_launch_template.h
    tiles={
        64: ((128, 128), (128, 128)),
        128: ((80, 128), (64, 128)),
        192: ((64, 96), (64, 96)),
        256: ((64, 80), (64, 80)),
    },
    order=BackwardOrder(),
    atomics=frozenset({256}),
    features=frozenset({"causal", "window", "varlen", "gqa"}),
    refuses=_flash3_backward_refuses,
)


def _flash2_tile(problem: AttentionProblem, size: Size) -> Shipped:
    """Keys of FlashAttention-2's kernel for splits, or of the other; 64 rows for one query, which changes nothing."""
    return size.other if flash2_splits(problem) > 1 else size.shipped


def _torch_refuses(problem: AttentionProblem) -> str:
    """Return what cuDNN and FlashAttention-2 take through torch."""
    return _broken(
        (problem.window != (-1, -1), "it takes no window"),
        (problem.softcap > 0, "it takes no softcap"),
        (problem.head_dim_v != problem.head_dim, "head_dim_v must be head_dim"),
    )


def _cudnn_refuses(problem: AttentionProblem) -> str:
    """No packed sequences, which torch does not hand to it; and one query runs another kernel."""
    if problem.is_varlen:
        return "it takes no packed sequences"
    return _torch_refuses(problem) or ("one query runs another kernel" if problem.seqlen_q == 1 else "")


def _unscaled_refuses(problem: AttentionProblem) -> str:
    """It masks no tail; its outputs were recorded for one head_dim."""
    return _broken(
        (problem.causal or problem.window != (-1, -1) or problem.softcap > 0 or problem.is_varlen, "it is dense"),
        (problem.seqlen_q % 64 != 0 or problem.seqlen_k % 64 != 0, "lengths must be multiples of 64"),
        ((problem.head_dim, problem.head_dim_v) != (64, 64), "head_dim must be 64"),
        (problem.group != 1, "it takes no grouped heads"),
    )


def _one_tile(tile_m: int, tile_n: int) -> Size:
    return Size(Shipped(tile_m, tile_n), Shipped(tile_m, tile_n), rows=(tile_m,))


def _our_backward_refuses(problem: AttentionProblem) -> str:
    """Return what our backward kernel does not take."""
    return _broken(
        (problem.dtype == "e4m3", "gradients are of 16 bits"),
        (problem.head_dim % 8 != 0 or problem.head_dim_v % 8 != 0, "head_dim must be a multiple of 8"),
    )


OURS = "gluon"
FAMILIES: Mapping[str, Traits] = {
    OURS: Traits(
        "Gluon",
        "this package",
        _OURS,
        _our_tile,
        # Of three warpgroups the producer is a single warp; of one it has what the consumer leaves.
        _REGISTERS | {(False, 3): (24, 160), (False, 1): (48, 240), (True, 1): (48, 240)},
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
        has_lockstep=True,
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
        serving=frozenset({"sinks", "paged", "seqused_k", "append", "rotary", "leftpad", "batch_idx"}),
        choices=frozenset({"num_splits", "pack_gqa", "promotion_interval", "out_dtype"}),
        backward=Backward(
            tiles={
                64: ((128, 128), (128, 128)),
                96: ((64, 128), (64, 128)),
                128: ((64, 128), (64, 128)),
                192: ((64, 64), (64, 64)),
                256: ((64, 64), (64, 64)),
            },
            order=OUR_BACKWARD_ORDER,
            features=frozenset({"causal", "window", "softcap", "varlen", "gqa", "head_dim_v", "lse_gradient"}),
            refuses=_our_backward_refuses,
        ),
    ),
    "flash3": _FLASH3_TRAITS,
    "flash3.dew": replace(  # a build without kernels for head_dim 96, and which never packs heads
        _FLASH3_TRAITS,
        version="dew-flash-attn-cu13 0.3.6",
        dtypes=("fp16", "bf16"),
        sizes={key: size for key, size in _FLASH3.items() if key in _DEW_SIZES},
        features=_FLASH3_TRAITS.features - {"softcap"},
        refuses=_dew_refuses,
        backward=_FLASH3_BACKWARD,
        packs=lambda problem, tile_m, num_splits: False,
    ),
    "vllm": _serving(
        "vLLM",
        "vllm 0.33.0",
        _FLASH3_SERVING,
        vllm_tile,
        promotes=True,
        promoted_keys=256,
        serving=frozenset({"sinks", "qv", "paged", "seqused_k", "leftpad", "batch_idx"}),
    ),
    "sglang": _serving(
        "SGLang",
        "sglang-kernel 0.4.5",
        {key: size for key, size in _FLASH3_SERVING.items() if key[1] in (128, 576)},
        sglang_tile,
        pads_head_dim=False,
        serving=_FLASH3_TRAITS.serving | {"sinks", "paged"},
    ),
    "flash4": replace(
        _FLASH3_TRAITS,
        title="FlashAttention-4",
        version="flash-attn 4.0.0b36",
        sizes=_FLASH4,
        dtypes=("fp16", "bf16"),
        tile=lambda problem, size: size.shipped,
        tile_order="a CTA each",
        pads_head_dim=False,
        is_reproduced=False,
    ),
    "cudnn": Traits(
        "cuDNN",
        "cuDNN 9.19 by torch 2.11.0",
        {(False, d): _one_tile(64, 128) for d in (64, 128, 256)},
        dtypes=("fp16", "bf16"),
        order=Order(
            keys="left_to_right",
            diagonal="top_left",
            factor="float32",
            contracts_exponent=False,
            row_sum="block_serial",
            quad="near_first",
            lse="natural",
            keeps_subnormals=False,
        ),
        pads_head_dim=True,
        is_reproduced=True,
        features=frozenset({"causal", "gqa"}),
        refuses=_cudnn_refuses,
    ),
    "flash2": Traits(
        "FlashAttention-2",
        "torch 2.11.0",
        {
            (False, d): Size(Shipped(*tile), Shipped(64, split_keys), rows=(64, 128))
            for d, tile, split_keys in (
                (32, (128, 128), 256),
                (64, (128, 128), 256),
                (96, (128, 64), 128),
                (128, (128, 64), 128),
                (192, (128, 64), 64),
                (256, (64, 64), 64),
            )
        },
        tile=_flash2_tile,
        splits=lambda problem, tile_m, tile_n: flash2_splits(problem),
        splits_unasked=True,
        dtypes=("fp16", "bf16"),
        order=Order(
            factor="of_float32",
            maxima="unscaled",
            contracts_exponent=False,
            gradual_exp2=True,
            row_sum="running",
            inverse="division",
            lse="natural_by_scale",
            lse_empty=float("inf"),
            lse_without_keys=float("inf"),
            hides_nan=True,
            compiles_masked_apart=True,
            combine="flash2",
            splits_visible=False,
        ),
        pads_head_dim=True,
        is_reproduced=True,
        features=frozenset({"causal", "gqa", "varlen"}),
        refuses=_torch_refuses,
    ),
    "triton_unscaled": Traits(
        "a Triton kernel with unscaled maxima",
        "Triton 3.6.0",
        {(False, 64): _one_tile(64, 64)},
        dtypes=("fp16", "bf16"),
        order=Order(
            keys="left_to_right",
            factor="float32",
            maxima="unscaled",
            rescale="contracted",
            row_sum="block_row",
            lse="log2_polynomial",
        ),
        is_reproduced=True,
        refuses=_unscaled_refuses,
    ),
}


def traits_of(family: str) -> Traits:
    """Return the traits of a family, by its name or by the file of a learned order; ValueError for an unknown one."""
    if family.endswith(SUFFIX):
        return traits_of_file(family)
    if family not in FAMILIES:
        raise ValueError(f"kernel family must be one of {', '.join(FAMILIES)}, got {family!r}")
    return FAMILIES[family]
