"""Estimates that steer mutations: weights of keys in the kernel's and in exact arithmetic, and arguments that err most.

Nothing is judged by these numbers; they only make some mutations more promising than others. So shortcuts do no harm,
such as to take the scores of a chain for exact. Judgement stands in :mod:`fa3verify.search.forward.judge`. A mutation
is handed what it changes with its parent's guide: a :class:`Row` here, a column of values in
:mod:`fa3verify.search.forward.values`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from fa3_kernels.plan.tiles import split_ranges
from fa3_kernels.twin import float32, mufu
from fa3_kernels.twin.softmax import LN2
from fa3_reference.bounds.steps import LOG2_E
from fa3verify.search.colony import Mutant, Rng, rounded
from fa3verify.search.forward.colony import ForwardColony, Island

_FLUSHED = 2.0**-115  # factors between maxima that may be flushed to zero


@dataclass(frozen=True, slots=True)
class Guide:
    """Holds, of every row, log2 ``scores`` and weights in the scale of the row's maximum, float64 (problems, keys).

    ``exact`` and ``stored`` are the weights in exact arithmetic and as the kernel stores them, both with the offset of
    P. ``top`` (problems,) is the maximum; ``visible`` is as in the island. ``rounding`` is how much a weight loses by
    rounding to P's format or by a flush to zero; it is 0 where P, but for its own error, is a number of the format.
    ``lse_error`` (problems,) is the error of lse, and ``inverse`` (problems,) the factor that turns sums of ``stored``
    weights into the output, both as they would be without splits. ``cap`` is the softcap in log2 units, 0 for none.
    """

    scores: np.ndarray
    top: np.ndarray
    exact: np.ndarray
    stored: np.ndarray
    rounding: np.ndarray
    visible: np.ndarray
    lse_error: np.ndarray
    inverse: np.ndarray
    cap: float

    @classmethod
    @np.errstate(all="ignore")
    def of(cls, colony: ForwardColony, visible: np.ndarray | None = None) -> Guide:
        """Compute the estimates for a colony; ``visible`` is given where its rows are not those of the island."""
        offset = colony.island.config.p_offset_log2
        visible = colony.island.visible if visible is None else visible
        exact, computed = (np.where(visible & (np.abs(x) < np.inf), x, -np.inf) for x in _scores(colony))
        top = np.where(np.isneginf(exact.max(1)), 0.0, exact.max(1))
        p, base, row_sum = _weights(colony.island, computed)
        stored = rounded(p, colony.island.dtype)
        lost = np.abs(p - stored)
        size = 8 + np.abs(computed) + np.abs(top)[:, None]
        lost = np.where(lost > 2.0**-22 * size * p, lost, 0.0)
        weights = np.exp2(exact - top[:, None] + offset)
        scale = np.exp2(base + offset - top[:, None])
        last = base[:, 0]
        lse = (last.astype(np.float32) + mufu.lg2(row_sum)) * LN2
        error = np.abs(lse - (top - offset + np.log2(weights.sum(1))) / LOG2_E)
        inverse = mufu.rcp(row_sum) * np.exp2(top - offset - last)
        lost = np.where((stored == 0) | (scale < _FLUSHED), weights, scale * lost)
        cap = colony.environment.softcap * LOG2_E if colony.island.softcap else 0.0
        return cls(exact, top, weights, scale * stored, lost, visible, error, inverse, cap)

    @property
    def lse_errors(self) -> np.ndarray:
        """Return the errors of lse over the size that they grow with, (problems,)."""
        below_cap = np.maximum(self.cap - self.top, 0.0) if self.cap else 0.0  # tanh is 1 less what ex2 and rcp give
        return self.lse_error / (4.0 + np.abs(self.top) + 4 * below_cap)

    def relative_errors(self, v: np.ndarray) -> np.ndarray:
        """Return the estimated error of each row's output with a channel of V, relative to sum P |v|, (problems,).

        ``v`` is (keys,), or (problems, keys) for a channel of each row.
        """
        total = np.maximum(self.exact.sum(1), 2.0**-300)
        error = np.abs((self.stored * v).sum(1) * self.inverse - (self.exact * v).sum(1) / total)
        return error / np.maximum((self.exact * np.abs(v)).sum(1) / total, 2.0**-300)


def _scores(colony: ForwardColony) -> tuple[np.ndarray, np.ndarray]:
    """Return scores in log2 units, float64 (problems, keys): exact ones, and ones with the kernel's rounded factor."""
    environment = colony.environment
    raw = colony.raw_scores
    scale = np.float32(environment.softmax_scale * LOG2_E)
    c = (scale * colony.q_descale)[:, None] * colony.per_key(environment.k_descale).astype(np.float32)
    c = np.maximum(c, np.float32(2.0**-126))
    exact = raw * colony.factors
    if not colony.island.softcap:
        return exact, raw * c.astype(np.float64)
    softcap = environment.softcap
    capped = softcap * LOG2_E * np.tanh(exact / (softcap * LOG2_E))
    if colony.island.config.traits.order.softcap == "tanh":
        steep = np.float32(environment.softmax_scale) / np.float32(softcap)
        factor = steep * (colony.q_descale[:, None] * colony.per_key(environment.k_descale).astype(np.float32))
        tanh = mufu.tanh(raw.astype(np.float32) * factor)
        return capped, tanh * np.float64(np.float32(float(np.float32(softcap)) * LOG2_E))
    grown = mufu.ex2(raw.astype(np.float32) * (c * np.float32(2 / softcap)))
    tanh = (1.0 - 2.0 * mufu.rcp(grown + np.float32(1))).astype(np.float32)
    unit = np.float64(np.float32(max(softcap * LOG2_E, 2.0**-126)))
    return capped, tanh * unit


