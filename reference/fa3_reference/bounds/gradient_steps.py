"""Steps of the bound of gradients: P of a query head and the slope of its softcap, and the sums behind gradients.

They say how far rounding may take these from the truth. P and the slope are steps B1, B2, B9 and B10 in
reference/README.md; the sums, which are products of rounded P or dS, the addition of parts, softmax_scale and the last
rounding, are steps B6 to B8. :mod:`fa3_reference.bounds.backward` calls them, and dS comes from there; the P of a
forward is in :mod:`fa3_reference.bounds.forward_weights`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa3_reference.bounds.device import FP32_MAX, FP32_MIN_NORMAL, U_FP32
from fa3_reference.bounds.head import TERM_ROUNDINGS
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.bounds.steps import (
    LOG2_E,
    OUTWARD,
    gamma,
    grouped_score_error,
    rounded,
    rounded_error,
    score_error,
    softcap_error,
)
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem

_LARGEST_SUM = 2.0**126  # sum of absolute products below which no partial sum overflows
_SCALE_ROUNDINGS = 3  # of softmax_scale, of log2(e), of their product
_CAP_ROUNDINGS = 3  # more in the argument of a tanh: of the softcap, of the factor made of it, of their product
DIVISION = 8  # roundings of binary32 charged for a reciprocal of, or division by, a row sum and a multiplication


class BackwardHead(NamedTuple):
    """Holds what one query head of one sequence reads, float64, and which pairs are visible.

    With a sink V has one row more, of zeros, and ``visible`` one column more, and so have P and dS. K has no row for
    it: its score is the sink itself.
    """

    q: np.ndarray  # (seqlen_q, head_dim)
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    out: np.ndarray
    lse: np.ndarray  # (seqlen_q,)
    dlse: np.ndarray  # (seqlen_q,)
    visible: np.ndarray  # bool (seqlen_q, seqlen_k)
    sink: float | None = None  # in nats
    term: tuple[np.ndarray, np.ndarray] | None = None  # as :func:`fa3_reference.bounds.head.terms_of` returns it


class Slope(NamedTuple):
    """Holds the slope that a softcap multiplies dS with, 1 - tanh^2 of a score over the softcap, and its error.

    Both are (rows, keys).
    """

    exact: np.ndarray
    error: np.ndarray


class Weights(NamedTuple):
    """The exact P (rows, keys), the ends between which the exponential leaves the kernel's, and the error of the P that
    enters products; and the slope of the softcap, None without one."""

    exact: np.ndarray
    low: np.ndarray
    high: np.ndarray
    stored_error: np.ndarray
    slope: Slope | None


def is_in_range(problem: AttentionProblem) -> bool:
    """Tell whether every factor that any order makes of softmax_scale and softcap is a normal number of binary32."""
    scale = problem.softmax_scale
    cap = problem.softcap
    factors = [scale, scale * LOG2_E]
    if cap > 0:
        factors += [cap, cap * LOG2_E, 2 / cap, scale / cap, 2 * scale * LOG2_E / cap]
    return min(factors) >= FP32_MIN_NORMAL and max(factors) <= FP32_MAX


def weights(problem: AttentionProblem, h: BackwardHead, model: BackwardModel) -> Weights:
    """Steps B1, B2, B9 and B10: return P of one query head, with a column for its sink where it has one.

    Hidden pairs have the P of their score; the caller masks them. NaN where nothing is promised.
    """
    s, ds = kept(*row_products(h.q, h.k, model), model.scores, problem.softmax_scale)
    factor = problem.softmax_scale * LOG2_E
    # s may be flushed
    x = factor * s
    dx = factor * (ds + FP32_MIN_NORMAL)
    if model.dtype == "fp32":  # softmax_scale may have multiplied Q, or its root Q and K, and taken them to 0
        sizes = np.abs(h.q).sum(1)[:, None] + np.abs(h.k).sum(1)
        dx = dx + factor * FP32_MIN_NORMAL / min(1.0, problem.softmax_scale) * sizes
    slope = None
    roundings = _SCALE_ROUNDINGS + (model.exponent == "rounded")  # that one rounds the scaled score as well
    if problem.softcap > 0:
        dx = (dx + gamma(_SCALE_ROUNDINGS + _CAP_ROUNDINGS) * (np.abs(x) + dx) + FP32_MIN_NORMAL) * OUTWARD
        x, dx, slope = _capped(x, dx, problem.softcap, model)
    lost = 0.0 if model.scores == "fp32" else FORMATS[model.scores].unit_roundoff
    if h.term is not None:
        dx = (dx + (gamma(TERM_ROUNDINGS) + 2 * lost) * (np.abs(x) + dx + h.term[1]) + FP32_MIN_NORMAL) * OUTWARD
        x = x + np.where(np.isneginf(h.term[0]), 0, h.term[0])
    if h.sink is not None:
        ends = ((x, h.sink * LOG2_E), (dx, lost * abs(h.sink) * LOG2_E), (s, 0.0), (ds, 0.0))
        x, dx, s, ds = (_beside(of_keys, end) for of_keys, end in ends)
        slope = slope and Slope(_beside(slope.exact, 1.0), _beside(slope.error, 0.0))
    lse = (h.lse * LOG2_E)[:, None]
    dx = dx + gamma(roundings) * (np.abs(x) + dx) + gamma(2) * np.abs(lse)
    x = x - lse
    dx = (dx + U_FP32 * (np.abs(x) + dx) + FP32_MIN_NORMAL * (np.abs(s) + ds)) * OUTWARD
    if model.forward == "own":
        dx = _with_own_lse(x, dx, h.visible, model.exp_error)
    low = np.where(x - dx < -126, 0.0, np.exp2(x - dx) * (1 - model.exp_error) / OUTWARD)
    high = np.where(x + dx < -126, 0.0, np.exp2(x + dx) * (1 + model.exp_error) * OUTWARD)
    exact = np.exp2(x)
    high = np.where(x + dx >= 128, np.inf, high)
    down, up = (rounded(end, model.weight) for end in (low, high))
    error = np.maximum(up - exact, exact - down)
    if model.accumulator != "wgmma":
        error = np.maximum(error, high - exact)  # P may enter in a better format; exact - low is no larger
    if model.forward == "own":  # P may have been rounded in the scale of a running maximum, before the division
        error = np.maximum(error, high - exact + model.weight.unit_roundoff * high + model.weight.min_subnormal)
    return Weights(exact, low, high, error, slope)


def _beside(of_keys: np.ndarray, of_sink: float) -> np.ndarray:
    """Return the numbers of all pairs (rows, keys), with a last column that holds the sink's number in every row."""
    return np.column_stack([of_keys, np.full(len(of_keys), of_sink)])


