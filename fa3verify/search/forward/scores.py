"""Mutations of a row's scores: from one code of K to whole tiles of keys 160 binary orders apart.

Each takes the row and a generator and changes the row in place. Rows whose scores are long sums have more mutations in
:mod:`fa3verify.search.forward.chains`; channels of V mutate in :mod:`fa3verify.search.forward.values`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fa3verify.search.colony import Rng, positive, rounded
from fa3verify.search.forward import chains
from fa3verify.search.forward.guide import Guide, Row, worst_exponents, worst_sums

VARIANTS = 32  # nudges that _screened compares


def _nudge(row: Row, rng: Rng) -> None:
    keys = row.some()
    row.write(keys, row.scores[keys] + row.step * rng.standard_normal(keys.size))


def _shift(row: Row, rng: Rng) -> None:
    """Move a group as a whole, by little or by up to 160 binary orders."""
    keys = row.some()
    far = rng.random() < 0.5
    row.write(keys, row.scores[keys] + (rng.uniform(-160, 160) if far else 4 * row.step * rng.standard_normal()))


def _equal(row: Row, rng: Rng) -> None:
    keys = row.some()
    row.write(keys, np.full(keys.size, row.scores[rng.integers(row.keys)]))


def _sink(row: Row, rng: Rng) -> None:
    """Put one key ahead of all others."""
    row.write(rng.integers(row.keys, size=1), np.array([row.top + rng.exponential(8.0)]))


def _vanish(row: Row, rng: Rng) -> None:
    """Sink keys so far that they no longer count."""
    keys = row.some()
    row.write(keys, np.full(keys.size, row.top - rng.uniform(20, 400)))


def _weigh(row: Row, rng: Rng) -> None:
    """Set weights close to the middle between two neighbours of P's format, or in its subnormal range."""
    fmt = row.fmt
    keys = row.some()
    p = np.maximum(row.exact[keys], 2.0 ** (row.offset - 30.0))
    if rng.random() < 0.2:
        p = np.exp2(fmt.min_exponent - rng.uniform(0, fmt.fraction_bits + 2, keys.size))
    ulp = np.exp2(np.maximum(np.floor(np.log2(p)), fmt.min_exponent) - fmt.fraction_bits)
    side = rng.choice([-1, 1]) if rng.random() < 0.5 else rng.choice([-1, 1], keys.size)
    middle = (np.floor(p / ulp) + 0.5) * ulp * (1 + side * np.exp2(-rng.uniform(8, 22)))
    row.write(keys, row.top - row.offset + np.log2(middle))


def _worst_exponents(row: Row, rng: Rng) -> None:
    """Set exponents at which ex2 errs most."""
    keys = row.some()
    fractions = worst_exponents()
    half = len(fractions) // 2
    draw = rng.integers(len(fractions), size=keys.size)
    if rng.random() < 0.5:  # all of one sign
        draw = draw % half + half * rng.integers(2)
    row.write(keys, row.top + np.ceil(row.scores[keys] - row.top) + fractions[draw])


def _worst_sum(row: Row, rng: Rng) -> None:
    """Set the weight of one key so that the row sum is one at which rcp or lg2 errs most."""
    key = rng.integers(row.keys, size=1)
    rest = row.exact.sum() - row.exact[key]
    wanted = rng.choice(worst_sums()) * np.exp2(np.floor(np.log2(row.exact.sum())))
    if 0 < wanted - rest < np.exp2(row.offset):
        row.write(key, row.top - row.offset + np.log2(wanted - rest))


