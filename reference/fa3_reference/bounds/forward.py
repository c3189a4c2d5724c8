"""A-priori rounding-error bounds, per element of O and LSE, of an attention forward kernel.

The bound is with respect to the operands the kernel saw; quantising them is bounded in
:mod:`fa3_reference.bounds.quantisation`. :class:`KernelModel` says what is assumed of the kernel; for
FlashAttention-3's order that is, in binary32 and per key tile,

    s = wgmma(q, k)        p = ex2(fma(s, c, -M))        O = O * alpha + wgmma(round(p), v)        l = l * alpha + sum p

The derivation is in reference/README.md; comments refer to its steps by number. Everything is evaluated in float64;
``OUTWARD`` covers that evaluation's own rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa3_reference.bounds.device import EX2_REL, EXACT_EX2, FP32_MIN_NORMAL, LG2_REL, RCP_REL, U_FP32
from fa3_reference.bounds.epilogue import combine, finish, in_nats
from fa3_reference.bounds.head import Head, VisitedTile, finite, key_parts, tiles
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.state import VANISHES, State
from fa3_reference.bounds.steps import (
    FLOAT64,
    LN2,
    OUTWARD,
    binary32_error,
    gamma,
    grid,
    last_bit,
    log_error,
    rounded_error,
    rounding_error,
)
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Operands

# Of an unknown order, whose maximum may move with every key: weights meet half of all moves on average, and four times
# the error of ex2 once in 8 keys, beside the additions of the row sum, is no less than half of 2 ulp in each key.
_KEYS_OF_A_STEP = 8
_LIFTED = 2.0**8  # of a weight beyond 1, by the rounding of its row's maximum
_SCALE_OF_P = 2.0**-12  # what e4m3 P is multiplied with is so near to a number of that format: 448 is also 2^8.807
_HOPELESS = 50.0  # of ln of a weight: beyond, only a mean of V rows is known
_SINK_ROUNDINGS = 8
_SINK_APART = 6  # a sum, an inverse and two products more, where a finished O is multiplied by what the sink leaves it
_OFFSET = 9.0  # |log2| at most of what P is multiplied with
_SINK_REACH = 112.0  # binary orders of a sink above the largest key: 2^127 less an offset of e4m3, and room


class ErrorBound(NamedTuple):
    """Bounds of ``|computed - exact|``, element by element; inf where nothing is promised.

    Parameters
    ----------
    out : float64 array of shape ``problem.out_shape``
        Of the output.
    lse : float64 array of shape ``problem.lse_shape``
        Of lse, in nats.
    """

    out: NDArray[np.float64]
    lse: NDArray[np.float64]


def forward_bound(problem: AttentionProblem, operands: Operands, model: KernelModel) -> ErrorBound:
    """Bound the rounding error of every element of O and LSE.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed.
    operands : Operands
        What the kernel saw; float64 arithmetic on their exact values, cost about ten float64 GEMMs.
    model : KernelModel
        Formats, tiling and order of operations of the kernel.

    Returns
    -------
    ErrorBound
        float64. Rows without a visible key: 0 (the kernel must return exactly 0 and -inf, or an lse that is near the
        sink). A sink may be a key of any tile, the first maximum, or what is added to the finished row sum; of a stated
        order it is the last of these, in the first part of split keys. inf where nothing is promised: the lse of a
        sink 2^112 times as heavy as the largest key; rows whose visible Q or K hold NaN or Inf; channels in which a
        visited key's V does; what may overflow the output, the accumulator, a score or a product of scales (the domain,
        in reference/README.md).

    Raises
    ------
    ValueError
        If the model has more than one split and no tile.

    Examples
    --------
    >>> from fa3_reference import prepare
    >>> problem = AttentionProblem(1, nheads=1, nheads_kv=1, seqlen_q=1, seqlen_k=4, head_dim=16)
    >>> x = np.ones(problem.k_shape)
    >>> operands, _ = prepare(problem, np.zeros(problem.q_shape), x, x)
    >>> bound = forward_bound(problem, operands, KernelModel.any_order("fp16", "fp16"))
    >>> bound.out.shape, bool(bound.out.max() < 1e-3)  # O is 1, of which half an ulp is 2^-11
    ((1, 1, 1, 16), True)
    """
    out = np.zeros(problem.out_shape)
    lse = np.zeros(problem.lse_shape)
    with np.errstate(all="ignore"):
        for tile in tiles(problem, operands, model):
            tile.put(out, lse, *_tile_bound(tile, model))
    return ErrorBound(*(np.where(np.isnan(bound), np.inf, bound) for bound in (out, lse)))


def _tile_bound(tile: VisitedTile, model: KernelModel) -> tuple[np.ndarray, np.ndarray]:
    head, rows, visited = tile
    parts = []
    for blocks in key_parts(visited, model):
        state = State(rows.size, head.v.shape[1])
        sink = None if head.sink is None or parts else head.sink[rows]  # the first part has it
        is_key = not model.is_blocked and bool(blocks)
        for keys in blocks:
            _add_block(state, head, rows, keys, model, sink if is_key else None)
        if sink is not None:
            _take_sink(state, sink)
            if not is_key:
                _add_sink(state, sink, model)
        parts.append(finish(state, head, model))
    part = parts[0] if len(parts) == 1 else combine(parts, model)
    error = part.error  # of a binary32 number, which an output in binary32 is
    if model.out_dtype != "fp32":
        error = rounded_error(part.o, error, FORMATS[model.out_dtype])
    error = error + part.noise
    lse_error = in_nats(part, model)
    # An lse of thousands of equal scores is exact but for its last roundings, next to which those of float64 count.
    float64 = FLOAT64 * (visited.stop - visited.start + 8 + 2 * np.abs(part.lse))
    lse_error = np.where(lse_error == 0, 0.0, lse_error + float64)
    empty = head.empty(rows)
    error = np.where(empty[:, None], 0.0, error)
    lse_error = np.where(empty if head.sink is None else empty & np.isneginf(head.sink[rows]), 0.0, lse_error)
    lost = ~np.isfinite(head.v[visited]).all(axis=0)  # 0 * NaN is NaN, also for a row that sees no key
    return np.where(lost, np.inf, error), lse_error


class _Weights(NamedTuple):
    """Weights of one block's keys, (rows, keys) each but for ``unit``.

    ``p`` is exact in the scale of the exact running maximum. The computed one is between p (1 - down) and p (1 + up);
    ``either`` is the larger of the two. ``rounding`` bounds what rounding it to P's format adds, and ``unit`` (rows,
    1) is what the kernel's P is in units of p. ``counts`` (rows,) weights may not be zero; all are multiples of
    ``grid`` (rows,) before they are rounded to P's format, of ``p_grid`` after that, both in units of the kernel.
    """

    p: np.ndarray
    visible: np.ndarray
    either: np.ndarray
    down: np.ndarray
    rounding: np.ndarray
    unit: np.ndarray
    counts: np.ndarray
    grid: np.ndarray
    p_grid: np.ndarray

    def without_last(self) -> _Weights:
        """Return the weights of all keys but the last."""
        of_keys = ("p", "visible", "either", "down", "rounding")
        return self._replace(**{name: getattr(self, name)[:, :-1] for name in of_keys})


def _take_sink(state: State, sink: np.ndarray) -> None:
    """Let O be a mean of the sink's V as well, which is 0. Where the exponential of a sink that the maximum does not
    hold may overflow, O may be lost, which is next to 0, and no lse is promised; nor where it may vanish in a row
    without a key.
    """
    has_sink = np.logical_not(np.isneginf(sink))
    state.v_min = np.where(has_sink[:, None], np.minimum(state.v_min, 0.0), state.v_min)
    state.v_max = np.where(has_sink[:, None], np.maximum(state.v_max, 0.0), state.v_max)
    state.keys += 1
    reach = np.where(np.isneginf(state.keys_max), np.abs(sink), sink - state.keys_max)  # without a key, from 0
    is_far = has_sink & (reach > _SINK_REACH)
    state.lse_lost |= is_far
    state.o_error = state.o_error + np.where(is_far[:, None], state.oa + state.boa, 0.0)


def _sink_error(sink: np.ndarray, keys: np.ndarray, model: KernelModel) -> np.ndarray:
    """Bound the error of a sink's exponent in log2 units, of which the largest key may be taken as it was rounded or
    once more: log2(e), its product with the sink, the difference, two roundings of the maximum, and what the
    logarithm of a sum adds that is large next to it; and of the sink among scores that are kept in 16 bits their
    rounding.
    """
    size, of_keys = (np.abs(np.where(np.isneginf(x), 0.0, x)) for x in (sink, keys))
    kept = 0.0 if model.scores == "fp32" else FORMATS[model.scores].unit_roundoff
    return (gamma(_SINK_ROUNDINGS) + LG2_REL) * (size + of_keys + _OFFSET) + kept * size


def _add_sink(state: State, sink: np.ndarray, model: KernelModel) -> None:
    """Add a sink to the row sum of all keys, in the scale of their maximum, or of its own where there are none."""
    of_keys = (state.max, state.max_low, state.max_high)
    state.max, state.max_low, state.max_high = (np.where(np.isneginf(x), sink, x) for x in of_keys)
    p = np.exp2(sink - np.where(np.isneginf(state.max), 0.0, state.max))
    r = LN2 * (_sink_error(sink, state.max, model) + 2 * state.tau) + log_error(model.exp_error)
    state.l = state.l + p
    state.l_up = state.l_up + p * np.expm1(r) * OUTWARD
    state.l_down = state.l_down - p * np.expm1(-r) * OUTWARD
    lost = np.where(p > 0, U_FP32 * (state.l + state.l_up + state.l_error), 0.0)
    state.l_error = (state.l_error + lost) * OUTWARD
    state.weights = state.weights + (p > 0)
    state.l_grid = np.where(p > 0, 0.0, state.l_grid)
    state.worst = np.maximum(state.worst, r)
    state.noise = np.maximum(state.noise, FLOAT64 * np.abs(np.where(p > 0, sink, 0.0)))


def _add_block(
    state: State,
    head: Head,
    rows: np.ndarray,
    keys: slice,
    model: KernelModel,
    sink: np.ndarray | None = None,
) -> None:
    """Advance the exact sums and every carried bound by one key block, of an unknown order with the sink as a key."""
    x, dx, noise = head.scores(rows, keys, model)
    state.keys_max = np.maximum(state.keys_max, x.max(1))
    if sink is not None:
        x = np.concatenate([x, sink[:, None]], axis=1)
        dx = np.concatenate([dx, _sink_error(sink, x[:, :-1].max(1), model)[:, None]], axis=1)
        noise = np.maximum(noise, FLOAT64 * np.abs(np.where(np.isneginf(sink), 0.0, sink)))
    state.noise = np.maximum(state.noise, 2 * noise)
    state.outside |= np.isnan(x).any(axis=1, keepdims=True)
    v_factor = float(head.v_factor[keys].min())
    ratio = 1.0 if state.v_factor is None else state.v_factor / v_factor
    state.v_factor = v_factor
    moved = _move_maximum(state, x, dx, np.log2(ratio), model)
    w = _weights(state, x, dx, model, sink is not None)
    rescaled = moved * U_FP32 + (2 * U_FP32 if ratio != 1.0 else 0.0)
    state.outside |= not FP32_MIN_NORMAL <= ratio <= 1 / FP32_MIN_NORMAL
    of_keys = w if sink is None else w.without_last()
    _accumulate(state, head, keys, of_keys, rescaled[:, None], model)
    _add_to_row_sum(state, w, model)
    if sink is not None:  # which O and lse may meet after they are finished
        state.l_error = state.l_error + gamma(_SINK_APART) * state.l


def _move_maximum(state: State, x: np.ndarray, dx: np.ndarray, log_ratio: float, model: KernelModel) -> np.ndarray:
    """Take a block's scores into the running maximum (step 2) and rescale; return where alpha may not be 1."""
    offset = model.largest_offset_log2
    new_max = np.maximum(state.max, x.max(1))
    high = np.maximum(state.max_high, (x + dx).max(1))
    low = np.maximum(state.max_low, (x - dx).max(1))
    stays = (x + dx).max(1) <= state.max_low
    moved = ~np.isneginf(state.max) & (~stays | (model.order.rescale == "contracted"))  # else alpha is exactly 1
    reach = np.abs(high) + np.abs(state.max_low) + 2 * offset
    span = high - state.max_low + gamma(2) * reach
    tau = _rounded_maximum(new_max, np.maximum(high - new_max, new_max - low), model)
    if model.is_stated:  # step 3: p and alpha share the rounded maximum
        distance = state.max - new_max
        within = state.tau + tau
        exponent = binary32_error(distance - within, distance + within)
    elif model.order.maxima == "scaled":
        exponent = U_FP32 * span
    else:
        exponent = np.where(stays, U_FP32 * (reach / 2 + span), gamma(2) * (span + reach))
    a = np.where(moved, log_error(model.exp_error) + LN2 * exponent, 0.0)
    state.rescale(new_max, a, moved & (span + abs(log_ratio) > VANISHES))
    state.max_low, state.max_high, state.tau = low, high, np.where(np.isneginf(new_max), 0.0, tau)
    state.moves, state.l_grid = state.moves + moved, np.where(moved, 0.0, state.l_grid)
    visible = ~np.isneginf(x)
    state.largest_score = np.maximum(state.largest_score, np.where(visible, np.abs(x) + dx, 0.0).max(1))
    return moved


