"""What quantising q, k and v costs in the output: a rigorous bound, and a prediction without a fitted constant.

Both are about the operands; what a kernel then adds by rounding is bounded in :mod:`fa3_reference.bounds.forward`, and
what the quantiser itself may store in :mod:`fa3_reference.bounds.quantizer`. Judgements print them beside the verdict.

The prediction linearises the softmax at the exact P and O and gives every e4m3 element the independent
relative error EPS:

    var O_i = EPS^2 (scale^2 sum_c q_ic^2 |C_i[:, c]|^2
                     + scale^2 sum_j P_ij^2 |v_j - O_i|^2 sum_c q_ic^2 k_jc^2  +  sum_j P_ij^2 v_j^2)

with C_i = sum_j P_ij (v_j - O_i) k_j^T. Under a softcap the P in the first two terms is multiplied by the slope
1 - tanh^2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fa3_reference.attention import (
    QueryTile,
    as_float64,
    attention,
    cap_and_mask,
    row_tiles,
    scaled_scores,
    sinks_of,
)
from fa3_reference.bounds.forward import ErrorBound
from fa3_reference.problem import AttentionProblem, Sequence
from fa3_reference.quantize import QuantScheme, condition

# RMS relative error of rounding to 3 fraction bits with a log-uniform significand m: E[m^-2] = 3 / (8 ln 2).
EPS_E4M3 = 2**-3 / math.sqrt(12) * math.sqrt(3 / (8 * math.log(2)))


@dataclass(frozen=True, slots=True)
class PredictedError:
    """Predicted RMS output error of each (sequence, query head) by source, float64 (batch, nheads)."""

    from_q: np.ndarray
    from_k: np.ndarray
    from_v: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return np.sqrt(self.from_q**2 + self.from_k**2 + self.from_v**2)


_Rows = tuple[np.ndarray, ...]  # the rows of one tile in several arrays, each (rows, dim)


def _tiles(
    problem: AttentionProblem, query_side: tuple[np.ndarray, ...], key_side: tuple[np.ndarray, ...]
) -> Iterator[tuple[Sequence, int, QueryTile, _Rows, _Rows]]:
    """Yield every tile of query rows of every sequence and query head.

    Each comes with its sequence, its head, its rows of every array of ``query_side``, and its keys of every array of
    ``key_side``.
    """
    for seq in problem.sequences():
        queries = [problem.rows_q(x, seq) for x in query_side]
        keys = [problem.rows_k(x, seq) for x in key_side]
        for tile in row_tiles(problem, seq, np.arange(seq.seqlen_q)):
            for head in range(problem.nheads):
                query = tuple(x[tile.rows, head] for x in queries)
                key = tuple(x[tile.keys, head // problem.group] for x in keys)
                yield seq, head, tile, query, key


def predict_error(
    problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, scheme: QuantScheme
) -> PredictedError:
    """Predict the RMS output error of quantising q, k and v to e4m3, head by head.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed.
    q, k, v : finite float arrays of the problem's shapes
        The operands before quantisation.
    scheme : QuantScheme
        Only its rotation and K-mean matter: the prediction assumes that every element lies in e4m3's normal range,
        where scaling costs nothing.

    Returns
    -------
    PredictedError
        A first-order model, not a bound: expect measured / predicted within 0.75..1.35 per head, except on
        saturated heads (one probability near 1), where the first-order term vanishes. Rows without a key count as rows
        without error.

    Raises
    ------
    ValueError
        If an operand has the wrong shape or the scheme does not fit the problem.

    Notes
    -----
    Time is O(seqlen_q * seqlen_k * head_dim * head_dim_v) per head. NaN or Inf makes its head's prediction
    NaN or Inf.
    """
    (v,) = as_float64(v=(v, problem.v_shape))
    q, k, _ = condition(problem, q, k, scheme)
    forward = attention(problem, q, k, v)
    sums = np.zeros((3, problem.batch, problem.nheads))
    for seq, head, tile, query, key in _tiles(problem, (q, forward.out), (k, v)):
        lse = problem.rows_lse(forward.lse, seq)[head, tile.rows]
        sums[:, seq.index, head] += _variances(problem, tile.visible, query, key, lse)
    elements = np.array([max(1, seq.seqlen_q) * problem.head_dim_v for seq in problem.sequences()])
    return PredictedError(*(EPS_E4M3 * np.sqrt(sums / elements[:, None])))


def _variances(
    problem: AttentionProblem, visible: np.ndarray | None, query: _Rows, key: _Rows, lse: np.ndarray
) -> tuple[float, float, float]:
    """Return the squared output errors of one tile due to q, to k and to v, each summed over its elements, in units of
    EPS^2."""
    q, out = query
    k, v = key
    s = cap_and_mask(problem, scaled_scores(problem, q, k), visible)
    p = np.exp(s - lse[:, None])
    from_v = float(np.sum(np.square(p) @ np.square(v)))
    if problem.softcap > 0:
        p *= np.where(np.isneginf(s), 0.0, 1.0 - np.square(s / problem.softcap))
    from_q = 0.0
    for q_i, p_i, out_i in zip(q, p, out, strict=True):
        c = (p_i[:, None] * v).T @ k - np.outer(out_i, p_i @ k)  # (head_dim_v, head_dim)
        from_q += float(np.square(q_i) @ np.sum(np.square(c), axis=0))
    gap = np.sum(v**2, axis=1) + np.sum(out**2, axis=1)[:, None] - 2 * (out @ v.T)  # |v_j - O_i|^2
    from_k = float(np.sum(p**2 * np.maximum(gap, 0.0) * (np.square(q) @ np.square(k).T)))
    return problem.softmax_scale**2 * from_q, problem.softmax_scale**2 * from_k, from_v


@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def quantization_bound(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    sinks: np.ndarray | None = None,
) -> ErrorBound:
    """Bound how far attention moves when q, k and v each move by at most dq, dk and dv, elementwise.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed.
    q, k, v : finite float arrays of the problem's shapes
        The operands before quantisation; with a rotation or K-mean, after :func:`~fa3_reference.quantize.condition`, in
        whose coordinates they are rounded.
    dq, dk, dv : float arrays of the same shapes
        Bounds of the absolute perturbations, >= 0.
    sinks : float array (nheads,), optional
        Scores of sinks in nats, which do not move; None where the problem has none.

    Returns
    -------
    ErrorBound
        Rigorous, float64 rounding of this function and of :func:`~fa3_reference.attention.attention`
        included. Empty rows have bound 0. NaN in an operand makes the bounds of the rows that see it NaN.

    Raises
    ------
    ValueError
        If an array has the wrong shape, a perturbation is negative or NaN, or sinks are missing or not wanted.

    Notes
    -----
    Scores move by at most delta_ij = scale * sum_c (|q| |dk| + |dq| |k| + |dq| |dk|); tanh has slope <= 1, so
    a softcap changes nothing. With weights w_j = exp(e_j), |e_j| <= delta_j, and Z = sum_j P_j w_j,

        O' - O = sum_j P_j (w_j - 1) (v_j - O) / Z + sum_j P_j w_j dv_j / Z,    lse' - lse = log Z,

    as sum_j P_j (v_j - O) = 0, where a sink is a j whose v is 0 and whose w is 1. Hence
    |O' - O| <= sum_j P_j ((e^delta_j - 1) |v_j - O| + e^delta_j |dv_j|) / Z_low with Z_low = sum_j P_j e^-delta_j. O'
    is also a mean of the v'_j, so max_j (|v_j - O| + |dv_j|) is never exceeded either.
    """
    shapes = {"q": problem.q_shape, "k": problem.k_shape, "v": problem.v_shape}
    named = {"q": q, "k": k, "v": v, "dq": dq, "dk": dk, "dv": dv}
    q, k, v, dq, dk, dv = as_float64(**{name: (x, shapes[name[-1]]) for name, x in named.items()})
    for name, x in (("dq", dq), ("dk", dk), ("dv", dv)):
        if not np.all(x >= 0):
            raise ValueError(f"{name} must be >= 0 everywhere, got {np.min(x)}")
    forward = attention(problem, q, k, v, sinks)
    scores = sinks_of(problem, sinks)
    result = ErrorBound(np.zeros(problem.out_shape), np.zeros(problem.lse_shape))
    for seq, head, tile, query, key in _tiles(problem, (q, dq, forward.out), (k, dk, v, dv)):
        lse = problem.rows_lse(forward.lse, seq)[head, tile.rows]
        out_bound, lse_bound = _tile_bound(problem, tile.visible, query, key, lse, scores[head])
        problem.rows_q(result.out, seq)[tile.rows, head] = out_bound
        problem.rows_lse(result.lse, seq)[head, tile.rows] = lse_bound
    return result


def _tile_bound(
    problem: AttentionProblem, visible: np.ndarray | None, query: _Rows, key: _Rows, lse: np.ndarray, sink: float
) -> tuple[np.ndarray, np.ndarray]:
    # the bounds of O (rows, head_dim_v) and of lse (rows,) of one tile, by the formulas of quantization_bound
    q, dq, out = query
    k, dk, v, dv = key
    s = cap_and_mask(problem, scaled_scores(problem, q, k), visible)
    log_p = s - lse[:, None]
    hidden = np.isneginf(s)
    sizes = problem.softmax_scale * (np.abs(q) @ np.abs(k).T)
    delta = problem.softmax_scale * ((np.abs(q) + dq) @ dk.T + dq @ np.abs(k).T)
    of_sink = (sink - lse)[:, None] if problem.sinks else log_p[:, :0]
    slack = _rounding_slack(problem, np.where(hidden, 0.0, sizes), np.concatenate([log_p, of_sink], axis=1))
    of_sink = np.exp(of_sink).sum(axis=1)
    of_none = np.zeros_like(out) if np.isneginf(sink) else np.abs(out)  # how far O is from the V of a sink, which is 0
    delta = np.where(hidden, 0.0, delta * (1 + 2**-40) + 2 * slack[:, None])
    p = np.exp(log_p)
    raised = np.exp(log_p + delta)  # P e^delta; where it overflows only the bound of a mean of V is left
    growth = np.where(delta < 1, p * np.expm1(delta), raised)
    z_low = np.sum(np.exp(log_p - delta), axis=1) + of_sink
    z_high = np.sum(raised, axis=1) + of_sink
    out_bound = np.empty_like(out)
    for i in range(out.shape[0]):
        seen = ~hidden[i]
        gap = np.abs(v[seen] - out[i])  # (keys, head_dim_v)
        first_order = (growth[i, seen] @ gap + raised[i, seen] @ dv[seen]) / z_low[i]
        bound = np.fmin(first_order, np.maximum(np.max(gap + dv[seen], axis=0), of_none[i]))
        out_bound[i] = bound * (1 + 2**-40) + 4 * slack[i] * (p[i, seen] @ np.abs(v[seen]))
    lse_bound = np.fmin(np.maximum(np.log(z_high), -np.log(z_low)), delta.max(axis=1))
    return out_bound, lse_bound * (1 + 2**-40) + 4 * slack + 2**-50 * np.abs(lse)


def _rounding_slack(problem: AttentionProblem, sizes: np.ndarray, log_p: np.ndarray) -> np.ndarray:
    """Return the float64 error of scores and sums of each row, u ((head_dim + 8) spread + range + n + 8), as
    :mod:`fa3_reference.attention` states it."""
    span = -np.min(np.where(np.isneginf(log_p), 0.0, log_p), axis=1)
    return 2.0**-53 * ((problem.head_dim + 8) * sizes.max(axis=1) + span + log_p.shape[1] + 8)
