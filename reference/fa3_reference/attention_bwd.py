"""Gradients of attention in float64, by the closed form that every flash backward implements.

    P = exp(S - lse),  dV = P^T dO,  dP = dO V^T,  D = rowsum(dO * O) - dlse,  dS = P * (dP - D)
    dX = dS * sech^2(X / softcap),  dQ = softmax_scale * dX K,  dK = softmax_scale * dX^T Q

where X is the scaled score before the softcap, and dlse the gradient of lse, which grows by P with each score.
A sink changes none of these but lse and O. It is a key with V = 0, so that its dP is 0 and, summed over the rows of its
head, dsink = -sum P_sink D with P_sink = exp(sink - lse).
A term of scores is added behind the softcap, so that the gradient of a bias is dS itself, summed over all pairs that
share an element of it. Gradients of a kv head sum over the query heads that share it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa3_reference.attention import (
    Attention,
    as_float64,
    cap_and_mask,
    row_tiles,
    scaled_scores,
    sinks_of,
)
from fa3_reference.problem import AttentionProblem, Sequence
from fa3_reference.terms import add_to_bias, added


class AttentionGradients(NamedTuple):
    """Gradients in the layout of q, k and v: float64 for the truth, the operands' format for a kernel."""

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
    *of_term: np.ndarray,
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
    *of_term : arrays of shape ``problem.term_shape``
        The operand of the problem's term of scores, if it has one, and for a bias a float64 array that its gradient is
        added to, in place: 0 for keys that are hidden.

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
            queries = [x[:, head] for x in query_side]
            keys = [x[:, head // problem.group] for x in key_side]
            statistics = [problem.rows_lse(x, seq)[head] for x in (lse, dlse)]
            with np.errstate(invalid="ignore", over="ignore"):
                _add_head(problem, seq, head, (queries, keys, statistics), of_term)
    return AttentionGradients(dq, dk, dv)


def _add_head(
    problem: AttentionProblem,
    seq: Sequence,
    head: int,
    arrays: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]],
    of_term: tuple[np.ndarray, ...],
) -> None:
    """Add the gradients of one query head, in place, to those of its queries, of its keys and of a bias.

    ``arrays`` are q, out, dout and dq of the head; k, v, dk and dv of its kv head; and lse and dlse.
    """
    (*queries, dq), (*keys, dk, dv), statistics = arrays
    own = added(problem, of_term[0], seq, head) if of_term else None
    poisoned = not all(np.isfinite(x).all() for x in (*queries, *keys, statistics[1]))
    for tile in row_tiles(problem, seq, np.arange(seq.seqlen_q), poisoned):
        of_rows = [x[tile.rows] for x in (*queries, *statistics)]
        of_keys = [x[tile.keys] for x in keys]
        of_pairs = None if own is None else own[tile.rows, tile.keys]
        part, ds = _tile_gradients(problem, of_rows, of_keys, tile.visible, of_pairs)
        for dbias in of_term[1:]:
            add_to_bias(dbias, ds, seq, head, tile.rows, tile.keys)
        dq[tile.rows] += part.dq
        dk[tile.keys] += part.dk
        dv[tile.keys] += part.dv


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
    problem : AttentionProblem
        What is computed, with sinks.
    sinks : float array (nheads,)
        Scores in nats; -inf for a head without a sink, whose gradient is 0.
    dout, forward, dlse : as of :func:`attention_bwd`
        ``forward.lse`` holds the sinks. A row that sees no key sees its sink all the same.

    Returns
    -------
    float64 array (nheads,)
        To first order off by at most about u (|sink| + |lse| + head_dim_v + n + 8) sum P_sink D, with u = 2^-53, n rows
        and a D of absolute values.

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


def _tile_gradients(
    problem: AttentionProblem,
    of_rows: list[np.ndarray],
    of_keys: list[np.ndarray],
    visible: np.ndarray | None,
    term: np.ndarray | None,
) -> tuple[AttentionGradients, np.ndarray]:
    """Return what a tile of query rows of one head adds to dQ of these rows, and to dK and dV of the keys they see.

    Behind it stands dS (rows, keys). ``of_rows`` are q, out, dout, lse and dlse of the rows, ``of_keys`` k and v of the
    keys, and ``term`` is what is added to the scores.
    """
    q, out, dout, lse, dlse = of_rows
    k, v = of_keys
    x = scaled_scores(problem, q, k)
    slope = 1.0 / np.square(np.cosh(x / problem.softcap)) if problem.softcap > 0 else None
    s = cap_and_mask(problem, x, visible) + (0 if term is None else term)
    p = np.exp(s - lse[:, None])
    ds = dout @ v.T
    ds -= (np.sum(dout * out, axis=1) - dlse)[:, None]
    ds *= p
    if term is not None:  # a row whose keys are all hidden has an lse of -inf
        p[np.isneginf(s)] = 0
        ds[np.isneginf(s)] = 0
    dx = ds * problem.softmax_scale if slope is None else ds * slope * problem.softmax_scale
    return AttentionGradients(dx @ k, dx.T @ q, p.T @ dout), ds
