"""Online softmax of one row tile, in the order of a kernel family.

:mod:`fa3_kernels.twin.forward` calls this for every key block of a row tile, then :func:`finalize`. State per row:
``row_max``, the running maximum, and four ``thread_sums``, one per thread of the quad that owns the row.
Our own order (the default :class:`fa3_kernels.plan.order.Order`, which names the others' differences): the maximum M is
in log2 units less the P offset, already rounded to fp32. For each visited key block, with c = softmax_scale * log2(e)
times the descales of the row and of the key tile (rounded in that order), and s the raw masked scores:

1. M_new = max(M, fma(max_j s_j, c, -p_offset_log2))
2. base = 0 where M_new = -inf, else M_new
3. alpha = ex2(M - base)                                  (exactly 1 when the maximum has not moved)
4. p_j = ex2(fma(s_j, c, -base))
5. block sum of lane q: pairs p[8i+2q] + p[8i+2q+1], then over i ascending
6. thread_sums = fma(thread_sums, alpha, block sum)       (p before it is rounded to the operand format)

Alpha is computed from the very numbers that step 4 subtracts, so a rounded maximum costs no accuracy. An alpha that is
computed from unscaled maxima has an error of |M| * 2^-24. At the end row_sum = (t0 + t2) + (t1 + t3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fa3_kernels.plan.order import Order
from fa3_kernels.twin import float32, libdevice, mufu
from fa3_kernels.twin.arithmetic import Arithmetic

NEG_INF = np.float32(-np.inf)
LN2 = np.float32(0.6931471805599453)
LOG2_E = np.float32(1.4426950408889634)


def capped(s: np.ndarray, factor: np.ndarray | np.float32, ex2: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return tanh of scores in units of the cap, 1 - 2 rcp(ex2(s * factor) + 1), float32 in the shape of ``s``."""
    half = mufu.rcp(ex2(s * factor) + np.float32(1))
    return float32.fma(half, np.full_like(half, -2), np.ones_like(half))


@dataclass(slots=True)
class RowState:
    """Running statistics of a tile: ``row_max`` float32 (rows,), ``thread_sums`` float32 (rows, 4)."""

    row_max: np.ndarray
    thread_sums: np.ndarray
    is_new: bool = True

    @classmethod
    def start(cls, rows: int) -> RowState:
        return cls(np.full(rows, NEG_INF, np.float32), np.zeros((rows, 4), np.float32))


