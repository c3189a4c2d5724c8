"""The combine of split-KV: partial outputs and their lse become one, in the order of a kernel family.

:mod:`fa3_kernels.twin.forward` calls :func:`combine` for every row tile whose keys are split. Ours adds the splits one
after another, with lse in base 2. In FlashAttention-2 and 3 several threads share a row's splits, and lse is natural:
each thread sums its own splits in turn, and the threads add up in a butterfly. FlashAttention-3 is built with fast
mathematics, so that exp(x) is ex2(x * log2 e) and log(x) is lg2(x) * ln2, and it multiplies weights by the inverse of
their sum. FlashAttention-2 calls CUDA's expf and logf, and weighs by exp(lse_i - lse). Sources: csrc flash_fwd_kernel.h
and hopper flash_fwd_combine_kernel.h of Dao-AILab/flash-attention.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from fa3_kernels.twin import float32, libdevice, mufu
from fa3_kernels.twin.arithmetic import Arithmetic
from fa3_kernels.twin.softmax import LN2, LOG2_E, NEG_INF

_THREADS_OF_FLASH2 = 128


def combine(
    o: np.ndarray, lse: np.ndarray, arithmetic: Arithmetic, compiled_head_dim: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Merge split-KV partials.

    Parameters
    ----------
    o : float32 (splits, rows, channels)
        Normalised partial outputs.
    lse : float32 (splits, rows)
        lse of each in base 2, or natural where the family's is; -inf for a split without a visible key.
    compiled_head_dim : int
        Channels of O that the kernel was compiled for; how many threads share a row in FlashAttention-2 depends on it.

    Returns
    -------
    o, lse : float32
        Ours: w_i = ex2(lse_i - max lse); o = sum of fma(o_i, w_i * rcp(sum w), .). A row that is empty in every split
        gives 0 and -inf, in FlashAttention-2 +inf; NaN in one gives NaN.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        top = reduce(float32.fmax, lse, np.full_like(lse[0], NEG_INF))  # passes over NaN; the sum does not
        base = np.where(top == NEG_INF, np.float32(0), top)
        merge = {"in_turn": _in_turn, "flash3": _flash3, "flash2": _flash2}[arithmetic.order.combine]
        return merge(o, lse, base, arithmetic, compiled_head_dim)


def _in_turn(
    o: np.ndarray, lse: np.ndarray, base: np.ndarray, arithmetic: Arithmetic, compiled_head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Merge the splits in our order: one after the other, with weights in base 2."""
    weights = arithmetic.ex2(lse - base)
    total = reduce(np.add, weights)
    inverse = np.where(total == 0, np.float32(0), mufu.rcp(total))
    merged = reduce(
        lambda merged, part: float32.fma(part[0], (part[1] * inverse)[:, None], merged),
        zip(o, weights, strict=True),
        np.zeros_like(o[0]),
    )
    return merged, np.where(total == 0, NEG_INF, base + mufu.lg2(total))


def _shared_sum(weights: np.ndarray, threads: int) -> np.ndarray:
    """Sum over splits, (splits, rows): thread i mod ``threads`` adds split i, then the threads add up in a
    butterfly.
    """
    turns = -(-len(weights) // threads)
    grid = np.zeros((turns * threads, weights.shape[1]), np.float32)
    grid[: len(weights)] = weights
    sums = reduce(np.add, grid.reshape(turns, threads, -1))
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return sums[0]


def _flash3(
    o: np.ndarray, lse: np.ndarray, base: np.ndarray, arithmetic: Arithmetic, compiled_head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Merge the splits in FlashAttention-3's order; splits of weight 0 are left out.

    16 threads share a row of at most 64 channels, otherwise 32.
    """
    weights = arithmetic.ex2(arithmetic.flushed(lse - base) * LOG2_E)
    total = _shared_sum(weights, 16 if o.shape[2] <= 64 else 32)
    empty = (total == 0) | np.isnan(total)
    inverse = np.where(empty, np.float32(0), mufu.rcp(total))
    merged = np.zeros_like(o[0])
    for part, weight in zip(o, arithmetic.flushed(weights * inverse), strict=True):
        grown = arithmetic.flushed(float32.fma(weight[:, None], arithmetic.flushed(part), merged))
        merged = np.where((weight > 0)[:, None], grown, merged)
    top = np.where(total == 0, NEG_INF, base)
    return merged, arithmetic.flushed(float32.fma(mufu.lg2(total), LN2, top))


def _flash2(
    o: np.ndarray, lse: np.ndarray, base: np.ndarray, arithmetic: Arithmetic, compiled_head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Merge the splits in FlashAttention-2's order; the head_dim it was compiled for says how many threads share a
    row.
    """
    rows = 4 if compiled_head_dim % 128 == 0 else 8 if compiled_head_dim % 64 == 0 else 16
    most = 1 << (len(o) - 1).bit_length()
    total = _shared_sum(libdevice.exp(lse - base), min(_THREADS_OF_FLASH2 // rows, most))
    empty = (total == 0) | np.isnan(total)
    merged_lse = np.where(empty, np.float32(np.inf), libdevice.log(total) + base)
    merged = np.zeros_like(o[0])
    for part, weight in zip(o, libdevice.exp(lse - merged_lse), strict=True):
        merged = float32.fma(weight[:, None], part, merged)
    return merged, merged_lse
