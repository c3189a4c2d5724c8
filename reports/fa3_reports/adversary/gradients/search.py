"""The search on one island of gradients: the better half of the individuals stays, the other half are its children.

A colony that no longer climbs starts again, from normal inputs or from the best that was ever met on its objective.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fa3_reference.attention import Attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.bounds.backward import backward_bound
from fa3_reports.adversary.gradients.colony import GENES, ISLANDS, GradientColony, GradientIsland, individual
from fa3_reports.adversary.gradients.execution import GRADIENTS, execute
from fa3_reports.adversary.gradients.mutations import MUTATIONS, Child, mutate_scale
from fa3_reports.adversary.violations import ViolationSearch
from fa3verify.operations.operation import error_over_bound
from fa3verify.search.climb import Judge, Ratios
from fa3verify.search.colony import Place


class GradientJudge(Judge):
    """Reports the largest figure of each individual."""

    __slots__ = ()

    def published(self, colony: GradientColony, name: str) -> np.ndarray:
        return self.ratios(colony)[name].max(1)


def over_bound(bound: Any = backward_bound) -> Judge:
    """Return the judge of error over bound before the last rounding.

    Parameters
    ----------
    bound : callable
        A function like :func:`fa3_reference.bounds.backward.backward_bound`.
    """

    objectives = tuple((name, wild) for wild in (False, True) for name in GRADIENTS)
    return GradientJudge(partial(judge, bound=bound), objectives, GRADIENTS)


def judge(colony: GradientColony, bound: Any = backward_bound) -> Ratios:
    """Run the arithmetic, the truth and the bound on a colony.

    Returns
    -------
    mapping
        Error over bound before the last rounding of each gradient, the larger one of both ends of all orders,
        (problems, elements).
    """
    problem = colony.problem
    operands = colony.operands
    with np.errstate(all="ignore"):
        got = execute(colony)
        q, k, v, dout, out, lse = operands.dequantized(problem)
        truth = attention_bwd(problem, q, k, v, dout, Attention(out, lse))
        limit = bound(problem, operands, colony.island.model)
        ratios = {}
        for name in GRADIENTS:
            low, high = (error_over_bound(x, getattr(truth, name), getattr(limit, name)) for x in got[name])
            ratios[name] = np.maximum(low, high).reshape(len(low), -1)
        return ratios


class GradientSearch(ViolationSearch):
    """The search on one island of gradients."""

    ISLANDS = ISLANDS
    JUDGE = over_bound()
    COLUMNS = "dq, dk and dv before their last rounding"
    individual = staticmethod(individual)
    MUTATIONS = (MUTATIONS,)
    AGAIN = 0.4
    VIOLATED = GRADIENTS

    def __init__(self, island: GradientIsland, seed: int | list[int], judge: Judge | None = None) -> None:
        super().__init__(island, seed, judge or self.JUDGE)

    def normal(self) -> GradientColony:
        return GradientColony.normal(self.island, self.rng)

    def restart(self) -> None:
        fresh = self.normal()
        objective = self.next_objective()
        if objective in self.archive and self.rng.random() < 0.5:
            fresh.adopt(self.archive[objective][1], (0, 0))
        self.begin(fresh)

    def conceive(self, colony: GradientColony, axis: int, child: int, parents: tuple[int, int]) -> Callable[[], Child]:
        """Give a child most genes of one parent and some of the other; each of its mutations has a size of its own."""
        parent, other = parents
        for name in GENES:
            source = other if self.rng.random() < 0.05 else parent
            getattr(colony, name)[child] = getattr(colony, name)[source]
        return lambda: Child(colony, child, self.draw_step(), self.rng)

    def move(self, colony: GradientColony) -> bool:
        moved = bool(self.rng.random() < (0.3 if self.wild else 0.1))
        if moved:
            mutate_scale(colony, self.step, self.wild, self.rng)
        return moved

    def figures(self, ratios: Ratios, name: str) -> np.ndarray:
        return ratios[name].max(1)

    def fitness(self, colony: GradientColony, ratios: Ratios) -> np.ndarray:
        found = {}
        for name in GRADIENTS:
            heights = self.figures(ratios, name)
            found[name] = np.where(np.isfinite(heights), heights, 0.0)
            best = int(found[name].argmax())
            if found[name][best] > self.archive.get((name, self.wild), (0.0,))[0]:
                self.archive[name, self.wild] = float(heights[best]), colony.taken(np.array([best]))
        return found[self.objective]

    def selected(self, colony: GradientColony, fitness: np.ndarray) -> GradientColony:
        return colony.taken(np.argsort(-fitness, kind="stable"))

    def suspects(self, beyond: np.ndarray) -> np.ndarray:
        return beyond[:1]

    def cause(self, colony: GradientColony, name: str, place: Place) -> tuple[str, tuple[str, ...]]:
        return name, (name,)
