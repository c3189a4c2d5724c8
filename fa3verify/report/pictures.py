"""The pictures of one kernel in a run's report: error by query, keys and channel, a histogram, and the worst case.

They draw a :class:`fa3verify.judging.sketch.Sketch` as SVG with the parts of :mod:`fa3verify.report.drawing`;
:mod:`fa3verify.report.build` puts them on the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup

from fa3verify.judging.sketch import HALF_OCTAVES, QUERY_ROWS, Bin, Sketch, WorstHead
from fa3verify.judging.verdict import ratio_text
from fa3verify.report import drawing
from fa3verify.report.drawing import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from fa3verify.report.tables import below_one, number

_MAP_COLOURS = ("--m0", "--m1", "--m2", "--m3", "--m4", "--m5")  # one for each class of a cell
_MOST_BARS = 128  # more values are merged
_CLEAR = 6.0  # a direction that is so many standard deviations of noise is reported


class Picture(NamedTuple):
    """One drawing, and its caption."""

    svg: Markup
    words: str


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of one kernel: ``profiles`` over all its cases, and its worst case ``drawn`` and in ``words``."""

    name: str
    profiles: list[Picture]
    drawn: list[Picture]
    words: str
    worst: WorstHead | None


def of_kernel(name: str, found: Sketch | None) -> Pictures | None:
    """Return the pictures of a kernel; None for one that has no sketch."""
    if not found:
        return None
    profiles = [
        _profile(found.query, f"{name}: error / bound by query", "query", lambda i: str(i * QUERY_ROWS)),
        _profile(found.keys, f"{name}: error / bound by visible keys", "visible keys", _keys),
        _profile(found.channel, f"{name}: error / bound by channel", "channel", str),
        _histogram(found.histogram, f"{name}: histogram of error / bound"),
    ]
    worst = found.worst
    if not worst:
        return Pictures(name, profiles, [], "", None)
    return Pictures(name, profiles, [_map(worst), _heads(worst), *_toward(worst)], told(worst), worst)


def told(worst: WorstHead) -> str:
    """Return in words which heads, queries and channels of the worst case leave their bound, and to which keys the
    errors point; if nothing leaves its bound, where the largest error / bound is.
    """
    ratio = worst.ratio
    where = f"query {worst.query}, head {worst.head}, channel {worst.channel}"
    if ratio <= 1:
        return f"The largest error / bound is {below_one(ratio)}, at {where}: within its bound, as is everything else."
    wrong = worst.wrong
    every = len(wrong.heads) == len(worst.heads)
    heads = "every head" if every else f"head {', '.join(wrong.heads)} of {len(worst.heads)}"
    rows = _all(wrong.rows, worst.rows, "query", "queries")
    channels = _all(wrong.channels, worst.channels, "channel", "channels")
    sentence = f"Wrong: {heads}; in head {worst.head} {rows}, {channels}."
    return f"{sentence} {_pointed(worst)} Largest error / bound {ratio_text(ratio)}, {where}.".replace("  ", " ")


def _all(spans: str, count: int, one: str, many: str) -> str:
    """Return numbers, written as spans, with the noun for one or many: "all" if they are all of ``count``."""
    if spans == (f"0 to {count - 1}" if count > 2 else ", ".join(map(str, range(count)))):
        return f"all {count} {many}"
    listed = spans if len(spans) < 60 else spans[:60].rpartition(",")[0] + ", ..."
    return f"{one if spans.isdigit() else many} {listed} of {count}"


def _pointed(worst: WorstHead) -> str:
    """Return in words to or away from which keys' values the errors clearly point; empty where they do not."""
    toward = worst.toward
    if not toward or not toward.keys:
        return ""
    directions = []
    for sign, words in ((-1, "away from"), (1, "towards")):
        keys = [sign * x for x in toward.keys]
        offsets = [sign * x for x in toward.offsets]
        if max(keys) >= max(offsets) and (lit := _lit(keys)):
            directions.append(f"{words} the values of {_few(lit)}")
        elif max(offsets) > max(keys) and (lit := _lit(offsets)):
            diagonal = [(first + toward.first, last + toward.first) for first, last in lit]
            directions.append(f"{words} the values of {_few(diagonal, '+')} from the diagonal")
    return f"The errors point {' and '.join(directions)}." if directions else ""


