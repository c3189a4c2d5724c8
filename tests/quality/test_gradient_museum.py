"""Every bug of a released backward that values can show is found by what quick runs, with quick's own arguments."""

from __future__ import annotations

import pytest

from fa3_reports.mutation.gradient_faults import MUSEUM, kernel_of
from fa3verify.campaign.profiles import PROFILES, family_cases
from fa3verify.judging.judgement import judge, passes
from fa3verify.judging.verdict import BOUND_LAWS
from fa3verify.properties import find_law, run_law

QUICK = PROFILES["quick"]


def is_found_in(family: str, name: str) -> bool:
    kernel = kernel_of(MUSEUM[name])
    cases = family_cases(kernel, family, QUICK, seed=0)
    return any(not passes(kernel, judge(kernel, case, unrounded=False).measures) for case in cases)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [name for name, row in MUSEUM.items() if row.family])
def test_quick_finds_a_bug_by_the_bound(name: str) -> None:
    assert is_found_in(MUSEUM[name].family, name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [name for name, row in MUSEUM.items() if row.law])
def test_quick_finds_a_bug_by_a_property(name: str) -> None:
    law = find_law(MUSEUM[name].law)
    examples = QUICK.bound_examples if law.name in BOUND_LAWS else QUICK.law_examples
    outcome = run_law(law, kernel_of(MUSEUM[name]), max_examples=examples, seed=0, shrink_seconds=0)
    assert outcome.violation is not None
    assert not outcome.violation.failure, "the mistake itself raised, which is no bug that a kernel shipped with"


def test_what_depends_on_the_size_of_scores_is_not_seen_in_normal_inputs() -> None:
    assert not is_found_in("normal", "90")
