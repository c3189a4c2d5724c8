"""The first figure of an atlas's page: bits lost of every kernel by family of inputs, and a sentence about it.

Bits lost are those of :mod:`fa3verify.judging.bits_lost`: an ideal kernel, which rounds the exact output once, loses 0.
:mod:`fa3verify.report.atlas_page` shows it above the tables of :mod:`fa3verify.report.atlas_tables`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fa3verify.judging import bits_lost
from fa3verify.report.atlas_tables import Judged, is_side, size_of
from fa3verify.report.atlas_twins import Twinned
from fa3verify.report.notation import DASH, below_one
from fa3verify.report.tables import FigureCell
from fa3verify.text import plural

STEPS = (0.1, 0.5, 1.0, 2.0, 4.0)  # bits lost at which the shade of a cell changes
NOT_FINITE = "∞"


@dataclass(frozen=True, slots=True)
class Line:
    """The line of one kernel: its name within its group, and a cell for each family of the chart.

    ``mean`` is the mean of its bits lost, None where it lacks a family and does not rank. ``twin`` is the sign of
    :attr:`Twinned.mark`, empty where no twin was judged.
    """

    row: Judged
    name: str
    twin: str
    mean: float | None
    cells: tuple[FigureCell, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """The figure: the families of inputs, and the lines of kernels by the title of their group."""

    families: tuple[str, ...]
    groups: dict[str, list[Line]]

    @property
    def sentence(self) -> str:
        """Return one sentence about the figure: medians, hardest inputs, largest loss, and what is not finite."""
        lines = [line for group in self.groups.values() for line in group]
        shown = [(line, *at) for line in lines for at in zip(self.families, line.cells, strict=True)]
        known = [(cell.bits, line.row.label, family) for line, family, cell in shown if cell.bits is not None]
        parts = [f"{plural(len(lines), 'kernel')} on {plural(len(self.families), 'kind')} of inputs, in bits lost"]
        if known:
            by_group = {
                title.replace(",", "").lower(): [cell.bits for line in group for cell in line.cells]
                for title, group in self.groups.items()
            }
            by_family = {family: [bits for bits, _, where in known if where == family] for family in self.families}
            hardest = sorted(_medians(by_family), reverse=True)[:2]
            bits, kernel, worst = max(known)
            parts += [
                f"the median loss is {', '.join(f'{x:.1f} in {title}' for x, title in _medians(by_group))}",
                f"the hardest inputs are {' and '.join(f'{name} ({x:.1f} at the median)' for x, name in hardest)}",
                f"the largest finite loss is that of {kernel} on {worst}, {bits:.1f}",
            ]
        endless = [(line.row.label, family) for line, family, cell in shown if cell.text == NOT_FINITE]
        if endless:
            names, where = (list(dict.fromkeys(words)) for words in zip(*endless, strict=True))
            more = f" and {len(names) - 3} more" if names[3:] else ""
            who = f"{plural(len(names), 'kernel')} ({', '.join(names[:3])}{more}; on {', '.join(where)})"
            parts.append(f"NaN or infinity where the exact output is finite came out of {who}")
        if unknown := sum(all(cell.bits is None for cell in line.cells) for line in lines):
            parts.append(f"{plural(unknown, 'kernel')} without a figure (judged before there was one, or a quantiser)")
        return "; ".join(parts) + "."


def _medians(found: Mapping[str, Sequence[float | None]]) -> list[tuple[float, str]]:
    """Return the median of the known numbers under each name; names without a known number are left out."""
    known = {name: [x for x in values if x is not None] for name, values in found.items()}
    return [(median(values), name) for name, values in known.items() if values]


def chart(groups: Mapping[str, Sequence[Judged]], beside: Iterable[Twinned]) -> Chart:
    """Return the figure of kernels by group; ``beside`` are the kernels whose twin was judged as well."""
    families = tuple(dict.fromkeys(f.family for rows in groups.values() for row in rows for f in row.entry.families))
    twins = {pair.kernel.label: pair.mark for pair in beside}
    return Chart(families, {title: _lines(rows, families, twins) for title, rows in groups.items()})


def _lines(rows: Sequence[Judged], families: Sequence[str], twins: Mapping[str, str]) -> list[Line]:
    """Return the lines of a group, the kernel that loses least first.

    A kernel that lacks a family which another one has is not ranked, and stands last.
    """
    figures = [{f.family: f.figures.get("bits_lost") for f in row.entry.families} for row in rows]
    complete = {name for known in figures for name, bits in known.items() if bits is not None}
    lines = []
    for row, known in zip(rows, figures, strict=True):
        lost = bits_lost.of_kernel(known, complete)
        name = row.label.replace(".backward", "").replace(f".{row.entry.dtype}", "")  # as its group says already
        cells = tuple(_cell(row, family) for family in families)
        lines.append(Line(row, name, twins.get(row.label, ""), lost and lost.mean, cells))
    return sorted(lines, key=lambda line: math.inf if line.mean is None else line.mean)


def _cell(row: Judged, family: str) -> FigureCell:
    """Return the cell of a kernel and a family: empty if not judged, a dot if judged without bits lost."""
    judged = row.family(family)
    if judged is None:
        return FigureCell("", f"{row.label} was not judged on {family}")
    figures = judged.figures
    bits = figures.get("bits_lost")
    ratio = max(size_of(x) for key, x in figures.items() if key == "ratio_max" or is_side(key))
    title = f"{row.label} on {family}, error / bound {below_one(ratio)}"
    if figures.get("nonfinite") or bits == math.inf:
        return FigureCell(NOT_FINITE, f"{title}: not finite where the exact output is", "bad")
    wrong = " wrong" if ratio > 1 else ""
    if bits is None:
        return FigureCell("·", f"{title}: judged, not in bits lost", f"unknown{wrong}")
    return FigureCell(
        written(bits), f"{title}: {bits:.2f} bits lost", f"q{sum(bits >= step for step in STEPS)}{wrong}", bits=bits
    )


def written(bits: float | None) -> str:
    """Write bits with one decimal; "0" for less than 0.05, a dash for None.

    >>> written(0.04), written(0.36), written(math.inf), written(None)
    ('0', '0.4', '∞', '–')
    """
    if bits is None or not math.isfinite(bits):
        return DASH if bits is None else NOT_FINITE
    return "0" if bits < 0.05 else f"{bits:.1f}"
