"""Attention in ball arithmetic: every number carries a proven radius, which certifies the float64 truth.

Balls have unbounded exponents: exp and log are applied to the scores as they are, without a row maximum, and
the code is the definition itself. Needs python-flint (Arb); for problems of up to about a million scores.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from fa3_reference.attention import as_float64
from fa3_reference.problem import AttentionProblem


class ExactAttention(NamedTuple):
    """Attention as float64 midpoints, each with an upper bound of its distance to the true value."""

    out: np.ndarray  # float64, problem.out_shape
    lse: np.ndarray  # float64, problem.lse_shape
    out_radius: np.ndarray
    lse_radius: np.ndarray


def load_flint() -> ModuleType:
    """Import python-flint; ImportError names the extra that has it."""
    try:
        import flint
    except ImportError as error:
        raise ImportError("exact attention needs python-flint: install the extra 'test'") from error
    return flint


def exact_attention(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    sinks: np.ndarray | None = None,
    *,
    bits: int = 160,
) -> ExactAttention:
    """Enclose attention in balls and return midpoints rounded to float64 with proven radii.

    Parameters
    ----------
    q, k, v : finite float arrays of the problem's shapes
        Converted exactly, as is ``softmax_scale``.
    sinks : finite float array (nheads,), optional
        Scores of sinks.
    bits : int
        Working precision of the ball arithmetic, at least 64.

    Returns
    -------
    ExactAttention
        |returned - true| <= radius holds for every element; at 160 bits the radius is about half an ulp of
        float64, the final rounding. Empty rows: out = 0 and lse = -inf with radius 0.

    Raises
    ------
    ValueError
        If an operand has the wrong shape or holds NaN or Inf, or ``bits`` is below 64.
    ImportError
        Without python-flint.
    """
    if bits < 64:
        raise ValueError(f"bits must be at least 64, got {bits}")
    q, k, v = as_float64(q=(q, problem.q_shape), k=(k, problem.k_shape), v=(v, problem.v_shape))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not np.isfinite(x).all():
            raise ValueError(f"{name} must be finite for ball arithmetic, got NaN or Inf")
    flint = load_flint()
    result = ExactAttention(
        np.zeros(problem.out_shape),
        np.full(problem.lse_shape, -np.inf),
        np.zeros(problem.out_shape),
        np.zeros(problem.lse_shape),
    )
    with flint.ctx.workprec(bits):
        for seq in problem.sequences():
            for head in range(problem.nheads):
                q_head = problem.rows_q(q, seq)[:, head]
                k_head, v_head = (problem.rows_k(x, seq)[:, head // problem.group] for x in (k, v))
                sink = None if sinks is None else float(sinks[head])
                out, totals = _exact_head(problem, q_head, k_head, v_head, sink)
                store(problem.rows_q(result.out, seq)[:, head], problem.rows_q(result.out_radius, seq)[:, head], out)
                lse = [total.log() if total > 0 else None for total in totals]
                store(problem.rows_lse(result.lse, seq)[head], problem.rows_lse(result.lse_radius, seq)[head], lse)
    return result


def _exact_head(
    problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, sink: float | None = None
) -> tuple[list[Any], list[Any]]:
    """Return the balls of one head's output in row-major order (None for empty rows) and of its row sums."""
    flint = load_flint()
    scale, cap, zero = flint.arb(problem.softmax_scale), flint.arb(problem.softcap), flint.arb(0)
    first, stop = problem.visible_keys(np.arange(q.shape[0]), q.shape[0], k.shape[0])
    products = (matrix(q) * matrix(k).transpose()).entries()
    weights, totals = [], []
    for i in range(q.shape[0]):
        row = [zero] * k.shape[0]
        for j in range(first[i], stop[i]):
            x = products[i * k.shape[0] + j] * scale
            row[j] = (cap * (x / cap).tanh() if problem.softcap > 0 else x).exp()
        weights += row
        totals.append(sum(row, start=zero if sink is None else flint.arb(sink).exp()))
    sums = (flint.arb_mat(q.shape[0], k.shape[0], weights) * matrix(v)).entries()
    rows = np.repeat(np.arange(q.shape[0]), v.shape[1]).tolist()
    return [x / totals[i] if totals[i] > 0 else None for x, i in zip(sums, rows, strict=True)], totals


def matrix(x: np.ndarray) -> Any:
    """Return a float64 matrix as exact balls."""
    flint = load_flint()
    return flint.arb_mat(x.shape[0], x.shape[1], [flint.arb(value) for value in x.ravel().tolist()])


def store(midpoints: np.ndarray, radii: np.ndarray, balls: list[Any]) -> None:
    """Write midpoints as float64 and bounds of their distance to anything inside the balls; skip None."""
    flint = load_flint()
    for where, ball in zip(np.ndindex(midpoints.shape), balls, strict=True):
        if ball is None:
            continue
        midpoint = float(ball.mid())
        gap = ball - flint.arb(midpoint)
        midpoints[where] = midpoint
        radii[where] = 0.0 if gap.is_zero() else np.nextafter(float(gap.abs_upper()), np.inf)
