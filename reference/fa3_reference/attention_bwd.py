"""Gradients of attention in float64, by the closed form that every flash backward implements.

    P = exp(S - lse),  dV = P^T dO,  dP = dO V^T,  D = rowsum(dO * O) - dlse,  dS = P * (dP - D)
    dX = dS * sech^2(X / softcap),  dQ = softmax_scale * dX K,  dK = softmax_scale * dX^T Q

where X is the scaled score before the softcap, and dlse the gradient of lse, which grows by P with each score.
A sink changes none of these but lse and O. It is a key with V = 0, so that its dP is 0 and, summed over the rows of its
head, dsink = -sum P_sink D with P_sink = exp(sink - lse).
Gradients of a kv head sum over the query heads that share it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa3_reference.attention import (
    Attention,
    QueryTile,
    as_float64,
    cap_and_mask,
    row_tiles,
    scaled_scores,
    sinks_of,
)
from fa3_reference.problem import AttentionProblem


class AttentionGradients(NamedTuple):
    """Gradients in the layout of q, k and v, float64."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


class _Head(NamedTuple):
    """Everything one query head reads and the gradients it adds to."""

    q: np.ndarray  # (seqlen_q, head_dim)
    k: np.ndarray  # (seqlen_k, head_dim)
    v: np.ndarray  # (seqlen_k, head_dim_v)
    out: np.ndarray  # (seqlen_q, head_dim_v)
    lse: np.ndarray  # (seqlen_q,)
    dlse: np.ndarray  # (seqlen_q,)
    dout: np.ndarray  # (seqlen_q, head_dim_v)
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def attention_bwd(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    forward: Attention,
    dlse: np.ndarray | None = None,
) -> AttentionGradients:
    """Compute the gradients of sum(out * dout) + sum(lse * dlse) with respect to q, k and v.

    Parameters
    ----------
    q, k, v : float arrays of the problem's shapes
    dout : float array of shape ``problem.out_shape``
    forward : Attention
        What the forward pass returned. Pass :func:`~fa3_reference.attention.attention`'s result for the true
        gradient; a kernel's own rounded out and lse isolate the error of its backward pass.
    dlse : float array of shape ``problem.lse_shape``, optional
        Gradient of lse; zeros by default. That of an empty row, whose lse is -inf whatever q and k are, is not read.

    Returns
    -------
    AttentionGradients
        float64. Empty rows have dq = 0 and add nothing; keys that no row sees have dk = dv = 0. With u =
        2^-53 and x = (head_dim + 8) spread + |lse| of :mod:`fa3_reference.attention`, P carries a relative
        error of about x u, and every gradient at most about (2 x + seqlen_q * group + seqlen_k + 2
        head_dim_v) u times the same expression in absolute values. A softcap c adds 2 (head_dim + 8) spread / c + 8 to
        that factor for dQ and dK: sech^2 has a logarithmic slope of at most 2. A first-order statement; proved on small
        problems by ball arithmetic, checked against central differences and automatic differentiation.

    Raises
    ------
    ValueError
        If an array has the wrong shape.

    Notes
    -----
    NaN and Inf spread along visible pairs only: a masked key never poisons a row, nor an empty or masked row
    a key.
    """
    arrays = as_float64(
        q=(q, problem.q_shape),
        k=(k, problem.k_shape),
        v=(v, problem.v_shape),
        dout=(dout, problem.out_shape),
        out=(forward.out, problem.out_shape),
        lse=(forward.lse, problem.lse_shape),
        dlse=(np.zeros(problem.lse_shape) if dlse is None else dlse, problem.lse_shape),
    )
    q, k, v, dout, out, lse, dlse = arrays
    dq = np.zeros_like(q)
    dk = np.zeros_like(k)
    dv = np.zeros_like(v)
    for seq in problem.sequences():
        query_side = [problem.rows_q(x, seq) for x in (q, out, dout, dq)]
        key_side = [problem.rows_k(x, seq) for x in (k, v, dk, dv)]
        for head in range(problem.nheads):
            q_h, out_h, dout_h, dq_h = (x[:, head] for x in query_side)
            k_h, v_h, dk_h, dv_h = (x[:, head // problem.group] for x in key_side)
            lse_h, dlse_h = (problem.rows_lse(x, seq)[head] for x in (lse, dlse))
            part = _Head(q_h, k_h, v_h, out_h, lse_h, dlse_h, dout_h, dq_h, dk_h, dv_h)
            poisoned = not all(np.isfinite(x).all() for x in (q_h, k_h, v_h, out_h, dout_h, dlse_h))
            with np.errstate(invalid="ignore", over="ignore"):
                for tile in row_tiles(problem, seq, np.arange(seq.seqlen_q), poisoned):
                    _add_tile(problem, part, tile)
    return AttentionGradients(dq, dk, dv)


def sinks_gradient(
    problem: AttentionProblem,
    sinks: np.ndarray,
    dout: np.ndarray,
    forward: Attention,
    dlse: np.ndarray | None = None,
) -> np.ndarray:
    """Compute the gradient of sum(out * dout) + sum(lse * dlse) with respect to the score of every head's sink.

    Parameters
    ----------
    sinks : float array (nheads,)
        Scores in nats; -inf is none, whose gradient is 0.
    dout, forward, dlse : as of :func:`attention_bwd`
        ``forward.lse`` holds the sinks. A row that sees no key sees its sink all the same.

    Returns
    -------
    float64 array (nheads,)
        With u = 2^-53, n rows and D of absolute values, off by about u (|sink| + |lse| + head_dim_v + n + 8) sum P_sink
        D at most, to first order.

    Raises
    ------
    ValueError
        If an array has the wrong shape, or the problem has no sinks.
    """
    sinks = sinks_of(problem, sinks)
    arrays = as_float64(
        out=(forward.out, problem.out_shape),
        dout=(dout, problem.out_shape),
        lse=(forward.lse, problem.lse_shape),
        dlse=(np.zeros(problem.lse_shape) if dlse is None else dlse, problem.lse_shape),
    )
    found = np.zeros(problem.nheads)
    is_sink = np.logical_not(np.isneginf(sinks))
    for seq in problem.sequences():
        out, dout = (problem.rows_q(x, seq)[:, is_sink] for x in arrays[:2])  # (seqlen_q, sinks, head_dim_v)
        lse, dlse = (problem.rows_lse(x, seq)[is_sink] for x in arrays[2:])  # (sinks, seqlen_q)
        with np.errstate(invalid="ignore", over="ignore"):
            p = np.exp(sinks[is_sink, None] - lse)
            found[is_sink] -= np.sum(p * (np.sum(out * dout, axis=2).T - dlse), axis=1)
    return found


def _add_tile(problem: AttentionProblem, head: _Head, tile: QueryTile) -> None:
    rows = tile.rows
    keys = tile.keys
    q = head.q[rows]
    k = head.k[keys]
    v = head.v[keys]
    dout = head.dout[rows]
    x = scaled_scores(problem, q, k)
    slope = 1.0 / np.square(np.cosh(x / problem.softcap)) if problem.softcap > 0 else None
    p = np.exp(cap_and_mask(problem, x, tile.visible) - head.lse[rows, None])
    ds = dout @ v.T
    ds -= (np.sum(dout * head.out[rows], axis=1) - head.dlse[rows])[:, None]
    ds *= p
    if slope is not None:
        ds *= slope
    head.dv[keys] += p.T @ dout
    ds *= problem.softmax_scale
    head.dq[rows] += ds @ k
    head.dk[keys] += ds.T @ q
