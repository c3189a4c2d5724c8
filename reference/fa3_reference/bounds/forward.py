"""A-priori bound of the rounding error of every element of O and LSE of an attention forward kernel.

The bound is about the operands that the kernel saw. What quantising them costs is bounded in
:mod:`fa3_reference.bounds.quantisation`, and a call that rotates or dequantises them has the bound of
:mod:`fa3_reference.bounds.calls`. A :class:`KernelModel` says what is assumed of the kernel. For FlashAttention-3's
order that is, in binary32 and per key tile,

    s = wgmma(q, k)        p = ex2(fma(s, c, -M))        O = O * alpha + wgmma(round(p), v)        l = l * alpha + sum p

A sink is one more term of a row's sum; sinks are (rows,) in log2 units, -inf where a row has none. The derivation is in
reference/README.md; comments refer to its steps by number. Everything is evaluated in float64; ``OUTWARD`` covers that
evaluation's own rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa3_reference.attention import Positions
from fa3_reference.bounds.device import FP32_MIN_NORMAL, LG2_REL, U_FP32
from fa3_reference.bounds.epilogue import combine, finish, in_nats
from fa3_reference.bounds.forward_sums import accumulate, add_to_row_sum
from fa3_reference.bounds.forward_weights import weights_of
from fa3_reference.bounds.head import Head, VisitedTile, key_parts, tiles
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.state import VANISHES, State
from fa3_reference.bounds.steps import (
    FLOAT64,
    LN2,
    OUTWARD,
    binary32_error,
    gamma,
    log_error,
    stored_error,
)
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Operands

_SINK_ROUNDINGS = 8  # of a sink's exponent, as :func:`sink_error` lists them
_OFFSET = 9.0  # largest |log2| of the factor that P is multiplied with: 448 is 2^8.8
_SINK_REACH = 112.0  # binary orders a sink may be above the largest key: 127, less an offset of e4m3 and room


def take_sink(state: State, sink: np.ndarray) -> None:
    """Note in the state that O is a mean of the sink's V as well, which is 0.

    A sink far above the largest key may overflow in an exponential whose maximum is of the keys alone. O, which is next
    to 0 there, may then be lost, and nothing is promised of lse. The same holds for a sink far from 0 in a row without
    a key.
    """
    has_sink = np.logical_not(np.isneginf(sink))
    state.v_min = np.where(has_sink[:, None], np.minimum(state.v_min, 0.0), state.v_min)
    state.v_max = np.where(has_sink[:, None], np.maximum(state.v_max, 0.0), state.v_max)
    state.keys += 1
    reach = np.where(np.isneginf(state.keys_max), np.abs(sink), sink - state.keys_max)  # without a key, from 0
    is_far = has_sink & (reach > _SINK_REACH)
    state.lse_lost |= is_far
    state.o_error = state.o_error + np.where(is_far[:, None], state.oa + state.boa, 0.0)


def sink_error(sink: np.ndarray, keys: np.ndarray, model: KernelModel) -> np.ndarray:
    """Bound the error (rows,) of a sink's exponent, sink - maximum, in log2 units.

    ``keys`` (rows,) is the largest score of the keys. The roundings are those of log2(e), of its product with the sink,
    of the difference, two of the maximum, one of a factor on P, and what the logarithm of a sum far above 1 adds. Where
    scores are kept in 16 bits the sink is rounded to them too.
    """
    size, of_keys = (np.abs(np.where(np.isneginf(x), 0.0, x)) for x in (sink, keys))
    kept = 0.0 if model.scores == "fp32" else FORMATS[model.scores].unit_roundoff
    return (gamma(_SINK_ROUNDINGS) + LG2_REL) * (size + of_keys + _OFFSET) + kept * size


def add_sink(state: State, sink: np.ndarray, model: KernelModel) -> None:
    """Add a sink to the finished row sum, in the scale of the keys' maximum, or of its own in rows without a key.

    Rows with a sink of -inf stay as they are.
    """
    of_keys = (state.max, state.max_low, state.max_high)
    state.max, state.max_low, state.max_high = (np.where(np.isneginf(x), sink, x) for x in of_keys)
    p = np.exp2(sink - np.where(np.isneginf(state.max), 0.0, state.max))
    r = LN2 * (sink_error(sink, state.max, model) + 2 * state.tau) + log_error(model.exp_error)
    state.l = state.l + p
    state.l_up = state.l_up + p * np.expm1(r) * OUTWARD
    state.l_down = state.l_down - p * np.expm1(-r) * OUTWARD
    lost = np.where(p > 0, U_FP32 * (state.l + state.l_up + state.l_error), 0.0)
    state.l_error = (state.l_error + lost) * OUTWARD
    state.weights = state.weights + (p > 0)
    state.l_grid = np.where(p > 0, 0.0, state.l_grid)
    state.worst = np.maximum(state.worst, r)
    state.noise = np.maximum(state.noise, FLOAT64 * np.abs(np.where(p > 0, sink, 0.0)))


# Roundings more where a finished O is multiplied by the share that the sink leaves it: a sum, an inverse, two products.
_SINK_APART = 6


class ErrorBound(NamedTuple):
    """Bounds of ``|computed - exact|``, element by element; inf where nothing is promised.

    Parameters
    ----------
    out : float64 array of shape ``problem.out_shape``
        Bounds of the output.
    lse : float64 array of shape ``problem.lse_shape``
        Bounds of lse, in nats.
    """

    out: NDArray[np.float64]
    lse: NDArray[np.float64]


@np.errstate(all="ignore")
def forward_bound(
    problem: AttentionProblem, operands: Operands, model: KernelModel, only: Positions = None
) -> ErrorBound:
    """Bound the rounding error of every element of O and LSE.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed.
    operands : Operands
        What the kernel saw. The bound computes on their exact values and costs about ten float64 GEMMs.
    model : KernelModel
        Formats, tiling and order of operations of the kernel.
    only : int array, optional
        Ascending positions of the queries, in every sequence, whose bounds are computed; those of others stay 0.

    Returns
    -------
    ErrorBound
        float64. Rows without a visible key have bound 0: the kernel must return exactly 0, and an lse of -inf or near
        the sink. A kernel of unknown order may take a sink as a key of any tile, as the first maximum, or by adding it
        to the finished row sum; a stated order does the last, in the first part of split keys. The bound is inf where
        nothing is promised: the lse of a sink 2^112 times as heavy as the largest key; rows whose visible Q or K hold
        NaN or Inf; channels in which a visited key's V does; whatever may overflow the output, the accumulator, a score
        or a product of scales ("the domain" in reference/README.md).

    Raises
    ------
    ValueError
        If the problem's cache rotates or dequantises operands, or sinks are missing or not wanted.

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
    for tile in tiles(problem, operands, model, only):
        tile.put(out, lse, *_tile_bound(tile, model))
    return ErrorBound(*(np.where(np.isnan(bound), np.inf, bound) for bound in (out, lse)))


