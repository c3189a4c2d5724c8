"""This module says how an individual's arrays mutate: from one code to whole rows at the end of a format, and what
meets in D and P.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fa3_reference.bounds.steps import LOG2_E
from fa3_reference.formats import FORMATS, Format
from fa3verify.search.forward.colony import max_finite, positive, rounded
from fa3verify.search.gradients.colony import GradientColony

_OPERANDS = ("q", "k", "v", "dout", "out")


@dataclass(slots=True)
class Child:
    """One individual while it mutates."""

    colony: GradientColony
    index: int
    step: float  # log2 units
    rng: np.random.Generator

    @property
    def fmt(self) -> Format:
        return FORMATS[self.colony.island.dtype]

    def gene(self, names: tuple[str, ...] = _OPERANDS) -> np.ndarray:
        """The child's part of one array, a view."""
        return getattr(self.colony, names[self.rng.integers(len(names))])[self.index]

    def some(self, x: np.ndarray) -> np.ndarray:
        """A mask: one element, a random share, a row, a channel, or all."""
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

    def write(self, x: np.ndarray, chosen: np.ndarray, values: np.ndarray | float) -> None:
        x[chosen] = rounded(np.broadcast_to(values, x.shape)[chosen], self.colony.island.dtype)

    def scores(self, head: int) -> np.ndarray:
        """softmax_scale q . k, float64 (rows, keys)."""
        colony = self.colony
        i = self.index
        return colony.softmax_scale * (colony.q[i, :, head] @ colony.k[i, :, 0].T)


def _nudge(child: Child) -> None:
    x = child.gene()
    rng = child.rng
    factors = np.exp2(child.step * rng.standard_normal(x.shape))
    ulps = 1 + child.fmt.epsilon * rng.integers(-2, 3, x.shape)
    child.write(x, child.some(x), x * (factors if rng.random() < 0.5 else ulps))


def _signs(child: Child) -> None:
    x = child.gene()
    rng = child.rng
    sign = (-1.0, np.sign(x), rng.choice([-1.0, 1.0], x.shape))[rng.integers(3)]
    child.write(x, child.some(x), x * sign)


def _zeros(child: Child) -> None:
    x = child.gene()
    child.write(x, child.some(x), 0.0)


def _equal(child: Child) -> None:
    x = child.gene()
    child.write(x, child.some(x), x.flat[child.rng.integers(x.size)])


def _sizes(child: Child) -> None:
    """A group larger or smaller by powers of two."""
    x = child.gene()
    rng = child.rng
    shift = rng.integers(-30, 31) if rng.random() < 0.3 else rng.integers(-3, 4)
    child.write(x, child.some(x), np.ldexp(x, shift))


