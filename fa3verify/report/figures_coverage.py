"""The figure about coverage in a run's report: how many pairs of classes met in judged cases, by their dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from matplotlib.patches import Rectangle

from fa3verify.cases.coverage import Coverage
from fa3verify.report import svg
from fa3verify.report.svg import GRID, SERIES, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WORDS = "Pairs of classes that met in a judged case, of those that can, over all kernels; darker is more."


def pairs(covered: Iterable[Coverage | None]) -> str | None:
    """Return the heat map over all kernels as SVG; None for a run without covering arrays."""
    counts: dict[tuple[str, str], list[int]] = {}  # pairs that met, and pairs that can meet
    counted = [each.pairs for each in covered if each and each.pairs]
    for row in (row for each in counted for row in each.by_dimensions or ()):
        first, second = row.dimensions
        of = counts.setdefault((first, second), [0, 0])
        of[0] += row.tried
        of[1] += row.feasible
    if not counts:
        return None
    with svg.styled():
        return svg.render(_heat_map(counts), "f-pairs", _WORDS)


def _heat_map(counts: Mapping[tuple[str, str], list[int]]) -> Figure:
    """Draw a square for every two dimensions: darker for a larger share that met, with the number that did not meet."""
    names = sorted({name for pair in counts for name in pair})
    figure = new_figure(height=1.0 + 0.22 * len(names))
    ax = figure.subplots()
    for (a, b), (tried, feasible) in counts.items():
        x = names.index(a)
        y = names.index(b)
        ax.add_patch(Rectangle((x, y), 0.92, 0.92, facecolor=SERIES[0], alpha=0.5 * tried / feasible, edgecolor=GRID))
        if tried < feasible:
            ax.text(x + 0.46, y + 0.5, str(feasible - tried), ha="center", va="center", fontsize=7)
    ax.set(xlim=(0, len(names) - 1), ylim=(len(names), 1), aspect="equal")
    words = [name.replace("_", " ") for name in names]
    ax.set_xticks([i + 0.46 for i in range(len(names) - 1)], words[:-1], rotation=90)
    ax.set_yticks([i + 0.46 for i in range(1, len(names))], words[1:])
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    return figure
