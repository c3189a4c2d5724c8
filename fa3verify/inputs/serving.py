"""Inputs of calls that serve: arrays that a recipe draws, with sinks, a term of scores, or a K that holds V."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fa3_reference.attention import attention
from fa3_reference.problem import AttentionProblem
from fa3verify.inputs.recipe import Recipe
from fa3verify.inputs.terms import draw_term

# By how many nats a sink exceeds the lse of a row: its weight is that of all keys together, nearly nothing, nearly all,
# nothing, so much that 16 bits keep nothing else, and none. Heads have them in turn; the seed chooses the first.
SINKS_OVER_LSE = (0.0, -3.0, 4.0, -40.0, 20.0, -np.inf)


def draw_served(problem: AttentionProblem, recipe: Recipe) -> tuple[NDArray[np.float64], ...]:
    """Draw q, k and v by a recipe, and sinks and a term of scores where the problem has them.

    Parameters
    ----------
    problem : AttentionProblem
        Where it has ``qv``, the last channels of K are V.
    recipe : Recipe
        Its seed draws the sinks and the term as well.

    Returns
    -------
    q, k, v : float64 arrays in the problem's shapes
        As :meth:`Recipe.draw` returns them.
    sinks : float64 (nheads,)
        Only if the problem has them. They are binary32 numbers, as kernels get them, which no 16-bit format holds.
    term : float64 array
        Only if the problem has one, as :func:`~fa3verify.inputs.terms.draw_term` returns it.
    """
    q, k, v = recipe.draw(problem)
    if problem.qv:
        k[..., -problem.head_dim_v :] = v
    further = [_sinks(problem, (q, k, v), recipe.seed)] if problem.sinks else []
    further += [draw_term(problem, q, k, recipe.seed)] if problem.term else []
    return q, k, v, *further


def _sinks(problem: AttentionProblem, arrays: tuple[NDArray[np.float64], ...], seed: int) -> NDArray[np.float64]:
    """Draw every head's sink near the lse of one of its rows that see a key; near 0 if no row does."""
    rng = np.random.default_rng([seed, problem.nheads])
    with np.errstate(all="ignore"):
        lse = attention(replace(problem, sinks=False, term=None), *arrays).lse
    by_head = np.moveaxis(lse, -2, 0).reshape(problem.nheads, -1)
    sinks = rng.uniform(-1, 1, problem.nheads)
    for head, rows in enumerate(by_head):
        usable = rows[np.isfinite(rows)]
        sinks[head] += usable[rng.integers(usable.size)] if usable.size else 0.0
        sinks[head] += SINKS_OVER_LSE[(seed + head) % len(SINKS_OVER_LSE)]
    return sinks.astype(np.float32).astype(np.float64)
