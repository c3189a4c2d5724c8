"""The tables of a run's report, and the types of all tables of reports: :class:`PageTable`, :class:`PageColumn`.

The same rows are printed on the page and in the Markdown. :mod:`fa3verify.report.build` puts the tables of a run on its
page; those of an atlas are in :mod:`fa3_reports.atlas.tables`.

Reports write numbers with three significant digits, as powers where that is shorter, and unknown ones as a dash.
Templates have these functions as filters. A value may be a number, None, or a text such as "Infinity" from JSON; None,
NaN and other texts are written as a dash.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from fa3verify import operations
from fa3verify.campaign.run import KernelRun, Run
from fa3verify.cases import tried
from fa3verify.files import Json
from fa3verify.judging.gate import GateRow
from fa3verify.judging.verdict import PARTS, ratio_text
from fa3verify.records import plain

DASH = "–"


def _float(value: Any) -> float | None:
    """Return a value as a number; None for NaN and for what is no number."""
    try:
        x = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(x) else x


def number(value: Any) -> str:
    """Write a quantity with three significant digits.

    >>> [number(x) for x in (0.00019456, 12.345, 1234.5, 0, None, "Infinity")]
    ['1.95e-4', '12.3', '1.23e3', '0', '–', '∞']
    """
    x = _float(value)
    if x is None:
        return DASH
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    if x == 0:
        return "0"
    text = f"{x:.2e}"
    exponent = int(text.split("e")[1])
    if -2 <= exponent <= 2:
        return f"{float(text):.{max(0, 2 - exponent)}f}"
    return f"{text.split('e')[0]}e{exponent}"


def ratio(value: Any) -> str:
    """Write error / bound like :func:`number`, with more digits near 1, so that its side of 1 shows.

    >>> [ratio(x) for x in (0.99999, 1.0, 1.0004, 0.5, None)]
    ['0.99999', '1.00', '1.0004', '0.500', '–']
    """
    x = _float(value)
    return number(value) if x is None or not 0.95 <= x < 1.05 else ratio_text(x)


def below_one(value: Any) -> str:
    """Write error / bound like :func:`ratio`, but as "< 1.00" where it would round to 1.00 from below.

    >>> [below_one(x) for x in (0.99999, 1.0, 1.0004, 0.5, None)]
    ['< 1.00', '1.00', '1.0004', '0.500', '–']
    """
    x = _float(value)
    return "< 1.00" if x is not None and 0.9995 <= x < 1 else ratio(value)


def signed(value: Any) -> str:
    """Write a quantity with its sign, + or −."""
    x = _float(value)
    if x is None or x == 0:
        return number(value)
    return ("+" if x > 0 else "−") + number(abs(x))


def percent(value: Any) -> str:
    """Write a share as a percentage; 0 % and 100 % are written only where they are exact.

    >>> [percent(x) for x in (1.0, 0.99999, 0.5, 0.00001, 0)]
    ['100 %', '> 99.9 %', '50.0 %', '0.0010 %', '0 %']
    """
    x = _float(value)
    if x is None:
        return DASH
    if x in (0.0, 1.0):
        return f"{100 * x:.0f} %"
    if 0.9995 <= x < 1:
        return "> 99.9 %"
    return f"{100 * x:.1f} %" if abs(x) >= 0.001 else f"{100 * x:.4f} %"


def count(value: Any) -> str:
    """Write an integer with narrow spaces between groups of three digits.

    >>> count(1234567) == "1\\u202f234\\u202f567"
    True
    """
    x = _float(value)
    return DASH if x is None or math.isinf(x) else f"{round(x):,}".replace(",", "\u202f")


def moment(stamp: str) -> str:
    """Write a moment of ISO 8601 in UTC to the minute.

    >>> moment("2026-01-02T03:04:05+00:00"), moment("2026-01-02T03:04:05Z")
    ('2026-01-02 03:04 UTC', '2026-01-02 03:04 UTC')
    """
    return f"{stamp[:10]} {stamp[11:16]} UTC"


Form = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class FigureCell:
    """One cell of a heat map: its text, its tooltip ``title``, and ``state``, its CSS class.

    ``shade`` is a number from 0, the smallest error, to 1, or empty; ``bits`` are the bits lost, None if unknown or
    infinite.
    """

    text: str
    title: str
    state: str = "none"
    shade: str = ""
    bits: float | None = None


class PageColumn(NamedTuple):
    """A column: its heading, its key in the rows, and the function that writes a value.

    A column whose ``form`` is ``str`` holds texts and is set to the left, others to the right.
    """

    head: str
    key: str
    form: Form = str

    @property
    def is_text(self) -> bool:
        return self.form is str


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table: rows of values by column key.

    ``data`` are the files that it was made from, and ``note`` a sentence about it. ``fold`` hides it until a reader
    opens it. ``stale`` says whether the files are out of date, None where they say so themselves. A row
    may also have ``_worst``, true if it is shaded, and ``_href``, the link of its first cell.
    """

    name: str
    title: str
    columns: Sequence[PageColumn]
    rows: Sequence[Json]
    data: tuple[str, ...] = ()
    note: str = ""
    fold: bool = False
    stale: bool | None = None

    def cell(self, row: Json, column: PageColumn) -> str:
        """Return the text of a cell; a dash where a row has no text for the column."""
        value = row.get(column.key)
        return DASH if value is None and column.is_text else column.form(value)


