"""The rows and keys of one kv head, as the bounds of a forward read them: values, descales, tiles, exact scores.

:mod:`~fa3_reference.bounds.forward` and :mod:`~fa3_reference.bounds.enclosure` walk over :func:`tiles` and
:func:`key_parts`. What a backward reads is in :mod:`~fa3_reference.bounds.gradient_steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fa3_reference.attention import Positions, sinks_of
from fa3_reference.bounds.device import FP32_MAX, FP32_MIN_NORMAL, U_FP32
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.quantises import coded_rows, product_of_codes
from fa3_reference.bounds.steps import (
    FLOAT64,
    LOG2_E,
    OUTWARD,
    gamma,
    grouped_score_error,
    score_error,
    softcap_error,
)
from fa3_reference.formats import FORMATS, Format
from fa3_reference.mods import modified
from fa3_reference.problem import AttentionProblem, Descale, Operands, Sequence
from fa3_reference.score_term import ScoreTerm
from fa3_reference.terms import Rows, added, distances, rows_without_keys

_BAND = 128  # rows that are taken together at most where the tile is not known; more would cost memory
_LARGE = FP32_MAX / 4  # sums of absolute values up to here cannot overflow on the way
# Roundings of a term of scores and of its sum with a score: a quotient by softmax_scale or a product with log2(e), that
# constant, a product that makes it (ALiBi), the sum, and the factor that takes the sum to log2 units, which is rounded.
TERM_ROUNDINGS = 6
# A term below this gives its key weight 0 beside any key with another term: it stands for -inf, as format minima do.
_LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class Head:
    """Exact values of one kv head of one sequence, and the rows of some query heads that read it, head by head.

    All values are float64; axis 0 is the rows of the query heads for Q, and the keys for K and V.
    """

    problem: AttentionProblem
    seq: Sequence
    heads: np.ndarray  # query head of every row
    positions: np.ndarray  # of every row in the sequence
    q: np.ndarray  # stored values (rows, head_dim)
    k: np.ndarray
    v: np.ndarray
    q_factor: np.ndarray  # descale per row, ones without
    k_factor: np.ndarray
    v_factor: np.ndarray
    roundings_of_c: int  # of softmax_scale log2(e) with the descales of Q and K that there are
    v_scaled: bool  # whether V has a descale
    sink: np.ndarray | None = None  # exact log2 score of each row's sink, -inf where it has none
    term: np.ndarray | None = None  # exact log2 term of each score (rows, keys), -inf where it hides the key
    term_size: np.ndarray | None = None  # magnitudes that its roundings are relative to; broadcasts to the same shape
    # Of a kernel that quantises: how far its codes are from q, k and v, and what lse loses by the mean of K (rows,)
    moved: tuple[np.ndarray, ...] = ()
    lse_lost: np.ndarray | None = None

    @classmethod
    def of(
        cls, problem: AttentionProblem, operands: Operands, seq: Sequence, heads: range, only: Positions = None
    ) -> Head:
        """Return the values of some query heads of one group, and of some positions in the sequence, else of all.

        ValueError for a call that rotates or dequantises, as its kernel attends to other numbers.
        """
        kv_head = heads[0] // problem.group
        if problem.cache is not None and problem.changes_operands:
            raise ValueError("a call that attends to other numbers than it is given has the bound of call_bound")

        def factor(descale: Descale | None, h: int, seqlen: int) -> np.ndarray:
            return np.ones(seqlen) if descale is None else descale.rows(seq.index, h, seqlen).astype(np.float64)

        rows = np.arange(seq.seqlen_q) if only is None else only
        q = problem.rows_q(operands.q, seq)[rows]
        sinks = sinks_of(problem, operands.sinks) * LOG2_E if problem.sinks else None
        terms = (None, None) if operands.term is None else terms_of(problem, operands.term, seq, heads, rows)
        return cls(
            problem,
            seq,
            np.repeat(heads, len(rows)),
            np.tile(rows, len(heads)),
            np.concatenate([q[:, head] for head in heads]).astype(np.float64),
            problem.rows_k(operands.k, seq)[:, kv_head].astype(np.float64),
            problem.rows_k(operands.v, seq)[:, kv_head].astype(np.float64),
            np.concatenate([factor(operands.q_descale, head, seq.seqlen_q)[rows] for head in heads]),
            factor(operands.k_descale, kv_head, seq.seqlen_k),
            factor(operands.v_descale, kv_head, seq.seqlen_k),
            1 + (operands.q_descale is not None) + (operands.k_descale is not None),
            operands.v_descale is not None,
            None if sinks is None else np.repeat(sinks[list(heads)], len(rows)),
            *terms,
        )

    def empty(self, rows: np.ndarray) -> np.ndarray:
        """Return which rows see no key, bool (rows,)."""
        if self.term is not None:
            return np.all(self.hidden(rows, slice(0, self.seq.seqlen_k)), axis=1)
        first, stop = self.problem.visible_keys(self.positions[rows], self.seq.seqlen_q, self.seq.seqlen_k)
        return stop <= first

    def hidden(self, rows: np.ndarray, keys: slice) -> np.ndarray:
        """Return where a row does not see a key, bool (rows, keys)."""
        first, stop = self.problem.visible_keys(self.positions[rows], self.seq.seqlen_q, self.seq.seqlen_k)
        columns = np.arange(keys.start, keys.stop)
        hidden = (columns[None, :] < first[:, None]) | (columns[None, :] >= stop[:, None])
        return hidden if self.term is None else hidden | np.isneginf(self.term[rows, keys])

    def scores(self, rows: np.ndarray, keys: slice, model: KernelModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Step 1: return exact scores in log2 units, a bound of their error before the last fma, and float64's own.

        The first two are (rows, keys). Scores are -inf where hidden, with error 0, and NaN outside the domain. The
        third, (rows,), is the most that the float64 arithmetic of this function may lose of a row's scores.
        """
        s, ds, noise = self._raw_scores(rows, keys, model)
        c, eta = self._factor(rows, keys, model)
        clamped = np.where(c < FP32_MIN_NORMAL, FP32_MIN_NORMAL, 0.0)  # the kernel's c is never below it
        x = s * c
        dx = (c * ((1 + eta) * ds + eta * np.abs(s)) + clamped * (np.abs(s) + ds)) * OUTWARD
        if self.problem.softcap:
            size = np.abs(s) + ds
            capped = [self._capped(x, dx, c, size, tanh_error) for tanh_error in model.tanh_errors]
            x = capped[0][0]
            dx = capped[0][1]
            for other, error in capped[1:]:  # the same scores by another tanh, with another domain
                x = np.where(np.isnan(other), np.nan, x)
                dx = np.maximum(dx, error)
        noise = noise * c
        kept = 0.0 if model.scores == "fp32" else 2 * FORMATS[model.scores].unit_roundoff
        if self.problem.term is not None and self.problem.term.score_mod:
            x, dx, noise = self._modified(self.problem.term, rows, keys, (x, dx, noise), kept)
        elif self.term is not None and self.term_size is not None:
            term = np.where(np.isneginf(self.term[rows, keys]), 0.0, self.term[rows, keys])
            size = np.abs(x) + dx + self.term_size[rows, keys]
            x = x + term
            dx = (dx + (gamma(TERM_ROUNDINGS) + kept) * size) * OUTWARD
            noise = noise + FLOAT64 * size
        x = np.where((np.abs(x) + dx < _LARGE) | (np.isneginf(x) & (dx == 0)), x, np.nan)
        hidden = self.hidden(rows, keys)
        noise = np.where(hidden, 0.0, noise).max(1)
        return np.where(hidden, -np.inf, x), np.where(hidden, 0.0, dx), noise

    def _modified(
        self, term: ScoreTerm, rows: np.ndarray, keys: slice, before: tuple[np.ndarray, ...], kept: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return scores after a ``score_mod``, their error, and float64's own, from the same three ``before`` it.

        The function is taken at both ends of a score's error. How far it moves from there is the most that it can move
        if it is monotone between the score and either end; a jump is moved across by its height. Its own roundings are
        relative to its value and to what it adds to a multiple of the score, which may cancel. A key whose score
        becomes -inf, or a number that stands for it, has weight 0.
        """
        s, ds, noise = (x / LOG2_E for x in before)
        ds = ds + gamma(TERM_ROUNDINGS) * (np.abs(s) + ds)
        places = self.seq.index, self.heads[rows], self.positions[rows], np.arange(keys.start, keys.stop)
        f, low, high = (modified(term, s + way * ds, *places) for way in (0, -1, 1))
        vanishes = np.maximum(f, np.maximum(low, high)) < _LOWEST
        f, low, high = (np.where(vanishes, 0.0, x) for x in (f, low, high))
        slope = np.where(ds > 0, (high - low) / (2 * ds), 0.0)
        size = np.abs(f) + np.abs(f - slope * s)
        df = np.maximum(np.abs(high - f), np.abs(low - f)) + FP32_MIN_NORMAL
        df = df + (gamma(TERM_ROUNDINGS) + kept + 2 * U_FP32 * term.score_mod_ulp) * size
        noise = noise * np.abs(slope) + FLOAT64 * size
        df, noise = (np.where(vanishes, 0.0, x) * LOG2_E * OUTWARD for x in (df, noise))
        return np.where(vanishes, -np.inf, f * LOG2_E), df, noise

    def _capped(
        self, x: np.ndarray, dx: np.ndarray, c: np.ndarray, size: np.ndarray, tanh_error: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return capped scores, NaN outside the domain, and their error by a tanh of this relative error.

        ``x`` and ``dx`` are scores in log2 units and their error, ``c`` the factor that took them there, and ``size``
        bounds the raw scores.
        """
        cap = self.problem.softcap
        stored = (2 / cap, cap * LOG2_E)
        steep = 2 * c / cap
        unit = U_FP32
        if tanh_error:  # tanh.approx of softmax_scale / softcap times a score, instead of tanh by ex2 and rcp
            stored, steep, unit = (self.problem.softmax_scale / cap, cap, *stored[1:]), c / stored[1], gamma(2)
        steep = np.where(min(stored) >= FP32_MIN_NORMAL and max(stored) <= FP32_MAX, steep, np.nan)
        in_domain = (steep <= FP32_MAX) & ((steep >= FP32_MIN_NORMAL) | (size < 2.0**60))
        x, dx = softcap_error(x, dx + gamma(3) * (np.abs(x) + dx), cap, tanh_error)
        return np.where(in_domain, x, np.nan), (dx + unit * (np.abs(x) + dx)) * OUTWARD

    def _raw_scores(
        self, rows: np.ndarray, keys: slice, model: KernelModel
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return q k, exactly and NaN outside the domain; a bound of its error as it is kept; and what float64 may
        lose of it, (rows, keys) each."""
        q = self.q[rows]
        k = self.k[keys]
        sizes = np.abs(q) @ np.abs(k).T
        if model.quantises.q or model.quantises.k:
            core = model.core if model.accumulator in ("wgmma", "either") else None
            s, ds, sizes = product_of_codes(q, k, self.moved[0][rows], self.moved[1][keys], core)
        elif model.accumulator == "wgmma" and model.order.scale != "folded":
            s, ds = score_error(q, k, model.core)
        else:
            s = q @ k.T
            ds = np.zeros(sizes.shape)
            if model.accumulator in ("wgmma", "either"):
                ds = grouped_score_error(finite(q), finite(k), model.core, model.order.scale != "folded")
            if model.accumulator != "wgmma":
                unit = FORMATS["fp32"].epsilon if model.accumulator != "tf32" else model.addition
                tree = gamma(q.shape[1] + 1, unit) * sizes + q.shape[1] * FP32_MIN_NORMAL
                ds = np.maximum(ds, tree)
        if model.accumulator in ("wgmma", "either") and not model.keeps_subnormals:
            ds = ds + np.where(np.abs(s) - ds < FP32_MIN_NORMAL, FP32_MIN_NORMAL, 0.0)
        noise = 2.0**-48 * sizes
        ds = ds + noise
        largest = _LARGE
        if model.dtype == "fp32":
            ds, sizes = self._of_binary32(q, k, ds, sizes, model)
        elif model.order.scale == "folded":
            ds, sizes = self._folded(q, k, ds, sizes, FORMATS[model.dtype])
        if model.order.scale == "in_turn":  # its two roundings count with those of the factor
            ds = ds + model.tiny / self.problem.softmax_scale
            largest = _LARGE / max(1.0, self.problem.softmax_scale)
        if model.scores != "fp32":
            fmt = FORMATS[model.scores]
            scale = self.problem.softmax_scale
            ds = ds + 2 * fmt.unit_roundoff * (1 + fmt.epsilon) * (np.abs(s) + ds)
            ds = ds + fmt.min_subnormal * max(1.0, 1 / scale)
            largest = fmt.max_finite / 2 / max(1.0, scale)
        return np.where(sizes < _LARGE, np.where(np.abs(s) + ds < largest, s, np.nan), np.nan), ds, noise

    def _of_binary32(
        self, q: np.ndarray, k: np.ndarray, ds: np.ndarray, sizes: np.ndarray, model: KernelModel
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the error of raw scores of operands in binary32, and their sums of absolute products, which are
        infinite where an operand may overflow.

        Q may have met softmax_scale, or Q and K its root, with log2(e) or without. tf32 rounds both operands again.
        """
        scale = self.problem.softmax_scale
        relative = gamma(4) * (1 + model.factors) + model.factors
        flushed = FP32_MIN_NORMAL / min(1.0, scale) * (np.abs(q).sum(1)[:, None] + np.abs(k).sum(1))
        largest = FP32_MAX / (2 * LOG2_E * max(1.0, scale))
        fits = (np.abs(q).max(1, initial=0.0)[:, None] <= largest) & (np.abs(k).max(1, initial=0.0) <= largest)
        return (ds * (1 + relative) + relative * sizes + flushed) * OUTWARD, np.where(fits, sizes, np.inf)

    def _folded(
        self, q: np.ndarray, k: np.ndarray, ds: np.ndarray, sizes: np.ndarray, fmt: Format
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the error of raw scores whose Q was multiplied by softmax_scale and rounded again, and their sums of
        absolute products, which are infinite where that Q may overflow."""
        scale = self.problem.softmax_scale
        relative = fmt.unit_roundoff + 2 * U_FP32
        lost = relative * sizes + fmt.min_subnormal / 2 / scale * np.abs(k).sum(1)
        overflows = np.abs(q).max(1, initial=0.0) * scale * max(1.0, LOG2_E) * (1 + relative) > fmt.max_finite
        return (ds * (1 + relative) + lost) * OUTWARD, np.where(overflows[:, None], np.inf, sizes)

    def _factor(self, rows: np.ndarray, keys: slice, model: KernelModel) -> tuple[np.ndarray, Any]:
        """Return the factor that takes raw scores to log2 units, (rows, keys), and the relative error of the kernel's.

        Where the order is stated the error is computed, (rows, keys); else it is the worst case, one number. The factor
        is NaN where a product of scales leaves binary32's normal range before the last product.
        """
        scale = self.problem.softmax_scale * LOG2_E
        row = scale * self.q_factor[rows][:, None]
        c = row * self.k_factor[keys][None, :]
        in_domain = (FP32_MIN_NORMAL <= scale <= FP32_MAX) & (row >= FP32_MIN_NORMAL) & (row <= FP32_MAX)
        if model.order.scale != "float64":  # the descales may be multiplied first, and their product may overflow
            in_domain = in_domain & (self.q_factor[rows][:, None] * self.k_factor[keys][None, :] <= FP32_MAX)
        if model.order.scale == "in_turn":
            in_domain = in_domain & self._scales_in_turn
        unsaid = 0 if model.is_blocked and model.order.scale == "float64" else 2  # roundings that an order may add
        eta = gamma(self.roundings_of_c + unsaid)
        if model.is_stated:
            stored = np.float32(scale) * self.q_factor[rows].astype(np.float32)[:, None]
            stored = stored * self.k_factor[keys].astype(np.float32)[None, :]
            eta = np.where(c >= FP32_MIN_NORMAL, np.abs(stored / c - 1.0) + 2.0**-50, eta)
        eta = eta * OUTWARD
        return np.where(in_domain & (c <= FP32_MAX), c, np.nan), eta

    @property
    def _scales_in_turn(self) -> bool:
        """Tell whether scores that take softmax_scale before log2(e) are in the domain: without descales, and far from
        the ends of binary32."""
        cap = self.problem.softcap or 1.0
        is_normal = FP32_MIN_NORMAL <= self.problem.softmax_scale <= FP32_MAX
        return self.roundings_of_c == 1 and is_normal and 2.0**-100 <= cap <= 2.0**100

    def v_rows(self, keys: slice) -> np.ndarray:
        """Return dequantised rows of V, with 0 for NaN and Inf, of whose channels nothing is promised."""
        return finite(self.v[keys]) * self.v_factor[keys][:, None]


def terms_of(
    problem: AttentionProblem, term: np.ndarray, seq: Sequence, heads: Iterable[int], rows: Rows = slice(None)
) -> tuple[np.ndarray, np.ndarray]:
    """Return the term and its size in log2 units as a :class:`Head` has them, for rows of some query heads."""
    terms = [added(problem, term, seq, head, rows) for head in heads]
    sizes = [np.where(np.isneginf(x), 0.0, np.abs(x)) for x in terms]
    if problem.term is not None and problem.term.kind == "alibi":
        # A kernel may add the slope times the number of the key, which moves all scores of a row alike.
        slopes = np.abs(term[seq.index] if term.ndim == 2 else term).astype(np.float64)
        farthest = np.maximum(distances(seq, rows), max(seq.seqlen_q, seq.seqlen_k))
        sizes = [slopes[head] * farthest for head in heads]
    kept = [_without_lowest(problem, seq, x, rows) for x in terms]
    return np.concatenate(kept) * LOG2_E, np.concatenate(sizes) * LOG2_E


def _without_lowest(problem: AttentionProblem, seq: Sequence, x: np.ndarray, rows: Rows) -> np.ndarray:
    """Return a term with -inf in place of numbers that stand for it, in rows that see a key with another number."""
    high = np.where(x < _LOWEST, -np.inf, x)
    return np.where(rows_without_keys(problem, seq, high, rows)[:, None], x, high)


def finite(x: np.ndarray) -> np.ndarray:
    """Return the same numbers, with 0 for NaN and Inf."""
    return np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


class VisitedTile(NamedTuple):
    """Rows of a head that share a kernel tile, and the keys that the tile visits.

    Where several query heads are taken together, the rows are those of one tile in each of them.
    """

    head: Head
    rows: np.ndarray
    visited: slice

    def put(self, out: np.ndarray, lse: np.ndarray, o_rows: np.ndarray, lse_rows: np.ndarray) -> None:
        """Write ``o_rows`` (rows, channels) and ``lse_rows`` (rows,) to this tile's places in ``out`` and ``lse``.

        Those have the problem's shapes.
        """
        problem = self.head.problem
        seq = self.head.seq
        heads, positions = self.head.heads[self.rows], self.head.positions[self.rows]
        problem.rows_q(out, seq)[positions, heads] = o_rows
        problem.rows_lse(lse, seq)[heads, positions] = lse_rows


def tiles(
    problem: AttentionProblem, operands: Operands, model: KernelModel, only: Positions = None
) -> Iterator[VisitedTile]:
    """Yield every tile of every sequence, of ``only`` these positions if given; sequences without queries have none.

    Heads of a group with few rows are taken together, as most of the time goes into the keys that they share.
    """
    only = None if model.quantises.said else only  # codes of some rows need the others of their group
    for seq in problem.sequences():
        if not seq.seqlen_q:
            continue
        together = max(1, _BAND // (seq.seqlen_q if only is None else len(only)))
        for first in range(0, problem.nheads, problem.group):
            group = range(first, first + problem.group)
            for start in range(0, problem.group, together):
                head = Head.of(problem, operands, seq, group[start : start + together], only)
                if model.quantises.said:
                    each = np.split(head.q, len(head.q) // seq.seqlen_q)
                    x, moved, lse_lost = coded_rows(problem, operands, model.quantises, each, head.k, head.v)
                    head = replace(head, q=x[0], k=x[1], v=x[2], moved=moved, lse_lost=lse_lost)
                for rows, visited in _row_tiles(head, model):
                    yield VisitedTile(head, rows, visited)


def _row_tiles(head: Head, model: KernelModel) -> Iterator[tuple[np.ndarray, slice]]:
    """Yield the rows and the visited keys of each tile of a head, as :class:`VisitedTile` holds them.

    Where tiles are not known, the rows come in bands, and every key counts as visited.
    """
    problem = head.problem
    seq = head.seq
    rows = np.arange(len(head.q))
    if not model.tile_m or not model.tile_n:
        for start in range(0, rows.size, _BAND):
            yield rows[start : start + _BAND], slice(0, seq.seqlen_k)
        return
    group = problem.group if model.pack_gqa else 1
    if model.pads_group:
        group = 1 << (group - 1).bit_length()
    tile = (head.positions * group + (head.heads % problem.group if model.pack_gqa else 0)) // model.tile_m
    for t in np.unique(tile):
        ends = np.array([t * model.tile_m // group, min((t + 1) * model.tile_m - 1, seq.seqlen_q * group - 1) // group])
        first, stop = problem.visible_keys(ends, seq.seqlen_q, seq.seqlen_k)
        start = int(first[0])
        if model.order.key_tiles == "from_first_key":
            start = start // model.tile_n * model.tile_n
        visited = max(0, -(-(int(stop[1]) - start) // model.tile_n)) * model.tile_n
        yield rows[tile == t], slice(start, max(start, min(start + visited, seq.seqlen_k)))


def key_parts(visited: slice, model: KernelModel) -> list[list[slice]]:
    """Return the key blocks of each split in the order in which they are visited; one block where it is not known.

    A split without keys has no blocks.
    """
    if not model.is_blocked and model.num_splits == 1:
        return [[visited] if visited.stop > visited.start else []]
    n = model.tile_n
    starts = range(visited.start, visited.stop, n)
    size = -(-len(starts) // model.num_splits)
    cuts = [min(i * size, len(starts)) for i in range(model.num_splits + 1)]
    result = []
    for first, stop in pairwise(cuts):
        blocks = [slice(s, min(s + n, visited.stop)) for s in starts[first:stop]]
        if not model.is_blocked and blocks:
            blocks = [slice(blocks[0].start, blocks[-1].stop)]
        result.append(blocks[::-1] if model.order.keys == "right_to_left" else blocks)
    return result