def update(
    state: RowState, s: np.ndarray, c: np.ndarray, p_offset_log2: int, arithmetic: Arithmetic, is_guarded: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Advance ``state`` by one key block.

    Parameters
    ----------
    s : float32 (rows, tile_n)
        Raw masked scores, -inf where hidden.
    c : float32 (rows,)
        Finite and > 0; 0 where a family lets it underflow.
    is_guarded : bool
        Whether step 2 is done; otherwise rows that have seen no key give NaN.

    Returns
    -------
    p : float32 (rows, tile_n)
        Unnormalised probabilities before rounding, in [0, 2^p_offset_log2 (1 + 2^-22)] for finite scores.
    alpha : float32 (rows,)
        Factor that moves O to the new maximum.
    """
    order = arithmetic.order
    with np.errstate(invalid="ignore", over="ignore"):
        block_max = float32.row_max(s)
        if order.maxima == "scaled":
            block_max = arithmetic.flushed(float32.fma(block_max, c, np.full_like(c, -p_offset_log2)))
        new_max = float32.fmax(state.row_max, block_max)
        if order.rescale_threshold_log2:
            growth = (new_max - state.row_max) * (np.float32(1) if order.maxima == "scaled" else c)
            new_max = np.where(growth <= np.float32(order.rescale_threshold_log2), state.row_max, new_max)
        base = np.where(new_max == NEG_INF, np.float32(0), new_max) if is_guarded else new_max
        minus = base if order.maxima == "scaled" else _scaled(base, new_max, c, p_offset_log2, arithmetic)
        alpha = _alpha(state, base, minus, c, arithmetic)
        p = arithmetic.exp2_scaled(s, c, minus)
        state.thread_sums = _add(state.thread_sums, alpha[:, None], p, arithmetic)
    state.row_max = new_max
    state.is_new = False
    return p, alpha


def _scaled(
    base: np.ndarray, new_max: np.ndarray, c: np.ndarray, p_offset_log2: int, arithmetic: Arithmetic
) -> np.ndarray:
    """Return what is subtracted from exponents when the maximum is unscaled; rows that saw no key take no P offset."""
    if not p_offset_log2:
        return arithmetic.flushed(base * c)
    minus = float32.fma(base, c, np.full_like(c, -p_offset_log2))
    return np.where((new_max == NEG_INF) & (base == 0), np.float32(0), minus)


def _alpha(state: RowState, base: np.ndarray, minus: np.ndarray, c: np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
    """Return the factor of what was summed so far, in the form of the family."""
    order = arithmetic.order
    if order.compiles_masked_apart and state.is_new:
        return np.ones_like(c)
    if order.rescale_threshold_log2 and order.rescale == "contracted":
        lazy = float32.fma(state.row_max, c, -minus)
        return np.where(state.row_max == base, np.float32(1), arithmetic.ex2(lazy))
    if order.maxima == "scaled":
        return arithmetic.ex2(state.row_max - base)
    if order.rescale == "contracted":
        return arithmetic.ex2(float32.fma(state.row_max, c, -minus))
    return arithmetic.ex2(arithmetic.flushed(state.row_max - base) * c)


def _add(sums: np.ndarray, alpha: np.ndarray, p: np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
    """Return the row sums of the four threads, with a block's weights added."""
    order = arithmetic.order
    p = arithmetic.summed(p)

    def grown(addend: np.ndarray) -> np.ndarray:
        if order.contracts_row_sum:
            return arithmetic.flushed(float32.fma(sums, alpha, addend))
        return arithmetic.flushed(sums * alpha) + addend

    if order.row_sum == "block_pairs":
        return grown(float32.thread_row_sums(p))
    first = float32.first_columns(p)
    if order.row_sum == "running":
        return float32.serial_row_sums(p, grown(first))
    block = float32.serial_row_sums(p, first)
    if order.row_sum == "block_row":
        block = np.repeat(float32.quad_sum(block)[:, None], 4, axis=1)
    return grown(block)


def take_sink(state: RowState, sink: np.ndarray, c: np.ndarray, p_offset_log2: int, arithmetic: Arithmetic) -> None:
    """Add the weight of each row's sink, ex2(log2(e) * sink - M), to its row sum, once the keys are summed.

    Parameters
    ----------
    sink : float32 (rows,)
        Scores in nats, which neither scale nor softcap changes.
    c : float32 (rows,)
        The factor of the block visited last. The maximum of a row that saw no key becomes 0.
    """
    order = arithmetic.order
    with np.errstate(invalid="ignore", over="ignore"):
        state.row_max = np.where(state.row_max == NEG_INF, np.float32(0), state.row_max)
        base = state.row_max
        if order.maxima == "unscaled":
            base = float32.fma(base, c, np.full_like(c, -p_offset_log2))
        exponent = float32.fma(np.full_like(sink, LOG2_E), sink, -base)
        row_sum = float32.quad_sum(state.thread_sums, far_first=order.quad == "far_first")
        row_sum = arithmetic.flushed(row_sum + arithmetic.ex2(arithmetic.flushed(exponent)))
    # the whole sum goes to one thread, so that finalize adds zeros to it
    state.thread_sums = np.stack([row_sum, *np.zeros((3, row_sum.size), np.float32)], axis=1)


def finalize(
    state: RowState, factor: np.ndarray, p_offset_log2: int, arithmetic: Arithmetic, lse_empty: float = -np.inf
) -> tuple[np.ndarray, np.ndarray]:
    """Return (1 / row_sum, lse), both float32 (rows,); lse in the units of :func:`lse_unit`.

    ``factor``, float32 (rows,), takes the maximum to these units where it is in others. A row that saw no key gives (0,
    ``lse_empty``). A NaN row sum gives NaN in both, unless the family treats it as an empty row.
    """
    order = arithmetic.order
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if order.row_sum == "block_row":
            row_sum = state.thread_sums[:, 0]
        else:
            row_sum = float32.quad_sum(state.thread_sums, far_first=order.quad == "far_first")
        empty = row_sum == 0
        if order.hides_nan:
            empty |= np.isnan(row_sum)
        inverse = mufu.rcp(row_sum) if order.inverse == "reciprocal" else np.float32(1) / row_sum
        lse = np.where(empty, np.float32(lse_empty), _lse(state, row_sum, factor, p_offset_log2, arithmetic))
    return np.where(empty, np.float32(0), inverse), lse


def _lse(
    state: RowState, row_sum: np.ndarray, factor: np.ndarray, p_offset_log2: int, arithmetic: Arithmetic
) -> np.ndarray:
    """Return the lse of rows with a key: their maximum and the logarithm of their sum together."""
    order = arithmetic.order
    row_max = state.row_max
    if order.lse == "log2":
        return row_max + mufu.lg2(row_sum)
    if order.lse == "log2_polynomial":
        return (row_max if order.maxima == "scaled" else row_max * factor) + libdevice.log2(row_sum)
    if order.maxima == "unscaled":
        row_sum = row_sum * np.float32(2.0**-p_offset_log2)
    return arithmetic.flushed(float32.fma(row_max, factor, mufu.lg2(row_sum) * LN2))


def lse_unit(order: Order) -> np.float32:
    """Return the factor that takes the lse of :func:`finalize` and of the combine to natural units: ln2, or 1."""
    return LN2 if order.lse.startswith("log2") else np.float32(1)