def _tile_bound(tile: VisitedTile, model: KernelModel) -> tuple[np.ndarray, np.ndarray]:
    # bounds of O (rows, channels) and of the natural lse (rows,) of one tile
    head, rows, visited = tile
    parts = []
    for blocks in key_parts(visited, model):
        state = State(rows.size, head.v.shape[1])
        sink = None if head.sink is None or parts else head.sink[rows]  # the first part has it
        # where the order is not known the sink is charged as one key more; else it is added to the finished row sum
        is_key = not model.is_blocked and bool(blocks)
        for keys in blocks:
            _add_block(state, head, rows, keys, model, sink if is_key else None)
        if sink is not None:
            take_sink(state, sink)
            if not is_key:
                add_sink(state, sink, model)
        parts.append(finish(state, head, model))
    part = parts[0] if len(parts) == 1 else combine(parts, model)
    error = stored_error(part.o, part.error, model.out_dtype) + part.noise
    lse_error = in_nats(part, model)
    if head.lse_lost is not None:
        lse_error = lse_error + head.lse_lost[rows] + U_FP32 * np.abs(part.lse)
    # The lse of thousands of equal scores has so small an error in binary32 that float64's own counts beside it.
    float64 = FLOAT64 * (visited.stop - visited.start + 8 + 2 * np.abs(part.lse))
    lse_error = np.where(lse_error == 0, 0.0, lse_error + float64)
    empty = head.empty(rows)
    error = np.where(empty[:, None], 0.0, error)
    lse_error = np.where(empty if head.sink is None else empty & np.isneginf(head.sink[rows]), 0.0, lse_error)
    lost = ~np.isfinite(head.v[visited]).all(axis=0)  # 0 * NaN is NaN, also for a row that sees no key
    return np.where(lost, np.inf, error), lse_error


