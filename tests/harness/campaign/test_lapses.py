"""What a kernel leaves out in some calls is a finding that names the first call with and without it."""

from __future__ import annotations

from dataclasses import replace

from fa3_reference.problem import AttentionProblem
from fa3verify import operations
from fa3verify.campaign.lapses import lapses
from fa3verify.campaign.tasks import CallTask, Outcome
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.family import CaseResult
from fa3verify.properties import LawOutcome

FORWARD = operations.find("forward")


def case(name: str, *sides: str) -> CaseResult:
    problem = AttentionProblem(1, 1, 1, 1, 8, 64)
    return CaseResult(name, Case("k", problem, Recipe("normal")), {f"ratio_{side}_max": 0.5 for side in sides})


def test_an_output_that_is_sometimes_missing_is_told_with_the_first_call_of_either_kind():
    cases = [case("a", "lse"), case("b", "lse"), case("c"), case("d")]
    words = cases[0].case.describe()
    laws = [LawOutcome("l", "pass", optional=(("lse", False, "trial 1"), ("lse", True, "trial 2")))]
    (found,) = lapses("mine", FORWARD, [], cases, laws)
    assert str(found.what) == "output lse"
    assert found.message.startswith("lse is returned in some calls and missing in others: ")
    assert found.message.endswith(f": returned for family a, {words}; missing for family c, {words}")
    (found,) = lapses("mine", FORWARD, [], cases[:2], laws)
    assert found.message.endswith(f"returned for family a, {words}; missing for property l, trial 1")
    assert lapses("mine", FORWARD, [], cases[:2], [LawOutcome("l", "pass")]) == []
    assert lapses("mine", FORWARD, [], cases[2:], []) == []


def test_a_kernel_is_given_up_after_three_lost_processes_and_only_where_tasks_were_left():
    def outcomes(lost: int, skipped: int, kernel: str) -> list:
        flags = [(True, False)] * lost + [(False, True)] * skipped + [(False, False)] * 4
        task = CallTask("", print, {}, kernel=kernel)
        return [Outcome(task, lost_worker=a, skipped=b) for a, b in flags]

    name = "".join(["mi", "ne"])  # an equal name, not the same object
    (found,) = lapses(name, FORWARD, outcomes(3, 2, "mine") + outcomes(5, 5, "other"), [], [])
    assert found.message == "3 of its processes hung or died; 2 of its 9 tasks were not run"
    assert lapses("mine", FORWARD, outcomes(2, 2, "mine"), [], []) == []
    assert lapses("mine", FORWARD, outcomes(3, 0, "mine"), [], []) == []


def test_a_gradient_of_sinks_is_due_with_sinks_alone():
    backward = operations.find("backward")
    problem = AttentionProblem(1, 1, 1, 4, 4, 64)
    with_sinks = replace(problem, sinks=True)

    def judged(p, **measures):
        return CaseResult("cover", Case("mine", p, Recipe("normal"), operation="backward"), measures)

    returned = judged(with_sinks, ratio_dsinks_max=0.5)
    assert lapses("mine", backward, [], [judged(problem), returned], []) == []
    (found,) = lapses("mine", backward, [], [returned, judged(with_sinks)], [])
    assert found.message.startswith("dsinks is returned in some calls and missing in others: ")
