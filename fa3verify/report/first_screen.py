"""The first screen of a run's report: the verdict in one sentence, and a heat map of errors by family of inputs.

The heat map has the relative RMSE of every kernel, and beside it that of the ideal kernel on the same inputs, so that a
reader sees which error no kernel of the format can avoid. :mod:`fa3verify.report.build` shows it; the first figure of
an atlas is in :mod:`fa3_reports.atlas.chart`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fa3verify.campaign.findings import symptoms
from fa3verify.campaign.run import KernelRun, Run
from fa3verify.cases import tried
from fa3verify.report.tables import DASH, FigureCell, number
from fa3verify.text import plural


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The heat map: a line of cells for each of ``families``, with a cell for each of ``rows``.

    A row is a kernel's error, the ideal kernel's, or its bits lost, as its ``name`` and ``kind`` say. ``least`` and
    ``most`` are the errors at the ends of the shades.
    """

    rows: list[dict[str, str]]
    families: list[tuple[str, list[FigureCell]]]
    least: str
    most: str


def headline(run: Run) -> str:
    """Return the verdict in one sentence without technical words."""
    kernels = run.kernels
    cases = sum(kernel.cases for kernel in kernels)
    one = len(kernels) == 1
    name = kernels[0].name if one else f"the {len(kernels)} kernels"
    if run.verdict == "pass":
        who = f"{name} was" if one else f"All {len(kernels)} kernels were"
        return f"{who} right in all {cases:,} cases that were tried."
    if run.verdict == "fail":
        return f"{_wrong(run)} ({plural(len(run.failures), 'finding')} in {cases:,} cases)."
    if run.verdict == "question":
        asked = " and ".join(dict.fromkeys(each.meaning for each in run.questions))
        return f"Is it meant, and not declared, that {asked}? So read, {name} was right in all {cases:,} cases."
    return f"No verdict: too little of {name} was tried ({plural(cases, 'case')}, none of which failed)."


def _wrong(run: Run) -> str:
    """Return in words which kernels failed, and the gravest symptom."""
    shown = symptoms(run.failures)
    names = [name for name in dict.fromkeys(s.first.kernel for s in shown) if name != "-"]
    others = len(run.kernels) - len(names)
    who = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    rest = f", {plural(others, 'other kernel')} did not" if names and others > 0 else ""
    return f"{who or 'a study'} failed{rest}: {shown[0].severity}"


def not_said(run: Run) -> str:
    """Return what a pass does not say, in one sentence; empty for any other verdict."""
    if run.verdict != "pass":
        return ""
    sizes_tried = [kernel.tried for kernel in run.kernels if kernel.tried and kernel.tried.calls]
    if not sizes_tried:
        return "It says nothing of sizes that were not tried."
    sizes = tried.in_words(tried.common(sizes_tried))
    tried_of = "tried of each" if len(run.kernels) > 1 else "tried"
    return f"It says nothing of other sizes: head_dim {sizes['head_dim']} and keys {sizes['seqlen_k']} were {tried_of}."


def heat_map(run: Run) -> HeatMap | None:
    """Return the heat map of all kernels whose families have figures of the ideal kernel; None if there is none."""
    kernels = [kernel for kernel in run.kernels if any("rel_rmse_ideal" in row.figures for row in kernel.families)]
    families = list(dict.fromkeys(row.family for kernel in kernels for row in kernel.families))
    if not families:
        return None
    keys = ("rel_rmse_seen", "rel_rmse_ideal")
    errors = [row.figures[key] or 0.0 for kernel in kernels for row in kernel.families for key in keys]
    levels = [math.log10(x) for x in errors if x and math.isfinite(x)] or [0.0]
    scale = max(min(levels), max(levels) - _DECADES), max(levels)
    rows = [(kernel, kind) for kernel in kernels for kind in _kinds(kernel)]
    return HeatMap(
        [
            {"name": kernel.name if kind == "kernel" else _KINDS[kind].format(kernel.dtype or "kernel"), "kind": kind}
            for kernel, kind in rows
        ],
        [(name, [_cell(kernel, name, kind, scale) for kernel, kind in rows]) for name in families],
        number(10 ** scale[0]),
        number(10 ** scale[1]),
    )


_DECADES = 4  # that shades tell apart: one family of hardly any error would make all others alike
_KINDS = {"ideal": "ideal {}", "bits": "bits lost"}


def _kinds(kernel: KernelRun) -> Sequence[str]:
    """Return the kinds of rows that a kernel has."""
    has_bits = any(row.figures.get("bits_lost") is not None for row in kernel.families)
    return ("kernel", "ideal", "bits") if has_bits else ("kernel", "ideal")


def _cell(kernel: KernelRun, family: str, kind: str, scale: tuple[float, float]) -> FigureCell:
    """Return one cell: "wrong" if an error leaves its bound, "worst" in the family that loses most bits.

    It is empty for a family that was not judged. ``scale`` holds the decimal logarithms of the ends of the shades.
    """
    figures = next((row.figures for row in kernel.families if row.family == family), {})
    if figures.get("rel_rmse_ideal") is None:
        return FigureCell("", f"{kernel.name} was not judged on {family}")
    if kind == "bits":
        bits = figures.get("bits_lost")
        text = DASH if bits is None else f"{bits:.2f}" if math.isfinite(bits) else "∞"
        is_worst = kernel.bits_lost is not None and kernel.bits_lost.worst_family == family
        return FigureCell(text, f"{kernel.name} on {family}: bits lost", "worst" if is_worst else "bits")
    error = figures["rel_rmse_seen" if kind == "kernel" else "rel_rmse_ideal"] or 0.0
    wrong = kind == "kernel" and ((figures["ratio_max"] or 0.0) > 1 or bool(figures.get("nonfinite")))
    ideal = number(figures["rel_rmse_ideal"])
    title = f"{kernel.name} on {family}: relative RMSE {number(error)}, of the ideal {ideal}"
    return FigureCell(_short(error), title, "wrong" if wrong else kind, _shade(error, scale))


def _shade(error: float, scale: tuple[float, float]) -> str:
    """Return where an error lies on a logarithmic scale, from 0 to 1, as text."""
    low, high = scale
    if not error:
        return "0"
    level = math.log10(error) if math.isfinite(error) else high
    return f"{max(0.0, level - low) / (high - low or 1):.2f}"


def _short(error: float) -> str:
    """Write an error with two digits, or one where the exponent has two digits, as narrowly as possible.

    >>> _short(2.13e-4), _short(1.39e-12), _short(0.0), _short(float("inf"))
    ('2.1e-4', '1e-12', '0', '∞')
    """
    if not math.isfinite(error):
        return "∞"
    digits = 1 if 1e-9 <= error < 1e10 else 0
    return f"{error:.{digits}e}".replace("e-0", "e-").replace("e+0", "e") if error else "0"