def _lit(values: Sequence[float]) -> list[tuple[int, int]]:
    """Return at most two ranges of places whose values stand out; none where nothing does, or too many places."""
    most = max(values)
    if most < _CLEAR:
        return []
    ranges: list[tuple[int, int]] = []
    for i in (i for i, x in enumerate(values) if x > most / 2):
        if ranges and i - ranges[-1][1] <= 8:  # places close to each other are one range
            ranges[-1] = (ranges[-1][0], i)
        else:
            ranges.append((i, i))
    covered = sum(last - first + 1 for first, last in ranges)
    return ranges if len(ranges) <= 2 and covered <= 0.45 * len(values) else []


def _few(ranges: Sequence[tuple[int, int]], sign: str = "") -> str:
    """Return ranges of keys in words; ``sign`` "+" writes signs."""
    parts = [f"{a:{sign}}" if a == b else f"{a:{sign}} to {b:{sign}}" for a, b in ranges]
    word = "key" if all(a == b for a, b in ranges) and len(ranges) == 1 else "keys"
    return f"{word} {' and '.join(parts)}"


def _profile(bins: Sequence[Bin], alt: str, label: str, name: Callable[[int], str]) -> Picture:
    """Draw the largest and the root mean square error / bound of every bin; ``name`` gives the label of a bin."""
    worst = [b[0] if b[2] or b[0] else None for b in bins]
    rms = [math.sqrt(b[1] / b[2]) if b[2] else None for b in bins]
    body = drawing.frame(label, [(i, name(i)) for i in drawing.labelled(len(bins))], max(1, len(bins)))
    body += _steps(rms, len(bins), "var(--c0)", 1.2)
    body += _steps([x if x is None or x <= 1 else 1.0 for x in worst], len(bins), "var(--ink)", 1.2)
    body += _bad(worst)
    return Picture(drawing.svg(body, alt), f"{label}: largest (dark) and root mean square (blue) over {len(bins)} bins")


def _keys(i: int) -> str:
    """Return the least number of visible keys of a bin: bin 0 has none, and each later one is half an octave."""
    return "0" if not i else f"{math.ceil(2 ** ((i - 1) / 2) - 1e-9)}"


def _steps(values: Sequence[float | None], count: int, colour: str, width: float) -> str:
    """Return a stroke over each bin at the height of its value; None has no stroke."""
    parts = [
        f"M{drawing.x(i, count):.1f} {drawing.y(value):.1f}H{drawing.x(i + 1, count):.1f}"
        for i, value in enumerate(values)
        if value is not None
    ]
    return f'<path d="{"".join(parts)}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _bad(values: Sequence[float | None]) -> str:
    """Return a red bar from the limit up to each value above 1."""
    one = drawing.y(1.0)
    edges = [drawing.x(i, len(values)) for i in range(len(values) + 1)]
    beyond = ((*ends, drawing.y(value)) for ends, value in zip(pairwise(edges), values) if value and value > 1)
    return "".join(drawing.rect(x, y, max(1.0, end - x), max(1.0, one - y), "var(--fail)") for x, end, y in beyond)


def _histogram(counts: Sequence[int], alt: str) -> Picture:
    """Draw the number of outputs by error / bound, both logarithmic; bars beyond the limit are red."""
    top = math.log10(max(1, *counts)) or 1.0
    body = ""
    tall = HEIGHT - TOP - BOTTOM
    for i, count in enumerate(counts):
        if count:
            high = (math.log10(count) + 0.3) / (top + 0.3) * tall  # + 0.3, so that a single output has a bar
            x = drawing.x(i, len(counts))
            width = drawing.x(1, len(counts)) - LEFT - 0.6
            fill = "var(--fail)" if i > HALF_OCTAVES else "var(--c0)"
            body += drawing.rect(x, HEIGHT - BOTTOM - high, width, high, fill)
    limit = drawing.x(HALF_OCTAVES + 1, len(counts))
    body += f'<path d="M{limit:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="var(--fail)"/>'
    edges = [(0.5, "0"), (HALF_OCTAVES - 11.5, "1/64"), (HALF_OCTAVES + 0.5, "1"), (HALF_OCTAVES + 12.5, "64")]
    body += drawing.axis("error / bound of every output", edges, len(counts))
    body += drawing.label(LEFT - 3, TOP + 6, number(max(counts, default=0)), "end")
    beyond = sum(counts[HALF_OCTAVES + 1 :])
    return Picture(drawing.svg(body, alt), f"histogram of {sum(counts):,} outputs; {beyond:,} beyond the bound")


