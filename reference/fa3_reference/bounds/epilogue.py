"""From the sums of a row tile to O and LSE: division, logarithm and the combine of splits.

These are steps 7 to 9 of the bound of a forward, in reference/README.md. :mod:`fa3_reference.bounds.forward` calls them
after the last key block; the sums are those of :class:`~fa3_reference.bounds.state.State`.
"""

from __future__ import annotations

import numpy as np

from fa3_reference.bounds.device import EX2_REL, FP32_MAX, LG2_ABS, LG2_REL, RCP_REL, U_FP32
from fa3_reference.bounds.head import Head
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.state import VANISHES, SplitResult, State
from fa3_reference.bounds.steps import (
    CANCELLED,
    FLOAT64,
    LN2,
    LOG2_E,
    OUTWARD,
    binary32_error,
    gamma,
    log_error,
    rounded,
)
from fa3_reference.formats import FORMATS

_EXP = log_error(EX2_REL)
_LN2_REL = abs(float(np.float32(LN2)) / LN2 - 1) * OUTWARD  # relative error of ln 2 in binary32


def finish(state: State, head: Head, model: KernelModel) -> SplitResult:
    """Return the exact O and base-2 lse of one split, with bounds of their errors before the final rounding.

    These are the end of step 3 (from the sums of weights to the error of O) and step 7 (division and logarithm). Rows
    without a visible key have O = 0 with error 0. The error is inf outside the domain.
    """
    row_sum = state.l
    least = state.l - state.l_down
    o = state.o / row_sum[:, None]
    up = state.l_up[:, None]
    # step 3: sum p B |v - O| by Cauchy-Schwarz, from sum p B (v - O)^2, and by the triangle inequality
    spread = state.bo2 - 2 * o * state.bo + o * o * up
    # the float64 error of that difference
    noise = CANCELLED * (state.bo2 + 2 * np.abs(o * state.bo) + o * o * up)
    correlated = np.minimum(np.sqrt(up * (np.maximum(spread, 0.0) + noise)), state.boa + np.abs(o) * up)
    off = np.maximum(state.max_high - state.max, state.max - state.max_low)
    if model.is_blocked:  # the row sum holds the largest weight
        exponent = off + gamma(3) * (np.abs(state.max) + model.p_offset_log2 + off)
        least = np.maximum(least, np.exp2(-exponent) * (1 - model.exp_error))
    least = np.where(least > 0, least, np.nan)  # errors may be as large as the row sum: nothing is known of it
    l_error = _row_sum_error(state, model)
    sigma = (l_error / least)[:, None]
    least = least[:, None]
    # a mean of V moves by no more than the range of V
    shift = np.minimum(correlated / least, state.v_max - state.v_min)
    error = shift + (state.o_error / least + (np.abs(o) + shift) * sigma) / np.where(sigma < 1, 1 - sigma, np.nan)
    coarse = _coarse(state, head, model)
    error = np.where(state.unknown[:, None], coarse, np.fmin(error, coarse))
    divides = (RCP_REL + (1 + head.v_scaled) * U_FP32) * (1 + 2.0**-20)
    is_power = _is_power_of_two(state, l_error, model)[:, None]  # then nothing rounds but a descale of V
    descale_rounds = head.v_scaled and np.frexp(state.v_factor or 1.0)[0] != 0.5
    epilogue = np.where(is_power, descale_rounds * U_FP32, divides)
    if model.dtype == "fp32" and not model.is_blocked:
        epilogue = epilogue + _by_own_lse(state, row_sum + l_error, model)[:, None]
    if head.v_scaled and state.v_factor is not None:  # the inverse row sum times a small descale may be subnormal
        epilogue = epilogue + model.tiny * 2.0**model.p_offset_log2 / state.v_factor * (row_sum + l_error)[:, None]
    error = (error + epilogue * (np.abs(o) + error)) * OUTWARD + 2 * model.tiny * max(1.0, state.v_factor or 1.0)
    noise = 2 * ((state.noise + FLOAT64 * state.keys) / row_sum)[:, None] * state.oa
    lse, lse_error = _log(state, row_sum, least[:, 0], sigma[:, 0], is_power[:, 0], model)
    empty = row_sum == 0
    o, error, noise = (np.where(empty[:, None], 0.0, value) for value in (o, error + noise, noise))
    error = np.where(state.outside | ~(np.abs(o) + error < FP32_MAX * (1 - 2.0**-10)), np.inf, error)
    lse_error = np.where(state.outside.all(1) | state.lse_lost, np.inf, np.where(empty, 0.0, lse_error))
    return SplitResult(o, error, noise, lse, lse_error)


