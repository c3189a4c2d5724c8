"""The search on one island: parents and children side by side, every row with every channel of V.

A colony keeps the better half of its rows and of its channels; of rows that look alike only a few stay. A colony that
has stopped climbing starts again from normal inputs, or in a niche from the best that was ever met there. A niche is a
binary order of the bound's size. In it a small term of the bound is searched where it is the largest term. The loop
over generations stands in :mod:`fa3verify.search.climb`. Of the
individuals that violate a bound one is kept for each cause, the most extreme property of its numbers that may be the
trigger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fa3_kernels.plan.tiles import split_ranges
from fa3_reference.bounds.device import FP32_MAX, FP32_MIN_NORMAL
from fa3_reference.bounds.steps import LOG2_E
from fa3_reference.formats import FORMATS
from fa3verify.search.climb import Ratios, Search, Tried, place_of_largest
from fa3verify.search.colony import Place
from fa3verify.search.forward import scores, surroundings, values
from fa3verify.search.forward.colony import ForwardColony, individual
from fa3verify.search.forward.guide import Guide
from fa3verify.search.forward.row import Row

# Name and description of each cause, the most extreme first. 2^127 below is half of what binary32 holds, so that a
# number on its way to an overflow counts.
CAUSES: dict[str, str] = {
    "split": "the output of a split overflows, though all splits together do not",
    "softcap": "softcap, or what is computed from it, leaves binary32",
    "scale product": "a product of softmax_scale and descales leaves binary32",
    "raw score": "a score overflows before it is scaled",
    "large maximum": "rounding a row maximum moves every weight by a binary order or more",
    "descale ratio": "the ratio of V descales of neighbouring blocks leaves binary32",
    "unnormalised": "the output overflows before it is divided by the row sum",
    "flushed": "a weight or a factor between maxima is flushed to zero",
    "subnormal": "a stored V, or a stored P that meets a value, is subnormal",
    "other": "none of these",
}


@np.errstate(all="ignore")
def cause_of(colony: ForwardColony, row: int, column: int) -> str:
    """Return the first of :data:`CAUSES` whose trigger an individual has, "other" where it has none."""
    lone, _ = colony.alone((row, column))
    triggers: dict[str, Callable[[], bool]] = {  # in the order of CAUSES
        "split": lambda: _split(lone, row, column),
        "softcap": lambda: _softcap(lone, row),
        "scale product": lambda: _scale_product(lone, row),
        "raw score": lambda: bool((np.abs(lone.k[row]) @ np.abs(lone.q[row]) >= 2.0**127).any()),
        "large maximum": lambda: abs(Guide.of(lone).top[row]) >= 2.0**23,
        "descale ratio": lambda: _descale_ratio(lone),
        "unnormalised": lambda: _unnormalised(lone, row, column),
        "flushed": lambda: _flushed(lone, row),
        "subnormal": lambda: _subnormal(lone, row, column),
    }
    return next((cause for cause in CAUSES if cause in triggers and triggers[cause]()), "other")


def _leaves(*values: float) -> bool:
    """Tell whether a number is beyond binary32's normal range."""
    size = np.abs(np.array(values, np.float64))
    return bool(((size > FP32_MAX) | (size < FP32_MIN_NORMAL)).any())


def _softcap(colony: ForwardColony, row: int) -> bool:
    softcap = colony.environment.softcap
    return bool(softcap) and _leaves(softcap * LOG2_E, 2 / softcap, *(2 / softcap * colony.factors[row]))


def _scale_product(colony: ForwardColony, row: int) -> bool:
    scale = colony.environment.softmax_scale * LOG2_E
    return _leaves(scale, scale * float(colony.q_descale[row]), *colony.factors[row])


def _descale_ratio(colony: ForwardColony) -> bool:
    descale = colony.environment.v_descale.astype(np.float64)
    return descale.size > 1 and _leaves(*(descale[1:] / descale[:-1]))