def _rounded_maximum(base: np.ndarray, off: np.ndarray, model: KernelModel) -> np.ndarray:
    """Largest distance of the rounded maximum from the exact one, of which the unrounded one is ``off`` away."""
    offset = model.largest_offset_log2
    if model.is_stated:
        return off + binary32_error(base - offset - off, base - offset + off)
    return off + U_FP32 * (np.abs(base) + offset + off)


def _weights(state: State, x: np.ndarray, dx: np.ndarray, model: KernelModel, has_sink: bool = False) -> _Weights:
    """Steps 3 and 4: the weights of a block, their errors, and what rounding them to P's format adds; behind the keys
    may stand a sink.
    """
    base = np.where(np.isneginf(state.max), 0.0, state.max)
    offset = model.p_offset_log2
    tau = state.tau
    visible = ~np.isneginf(x)
    if model.order.exponent == "rounded":
        dx = dx + U_FP32 * (np.abs(x) + dx)
    y = x - base[:, None]
    p = np.exp2(y)
    r = _log_errors(y, dx, tau[:, None], model)
    if not model.is_blocked:
        r = r + _moves(x, _exponent(y, model) + dx + tau[:, None], state, model)
    r = np.where(visible, r, 0.0)
    state.unknown |= r.max(1) > _HOPELESS
    state.worst = np.maximum(state.worst, r.max(1))
    flushed = y + offset - dx - tau[:, None] < -VANISHES
    # The largest computed weight is 2^0 but for the rounding of its maximum.
    cap = np.exp2(2 * U_FP32 * (np.abs(base) + model.largest_offset_log2 + tau)) * (1 + 2 * model.exp_error)
    # A maximum of millions is rounded so far that P leaves its format, and larger ones lift every weight.
    lifted = cap * (2.0**8 if model.order.rescale == "lazy" else 1.0) * 2.0**offset
    largest = np.inf if model.order.weights == "normalised" else model.p_format.max_finite
    state.outside |= ~((lifted <= largest) & (cap <= _LIFTED))[:, None]
    if not model.is_blocked or model.order.rescale == "lazy":
        cap = np.full_like(cap, np.inf)
    up = np.minimum(np.expm1(r) * OUTWARD, (np.exp2(tau) * cap)[:, None] / np.where(p > 0, p, 1.0) - 1.0)
    down = np.where(flushed, 1.0, -np.expm1(-r) * OUTWARD)
    either = np.maximum(up, down)
    low = np.where(flushed, 0.0, p * np.exp(-r))
    high = p * np.exp(r)
    rounding, unit = _p_rounding(low, high, tau, cap, model)
    if model.order.weights == "normalised" and has_sink:  # a finished O may take the sink: P is without it
        apart, _ = _p_rounding(low[:, :-1], high[:, :-1], tau, cap, model)
        rounding[:, :-1] = np.fmax(rounding[:, :-1], apart)
    if not model.is_blocked and model.order.weights == "running":
        rounding = np.fmin(rounding, high * _apart(x, dx, model))
    counts, *grids = _weight_grids(low * 2.0**offset, high * 2.0**offset, np.exp2(tau)[:, None], model)
    if model.order.row_sum_of == "rounded":  # rounding is an error of the weights, of O and the row sum alike
        relative = rounding / np.where(p > 0, p, 1.0)
        either = either + relative
        down = np.minimum(down + relative, 1.0)
        rounding = np.zeros_like(p)
    return _Weights(p, visible, either, down, rounding, unit, counts, *grids)


