"""The search on one island: parents and children side by side, every row with every channel of V.

A colony keeps the better half of its rows and of its channels; of rows that look alike only a few stay. A colony that
has stopped climbing starts again from normal inputs, or in a niche from the best that was ever met there. A niche is a
binary order of the bound's size. In it a small term of the bound is searched where it is the largest term. The loop
over generations stands in :mod:`fa3verify.search.climb`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fa3verify.search.climb import Ratios, Search, Tried, place_of_largest
from fa3verify.search.forward import scores, surroundings, values
from fa3verify.search.forward.colony import ForwardColony, individual
from fa3verify.search.forward.guide import Guide, Row

NICHES = (-27, 0)  # log2 of a bound: a niche is a binary order, and the first and the last one are open


class ForwardSearch(Search):
    """The search on one island of the forward."""

    individual = staticmethod(individual)
    MUTATIONS = (scores.MUTATIONS, values.MUTATIONS)
    AGAIN = 0.3

    niche: int | None = None

    def normal(self) -> ForwardColony:
        return ForwardColony.normal(self.island, self.rng)

    def restart(self) -> None:
        fresh = self.normal()
        objective = self.next_objective()[0]
        niches = [niche for name, niche in self.archive if name == objective]
        self.niche = None
        if niches and self.rng.random() >= 0.3:
            self.niche = niches[self.rng.integers(len(niches))]
            fresh.adopt(self.archive[objective, self.niche][1], (0, 0))
        self.begin(fresh)

    def fitness(self, colony: ForwardColony, ratios: Ratios) -> np.ndarray:
        """Return error over bound, (problems, columns or 1), halved for every binary order away from the niche.

        The best of each niche goes into the archive.
        """
        ratio, bound = (
            ratios[name].reshape(self.island.problems, -1) for name in (self.objective, f"{self.objective}_bound")
        )
        counts = np.isfinite(ratio) & np.isfinite(bound) & (ratio > 0)  # a lost output leads nowhere: height 0
        niches = np.floor(np.clip(np.where(counts, bound, 0.0), *NICHES)).astype(int)
        ratio = np.where(counts, ratio, 0.0)
        for niche in np.unique(niches[counts]).tolist():
            row, column = place_of_largest(np.where(niches == niche, ratio, 0.0))
            if ratio[row, column] > self.archive.get((self.objective, niche), (0.0,))[0]:
                one = colony.taken(np.array([row]), np.array([column]))
                self.archive[self.objective, niche] = float(ratio[row, column]), one
        return ratio if self.niche is None else ratio * np.exp2(-np.abs(niches - self.niche))

    def move(self, colony: ForwardColony) -> bool:
        leads = self.island.softcap and not self.island.is_chained  # there softmax_scale and softcap matter most
        moved = bool(self.rng.random() < (0.5 if self.wild or leads else 0.2))
        if moved:
            surroundings.mutate(colony, self.step, self.wild, self.rng)
        return moved

    def judged(self, colony: ForwardColony) -> Ratios:
        self.guide = Guide.of(colony)
        return self.judge.ratios(colony, self.guide)

    def offspring(self) -> tuple[ForwardColony, list[list[Tried]]]:
        self.of_parents = Guide.of(self.parents)
        return super().offspring()

    def conceive(
        self, colony: ForwardColony, axis: int, child: int, parents: tuple[int, int]
    ) -> Callable[[], Row | values.Column]:
        """Copy the genes of one parent to a child, now and then some keys of another, and return its mutant.

        The mutant knows a partner from the other axis, which it is to err with: mostly one of the best.
        """
        rng = self.rng
        parent, other = parents
        for name in (name for name, own in colony.AXES.items() if own == axis):
            gene = getattr(colony, name)
            gene[child] = gene[parent]
        if rng.random() < 0.15:
            keys = rng.random(self.island.keys) < rng.random()
            by_key = colony.v if axis else colony.k
            by_key[child, keys] = by_key[other, keys]
        partner = None if axis == 0 and self.objective == "lse" else int(rng.exponential(2))
        if axis:
            row = min(partner or 0, self.island.problems // 2 - 1)
            mutant = values.Column(colony, child, self.draw_step(), rng, self.of_parents, row)
        else:
            goal = None if partner is None else colony.v[min(partner, self.island.columns // 2 - 1)]
            mutant = Row(colony, child, self.draw_step(), rng, self.of_parents, parent, goal)
        return lambda: mutant

    def selected(self, colony: ForwardColony, fitness: np.ndarray) -> ForwardColony:
        """Put the better half of rows and channels first, best ones foremost."""
        heights = fitness.max(1)
        rows = _varied(heights, _looks(self.guide), len(heights) // 2)
        partners = dict.fromkeys(fitness[rows].argmax(1)) if fitness.shape[1] > 1 else {}
        by_height = np.argsort(-fitness.max(0)) if fitness.shape[1] > 1 else self.rng.permutation(len(colony.v))
        columns = np.array([*dict.fromkeys([*partners, *by_height])][: len(colony.v) // 2])
        rest = (np.setdiff1d(np.arange(n), x) for n, x in ((len(heights), rows), (len(colony.v), columns)))
        row_rest, column_rest = rest
        return colony.taken(np.concatenate([rows, row_rest]), np.concatenate([columns, column_rest]))


@np.errstate(all="ignore")
def _looks(guide: Guide) -> np.ndarray:
    """Return a number for each row that says what it looks like; rows that look alike have the same number.

    It combines how many keys matter, how far the median score is below the maximum, and how large the maximum is.
    """
    weights = np.exp2(guide.scores - guide.top[:, None])
    many = np.searchsorted([1.5, 4, 16], weights.sum(1) ** 2 / (weights**2).sum(1))
    gap = np.searchsorted([1, 20, 100], guide.top - np.median(guide.scores, axis=1))
    return many + 4 * gap + 16 * np.searchsorted([2, 16, 256], np.abs(guide.top))


def _varied(heights: np.ndarray, looks: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of ``count`` large heights, largest first.

    Equal heights, and rows beyond a third of ``count`` that look alike, are taken only if too few others remain.
    """
    chosen: list[int] = []
    passed: list[int] = []
    for index in np.argsort(-heights):
        alike = sum(looks[i] == looks[index] for i in chosen)
        is_copy = any(heights[i] == heights[index] for i in chosen)
        (passed if is_copy or alike > count // 3 else chosen).append(int(index))
        if len(chosen) == count:
            break
    return np.array([*chosen, *passed][:count])