def _visits(colony: ForwardColony, row: int) -> Iterator[list[tuple[slice, float]]]:
    """Yield for each split its key tiles in the order of the kernel, each with the row's maximum up to then.

    Tiles without a visible key are left out.
    """
    island = colony.island
    scores = Guide.of(colony).scores[row]
    with_keys = [
        t for t in range(island.tiles) if np.isfinite(scores[t * island.tile_n : (t + 1) * island.tile_n]).any()
    ]
    for part in split_ranges(range(island.tiles), island.num_splits):
        visits = []
        top = -np.inf
        for tile in (t for t in reversed(part) if t in with_keys):
            keys = slice(tile * island.tile_n, (tile + 1) * island.tile_n)
            top = max(top, float(scores[keys].max()))
            visits.append((keys, top))
        yield visits


def _weights(colony: ForwardColony, row: int, keys: slice, top: float) -> np.ndarray:
    """Return P of a tile when it is visited."""
    return np.exp2(Guide.of(colony).scores[row, keys] - top + colony.island.config.p_offset_log2)


def _unnormalised(colony: ForwardColony, row: int, column: int) -> bool:
    """Tell whether the running sum of P |V|, rescaled from tile to tile, may overflow."""
    v = np.abs(colony.v[column])
    descale = colony.per_key(colony.environment.v_descale)
    for visits in _visits(colony, row):
        total = 0.0
        before = None
        for keys, top in visits:
            here = descale[keys.start]
            if before is not None:
                total *= np.exp2(before[0] - top) * before[1] / here
            total += _weights(colony, row, keys, top) @ v[keys]
            if total >= 2.0**127 or total * here >= 2.0**127:
                return True
            before = top, here
    return False


def _split(colony: ForwardColony, row: int, column: int) -> bool:
    """Tell whether the normalised output of a single split may overflow."""
    v = colony.v[column] * colony.per_key(colony.environment.v_descale)
    for visits in _visits(colony, row) if colony.island.num_splits > 1 else ():
        weights = np.zeros(v.size)
        for keys, _ in visits:
            weights[keys] = _weights(colony, row, keys, visits[-1][1])
        if np.abs(weights @ v) >= 2.0**127 * weights.sum() > 0:
            return True
    return False


def _flushed(colony: ForwardColony, row: int) -> bool:
    """Tell whether maxima of tiles or splits lie so far apart that a factor between them may be subnormal."""
    maxima = np.array([top for visits in _visits(colony, row) for _, top in visits])
    return maxima.size > 1 and float(np.ptp(maxima)) > 125


def _subnormal(colony: ForwardColony, row: int, column: int) -> bool:
    """Tell whether a P that does not round to zero meets a V, and one of them is subnormal."""
    fmt = FORMATS[colony.island.dtype]
    v = np.abs(colony.v[column])
    for visits in _visits(colony, row):
        for keys, top in visits:
            p = _weights(colony, row, keys, top)
            counts = (p > fmt.min_subnormal / 4) & (v[keys] > 0)
            if (counts & ((p < fmt.min_normal) | (v[keys] < fmt.min_normal))).any():
                return True
    return False


NICHES = (-27, 0)  # log2 of a bound: a niche is a binary order, and the first and the last one are open


class ForwardSearch(Search):
    """The search on one island of the forward."""

    individual = staticmethod(individual)
    MUTATIONS = (scores.MUTATIONS, values.MUTATIONS)
    AGAIN = 0.3
    VIOLATED = ("out", "lse")

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

    def suspects(self, beyond: np.ndarray) -> np.ndarray:
        return beyond[self.rng.permutation(len(beyond))[:3]]

    def cause(self, colony: ForwardColony, name: str, place: Place) -> tuple[str, tuple[str, ...]]:
        return cause_of(colony, *place), self.VIOLATED


@np.errstate(all="ignore")
def _looks(guide: Guide) -> np.ndarray:
    """Return a number for each row that says what it looks like; rows that look alike have the same number.

    It combines how many keys matter, how far the median score is below the maximum, and how large the maximum is.
    """
    weights = np.exp2(guide.scores - guide.top[:, None])
    many = np.searchsorted([1.5, 4, 16], weights.sum(1) ** 2 / (weights**2).sum(1))
    gap = np.searchsorted([1, 20, 100], guide.top - np.median(guide.scores, axis=1))
    large = np.searchsorted([2, 16, 256], np.abs(guide.top))
    return many + 4 * gap + 16 * large


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
