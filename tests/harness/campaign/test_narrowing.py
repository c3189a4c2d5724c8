"""A part of a campaign has findings and no verdict, whatever is left out of it."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
from click.testing import CliRunner

from fa3_reference.problem import AttentionProblem
from fa3verify.campaign.introduction import Only, introduce
from fa3verify.campaign.plan import PARTS, JudgeCover, JudgeFamily, SearchLaw, judge_cases, plan
from fa3verify.campaign.pool import TaskError
from fa3verify.campaign.results import CaseResult, JudgedCases
from fa3verify.campaign.run import Introduction
from fa3verify.campaign.tasks import CallTask, Outcome, execute, is_finding, run as run_tasks
from fa3verify.cases.case import Case
from fa3verify.cli.main import main
from fa3verify.inputs.recipe import Recipe
from fa3verify.known import registry
from fa3verify.properties import LawOutcome
from fa3verify.text import Failure

pytestmark = pytest.mark.usefixtures("in_this_process")
KERNEL = Introduction("twin.fp16", laws=("causal_one", "causal_two", "other"), families=("normal", "peaky"))

CASE = Case("twin.fp16", AttentionProblem(1, 1, 1, 8, 40, 64), Recipe("normal"))


def run(out, *arguments):
    result = CliRunner().invoke(main, ["verify", *arguments, "--quick", "--workers", "1", "--out", str(out)])
    return result, json.loads((out / "summary.json").read_text()) if (out / "summary.json").exists() else None


@pytest.mark.parametrize(
    ("only", "families", "laws", "covers"),
    [
        (Only(families=("p*",)), ("peaky",), (), False),
        (Only(families=("cover",)), (), (), True),
        (Only(properties=("causal_*", "other")), (), KERNEL.laws, False),
        (Only(families=("normal",), properties=("other",)), ("normal",), ("other",), False),
        (Only(limit=2), KERNEL.families, KERNEL.laws, True),
    ],
)
def test_what_matches_is_left_and_the_kernel_says_that_it_is_a_part(only, families, laws, covers):
    left = only.of(KERNEL)
    assert (left.families, left.laws, left.covers) == (families, laws, covers)
    assert left.narrowed
    tasks = plan([left], "quick", 0, limit=only.limit)
    assert sorted(task.kind for task in tasks) == sorted(
        ["family"] * len(families) + ["law"] * len(laws) + ["cover"] * covers * (1 if only.limit else 1 + PARTS)
    )


def test_without_patterns_nothing_is_left_out_and_one_that_matches_nothing_is_refused():
    assert Only().of(KERNEL) is KERNEL
    with pytest.raises(ValueError, match=r"no family and no property of twin\.fp16 matches; there are normal"):
        Only(families=("causal_one",)).of(KERNEL)


def test_a_limit_bounds_trials_and_cases():
    tasks = plan([Only(limit=2).of(KERNEL)], "quick", 0, limit=2)
    assert {task.kind for task in tasks} == {"family", "cover", "law"}
    for task in tasks:
        assert (task.max_examples if isinstance(task, SearchLaw) else task.limit) == 2


def test_a_part_that_leaves_the_faulty_property_out_is_no_pass(tmp_path):
    kernel = "twin.fp16+causal_top_left"
    result, summary = run(tmp_path / "a", kernel, "--property", "sign_symmetry")
    assert (result.exit_code, summary["verdict"]) == (5, "inconclusive")
    assert "only properties sign_symmetry" in summary["kernels"][0]["inconclusive"]
    result, summary = run(tmp_path / "b", kernel, "--property", "causal_row*", "--fail-fast")
    assert (result.exit_code, summary["verdict"]) == (1, "fail")
    assert "INCONCLUSIVE" not in result.stdout  # a finding is a verdict, of however small a part


@pytest.mark.parametrize("also", [["--shard", "1/2"], ["--update-baseline", "new.json"]])
def test_no_shard_and_no_baseline_comes_of_a_part(also, tmp_path):
    result, _ = run(tmp_path / "out", "twin.fp16", "--limit", "1", *also)
    assert result.exit_code == 2
    assert "--limit is of a part" in result.stderr


class Waiting(Future):
    """A call that no worker has begun; a pool tells whoever waits that it was cancelled."""

    def cancel(self):
        return super().cancel() and not self.set_running_or_notify_cancel()


class OneDone:
    """An executor that has run the first task, and not begun any other."""

    def __init__(self):
        self.futures = []

    def submit(self, function):
        future = Waiting()
        self.futures.append(future)
        if len(self.futures) == 1:
            future.set_result(function())
        return future


def test_after_the_first_finding_nothing_more_is_begun():
    class Failing(SearchLaw):
        def run(self) -> LawOutcome:
            return LawOutcome(self.law, "fail")

    tasks = [Failing(kernel="k", law=name, max_examples=1, seed=0) for name in ("first", "second")]
    first, second = execute(tasks, OneDone(), stops=is_finding)  # type: ignore[arg-type]
    assert is_finding(first)
    assert second.skipped


def test_what_an_outcome_drops_is_skipped_if_it_has_not_begun():
    tasks = [CallTask(name, lambda: 0, {}) for name in ("first", "second")]
    told = run_tasks(tasks, OneDone(), drops=lambda outcome, task: task.label == "second")  # type: ignore[arg-type]
    assert [(outcome.task.label, outcome.skipped) for outcome in told] == [("first", False), ("second", True)]
    with pytest.raises(TaskError, match="second was skipped"):
        Outcome(tasks[1], skipped=True).result()


def test_when_the_time_is_over_or_nobody_listens_what_waits_is_given_up():
    tasks = [CallTask(name, lambda: 0, {}) for name in ("first", "second")]
    executor = OneDone()
    assert [outcome.value for outcome in run_tasks(tasks, executor, until=time.monotonic())] == [0]  # type: ignore[arg-type]
    assert executor.futures[-1].cancelled()
    executor = OneDone()
    for _ in run_tasks(tasks, executor):  # type: ignore[arg-type]
        break
    assert executor.futures[-1].cancelled()


TASKS = {
    "family": JudgeFamily(kernel="k", family="normal", profile="quick", seed=0),
    "cover": JudgeCover(kernel="k", profile="quick", seed=0),
    "law": SearchLaw(kernel="k", law="l", max_examples=1, seed=0),
    "call": CallTask("", print, {}),
}


@pytest.mark.parametrize(
    ("kind", "changes", "is_one"),
    [
        ("family", {}, False),
        ("family", {"ratio_max": 1.0, "bits_differing": 0}, False),
        ("family", {"ratio_max": float("nan")}, True),
        ("family", {"ratio_max": 0.5, "ratio_lse_max": 1.5}, True),
        ("family", {"ratio_max": 0.5, "bits_differing": 1}, True),
        ("family", {"nonfinite": 1}, True),
        ("cover", {"outside": 1}, True),
    ],
)
def test_a_case_is_a_finding_by_the_rules_of_the_gate_that_need_no_baseline(kind, changes, is_one):
    (record,) = judge_cases(registry.find("twin.fp16"), "normal", [CASE])
    value = JudgedCases((replace(record, measures=record.measures | changes),))
    assert is_finding(Outcome(TASKS[kind], value)) is is_one


@pytest.mark.parametrize(
    ("kind", "value", "is_one"),
    [
        ("law", LawOutcome("l", "pass"), False),
        ("law", LawOutcome("l", "fail"), True),
        ("family", JudgedCases(()), False),
        ("cover", JudgedCases((CaseResult("cover", CASE, {}, error=Failure("it raised")),)), True),
        ("call", {"whatever": 0}, False),
    ],
)
def test_other_findings_need_no_baseline_either(kind, value, is_one):
    assert is_finding(Outcome(TASKS[kind], value)) is is_one


def test_a_name_with_head_dims_claims_these_alone():
    narrowed = registry.find("twin.fp16@64,128")
    assert (narrowed.name, narrowed.head_dims) == ("twin.fp16@64,128", (64, 128))
    told = introduce("twin.fp16@64,128", "quick")
    assert [claim for claim in told.claims if claim.startswith("head_dim")] == ["head_dim 64", "head_dim 128"]
    assert registry.find("twin.fp16+stale_v@64").fault is not None
    with pytest.raises(ValueError, match=r"triton_unscaled.* takes head_dim 64, not 128"):
        registry.find("twin.triton_unscaled.fp16@128")
    with pytest.raises(ValueError, match="are numbers"):
        registry.find("twin.fp16@wide")