def written(text: str) -> str:
    """Return the text: the form of a column of numbers that are texts already, and are set to the right."""
    return text


def _relative(value: Any) -> str:
    """Write a relative error; an infinite one says that the exact value, by which it is divided, is 0.

    >>> _relative("Infinity"), _relative(0.25)
    ('exact is 0', '0.250')
    """
    return "exact is 0" if number(value) == "∞" else number(value)


HEADLINE = (
    PageColumn("family", "family"),
    PageColumn("cases", "cases", count),
    PageColumn("rel. RMSE, seen", "rel_rmse_seen", _relative),
    PageColumn("rel. RMSE, unrounded", "rel_rmse_unrounded", _relative),
    PageColumn("ulp p50", "ulp_p50", number),
    PageColumn("ulp p99", "ulp_p99", number),
    PageColumn("ulp p99.9", "ulp_p999", number),
    PageColumn("ulp max", "ulp_max", number),
    PageColumn("max error / bound", "ratio_max", below_one),
    PageColumn("outside its order", "outside", count),
    PageColumn("one value possible", "determined", percent),
    PageColumn("bias", "bias", signed),
    PageColumn("bit-equal", "bit_equal", percent),
    PageColumn("non-finite", "nonfinite", count),
)
QUANTISED = (
    PageColumn("inputs / predicted", "quantisation_ratio", number),
    PageColumn("inputs / bound", "quantisation_bound_ratio", number),
)
_ALWAYS = ("family", "cases", "rel_rmse_seen", "ratio_max")  # columns that are shown even if they have no value


def headline(kernel: KernelRun) -> PageTable:
    """Return the main table of one kernel: a row for each family of inputs, without columns that have no value."""
    largest = max((row.figures.get("ratio_max") or 0.0 for row in kernel.families), default=0.0)
    rows = [
        row.figures | {"family": row.family, "_worst": row.figures.get("ratio_max") == largest}
        for row in kernel.families
    ]
    after = [column.key for column in HEADLINE].index("ratio_max") + 1
    sides = [
        PageColumn(f"max {side.words} / bound", side.figure("ratio"), number)
        for side in operations.find(kernel.operation).sides
    ]
    columns = [
        column
        for column in (*HEADLINE[:after], *sides, *HEADLINE[after:], *QUANTISED)
        if column.key in _ALWAYS or any(column.form(row.get(column.key)) != DASH for row in rows)
    ]
    return PageTable(f"headline-{kernel.name}", kernel.name, columns, rows)


def worst_sides(kernel: KernelRun) -> str:
    """Return as one text the largest error / bound of each output beside the main ones; a dash if there is none."""
    ratios = kernel.side_ratios.items()
    return ", ".join(f"{name.replace('_', ' ')} {below_one(worst)}" for name, worst in ratios) or DASH


def _unknown_once(rules: list[GateRow]) -> list[GateRow]:
    """Return the rows of the gate, with those of one kernel and rule that have no figure joined into one row.

    A figure is unknown for an lse that the kernel does not return, or where no baseline is stored.
    """

    def of(rule: GateRow) -> tuple[str, ...]:
        return rule.kernel, rule.layer, rule.rule, rule.status

    unknown = [rule for rule in rules if rule.observed is None]
    counts = Counter(map(of, unknown))
    first = {of(rule): rule for rule in reversed(unknown)}
    once = [first[key] if n == 1 else replace(first[key], family=f"{n} families") for key, n in counts.items()]
    return [*(rule for rule in rules if rule.observed is not None), *once]


_GATE = (
    PageColumn("status", "status"),
    PageColumn("part", "part"),
    PageColumn("rule", "rule"),
    PageColumn("kernel", "kernel"),
    PageColumn("family", "family"),
    PageColumn("limit", "limit", number),
    PageColumn("observed", "observed", number),
    PageColumn("margin", "margin", signed),
    PageColumn("baseline", "baseline", number),
)


