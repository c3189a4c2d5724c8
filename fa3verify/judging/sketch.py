"""A sketch of where the errors of a forward kernel lie: by query, visible keys and channel, and the worst head.

It is small enough to be kept in a run; :mod:`fa3verify.report.pictures` draws it. Everything is in units of the bound,
so that 1 is the limit. A profile has the largest error / bound of each bin, over all judged cases, and its mean square.
Of the case with the largest error / bound the worst head is kept, query by channel. Where an error leaves its bound,
``toward`` says to which keys the errors point: the error of a kernel that lost a key points away from that key's value,
the error of one that counts a key too much points towards it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fa3_reference.problem import AttentionProblem
from fa3verify.cases.tried import spans
from fa3verify.operations.operation import error_over_bound

QUERY_ROWS = 8  # query rows in one bin of a profile
HALF_OCTAVES = 24  # the bin of the histogram that ends at error / bound 1; each bin is a factor of sqrt(2)
LEVELS = (0.25, 0.5, 1.0, 4.0, 64.0)  # upper ends of the classes of a drawn cell; the last class has none
_CELLS = 96  # the most cells that are kept along an axis
_BINS = HALF_OCTAVES + 17  # the last bin takes everything above 2^7.5 times the bound


@dataclass(frozen=True, slots=True)
class Toward:
    """How far the errors of a head point to each key's value, in standard deviations of what noise would do.

    ``keys`` has a number for each key. ``offsets`` has one for each distance of a key from the diagonal that ends at
    the last query and the last key, starting at distance ``first``. Negative numbers point away.
    """

    keys: tuple[float, ...]
    offsets: tuple[float, ...]
    first: int


@dataclass(frozen=True, slots=True)
class Beyond:
    """What leaves its bound: which heads of a case, and in the worst one which rows, channels and how many values."""

    heads: tuple[str, ...]
    rows: str
    channels: str
    values: int


@dataclass(frozen=True, slots=True)
class WorstHead:
    """The head of the largest error / bound of a case.

    Parameters
    ----------
    sequence, head, query, channel : int
        Where the largest error / bound is.
    ratio : float
        The largest error / bound.
    rows, channels : int
        Sizes of the head.
    map : tuple of str
        A text for each query row, with a digit for each channel: the class of :data:`LEVELS`.
    heads, largest : tuple of str, tuple of float
        The first 64 heads of the case, and the largest error / bound of each.
    wrong : Beyond
    toward : Toward, optional
        None where no error leaves its bound.
    case : str
        The case on one line, in the sketch of several cases; else empty.
    """

    sequence: int
    head: int
    query: int
    channel: int
    ratio: float
    rows: int
    channels: int
    map: tuple[str, ...]
    heads: tuple[str, ...]
    largest: tuple[float, ...]
    wrong: Beyond
    toward: Toward | None = None
    case: str = ""


Bin = tuple[float, float, float]  # largest ratio, sum of squares of the finite ones, their number


@dataclass(frozen=True, slots=True)
class Sketch:
    """Where the errors of some cases lie.

    ``histogram`` counts outputs by half an octave of error / bound. ``query``, ``keys`` and ``channel`` are profiles;
    the bins of ``keys`` are 0 visible keys, then half octaves. ``worst`` is the worst head of the worst case, None
    where there is no query.
    """

    histogram: tuple[int, ...] = (0,) * _BINS
    query: tuple[Bin, ...] = ()
    keys: tuple[Bin, ...] = ()
    channel: tuple[Bin, ...] = ()
    worst: WorstHead | None = None
    cases: int = 1


def of_case(problem: AttentionProblem, out: np.ndarray, truth: np.ndarray, bound: np.ndarray, v: np.ndarray) -> Sketch:
    """Return the sketch of one case, an empty one for a problem without queries.

    Parameters
    ----------
    problem : AttentionProblem
    out, truth, bound : array of the problem's out_shape
        Elements whose truth or bound is not finite count as ratio 0.
    v : float64 array of the problem's v_shape
        The values that the kernel saw, dequantised.
    """
    ratio = np.where(np.isfinite(truth) & np.isfinite(bound), error_over_bound(out, truth, bound), 0.0)
    per_row = []
    for seq in problem.sequences():
        rows = problem.rows_q(ratio, seq)
        if rows.size:
            first, stop = problem.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)
            per_row.append((np.arange(seq.seqlen_q), np.maximum(stop - first, 0), rows.reshape(len(rows), -1)))
    if not per_row:
        return Sketch()
    queries, keys, of_row = (np.concatenate(each) for each in zip(*per_row, strict=True))
    octaves = np.where(keys > 0, 1 + np.floor(2 * np.log2(np.maximum(keys, 1))), 0).astype(int)
    channels = of_row.reshape(-1, problem.head_dim_v).T
    return Sketch(
        histogram=tuple(np.bincount(_half_octave(of_row.ravel()), minlength=_BINS).tolist()),
        query=_profile(queries // QUERY_ROWS, of_row),
        keys=_profile(octaves, of_row),
        channel=_profile(np.arange(len(channels)), channels),
        worst=_worst(problem, ratio, out.astype(np.float64) - truth, truth, v),
    )


@np.errstate(divide="ignore")
def _half_octave(ratio: np.ndarray) -> np.ndarray:
    """Return the bin of the histogram of each ratio: 0 and NaN in the first, infinity in the last."""
    at = np.ceil(2 * np.log2(ratio)) + HALF_OCTAVES
    return np.clip(np.nan_to_num(at, nan=0.0, posinf=_BINS, neginf=0.0), 0, _BINS - 1).astype(int)


def _profile(bins: np.ndarray, ratio: np.ndarray) -> tuple[Bin, ...]:
    """Return the bins of one axis: ``bins`` has the bin of each row of ``ratio``."""
    size = int(bins.max()) + 1
    finite = np.isfinite(ratio)
    worst = np.zeros(size)
    np.maximum.at(worst, bins, ratio.max(axis=1))
    squares = np.bincount(bins, np.square(np.where(finite, ratio, 0.0)).sum(axis=1), size)
    count = np.bincount(bins, finite.sum(axis=1), size)
    return tuple((_short(a), _short(b), float(c)) for a, b, c in zip(worst, squares, count, strict=True))


def _short(x: float) -> float:
    return float(f"{x:.3g}")


def _worst(
    problem: AttentionProblem, ratio: np.ndarray, error: np.ndarray, truth: np.ndarray, v: np.ndarray
) -> WorstHead:
    """Return the head with the largest ratio, and which heads, rows and channels leave the bound."""
    places = [(seq, head) for seq in problem.sequences() for head in range(problem.nheads) if seq.seqlen_q]
    largest = [float(problem.rows_q(ratio, seq)[:, head].max()) for seq, head in places]
    at = int(np.argmax(largest))
    seq, head = places[at]
    cells = problem.rows_q(ratio, seq)[:, head]
    wrong = cells > 1
    query, channel = np.unravel_index(int(np.argmax(cells)), cells.shape)
    heads = [f"{s.index}.{h}" if problem.batch > 1 else str(h) for s, h in places]
    beyond = Beyond(
        heads=tuple(heads[i] for i, x in enumerate(largest) if x > 1),
        rows=spans(np.flatnonzero(wrong.any(axis=1)).tolist()),
        channels=spans(np.flatnonzero(wrong.any(axis=0)).tolist()),
        values=int(wrong.sum()),
    )
    # Only rows in which something leaves its bound are asked where their errors point.
    errors = np.where(wrong.any(axis=1, keepdims=True), problem.rows_q(error, seq)[:, head], np.nan)
    values = problem.rows_k(v, seq)[:, head // problem.group]
    exact = problem.rows_q(truth, seq)[:, head]
    return WorstHead(
        sequence=seq.index,
        head=head,
        query=int(query),
        channel=int(channel),
        ratio=largest[at],
        rows=cells.shape[0],
        channels=cells.shape[1],
        map=_map(cells),
        heads=tuple(heads[:64]),
        largest=tuple(_short(x) for x in largest[:64]),
        wrong=beyond,
        toward=_toward(errors, exact, values) if np.isfinite(errors).all(axis=1).any() else None,
    )


def _map(cells: np.ndarray) -> tuple[str, ...]:
    """Return the classes of cells as digits, a text for each row; too many cells are merged, the largest counts."""
    steps = [max(1, -(-n // _CELLS)) for n in cells.shape]
    for axis, step in enumerate(steps):
        cells = np.maximum.reduceat(cells, np.arange(0, cells.shape[axis], step), axis=axis)
    return tuple("".join(map(str, row)) for row in np.searchsorted(LEVELS, cells))


def _toward(errors: np.ndarray, exact: np.ndarray, values: np.ndarray) -> Toward:
    """Return to which keys' values errors point; all arrays are (rows or keys, channels).

    The cosine between the error of a row and (value of a key - exact output) is summed over rows, by key and by
    distance from the diagonal, and divided by what random errors would give. Rows with NaN or infinity are left out.
    """
    rows = np.flatnonzero(np.isfinite(errors).all(axis=1) & np.isfinite(exact).all(axis=1))
    e = errors[rows]
    o = exact[rows]
    nk = len(values)
    if not nk or not len(rows):
        return Toward((), (), 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        dots = e @ values.T - (e * o).sum(1, keepdims=True)
        far = np.square(values).sum(1) - 2 * o @ values.T + np.square(o).sum(1, keepdims=True)
        cosine = dots / np.sqrt(np.maximum(far, 0) * np.square(e).sum(1, keepdims=True))
    cosine = np.where(np.isfinite(cosine), np.clip(cosine, -1, 1), 0.0)
    width = math.sqrt(values.shape[1])
    offsets = np.arange(nk)[None] - (rows[:, None] + nk - len(errors))
    first = int(offsets.min())
    places = (offsets - first).ravel()
    by_offset = np.bincount(places, cosine.ravel()) / np.sqrt(np.maximum(np.bincount(places), 1))
    by_key = cosine.sum(0) / math.sqrt(len(rows))
    return Toward(tuple(_short(x) for x in by_key * width), tuple(_short(x) for x in by_offset * width), first)


def merged(sketches: Iterable[tuple[str, Sketch]]) -> Sketch | None:
    """Return one sketch of many cases, each given with its line; None where there is no case."""
    named = list(sketches)
    if not named:
        return None
    each = [sketch for _, sketch in named]
    worst = [replace(sketch.worst, case=words) for words, sketch in named if sketch.worst]
    return Sketch(
        histogram=tuple(map(sum, zip(*(sketch.histogram for sketch in each), strict=True))),
        query=_added([sketch.query for sketch in each]),
        keys=_added([sketch.keys for sketch in each]),
        channel=_added([sketch.channel for sketch in each]),
        worst=max(worst, key=lambda head: head.ratio, default=None),
        cases=len(each),
    )


def _added(profiles: list[tuple[Bin, ...]]) -> tuple[Bin, ...]:
    """Add the bins of several profiles, of which some may be longer."""
    total: list[Bin] = []
    for profile in profiles:
        total += [(0.0, 0.0, 0.0)] * (len(profile) - len(total))
        for i, (worst, squares, count) in enumerate(profile):
            known = total[i]
            total[i] = max(known[0], worst), _short(known[1] + squares), known[2] + count
    return tuple(total)


def with_one_worst(sketches: Sequence[Sketch | None]) -> list[Sketch | None]:
    """Return the same sketches, with ``worst`` kept only in the one of the largest ratio; None stays None."""
    drawn = [sketch for sketch in sketches if sketch and sketch.worst]
    most = max(drawn, key=lambda sketch: sketch.worst.ratio if sketch.worst else 0.0, default=None)
    return [sketch if sketch is None or sketch is most else replace(sketch, worst=None) for sketch in sketches]
