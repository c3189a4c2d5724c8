"""Between which ends the outputs of a forward kernel lie, if the tensor core behaves as measured.

The a-priori bound of :mod:`fa3_reference.bounds.forward` charges every operation its worst case. Where a kernel states
its order of operations, most of them have no freedom: binary32 arithmetic rounds to nearest, and the tensor core cuts
as :mod:`fa3_reference.bounds.tensor_core` says. So this module runs the stated program with a range for every number.
S is one number, the weights have the error of the exponential, and P is one number again wherever both ends of a weight
round alike. Only the order of the row sum, the reciprocal and the logarithm widen the ranges further. Rounding to
nearest and the tensor core are monotone, so that the ends of a result are the results of the ends.

The enclosure assumes more than the a-priori bound, and finds smaller faults. It imports no kernel and no twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa3_reference.bounds.device import EX2_REL, FP32_MAX, FP32_MIN_NORMAL, LG2_ABS, LG2_REL, RCP_REL
from fa3_reference.bounds.epilogue import combine
from fa3_reference.bounds.head import Head, VisitedTile, finite, key_parts, tiles
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.state import SplitResult
from fa3_reference.bounds.steps import LN2, LOG2_E, gamma, rounded
from fa3_reference.bounds.tensor_core import multiply, multiply_between
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Operands


class Interval(NamedTuple):
    """Lower and upper ends of numbers, float64 arrays of one shape; -inf and inf where nothing is known."""

    low: NDArray[np.float64]
    high: NDArray[np.float64]

    def each(self, function: Callable[[np.ndarray], np.ndarray]) -> Interval:
        """Return the range of a function that never decreases, over this range of its argument."""
        return Interval(function(self.low), function(self.high))


class Enclosure(NamedTuple):
    """Ranges in which the outputs lie.

    Parameters
    ----------
    out : Interval
        Ends of shape ``problem.out_shape``; they are numbers of the output's format.
    lse : Interval
        Ends of shape ``problem.lse_shape``, in nats.
    """

    out: Interval
    lse: Interval


def can_enclose(model: KernelModel) -> bool:
    """Tell whether a kernel's order is stated far enough for :func:`forward_enclosure`."""
    order = model.order
    is_plain = model.scores == "fp32" and model.probabilities == model.dtype and order.rescale != "lazy"
    is_unknown = order.scale == "folded" or (order.scale == "in_turn" and model.dtype == "e4m3")
    is_known = order.row_sum_of == "weights" and not is_unknown
    return model.is_blocked and not model.quantises.said and is_plain and is_known and model.accumulator == "wgmma"


@np.errstate(all="ignore")
def forward_enclosure(problem: AttentionProblem, operands: Operands, model: KernelModel) -> Enclosure:
    """Enclose every element of O and LSE of a kernel whose order of operations is stated.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed.
    operands : Operands
        What the kernel saw.
    model : KernelModel
        Formats, tiling and order of operations of the kernel.

    Returns
    -------
    Enclosure
        Rows without a visible key have an output of 0 and an lse of -inf. The range is from -inf to inf where a row's Q
        or K, or a visited key's V, is NaN or Inf, and where a score or a sum may overflow.

    Raises
    ------
    ValueError
        If :func:`can_enclose` is false for the model, or for a problem with sinks.

    Examples
    --------
    >>> from fa3_reference import prepare
    >>> problem = AttentionProblem(1, nheads=1, nheads_kv=1, seqlen_q=1, seqlen_k=4, head_dim=64)
    >>> x = np.ones(problem.k_shape)
    >>> operands, _ = prepare(problem, np.zeros(problem.q_shape), x, x)
    >>> out, lse = forward_enclosure(problem, operands, KernelModel("fp16", "fp16", tile_m=64, tile_n=64))
    >>> float(out.low.min()), float(out.high.max())  # all keys weigh alike, and every V is 1
    (1.0, 1.0)
    """
    if not can_enclose(model):
        raise ValueError(f"only a stated order of operations can be enclosed, got {model}")
    if problem.sinks:
        raise ValueError("an enclosure does not know sinks")
    out = Interval(np.zeros(problem.out_shape), np.zeros(problem.out_shape))
    lse = Interval(np.full(problem.lse_shape, -np.inf), np.full(problem.lse_shape, -np.inf))
    for tile in tiles(problem, operands, model):
        for ends in zip(out, lse, *_tile(tile, model), strict=True):
            tile.put(*ends)
    return Enclosure(out, lse)