def _level(child: Child) -> None:
    """A group at one size of all that the format has, often at one of its ends."""
    x = child.gene()
    rng = child.rng
    fmt = child.fmt
    least = fmt.min_exponent - fmt.fraction_bits
    largest = int(np.log2(max_finite(fmt.name)))
    ends = (least, fmt.min_exponent + 1), (largest // 2, largest // 2 + 3), (least, largest + 1), (-4, 4)
    exponent = rng.integers(*ends[rng.integers(4)])
    fraction = rng.choice([1.0, 2 - fmt.epsilon, rng.uniform(1, 2)])
    child.write(x, child.some(x), np.ldexp(fraction, exponent) * rng.choice([-1.0, 1.0]))


def _full_fractions(child: Child) -> None:
    """Numbers whose products end in ones, so that truncation costs the most."""
    x = child.gene()
    exponent = np.floor(np.log2(np.maximum(np.abs(x), child.fmt.min_normal)))
    full = np.copysign(np.exp2(exponent) * (2 - child.fmt.epsilon * child.rng.integers(1, 4, x.shape)), x)
    child.write(x, child.some(x) & (x != 0), full)


def _spread(child: Child) -> None:
    """Numbers far apart in size, so that the small products of a chain are cut off."""
    x = child.gene()
    rng = child.rng
    child.write(x, child.some(x), x * np.exp2(-np.round(rng.uniform(0, rng.uniform(0, 30), x.shape))))


def _few_channels(child: Child) -> None:
    """Only some channels of both factors of a product, so that S or dP is all but exact."""
    names = (("q", "k"), ("dout", "v"))[child.rng.integers(2)]
    kept = child.rng.integers(1, 4)
    for name in names:
        getattr(child.colony, name)[child.index][..., kept:] = 0


def _cancel(child: Child) -> None:
    """One channel of a row that takes its product with a key to about zero: what was lost remains."""
    colony = child.colony
    i = child.index
    rng = child.rng
    row = rng.integers(colony.island.rows)
    key = rng.integers(colony.island.keys)
    head = rng.integers(colony.q.shape[2])
    left, right = ((colony.q, colony.k), (colony.dout, colony.v))[rng.integers(2)]
    x = left[i, row, head]
    y = right[i, key, 0]
    last = rng.integers(x.size)
    if y[last] != 0:
        rest = x @ y - x[last] * y[last]
        x[last] = rounded(np.array(-rest / y[last]), colony.island.dtype)


def _cut_off(child: Child) -> None:
    """Products of one chain just too small for the alignment of the largest one."""
    colony = child.colony
    i = child.index
    rng = child.rng
    row = rng.integers(colony.island.rows)
    key = rng.integers(colony.island.keys)
    head = rng.integers(colony.q.shape[2])
    left, right = ((colony.q, colony.k), (colony.dout, colony.v))[rng.integers(2)]
    x = left[i, row, head]
    y = right[i, key, 0]
    products = np.abs(x * y)
    small = (rng.random(x.size) < rng.random()) & (products < products.max()) & (x != 0)
    if small.any():
        unit = np.exp2(np.floor(np.log2(products.max())) - 25 + rng.integers(0, 3)) * (1 - 2.0**-9)
        y[small] = rounded(rng.choice([-1.0, 1.0]) * unit / x[small], colony.island.dtype)


def _shift_lse(child: Child) -> None:
    """The lse of some rows off by little, by binary orders, or far away."""
    lse = child.colony.lse[child.index]
    rng = child.rng
    reach = (2.0**-10, 4.0, 160.0)[rng.integers(3)]
    moved = lse + (rng.uniform(-reach, reach) if rng.random() < 0.5 else rng.integers(-8, 9) / LOG2_E)
    lse[...] = np.where(child.some(lse), moved.astype(np.float32), lse)


def _weigh(child: Child) -> None:
    """The lse with which the weight of a key in every row lies beside the middle of two neighbours, or is a power of
    two."""
    rng = child.rng
    fmt = child.fmt
    head = child.rng.integers(child.colony.q.shape[2])
    lse = child.colony.lse[child.index, head]
    keys = rng.integers(child.colony.island.keys, size=len(child.scores(head)))
    s = np.take_along_axis(child.scores(head), keys[:, None], 1)[:, 0]
    weight = np.exp2(-rng.integers(0, 4) if rng.random() < 0.5 else -rng.uniform(0, 20))
    if rng.random() < 0.6:
        ulp = np.exp2(np.floor(np.log2(weight)) - fmt.fraction_bits)
        weight = (np.floor(weight / ulp) + 0.5) * ulp * (1 + rng.choice([-1, 1]) * np.exp2(-rng.uniform(10, 24)))
    wanted = (s - np.log(weight)).astype(np.float32)
    lse[...] = np.where(child.some(lse) & np.isfinite(wanted), wanted, lse)


def _meet(child: Child) -> None:
    """Rows of O that are rows of V, or near them, so that dP - D is next to nothing."""
    colony = child.colony
    i = child.index
    rng = child.rng
    out = colony.out[i]
    v = colony.v[i]
    values = np.broadcast_to(v[rng.integers(len(v))][None] * (1 + child.fmt.epsilon * rng.integers(-1, 2)), out.shape)
    child.write(out, child.some(out), values)


def _complete(child: Child) -> None:
    """Out and lse of the individual's own forward."""
    child.colony.complete(np.array([child.index]))


def _peak(child: Child) -> None:
    """Scores larger or smaller as a whole."""
    x = child.gene(("q", "k"))
    child.write(x, np.ones(x.shape, bool), x * np.exp2(child.rng.integers(-4, 5)))
    if child.rng.random() < 0.7:
        _complete(child)


MUTATIONS: tuple[Callable[[Child], None], ...] = (
    *(_nudge, _signs, _zeros, _equal, _sizes, _level, _full_fractions, _spread, _few_channels, _cancel, _cut_off),
    *(_shift_lse, _weigh, _meet, _complete, _peak),
)


def mutate_scale(colony: GradientColony, step: float, wild: bool, rng: np.random.Generator) -> None:
    """Change softmax_scale, nearly nothing, to a power of two in log2 units, or by as much as binary32 has room for; or
    the softcap likewise: where scores saturate, where they just begin to, where none does."""
    if colony.softcap and rng.random() < 0.6:
        cap = colony.softcap * np.exp2(step * rng.standard_normal())
        if rng.random() < 0.5:
            cap = colony.softmax_scale * np.exp2(rng.uniform(-8, 16))
        if wild and rng.random() < 0.5:
            cap = np.exp2(rng.uniform(-125, 125))
        colony.softcap = float(positive(cap))
        return
    scale = colony.softmax_scale * np.exp2(step * rng.standard_normal())
    if rng.random() < 0.3:
        scale = np.exp2(rng.integers(-6, 4)) / LOG2_E * rng.choice([1.0, 1 - 2.0**-20, 1 + 2.0**-20])
    if wild and rng.random() < 0.5:
        scale = np.exp2(rng.uniform(-130, 100))
    colony.softmax_scale = float(positive(scale))