def _by_own_lse(state: State, row_sum: np.ndarray, model: KernelModel) -> np.ndarray:
    """Return the relative error (rows,) of weights that are exponentials of scores, or of the lse of parts, less lse.

    They do not sum to 1, as both lse are rounded, and taken to natural units and back. Beside a P of 16 bits or fewer
    that is next to nothing; where P stays in binary32 and scores are far from 0 it is what O errs by most.
    """
    size = np.abs(state.max) + np.abs(np.log2(np.maximum(row_sum, 1.0)))
    logs = LG2_ABS + LG2_REL * size
    return np.expm1(LN2 * (gamma(6) * size + 2 * logs) + 2 * log_error(model.exp_error)) * OUTWARD


def _row_sum_error(state: State, model: KernelModel) -> np.ndarray:
    """Return the error (rows,) of adding the weights (step 6), with the two additions between the threads of a row."""
    weights = state.l + state.l_up
    error = state.l_error + gamma(2) * (weights + state.l_error)
    if not model.is_stated:
        return error
    # A sum of n numbers has n - 1 additions, and none rounds where all are multiples of one power of two.
    roundings = (state.weights - 1 + state.moves) * U_FP32
    error = np.minimum(error, np.where(roundings < 0.5, roundings / (1 - roundings), np.inf) * weights)
    total = weights * np.exp2(state.tau + model.p_offset_log2)
    return np.where(total < state.l_grid / U_FP32, 0.0, error)


def _is_power_of_two(state: State, l_error: np.ndarray, model: KernelModel) -> np.ndarray:
    """Return which row sums are known to be a power of two of at least 1, bool (rows,): rcp and lg2 are exact there."""
    if not model.is_stated:
        return np.zeros(l_error.shape, bool)
    low = state.l - state.l_down - l_error
    high = state.l + state.l_up + l_error
    ends = low * np.exp2(-state.tau), high * np.exp2(state.tau)  # in the scale of a rounded maximum
    low, high = (rounded(x * 2.0**model.p_offset_log2, FORMATS["fp32"]) for x in ends)
    return (low == high) & (np.frexp(low)[0] == 0.5) & (low >= 1)


def _coarse(state: State, head: Head, model: KernelModel) -> np.ndarray:
    """Step 9: bound the error of O, (rows, channels), where next to nothing is known of the weights.

    O is a mean of V rows all the same, apart from the rounding of P and the cuts of P V. inf where these may take half.
    """
    largest = np.maximum(np.abs(state.v_min), np.abs(state.v_max))
    largest = np.maximum(largest, model.core.operand.min_normal * (state.v_factor or 1.0))
    relative = model.p_format.unit_roundoff + state.share + gamma(head.seq.seqlen_k + 4)
    return (state.v_max - state.v_min + largest * relative * 1.01) if relative < 0.5 else np.full_like(largest, np.inf)


