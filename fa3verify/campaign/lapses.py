"""Findings of what a kernel did not give: an output in some calls alone, and the tasks after it was given up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fa3verify.campaign.findings import finding
from fa3verify.campaign.run import Finding
from fa3verify.campaign.tasks import GIVE_UP, Outcome
from fa3verify.judging.family import CaseResult
from fa3verify.operations import Operation
from fa3verify.properties import LawOutcome


def lapses(
    kernel: str,
    operation: Operation,
    outcomes: Sequence[Outcome],
    cases: Iterable[CaseResult],
    laws: Iterable[LawOutcome],
) -> list[Finding]:
    """Return the findings of one kernel, of its judged cases and laws."""
    optional = {side.name: side for side in operation.sides if side.optional}
    seen: dict[tuple[str, bool], str] = {}
    for case in cases:
        for name, side in optional.items():
            words = f"family {case.family}, {case.case.describe()}"
            if side.is_due(case.case.problem):
                seen.setdefault((name, side.figure("ratio") in case.measures), words)
    for law in laws:
        for name, is_returned, trial in law.optional:
            seen.setdefault((name, is_returned), f"property {law.law}, {trial}")
    found = []
    for name in optional:
        if (name, True) in seen and (name, False) in seen:
            calls = f"returned for {seen[name, True]}; missing for {seen[name, False]}"
            message = f"{name} is returned in some calls and missing in others: {calls}"
            found.append(finding(kernel, f"output {name}", message, crashed=True))
    own = [outcome for outcome in outcomes if outcome.task.kernel == kernel]
    lost = sum(outcome.lost_worker for outcome in own)
    skipped = sum(outcome.skipped for outcome in own)
    if lost >= GIVE_UP and skipped:
        message = f"{lost} of its processes hung or died; {skipped} of its {len(own)} tasks were not run"
        found.append(finding(kernel, "given up", message, crashed=True))
    return found
