"""The tables of an atlas's page: kernels of one operation and dtype side by side, and the details of each kernel.

:mod:`fa3_reports.atlas.page` reads the atlases and puts these tables on the page. Its first figure is in
:mod:`fa3_reports.atlas.chart`, with its findings, and the tables of a single
run's report in :mod:`fa3verify.report.tables`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from fa3verify import operations
from fa3verify.campaign import atlas
from fa3verify.campaign.findings import Finding, Symptom, symptoms
from fa3verify.campaign.run import KernelRun, Loss, Run
from fa3verify.files import Json
from fa3verify.judging import gate
from fa3verify.judging.family import FamilyRow
from fa3verify.judging.verdict import Seen
from fa3verify.report.moved import is_side
from fa3verify.report.tables import DASH, PageColumn, PageTable, below_one, count, number, percent, signed
from fa3verify.version import __version__

OUTLIERS = "fa3_outliers"  # the two families whose errors have columns of their own
ACTIVATIONS = "activations:SmolLM2-135M-Instruct"
REPEATED = "repeated_run_is_identical"  # the property behind the column "same call twice"
REASONS = 3  # the most reasons that the row of a failing kernel names
VERDICTS = ("pass", "question", "fail", "inconclusive")  # in the order of their columns
FAR = 2.0  # a cell is shaded if it is more than so many times the least figure of its row


@dataclass(frozen=True, slots=True)
class Judged:
    """One kernel on a page.

    Parameters
    ----------
    label : str
        Its name on the page: with the device if several atlases have the kernel.
    entry : KernelRun
        Its results.
    atlas : Run
        The atlas that it is in.
    folder : str
        Folder of that atlas, relative to the page; "." for the same.
    device : str
        The GPU or platform that it ran on.
    """

    label: str
    entry: KernelRun
    atlas: Run
    folder: str
    device: str

    @property
    def version(self) -> str:
        """Return the version of fa3verify that judged it."""
        return self.atlas.version

    @property
    def findings(self) -> list[Finding]:
        """Return the findings about it."""
        return atlas.findings(self.atlas, self.entry.name)

    @property
    def is_older(self) -> bool:
        """Tell whether an older version of fa3verify judged it, whose rules, bounds and twins may have been others."""
        return _numbers(self.version) < _numbers(__version__)

    @property
    def anchor(self) -> str:
        """Its id on the page."""
        return "k-" + "".join(c if c.isalnum() else "-" for c in self.label)

    def path(self, replay: str) -> str:
        """Return the path of a replay file, named relative to its atlas, relative to the page."""
        return replay if self.folder == "." else f"{self.folder}/{replay}"

    def family(self, name: str) -> FamilyRow | None:
        """Figures of one family, None where it did not run."""
        return next((row for row in self.entry.families if row.family == name), None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def why(symptom: Symptom) -> str:
    """Return why a kernel fails by one symptom, in about three words, such as ``lse inf, not -inf``."""
    first = symptom.first
    subject = first.what.subject
    match symptom.severity:
        case "no result":
            return f"raises {first.raised}" if first.raised else "gives no result"
        case "infinite error" if first.seen and subject != gate.NON_FINITE:
            return _infinite(first.seen)
        case "broken property":
            return f"broken: {subject.replace('_', ' ')}"
        case "worse than the baseline":
            return symptom.severity
    return _RULES.get(subject, "beyond its bound")


_RULES = {  # rules of the gate in fewer words
    gate.NON_FINITE: gate.NON_FINITE,
    gate.OTHER_BITS: "other bits",
    gate.OUTSIDE: "outside stated order",
}


def _infinite(seen: Seen) -> str:
    """Return an infinite error in words: got and expected if known, else the output, whose name is left out for out."""
    if seen.kind:
        return f"{seen.output} {seen.got}, not {seen.expected}"
    return f"{'' if seen.output == 'out' else seen.output.replace('_', ' ') + ' '}error infinite"


def reasons(row: Judged) -> str:
    """Return in few words why a kernel did not pass: each symptom once, the gravest first. A dash if it passed."""
    verdict = row.entry.verdict
    if verdict != "fail":
        told = {"pass": DASH, "inconclusive": "too little tried", "question": "its contract is not declared"}
        return told.get(verdict, verdict)
    causes = list(dict.fromkeys(map(why, symptoms(row.findings))))
    more = f"; {len(causes) - REASONS} more" if len(causes) > REASONS else ""
    return "; ".join(causes[:REASONS]) + more or "no finding kept"


def status(row: FamilyRow) -> str:
    """Return what the largest known error of a family is: "proved" or "searched".

    It is proved where the stated order of operations leaves each output one value, and each output has that value.
    """
    return "proved" if row.figures.get("determined") == 1 and row.figures.get("outside") == 0 else "searched"


def worst(entry: KernelRun) -> FamilyRow | None:
    """Return the family with the largest error / bound of any output; None for a kernel without families."""

    def largest(row: FamilyRow) -> float:
        return max(size_of(x) for key, x in row.figures.items() if key == "ratio_max" or is_side(key))

    return max(entry.families, key=largest, default=None)


def sides(entry: KernelRun, rows: Sequence[FamilyRow]) -> str:
    """Return as text the largest error / bound, over some families, of each output beside the main ones."""
    cells = []
    for side in operations.find(entry.operation).sides:
        ratios = [row.figures.get(side.figure("ratio")) for row in rows]
        if known := [size_of(x) for x in ratios if x is not None]:
            cells.append(f"{side.words} {below_one(max(known))}")
    return ", ".join(cells) or DASH


def verdicts(rows: Sequence[Judged], title: str) -> PageTable:
    """Return the table of verdicts: a row for each kernel, with what was tried and why it failed."""
    columns = [
        PageColumn("kernel", "kernel"),
        PageColumn("verdict", "status"),
        PageColumn("why", "why"),
        PageColumn("problems searched", "problems", count),
        PageColumn("bits unlike the twin's", "bits"),
        PageColumn("same call twice", "repeated"),
        PageColumn("declares", "policy"),
        PageColumn("fa3verify", "version"),
        PageColumn("ran on", "device"),
    ]
    return PageTable(title, f"{title}: verdicts", columns, [_verdict_row(row) for row in rows])


def _verdict_row(row: Judged) -> Json:
    """Return a kernel's row of :func:`verdicts`, by column key; ``_href`` makes its first cell a link."""
    entry = row.entry
    return {
        "kernel": row.label,
        "_href": f"#{row.anchor}",
        "status": entry.verdict,
        "why": reasons(row),
        "version": f"{row.version}, older" if row.is_older else row.version,
        "device": row.device,
        "problems": entry.cases,
        "bits": bits(entry),
        "repeated": repeated(entry).partition(",")[0],
        "policy": _declared(entry) or "nothing",
    }


