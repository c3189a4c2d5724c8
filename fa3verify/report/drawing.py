"""Parts of the small SVG pictures of :mod:`fa3verify.report.pictures`, whose vertical axis is mostly error / bound.

Sizes and places are in units of the picture, which is :data:`WIDTH` by :data:`HEIGHT`; y counts downward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup, escape

from fa3verify.report.svg import attribute
from fa3verify.report.tables import number

WIDTH = 300
HEIGHT = 150
# Margins around the drawn area, for labels.
LEFT = 34
RIGHT = 6
TOP = 8
BOTTOM = 26
# The range of error / bound that the axis shows; values beyond lie on its edge.
_LOWEST = 1e-3
_HIGHEST = 1e3


def labelled(count: int) -> list[int]:
    """Return the numbers of the bins that have a label, at most five of ``count``."""
    return list(range(0, count, max(1, -(-count // 5))))


def y(value: float) -> float:
    """Return the height at which an error / bound is drawn, on a logarithmic scale; NaN and infinity are at the top."""
    low = math.log10(_LOWEST)
    high = math.log10(_HIGHEST)
    level = high if not math.isfinite(value) else math.log10(min(max(value, _LOWEST), _HIGHEST))
    return TOP + (high - level) / (high - low) * (HEIGHT - TOP - BOTTOM)


def x(i: float, count: int) -> float:
    """Return the place at which bin ``i`` of ``count`` begins."""
    return LEFT + i / max(1, count) * (WIDTH - LEFT - RIGHT)


def frame(title: str, labels: Sequence[tuple[float, str]], count: int) -> str:
    """Return the horizontal lines of the axis, the limit at 1 in red, the labels (bin, words), and the axis title."""
    body = ""
    for power in (-3, -2, -1, 0, 1, 2, 3):
        at = y(10.0**power)
        line = "var(--fail)" if power == 0 else "var(--grid)"
        body += (
            f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="{line}" stroke-width="{1 if power == 0 else 0.6}"/>'
        )
        if power % 3 == 0:
            body += label(LEFT - 3, at + 3, "1" if power == 0 else number(10.0**power), "end")
    return body + axis(title, labels, count)


def axis(title: str, labels: Sequence[tuple[float, str]], count: int) -> str:
    """Return the labels below the bins, each in the middle of one (bin, words), and the title of the axis."""
    below = (label(x(place + 0.5, count), HEIGHT - BOTTOM + 11, words, "middle") for place, words in labels)
    return "".join(below) + label((WIDTH + LEFT) / 2, HEIGHT - 3, title, "middle")


def label(x: float, y: float, words: str, anchor: str) -> str:
    """Return a text at a place; ``anchor`` is "start", "middle" or "end"."""
    style = f'font-size="8.5" fill="var(--muted)" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def svg(body: str, alt: str, size: tuple[int, int] = (WIDTH, HEIGHT)) -> Markup:
    """Return a picture of some parts; ``alt`` describes it for those who cannot see it."""
    return Markup(f'<svg role="img" aria-label="{attribute(alt)}" viewBox="0 0 {size[0]} {size[1]}">{body}</svg>')


def rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    """Return a filled bar."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'