def _capped(
    x: np.ndarray, dx: np.ndarray, softcap: float, model: BackwardModel
) -> tuple[np.ndarray, np.ndarray, Slope]:
    """Step B10: return capped scores in log2 units, their error before they meet the softcap again, and the slope.

    ``x`` and ``dx`` are the scores in log2 units and their errors. Where the model allows either tanh the larger error
    counts.
    """
    unit = softcap * LOG2_E
    tanhs = {model.tanh_error, 0.0} if model.scales == "any" else {model.tanh_error}
    found = [softcap_error(x, dx, softcap, error) for error in tanhs]
    capped = found[0][0]
    dx_capped = np.maximum.reduce([error for _, error in found])
    tanh = np.abs(capped) / unit
    error = dx_capped / unit
    larger = np.minimum(tanh + error, 1.0)
    smaller = np.maximum(tanh - error, 0.0)
    slope = 1.0 / np.square(np.cosh(x / unit))
    error = np.maximum((larger - tanh) * (larger + tanh), (tanh - smaller) * (tanh + smaller))
    error = error + U_FP32 * np.square(larger) + gamma(3) * (slope + error) + 2.0**-50
    return capped, dx_capped, Slope(slope, error * OUTWARD)


def _with_own_lse(x: np.ndarray, dx: np.ndarray, visible: np.ndarray, exp_error: float) -> np.ndarray:
    """Step B9: return the error of exponents in log2 units where the lse is the kernel's own.

    ``x`` are exponents less the exact lse and ``dx`` their errors. Only visible keys enter the row sum.
    """
    keys = visible.sum(1, keepdims=True)
    dx = (dx + 4 * U_FP32 * (np.abs(x) + dx + np.log2(keys))) * OUTWARD
    more = np.where(visible, np.exp2(x + dx), 0).sum(1, keepdims=True)
    of_sum = np.log2(more) + 2.0**-44  # the exact P sum to 1, so that log2 of the sum rises more than it may fall
    own = -np.log2(1 - exp_error) - LOG2_E * np.log1p(-gamma(x.shape[1] + DIVISION))
    return (dx + of_sum + own) * OUTWARD