def _declared(entry: KernelRun) -> str:
    """Return in words what a kernel declares to do by design; empty where it declares nothing."""
    return ", ".join(entry.introduction.policy).replace("_", " ")


def contracts(rows: Sequence[Judged]) -> PageTable:
    """Return the table of contracts: kernels of one operation that declare the same, by verdict."""
    groups: dict[tuple[str, str], list[Judged]] = {}
    for row in sorted(rows, key=lambda row: list(operations.OPERATIONS).index(row.entry.operation)):
        groups.setdefault((row.entry.operation, _declared(row.entry)), []).append(row)
    had = [name for name in VERDICTS if any(row.entry.verdict == name for row in rows)]
    columns = [PageColumn("operation", "operation"), PageColumn("by design", "declared")]
    lines = [
        {"operation": operation, "declared": declared or "nothing but the default"}
        | {name: ", ".join(x.label for x in mine if x.entry.verdict == name) or DASH for name in had}
        for (operation, declared), mine in groups.items()
    ]
    return PageTable("contracts", "By contract", [*columns, *(PageColumn(x, x) for x in had)], lines)


def errors(rows: Sequence[Judged], title: str) -> PageTable:
    """Return the table of errors: a row for each kernel, with its largest error / bound, mean errors and losses."""
    lengths = sorted({loss.seqlen_k for row in rows for loss in row.entry.loss or ()})
    columns = [
        PageColumn("kernel", "kernel"),
        PageColumn("max error / bound", "ratio", below_one),
        PageColumn("other outputs / bound", "sides"),
        PageColumn("rel. RMSE, outliers: seen, unrounded", "outliers"),
        PageColumn("rel. RMSE, activations: seen, unrounded", "activations"),
        *(PageColumn(f"loss, {_short(keys)} keys", f"loss_{keys}", number) for keys in lengths),
    ]
    return PageTable(title, f"{title}: errors", columns, [_error_row(row) for row in rows])


