"""This module says what other people's kernels choose by themselves: how many parts of the keys, and whether heads are
packed.

Sources, of the repository Dao-AILab/flash-attention: hopper/heuristics.h and hopper/flash_api.cpp for FlashAttention-3,
csrc/flash_attn/flash_api.cpp for FlashAttention-2. Splits are those of a GPU of 132 multiprocessors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from fa3_reference.problem import AttentionProblem

if TYPE_CHECKING:
    from fa3_kernels.plan.config import Config

SMS = 132  # of an H100 SXM and of an H200
MAX_SPLITS = 128
_L2_BYTES = 50 << 20  # what FlashAttention-3 reckons with
# share of the multiprocessors that needs no split; of the best efficiency
_FULL = np.float32(0.8)
_GOOD = 0.85
_SHARING_BATCH = 992
_PACKED = 0.9  # share of what packed heads fill of their tiles, below which they are packed


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _first_good(tiles: int, sms: int, most: int, is_eligible: Callable[[int], bool]) -> int:
    """Fewest parts whose last wave fills the multiprocessors nearly as well as the best number of parts."""
    efficiency = {}
    for splits in filter(is_eligible, range(1, most + 1)):
        waves = np.float32(tiles * splits) / np.float32(sms)
        efficiency[splits] = waves / np.ceil(waves)
    best = max(efficiency.values(), default=np.float32(0))
    return next((splits for splits, found in efficiency.items() if found >= _GOOD * best), 1)


def flash3_mask(problem: AttentionProblem) -> tuple[bool, bool]:
    """Tell whether FlashAttention-3 runs a causal kernel, and whether one for windows; one query without a window is
    dense.

    A limit that hides nothing is none, and a window that is only closed on the right at the diagonal is a causal mask.
    """
    left, right = problem.window
    left = -1 if left >= problem.seqlen_k - 1 else left
    right = -1 if right >= problem.seqlen_q - 1 else right
    is_causal = (problem.causal and not (problem.seqlen_q == 1 and left == right == -1)) or right == 0
    return is_causal, left >= 0 or (right >= 0 and not is_causal)


def flash3_splits(problem: AttentionProblem, tile_m: int, tile_n: int) -> int:
    """Return what FlashAttention-3 takes for num_splits = 0; of packed sequences the most that one alone would take.

    >>> flash3_splits(AttentionProblem(1, 8, 1, 1, 8192, 128), 128, 176)
    40
    """
    left, right = problem.window
    is_local = left >= 0 or right >= 0
    loaded = min(problem.seqlen_k, left + right + 1 + tile_m) if is_local else problem.seqlen_k
    blocks = _ceil(max(0, loaded), tile_n)
    rows = _ceil(problem.seqlen_q * problem.group, tile_m)
    tiles = (1 if problem.is_varlen else problem.batch) * problem.nheads_kv * rows
    head_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * (1 if problem.dtype == "e4m3" else 2)
    if tiles >= _FULL * np.float32(SMS):
        is_large = head_bytes > _L2_BYTES and rows >= 2 * SMS and not (problem.causal or is_local)
        return min(_ceil(head_bytes, _L2_BYTES), MAX_SPLITS) if is_large else 1
    if blocks <= 4:
        return 1
    return _first_good(tiles, SMS, min(MAX_SPLITS, SMS, blocks), lambda splits: True)


def flash3_sequence_splits(problem: AttentionProblem, config: Config) -> tuple[int, ...]:
    """Splits of each sequence: packed ones share the multiprocessors by their blocks, with a tenth to spare.

    Upstream hopper/flash_prepare_scheduler.cu, for batches of up to 992.
    """
    if not problem.is_varlen or problem.batch > _SHARING_BATCH:
        return (config.num_splits,) * problem.batch
    heads, rows = (problem.nheads_kv, problem.group) if config.pack_gqa else (problem.nheads, 1)
    sequences = list(problem.sequences())
    blocks = [_ceil(seq.seqlen_k, config.tile_n) for seq in sequences]
    total = sum(n * _ceil(seq.seqlen_q * rows, config.tile_m) for n, seq in zip(blocks, sequences, strict=True))
    share = np.float32(total) * np.float32(1.1) * np.float32(heads) / np.float32(SMS)
    each = max(1, math.ceil(share))
    return tuple(max(1, min(_ceil(n, each), config.num_splits)) for n in blocks)


def flash2_splits(problem: AttentionProblem) -> int:
    """Return what torch's FlashAttention-2 takes; heads of one query that share a kv head become its rows.

    Packed sequences are split in that case alone.

    >>> flash2_splits(AttentionProblem(1, 1, 1, 200, 5000, 128))
    40
    """
    keys = 256 if problem.head_dim <= 64 else 128 if problem.head_dim <= 128 else 64
    is_swapped = problem.seqlen_q == 1 and problem.group > 1
    if problem.is_varlen and not is_swapped:
        return 1
    heads, rows = (problem.nheads_kv, problem.group) if is_swapped else (problem.nheads, problem.seqlen_q)
    tiles = problem.batch * heads * _ceil(rows, 64)
    blocks = _ceil(problem.seqlen_k, keys)
    if tiles >= _FULL * np.float32(2 * SMS):
        return 1
    most = min(MAX_SPLITS, 2 * SMS, blocks)
    return _first_good(
        tiles, 2 * SMS, most, lambda splits: splits == 1 or _ceil(blocks, splits) != _ceil(blocks, splits - 1)
    )


def flash3_packs(problem: AttentionProblem, tile_m: int, num_splits: int) -> bool:
    """Tell whether FlashAttention-3 packs the heads that share a kv head: always with splits or packed sequences.

    >>> flash3_packs(AttentionProblem(1, 8, 1, 200, 40, 64), 192, 1)
    True
    """
    if num_splits > 1 or problem.group == 1:
        return problem.group > 1
    lengths = (problem.seqlen_q, problem.seqlen_q * problem.group)
    plain, packed = (np.float32(rows) / np.float32(_ceil(rows, tile_m) * tile_m) for rows in lengths)
    return problem.is_varlen or bool(plain < _PACKED * packed)