def gate(rules: Iterable[GateRow], *, passed: bool) -> PageTable:
    """Return the table of the gate's rows that passed or, with ``passed`` false, of all others, failures first."""
    order = {"fail": 0, "not compared": 1}
    chosen = [rule for rule in rules if (rule.status == "pass") == passed]
    rows = [
        asdict(rule)
        | {
            "part": PARTS.get(rule.layer, rule.layer),
            "rule": "all figures" if rule.rule == "drift" else rule.rule,
        }
        for rule in sorted(_unknown_once(chosen), key=lambda rule: order.get(rule.status, 2))
    ]
    return PageTable("gate", "Gate", _GATE, rows)


_TRIED = (  # field of SizesTried, and its words in the table
    ("calls", "calls compared"),
    ("head_dim", "head_dim"),
    ("head_dim_v", "head_dim of V"),
    ("seqlen_q", "queries of a sequence"),
    ("seqlen_k", "keys of a sequence"),
    ("nheads", "heads"),
    ("group", "heads of Q to one of K"),
    ("sequences", "sequences"),
    ("layout", "tensors"),
    ("repeated_runs", "repeated runs"),
    ("not_tried", "not tried"),
)


def handed(found: tried.SizesTried) -> dict[str, str]:
    """Return in words how arguments lay, which sizes were asked one by one, and how else calls were changed."""
    views: dict[str, list[str]] = {}
    for name, view in found.layouts:
        views.setdefault(f"{name} as a view", []).append(view)
    return {name: ", ".join(each) for name, each in views.items()} | dict(found.asked)


def what_was_tried(run: Run) -> PageTable:
    """Return the table of sizes that were tried, a column for each kernel; runs of older versions have no row."""
    sizes = {
        kernel.name: tried.in_words(kernel.tried) | {"not_tried": ", ".join(kernel.tried.not_tried)}
        for kernel in run.kernels
        if kernel.tried
    }
    rows = [{"what": head, **{name: words[key] for name, words in sizes.items()}} for key, head in _TRIED if sizes]
    asked = {kernel.name: handed(kernel.tried) for kernel in run.kernels if kernel.tried}
    heads = dict.fromkeys(head for words in asked.values() for head in words)
    rows += [{"what": head, **{name: words.get(head, DASH) for name, words in asked.items()}} for head in heads]
    columns = [PageColumn("size", "what"), *(PageColumn(name, name) for name in sizes)]
    return PageTable("tried", "What was tried", columns, rows)


def coverage(run: Run) -> PageTable:
    """Return the table of what was tried and not tried of every kernel, and why that gives no verdict if it does not.

    Kernels of older runs, which have no coverage, have no row.
    """
    rows = []
    for kernel in run.kernels:
        covered = kernel.coverage
        if not covered:
            continue
        kinds = (f"{kind.replace('_', ' ')} {n.tried}/{n.claimed}" for kind, n in covered.kinds.items())
        rows.append(
            {
                "kernel": kernel.name,
                "tried": ", ".join(kinds) or DASH,
                "not_tried": ", ".join(covered.not_tried) or "nothing",
                "not_claimed": ", ".join(covered.not_claimed) or "nothing",
                "reason": kernel.inconclusive or covered.constraint or DASH,
            }
        )
    columns = (
        PageColumn("kernel", "kernel"),
        PageColumn("tried of claimed", "tried"),
        PageColumn("not tried", "not_tried"),
        PageColumn("not claimed", "not_claimed"),
        PageColumn("reason", "reason"),
    )
    return PageTable("coverage", "Coverage", columns, rows)


_LAWS = (
    PageColumn("status", "status"),
    PageColumn("kernel", "kernel"),
    PageColumn("property", "law"),
    PageColumn("statement", "statement"),
    PageColumn("kind", "kind"),
    PageColumn("examples", "examples", count),
    PageColumn("outputs", "outputs", count),
)


def laws(run: Run) -> PageTable:
    """Return the table of every property of every kernel, failures first."""
    outcomes = [(kernel.name, law) for kernel in run.kernels for law in kernel.laws]
    order = {"fail": 0, "pass": 1}
    rows = [
        plain(law) | {"kernel": kernel, "status": law.status.replace("_", " ")}
        for kernel, law in sorted(outcomes, key=lambda each: order.get(each[1].status, 2))
    ]
    return PageTable("properties", "Properties", _LAWS, rows)
