"""Cases and trials that refute different hypotheses about one kernel, judged together again."""

from __future__ import annotations

from collections.abc import Sequence

from fa3verify import operations
from fa3verify.campaign.settled import judged_under, settle
from fa3verify.campaign.tasks import judge_cases
from fa3verify.cases.case import Case
from fa3verify.judging.hypotheses import sums_of
from fa3verify.judging.judgement import passes
from fa3verify.kernels.record import Candidate
from fa3verify.properties import Trial, find_law
from fa3verify.properties.runner import LawOutcome, verdicts


def judge_together(candidate: Candidate, cases: Sequence[Case], trials: Sequence[Trial]) -> tuple[bool, str]:
    """Tell whether one hypothesis about a kernel holds in all of these, with the words for it.

    A kernel that states its order, or now raises, must simply hold.
    """
    records = judge_cases(candidate, "replayed", list(cases))
    if lost := [record for record in records if record.error]:
        return False, f"{lost[0].case.describe()}: {lost[0].error}"
    laws = []
    for trial in trials:
        violation, under = verdicts(find_law(trial.law), candidate, trial)
        if violation and not under:
            return False, violation.message
        against = {name: (trial, broken) if broken else None for name, broken in under.items()}
        laws.append(LawOutcome(trial.law, "fail" if violation else "pass", hypotheses=against))
    settled = settle(operations.find(candidate.operation), records, laws)
    if settled is None:
        return all(passes(candidate, record.measures) for record in records), f"{len(records)} cases"
    held = all(passes(candidate, judged_under(record, settled.chosen).measures) for record in records)
    count = f"{len(records)} cases and {len(trials)} trials"
    words = f"{settled.chosen} holds in {count}" if settled.holds else settled.words
    return settled.holds and held, f"{words}; {sums_of(candidate)}"
