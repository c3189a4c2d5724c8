"""The tables of a report, as rows ready to print: the same rows feed the page and the markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fa3verify import operations
from fa3verify.campaign.run import KernelRun, Run
from fa3verify.cases import tried
from fa3verify.judging.gate import GateRow
from fa3verify.judging.verdict import PARTS
from fa3verify.report.notation import DASH, below_one, count, number, percent, signed

Row = dict[str, str]
Table = dict[str, Any]  # title, columns (heading, key, is_number), rows


def table(
    name: str, title: str, columns: list[tuple[str, str]], rows: list[Row], texts: tuple[str, ...], note: str = ""
) -> Table:
    return {
        "name": name,
        "title": title,
        "note": note,
        "columns": [(head, key, key not in texts) for head, key in columns],
        "rows": rows,
    }


HEADLINE = (
    ("family", "family"),
    ("cases", "cases"),
    ("rel. RMSE, seen", "rel_rmse_seen"),
    ("rel. RMSE, unrounded", "rel_rmse_unrounded"),
    ("ulp p50", "ulp_p50"),
    ("ulp p99", "ulp_p99"),
    ("ulp p99.9", "ulp_p999"),
    ("ulp max", "ulp_max"),
    ("max error / bound", "ratio_max"),
    ("outside its order", "outside"),
    ("one value possible", "determined"),
    ("bias", "bias"),
    ("bit-equal", "bit_equal"),
    ("non-finite", "nonfinite"),
)
_ALWAYS = ("family", "cases", "rel_rmse_seen", "ratio_max")  # columns that a table has even where nothing is known


def _relative(value: Any) -> str:
    """A relative error; where it is infinite, what it would be divided by.

    >>> _relative("Infinity"), _relative(0.25)
    ('exact is 0', '0.250')
    """
    return "exact is 0" if number(value) == "∞" else number(value)


_FORMATS = {
    "rel_rmse_seen": _relative,
    "rel_rmse_unrounded": _relative,
    "cases": count,
    "nonfinite": count,
    "bias": signed,
    "bit_equal": percent,
    "determined": percent,
    "outside": count,
    "family": str,
    "ratio_max": below_one,
}


def headline(kernel: KernelRun) -> Table:
    """One row per family of inputs of one kernel; a column of FP8 quantisation where it has a value."""
    families = [row.figures | {"family": row.family} for row in kernel.families]
    after = [key for _, key in HEADLINE].index("ratio_max") + 1
    outputs = operations.find(kernel.operation).sides
    sides = [(f"max {side.words} / bound", side.figure("ratio")) for side in outputs]
    columns = [*HEADLINE[:after], *sides, *HEADLINE[after:]]
    if any(f.get("quantisation_ratio") is not None for f in families):
        columns.append(("inputs / predicted", "quantisation_ratio"))
        columns.append(("inputs / bound", "quantisation_bound_ratio"))
    rows = [{key: _FORMATS.get(key, number)(f.get(key)) for _, key in columns} for f in families]
    columns = [(head, key) for head, key in columns if key in _ALWAYS or any(row[key] != DASH for row in rows)]
    largest = max((row.figures.get("ratio_max") or 0.0 for row in kernel.families), default=0.0)
    for row, family in zip(rows, families, strict=True):
        row["_worst"] = "yes" if family.get("ratio_max") == largest else ""
    return table(f"headline-{kernel.name}", f"{kernel.name}", columns, rows, ("family",))


def worst_sides(kernel: KernelRun) -> str:
    """Largest error / bound of every output beside the main ones, in one cell."""
    ratios = kernel.side_ratios.items()
    return ", ".join(f"{name.replace('_', ' ')} {below_one(worst)}" for name, worst in ratios) or DASH


def _unknown_once(rules: list[GateRow]) -> list[GateRow]:
    """Rules with one row for all families of a kernel of which a figure is not known: an lse that it does not return,
    whatever no baseline stores."""

    def of(rule: GateRow) -> tuple[str, ...]:
        return rule.kernel, rule.layer, rule.rule, rule.status

    unknown = [rule for rule in rules if rule.observed is None]
    counts = Counter(map(of, unknown))
    first = {of(rule): rule for rule in reversed(unknown)}
    once = [first[key] if n == 1 else replace(first[key], family=f"{n} families") for key, n in counts.items()]
    return [*(rule for rule in rules if rule.observed is not None), *once]


def gate(rules: Iterable[GateRow], *, passed: bool) -> Table:
    """Rules of the gate that passed, or all others; failures first."""
    order = {"fail": 0, "not compared": 1}
    chosen = [rule for rule in rules if (rule.status == "pass") == passed]
    rows = [
        {
            "kernel": rule.kernel,
            "family": rule.family,
            "status": rule.status,
            "part": PARTS.get(rule.layer, rule.layer),
            "rule": "all figures" if rule.rule == "drift" else rule.rule,
            "observed": number(rule.observed),
            "limit": number(rule.limit),
            "baseline": number(rule.baseline),
            "margin": signed(rule.margin),
        }
        for rule in sorted(_unknown_once(chosen), key=lambda rule: order.get(rule.status, 2))
    ]
    columns = [
        ("status", "status"),
        ("part", "part"),
        ("rule", "rule"),
        ("kernel", "kernel"),
        ("family", "family"),
        ("limit", "limit"),
        ("observed", "observed"),
        ("margin", "margin"),
        ("baseline", "baseline"),
    ]
    return table("gate", "Gate", columns, rows, ("status", "part", "rule", "kernel", "family"))


_TRIED = (
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


def what_was_tried(run: Run) -> Table:
    """Return the sizes behind the verdict, a column for each kernel; no row in runs of older versions."""
    told = {
        kernel.name: tried.in_words(kernel.tried) | {"not_tried": ", ".join(kernel.tried.not_tried)}
        for kernel in run.kernels
        if kernel.tried
    }
    rows = [{"what": head, **{name: words[key] for name, words in told.items()}} for key, head in _TRIED if told]
    columns = [("size", "what"), *((name, name) for name in told)]
    return table("tried", "What was tried", columns, rows, tuple(key for _, key in columns))


def coverage(run: Run) -> Table:
    """Return what was not tried of every kernel, and why no verdict is given where it is too much; no row in older
    runs.
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
    columns = [
        ("kernel", "kernel"),
        ("tried of claimed", "tried"),
        ("not tried", "not_tried"),
        ("not claimed", "not_claimed"),
        ("reason", "reason"),
    ]
    return table("coverage", "Coverage", columns, rows, tuple(key for _, key in columns))


def laws(run: Run) -> Table:
    """Return every property of every kernel, failures first."""
    found = [(kernel.name, law) for kernel in run.kernels for law in kernel.laws]
    order = {"fail": 0, "pass": 1}
    rows = [
        {
            "kernel": kernel,
            "law": law.law,
            "statement": law.statement,
            "kind": law.kind,
            "message": law.message or "",
            "replay": law.replay or "",
            "status": law.status.replace("_", " "),
            "examples": count(law.examples),
            "outputs": count(law.outputs),
        }
        for kernel, law in sorted(found, key=lambda each: order.get(each[1].status, 2))
    ]
    columns = [
        ("status", "status"),
        ("kernel", "kernel"),
        ("property", "law"),
        ("statement", "statement"),
        ("kind", "kind"),
        ("examples", "examples"),
        ("outputs", "outputs"),
    ]
    return table("properties", "Properties", columns, rows, ("status", "kernel", "law", "statement", "kind"))