def _error_row(row: Judged) -> Json:
    """Return a kernel's row of :func:`errors`, by column key; a length at which nothing was measured has no key."""
    entry = row.entry
    cells = {
        "kernel": row.label,
        "_href": f"#{row.anchor}",
        "ratio": max((size_of(f.figures.get("ratio_max")) for f in entry.families), default=None),
        "sides": sides(entry, entry.families),
    }
    for name, family in (("outliers", OUTLIERS), ("activations", ACTIVATIONS)):
        known = row.family(family)
        both = [known and known.figures.get(f"rel_rmse_{reference}") for reference in ("seen", "unrounded")]
        cells[name] = ", ".join(map(number, both)) if known else DASH
    return cells | {f"loss_{loss.seqlen_k}": loss.rel_rmse for loss in entry.loss or ()}


def bits(entry: KernelRun) -> str:
    """Return as text how many values had other bits than the twin's, out of how many."""
    different = differing(entry)
    if different is None:
        return "not compared"
    compared = [row.figures for row in entry.families if row.figures.get("bits_differing") is not None]
    return f"{count(different)} of {count(sum(float(f['outputs'] or 0) for f in compared))}"


def differing(entry: KernelRun) -> float | None:
    """Return how many values had other bits than the twin's; None if the kernel was not compared with a twin."""
    counts = [x for row in entry.families if (x := row.figures.get("bits_differing")) is not None]
    return sum(counts) if counts else None


def repeated(entry: KernelRun) -> str:
    """Return as text whether the same call twice gave the same bits, and over how many outputs."""
    law = next((law for law in entry.laws if law.law == REPEATED), None)
    if law is None:
        return "not claimed"
    result = {"pass": "same bits", "fail": "other bits"}.get(law.status)
    return f"{result}, {count(law.outputs)} outputs" if result else law.status.replace("_", " ")


# Tables of families by kernels: title, note, and a function from the figures of a family to its cell (None if unknown).
MATRICES: tuple[tuple[str, str, Callable[[Mapping[str, float | None]], float | None]], ...] = (
    (
        "largest known error",
        "As a multiple of the output's root mean square over the family, against the operands that the kernel saw.",
        lambda figures: _over(figures.get("max_error"), figures.get("rms"), figures.get("nonfinite")),
    ),
    (
        "relative RMSE, operands seen",
        "Against the operands that the kernel saw.",
        lambda figures: figures.get("rel_rmse_seen"),
    ),
    (
        "relative RMSE, unrounded inputs",
        "Against the inputs before they were rounded or quantised, as the FlashAttention-3 paper has it.",
        lambda figures: figures.get("rel_rmse_unrounded"),
    ),
)


def matrices(rows: Sequence[Judged], title: str) -> list[Json]:
    """Return a table of families by kernels for each of :data:`MATRICES`; cells are (text, CSS class)."""
    families = list(dict.fromkeys(row.family for judged in rows for row in judged.entry.families))
    made = []
    for name, note, figure in MATRICES:
        lines = []
        for family in families:
            known = [row.family(family) for row in rows]
            values = [figure(row.figures) if row else None for row in known]
            least = min((x for x in values if x is not None), default=0.0)
            lines.append({"family": family, "cells": [(number(x), _mark(x, least)) for x in values]})
        heads = [(row.label, row.anchor) for row in rows]
        made.append({"title": f"{title}: {name}", "note": note, "heads": heads, "rows": lines})
    return made


