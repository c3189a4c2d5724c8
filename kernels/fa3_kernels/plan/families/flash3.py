"""FlashAttention-3 as its own repository builds it, and the build dew of somebody else.

This file states their tiles, how they split keys and pack heads, and what they refuse. The builds for serving are in
:mod:`fa3_kernels.plan.families.serving`.

Sources, of the repository Dao-AILab/flash-attention: hopper/tile_size.h, hopper/heuristics.h, hopper/flash_api.cpp,
hopper/flash_prepare_scheduler.cu and hopper/flash_bwd_launch_template.h. Splits are those of a GPU of 132
multiprocessors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fa3_kernels.plan.families.record import Backward, Cut, Shipped, Size, Sizes, Traits, broken
from fa3_kernels.plan.order import BackwardOrder, Order
from fa3_reference.problem import AttentionProblem

SMS = 132  # of an H100 SXM and of an H200
MAX_SPLITS = 128
_L2_BYTES = 50 << 20  # the size of L2 that FlashAttention-3 assumes
FULL = np.float32(0.8)  # share of the multiprocessors from which on keys are not split
_GOOD = 0.85  # share of the best efficiency that is good enough
_SHARING_BATCH = 992  # the largest batch whose packed sequences have splits of their own
_PACKED = 0.9  # heads are packed if unpacked rows fill their tiles less than this share of what packed rows fill


def ceil(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def first_good(tiles: int, sms: int, most: int, is_eligible: Callable[[int], bool]) -> int:
    """Return the fewest parts of the keys whose waves fill the multiprocessors nearly as well as the best number does.

    ``tiles`` are cut into 1 to ``most`` parts; numbers that are not eligible are not considered.
    """
    efficiency = {}
    for splits in filter(is_eligible, range(1, most + 1)):
        waves = np.float32(tiles * splits) / np.float32(sms)
        efficiency[splits] = waves / np.ceil(waves)
    best = max(efficiency.values(), default=np.float32(0))
    return next((splits for splits, found in efficiency.items() if found >= _GOOD * best), 1)


def flash3_mask(problem: AttentionProblem) -> tuple[bool, bool]:
    """Tell whether FlashAttention-3 runs its causal kernel, and whether it runs the one for windows.

    A limit that hides no key does not count. A window that is only limited on the right, at the diagonal, is a causal
    mask. One query without a window is dense.
    """
    left, right = problem.window
    left = -1 if left >= problem.seqlen_k - 1 else left
    right = -1 if right >= problem.seqlen_q - 1 else right
    is_causal = (problem.causal and not (problem.seqlen_q == 1 and left == right == -1)) or right == 0
    return is_causal, left >= 0 or (right >= 0 and not is_causal)


def flash3_splits(problem: AttentionProblem, tile_m: int, tile_n: int) -> int:
    """Return how many splits FlashAttention-3 takes if num_splits is 0.

    For packed sequences that is the most that a single one of them would take.

    >>> flash3_splits(AttentionProblem(1, 8, 1, 1, 8192, 128), 128, 176)
    40
    """
    left, right = problem.window
    is_local = left >= 0 or right >= 0
    loaded = min(problem.seqlen_k, left + right + 1 + tile_m) if is_local else problem.seqlen_k
    blocks = ceil(max(0, loaded), tile_n)
    rows = ceil(problem.seqlen_q * problem.group, tile_m)
    tiles = (1 if problem.is_varlen else problem.batch) * problem.nheads_kv * rows
    head_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * (1 if problem.dtype == "e4m3" else 2)
    if tiles >= FULL * np.float32(SMS):
        is_large = head_bytes > _L2_BYTES and rows >= 2 * SMS and not (problem.causal or is_local)
        return min(ceil(head_bytes, _L2_BYTES), MAX_SPLITS) if is_large else 1
    if blocks <= 4:
        return 1
    return first_good(tiles, SMS, min(MAX_SPLITS, SMS, blocks), lambda splits: True)


def flash3_sequence_splits(problem: AttentionProblem, config: Cut) -> tuple[int, ...]:
    """Return the splits of each sequence.

    Packed sequences share the multiprocessors in proportion to their blocks, with a tenth to spare, in batches of up to
    992; all others have the splits of the configuration. Source: upstream's hopper/flash_prepare_scheduler.cu.
    """
    if not problem.is_varlen or problem.batch > _SHARING_BATCH:
        return (config.num_splits,) * problem.batch
    heads, rows = (problem.nheads_kv, problem.group) if config.pack_gqa else (problem.nheads, 1)
    sequences = list(problem.sequences())
    blocks = [ceil(seq.seqlen_k, config.tile_n) for seq in sequences]
    total = sum(n * ceil(seq.seqlen_q * rows, config.tile_m) for n, seq in zip(blocks, sequences, strict=True))
    share = np.float32(total) * np.float32(1.1) * np.float32(heads) / np.float32(SMS)
    each = max(1, math.ceil(share))
    return tuple(max(1, min(ceil(n, each), config.num_splits)) for n in blocks)


def flash3_packs(problem: AttentionProblem, tile_m: int, num_splits: int) -> bool:
    """Tell whether FlashAttention-3 packs the heads of a group; it always does with splits or packed sequences.

    >>> flash3_packs(AttentionProblem(1, 8, 1, 200, 40, 64), 192, 1)
    True
    """
    if num_splits > 1 or problem.group == 1:
        return problem.group > 1
    lengths = (problem.seqlen_q, problem.seqlen_q * problem.group)
    plain, packed = (np.float32(rows) / np.float32(ceil(rows, tile_m) * tile_m) for rows in lengths)
    return problem.is_varlen or bool(plain < _PACKED * packed)


# Each row has: e4m3, head_dim, other instructions, the dense tile, the tile of windows (_tile chooses between the two),
# and the fraction of early exponentials. A tile says whether P goes through shared memory and whether warpgroups take
# turns (UseSchedulerBarrier). Exponentials in front of the wait: 17 of 90 and 25 of 66; 17 of 42; 35 of 114; 8 of 66;
# at 64 none; at 96 and 192 it is not known. Other instructions are assumed to be as many as ours once were.
SIZES: Sizes = {
    (is_fp8, head_dim): Size(
        dense,
        other,
        instructions,
        query_slots=1,
        early_exponentials=early,
    )
    for is_fp8, head_dim, instructions, dense, other, early in (
        (False, 64, (71, 0), Shipped(192, 192, pv_from_registers=False), Shipped(192, 128), 0.0),
        (
            False,
            96,
            (69, 0),
            Shipped(192, 144, pv_from_registers=False),
            Shipped(192, 128, pv_from_registers=False),
            0.0,
        ),
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
_SHORT = Shipped(64, 64, pingpong=False, pv_from_registers=False)
# Q and K of 64 channels, with a V of 512 channels that are the rest of K (qv).
ABSORBED = Size(_SHORT, _SHORT, rows=(64,))
_DEW_SIZES = tuple((False, d) for d in (64, 128, 192, 256))
# Registers of the producer and of a consumer, per thread, by (e4m3, consumer warpgroups). The producer of e4m3 kernels
# is a whole warpgroup, as it transposes V.
REGISTERS = {
    (is_fp8, consumers): registers
    for is_fp8, two in ((False, (24, 240)), (True, (40, 232)))
    for consumers, registers in ((1, (56, 255)), (2, two), (3, (32, 160)))
}


def _tile(problem: AttentionProblem, size: Size) -> Shipped:
    """Return the tile that a problem is launched with, by head_dim, mask and the size of V."""
    is_causal, is_local = flash3_mask(problem)
    if problem.head_dim <= 64 < problem.head_dim_v:
        return Shipped(128, 96)
    if problem.dtype != "e4m3" and 128 < problem.head_dim <= 192 and problem.head_dim_v <= 128 and not is_local:
        return Shipped(128, 128, pingpong=False)
    has_own_causal = size in (SIZES[False, 64], SIZES[False, 128])
    return size.other if is_local or (is_causal and has_own_causal) else size.shipped


def _refuses(problem: AttentionProblem) -> str:
    """Return the rules that a problem breaks, in words; empty if there are none.

    Windows of e4m3 were not recorded, and for some pairs of head_dim and head_dim_v no kernel is compiled.
    """
    d = problem.head_dim
    v = problem.head_dim_v
    is_fp8 = problem.dtype == "e4m3"
    is_pair = d == v or (128 < d <= 192 and 96 < v <= 128) or (d <= 64 < v and not is_fp8)
    is_pair = (d, v) == (576, 512) if problem.qv else is_pair and max(d, v) <= 256
    return broken(
        (is_fp8 and flash3_mask(problem)[1], "no build with windows for e4m3 was recorded"),
        (not is_pair, f"no kernel has head_dim {d} with head_dim_v {v} for {problem.dtype}"),
    )


def _dew_refuses(problem: AttentionProblem) -> str:
    """Return the rules of the build dew that a problem breaks, in words; empty if there are none."""
    unknown = broken((problem.softcap > 0, "no launch of this build with softcap was recorded"))
    return _refuses(problem) or unknown


def _refuses_backward(problem: AttentionProblem) -> str:
    """Return the rules that a problem breaks, in words: what the backward refuses or was not recorded; else empty."""
    return broken(
        (problem.dtype == "e4m3", "gradients are of 16 bits"),
        (problem.softcap > 0, "it takes no softcap"),
        (problem.head_dim_v != problem.head_dim, "head_dim_v must be head_dim"),
        (problem.head_dim % 8 != 0, "head_dim must be a multiple of 8"),
        (any(seq.seqlen_k == 0 for seq in problem.sequences()), "no gradients without keys were recorded"),
    )


FLASH3 = Traits(
    "FlashAttention-3",
    "fa3-fwd 0.0.3; fp16 and windows as dew-flash-attn-cu13 0.3.6",
    {**SIZES, (False, 576): ABSORBED},
    tile=_tile,
    registers=REGISTERS,
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
    refuses=_refuses,
)
FAMILIES = {
    "flash3": FLASH3,
    "flash3.dew": replace(  # a build without kernels for head_dim 96, and which never packs heads
        FLASH3,
        version="dew-flash-attn-cu13 0.3.6",
        dtypes=("fp16", "bf16"),
        sizes={key: size for key, size in SIZES.items() if key in _DEW_SIZES},
        features=FLASH3.features - {"softcap"},
        refuses=_dew_refuses,
        packs=lambda problem, tile_m, num_splits: False,
        backward=Backward(
            tiles={
                64: ((128, 128), (128, 128)),
                128: ((80, 128), (64, 128)),
                192: ((64, 96), (64, 96)),
                256: ((64, 80), (64, 80)),
            },
            order=BackwardOrder(),
            atomics=frozenset({256}),
            features=frozenset({"causal", "window", "varlen", "gqa"}),
            refuses=_refuses_backward,
        ),
    ),
}
