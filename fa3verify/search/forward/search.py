"""The search on one island: parents and children side by side, every row with every channel of V.

A colony keeps its better half of rows and of channels. Of rows that look alike only a few stay, and what mutates
successfully mutates more often. A colony that no longer climbs starts again: from normal inputs, or in a niche, which
is a size of the bound, from the best that was ever met there. So small terms of the bound are tried where they are the
largest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fa3_reference.bounds.forward import forward_bound
from fa3verify.search.climb import Chances, Climb, Find, Tried
from fa3verify.search.forward import scores, surroundings, values
from fa3verify.search.forward.causes import cause_of
from fa3verify.search.forward.colony import Colony, individual
from fa3verify.search.forward.guide import Guide
from fa3verify.search.forward.islands import Island, islands_of
from fa3verify.search.forward.judge import OVER_BOUND, Bound, ColonyRatios, Judge, judge, judge_rounded

NICHES = (-27, 0)  # log2 of a bound: a niche is a binary order, and the first and the last one are open


class Search(Climb):
    """One island's search; :meth:`generation` advances it.

    Parameters
    ----------
    island : Island
    seed : int or list of int
    judge : Judge
        What climbs.
    start : (Colony, int, int), optional
        An individual, its row and its column, that is among the first; all of them are normal otherwise.
    """

    ratios = ("out", "rounded", "lse")
    columns = "out before and after its last rounding, lse"
    islands = staticmethod(islands_of)

    def __init__(
        self,
        island: Island,
        seed: int | list[int],
        judge: Judge = OVER_BOUND,
        start: tuple[Colony, int, int] | None = None,
    ) -> None:
        super().__init__(island, judge.objectives, (scores.MUTATIONS, values.MUTATIONS), seed)
        self.judge = judge
        colony = Colony.normal(island, self.rng)
        if start:
            colony.adopt(*start)
        self._start(colony)

    @staticmethod
    def replay(values: dict[str, Any], bound: Bound = forward_bound) -> dict[str, float]:
        """Judge a stored individual again: error / bound by name of :attr:`ratios`."""
        colony, row, column = individual(values)
        found = judge(colony, bound)
        rounded = judge_rounded(colony, bound)[row, column]
        return {"out": float(found.out[row, column]), "rounded": float(rounded), "lse": float(found.lse[row])}

    def _start(self, colony: Colony, niche: int | None = None) -> None:
        self.niche = niche
        self.begin(colony)

    def restart(self) -> None:
        fresh = Colony.normal(self.island, self.rng)
        objective = self.next_objective()[0]
        niches = [niche for name, niche in self.archive if name == objective]
        if not niches or self.rng.random() < 0.3:
            return self._start(fresh)
        niche = niches[self.rng.integers(len(niches))]
        fresh.adopt(self.archive[objective, niche][1], 0, 0)
        self._start(fresh, niche)

    def fitness(self, colony: Colony, ratios: ColonyRatios) -> np.ndarray:
        """Return what climbs, (problems, columns or 1): error over bound, less outside the niche; the archive learns of
        it.
        """
        ratio = getattr(ratios, self.objective)
        bound = getattr(ratios, f"{self.objective}_bound")
        ratio = ratio.reshape(len(ratio), -1)
        bound = bound.reshape(len(bound), -1)
        counts = np.isfinite(ratio) & np.isfinite(bound) & (ratio > 0)  # a lost output is recorded; it leads nowhere
        niches = np.floor(np.clip(np.where(counts, bound, 0.0), *NICHES)).astype(int)
        ratio = np.where(counts, ratio, 0.0)
        for niche in np.unique(niches[counts]).tolist():
            row, column = _place(np.where(niches == niche, ratio, 0.0))
            if ratio[row, column] > self.archive.get((self.objective, niche), (0.0,))[0]:
                one = colony.taken(np.array([row]), np.array([column]))
                self.archive[self.objective, niche] = float(ratio[row, column]), one
        return ratio if self.niche is None else ratio * np.exp2(-np.abs(niches - self.niche))

    def move(self, colony: Colony) -> bool:
        leads = self.island.softcap and not self.island.is_chained
        moved = bool(self.rng.random() < (0.5 if self.wild or leads else 0.2))
        if moved:
            surroundings.mutate(colony, self.step, self.wild, self.rng)
        return moved

    def judged(self, colony: Colony) -> ColonyRatios:
        self.guide = Guide.of(colony)
        return self.judge(colony, self.guide)

    def offspring(self) -> tuple[Colony, list[list[Tried]]]:
        """Parents in the first halves, children of them in the second ones."""
        guide = Guide.of(self.parents)
        colony = self.parents.copied()
        rng = self.rng
        island = self.island
        of_rows: list[Tried] = []
        of_columns: list[Tried] = []
        rows = island.problems // 2
        columns = island.columns // 2
        row_chances, column_chances = self.chances
        for child in range(rows, island.problems):
            parent, other = rng.integers(rows, size=2)
            colony.q[child] = colony.q[parent]
            colony.q_descale[child] = colony.q_descale[parent]
            colony.k[child] = colony.k[parent]
            if rng.random() < 0.15:  # keys of another parent
                keys = rng.random(island.keys) < rng.random()
                colony.k[child, keys] = colony.k[other, keys]
            goal = None if self.objective == "lse" else colony.v[min(int(rng.exponential(2)), columns - 1)]
            row = scores.Row.of(colony, (child, parent), guide, goal, self.draw_step(), rng)
            of_rows.append((child, parent, self._mutate(row_chances, row)))
        for child in range(columns, island.columns):
            parent, other = rng.integers(columns, size=2)
            colony.v[child] = colony.v[parent]
            if rng.random() < 0.15:
                keys = rng.random(island.keys) < rng.random()
                colony.v[child, keys] = colony.v[other, keys]
            partner = min(int(rng.exponential(2)), rows - 1)
            column = values.Column.of(colony, child, guide, partner, self.draw_step(), rng)
            of_columns.append((child, parent, self._mutate(column_chances, column)))
        return colony, [of_rows, of_columns]

    def _mutate(self, chances: Chances, target: Any) -> list[int]:
        drawn = [chances.draw() for _ in range(1 + int(self.rng.random() < 0.3))]
        for index in drawn:
            chances.mutations[index](target)
        return drawn

    def selected(self, colony: Colony, fitness: np.ndarray) -> Colony:
        """The better half of rows and channels first, best ones foremost."""
        heights = fitness.max(1)
        rows = _varied(heights, _looks(self.guide), len(heights) // 2)
        partners = dict.fromkeys(fitness[rows].argmax(1)) if fitness.shape[1] > 1 else {}
        by_height = np.argsort(-fitness.max(0)) if fitness.shape[1] > 1 else self.rng.permutation(len(colony.v))
        columns = np.array([*dict.fromkeys([*partners, *by_height])][: len(colony.v) // 2])
        rest = (np.setdiff1d(np.arange(n), x) for n, x in ((len(heights), rows), (len(colony.v), columns)))
        row_rest, column_rest = rest
        return colony.taken(np.concatenate([rows, row_rest]), np.concatenate([columns, column_rest]))

    def record(self, colony: Colony, ratios: ColonyRatios) -> None:
        """Keep the largest ratios, and one violation of every cause; each is judged alone before it counts."""
        for name in self.judge.records:
            ratio = getattr(ratios, name)
            ratio = np.where(np.isfinite(ratio), ratio, 0.0)
            row, column = _place(ratio)
            if ratio.flat[int(ratio.argmax())] > self.found.height(name):
                self._keep(colony, name, row, column)
        for ratio in (ratios.out, ratios.lse):
            beyond = np.argwhere(~(ratio <= self.judge.limit))
            self.found.above_1 += len(beyond)
            for place in self.rng.permutation(len(beyond))[:3]:
                self._violation(colony, int(beyond[place][0]), int(beyond[place][-1]) if ratio.ndim == 2 else 0)

    def _keep(self, colony: Colony, name: str, row: int, column: int) -> None:
        lone = colony.alone(row, column)
        ratio = self.judge.published(lone, name)
        alone = float(ratio[row, column] if ratio.ndim == 2 else ratio[row])
        if 0 < alone < np.inf:
            self.found.meet(name, alone, lambda: lone.to_json(row, column))

    def _violation(self, colony: Colony, row: int, column: int) -> None:
        cause = cause_of(colony, row, column)
        if cause in self.found.violations:
            return
        lone = colony.alone(row, column)
        verdict = self.judge(lone)
        ratio = float(max(verdict.out[row, column], verdict.lse[row]))
        if ratio > self.judge.limit:
            self.found.violations[cause] = Find(ratio, self.found.problems, lone.to_json(row, column))


def _place(ratio: np.ndarray) -> tuple[int, int]:
    where = np.unravel_index(int(ratio.argmax()), ratio.shape)
    return int(where[0]), int(where[1]) if len(where) == 2 else 0


def _looks(guide: Guide) -> np.ndarray:
    """Return what a row looks like, as one number: how many keys matter, how far the next one is, how large the maximum
    is.
    """
    weights = np.exp2(guide.scores - guide.top[:, None])
    with np.errstate(all="ignore"):
        many = np.searchsorted([1.5, 4, 16], weights.sum(1) ** 2 / (weights**2).sum(1))
        gap = np.searchsorted([1, 20, 100], guide.top - np.median(guide.scores, axis=1))
    large = np.searchsorted([2, 16, 256], np.abs(guide.top))
    return many + 4 * gap + 16 * large


def _varied(heights: np.ndarray, looks: np.ndarray, count: int) -> np.ndarray:
    """Indices of ``count`` large heights, no two of them equal and at most a third of one look while others remain."""
    chosen: list[int] = []
    passed: list[int] = []
    for index in np.argsort(-heights):
        alike = sum(looks[i] == looks[index] for i in chosen)
        is_copy = any(heights[i] == heights[index] for i in chosen)
        (passed if is_copy or alike > count // 3 else chosen).append(int(index))
        if len(chosen) == count:
            break
    return np.array([*chosen, *passed][:count])
