"""Matplotlib figures as inline SVG whose colours are CSS variables, so that one drawing serves light, dark and print.

Series are drawn in sentinel colours, which :func:`render` replaces by ``var(--c0)`` .. ``var(--c7)``; text keeps the
page's font. A kernel has the same colour in every figure. The small pictures of one kernel are drawn without matplotlib
(:mod:`fa3verify.report.drawing`).
"""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from fa3verify.kernels.names import KernelName

# Sentinel colours: no figure uses them otherwise.
INK = "#000001"
MUTED = "#000002"
GRID = "#000003"
_drawing = threading.RLock()
SERIES = tuple(f"#0000a{i}" for i in range(8))
_CSS = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"} | {
    c: f"var(--c{i})" for i, c in enumerate(SERIES)
}
_KERNELS = {
    "twin.fp16": 0,
    "twin.bf16": 1,
    "twin.e4m3": 2,
    "twin.e4m3_chained": 3,
    "standard FP16": 4,  # which fa3_reports draws, as the next
    "twin.e4m3, exact P V": 6,
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.minor.visible": False,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}

# What matplotlib writes for a file of its own, and what stands for it on a page, in turn.
_NOT_OF_A_PAGE = (
    (r"<metadata>.*?</metadata>|<!--.*?-->", ""),
    (r"font: (?:[\w ]*? )?([\d.]+px) [^;\"]*", r"font-size: \1"),
    (r"font-family: [^;\"]*;?", ""),
    ("xlink:href", "href"),
)


def colour(kernel: str) -> str:
    """Return the colour of a kernel: faulty twins share one, and so do kernels that ``_KERNELS`` does not name."""
    name = KernelName.parse(kernel)
    return SERIES[7 if name.fault else _KERNELS.get(name.base, 5)]


def new_figure(*, width: float = 9.2, height: float = 3.4) -> Figure:
    """Return an empty figure of the page's width, in inches; call inside :func:`styled`."""
    return Figure(figsize=(width, height), layout="constrained")


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Make a context in which figures are drawn and rendered; one thread at a time, as matplotlib's style is global."""
    with _drawing, mpl.rc_context(STYLE):
        yield


def render(figure: Figure, name: str, alt: str) -> str:
    """Return a figure as an ``<svg>`` element that refers to nothing outside itself; equal figures give equal bytes.

    Ids start with ``name``, so that several figures can stand on one page; ``alt`` describes it for who cannot see it.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for pattern, instead in (*_NOT_OF_A_PAGE, (r'(\bid="|\burl\(#|\bhref="#)', rf"\g<1>{name}-")):
        text = re.sub(pattern, instead, text, flags=re.DOTALL)
    text = _without_idle_words(text)
    for sentinel, variable in _CSS.items():
        text = text.replace(sentinel, variable)
    box = re.search(r'viewBox="[^"]+"', text)
    assert box is not None, "matplotlib wrote an SVG without a viewBox"
    body = text[text.index(">") + 1 :]
    return f'<svg role="img" aria-label="{attribute(alt)}" {box.group()}>' + re.sub(r"\s*\n\s*", "\n", body).strip()


def _without_idle_words(text: str) -> str:
    """Remove what nobody sees: digits below a hundredth of a point, rotations by 0, unused ids and empty groups."""
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r"<[^>]+>", lambda tag: re.sub(r"\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", tag[0]), text)
    named = set(re.findall(r"#([\w.-]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in named else "", text)
    empty = re.compile(r"<g/>\s*|<g>\s*</g>\s*")
    while empty.search(text):
        text = empty.sub("", text)
    return text


def attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
