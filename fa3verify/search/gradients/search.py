"""The search on one island of gradients: the better half of the individuals stays, the other half are its children.

A colony that no longer climbs starts again, from normal inputs or from the best that was ever met on its objective.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fa3_reference.attention import Attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.bounds.backward import backward_bound
from fa3verify.operations.ratios import error_over_bound
from fa3verify.search.climb import Climb, Find, Tried
from fa3verify.search.gradients.colony import GENES, GradientColony, GradientIsland, individual, islands_of
from fa3verify.search.gradients.execution import execute
from fa3verify.search.gradients.mutations import MUTATIONS, Child, mutate_scale

RATIOS = ("dq", "dk", "dv")  # before the last rounding
OBJECTIVES = (("dq", False), ("dk", False), ("dv", False), ("dq", True), ("dk", True), ("dv", True))


def judge(colony: GradientColony, bound: Any = backward_bound) -> dict[str, np.ndarray]:
    """Run the arithmetic, the truth and the bound on a colony.

    Returns
    -------
    dict
        By name of :data:`RATIOS` error over bound before the last rounding, the larger one of both ends of all orders,
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
        for name in RATIOS:
            low, high = (error_over_bound(x, getattr(truth, name), getattr(limit, name)) for x in getattr(got, name))
            ratios[name] = np.maximum(low, high).reshape(len(low), -1)
        return ratios


class Search(Climb):
    """One island's search; :meth:`generation` advances it.

    Parameters
    ----------
    island : GradientIsland
    seed : int or list of int
    bound : callable
        What is searched for a hole: a function like :func:`fa3_reference.bounds.backward.backward_bound`.
    """

    ratios = RATIOS
    columns = "dq, dk and dv before their last rounding"
    islands = staticmethod(islands_of)

    def __init__(self, island: GradientIsland, seed: int | list[int], bound: Any = backward_bound) -> None:
        super().__init__(island, OBJECTIVES, (MUTATIONS,), seed)
        self.bound = bound
        self.begin(GradientColony.normal(island, self.rng))

    @staticmethod
    def replay(values: dict[str, Any], bound: Any = backward_bound) -> dict[str, float]:
        """Judge a stored individual again: error / bound by name of :data:`RATIOS`."""
        return {name: float(ratio.max()) for name, ratio in judge(individual(values), bound).items()}

    def restart(self) -> None:
        """Begin with normal inputs, or with the best that was ever met on the objective among them."""
        fresh = GradientColony.normal(self.island, self.rng)
        objective = self.next_objective()
        if objective in self.archive and self.rng.random() < 0.5:
            fresh.adopt(self.archive[objective][1])
        self.begin(fresh)

    def offspring(self) -> tuple[GradientColony, list[list[Tried]]]:
        """Parents in the first half, children of them in the second one."""
        colony = self.parents.copied()
        rng = self.rng
        half = self.island.problems // 2
        tried = []
        (chances,) = self.chances
        for child in range(half, self.island.problems):
            parent, other = rng.integers(half, size=2)
            for name in GENES:
                source = other if rng.random() < 0.05 else parent
                getattr(colony, name)[child] = getattr(colony, name)[source]
            drawn = [chances.draw() for _ in range(1 + int(rng.random() < 0.4))]
            for index in drawn:
                MUTATIONS[index](Child(colony, child, self.draw_step(), rng))
            tried.append((child, int(parent), drawn))
        return colony, [tried]

    def move(self, colony: GradientColony) -> bool:
        moved = bool(self.rng.random() < (0.3 if self.wild else 0.1))
        if moved:
            mutate_scale(colony, self.step, self.wild, self.rng)
        return moved

    def judged(self, colony: GradientColony) -> dict[str, np.ndarray]:
        return judge(colony, self.bound)

    def fitness(self, colony: GradientColony, ratios: dict[str, np.ndarray]) -> np.ndarray:
        heights = ratios[self.objective].max(1)
        return np.where(np.isfinite(heights), heights, 0.0)

    def selected(self, colony: GradientColony, fitness: np.ndarray) -> GradientColony:
        return colony.taken(np.argsort(-fitness, kind="stable"))

    def record(self, colony: GradientColony, ratios: dict[str, np.ndarray]) -> None:
        """Keep the largest ratios, and a violation of every gradient; each is judged alone before it counts."""
        for name, ratio in ratios.items():
            heights = ratio.max(1)
            self.found.above_1 += int((~(ratio <= 1)).sum())
            best = int(np.where(np.isfinite(heights), heights, 0.0).argmax())
            key = (name, self.wild)
            if np.isfinite(heights[best]) and heights[best] > self.archive.get(key, (0.0,))[0]:
                self.archive[key] = float(heights[best]), colony.taken(np.array([best]))
            if np.isfinite(heights[best]) and heights[best] > self.found.height(name):
                find = self._find(colony, name, best)
                self.found.meet(name, find.value, lambda find=find: find.content)
            beyond = np.flatnonzero(~(heights <= 1))
            if len(beyond) and name not in self.found.violations:
                self.found.violations[name] = self._find(colony, name, int(beyond[0]))

    def _find(self, colony: GradientColony, name: str, index: int) -> Find:
        values = colony.to_json(index)
        return Find(self.replay(values, self.bound)[name], self.found.problems, values)