def _weight_grids(low: np.ndarray, high: np.ndarray, shift: np.ndarray, model: KernelModel) -> list[np.ndarray]:
    """Number of the weights of a row that may not be zero, and powers of two of which all are multiples, before and
    after they are rounded to P's format."""
    if not model.is_stated:
        return [np.zeros(len(low))] * 3
    low = low / shift
    high = np.where(high * shift < FP32_MIN_NORMAL, 0.0, high * shift)
    return [(high > 0).sum(1), *(grid(low, high, fmt).min(1) for fmt in (FORMATS["fp32"], model.p_format))]


def _log_errors(y: np.ndarray, dx: np.ndarray, tau: np.ndarray, model: KernelModel) -> np.ndarray:
    """|ln of a weight's error| at most where the blocks are known (step 3), ``y`` log2 units below the maximum."""
    exponent = y + model.p_offset_log2
    within = dx + tau
    exp = log_error(model.exp_error)
    if not model.is_stated:
        return LN2 * (dx + U_FP32 * (_exponent(y, model) + within)) + exp
    r = LN2 * (dx + binary32_error(exponent - within, exponent + within)) + exp
    # Nothing that is correct to 2^-22.7 errs at an integer, which is where an exponent ends that is so near to it.
    is_largest = (np.abs(y) + within < EXACT_EX2) & (model.exp_error <= EX2_REL)
    return np.where(is_largest, np.minimum(r, LN2 * (np.abs(y) + tau)), r)


