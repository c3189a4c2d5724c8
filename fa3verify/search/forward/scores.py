"""This module says how the scores of a row mutate: from one code of K to whole tiles of keys 160 binary orders
apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fa3_reference.bounds.steps import LOG2_E
from fa3_reference.formats import FORMATS
from fa3verify.search.forward import chains
from fa3verify.search.forward.colony import Colony, positive, rounded
from fa3verify.search.forward.guide import Guide, some_keys, worst_exponents, worst_sums

VARIANTS = 32  # nudges that are compared


@dataclass(slots=True)
class Row:
    """One row of a colony while it mutates, with what its parent's guide knows; arrays are views of the colony."""

    colony: Colony
    index: int
    scores: np.ndarray  # log2 units, (keys,)
    exact: np.ndarray
    visible: np.ndarray
    top: float
    v: np.ndarray | None  # a channel that climbs with the row, (keys,); none where lse climbs
    step: float  # log2 units
    rng: np.random.Generator

    @classmethod
    def of(
        cls,
        colony: Colony,
        places: tuple[int, int],
        guide: Guide,
        goal: np.ndarray | None,
        step: float,
        rng: np.random.Generator,
    ) -> Row:
        """The child of a parent; ``places`` are theirs, the child's first."""
        index, parent = places
        visible = guide.visible[parent]
        top = float(guide.top[parent])
        scores = np.where(np.isneginf(guide.scores[parent]), top - 30, guide.scores[parent])
        return cls(colony, index, scores, guide.exact[parent], visible, top, goal, step, rng)

    @property
    def keys(self) -> int:
        return self.colony.island.keys

    @property
    def offset(self) -> int:
        return self.colony.island.config.p_offset_log2

    def some(self) -> np.ndarray:
        """Some keys, or those of the largest weights."""
        if self.rng.random() < 0.2:
            return np.argsort(-self.exact)[: self.rng.integers(1, 5)]
        return some_keys(self.keys, self.colony.island.tile_n, self.rng)

    def write(self, keys: np.ndarray, log2_scores: np.ndarray) -> None:
        """Give keys these scores, as nearly as ``width`` digits of K can."""
        self.colony.k[self.index, keys] = self.digits(keys, log2_scores)

    def digits(self, keys: np.ndarray, log2_scores: np.ndarray) -> np.ndarray:
        """K of some keys, (..., keys, width), with which they have scores (..., keys)."""
        colony = self.colony
        i = self.index
        x = log2_scores
        softcap = colony.environment.softcap * LOG2_E
        if softcap:
            x = softcap * np.arctanh(np.clip(x / softcap, -1 + 2.0**-50, 1 - 2.0**-50))
        left = x / colony.factors[i, keys]
        result = np.zeros((*x.shape, colony.q.shape[1]))
        for channel in np.argsort(-np.abs(colony.q[i])):
            q = colony.q[i, channel]
            if q != 0:
                result[..., channel] = rounded(left / q, colony.island.dtype)
                left = left - q * result[..., channel]
        return result


def _nudge(row: Row) -> None:
    keys = row.some()
    row.write(keys, row.scores[keys] + row.step * row.rng.standard_normal(keys.size))


def _shift(row: Row) -> None:
    """Move a group as a whole, by little or by up to 160 binary orders."""
    keys = row.some()
    far = row.rng.random() < 0.5
    row.write(
        keys, row.scores[keys] + (row.rng.uniform(-160, 160) if far else 4 * row.step * row.rng.standard_normal())
    )


def _equal(row: Row) -> None:
    keys = row.some()
    row.write(keys, np.full(keys.size, row.scores[row.rng.integers(row.keys)]))


def _sink(row: Row) -> None:
    """One key ahead of all others."""
    row.write(row.rng.integers(row.keys, size=1), np.array([row.top + row.rng.exponential(8.0)]))


def _vanish(row: Row) -> None:
    """Keys that no longer count."""
    keys = row.some()
    row.write(keys, np.full(keys.size, row.top - row.rng.uniform(20, 400)))


def _weigh(row: Row) -> None:
    """Weights beside the middle of two neighbours of the format of P, or subnormal in it."""
    fmt = FORMATS[row.colony.island.dtype]
    rng = row.rng
    keys = row.some()
    p = np.maximum(row.exact[keys], 2.0 ** (row.offset - 30.0))
    if rng.random() < 0.2:
        p = np.exp2(fmt.min_exponent - rng.uniform(0, fmt.fraction_bits + 2, keys.size))
    ulp = np.exp2(np.maximum(np.floor(np.log2(p)), fmt.min_exponent) - fmt.fraction_bits)
    side = rng.choice([-1, 1]) if rng.random() < 0.5 else rng.choice([-1, 1], keys.size)
    middle = (np.floor(p / ulp) + 0.5) * ulp * (1 + side * np.exp2(-rng.uniform(8, 22)))
    row.write(keys, row.top - row.offset + np.log2(middle))