def _tile(tile: VisitedTile, model: KernelModel) -> tuple[Interval, Interval]:
    # the ranges of O (rows, channels) and of lse (rows,) of one tile
    head, rows, visited = tile
    parts = []
    for blocks in key_parts(visited, model):
        state = _State(rows.size, head.v.shape[1])
        for keys in blocks:
            _add_block(state, head, rows, keys, model)
        parts.append(_finish(state, head, model))
    part = parts[0] if len(parts) == 1 else combine(parts, model)
    fmt = FORMATS[model.out_dtype]
    o = Interval(rounded(part.o - part.error, fmt), rounded(part.o + part.error, fmt))
    width = LN2 * part.lse_error + gamma(2) * (np.abs(part.lse) + part.lse_error)
    log = Interval(LN2 * part.lse - width, LN2 * part.lse + width)
    hidden = head.hidden(rows, slice(0, head.seq.seqlen_k))
    empty = head.empty(rows)
    bad_key = ~(np.isfinite(head.k).all(axis=1) & np.isfinite(head.k_factor))
    bad_row = ~np.isfinite(head.q[rows]).all(axis=1) | np.logical_or.reduce(~hidden & bad_key, axis=1)
    bad_row = bad_row & ~empty
    bad_channel = ~np.isfinite(head.v[visited]).all(axis=0)
    o = _known(o, empty[:, None], 0.0, bad_row[:, None] | bad_channel)
    return o, _known(log, empty, -np.inf, bad_row)


def _known(x: Interval, empty: np.ndarray, value: float, bad: np.ndarray) -> Interval:
    """Return x with the one number ``value`` in empty rows, and from -inf to inf where an end is NaN or ``bad`` is
    true."""
    bad = bad | ((np.isnan(x.low) | np.isnan(x.high)) & ~empty)
    low, high = (np.where(empty, value, end) for end in x)
    return Interval(np.where(bad, -np.inf, low), np.where(bad, np.inf, high))


class _State:
    """Ranges of the running maximum and the row sum (rows,), and of the accumulator (rows, channels)."""

    def __init__(self, rows: int, channels: int) -> None:
        self.max = Interval(np.full(rows, -np.inf), np.full(rows, -np.inf))
        self.sum = Interval(np.zeros(rows), np.zeros(rows))
        self.o = Interval(np.zeros((rows, channels)), np.zeros((rows, channels)))
        self.v_factor: float | None = None  # of the block before