def kept(s: np.ndarray, ds: np.ndarray, form: str, scale: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return S or dP and its error, in the format ``form`` in which it is kept between two products.

    S is rounded before and after its scaling, by ``scale``; dP once, with a scale of 0. The error is NaN where the
    format may overflow.
    """
    if form == "fp32":
        return s, ds
    fmt = FORMATS[form]
    roundings = 2 if scale else 1
    ds = ds + gamma(roundings, fmt.unit_roundoff) * (np.abs(s) + ds)
    ds = (ds + fmt.min_subnormal * (1 + 1 / scale if scale else 1)) * OUTWARD
    return s, np.where((np.abs(s) + ds) * max(1, scale) > fmt.max_finite, np.nan, ds)


def row_products(a: np.ndarray, b: np.ndarray, model: BackwardModel) -> tuple[np.ndarray, np.ndarray]:
    """Return the exact products of the rows of a and b, (rows of a, rows of b), and the error of their sums.

    Both are NaN where one of the rows is not finite, and where a partial sum may overflow.
    """
    finite_rows, finite_columns = (np.isfinite(x).all(axis=1, keepdims=True) for x in (a, b))
    bad = np.logical_not(finite_rows & finite_columns.T)
    a, b = (np.nan_to_num(x, posinf=0, neginf=0) for x in (a, b))
    size = np.abs(a) @ np.abs(b).T
    depth = a.shape[1]
    bad |= size >= _LARGEST_SUM
    if model.accumulator == "wgmma":
        s, ds = score_error(a, b, model.core)
    else:
        s = a @ b.T
        ds = gamma(depth + SCALED_OPERANDS, model.addition) * size * OUTWARD
        if model.accumulator == "either":
            ds = np.maximum(ds, grouped_score_error(a, b, model.core))
        ds = ds + model.factors * size * OUTWARD + 2 * depth * FP32_MIN_NORMAL * (size > 0)
    ds = ds + depth * 2.0**-52 * size  # what float64 may lose in the truth
    return np.where(bad, np.nan, s), np.where(bad, np.nan, ds)


_OWN = 2.0**-20  # error of float64 sums over that of binary32, 2^-53 / 2^-24, with room for chains of other lengths
SCALED_OPERANDS = 6  # roundings more of a product whose factors softmax_scale, or its root, may have multiplied before


class Sum(NamedTuple):
    """Exact sums, their error so far, and the sums of absolute values that rounding is relative to, one shape each."""

    exact: np.ndarray
    error: np.ndarray
    size: np.ndarray


def product(w: np.ndarray, dw: np.ndarray, x: np.ndarray, model: BackwardModel) -> Sum:
    """Step B6: return w x in one chain of wgmma, or by any tree of additions in binary32.

    ``w`` (m, n) is P or dS and ``dw`` its error; ``x`` (n, channels) is an operand, which is exact.
    """
    size = (np.abs(w) + dw) @ np.abs(x)
    cut = np.zeros(size.shape)
    if model.accumulator != "wgmma":
        relative = gamma(len(x) + SCALED_OPERANDS, model.addition) + model.factors
        cut = relative * size + 2 * len(x) * FP32_MIN_NORMAL * (size > 0)
    if model.accumulator in ("wgmma", "either"):
        cut = np.maximum(cut, _chain_error(w, dw, x, size, model))
    own = size * len(x) * 2.0**-52
    error = (dw @ np.abs(x) + cut + own) * OUTWARD
    return Sum(w @ x, np.where(size + error > FP32_MAX, np.inf, error), size)


def _chain_error(w: np.ndarray, dw: np.ndarray, x: np.ndarray, size: np.ndarray, model: BackwardModel) -> np.ndarray:
    # what a chain of wgmma steps over n loses of w x, (m, channels); arguments as of :func:`product`
    core = model.core
    steps = -(-len(x) // core.k_step)
    promoted = 0.0
    if model.accumulator == "either":  # groups of half a step or more, any of which may move to binary32
        steps = -(-len(x) // (core.k_step // 2))
        promoted = gamma(steps, model.addition)
    least = core.operand.min_normal
    w_power = np.maximum(np.abs(w) + dw, least).max(1, initial=0)
    x_power = np.maximum(np.abs(x), least).max(0, initial=0)
    power = w_power[:, None] * x_power * (size > 0)
    cut = (core.k_step + 1) * core.align * np.maximum(power, size) + core.out * size + core.tiny * (size > 0)
    return steps * cut * (1 + steps * 2.0**-19) + promoted * size


def added(parts: list[Sum], model: BackwardModel, count: int = 0) -> Sum:
    """Step B7: return the sum of parts, added in any order in the model's format of parts.

    A kernel may have cut the same sum into other parts than these, ``count`` at most; 0 stands for as many.
    """
    fmt = FORMATS[model.parts]
    count = count or len(parts)
    if count == 1 and len(parts) == 1:
        return parts[0]
    exact, error, size = (np.sum([getattr(x, name) for x in parts], axis=0) for name in Sum._fields)
    if model.parts == "fp32":
        error = error + gamma(count) * (size + error) + 2 * count * FP32_MIN_NORMAL * (size > 0)
    else:  # every part is rounded, and every sum
        error = error + gamma(count + 1, fmt.unit_roundoff) * (size + error)
        error = error + 2 * count * fmt.min_subnormal * (size > 0)
    return Sum(exact, np.where(size + error > fmt.max_finite, np.inf, error) * OUTWARD, size)


def scaled(x: Sum, scale: float) -> Sum:
    """Step B8: return a sum times softmax_scale, which is rounded to binary32 itself, as is the product."""
    error = x.error + gamma(2) * (np.abs(x.exact) + x.error)
    error = error * scale * OUTWARD + FP32_MIN_NORMAL * (1 + scale) * (x.size > 0)
    size = x.size * scale
    return Sum(x.exact * scale, np.where(size + error > FP32_MAX, np.inf, error), size)


def stored(x: Sum, model: BackwardModel) -> np.ndarray:
    """Return the error of a sum after the last rounding, to the format of the gradients; inf where it is NaN.

    The error of the float64 sums, here and in the truth, is a tiny part (``_OWN``) of the error in binary32, as both
    are relative to the same sums of absolute values. It is added before the last rounding and once more after it.
    """
    error = x.error + FP32_MIN_NORMAL * (x.size > 0)
    own = error * _OWN
    if model.output.name != "fp32":
        error = rounded_error(x.exact, error + own, model.output)
    return np.where(np.isnan(error), np.inf, error + own)
