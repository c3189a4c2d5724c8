"""The ways in which the kernels of :mod:`tests.quality.legal_orders` add a term to their scores, in plain numpy."""

from __future__ import annotations

import numpy as np

from fa3_reference.problem import AttentionProblem

F = np.float32
LOG2_E = F(1.4426950408889634)
# How a term meets scores that are still to be multiplied: divided by what scales them, or times its inverse; added to
# scaled scores in nats; or in log2 units, by the fused operation that scales the score.
WAYS = ("divided", "times the inverse", "in nats", "contracted")


def term_of(
    problem: AttentionProblem, term: np.ndarray, head: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the term of the first sequence's scores in binary32 nats, where a mask hides as -inf.

    Some causal kernels multiply the slope of ALiBi by the number of the key alone, which adds one number to all scores
    of a row.

    Returns
    -------
    tuple of float32 array (rows, keys) and float64 array (rows,)
        The term, and what a kernel takes from its lse for what was added to the row.
    """
    shape = problem.seqlen_q, problem.seqlen_k
    nothing = np.zeros(shape[0])
    if problem.term is not None and problem.term.kind == "alibi":
        slope = F(term.reshape(-1, problem.nheads)[0, head])
        last = np.arange(shape[1] - shape[0], shape[1], dtype=F)
        keys = np.arange(shape[1], dtype=F)
        if problem.causal and rng.random() < 0.5:
            return np.broadcast_to(slope * keys, shape), float(slope) * last.astype(float)
        return -(slope * np.abs(last[:, None] - keys)), nothing
    own = np.broadcast_to(term[0, head % term.shape[1]], shape)
    return np.where(own, F(0), F(-np.inf)) if own.dtype == bool else own.astype(F), nothing


def plus_term(
    x: np.ndarray, unit: np.float32, to_nats: np.float32, in_log2: bool, term: np.ndarray, way: str
) -> tuple[np.ndarray, np.float32]:
    """Add a term to scores ``x`` which ``unit`` takes to the units of exponents, and ``to_nats`` to nats.

    A format's least number may be beyond binary32 in the units of exponents, and then hides its key as -inf does.

    Returns
    -------
    tuple of float32 array and float32
        The sums, and the factor that takes them to the units of exponents.
    """
    base = LOG2_E if in_log2 else F(1)
    if unit == 1:
        x = x + term * base
    elif way == "contracted":
        x, unit = (x.astype(float) * float(unit) + term * base).astype(F), F(1)
    elif way == "in nats":
        x, unit = x * to_nats + term, base
    else:
        x = x + (term / to_nats if way == "divided" else term * (F(1) / to_nats))
    return np.where(np.isneginf(x * unit), F(-np.inf), x), unit