def _mark(value: float | None, least: float) -> str:
    """Return the CSS class of a cell: "bad" if not finite, "far" if far above the least of its row, else none."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "bad"
    return "far" if value > FAR * least else ""


_FAMILY = (
    PageColumn("family", "family"),
    PageColumn("status", "status"),
    PageColumn("problems", "problems", count),
    PageColumn("largest error", "max_error", number),
    PageColumn("in ulp", "ulp_max", number),
    PageColumn("max error / bound", "ratio_max", below_one),
    PageColumn("other outputs / bound", "sides"),
    PageColumn("rel. RMSE, seen", "rel_rmse_seen", number),
    PageColumn("rel. RMSE, unrounded", "rel_rmse_unrounded", number),
    PageColumn("bias", "bias", signed),
    PageColumn("one value possible", "determined", percent),
    PageColumn("case of the largest error / bound", "largest"),
)


def details(row: Judged) -> Json:
    """Return what the template prints about one kernel, except its findings."""
    entry = row.entry
    largest = worst(entry)
    facts = asdict(entry.introduction.identity)
    replay = shlex.quote(row.path(str(largest.replay))) if largest else ""
    return {
        "name": row.label,
        "anchor": row.anchor,
        "entry": entry,
        "identity": {"ran on": row.device} | {key: x for key, x in facts.items() if x and key != "device"},
        "tried": _tried(entry),
        "order": "stated: its bound assumes it"
        if entry.introduction.states_order
        else "not stated: its bound is of any order",
        "repeated": repeated(entry),
        "bits": bits(entry),
        "properties": _properties(entry),
        "losses": [_loss(loss) for loss in entry.loss or ()],
        "families": PageTable(row.label, row.label, _FAMILY, _families(entry)),
        "replay": largest and f"fa3verify replay {replay} --family {shlex.quote(largest.family)}",
        "file": largest and row.path(str(largest.replay)),
    }


def _families(entry: KernelRun) -> list[Json]:
    """Return the rows of a kernel's table of families, with the worst one marked."""
    largest = worst(entry)
    return [
        row.figures
        | {"family": row.family, "status": status(row), "problems": row.number("cases"), "largest": row.largest}
        | {"sides": sides(entry, [row]), "_worst": row is largest}
        for row in entry.families
    ]


def _tried(entry: KernelRun) -> str:
    """Return in words how many of the classes that a kernel claims were tried."""
    kinds = entry.coverage.kinds.values() if entry.coverage else ()
    tried = sum(kind.tried for kind in kinds)
    claimed = sum(kind.claimed for kind in kinds)
    return f"{tried} of {claimed} classes that it claims"


def _properties(entry: KernelRun) -> dict[str, list[str]]:
    """Return the names of properties by their status, both in words."""
    return {
        status.replace("_", " "): [law.law.replace("_", " ") for law in entry.laws if law.status == status]
        for status in dict.fromkeys(law.status for law in entry.laws)
    }


def _loss(loss: Loss) -> str:
    """Return an accumulator loss in words, or why it was not measured."""
    keys = f"{count(loss.seqlen_k)} keys, {loss.rows} rows"
    if loss.missing:
        return f"{keys}: not measured, {loss.missing}"
    return f"{keys}: relative RMSE {number(loss.rel_rmse)}, gain less 1 {signed(loss.bias)}"


def _short(keys: int) -> str:
    """Return a number of keys in units of 2^10 or 2^20, as headings have it."""
    return f"{keys // 1024}k" if keys < 1 << 20 else f"{keys >> 20}M"


def _over(error: float | None, rms: float | None, nonfinite: float | None) -> float | None:
    """Return error / RMS; infinite if an output that should be finite was not, None if a figure is unknown or RMS 0."""
    if nonfinite:
        return math.inf
    return error / rms if error is not None and rms else None


def size_of(value: float | None) -> float:
    """Return a figure for comparing by size: None counts as -1, below every error, and NaN as infinity."""
    return -1.0 if value is None else math.inf if math.isnan(value) else value
