"""What steers a mutation: the weights of a row's keys as the kernel and as exact arithmetic have them, and worst fractions.

Only chance is led by these numbers, nothing is judged by them, so shortcuts do no harm: one maximum for all tiles, scores
of a chain taken as exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from fa3_kernels.twin import mufu
from fa3verify.adversary.colony import LOG2_E, Colony, rounded


@dataclass(frozen=True, slots=True)
class Guide:
    """Of every row of a colony: log2 ``scores`` and weights, float64 (problems, keys), in the scale of the row's maximum.

    ``exact`` and ``stored`` weights carry the offset of P; ``top`` (problems,) is the maximum, ``visible`` as in the colony.
    """

    scores: np.ndarray
    top: np.ndarray
    exact: np.ndarray
    stored: np.ndarray
    visible: np.ndarray

    @classmethod
    def of(cls, colony: Colony) -> Guide:
        island, softcap = colony.island, colony.environment.softcap * LOG2_E
        with np.errstate(all="ignore"):
            scores, factors = colony.raw_scores, colony.factors
            exact = scores * factors
            computed = scores.astype(np.float32) * factors.astype(np.float32).astype(np.float64)
            if island.softcap:
                exact, computed = (softcap * np.tanh(x / softcap) for x in (exact, computed))
            visible = island.visible
            exact, computed = (np.where(visible & (np.abs(x) < np.inf), x, -np.inf) for x in (exact, computed))
            top = np.where(np.isneginf(exact.max(1)), 0.0, exact.max(1))
            offset = island.config.p_offset_log2
            base = (computed.max(1) - offset).astype(np.float32)[:, None]
            p = mufu.ex2((computed - np.where(np.isneginf(base), 0.0, base)).astype(np.float32))
            stored = rounded(p.astype(np.float64), island.dtype)
            return cls(exact, top, np.exp2(exact - top[:, None] + offset), stored, visible)


@cache
def worst_exponents() -> np.ndarray:
    """Fractions of which ex2 errs most, both ways, float64."""
    x = -np.arange(1 << 16) / (1 << 16)
    error = mufu.ex2(x.astype(np.float32)) / np.exp2(x) - 1
    order = np.argsort(error)
    return x[np.concatenate([order[:64], order[-64:]])]


@cache
def worst_sums() -> np.ndarray:
    """Numbers in [1, 2) of which rcp or lg2 errs most, both ways, float64."""
    x = (1 + np.arange(1 << 16) / (1 << 16)).astype(np.float32)
    exact = x.astype(np.float64)
    orders = [np.argsort(error) for error in (mufu.rcp(x) * exact - 1, mufu.lg2(x) - np.log2(exact))]
    return exact[np.concatenate([part for order in orders for part in (order[:64], order[-64:])])]


def some_keys(count: int, tile_n: int, rng: np.random.Generator) -> np.ndarray:
    """Return one key, a few, a run, a tile, or all of them; never none."""
    kind = rng.integers(5)
    if kind == 1 and (chosen := np.flatnonzero(rng.random(count) < rng.random() ** 2)).size:
        return chosen
    if kind == 2:
        start = rng.integers(count)
        return np.arange(start, rng.integers(start, count) + 1)
    if kind == 3:
        start = tile_n * rng.integers(-(-count // tile_n))
        return np.arange(start, min(start + tile_n, count))
    return np.arange(count) if kind == 4 else rng.integers(count, size=1)
