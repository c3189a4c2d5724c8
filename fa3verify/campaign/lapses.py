"""Findings about what a kernel did not return: an output that only some calls have, and tasks that were given up.

:mod:`fa3verify.campaign.summary` adds them to the findings about values, which the gate makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from fa3verify.campaign.findings import Finding, finding, work
from fa3verify.campaign.introduction import LONG
from fa3verify.campaign.run import Introduction
from fa3verify.campaign.tasks import GIVE_UP, Outcome
from fa3verify.judging.family import CaseResult
from fa3verify.judging.verdict import Part, What
from fa3verify.operations import Operation
from fa3verify.properties import LawOutcome
from fa3verify.text import Failure

HANGS = 10.0  # times as long as is expected is waited for a call that is said to hang


def answered(kernel: Introduction, outcomes: list[Outcome]) -> tuple[Introduction, list[Outcome]]:
    """Return a kernel and outcomes in which what a slow kernel did not answer in time counts as not run.

    A call hangs, which is a finding, if it was waited for ten times as long as calls that were timed let expect of its
    size. No process that died is slow, nor is a kernel of which no call was timed.
    """
    shape_s, long_s = kernel.pace
    sizes = [work((each.at or {}).get("content")) / work({"problem": asdict(LONG)}) for each in outcomes]
    left = [
        replace(each, error=None, lost_worker=False, skipped=True)
        if each.task.kernel == kernel.name and 0 < each.waited_s < HANGS * (shape_s + long_s * max(1.0, size))
        else each
        for each, size in zip(outcomes, sizes, strict=True)
    ]
    waited = [each.waited_s for each in left if each.skipped and each.task.kernel == kernel.name]
    if not waited:
        return kernel, outcomes
    told = f"{len(waited)} of its tasks did not end" + (
        f", a call was not answered in {max(waited):g} s" if any(waited) else ""
    )
    return replace(kernel, narrowed=f"{kernel.narrowed}; {told}" if kernel.narrowed else told), left


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
