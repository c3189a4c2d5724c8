"""What stands above the tables of an atlas's page: the first figure, kernels beside their twins, and cards of findings.

The figure has bits lost of every kernel by family of inputs, and a sentence about it. Bits lost are those of
:mod:`fa3verify.judging.bits_lost`: an ideal kernel, which rounds the exact output once, loses 0. A pair of a kernel and
its twin says whether both have the same verdict and bits. Findings that a page of
``reports/findings`` explains are one card for each page; other findings are one card for each kernel and symptom.
:mod:`fa3_reports.atlas.page` reads the list of these pages and shows everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median

from fa3_reports.atlas.tables import Judged, bits, differing, size_of, why
from fa3verify.campaign.findings import SEVERITIES, Finding, clusters, severity, symptoms
from fa3verify.judging import bits_lost
from fa3verify.report.moved import is_side
from fa3verify.report.tables import DASH, FigureCell, below_one
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


@dataclass(frozen=True, slots=True)
class Known:
    """A page that explains findings: which findings of which kernels, and ``because``, the title of their card.

    ``kernels`` are shell patterns of names, ``findings`` of ``WHAT: MESSAGE | CASE``, so that they can name inputs.
    """

    page: str
    kernels: tuple[str, ...]
    findings: tuple[str, ...]
    because: str

    def explains(self, kernel: str, words: str) -> bool:
        """Tell whether it explains a finding about a kernel, given as ``WHAT: MESSAGE | CASE``."""
        named = any(fnmatchcase(kernel, pattern) for pattern in self.kernels)
        return named and any(fnmatchcase(words, pattern) for pattern in self.findings)


@dataclass(frozen=True, slots=True)
class Shown:
    """The first finding of one cause of a kernel, and the number of ``others`` of the same cause.

    ``words`` are ``WHAT: MESSAGE``; ``replay`` is the path of its replay file relative to the page, None without one.
    """

    row: Judged
    first: Finding
    words: str
    replay: str | None
    others: int


@dataclass(frozen=True, slots=True)
class Card:
    """One card: a fault, and the findings that show it; ``known`` is the page that explains it, None if none does.

    ``lead`` is the finding that is shown in full: one that can be replayed if possible, and a kernel's before a twin's.
    """

    anchor: str
    title: str
    known: Known | None
    severity: str
    lead: Shown
    found: tuple[Shown, ...]


def cards(rows: Sequence[Judged], known: Sequence[Known]) -> list[Card]:
    """Return the cards of all findings: those without an explaining page first, and the gravest first among each."""
    grouped: dict[tuple[Known | None, str], list[Shown]] = {}
    for row in rows:
        for first, others in clusters(row.findings):
            shown = Shown(
                row, first, f"{first.what.told}: {first.message}", first.replay and row.path(first.replay), others
            )
            whole = f"{shown.words} | {first.case or ''}"
            page = next((each for each in known if each.explains(row.entry.name, whole)), None)
            title = page.because if page else f"{row.label}: {why(symptoms([first])[0])}"
            grouped.setdefault((page, title), []).append(shown)
    gravest = list(SEVERITIES)
    made = []
    for number, ((page, title), shown) in enumerate(grouped.items(), 1):
        lead = min(shown, key=lambda x: (x.replay is None, x.row.entry.name.startswith("twin.")))
        made.append(Card(f"finding-{number}", title, page, severity(lead.first), lead, tuple(shown)))
    return sorted(made, key=lambda card: (card.known is not None, gravest.index(card.severity)))


@dataclass(frozen=True, slots=True)
class Twinned:
    """A kernel that was judged, and the row of its twin."""

    kernel: Judged
    twin: Judged

    @property
    def mark(self) -> str:
        """Return ≠ where verdicts or bits differ, = where neither does, and ~ where no bits were compared."""
        different = differing(self.kernel.entry)
        if different or self.kernel.entry.verdict != self.twin.entry.verdict:
            return "≠"
        return "~" if different is None else "="

    @property
    def words(self) -> str:
        """Return the verdicts of both and their different bits in words."""
        verdicts = f"kernel {self.kernel.entry.verdict}, twin {self.twin.entry.verdict}"
        return f"{verdicts}; bits unlike the twin's: {bits(self.kernel.entry)}"


def twin_of(kernel: str) -> str:
    """Return the name that the twin of a kernel has.

    >>> twin_of("gluon.fp16"), twin_of("flash3.e4m3")
    ('twin.fp16', 'twin.flash3.e4m3')
    """
    return f"twin.{kernel.removeprefix('gluon.')}"


def pairs(rows: Sequence[Judged]) -> list[Twinned]:
    """Return every kernel whose twin is among the rows; a twin judged on several machines is the first of them."""
    twins = {row.entry.name: row for row in reversed(rows)}
    return [Twinned(row, twins[name]) for row in rows if (name := twin_of(row.entry.name)) in twins]
