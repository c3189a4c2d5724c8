"""What moved between two campaigns: kernels, verdicts, figures, properties and findings that are not
what they were.

Either side is an atlas or the data of a run. Figures are compared exactly: equal kernels on equal inputs give equal
figures, so that whatever is in the table was changed by something.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fa3verify.campaign.atlas import Entry, FamilyFigures
from fa3verify.files import Json
from fa3verify.judging.verdict import told
from fa3verify.report.atlas_tables import is_side
from fa3verify.report.notation import DASH, number, ratio
from fa3verify.report.tables import PageColumn, PageTable, written

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


def moved(old: Iterable[Entry], new: Iterable[Entry]) -> PageTable:
    """Return the table of what moved: kernel, family, what, before, after, and after over before where both are
    numbers."""
    before, after = ({entry.kernel: entry for entry in side} for side in (old, new))
    names = sorted(before.keys() | after.keys())
    rows = [row for name in names for row in _kernel(name, before.get(name), after.get(name))]
    columns = (
        PageColumn("kernel", "kernel"),
        PageColumn("family", "family"),
        PageColumn("what", "what"),
        PageColumn("before", "before", written),
        PageColumn("after", "after", written),
        PageColumn("after / before", "times", written),
    )
    return PageTable("moved", "What moved", columns, rows)


def _kernel(name: str, old: Entry | None, new: Entry | None) -> Iterator[Json]:
    if old is None or new is None:
        yield _row(name, "", "kernel", "absent" if old is None else "there", "absent" if new is None else "there")
        return
    for what in ("verdict", "reason", "policy", "identity"):
        yield from _changed(name, "", what, _text(getattr(old, what)), _text(getattr(new, what)))
    theirs, ours = ({row.family: row for row in entry.families} for entry in (old, new))
    for family in dict.fromkeys((*theirs, *ours)):
        yield from _family(name, family, theirs.get(family), ours.get(family))
    statuses = [{f"property {law.name}": law.status for law in entry.properties} for entry in (old, new)]
    losses = [{f"loss at {loss.seqlen_k} keys": loss.rel_rmse for loss in entry.loss} for entry in (old, new)]
    found = [{f"finding, {told(each.what)}": "found" for each in entry.findings} for entry in (old, new)]
    for first, second in (statuses, losses, found):
        for what in dict.fromkeys((*first, *second)):
            yield from _changed(name, "", what, first.get(what), second.get(what))


def _family(name: str, family: str, old: FamilyFigures | None, new: FamilyFigures | None) -> Iterator[Json]:
    if old is None or new is None:
        yield _row(name, family, "family", "absent" if old is None else "there", "absent" if new is None else "there")
        return
    sides = filter(is_side, new.figures)
    for what in (*FIGURES, *sides):
        yield from _changed(name, family, what.replace("_", " "), old.figures.get(what), new.figures.get(what))


def _changed(name: str, family: str, what: str, old: Any, new: Any) -> Iterator[Json]:
    if old != new and not (old != old and new != new):  # NaN is what it was
        yield _row(name, family, what, old, new)


def _row(name: str, family: str, what: str, old: Any, new: Any) -> Json:
    write = ratio if what.startswith("ratio") else number
    told_of = [x if isinstance(x, str) else write(x) for x in (old, new)]
    numeric = all(isinstance(x, int | float) for x in (old, new))
    times = number(new / old) if numeric and old else DASH
    return dict(zip(("kernel", "family", "what", "before", "after", "times"), (name, family, what, *told_of, times)))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple):
        return ", ".join(value) or "nothing"
    if value is None:
        return DASH
    return ", ".join(str(part) for part in (value.version, value.sha256, value.device) if part) or DASH