def _log(
    state: State,
    row_sum: np.ndarray,
    least: np.ndarray,
    sigma: np.ndarray,
    is_exact: np.ndarray,
    model: KernelModel,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the base-2 lse of a split and the bound of its error before it is taken to nats, (rows,) each.

    ``least`` is the least row sum that the kernel's weights may have, ``sigma`` the relative error of adding them, and
    ``is_exact`` says where lg2 of the row sum is exact.
    """
    lse = state.max + np.log2(row_sum)
    log_l = np.maximum(np.log1p(state.l_up / row_sum), -np.log(least / row_sum))
    worst = state.worst + 2.0**-80  # the second term is for weights that are flushed
    if model.order.row_sum_of == "rounded":
        lost = model.p_format.unit_roundoff + state.keys * model.p_format.min_subnormal / 2
        worst = worst - np.log1p(-lost)  # NaN where nothing is left
    log_l = np.where(state.unknown, worst, np.fmin(log_l, worst))
    log_l = log_l + sigma / np.where(sigma < 1, 1 - sigma, np.nan)
    offset = model.largest_offset_log2
    magnitude = np.abs(np.log2(row_sum)) + offset + (state.max_high - state.max_low) + log_l * LOG2_E
    magnitude = magnitude + U_FP32 * (np.abs(state.max) + offset)
    error = log_l * LOG2_E + np.where(is_exact, 0.0, LG2_ABS + LG2_REL * magnitude)
    if model.order.scales_maximum_for_lse:
        error = error + gamma(3) * state.largest_score
    if model.is_stated:
        adds_zero = (state.tau == 0) & (state.max == model.p_offset_log2)
        rounding = np.where(adds_zero, 0.0, binary32_error(lse - error, lse + error))
    else:
        rounding = U_FP32 * (np.abs(lse) + error)
    return lse, (error + rounding) * OUTWARD


def in_nats(part: SplitResult, model: KernelModel) -> np.ndarray:
    """Return the bound of the error of the natural lse, (rows,), after the multiplication by ln 2, which is rounded
    itself."""
    lse = np.abs(part.lse) * LN2
    error = LN2 * part.lse_error
    if not model.is_stated:
        return (error + gamma(2) * (lse + error)) * OUTWARD
    constant = _LN2_REL * (lse + error)
    error = error + constant
    return (error + binary32_error(lse - error, lse + error)) * OUTWARD


def combine(parts: list[SplitResult], model: KernelModel) -> SplitResult:
    """Step 8: return O and base-2 lse of all splits together, with bounds of their errors.

    ``parts`` are the results of :func:`finish`, one for each split and two or more.
    """
    o, error, noise, lse, lse_error = (np.stack(x) for x in zip(*parts, strict=True))
    top = lse.max(0)
    w = np.exp2(lse - top)  # (splits, rows)
    distance = np.where(w > 0, np.abs(lse - top) + lse_error + lse_error.max(0), 0.0)
    is_top = lse - lse_error > np.where(np.eye(len(parts), dtype=bool)[..., None], -np.inf, lse + lse_error).max(1)
    weighed = np.where(is_top & model.is_stated, 0.0, LN2 * U_FP32 * distance + _EXP)  # the exponential of 0 is exact
    omega = LN2 * lse_error + weighed
    vanishes = distance + np.log2(len(parts)) > VANISHES
    up = np.maximum(np.expm1(omega), vanishes)
    total = w.sum(0)
    least = (w * np.where(vanishes, 0.0, np.exp(-omega))).sum(0)
    merged = (w[..., None] * o).sum(0) / total[:, None]
    least = least[:, None]
    grow = (w * up)[..., None] * np.abs(o - merged) + (w * np.exp(omega))[..., None] * error
    size = ((w * np.exp(omega))[..., None] * (np.abs(o) + error)).sum(0) / least
    # a product and an addition of each part
    roundings = (gamma(2 * len(parts) + (not model.is_stated)) + RCP_REL) * (1 + 2.0**-20)
    merged_error = (grow.sum(0) / least + roundings * size) * OUTWARD
    if model.order.combine == "lse":
        apart = _by_lse(weighed, distance, top * LN2, np.log(total))
        merged_error = merged_error + ((w * np.exp(omega) * apart)[..., None] * (np.abs(o) + error)).sum(0) / least
    merged_error = merged_error + (len(parts) + 1) * model.tiny * (1 + np.abs(o).max(0))
    # 2^-46 is the relative error of float64 weights, as in State
    noise = (w[..., None] * (noise + 2.0**-46 * np.abs(o))).sum(0) / total[:, None]
    merged_lse = top + np.log2(total)
    relative = np.log((w * np.exp(omega)).sum(0) / total) * LOG2_E
    relative = np.maximum(relative, -np.log2(least[:, 0] / total)) + gamma(len(parts) - 1) * LOG2_E
    lg2 = LG2_ABS + LG2_REL * (np.abs(np.log2(total)) + relative)
    lse_out = relative + lg2
    lse_out = lse_out + binary32_error(merged_lse - lse_out, merged_lse + lse_out)
    return SplitResult(merged, merged_error, noise, merged_lse, lse_out * OUTWARD)


def _by_lse(weighed: np.ndarray, distance: np.ndarray, base: np.ndarray, log_total: np.ndarray) -> np.ndarray:
    """Return the relative error of weights exp(lse_i - lse), (splits, rows), apart from the errors of the lse_i.

    It has three sources: the sum of the weights, whose logarithm is the lse of all splits; that logarithm and its
    rounding; and a second exponential. ``base`` and ``log_total`` are natural logarithms: the largest lse_i, and the
    sum of weights relative to it. Such kernels take CUDA's expf twice. Each is charged as ex2, though expf errs by up
    to 4 % more: the reciprocal that the caller charges, and this order does not take, is eight times those 4 %.
    """
    sums = weighed.max(0) + gamma(len(weighed) - 1)
    shift = sums + LN2 * (LG2_ABS + LG2_REL * (log_total * LOG2_E + sums))
    size = np.abs(base + log_total) + shift
    shift = shift + U_FP32 * (1 + U_FP32) * size
    again = LN2 * U_FP32 * (distance + np.log2(len(weighed)) + shift * LOG2_E) + _EXP
    return np.expm1(again + shift) * OUTWARD