def _f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(np.float64)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a b + c of binary32 numbers, rounded to binary32 once.

    The product is exact in float64. The sum is rounded there to odd, toward a float64 number whose last bit is 1, so
    that rounding it to binary32 gives the same as rounding the exact sum.
    """
    product = a * b
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    is_even = total.view(np.int64) & 1 == 0
    toward = np.where(lost > 0, np.inf, -np.inf)
    return _f32(np.where((lost != 0) & is_even & np.isfinite(total), np.nextafter(total, toward), total))


def _exp2(x: Interval) -> Interval:
    """Return ex2 of a range of binary32 numbers: exact at 0, flushed to 0 below the least normal number.

    EX2_REL exceeds the largest error that was measured by 2^-30, which covers the error of float64's own exponential.
    """
    low = np.where(x.low == 0, 1.0, np.exp2(x.low) * (1 - EX2_REL))
    high = np.where(x.high == 0, 1.0, np.exp2(x.high) * (1 + EX2_REL))
    return Interval(_f32(np.where(low < FP32_MIN_NORMAL, 0.0, low)), _f32(high))


def _times(x: Interval, factor: Interval) -> Interval:
    """Return the product of a range with a range of factors >= 0; exact where both hold binary32 numbers."""
    low = x.low * np.where(x.low >= 0, factor.low, factor.high)
    return Interval(low, x.high * np.where(x.high >= 0, factor.high, factor.low))


def _flushed(x: Interval) -> Interval:
    """Return the range, widened to 0 where one of its numbers is subnormal and may have been flushed."""
    low = np.where((x.low > 0) & (x.low < FP32_MIN_NORMAL), 0.0, x.low)
    return Interval(low, np.where((x.high < 0) & (x.high > -FP32_MIN_NORMAL), 0.0, x.high))


def _factor(head: Head, rows: np.ndarray, keys: slice, model: KernelModel) -> Interval:
    """Return the range of the factor that takes raw scores to log2 units, (rows, 1).

    It is NaN where the keys of a block have several descales of K or V: a stated order does not say what is done then.
    """
    in_turn = model.order.scale == "in_turn"
    c = _f32(np.float64(LOG2_E if in_turn else head.problem.softmax_scale * LOG2_E) * np.ones((rows.size, 1)))
    c = _f32(c * head.q_factor[rows][:, None])
    factors = head.k_factor[keys], head.v_factor[keys]
    one_each = all((factor == factor[0]).all() for factor in factors)
    c = np.maximum(_f32(c * (factors[0][0] if one_each else np.nan)), FP32_MIN_NORMAL)
    if model.order.maxima == "scaled" and model.order.scale in ("float64", "in_turn"):
        return Interval(c, c)
    # The kernel's roundings of the factor, and those above, are in an order that is not stated.
    width = gamma(2 * head.roundings_of_c + 2 * (model.order.scale == "float32"))
    return Interval(_f32(c * (1 - width)), _f32(c * (1 + width)))


def _tanh(s: np.ndarray, c: Interval, cap: float, model: KernelModel) -> Interval:
    """Return tanh of scores s (rows, keys) over the softcap, where c takes the scores to log2 units."""
    if model.tanh_error:
        steep = [end / (cap * LOG2_E) * (1 + sign * gamma(4)) for end, sign in zip(c, (-1, 1), strict=True)]
    else:
        steep = [_f32(end * _f32(np.full(1, 2 / cap))) for end in c]
    x = Interval(*(_f32(s * np.where((s > 0) == up, steep[1], steep[0])) for up in (False, True)))
    if model.tanh_error:
        x = x if model.keeps_subnormals else _flushed(x)
        low, high = (
            np.tanh(end) * (1 + sign * np.sign(end) * model.tanh_error) for end, sign in zip(x, (-1, 1), strict=True)
        )
        return Interval(np.maximum(_f32(low), -1.0), np.minimum(_f32(high), 1.0))
    grown = _exp2(x)
    half = [_f32(1 / _f32(end + 1) * (1 + sign * RCP_REL)) for end, sign in zip(grown, (1, -1), strict=True)]
    return Interval(*(_f32(1 - 2 * end) for end in half))


def _cap_factor(c: Interval, cap: float, model: KernelModel) -> Interval:
    """Return the factor that takes the tanh of capped scores to log2 units, (rows, 1) like the factor of raw ones."""
    width = gamma(2) if model.tanh_error else 0.0
    unit = max(np.float64(np.float32(cap * LOG2_E)), FP32_MIN_NORMAL)
    return Interval(*(np.full_like(c.low, unit * (1 + sign * width)) for sign in (-1, 1)))


def _scores(state: _State, head: Head, rows: np.ndarray, keys: slice, model: KernelModel) -> tuple[Interval, Interval]:
    """Return the scores of a block (rows, keys), -inf where hidden, and the factor (rows, 1) that takes them to log2
    units."""
    # NaN and Inf are replaced here, as :func:`_tile` widens the ranges of all that they reach
    q = finite(head.q[rows])
    k = finite(head.k[keys])
    s = multiply(q, k.T, model.core)
    if model.order.scale == "in_turn":
        s = _f32(s * float(np.float32(head.problem.softmax_scale)))
    c = _factor(head, rows, keys, model)
    cap = head.problem.softcap
    x = Interval(s, s)
    if cap:
        x = _tanh(s, c, cap, model)
        c = _cap_factor(c, cap, model)
    hidden = head.hidden(rows, keys)
    return x.each(lambda end: np.where(hidden, -np.inf, end)), c


def _add_block(state: _State, head: Head, rows: np.ndarray, keys: slice, model: KernelModel) -> None:
    """Run one key block of the program: take it into the running maximum, into O and into the row sum."""
    s, c = _scores(state, head, rows, keys, model)
    p, alpha = _softmax(state, s, c, model)
    v_factor = float(head.v_factor[keys.start])
    # O is kept in units of the block's V descale
    ratio = float(np.float32((state.v_factor or v_factor) / v_factor))
    state.v_factor = v_factor
    rescale = alpha.each(lambda end: _f32(end * ratio)[:, None])
    fmt = FORMATS[model.probabilities]
    overflows = (p.high > fmt.max_finite).any(axis=1) & fmt.has_inf  # e4m3 saturates instead
    codes = p.each(lambda end: rounded(np.minimum(finite(end), fmt.max_finite), fmt))
    state.o = _accumulate(state.o, codes, rescale, finite(head.v[keys]), model)
    steps = model.row_sum_depth + 1
    low, high = (old * a + end.sum(1) for old, a, end in zip(state.sum, alpha, p, strict=True))
    low, high = (np.where(overflows, np.nan, end) for end in (low, high))
    state.sum = Interval(_f32(low * (1 - gamma(steps))), _f32(high * (1 + gamma(steps))))


def _softmax(state: _State, s: Interval, c: Interval, model: KernelModel) -> tuple[Interval, Interval]:
    """Take a block's scores into the running maximum; return the weights (rows, keys) and the factor (rows,) by which
    everything from earlier blocks is multiplied."""
    offset = np.full(1, float(model.p_offset_log2))
    top = [np.max(end, axis=1, keepdims=True) for end in s]
    scaled = [
        _fma(end, np.where((end > 0) == up, c[1], c[0]), -offset) for up, end in zip((False, True), top, strict=True)
    ]
    width = 0.0 if model.order.maxima == "scaled" else gamma(2) * (np.maximum(*map(np.abs, scaled)) + offset)
    block = Interval(_f32(scaled[0] - width)[:, 0], _f32(scaled[1] + width)[:, 0])
    old = state.max
    new = Interval(*(np.maximum(a, b) for a, b in zip(state.max, block, strict=True)))
    base = [np.where(np.isneginf(end), 0.0, end)[:, None] for end in new]
    low = np.where(s.low > 0, c.low, c.high)
    high = np.where(s.high > 0, c.high, c.low)
    if model.order.exponent == "contracted":
        low = _fma(s.low, low, -base[1])
        high = _fma(s.high, high, -base[0])
    else:
        low = _f32(_f32(s.low * low) - base[1])
        high = _f32(_f32(s.high * high) - base[0])
    apart = Interval(_f32(old.low - base[1][:, 0]), np.minimum(_f32(old.high - base[0][:, 0]), 0.0))
    if model.order.maxima == "unscaled":  # the exponent is a difference of raw maxima, which the kernel scales anew
        apart = Interval(*(end * (1 + sign * gamma(3)) for end, sign in zip(apart, (1, -1), strict=True)))
        if model.order.rescale == "contracted":
            width = gamma(2) * np.maximum(*map(np.abs, base))[:, 0]
            apart = Interval(apart.low - width, apart.high + width)
    state.max = new
    return _exp2(Interval(low, high)), _exp2(apart)


def _accumulate(o: Interval, p: Interval, rescale: Interval, v: np.ndarray, model: KernelModel) -> Interval:
    """Return O after one block: O times ``rescale``, plus P V of the block."""
    moved = _times(o, rescale)
    if not model.keeps_subnormals:
        moved = _flushed(moved)
    is_lost = [np.isnan(end) for end in moved]  # infinity times 0
    moved = Interval(np.where(is_lost[0], -np.inf, moved.low), np.where(is_lost[1], np.inf, moved.high))
    interval = model.promotion_interval
    if not interval:
        return Interval(*multiply_between(p.low, p.high, v, model.core, *(_f32(end) for end in moved)))
    one = np.ones(1)
    if model.order.promotion == "rounded":
        moved = moved.each(_f32)
    for start in range(0, len(v), interval):
        ks = slice(start, start + interval)
        part = multiply_between(p.low[:, ks], p.high[:, ks], v[ks], model.core)
        moved = o = Interval(*(_fma(old, one, new) for old, new in zip(moved, part, strict=True)))
    return o


def _finish(state: _State, head: Head, model: KernelModel) -> SplitResult:
    """Return the centre and the radius of O and of the base-2 lse of a part, as :class:`SplitResult` with no noise."""
    total = Interval(state.sum.low * (1 - gamma(2)), state.sum.high * (1 + gamma(2)))
    factor = state.v_factor or 1.0
    inverse = Interval(factor / total.high * (1 - RCP_REL), factor / total.low * (1 + RCP_REL))
    o = _times(state.o, inverse.each(lambda end: end[:, None]))
    lg2 = [np.log2(end) for end in total]
    slack = LG2_ABS + LG2_REL * np.maximum(*map(np.abs, lg2))
    roundings = 4 if model.order.scales_maximum_for_lse else 2
    slack = slack + gamma(roundings) * (np.maximum(*map(np.abs, state.max)) + np.maximum(*map(np.abs, lg2)) + 1)
    lse = Interval(state.max.low + lg2[0] - slack, state.max.high + lg2[1] + slack)
    largest = np.maximum(*map(np.abs, o))
    tiny = 4 * model.tiny * max(1.0, factor) * (1 + 1 / total.low[:, None])
    radius = (o.high - o.low) / 2 + (gamma(3) * largest + tiny)
    seen = state.sum.high != 0
    radius = np.where(largest + radius < FP32_MAX * (1 - 2.0**-10), radius, np.inf)  # may overflow
    middle = (o.low + o.high) / 2
    off = (lse.high - lse.low) / 2
    return SplitResult(
        np.where(seen[:, None], middle, 0.0),
        np.where(seen[:, None], radius, 0.0),
        np.zeros_like(middle),
        np.where(seen, (lse.low + lse.high) / 2, -np.inf),
        np.where(seen, off, 0.0),
    )