def _add_block(
    state: State,
    head: Head,
    rows: np.ndarray,
    keys: slice,
    model: KernelModel,
    sink: np.ndarray | None = None,
) -> None:
    """Advance the exact sums and every carried bound by one key block.

    ``sink`` (rows,) is given where the order is not known: the sink is then one key more of the block.
    """
    x, dx, noise = head.scores(rows, keys, model)
    state.keys_max = np.maximum(state.keys_max, x.max(1))
    if sink is not None:
        x = np.concatenate([x, sink[:, None]], axis=1)
        dx = np.concatenate([dx, sink_error(sink, x[:, :-1].max(1), model)[:, None]], axis=1)
        noise = np.maximum(noise, FLOAT64 * np.abs(np.where(np.isneginf(sink), 0.0, sink)))
    state.noise = np.maximum(state.noise, 2 * noise)
    state.outside |= np.isnan(x).any(axis=1, keepdims=True)
    v_factor = float(head.v_factor[keys].min())
    ratio = 1.0 if state.v_factor is None else state.v_factor / v_factor
    state.v_factor = v_factor
    moved = _move_maximum(state, x, dx, np.log2(ratio), model)
    w = weights_of(state, x, dx, model, sink is not None)
    rescaled = moved * U_FP32 + (2 * U_FP32 if ratio != 1.0 else 0.0)
    state.outside |= not FP32_MIN_NORMAL <= ratio <= 1 / FP32_MIN_NORMAL
    of_keys = w if sink is None else w.without_last()
    accumulate(state, head, keys, of_keys, rescaled[:, None], model)
    add_to_row_sum(state, w, model)
    if sink is not None:  # the kernel may also apply it to O and lse when these are finished
        state.l_error = state.l_error + gamma(_SINK_APART) * state.l


def _move_maximum(state: State, x: np.ndarray, dx: np.ndarray, log_ratio: float, model: KernelModel) -> np.ndarray:
    """Take a block's scores into the running maximum (step 2) and rescale the state to it.

    Returns the rows, bool (rows,), in which the factor alpha of this move may not be 1.
    """
    new_max = np.maximum(state.max, x.max(1))
    high = np.maximum(state.max_high, (x + dx).max(1))
    low = np.maximum(state.max_low, (x - dx).max(1))
    stays = (x + dx).max(1) <= state.max_low
    moved = ~np.isneginf(state.max) & (~stays | (model.order.rescale == "contracted"))  # else alpha is exactly 1
    reach = np.abs(high) + np.abs(state.max_low) + 2 * model.largest_offset_log2
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
    """Return the largest distance of the kernel's rounded maximum from the exact one, ``base``.

    Before it is rounded the kernel's maximum is at most ``off`` away from the exact one.
    """
    offset = model.largest_offset_log2
    if model.is_stated:
        return off + binary32_error(base - offset - off, base - offset + off)
    return off + U_FP32 * (np.abs(base) + offset + off)
