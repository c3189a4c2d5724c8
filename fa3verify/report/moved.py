"""The table of what changed between two campaigns: kernels, verdicts, figures, properties and findings.

Either side is an atlas. Figures are compared exactly: equal kernels on equal inputs give equal figures, so that every
row of the table has a cause. Whether a kernel is better is judged in :mod:`fa3verify.report.against`, whose page shows
this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fa3verify.campaign import atlas
from fa3verify.campaign.run import KernelRun, Run
from fa3verify.files import Json
from fa3verify.judging.family import FamilyRow
from fa3verify.report.tables import DASH, PageColumn, PageTable, number, ratio, written

FIGURES = (
    "ratio_max",
    "max_error",
    "ulp_max",
    "rel_rmse_seen",
    "rel_rmse_unrounded",
    "bias",
    "nonfinite",
    "outside",
    "bits_differing",
)


def is_side(key: str) -> bool:
    """Tell whether a figure is the largest error / bound of an output beside the main ones, such as lse."""
    return key != "ratio_max" and key.startswith("ratio_") and key.endswith("_max")


def moved(old: Run, new: Run, names: Iterable[tuple[str, str]]) -> PageTable:
    """Return the table of what changed between pairs of kernels, given by their old and new names.

    Its columns are kernel, family, what, before, after, and after / before where both are numbers. It has no row where
    nothing changed.
    """
    rows = [
        row for before, after in sorted(names) for row in _kernel(atlas.alone(old, before), atlas.alone(new, after))
    ]
    columns = (
        PageColumn("kernel", "kernel"),
        PageColumn("family", "family"),
        PageColumn("what", "what"),
        PageColumn("before", "before", written),
        PageColumn("after", "after", written),
        PageColumn("after / before", "times", written),
    )
    return PageTable("moved", "What moved", columns, rows)


def _kernel(old: Run, new: Run) -> Iterator[Json]:
    """Yield the rows of one pair, from two atlases that have no other kernel; either may lack it."""
    if not (old.kernels and new.kernels):
        there = ["there" if run.kernels else "absent" for run in (old, new)]
        yield from (_row(kernel.name, "", "kernel", *there) for kernel in (*old.kernels, *new.kernels))
        return
    both = old.kernels[0], new.kernels[0]
    name = both[0].name
    for what, before, after in zip(("verdict", "reason", "policy", "identity"), *map(_said, both), strict=True):
        yield from _changed(name, "", what, before, after)
    theirs, ours = ({row.family: row for row in kernel.families} for kernel in both)
    for family in dict.fromkeys((*theirs, *ours)):
        yield from _family(name, family, theirs.get(family), ours.get(family))
    statuses = [{f"property {law.law}": law.status for law in kernel.laws} for kernel in both]
    losses = [{f"loss at {loss.seqlen_k} keys": loss.rel_rmse for loss in kernel.loss or ()} for kernel in both]
    findings = [{f"finding, {each.what.told}": "found" for each in run.failures} for run in (old, new)]
    for first, second in (statuses, losses, findings):
        for what in dict.fromkeys((*first, *second)):
            yield from _changed(name, "", what, first.get(what), second.get(what))


def _said(kernel: KernelRun) -> tuple[str, str, str, str]:
    """Return verdict, reason, policy and identity of a kernel in words."""
    known = kernel.introduction
    identity = [part for part in (known.identity.version, known.identity.sha256, known.identity.device) if part]
    policy = ", ".join(known.policy) or "nothing"
    return kernel.verdict, kernel.inconclusive or DASH, policy, ", ".join(identity) or DASH


def _family(name: str, family: str, old: FamilyRow | None, new: FamilyRow | None) -> Iterator[Json]:
    """Yield the rows of one family; None where a side did not judge it."""
    if old is None or new is None:
        yield _row(name, family, "family", "absent" if old is None else "there", "absent" if new is None else "there")
        return
    sides = filter(is_side, new.figures)
    for what in (*FIGURES, *sides):
        yield from _changed(name, family, what.replace("_", " "), old.figures.get(what), new.figures.get(what))


def _changed(name: str, family: str, what: str, old: Any, new: Any) -> Iterator[Json]:
    if old != new and not (old != old and new != new):  # NaN differs from itself and has not changed
        yield _row(name, family, what, old, new)


def _row(name: str, family: str, what: str, old: Any, new: Any) -> Json:
    write = ratio if what.startswith("ratio") else number
    texts = [x if isinstance(x, str) else write(x) for x in (old, new)]
    numeric = all(isinstance(x, int | float) for x in (old, new))
    times = number(new / old) if numeric and old else DASH
    return dict(zip(("kernel", "family", "what", "before", "after", "times"), (name, family, what, *texts, times)))