def _exponent(y: np.ndarray, model: KernelModel) -> np.ndarray:
    """|exponent| at most of a weight ``y`` log2 units below its maximum, whatever P is multiplied with."""
    return np.maximum(np.abs(y + model.p_offset_log2), np.abs(y + model.largest_offset_log2))


def _moves(x: np.ndarray, distance: np.ndarray, state: State, model: KernelModel) -> np.ndarray:
    """Return what the factors of moved maxima add to ln of a weight where the blocks are not known: exponents
    telescope.
    """
    keys = (~np.isneginf(x)).sum(1)
    times = np.zeros(keys.shape) if model.order.weights == "normalised" else -(-keys // _KEYS_OF_A_STEP)
    largest = state.largest_score if model.order.maxima == "unscaled" else np.zeros(keys.shape)
    return (times * log_error(model.exp_error))[:, None] + gamma(3) * LN2 * (distance + 2 * largest[:, None])


def _p_rounding(
    low: np.ndarray, high: np.ndarray, tau: np.ndarray, cap: np.ndarray, model: KernelModel
) -> tuple[np.ndarray, np.ndarray]:
    """Bound on |round(p^) - p^| in the scale of the exact maximum, for p^ in [low, high] there; and P's unit."""
    fmt = model.p_format
    if model.is_blocked and model.order.rescale != "lazy":  # step 4
        unit = 2.0**model.p_offset_log2
        shift = np.exp2(tau)[:, None]
        low = unit * low / shift
        high = unit * np.minimum(high * shift, cap[:, None])
        return rounding_error(low, high, fmt) * shift / unit * OUTWARD, np.full((len(tau), 1), unit)
    least = low.sum(1)[:, None]
    largest = high.sum(1)[:, None]
    if model.order.weights == "normalised":
        own = 1 + gamma(low.shape[1] + 4) + RCP_REL
        rounding = rounding_error(low / largest / own, high / least * own, fmt) * largest
        return rounding * OUTWARD, 1 / largest
    # Whatever the scale, P is not smaller than normalised, or than in that of the largest maximum where it is not; and
    # rounding to nearest costs no more than P itself.
    unit = 1 / largest if model.order.weights == "any" else np.exp2(-tau)[:, None]
    rounding = np.minimum(fmt.unit_roundoff * high + fmt.min_subnormal / 2 / unit, high)
    return rounding * OUTWARD, unit


def _apart(x: np.ndarray, dx: np.ndarray, model: KernelModel) -> np.ndarray:
    """Return how far, relative to it, a running weight may lie from what P is multiplied with, (rows, 1).

    Every maximum that a weight meets is that of some visible keys, of its own alone where it is the only one; and
    rounding to nearest moves no number by more than its distance from one of the format.
    """
    visible = ~np.isneginf(x)
    lowest = np.where(visible, x - dx, np.inf).min(1)
    highest = np.where(visible, x + dx, -np.inf).max(1)
    spread = np.where(visible.sum(1) > 1, highest - lowest, 0.0)
    largest = np.maximum(np.abs(lowest), np.abs(highest)) + model.largest_offset_log2
    distance = LN2 * (spread + gamma(6) * largest) + log_error(model.exp_error)
    return (np.expm1(distance) * OUTWARD + (_SCALE_OF_P if model.probabilities == "e4m3" else 0.0))[:, None]


def _accumulate(state: State, head: Head, keys: slice, w: _Weights, rescaled: np.ndarray, model: KernelModel) -> None:
    """P V of one block (step 5)."""
    v = head.v_rows(keys)
    factor = head.v_factor[keys][:, None]
    fmt = model.core.operand
    p = w.p
    n = w.p.shape[0]
    d = head.v.shape[1]
    v_abs = np.abs(v)
    seen = w.visible.any(axis=1, keepdims=True)
    state.v_min = np.where(seen, np.minimum(state.v_min, _seen(w.visible, v, np.inf).min(0)), state.v_min)
    state.v_max = np.where(seen, np.maximum(state.v_max, _seen(w.visible, v, -np.inf).max(0)), state.v_max)
    sums = np.concatenate([p, p * w.either]) @ np.concatenate([v, v * v], axis=1)
    absolute = np.concatenate([p, p * w.either, w.rounding]) @ v_abs
    pa = absolute[:n]
    ba = absolute[n : 2 * n]
    da = absolute[2 * n :]
    carried = np.abs(state.o) + state.boa + state.o_error  # |C| at most, after rescaling
    added = (pa + ba + da) * OUTWARD  # sum of |P^ v|
    largest = p * (1 + w.either) + w.rounding
    # Products are aligned by their operands' exponents, and a subnormal operand's is that of the least normal number.
    clamped_p = np.where(largest > 0, np.maximum(largest, fmt.min_normal / w.unit), 0.0)
    clamped_v = np.where(v != 0, np.maximum(v_abs, fmt.min_normal * factor), 0.0)
    largest_product = np.minimum(clamped_p @ clamped_v, clamped_p.max(1)[:, None] * clamped_v.max(0)) * OUTWARD
    aligned = np.maximum(largest_product, added)
    # A whole tile is multiplied, though its last keys are padding; of an unknown tile there are the keys.
    steps = _steps(max(model.tile_n, len(v)), model)
    exact = _exact(state, head.v[keys], w, (carried, added, largest_product), rescaled > 0, steps, model)
    reached = np.abs(state.o + sums[:n, :d]) + state.boa + state.o_error + ba + da  # |O| at most, unless more is lost
    sizes = carried, added, aligned, reached
    lost = _cut(sizes, (w.visible.sum(1)[:, None], steps), rescaled > 0, exact, model)
    lost = lost + carried * rescaled * OUTWARD
    # Outside a tensor core each product may vanish below the normal range, and each sum.
    vanished = 3 + (2 * w.visible.sum(1)[:, None] if model.accumulator != "wgmma" else 0)
    lost += (vanished * model.tiny + steps * model.core.tiny) * factor.max() / w.unit
    state.keys += len(v)
    is_running = model.order.weights != "normalised"
    lift = 2.0**8 if is_running and model.order.rescale == "lazy" else 1.0
    every = state.keys * 2 * lift * np.maximum(np.abs(state.v_min), np.abs(state.v_max))
    if model.is_blocked or not is_running:
        reached = np.fmin((carried + added + lost) * lift, every * _LIFTED) * w.unit
    else:  # a sum may be largest while the maximum is still small
        reached = every * np.minimum(np.exp2(2 * state.tau), _LIFTED)[:, None]
    state.outside |= ~(reached < 2.0**126 * factor.min())
    state.o_error = (state.o_error + da + lost) * OUTWARD
    state.share += _share(len(v), model)
    state.o = state.o + sums[:n, :d]
    state.o2 = state.o2 + sums[:n, d:]
    state.oa = state.oa + pa
    state.bo = state.bo + sums[n:, :d]
    state.bo2 = state.bo2 + sums[n:, d:]
    state.boa = state.boa + ba


def _steps(keys: int, model: KernelModel) -> int:
    """Steps of the tensor core that add so many products, of which an order that is not known may leave half empty."""
    return -(-keys // (model.core.k_step // (2 if model.accumulator == "either" else 1)))


class _Exact(NamedTuple):
    """Says where, (rows, channels), products and C lie on the grid of every step, results need no cut, and binary32
    sums no rounding.
    """

    products: np.ndarray
    sums: np.ndarray
    promotion: np.ndarray


def _exact(
    state: State,
    v: np.ndarray,
    w: _Weights,
    sizes: tuple[np.ndarray, ...],
    rescaled: np.ndarray,
    steps: int,
    model: KernelModel,
) -> _Exact:
    """Return where P V of a block is exact, because all addends are multiples of one power of two.

    The state keeps that power of two for O. ``sizes`` are upper bounds of C, of the sum of |P^ v| and of the largest
    product.
    """
    if not model.is_stated:
        return _Exact(*[np.zeros(state.o.shape, bool)] * 3)
    core = model.core
    promoted = bool(model.promotion_interval)
    scale = w.unit / state.v_factor * np.exp2(state.tau)[:, None]  # takes sizes to units of the kernel
    carried, added, largest = (x * scale for x in sizes)
    least = (np.abs(state.o) - state.boa - state.o_error) * scale * np.exp2(-2 * state.tau)[:, None]
    ulp = np.where(least > 0, np.ldexp(1.0, np.maximum(np.frexp(least)[1] - 24, -149)), 2.0**-149)
    state.o_grid = np.where(rescaled, 0.0 if promoted else ulp, state.o_grid)  # an fma does not round C alone
    products = w.p_grid[:, None] * last_bit(finite(v)).min(0)
    state.o_grid = np.minimum(state.o_grid, products)
    chain, before = (products, 0.0) if promoted else (state.o_grid, carried)
    total = before + added
    on_grid = chain >= core.align * np.maximum(largest, total if steps > 1 else before)
    return _Exact(on_grid, total < 2 * chain / core.out, carried + added < state.o_grid / U_FP32)


def _share(keys: int, model: KernelModel) -> float:
    """Return what roundings of P and cuts of P V take of one block at most, relative to the row sum times the largest
    |v|.
    """
    tiny = keys * model.p_format.min_subnormal / 2.0**model.p_offset_log2
    tree = 0.0 if model.accumulator == "wgmma" else gamma(keys + 2, model.addition)
    if model.accumulator not in ("wgmma", "either"):
        return tiny + tree
    steps = _steps(keys, model)
    return tiny + tree + 2 * ((keys + steps) * model.core.align + steps * model.core.out + 4 * U_FP32)


def _seen(visible: np.ndarray, v: np.ndarray, otherwise: float) -> np.ndarray:
    """Rows of V that some row of the block sees; a wider range than each row's own."""
    return np.where(np.logical_or.reduce(visible, axis=0)[:, None], v, otherwise)


def _cut(
    sizes: tuple[np.ndarray, ...],
    counts: tuple[np.ndarray, int],
    rescaled: np.ndarray,
    exact: _Exact,
    model: KernelModel,
) -> np.ndarray:
    """Return what an accumulator loses of a block's products and of C; ``counts`` are of visible keys and of wgmma
    steps.
    """
    (carried, added, aligned, reached), (keys, steps) = sizes, counts
    core = model.core
    if model.accumulator != "wgmma":
        unit = gamma(1, model.addition)
        tree = gamma(int(keys.max()) + 1, unit) * (added + np.where(added > 0, carried, 0.0))
        return np.maximum(tree, _grouped(sizes, counts, model)) if model.accumulator == "either" else tree
    chunks = model.tile_n // model.promotion_interval if model.promotion_interval else 0
    top = carried + added
    # inside a promoted chain |C| is at most the products so far
    chain_top = added if chunks else top
    products = np.minimum(keys * core.align * np.maximum(chain_top, aligned), added) + steps * core.align * aligned
    if not chunks and core.out_bits < 23:
        products = products + np.where(rescaled, core.out * carried, 0.0)
    sums = np.minimum(steps * core.out * chain_top, 8 * added)
    lost = np.where(exact.products, 0.0, products) + np.where(exact.sums, 0.0, sums)
    if chunks:
        rounded_sum = reached if chunks == 1 else top
        inexact = (added > 0) & ~exact.promotion
        lost = lost + np.where(inexact, chunks * U_FP32 * (rounded_sum + lost), 0.0)
    return lost


def _grouped(sizes: tuple[np.ndarray, ...], counts: tuple[np.ndarray, int], model: KernelModel) -> np.ndarray:
    """Return what the tensor core loses where neither its groups are known nor how many of them are chained: products
    and C are cut in each, then their sum, which may move to binary32.
    """
    (carried, added, aligned, _), (keys, steps), core = sizes, counts, model.core
    top = np.maximum(carried + added, aligned)
    products = np.minimum(keys * core.align * top, added) + steps * core.align * top
    sums = steps * core.out * top + np.where(added > 0, gamma(steps, model.addition) * (carried + added), 0.0)
    # Cut toward zero, a sum stays between those of all positive and of all negative products.
    return np.minimum(products, carried + added) + np.minimum(sums, carried + added)


def _add_to_row_sum(state: State, w: _Weights, model: KernelModel) -> None:
    """The block's share of the row sum (step 6)."""
    added = w.p.sum(1)
    up = (w.p * w.either).sum(1)
    state.l = state.l + added
    state.l_up = state.l_up + up
    state.l_down = state.l_down + (w.p * w.down).sum(1)
    state.weights, state.l_grid = state.weights + w.counts, np.minimum(state.l_grid, w.grid)
    depth = model.row_sum_depth if model.is_blocked else w.p.shape[1]
    total = np.where(added > 0, state.l + state.l_up + state.l_error, 0.0)
    chain = total if model.order.row_sum == "any" else added + up
    lost = gamma(depth) * chain + U_FP32 * total * (1 + gamma(depth))
    state.l_error = (state.l_error + lost) * OUTWARD