def _worst_exponents(row: Row) -> None:
    """Exponents of which ex2 errs most."""
    keys = row.some()
    fractions = worst_exponents()
    half = len(fractions) // 2
    draw = row.rng.integers(len(fractions), size=keys.size)
    if row.rng.random() < 0.5:  # all of one sign
        draw = draw % half + half * row.rng.integers(2)
    row.write(keys, row.top + np.ceil(row.scores[keys] - row.top) + fractions[draw])


def _worst_sum(row: Row) -> None:
    """A row sum of which rcp or lg2 errs most, by the weight of one key."""
    key = row.rng.integers(row.keys, size=1)
    rest = row.exact.sum() - row.exact[key]
    wanted = row.rng.choice(worst_sums()) * np.exp2(np.floor(np.log2(row.exact.sum())))
    if 0 < wanted - rest < np.exp2(row.offset):
        row.write(key, row.top - row.offset + np.log2(wanted - rest))


def _screened(row: Row) -> None:
    """The best of many nudges, by what the guide expects of their errors."""
    rng = row.rng
    colony = row.colony
    keys = row.some()
    if colony.island.is_chained:
        return chains.screened(row)
    steps = np.exp2(rng.uniform(-20, 1, (VARIANTS, 1)))
    moved = (rng.random((VARIANTS, keys.size)) < rng.random((VARIANTS, 1))) * rng.standard_normal((VARIANTS, keys.size))
    k = np.repeat(colony.k[row.index][None], VARIANTS, axis=0)
    k[:, keys] = row.digits(keys, row.scores[keys] + steps * moved)
    one = np.full(VARIANTS, row.index)
    q_descale = colony.q_descale[one]
    if colony.island.dtype == "e4m3" and rng.random() < 0.3:
        k[:] = colony.k[row.index]
        q_descale = positive(q_descale * np.exp2(steps[:, 0] * rng.standard_normal(VARIANTS)))
    variants = replace(colony, q=colony.q[one], k=k, q_descale=q_descale)
    guide = Guide.of(variants, np.repeat(row.visible[None], VARIANTS, axis=0))
    errors = guide.lse_errors if row.v is None else guide.relative_errors(row.v)
    best = int(np.nan_to_num(errors, posinf=0.0).argmax())
    colony.k[row.index] = k[best]
    colony.q_descale[row.index] = q_descale[best]


def _crumbs(row: Row) -> None:
    """A few large weights, then ones of about half a unit of their sum, of which rounding takes or gives the most."""
    rng = row.rng
    n = row.colony.island.tile_n
    place = np.arange(row.keys) % n
    small = place >= min(8 * rng.integers(1, 4), n // 2)
    depth = 22 + rng.integers(0, 6) + np.exp2(-rng.uniform(1, 10)) * rng.choice([-1, 1])
    row.write(np.flatnonzero(~small), np.full(row.keys - small.sum(), row.top - rng.integers(0, 2) * rng.random()))
    row.write(np.flatnonzero(small), np.full(small.sum(), row.top - depth))


def _ladder(row: Row) -> None:
    """One key of every tile ahead of its others, and the tiles apart."""
    rng = row.rng
    n = row.colony.island.tile_n
    gap = rng.uniform(0, 124)
    rise = rng.choice([-1, 1])
    for start in range(0, row.keys, n):
        keys = np.arange(start, min(start + n, row.keys))
        leader = row.top + rise * gap * (start // n) - rng.random() * rng.integers(0, 2) - gap * rng.integers(0, 2)
        row.write(keys, np.where(keys == start + rng.integers(keys.size), leader, leader - rng.uniform(30, 200)))


def _codes(row: Row) -> None:
    """Neighbouring codes, signs and exponents of single elements of Q or K."""
    colony = row.colony
    rng = row.rng
    target = colony.q[row.index] if rng.random() < 0.3 else colony.k[row.index][rng.choice(row.some())]
    chosen = rng.random(target.shape) < max(rng.random() ** 2, 1 / target.size)
    kind = rng.integers(4)
    factor = (
        1 + rng.choice([-1, 1], target.shape) * FORMATS[colony.island.dtype].epsilon,
        -1.0,
        np.exp2(rng.integers(-4, 5, target.shape)),
        rng.uniform(0.5, 2, target.shape),
    )[kind]
    target[...] = np.where(chosen, rounded(target * factor, colony.island.dtype), target)


def _size(row: Row) -> None:
    """Make all scores larger or smaller."""
    colony = row.colony
    rng = row.rng
    reach = 20 if rng.random() < 0.2 else 3
    factor = np.exp2(rng.integers(-reach, reach + 1) if rng.random() < 0.5 else row.step * rng.standard_normal())
    if colony.island.dtype == "e4m3":
        colony.q_descale[row.index] = positive(colony.q_descale[row.index] * factor)
    else:
        colony.q[row.index] = rounded(colony.q[row.index] * factor, colony.island.dtype)


MUTATIONS: tuple[Callable[[Row], None], ...] = (
    *(_nudge, _shift, _equal, _sink, _vanish, _weigh, _worst_exponents, _worst_sum, _codes, _size),
    *(_screened, _screened, _crumbs, _ladder, *chains.MUTATIONS),
)
