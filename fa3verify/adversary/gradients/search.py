"""The search on one island of gradients: the better half of the individuals stays, the other half are its children.

A colony that no longer climbs starts again, from normal inputs or from the best that was ever met on its objective.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fa3_reference.attention import Attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.bounds.backward import backward_bound
from fa3verify.adversary.climb import Chances, Climb, Find, Findings
from fa3verify.adversary.gradients.colony import GENES, GradientColony, GradientIsland, individual
from fa3verify.adversary.gradients.execution import execute
from fa3verify.adversary.gradients.mutations import MUTATIONS, Child, mutate_scale
from fa3verify.operations.ratios import error_over_bound

RATIOS = ("dq", "dk", "dv")  # before the last rounding
OBJECTIVES = (("dq", False), ("dk", False), ("dv", False), ("dq", True), ("dk", True), ("dv", True))


class GradientRatios(NamedTuple):
    """Error over bound before the last rounding, the larger one of both ends of all orders, in the shapes of q, k and
    v.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    def largest(self, name: str) -> np.ndarray:
        """Return the largest of every individual, (problems,)."""
        ratio = getattr(self, name)
        return ratio.reshape(len(ratio), -1).max(1)


def judge(colony: GradientColony, bound: Any = backward_bound) -> GradientRatios:
    """Run the arithmetic, the truth and the bound on a colony."""
    problem = colony.problem
    operands = colony.operands
    with np.errstate(all="ignore"):
        got = execute(colony)
        q, k, v, dout, out, lse = operands.dequantized(problem)
        truth = attention_bwd(problem, q, k, v, dout, Attention(out, lse))
        limit = bound(problem, operands, colony.island.model)
        ends = zip(got, truth, limit, strict=True)
        return GradientRatios(
            *(np.maximum(*(error_over_bound(x, exact, most) for x in sides)) for sides, exact, most in ends)
        )


class Search(Climb):
    """One island's search; :meth:`generation` advances it.

    Parameters
    ----------
    island : GradientIsland
    seed : int or list of int
    bound : callable
        What is searched for a hole: a function like :func:`fa3_reference.bounds.backward.backward_bound`.
    """

    def __init__(self, island: GradientIsland, seed: int | list[int], bound: Any = backward_bound) -> None:
        super().__init__(OBJECTIVES, seed)
        self.island, self.bound, self.chances = island, bound, Chances(MUTATIONS, self.rng)
        self.archive: dict[tuple[str, bool], tuple[float, GradientColony]] = {}  # objective -> best individual
        self.begin(GradientColony.normal(island, self.rng))

    def _restart(self) -> None:
        self.found.restarts += 1
        fresh = GradientColony.normal(self.island, self.rng)
        objective = self.next_objective()
        if objective in self.archive and self.rng.random() < 0.5:
            best = self.archive[objective][1]
            fresh.softmax_scale = best.softmax_scale
            fresh.softcap = best.softcap
            for name in GENES:
                getattr(fresh, name)[0] = getattr(best, name)[0]
        self.begin(fresh)

    def generation(self) -> GradientRatios:
        """Breed, judge and select once."""
        colony = self.parents
        tried = []
        moved = False
        if not self.is_new:
            colony, tried = self._offspring()
            moved = bool(self.rng.random() < (0.3 if self.wild else 0.1))
            if moved:
                mutate_scale(colony, self.step, self.wild, self.rng)
        self.is_new = False
        verdict = judge(colony, self.bound)
        self.found.problems += self.island.problems
        self.found.generations += 1
        self._record(colony, verdict)
        heights = verdict.largest(self.objective)
        heights = np.where(np.isfinite(heights), heights, 0.0)  # a lost gradient is recorded; it leads nowhere
        self._select(colony, heights, tried, moved)
        return verdict

    def _select(
        self, colony: GradientColony, heights: np.ndarray, tried: list[tuple[int, int, list[int]]], moved: bool
    ) -> None:
        top = float(heights.max())
        if not self.is_lost(top, moved):
            better = [bool(heights[child] > heights[parent]) for child, parent, _ in tried]
            for (_, _, drawn), is_better in zip(tried, better, strict=True):
                self.chances.learn(drawn, is_better)
            self.fit_step(sum(better), len(tried))
            self.parents = colony.taken(np.argsort(-heights, kind="stable"))
        if self.climbed(top, moved):
            self._restart()

    def _offspring(self) -> tuple[GradientColony, list[tuple[int, int, list[int]]]]:
        """Parents in the first half, children of them in the second one."""
        colony = self.parents.copied()
        rng = self.rng
        half = self.island.problems // 2
        tried = []
        with np.errstate(all="ignore"):
            for child in range(half, self.island.problems):
                parent, other = rng.integers(half, size=2)
                for name in GENES:
                    source = other if rng.random() < 0.05 else parent
                    getattr(colony, name)[child] = getattr(colony, name)[source]
                drawn = [self.chances.draw() for _ in range(1 + int(rng.random() < 0.4))]
                for index in drawn:
                    MUTATIONS[index](Child(colony, child, self.draw_step(), rng))
                tried.append((child, int(parent), drawn))
        return colony, tried

    def _record(self, colony: GradientColony, verdict: GradientRatios) -> None:
        """Keep the largest ratios, and a violation of every gradient; each is judged alone before it counts."""
        for name in RATIOS:
            ratio = getattr(verdict, name)
            heights = verdict.largest(name)
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
        return Find(replay(values, self.bound)[name], self.found.problems, values)


def replay(values: dict[str, Any], bound: Any = backward_bound) -> dict[str, float]:
    """Judge a stored individual again: error / bound by name of :data:`RATIOS`."""
    verdict = judge(individual(values), bound)
    return {name: float(verdict.largest(name)[0]) for name in RATIOS}


def search(island: GradientIsland, seed: int | list[int], problems: int, bound: Any = backward_bound) -> Findings:
    """Search an island from normal inputs until so many problems were judged."""
    run = Search(island, seed, bound)
    while run.found.problems < problems:
        run.generation()
    return run.found