def _weights(island: Island, computed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return P before it is rounded, the maximum that each key was compared with, and the row sum of the last split."""
    p = np.zeros(computed.shape)
    bases = np.zeros(computed.shape)
    sums = np.zeros((len(computed), 4), np.float32)
    for part in split_ranges(range(island.tiles), island.num_splits):
        running = np.full(len(computed), -np.inf, np.float32)
        for tile in reversed(part):
            keys = slice(tile * island.tile_n, (tile + 1) * island.tile_n)
            x = computed[:, keys]
            before = running
            running = np.maximum(running, (x.max(1) - island.config.p_offset_log2).astype(np.float32))
            base = np.where(np.isneginf(running), np.float32(0), running)
            weights = mufu.ex2((x - base[:, None]).astype(np.float32))
            sums = float32.fma(sums, mufu.ex2(before - base)[:, None], float32.thread_row_sums(weights))
            p[:, keys] = weights
            bases[:, keys] = base[:, None]
    return p, bases, float32.quad_sum(sums)


@cache
def worst_exponents() -> np.ndarray:
    """Return 128 exponents in (-1, 0] at which ex2 errs most, half too low and half too high, float64."""
    x = -np.arange(1 << 16) / (1 << 16)
    error = mufu.ex2(x.astype(np.float32)) / np.exp2(x) - 1
    order = np.argsort(error)
    return x[np.concatenate([order[:64], order[-64:]])]


@cache
def worst_sums() -> np.ndarray:
    """Return numbers in [1, 2) at which rcp or lg2 errs most, too low and too high, float64."""
    x = (1 + np.arange(1 << 16) / (1 << 16)).astype(np.float32)
    exact = x.astype(np.float64)
    orders = [np.argsort(error) for error in (mufu.rcp(x) * exact - 1, mufu.lg2(x) - np.log2(exact))]
    return exact[np.concatenate([part for order in orders for part in (order[:64], order[-64:])])]


@dataclass(frozen=True, slots=True)
class Led(Mutant):
    """Holds a child while it mutates, with the guide's estimates for ``row``.

    The row is the parent of a row of scores, or a row that a channel of V meets. ``goal`` is the channel of V (keys,)
    with which a row of scores is to err; None where lse climbs.
    """

    guide: Guide
    row: int
    goal: np.ndarray | None = None

    @property
    def exact(self) -> np.ndarray:
        """Return the weights of the row, (keys,)."""
        return self.guide.exact[self.row]

    def some(self) -> np.ndarray:
        """Return the indices of some keys, now and then those of the largest weights."""
        if self.rng.random() < 0.2:
            return np.argsort(-self.exact)[: self.rng.integers(1, 5)]
        return some_keys(self.colony.island.keys, self.colony.island.tile_n, self.rng)


def some_keys(count: int, tile_n: int, rng: Rng) -> np.ndarray:
    """Return one key, a few, a run, a tile, or all of them; never none."""
    kind = rng.integers(5)
    if kind == 1 and (chosen := np.flatnonzero(rng.random(count) < rng.random() ** 2)).size:
        return chosen
    if kind == 2:
        start = int(rng.integers(count))
        return np.arange(start, int(rng.integers(start, count)) + 1)
    if kind == 3:
        start = tile_n * int(rng.integers(-(-count // tile_n)))
        return np.arange(start, min(start + tile_n, count))
    return np.arange(count) if kind == 4 else rng.integers(count, size=1)


class Row(Led):
    """Holds one row of a colony while it mutates, with what its parent's guide knows."""

    __slots__ = ()

    @property
    def top(self) -> float:
        return float(self.guide.top[self.row])

    @property
    def scores(self) -> np.ndarray:
        """Return the scores in log2 units, (keys,); those of keys that are not seen are far below the maximum."""
        scores = self.guide.scores[self.row]
        return np.where(np.isneginf(scores), self.top - 30, scores)

    @property
    def q(self) -> np.ndarray:
        """Return the channels of Q, (width,), a view of the colony."""
        return self.colony.q[self.index]

    @property
    def k(self) -> np.ndarray:
        """Return the channels of its keys, (keys, width), a view of the colony."""
        return self.colony.k[self.index]

    @property
    def keys(self) -> int:
        return self.colony.island.keys

    @property
    def offset(self) -> int:
        return self.colony.island.config.p_offset_log2

    def write(self, keys: np.ndarray, log2_scores: np.ndarray) -> None:
        """Change K of some keys so that they have these scores, as nearly as ``width`` channels of K can."""
        self.k[keys] = self.digits(keys, log2_scores)

    def digits(self, keys: np.ndarray, log2_scores: np.ndarray) -> np.ndarray:
        """Return K of some keys, (..., keys, width), that gives them the scores (..., keys), in log2 units.

        The channels are set one after the other, that of the largest Q first; each takes what is left of the score.
        """
        x = log2_scores
        softcap = self.colony.environment.softcap * LOG2_E
        if softcap:
            # Undo the softcap; clipped, as no raw score gives the softcap itself.
            x = softcap * np.arctanh(np.clip(x / softcap, -1 + 2.0**-50, 1 - 2.0**-50))
        left = x / self.colony.factors[self.index, keys]
        result = np.zeros((*x.shape, self.q.size))
        for channel in np.argsort(-np.abs(self.q)):
            q = self.q[channel]
            if q != 0:
                result[..., channel] = rounded(left / q, self.dtype)
                left = left - q * result[..., channel]
        return result
