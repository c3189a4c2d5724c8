"""Inputs of calls that serve: sinks beside what a recipe draws, and a K that holds V."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fa3_reference.attention import attention
from fa3_reference.problem import AttentionProblem
from fa3verify.inputs.recipe import Recipe

# By how much, in nats, sinks exceed the lse of a row: a sink that is worth all its keys, one that takes nearly nothing,
# nearly all, nothing, all that 16 bits keep, and none. Heads have them in turn, from one that the seed chooses.
SINKS_OVER_LSE = (0.0, -3.0, 4.0, -40.0, 20.0, -np.inf)


def draw_served(problem: AttentionProblem, recipe: Recipe) -> tuple[NDArray[np.float64], ...]:
    """Draw q, k and v by a recipe, and sinks where the problem has them.

    Parameters
    ----------
    problem : AttentionProblem
        Where it has ``qv``, the last channels of K are V.
    recipe : Recipe
        Its seed draws the sinks as well.

    Returns
    -------
    q, k, v : float64 arrays in the problem's shapes
        As :meth:`Recipe.draw` returns them.
    sinks : float64 (nheads,)
        Only of a problem that has them. Binary32 holds them, in which kernels are given them, and no format of 16 bits.
    """
    q, k, v = recipe.draw(problem)
    if problem.qv:
        k[..., -problem.head_dim_v :] = v
    return (q, k, v, _sinks(problem, (q, k, v), recipe.seed)) if problem.sinks else (q, k, v)


def _sinks(problem: AttentionProblem, arrays: tuple[NDArray[np.float64], ...], seed: int) -> NDArray[np.float64]:
    """Draw every head's sink next to the lse of one of its rows that see a key; next to 0 where there is none."""
    rng = np.random.default_rng([seed, problem.nheads])
    with np.errstate(all="ignore"):
        lse = attention(replace(problem, sinks=False), *arrays).lse
    by_head = np.moveaxis(lse, -2, 0).reshape(problem.nheads, -1)
    found = rng.uniform(-1, 1, problem.nheads)
    for head, rows in enumerate(by_head):
        usable = rows[np.isfinite(rows)]
        found[head] += usable[rng.integers(usable.size)] if usable.size else 0.0
        found[head] += SINKS_OVER_LSE[(seed + head) % len(SINKS_OVER_LSE)]
    return found.astype(np.float32).astype(np.float64)