def _map(worst: WorstHead) -> Picture:
    """Draw the worst head, queries downward and channels to the right, with the worst value circled."""
    rows = worst.map
    tall = len(rows)
    wide = len(rows[0])
    step_y = 200 / tall
    step_x = 260 / wide
    body = f'<g transform="translate(30 6) scale({step_x:.4f} {step_y:.4f})" shape-rendering="crispEdges">'
    for level, colour in enumerate(_MAP_COLOURS):
        # Strokes over neighbouring cells of this class.
        strokes = ((y, found) for y, row in enumerate(rows) for found in re.finditer(f"{level}+", row))
        if path := "".join(f"M{found.start()} {y}.5h{len(found[0])}" for y, found in strokes):
            body += f'<path d="{path}" stroke="var({colour})" stroke-width="1.02" fill="none"/>'
    body += "</g>"
    x = 30 + (worst.channel + 0.5) / worst.channels * 260
    y = 6 + (worst.query + 0.5) / worst.rows * 200
    body += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="var(--ink)" stroke-width="1.5"/>'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        last = worst.rows - 1
        body += drawing.label(27, 6 + share * 200 + (7 if share == 0 else 0), str(round(share * last)), "end")
        body += drawing.label(30 + share * 260, 217, str(round(share * (worst.channels - 1))), "middle")
    body += drawing.label(160, 228, "channel (right) and query (down)", "middle")
    alt = f"error / bound of head {worst.head} of the worst case, query by channel"
    words = f"head {worst.head} of the worst case, query by channel; orange and red leave the bound; circled: the worst"
    return Picture(drawing.svg(body, alt, (300, 232)), words)


def _heads(worst: WorstHead) -> Picture:
    """Draw the largest error / bound of the heads of the worst case."""
    values = worst.largest
    names = worst.heads
    body = drawing.frame("head", [(i, names[i]) for i in drawing.labelled(len(names))], len(names))
    body += _steps([min(x, 1.0) for x in values], len(values), "var(--ink)", 1.4) + _bad(values)
    return Picture(
        drawing.svg(body, "largest error / bound of every head of the worst case"), "by head of the worst case"
    )


def _toward(worst: WorstHead) -> list[Picture]:
    """Draw to which keys' values the errors point, by key and by distance from the diagonal.

    No picture where no error leaves its bound.
    """
    toward = worst.toward
    if not toward or not toward.keys or worst.ratio <= 1:
        return []
    return [
        _signed(
            toward.keys,
            0,
            "key: errors point to its value (up) or away from it (down); where all do, none is to blame",
        ),
        _signed(toward.offsets, toward.first, "key - diagonal: the same by distance from the diagonal"),
    ]


def _signed(values: Sequence[float], first: int, label: str) -> Picture:
    """Draw bars up and down, the first for place ``first``; if values share a bar the one farthest from 0 counts."""
    step = max(1, -(-len(values) // _MOST_BARS))
    bars = [max(values[i : i + step], key=abs) for i in range(0, len(values), step)]
    most = max(_CLEAR, *(abs(x) for x in bars))
    middle = (HEIGHT - BOTTOM + TOP) / 2
    half = (HEIGHT - BOTTOM - TOP) / 2
    body = f'<path d="M{LEFT} {middle}H{WIDTH - RIGHT}" stroke="var(--muted)" stroke-width="0.6"/>'
    for i, value in enumerate(bars):
        high = abs(value) / most * half
        y = middle - high if value > 0 else middle
        colour = "var(--fail)" if abs(value) > _CLEAR else "var(--c4)"
        width = max(0.8, (WIDTH - LEFT - RIGHT) / len(bars))
        body += drawing.rect(drawing.x(i, len(bars)), y, width, high, colour)
    for y, words in ((TOP + 6, f"+{most:.0f}"), (HEIGHT - BOTTOM, f"-{most:.0f}")):
        body += drawing.label(LEFT - 3, y, words, "end")
    places = [(i, str(first + i * step)) for i in drawing.labelled(len(bars))]
    body += drawing.axis(label.partition(":")[0], places, len(bars))
    return Picture(drawing.svg(body, label), f"{label}, in standard deviations of noise")