def _screened(row: Row, rng: Rng) -> None:
    """Take the best of many nudges: that with the largest error by the guide's estimate."""
    colony = row.colony
    keys = row.some()
    if colony.island.is_chained:
        return chains.screened(row, rng)
    steps = np.exp2(rng.uniform(-20, 1, (VARIANTS, 1)))
    moved = (rng.random((VARIANTS, keys.size)) < rng.random((VARIANTS, 1))) * rng.standard_normal((VARIANTS, keys.size))
    k = np.repeat(row.k[None], VARIANTS, axis=0)
    k[:, keys] = row.digits(keys, row.scores[keys] + steps * moved)
    one = np.full(VARIANTS, row.index)
    q_descale = colony.q_descale[one]
    if row.dtype == "e4m3" and rng.random() < 0.3:
        k[:] = row.k
        q_descale = positive(q_descale * np.exp2(steps[:, 0] * rng.standard_normal(VARIANTS)))
    variants = replace(colony, q=colony.q[one], k=k, q_descale=q_descale)
    guide = Guide.of(variants, np.repeat(row.guide.visible[row.row][None], VARIANTS, axis=0))
    errors = guide.lse_errors if row.goal is None else guide.relative_errors(row.goal)
    best = int(np.nan_to_num(errors, posinf=0.0).argmax())
    row.k[:] = k[best]
    colony.q_descale[row.index] = q_descale[best]


def _crumbs(row: Row, rng: Rng) -> None:
    """Set a few large weights, then ones of about half a unit of their sum: rounding takes or gives most of them."""
    n = row.colony.island.tile_n
    # The first 8, 16 or 24 keys of each tile are large, but at most half of it; 22 to 27 binary orders below their sum
    # lies half a unit of binary32.
    place = np.arange(row.keys) % n
    small = place >= min(8 * rng.integers(1, 4), n // 2)
    depth = 22 + rng.integers(0, 6) + np.exp2(-rng.uniform(1, 10)) * rng.choice([-1, 1])
    row.write(np.flatnonzero(~small), np.full(row.keys - small.sum(), row.top - rng.integers(0, 2) * rng.random()))
    row.write(np.flatnonzero(small), np.full(small.sum(), row.top - depth))


def _ladder(row: Row, rng: Rng) -> None:
    """Put one key of every tile ahead of its others, and the tiles apart."""
    n = row.colony.island.tile_n
    gap = rng.uniform(0, 124)
    rise = rng.choice([-1, 1])
    for start in range(0, row.keys, n):
        keys = np.arange(start, min(start + n, row.keys))
        leader = row.top + rise * gap * (start // n) - rng.random() * rng.integers(0, 2) - gap * rng.integers(0, 2)
        row.write(keys, np.where(keys == start + rng.integers(keys.size), leader, leader - rng.uniform(30, 200)))


def _codes(row: Row, rng: Rng) -> None:
    """Take neighbouring codes, signs and exponents of single elements of Q or K."""
    target = row.q if rng.random() < 0.3 else row.k[rng.choice(row.some())]
    chosen = rng.random(target.shape) < max(rng.random() ** 2, 1 / target.size)
    kind = rng.integers(4)
    factor = (
        1 + rng.choice([-1, 1], target.shape) * row.fmt.epsilon,
        -1.0,
        np.exp2(rng.integers(-4, 5, target.shape)),
        rng.uniform(0.5, 2, target.shape),
    )[kind]
    target[...] = np.where(chosen, rounded(target * factor, row.dtype), target)


def _size(row: Row, rng: Rng) -> None:
    """Make all scores larger or smaller."""
    reach = 20 if rng.random() < 0.2 else 3
    factor = np.exp2(rng.integers(-reach, reach + 1) if rng.random() < 0.5 else row.step * rng.standard_normal())
    if row.dtype == "e4m3":
        row.colony.q_descale[row.index] = positive(row.colony.q_descale[row.index] * factor)
    else:
        row.q[:] = rounded(row.q * factor, row.dtype)


MUTATIONS: tuple[Callable[[Row, Rng], None], ...] = (
    *(_nudge, _shift, _equal, _sink, _vanish, _weigh, _worst_exponents, _worst_sum, _codes, _size),
    *(_screened, _screened, _crumbs, _ladder, *chains.MUTATIONS),
)
