"""Online softmax of one row tile, in the production order.

State per row: ``row_max`` M, the running maximum in log2 units less the P offset, already rounded to fp32, and four
``thread_sums``, one per lane of the quad that owns the row. For each visited key block, with c = softmax_scale *
log2(e) times the descales of the row and of the key tile (rounded in that order), and s the raw masked scores:

1. M_new = max(M, fma(max_j s_j, c, -p_offset_log2))
2. base = 0 where M_new = -inf, else M_new
3. alpha = ex2(M - base)                                  (exactly 1 when the maximum has not moved)
4. p_j = ex2(fma(s_j, c, -base))
5. block sum of lane q: pairs p[8i+2q] + p[8i+2q+1], then over i ascending
6. thread_sums = fma(thread_sums, alpha, block sum)       (p before it is rounded to the operand format)

Because alpha comes from the very numbers that were subtracted in step 4, a rounded maximum never costs accuracy; taking
alpha from unscaled maxima would leave an error of |M| * 2^-24 in it. At the end: row_sum = (t0 + t2) + (t1 + t3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa3_kernels.twin import float32, mufu
from fa3_kernels.twin.arithmetic import Arithmetic
from fa3_kernels.twin.faults import Fault

NEG_INF = np.float32(-np.inf)
LN2 = np.float32(0.6931471805599453)


@dataclass(slots=True)
class RowState:
    """Running statistics of a tile: ``row_max`` float32 (rows,), ``thread_sums`` float32 (rows, 4)."""

    row_max: np.ndarray
    thread_sums: np.ndarray

    @classmethod
    def start(cls, rows: int, fault: Fault | None = None) -> RowState:
        first = np.float32(-5e4) if fault is Fault.FINITE_SENTINEL else NEG_INF
        return cls(np.full(rows, first, np.float32), np.zeros((rows, 4), np.float32))


def update(
    state: RowState, s: np.ndarray, c: np.ndarray, p_offset_log2: int, arithmetic: Arithmetic
) -> tuple[np.ndarray, np.ndarray]:
    """Advance ``state`` by one key block.

    Parameters
    ----------
    s : float32 (rows, tile_n)
        Raw masked scores, -inf where hidden.
    c : float32 (rows,)
        Finite and > 0.

    Returns
    -------
    p : float32 (rows, tile_n)
        Unnormalised probabilities before rounding, in [0, 2^p_offset_log2 (1 + 2^-22)] for finite scores.
    alpha : float32 (rows,)
        Factor that moves O to the new maximum.
    """
    fault = arithmetic.fault
    with np.errstate(invalid="ignore", over="ignore"):
        block_max = float32.fma(float32.row_max(s), c, np.full_like(c, -p_offset_log2))
        new_max = float32.fmax(state.row_max, block_max)
        base = new_max if fault is Fault.UNGUARDED_INF else np.where(new_max == NEG_INF, np.float32(0), new_max)
        alpha = arithmetic.ex2(state.row_max - base)
        p = arithmetic.exp2_scaled(s, c, base)
        counted = p
        if fault is Fault.MISSING_COLUMN:
            counted = p.copy()
            counted[:, 0] = 0
        block_sums = float32.thread_row_sums(counted)
        state.thread_sums = float32.fma(state.thread_sums, alpha[:, None], block_sums)
        if fault is Fault.FP16_ROW_SUM:
            state.thread_sums = state.thread_sums.astype(np.float16).astype(np.float32)
    state.row_max = new_max
    return p, alpha


def finalize(state: RowState) -> tuple[np.ndarray, np.ndarray]:
    """Return (1 / row_sum, base-2 lse), both float32 (rows,).

    A row that saw no key gives (0, -inf); a NaN row sum gives NaN in both.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        row_sum = float32.quad_sum(state.thread_sums)
        empty = row_sum == 0
        inverse = np.where(empty, np.float32(0), mufu.rcp(row_sum))
        lse_log2 = np.where(empty, NEG_INF, state.row_max + mufu.lg2(row_sum))
    return inverse, lse_log2
