"""How an individual's arrays mutate: from one code to whole rows at the end of a format, and what
meets in D and P.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fa3_reference.bounds.steps import LOG2_E
from fa3_reference.formats import FORMATS
from fa3_reports.adversary.gradients.colony import GradientColony
from fa3verify.search.colony import (
    Mutant,
    Rng,
    full_fractions,
    level,
    positive,
    power_of_two_in_log2_units,
    rounded,
)

_OPERANDS = ("q", "k", "v", "dout", "out")


class Child(Mutant):
    """Holds one individual while it mutates."""

    __slots__ = ()

    def gene(self, names: tuple[str, ...] = _OPERANDS) -> np.ndarray:
        """Return the child's part of one array, a view."""
        return getattr(self.colony, names[self.rng.integers(len(names))])[self.index]

    def some(self, x: np.ndarray) -> np.ndarray:
        """Return a mask: one element, a random share, a row, a channel, or all."""
        rng = self.rng
        chosen = np.zeros(x.shape, bool)
        kind = rng.integers(5)
        if kind == 0:
            chosen.flat[rng.integers(x.size)] = True
        elif kind == 1:
            chosen = rng.random(x.shape) < rng.random() ** 2
        elif kind == 2:
            chosen[rng.integers(len(x))] = True
        elif kind == 3:
            chosen[..., rng.integers(x.shape[-1])] = True
        return chosen if kind < 4 else ~chosen

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the channels of a query and of a key whose products are summed to S or dP, views."""
        colony = self.colony
        row = self.rng.integers(colony.island.rows)
        key = self.rng.integers(colony.island.keys)
        head = self.rng.integers(colony.q.shape[2])
        left, right = ((colony.q, colony.k), (colony.dout, colony.v))[self.rng.integers(2)]
        return left[self.index, row, head], right[self.index, key, 0]

    def write(self, x: np.ndarray, chosen: np.ndarray, values: np.ndarray | float) -> None:
        x[chosen] = rounded(np.broadcast_to(values, x.shape)[chosen], self.dtype)

    def scores(self, head: int) -> np.ndarray:
        """Return softmax_scale q . k, float64 (rows, keys)."""
        q = self.colony.q[self.index]
        k = self.colony.k[self.index]
        return self.colony.environment.softmax_scale * (q[:, head] @ k[:, 0].T)


def _nudge(child: Child, rng: Rng) -> None:
    x = child.gene()
    factors = np.exp2(child.step * rng.standard_normal(x.shape))
    ulps = 1 + child.fmt.epsilon * rng.integers(-2, 3, x.shape)
    child.write(x, child.some(x), x * (factors if rng.random() < 0.5 else ulps))


def _signs(child: Child, rng: Rng) -> None:
    x = child.gene()
    sign = (-1.0, np.sign(x), rng.choice([-1.0, 1.0], x.shape))[rng.integers(3)]
    child.write(x, child.some(x), x * sign)


def _zeros(child: Child, rng: Rng) -> None:
    x = child.gene()
    child.write(x, child.some(x), 0.0)


def _equal(child: Child, rng: Rng) -> None:
    x = child.gene()
    child.write(x, child.some(x), x.flat[rng.integers(x.size)])


def _sizes(child: Child, rng: Rng) -> None:
    """Make a group larger or smaller by powers of two."""
    x = child.gene()
    shift = rng.integers(-30, 31) if rng.random() < 0.3 else rng.integers(-3, 4)
    child.write(x, child.some(x), np.ldexp(x, shift))


def _level(child: Child, rng: Rng) -> None:
    """Put a group at one size of all that the format has, often at one of its ends."""
    x = child.gene()
    middle = int(np.log2(FORMATS[child.dtype].max_finite)) // 2
    size = level(child.fmt, (middle, middle + 3), rng, (-4, 4))
    child.write(x, child.some(x), size * rng.choice([-1.0, 1.0]))


def _full_fractions(child: Child, rng: Rng) -> None:
    """Make products end in ones, so that truncation costs the most."""
    x = child.gene()
    full = full_fractions(x, child.fmt, rng.integers(1, 4, x.shape))
    child.write(x, child.some(x) & (x != 0), full)


def _spread(child: Child, rng: Rng) -> None:
    """Move numbers far apart in size, so that the small products of a chain are cut off."""
    x = child.gene()
    child.write(x, child.some(x), x * np.exp2(-np.round(rng.uniform(0, rng.uniform(0, 30), x.shape))))


def _few_channels(child: Child, rng: Rng) -> None:
    """Keep only some channels of both factors of a product, so that S or dP is all but exact."""
    names = (("q", "k"), ("dout", "v"))[rng.integers(2)]
    kept = rng.integers(1, 4)
    for name in names:
        getattr(child.colony, name)[child.index][..., kept:] = 0


def _cancel(child: Child, rng: Rng) -> None:
    """Set one channel of a row so that its product with a key is about zero: what was lost remains."""
    x, y = child.factors()
    last = rng.integers(x.size)
    if y[last] != 0:
        rest = x @ y - x[last] * y[last]
        x[last] = rounded(np.array(-rest / y[last]), child.dtype)


def _cut_off(child: Child, rng: Rng) -> None:
    """Make products of one chain just too small for the alignment of the largest one."""
    x, y = child.factors()
    products = np.abs(x * y)
    small = (rng.random(x.size) < rng.random()) & (products < products.max()) & (x != 0)
    if small.any():
        unit = np.exp2(np.floor(np.log2(products.max())) - 25 + rng.integers(0, 3)) * (1 - 2.0**-9)
        y[small] = rounded(rng.choice([-1.0, 1.0]) * unit / x[small], child.dtype)


def _shift_lse(child: Child, rng: Rng) -> None:
    """Move the lse of some rows off by little, by binary orders, or far away."""
    lse = child.colony.lse[child.index]
    reach = (2.0**-10, 4.0, 160.0)[rng.integers(3)]
    moved = lse + (rng.uniform(-reach, reach) if rng.random() < 0.5 else rng.integers(-8, 9) / LOG2_E)
    lse[...] = np.where(child.some(lse), moved.astype(np.float32), lse)


def _weigh(child: Child, rng: Rng) -> None:
    """Set the lse with which the weight of a key in every row lies beside the middle of two neighbours, or is a power
    of two.
    """
    fmt = child.fmt
    head = rng.integers(child.colony.q.shape[2])
    lse = child.colony.lse[child.index, head]
    keys = rng.integers(child.colony.island.keys, size=len(child.scores(head)))
    s = np.take_along_axis(child.scores(head), keys[:, None], 1)[:, 0]
    weight = np.exp2(-rng.integers(0, 4) if rng.random() < 0.5 else -rng.uniform(0, 20))
    if rng.random() < 0.6:
        ulp = np.exp2(np.floor(np.log2(weight)) - fmt.fraction_bits)
        weight = (np.floor(weight / ulp) + 0.5) * ulp * (1 + rng.choice([-1, 1]) * np.exp2(-rng.uniform(10, 24)))
    wanted = (s - np.log(weight)).astype(np.float32)
    lse[...] = np.where(child.some(lse) & np.isfinite(wanted), wanted, lse)


def _meet(child: Child, rng: Rng) -> None:
    """Make rows of O rows of V, or nearly, so that dP - D is next to nothing."""
    out = child.colony.out[child.index]
    v = child.colony.v[child.index]
    values = np.broadcast_to(v[rng.integers(len(v))][None] * (1 + child.fmt.epsilon * rng.integers(-1, 2)), out.shape)
    child.write(out, child.some(out), values)


def _complete(child: Child, rng: Rng) -> None:
    """Give the individual out and lse of its own forward."""
    child.colony.complete(np.array([child.index]))


def _peak(child: Child, rng: Rng) -> None:
    """Make scores larger or smaller as a whole."""
    x = child.gene(("q", "k"))
    child.write(x, np.ones(x.shape, bool), x * np.exp2(rng.integers(-4, 5)))
    if rng.random() < 0.7:
        _complete(child, rng)


MUTATIONS: tuple[Callable[[Child, Rng], None], ...] = (
    *(_nudge, _signs, _zeros, _equal, _sizes, _level, _full_fractions, _spread, _few_channels, _cancel, _cut_off),
    *(_shift_lse, _weigh, _meet, _complete, _peak),
)


def mutate_scale(colony: GradientColony, step: float, wild: bool, rng: Rng) -> None:
    """Change softmax_scale, nearly nothing, to a power of two in log2 units, or by as much as binary32 has room for; or
    the softcap likewise: where scores saturate, where they just begin to, where none does."""
    environment = colony.environment
    if environment.softcap and rng.random() < 0.6:
        cap = environment.softcap * np.exp2(step * rng.standard_normal())
        if rng.random() < 0.5:
            cap = environment.softmax_scale * np.exp2(rng.uniform(-8, 16))
        if wild and rng.random() < 0.5:
            cap = np.exp2(rng.uniform(-125, 125))
        colony.environment = replace(environment, softcap=float(positive(cap)))
        return
    scale = environment.softmax_scale * np.exp2(step * rng.standard_normal())
    if rng.random() < 0.3:
        scale = power_of_two_in_log2_units(rng)
    if wild and rng.random() < 0.5:
        scale = np.exp2(rng.uniform(-130, 100))
    colony.environment = replace(environment, softmax_scale=float(positive(scale)))
