"""Mutations of a channel of V: signs, sizes from subnormal to the largest, fractions, and sums that cancel.

Each takes the channel and a generator and changes the channel in place. Scores mutate in
:mod:`fa3verify.search.forward.scores`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fa3verify.search.colony import Rng, full_fractions, level, rounded
from fa3verify.search.forward.guide import Led

VARIANTS = 32  # nudges that _screened compares


class Column(Led):
    """Holds one channel of V while it mutates, beside the weights of a row it meets."""

    __slots__ = ()

    @property
    def v(self) -> np.ndarray:
        """Return the channel, (keys,), a view of the colony."""
        return self.colony.v[self.index]

    @property
    def stored(self) -> np.ndarray:
        return self.guide.stored[self.row]

    @property
    def out(self) -> float:
        """Return the output of the row, as stored numbers."""
        return float(self.exact @ self.v / max(self.exact.sum(), 2.0**-300))

    def write(self, keys: np.ndarray, values: np.ndarray | float) -> None:
        self.v[keys] = rounded(np.broadcast_to(values, keys.shape).astype(np.float64), self.dtype)


def _nudge(column: Column, rng: Rng) -> None:
    keys = column.some()
    factor = np.exp2(column.step * rng.standard_normal(keys.size))
    ulps = 1 + column.fmt.epsilon * rng.integers(-2, 3, keys.size)
    column.write(keys, column.v[keys] * (factor if rng.random() < 0.5 else ulps))


def _equal(column: Column, rng: Rng) -> None:
    column.write(column.some(), column.v[rng.integers(column.v.size)])


def _signs(column: Column, rng: Rng) -> None:
    keys = column.some()
    kind = rng.integers(3)
    sign = (-1.0, np.sign(column.v[keys]), rng.choice([-1.0, 1.0], keys.size))[kind]
    column.write(keys, column.v[keys] * sign)


def _zeros(column: Column, rng: Rng) -> None:
    column.write(column.some(), 0.0)


def _one_tile(column: Column, rng: Rng) -> None:
    """Set the values of one tile to zero, or those of all other tiles."""
    tile = np.arange(column.v.size) // column.colony.island.tile_n
    column.write(np.flatnonzero((tile == rng.choice(tile)) == (rng.random() < 0.5)), np.zeros(1))


def _sizes(column: Column, rng: Rng) -> None:
    """Make a group larger or smaller by powers of two."""
    keys = column.some()
    shift = rng.integers(-30, 31) if rng.random() < 0.3 else rng.integers(-3, 4)
    column.write(keys, np.ldexp(column.v[keys], shift))


def _level(column: Column, rng: Rng) -> None:
    """Give a group one size, anywhere in the format and often at one of its ends."""
    keys = column.some()
    largest = int(np.log2(column.fmt.max_finite))
    size = level(column.fmt, (largest - 3, largest + 1), rng)
    column.write(keys, size * rng.choice([-1.0, 1.0]))


def _full_fractions(column: Column, rng: Rng) -> None:
    keys = column.some()
    column.write(keys, full_fractions(column.v[keys], column.fmt))


def _follow_errors(column: Column, rng: Rng) -> None:
    """Give values the signs of the errors of their weights, so that the errors of the products add up.

    The values lie around the output or around zero.
    """
    scale = column.stored.sum() / max(column.exact.sum(), 2.0**-300) if rng.random() < 0.5 else 1.0
    sign = np.sign(column.stored - scale * column.exact) * rng.choice([-1.0, 1.0])
    keys = column.some()
    about = column.out if rng.random() < 0.5 else 0.0
    size = np.abs(column.v[keys] - about)
    if rng.random() < 0.5:
        size = np.full(keys.size, np.median(size))
    column.write(keys, about + sign[keys] * size)


def _cancel(column: Column, rng: Rng) -> None:
    """Set one value so that the output is about zero."""
    weighty = np.flatnonzero(column.stored > 0)
    if weighty.size:
        key = rng.choice(weighty, 1)
        rest = column.exact @ column.v - column.exact[key] * column.v[key]
        column.write(key, -rest / column.exact[key])


def _cut_off(column: Column, rng: Rng) -> None:
    """Make products just too small for the alignment of the largest one, so that each is lost whole or in part."""
    keys = column.some()
    products = np.abs(column.stored * column.v)
    # Bits below the largest product to which the tensor core aligns the others.
    align = 13 if column.fmt.name == "e4m3" else 25
    if products.max() > 0:
        exponent = np.floor(np.log2(products.max())) - align + rng.integers(0, 4)
        sign = rng.choice([-1.0, 1.0]) if rng.random() < 0.5 else rng.choice([-1.0, 1.0], keys.size)
        with np.errstate(divide="ignore"):
            wanted = np.exp2(exponent) * (1 - 2.0**-8) / column.stored[keys]
        column.write(keys, np.where(np.isfinite(wanted), sign * wanted, column.v[keys]))


def _balance(column: Column, rng: Rng) -> None:
    """Put half of the weight at one value, half at its negative."""
    order = rng.permutation(column.v.size) if rng.random() < 0.5 else np.argsort(-column.exact)
    half = np.cumsum(column.exact[order]) < column.exact.sum() / 2
    size = abs(column.v[rng.integers(column.v.size)])
    column.write(order, np.where(half, size, -size))


def _screened(column: Column, rng: Rng) -> None:
    """Take the best of many nudges and flips of signs: that with the largest error by weights and row sum."""
    v = column.v
    shape = (VARIANTS, v.size)
    steps = np.exp2(rng.uniform(-10, 2, (VARIANTS, 1)))
    chosen = rng.random(shape) < rng.random((VARIANTS, 1)) ** 2
    factors = np.where(rng.random((VARIANTS, 1)) < 0.5, -1.0, np.exp2(steps * rng.standard_normal(shape)))
    variants = rounded(np.where(chosen, v * factors, v), column.fmt.name)
    total = max(float(column.exact.sum()), 2.0**-300)
    error = np.abs(variants @ column.stored * float(column.guide.inverse[column.row]) - variants @ column.exact / total)
    error = error / np.maximum(np.abs(variants) @ column.exact, 2.0**-300)
    v[:] = variants[int(np.nan_to_num(error, posinf=0.0).argmax())]


def _common(column: Column, rng: Rng) -> None:
    """Add one value to a group: a large mean with small differences."""
    keys = column.some()
    column.write(keys, column.v[keys] + column.v[rng.integers(column.v.size)] * rng.choice([-8, -1, 1, 8]))


MUTATIONS: tuple[Callable[[Column, Rng], None], ...] = (
    *(_nudge, _equal, _signs, _zeros, _sizes, _level, _full_fractions, _follow_errors, _cancel, _cut_off, _balance),
    *(_common, _one_tile, _screened),
)
