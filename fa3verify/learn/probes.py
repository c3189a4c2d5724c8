"""Probes: launches of chosen inputs, each of which decides one thing by itself.

They find how many products are added at once, how P is rounded and summed, when O is rescaled, and the tiles. Every
probe lets large terms cancel exactly: the small terms that are left in a row say in which order all were added.
:mod:`fa3verify.learn.learner` runs the probes one after the other; what they cannot decide is left to
:mod:`fa3verify.learn.elimination`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fa3_kernels.plan.config import K_STEP
from fa3_kernels.plan.order import Order
from fa3verify.learn.launcher import KEYS, LOG2_E, UNITS, Form, Hypothesis, Launcher, Question, sparse, written
from fa3verify.learn.space import Structure

# Of the chains of Q K^T and of P V: a term so large that units added to it are lost, and the unit; for Q K^T also the
# entry of K.
_SCORE_CHAIN = {"fp16": (2.0**15, 2.0**-16, 2.0**7), "bf16": (2.0**40, 1.0, 1.0), "e4m3": (2.0**8, 2.0**-9, 1.0)}
_VALUE_CHAIN = {"fp16": (2.0**15, 2.0**-10), "bf16": (2.0**60, 1.0), "e4m3": (2.0**8, 2.0**-6)}
_SPACING = 4  # products from one unit of a chain to the next
_FAINT = (-24.95, -24.05)  # log2 of weights that are lost one by one beside 1, while the sum of two is not
_SEEN = 3e-8  # an lse above this shows that the sum of two faint weights was not lost
ROW_SUMS = ("block_pairs", "block_serial", "block_row", "running")
QUADS = ("far_first", "near_first")


class Probes:
    """The probes of one kernel; each launches once or twice and returns the structure with what it found.

    A probe that finds nothing returns the structure as it was. All raise KernelError if the kernel fails.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.form = Form(launcher.dtype, launcher.head_dim)
        self.queries = launcher.kernel.sizes.queries(64)
        self.keys = launcher.kernel.sizes.keys(64)

    def folding(self, known: Structure) -> Structure:
        """Find whether Q takes the scale and is rounded again, or S is rounded, by the lse of scores of one channel."""
        rows = np.arange(self.form.rows)
        query = self.form.rounded(1 + (rows + 0.37) / rows.size)
        scale = 0.3
        q = np.zeros((1, self.queries, 1, self.form.head_dim))
        q[0, rows, 0, 0] = query
        same = np.zeros((1, self.keys, 1, self.form.head_dim))
        same[..., 0] = 3.0
        answer = self.launcher(Question(q, same, same, softmax_scale=scale))
        if answer.lse is None or self.form.dtype == "e4m3":
            return known
        seen = answer.lse[0, 0, rows] - math.log(same.shape[1])
        expected = {
            "": query * scale,
            "folded": self.form.rounded(query * scale),
            "folded_log2": self.form.rounded(query * scale * LOG2_E) / LOG2_E,
            "scores": self.form.rounded(self.form.rounded(3 * query) * scale) / 3,
        }
        off = {name: float(np.abs(seen - 3 * x).max()) for name, x in expected.items()}
        nearest = min(off, key=off.__getitem__)
        folding = nearest if 4 * off[nearest] < off[""] else ""  # else it rounds in another way
        if folding == "scores":
            return replace(known, scores=self.form.dtype)
        self.form = replace(self.form, folding=folding)
        return replace(known, folding=folding)

    def chains(self, known: Structure) -> Structure:
        """Find how many products are added at once."""
        step = _step(self._score_survivors())
        lost = self._lost_values()
        value_step = _step(-lost)
        if value_step > K_STEP[self.form.dtype]:  # sums that begin anew after every step lose the same everywhere
            value_step = 0
        return replace(known, score_step=step, value_step=value_step, lost=tuple(lost.tolist()))

    def promotion(self, known: Structure) -> Structure:
        """Find after how many keys sums of P V begin anew, from what :meth:`chains` saw and the tiles; no launch."""
        step = known.value_step or K_STEP[self.form.dtype]
        keys = np.arange(0, KEYS, 2) // step * step  # the key at which each pair's own step begins
        tile = known.tile_n
        if not tile:
            return known
        within = keys % tile
        before = keys - within if known.keys == "left_to_right" else np.maximum(KEYS - (keys - within) - tile, 0)
        intervals = [n for n in range(32, tile + 1, 32) if tile % n == 0]
        guesses = {0: before + within} | {n: within % n for n in intervals}
        lost = np.array(known.lost) * _SPACING
        beyond = {n: lost - guess for n, guess in guesses.items()}  # about the same for all pairs if the guess is right
        off = {n: np.abs(x - np.median(x)).sum() for n, x in beyond.items()}
        return replace(known, promotion_interval=min(off, key=off.__getitem__))

    def _score_survivors(self) -> NDArray[np.int64]:
        """Return for each pair of cancelling channels how many units survive, as lse shows; empty without an lse."""
        large, unit, entry = _SCORE_CHAIN[self.form.dtype]
        d = self.form.head_dim
        pairs = d // 2
        heads = -(-pairs // 64)
        q = np.zeros((1, self.queries, heads, d))
        for t in range(pairs):
            row = q[0, t % 64, t // 64]
            row[(2 * t + _SPACING // 2) % _SPACING :: _SPACING] = unit
            row[2 * t : 2 * t + 2] = large, -large
        same = np.full((1, self.keys, heads, d), entry)
        answer = self.launcher(Question(q, same, same))
        if answer.lse is None:
            return np.zeros(0, np.int64)
        t = np.arange(pairs)
        lse = answer.lse[0, t // 64, t % 64].astype(np.float64)
        return _counted((lse - math.log(same.shape[1])) * math.sqrt(d) / (unit * entry))

    def _lost_values(self) -> NDArray[np.int64]:
        """Return for each pair of cancelling keys how many units of P V were lost in sums with the large terms."""
        large, unit = _VALUE_CHAIN[self.form.dtype]
        one, entry = self.form.level(-10.6, -9.4)
        pairs = np.arange(KEYS // 2)
        scores = np.full((pairs.size, KEYS), entry)
        values = np.zeros_like(scores)
        for t in pairs:
            scores[t, 2 * t : 2 * t + 2] = 0
            values[t, (2 * t + _SPACING // 2) % _SPACING :: _SPACING] = unit
            values[t, 2 * t : 2 * t + 2] = large, -large
        rows = written(self.form, scores, values, one, queries=self.queries)
        answer = self.launcher(rows.question)
        weight = 2.0 ** (one * entry * self.form.factor)
        offset = 256.0 if self.form.dtype == "e4m3" else 1.0
        held = float(self.form.rounded(weight * offset)) / offset
        return KEYS // _SPACING - _counted(rows.out(answer) * (2 + (KEYS - 2) * weight) / (unit * held))

    def weights(self, known: Structure) -> Structure:
        """Find P's format and rounding, from the difference of a weight and its rounded value.

        Also find whether the row sum adds weights before or after they are rounded.
        """
        unit = UNITS[self.form.dtype][0]
        most = 5 if self.form.dtype == "e4m3" else 7.5  # log2 of the smallest weight that V can hold as P does
        entries = -np.unique(np.abs(self.form.keys(np.linspace(0.5, most, self.form.rows), unit)))
        weight = 2.0 ** (unit * entries * self.form.factor)
        near = self.form.rounded(weight)
        first = np.zeros(entries.size, np.int64)
        scores = sparse(entries.size, self.keys, self.form, (first, entries), (first + 1, 0.0))
        values = np.zeros_like(scores)
        values[:, 0] = 1
        values[:, 1] = -near
        rows = written(self.form, scores, values, unit, queries=self.queries)
        answer = self.launcher(rows.question)
        total = np.exp(rows.lse(answer)) - 1
        roundings = _roundings(self.form, weight)
        errors = [np.abs(total - x).max() for x in (weight, *roundings.values())]
        if np.isfinite(errors).all():
            known = replace(known, weight_error=float(min(errors)))
        left = rows.out(answer) * (1 + weight)  # P less the nearest value of the operands' format
        for (name, rounding), p in roundings.items():
            if np.all(np.abs(left - (p - near)) <= 2.0**-6 * np.abs(p - near) + 2.0**-23):
                known = replace(known, probabilities=name, p_rounding=rounding)
                break
        else:
            return known
        off = [np.abs(total - x).max() for x in (weight, roundings[name, rounding])]
        if not np.isfinite(off).all() or min(off) > 2.0**-16 or known.probabilities == "fp32":
            return replace(known, row_sum_of="weights" if off[0] <= 2.0**-16 else "")
        return replace(known, row_sum_of="weights" if off[0] <= off[1] else "rounded")

    def rescaling(self, known: Structure) -> Structure:
        """Find how far a maximum may grow without O being rescaled: P is then above 1, and rounded as such."""
        unit = UNITS[self.form.dtype][0]
        most = 1.6 if self.form.dtype == "e4m3" else 14.0
        entries = np.unique(self.form.keys(np.linspace(0.3, most, self.form.rows), unit))
        growth = unit * entries * self.form.factor
        near = self.form.rounded(2.0**-growth)
        early = np.repeat([0, KEYS - 1], entries.size)
        late = KEYS - 1 - early
        rises = np.tile(entries, 2)
        scores = sparse(rises.size, KEYS, self.form, (early, 0.0), (late, rises))
        values = np.zeros_like(scores)
        values[np.arange(rises.size), early] = 1
        values[np.arange(rises.size), late] = -np.tile(near, 2)
        rows = written(self.form, scores, values, unit, queries=self.queries)
        out = rows.out(self.launcher(rows.question)).reshape(2, -1)
        total = 1 + 2.0**-growth
        rescaled = (2.0**-growth - near) / total
        kept = (1 - self.form.rounded(2.0**growth) * near) * 2.0**-growth / total
        is_kept = np.abs(out - kept) < np.abs(out - rescaled)
        is_told = np.abs(kept - rescaled) > 2.0**-24 * 4
        lazy = [growth[side & is_told].max(initial=0.0) for side in is_kept & ~((out == 0).all(axis=1, keepdims=True))]
        fewest = [growth[~side & is_told].min(initial=np.inf) for side in is_kept]
        top = max(range(2), key=lambda i: lazy[i] if lazy[i] < fewest[i] else 0.0)
        if not 0 < lazy[top] < fewest[top] < np.inf:
            return known  # none grows, or all that were tried may
        return replace(known, threshold_log2=float(np.rint((lazy[top] + fewest[top]) / 2)))

    def tiles(self, known: Structure) -> Structure:
        """Find the ends of tiles and their direction: two weights cancel exactly only if no rescaling lies between."""
        if known.probabilities == "fp32":  # rescaling changes no weight by more than P is rounded
            return known
        ends = np.arange(8, KEYS, 8)
        later = self._steps(known, np.stack([ends - 1, ends], 1), causal=False)
        rising, falling = (ends[later[:, side]] for side in (0, 1))
        if bool(rising.size) == bool(falling.size):
            return known
        known = replace(known, keys="left_to_right" if rising.size else "right_to_left")
        known = _tiled(known, rising if rising.size else falling)
        plain = Question(*(np.zeros((1, KEYS, 1, self.form.head_dim)) for _ in range(3)), causal=True)
        if not known.tile_n or not self.launcher.takes(plain):
            return known
        left = known.keys == "left_to_right"
        ends = np.arange(8, KEYS - 64, 8)
        pairs = np.stack([ends - 1, ends] if left else [ends, ends - 1], 1)
        seen = ends[self._steps(known, pairs, causal=True)[:, 0]]
        return replace(known, tile_causal=_tiled(replace(known, tile_n=0), seen).tile_n)

    def _steps(self, known: Structure, pairs: NDArray[np.int64], *, causal: bool) -> NDArray[np.bool_]:
        """Tell for each pair of keys whether the second is visited in a later tile than the first, and the reverse.

        The result is bool (pairs, 2); under a causal mask (pairs, 1), without the reverse.
        """
        unit, rise, weight = self._inexact(known)
        ways = pairs if causal else np.concatenate([pairs, pairs[:, ::-1]])
        scores = sparse(len(ways), KEYS, self.form, (ways[:, 0], 0.0), (ways[:, 1], rise))
        values = np.zeros_like(scores)
        values[np.arange(len(ways)), ways[:, 0]] = 1
        values[np.arange(len(ways)), ways[:, 1]] = -weight
        queries, first = (KEYS, KEYS - 64) if causal else (self.queries, 0)
        rows = written(self.form, scores, values, unit, queries=queries, first=first, causal=causal)
        lost = abs(2.0 ** (-unit * rise * self.form.factor) - weight)  # what rescaling leaves; other factors are near 1
        later = np.abs(rows.out(self.launcher(rows.question))) > lost / 4
        return later.reshape(-1, len(pairs)).T

    def widths(self, known: Structure) -> Structure:
        """Find how many bits sums keep, by small terms between large ones that cancel, each in a tile of its own."""
        tile = known.tile_n
        if not tile or 3 * tile > KEYS:
            return known
        large, smallest = (2.0**8, 2.0**-9) if self.form.dtype == "e4m3" else (2.0**15, 2.0**-14)
        below = np.arange(6, 29)
        below = below[large * 2.0**-below >= smallest]
        first = np.zeros(below.size, np.int64)
        scores = sparse(below.size, KEYS, self.form, *((first + n * tile, 0.0) for n in range(3)))
        values = np.zeros_like(scores)
        values[:, 0] = large
        sign = 1 if known.keys == "left_to_right" else -1  # of the large term that is visited first
        values[:, tile] = sign * large * 2.0**-below
        values[:, 2 * tile] = -large
        rows = written(self.form, scores, values, 1.0, queries=self.queries)
        kept = rows.out(self.launcher(rows.question)) * 3 / values[:, tile]
        known = replace(known, value_bits=_bits(below, kept))
        if self.form.dtype == "e4m3":  # the offset of 2^8 hides the last bits of lse
            return known
        entries = np.unique(self.form.keys(-np.linspace(6, 28, self.form.rows), 1.0))[::-1]
        exponents = entries * self.form.factor
        first = np.zeros(entries.size, np.int64)
        scores = sparse(entries.size, KEYS, self.form, (first, 0.0), (first + tile, entries))
        rows = written(self.form, scores, np.zeros_like(scores), 1.0, queries=self.queries)
        kept = rows.lse(self.launcher(rows.question)) / 2.0**exponents
        return replace(known, sum_bits=_bits(np.floor(-exponents).astype(np.int64), kept))

    def _inexact(self, known: Structure) -> tuple[float, float, float]:
        """Return a unit and an entry of K whose weight lies well off P's grid, and that weight as P holds it."""
        low = 2.6 + known.threshold_log2
        for middle in np.arange(low, low + 3, 0.04):
            try:
                unit, rise = self.form.level(middle - 0.2, middle + 0.2)
            except ValueError:
                continue
            weight = np.array([2.0 ** (-unit * rise * self.form.factor)])
            p = _roundings(self.form, weight)
            held = p.get((known.probabilities, known.p_rounding), p[self.form.dtype, "nearest"])
            grid = 2.0 ** (math.floor(math.log2(weight[0])) - self.form.fraction_bits)
            if abs(weight[0] - held[0]) / grid > 0.2 and float(self.form.rounded(held[0])) == held[0]:
                return unit, rise, float(held[0])
        raise ValueError(f"no score of {self.form.dtype} has a weight off the grid of P")

    def row_sum(self, known: Structure, order: Order) -> Structure:
        """Find the trees of the row sum that agree: whether two faint weights are added before they meet 1."""
        triples = _triples(known)
        unit, entry = self.form.level(*_FAINT)
        one, a, b = triples.T
        scores = sparse(len(triples), KEYS, self.form, (a, entry), (b, entry), (one, 0.0))
        rows = written(self.form, scores, np.zeros_like(scores), unit, queries=self.queries)
        answer = self.launcher(rows.question)
        if answer.lse is None:
            return known
        seen = rows.lse(answer) > _SEEN

        def agrees(row_sum: str, quad: str) -> bool:
            changed = replace(order, row_sum=row_sum, quad=quad)  # type: ignore[arg-type]
            guess = Hypothesis(known.tile_n, known.tile_causal, known.promotion_interval, changed)
            expected = guess.answer(rows.question, self.form.dtype, self.launcher.out_dtype)
            return bool((seen == (rows.lse(expected) > _SEEN)).all())

        found = tuple(pair for pair in itertools.product(ROW_SUMS, QUADS) if agrees(*pair))
        return replace(known, row_sums=found)


def _counted(x: NDArray[np.float64]) -> NDArray[np.int64]:
    """Round counts to integers; -1 for NaN, infinities and numbers beyond 10^6."""
    return np.where(np.isfinite(x) & (np.abs(x) < 1e6), np.rint(x), -1).astype(np.int64)


def _bits(below: NDArray[np.int64], kept: NDArray[np.float64]) -> int:
    """Return how many bits a sum keeps; 0 if it keeps all, or if a result is not finite.

    ``kept`` is the fraction that survived of terms that lie ``below`` bits below the largest one.
    """
    lost = np.flatnonzero(~(np.abs(kept - 1) < 0.6))
    return int(below[lost[0]]) if lost.size and np.isfinite(kept).all() else 0


def _step(survivors: NDArray[np.int64]) -> int:
    """Return how many neighbours are added at once, from the survivors of each pair; 0 if the number varies.

    Pairs that were added in the same step have the same number of survivors.
    """
    runs = [len(list(group)) * 2 for _, group in itertools.groupby(survivors.tolist())]
    if len(runs) < 2:
        return 0
    common, count = Counter(runs).most_common(1)[0]
    if count < len(runs) / 2:
        return 0
    return 1 if common <= _SPACING else common


def _roundings(form: Form, weight: NDArray[np.float64]) -> dict[tuple[str, str], NDArray[np.float64]]:
    """Return weights rounded in every way that P may be, by format and rounding."""
    grid = 2.0 ** (np.floor(np.log2(weight)) - form.fraction_bits)
    return {
        (form.dtype, "nearest"): form.rounded(weight),
        (form.dtype, "toward_zero"): np.floor(weight / grid) * grid,
        ("bf16", "nearest"): weight.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64),
        ("fp16", "nearest"): weight.astype(np.float16).astype(np.float64),
        ("fp32", "nearest"): weight.astype(np.float32).astype(np.float64),
    }


def _tiled(known: Structure, ends: NDArray[np.int64]) -> Structure:
    """Return the structure with the size of tiles that end at ``ends``, or with the ends if sizes are not equal."""
    gaps = set(np.diff(np.concatenate([[0], ends])).tolist())
    if len(gaps) == 1 and not ends[0] % 16:
        return replace(known, tile_n=int(ends[0]))
    return replace(known, edges=tuple(ends.tolist()))


def _triples(known: Structure) -> NDArray[np.int64]:
    """Return triples of keys, (triples, 3): one of weight 1 and two of faint weights.

    They lie at all distances within a thread's columns and over two tiles; some are drawn.
    """
    tile = known.tile_n
    rng = np.random.default_rng(5)
    base, after = tile, 2 * tile if known.keys == "left_to_right" else 0  # a tile, and the one visited after it
    near = [(0, 8, 9), (0, 8, 16), (0, 1, 8), (0, 2, 6), (0, 4, 6), (2, 0, 4), (4, 0, 2)]
    triples = [tuple(base + x for x in each) for each in near]
    triples += [(base, after, after + x) for x in (1, 8, 2, 4)]
    triples += [(base, after + 8, after + 9), (after, base, base + 8), (after, base, base + 2)]
    for _ in range(114):
        columns = rng.choice(min(32, tile), 3, replace=False)
        tiles = rng.choice([base, after], 3) if 2 * tile <= KEYS - 32 else [base] * 3
        triples.append(tuple(int(c + t) for c, t in zip(columns, tiles, strict=True)))
    return np.array([each for each in triples if max(each) < KEYS])
