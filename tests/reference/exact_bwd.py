"""Gradients of attention in ball arithmetic: the closed form of :mod:`fa3_reference.attention_bwd`, with proven radii.

Needs python-flint (Arb); for small problems.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fa3_reference.attention import Attention, as_float64
from fa3_reference.problem import AttentionProblem
from tests.reference.exact import load_flint, matrix, store


class ExactGradients(NamedTuple):
    """Gradients as float64 midpoints in the layout of q, k and v, each with a bound of its distance to the truth."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dq_radius: np.ndarray
    dk_radius: np.ndarray
    dv_radius: np.ndarray


class _Head(NamedTuple):
    """What one query head reads, float64; ``out`` and ``lse`` are None where the forward is found here."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    out: np.ndarray | None
    lse: np.ndarray | None
    dlse: np.ndarray


def exact_gradients(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    forward: Attention | None = None,
    dlse: np.ndarray | None = None,
    *,
    bits: int = 160,
) -> ExactGradients:
    """Enclose the gradients of sum(out * dout) + sum(lse * dlse) in balls.

    Parameters
    ----------
    q, k, v, dout : finite float arrays of the problem's shapes
        Converted exactly, as is ``softmax_scale``.
    forward : Attention, optional
        Out and lse that a kernel was given, as of :func:`fa3_reference.attention_bwd.attention_bwd`; by default the
        exact ones.
    dlse : finite float array of shape ``problem.lse_shape``, optional
        Zeros by default; converted exactly.
    bits : int
        Working precision of the ball arithmetic.

    Returns
    -------
    ExactGradients
        Midpoints rounded to float64, with proven radii: |returned - true| <= radius holds for every element. Rows
        without a key have dq 0 and add nothing.

    Raises
    ------
    ValueError
        If an array has the wrong shape.
    ImportError
        Without python-flint.
    """
    shapes = {"q": problem.q_shape, "k": problem.k_shape, "v": problem.v_shape, "dout": problem.out_shape}
    q, k, v, dout = as_float64(**{name: (x, shapes[name]) for name, x in zip(shapes, (q, k, v, dout), strict=True)})
    (dlse,) = as_float64(dlse=(np.zeros(problem.lse_shape) if dlse is None else dlse, problem.lse_shape))
    result = ExactGradients(*(np.zeros(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape) * 2))
    flint = load_flint()
    with flint.ctx.workprec(bits):
        for seq in problem.sequences():
            for kv_head in range(problem.nheads_kv):
                k_head, v_head = (problem.rows_k(x, seq)[:, kv_head] for x in (k, v))
                sums: list[Any] = []
                for head in range(kv_head * problem.group, (kv_head + 1) * problem.group):
                    q_head, dout_head = (problem.rows_q(x, seq)[:, head] for x in (q, dout))
                    out = None if forward is None else problem.rows_q(forward.out, seq)[:, head]
                    lse = None if forward is None else problem.rows_lse(forward.lse, seq)[head]
                    of_lse = problem.rows_lse(dlse, seq)[head]
                    dq, *parts = _head(problem, _Head(q_head, k_head, v_head, dout_head, out, lse, of_lse))
                    found, radius = (problem.rows_q(x, seq)[:, head] for x in (result.dq, result.dq_radius))
                    store(found, radius, dq.entries())
                    sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
                for name, total in zip(("dk", "dv"), sums, strict=True):
                    arrays = (getattr(result, name), getattr(result, f"{name}_radius"))
                    found, radius = (problem.rows_k(x, seq)[:, kv_head] for x in arrays)
                    store(found, radius, total.entries())
    return result


def _head(problem: AttentionProblem, h: _Head) -> tuple[Any, Any, Any]:
    """Balls of dQ, and of what one query head adds to dK and dV, as matrices."""
    flint = load_flint()
    scale, zero, keys = flint.arb(problem.softmax_scale), flint.arb(0), len(h.k)
    first, stop = problem.visible_keys(np.arange(len(h.q)), len(h.q), keys)
    scores, slopes = _capped(problem, (matrix(h.q) * matrix(h.k).transpose() * scale).entries())
    differences = (matrix(h.dout) * matrix(h.v).transpose()).entries()
    p, ds = [zero] * len(scores), [zero] * len(scores)
    for i in range(len(h.q)):
        seen = range(i * keys + int(first[i]), i * keys + int(max(first[i], stop[i])))
        if not seen:
            continue
        given = None if h.lse is None else flint.arb(float(h.lse[i]))
        lse = _sum([scores[j].exp() for j in seen]).log() if given is None else given
        for j in seen:
            p[j] = (scores[j] - lse).exp()
        if h.out is None:
            dots = _sum([p[j] * differences[j] for j in seen])
        else:
            dots = _sum([flint.arb(float(a)) * flint.arb(float(b)) for a, b in zip(h.dout[i], h.out[i])])
        dots -= flint.arb(float(h.dlse[i]))
        for j in seen:
            ds[j] = p[j] * (differences[j] - dots) * slopes[j] * scale
    weights, dx = (flint.arb_mat(len(h.q), keys, x) for x in (p, ds))
    return dx * matrix(h.k), dx.transpose() * matrix(h.q), weights.transpose() * matrix(h.dout)


def _capped(problem: AttentionProblem, scores: list[Any]) -> tuple[list[Any], list[Any]]:
    """Scores c tanh(x / c) under a softcap c, and their slopes 1 / cosh(x / c)^2; x and 1 without one."""
    flint = load_flint()
    if not problem.softcap:
        return scores, [flint.arb(1)] * len(scores)
    cap = flint.arb(problem.softcap)
    relative = [x / cap for x in scores]
    return [cap * y.tanh() for y in relative], [1 / y.cosh() ** 2 for y in relative]


def _sum(balls: list[Any]) -> Any:
    return sum(balls, start=load_flint().arb(0))
