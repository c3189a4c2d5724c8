"""How the scores of a row mutate: from one code of K to whole tiles of keys 160 binary orders apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fa3_reference.formats import FORMATS
from fa3verify.adversary.colony import Colony, positive, rounded
from fa3verify.adversary.guide import Guide, some_keys, worst_exponents, worst_sums


@dataclass(slots=True)
class Row:
    """One row of a colony while it mutates, with what its parent's guide knows; arrays are views of the colony."""

    colony: Colony
    index: int
    scores: np.ndarray  # log2 units, (keys,)
    exact: np.ndarray
    top: float
    step: float  # log2 units
    rng: np.random.Generator

    @classmethod
    def of(cls, colony: Colony, index: int, guide: Guide, parent: int, step: float, rng: np.random.Generator) -> Row:
        scores = np.where(guide.visible[parent], guide.scores[parent], guide.top[parent] - 30)
        return cls(colony, index, scores, guide.exact[parent], float(guide.top[parent]), step, rng)

    @property
    def keys(self) -> int:
        return self.colony.island.keys

    @property
    def offset(self) -> int:
        return self.colony.island.config.p_offset_log2

    def some(self) -> np.ndarray:
        return some_keys(self.keys, self.colony.island.tile_n, self.rng)

    def write(self, keys: np.ndarray, log2_scores: np.ndarray) -> None:
        """Give keys these scores, as nearly as ``width`` digits of K can."""
        colony, i = self.colony, self.index
        x = np.broadcast_to(log2_scores, keys.shape).astype(np.float64)
        softcap = colony.environment.softcap * np.log2(np.e)
        if softcap:
            x = softcap * np.arctanh(np.clip(x / softcap, -1 + 2.0**-50, 1 - 2.0**-50))
        left = x / colony.factors[i, keys]
        digits = np.zeros((keys.size, colony.q.shape[1]))
        for channel in np.argsort(-np.abs(colony.q[i])):
            q = colony.q[i, channel]
            if q != 0:
                digits[:, channel] = rounded(left / q, colony.island.dtype)
                left = left - q * digits[:, channel]
        colony.k[i, keys] = digits


def _nudge(row: Row) -> None:
    keys = row.some()
    row.write(keys, row.scores[keys] + row.step * row.rng.standard_normal(keys.size))


def _shift(row: Row) -> None:
    """Move a group as a whole, by little or by up to 160 binary orders."""
    keys, far = row.some(), row.rng.random() < 0.5
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
    fmt, rng, keys = FORMATS[row.colony.island.dtype], row.rng, row.some()
    p = np.maximum(row.exact[keys], 2.0 ** (row.offset - 30.0))
    if rng.random() < 0.2:
        p = np.exp2(fmt.min_exponent - rng.uniform(0, fmt.fraction_bits + 2, keys.size))
    ulp = np.exp2(np.maximum(np.floor(np.log2(p)), fmt.min_exponent) - fmt.fraction_bits)
    side = rng.choice([-1, 1]) if rng.random() < 0.5 else rng.choice([-1, 1], keys.size)
    middle = (np.floor(p / ulp) + 0.5) * ulp * (1 + side * np.exp2(-rng.uniform(8, 22)))
    row.write(keys, row.top - row.offset + np.log2(middle))


def _worst_exponents(row: Row) -> None:
    """Exponents of which ex2 errs most."""
    keys, fractions = row.some(), worst_exponents()
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


def _codes(row: Row) -> None:
    """Neighbouring codes, signs and exponents of single elements of Q or K."""
    colony, rng = row.colony, row.rng
    target = colony.q[row.index] if rng.random() < 0.3 else colony.k[row.index][rng.integers(row.keys)]
    chosen = rng.random(target.shape) < max(rng.random() ** 2, 1 / target.size)
    kind = rng.integers(4)
    factor = (1 + rng.choice([-1, 1], target.shape) * FORMATS[colony.island.dtype].epsilon, -1.0,
              np.exp2(rng.integers(-4, 5, target.shape)), rng.uniform(0.5, 2, target.shape))[kind]  # fmt: skip
    target[...] = np.where(chosen, rounded(target * factor, colony.island.dtype), target)


def _full_fractions(row: Row) -> None:
    """Q and K whose products end in ones, so that truncation costs the most."""
    colony, i = row.colony, row.index
    fmt = FORMATS[colony.island.dtype]
    for x in (colony.q[i], colony.k[i][row.some()]):
        exponent = np.floor(np.log2(np.maximum(np.abs(x), fmt.min_normal)))
        full = np.exp2(exponent) * (2 - fmt.epsilon * row.rng.integers(1, 4, x.shape))
        x[...] = np.where(x == 0, 0.0, np.copysign(full, x))
    colony.k[i] = rounded(colony.k[i], colony.island.dtype)


def _spread_exponents(row: Row) -> None:
    """Products of one chain far apart in size, so that the small ones are cut off."""
    colony, i, rng = row.colony, row.index, row.rng
    width, dtype = colony.q.shape[1], colony.island.dtype
    keys, depth = row.some(), rng.uniform(0, 30)
    gaps = np.where(rng.random(width) < rng.random(), np.exp2(-np.round(rng.uniform(0, depth, width))), 1.0)
    if rng.random() < 0.5:
        colony.q[i] = rounded(colony.q[i] * gaps, dtype)
    else:
        colony.k[i][keys] = rounded(colony.k[i][keys] * gaps, dtype)


def _one_sign(row: Row) -> None:
    """Products of one sign, or cancelling ones, in a row of several channels."""
    colony, i, rng = row.colony, row.index, row.rng
    keys = row.some()
    signs = np.sign(colony.q[i]) * (1 if rng.random() < 0.5 else rng.choice([-1, 1], colony.q.shape[1]))
    colony.k[i][keys] = np.abs(colony.k[i][keys]) * signs


def _cancel(row: Row) -> None:
    """Take a score back to about zero, or to another key's, by its last channel: what was lost remains."""
    colony, i, rng = row.colony, row.index, row.rng
    last = rng.integers(colony.q.shape[1])
    keys, q = row.some(), colony.q[i, last]
    if q != 0:
        wanted = row.scores[rng.integers(row.keys)] / colony.factors[i, keys] if rng.random() < 0.5 else 0.0
        rest = colony.k[i][keys] @ colony.q[i] - colony.k[i][keys, last] * q
        colony.k[i][keys, last] = rounded((wanted - rest) / q, colony.island.dtype)


def _size(row: Row) -> None:
    """All scores larger or smaller."""
    colony, rng = row.colony, row.rng
    factor = np.exp2(rng.integers(-3, 4)) if rng.random() < 0.5 else np.exp2(row.step * rng.standard_normal())
    if colony.island.dtype == "e4m3":
        colony.q_descale[row.index] = positive(colony.q_descale[row.index] * factor)
    else:
        colony.q[row.index] = rounded(colony.q[row.index] * factor, colony.island.dtype)


MUTATIONS: tuple[Callable[[Row], None], ...] = (
    *(_nudge, _shift, _equal, _sink, _vanish, _weigh, _worst_exponents, _worst_sum, _codes, _size),
    *(_full_fractions, _spread_exponents, _one_sign, _cancel),
)
