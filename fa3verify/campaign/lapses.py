"""Findings about what a kernel did not return: an output that only some calls have, and tasks that were given up.

:mod:`fa3verify.campaign.summary` adds them to the findings about values, which the gate makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fa3verify.campaign.findings import Finding, finding
from fa3verify.campaign.tasks import GIVE_UP, Outcome
from fa3verify.judging.family import CaseResult
from fa3verify.judging.verdict import Part, What
from fa3verify.operations import Operation
from fa3verify.properties import LawOutcome
from fa3verify.text import Failure


def lapses(
    kernel: str,
    operation: Operation,
    outcomes: Sequence[Outcome],
    cases: Iterable[CaseResult],
    laws: Iterable[LawOutcome],
) -> list[Finding]:
    """Return the findings about one kernel.

    An optional output that is returned in some calls that ask for it must be returned in all. Where the kernel has lost
    :data:`GIVE_UP` workers, its skipped tasks are one finding.
    """
    optional = {side.name: side for side in operation.sides if side.optional}
    calls = [
        (name, side.figure("ratio") in case.measures, f"family {case.family}, {case.case.describe()}")
        for case in cases
        for name, side in optional.items()
        if side.is_due(case.case.problem)
    ]
    calls += [(name, given, f"property {law.law}, {trial}") for law in laws for name, given, trial in law.optional]
    seen = {(name, is_returned): words for name, is_returned, words in reversed(calls)}  # the first call of each kind
    findings = []
    for name in optional:
        if (name, True) in seen and (name, False) in seen:
            both = f"returned for {seen[name, True]}; missing for {seen[name, False]}"
            message = f"{name} is returned in some calls and missing in others: {both}"
            findings.append(finding(kernel, What(Part.OUTPUT, name), Failure(message)))
    own = [outcome for outcome in outcomes if outcome.task.kernel == kernel]
    lost = sum(outcome.lost_worker for outcome in own)
    skipped = sum(outcome.skipped for outcome in own)
    if lost >= GIVE_UP and skipped:
        message = f"{lost} of its processes hung or died; {skipped} of its {len(own)} tasks were not run"
        findings.append(finding(kernel, What(Part.GIVEN_UP), Failure(message)))
    return findings
