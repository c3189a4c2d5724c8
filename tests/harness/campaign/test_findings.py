"""Findings: each has its case and its cause, the smallest first; ratios show their side of 1; baselines replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify.campaign import replay_files
from fa3verify.campaign.findings import Finding, clusters, finding, ordered
from fa3verify.campaign.introduction import introduce
from fa3verify.campaign.plan import JudgeFamily, SearchLaw
from fa3verify.campaign.pool import WorkerLost
from fa3verify.campaign.run import Introduction, Run, verdict_of
from fa3verify.campaign.summary import summarize
from fa3verify.campaign.tasks import GIVE_UP, Outcome, execute
from fa3verify.cases.case import Case
from fa3verify.commands import replay
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging import gate
from fa3verify.judging.family import FamilyRow, Figured
from fa3verify.judging.verdict import Part, Seen, What
from fa3verify.properties import Trial
from fa3verify.properties.compare import close, same_values
from fa3verify.text import Failure
from tests.conftest import InThisProcess

PACKED = AttentionProblem.varlen((3, 5), (4, 0), nheads=2, nheads_kv=1, head_dim=64, softmax_scale=0.25, softcap=2.0)
BOUND = What(Part.BOUND, "error / bound")
LAW = What(Part.LAW, "x")
LOADING = What(Part.LOADING)
CASE = Case("k", PACKED, Recipe("normal"), changes=(("num_splits", 3),))


def case(keys: int) -> dict:
    return Case("k", AttentionProblem(1, 1, 1, 1, keys, 64), Recipe("normal")).to_json()


def test_one_line_says_all_that_a_case_is():
    assert CASE.describe() == (
        "k b2 h2/1 5x4 d64 varlen 3,5 x 4,0 scale=0.25 softcap=2 num_splits=3 | normal(std=1.0), seed 0"
    )


def test_a_finding_has_its_case_and_a_crash_its_message_as_cause():
    assert finding("k", BOUND, "m", CASE.to_json()).case == CASE.describe()
    trial = Trial("repeated_run_is_identical", CASE)
    assert finding("k", What(Part.LAW, trial.law), "m", trial.to_json()).case == trial.describe()
    assert finding("k", LOADING, "SystemExit: 0").case is None
    a = finding("k", What(Part.FAMILY, "normal"), Failure("ValueError: at 0x7fa3 of 129"))
    b = finding("k", LAW, Failure("ValueError: at 0x7fff of 200"))
    assert a.cause == b.cause
    assert finding("k", LAW, "m").cause != finding("k", What(Part.LAW, "y"), "m").cause


def test_causes_stand_together_the_smallest_problem_first():
    found = [
        finding("k", BOUND, "a", case(90)),
        finding("k", LAW, "b", case(30)),
        finding("k", BOUND, "c", case(10)),
        finding("k", LOADING, "d"),
    ]
    assert [f.message for f in ordered(found)] == ["d", "c", "a", "b"]
    assert [(f.message, others) for f, others in clusters(ordered(found))] == [("d", 0), ("c", 1), ("b", 0)]
    old = [Finding("k", LAW, str(i)) for i in range(3)]  # of a file without causes
    assert len(clusters(old)) == 3


def test_a_ratio_near_1_shows_its_side_and_nan_says_what_is_due():
    one = np.ones(1)
    assert "ratio 1.0004" in close("x", "x", one * 1.0004, one * 0, one).message
    due = "NaN is due only in a row that sees NaN or an infinity"
    for got, expected, words in (
        (np.nan, 1.0, "x[0]: got nan, expected 1.0, bound"),
        (1.0, np.nan, "x[0]: got 1.0, expected nan, bound"),
        (np.nan, np.nan, "x[0]: NaN in both results that are compared, bound"),  # which had read as a difference
    ):
        message = close("x", "x", one * got, one * expected, one).message
        assert message.startswith(words)
        assert due in message


@pytest.mark.parametrize(
    ("got", "due", "words"),
    [(np.nan, 1.0, ("nan", "finite")), (np.inf, -np.inf, ("inf", "-inf")), (2.5, 1.0, ("finite", "finite"))],
)
def test_a_comparison_notes_its_output_and_what_the_worst_element_is_whatever_it_is_called(got, due, words):
    one = np.ones(1)
    exact = same_values("out with V = 1 everywhere", "out", one * got, one * due)
    near = close("lse against log(visible keys) +- softcap", "lse", one * got, one * due, one)
    assert (exact.seen, exact.ratio) == (Seen("out", *words), np.inf)
    assert near.seen == Seen("lse", *words, ratio=1.5 if got == 2.5 else np.inf)


def test_two_nan_are_no_pair_to_tell_and_endless_all_the_same():
    one = np.ones(1)
    assert close("x", "dq", one * np.nan, one * np.nan, one).seen == Seen("dq", ratio=np.inf)


def test_a_rule_of_the_gate_names_its_output_and_its_ratio():
    figures = {"ratio_max": 0.5, "ratio_lse_max": np.inf, "nonfinite": 2.0, "outside": 3.0}
    kernel = Figured("k", (FamilyRow("normal", figures),))
    seen = {row.rule: row.seen for row in gate.bound_rows(kernel)}
    assert seen == {
        "error / bound": Seen("out", ratio=0.5),
        "lse error / bound": Seen("lse", ratio=np.inf),
        gate.NON_FINITE: Seen("out", ratio=np.inf),
        gate.OUTSIDE: Seen("out"),
    }


def drifted() -> Run:
    """The run of a sound twin against a baseline of half its error."""
    known = introduce("twin.fp16", "quick")
    task = JudgeFamily(kernel="twin.fp16", family="ties", profile="quick", seed=0)
    outcome = Outcome(task, task.run())
    stored = gate.shipped_baseline("quick", 0)
    figures = {name: x / 2 if name == "rel_rmse_seen" else x for name, x in stored.kernels["twin.fp16"]["ties"].items()}
    half = replace(stored, kernels={"twin.fp16": {"ties": figures}})
    return summarize([known], [outcome], half, profile="quick", seed=0)


def test_a_baseline_finding_replays_against_the_baseline(tmp_path: Path):
    (failure,) = drifted().failures
    assert str(failure.what) == "L2 rel_rmse_seen"
    path = tmp_path / "case.json"
    stored = replay_files.ReplayFile("twin.fp16", failure.what, failure.content, failure.baseline)
    replay_files.write(path, stored)
    body = replay_files.read(path)
    assert body == stored
    holds, message, figures = replay.run(body)
    assert not holds
    assert f"rel_rmse_seen {figures['rel_rmse_seen']:.4g}, limit {failure.baseline.limit:.4g}" in message
    assert replay.run(replace(body, baseline=replace(body.baseline, limit=figures["rel_rmse_seen"])))[0]
    for damage in ({"family": "nonsense"}, {"measure": "nonsense"}, {"profile": "slow"}):
        with pytest.raises(ValueError, match="names no figure of a baseline"):
            replay.run(replace(body, baseline=replace(body.baseline, **damage)))
    path.write_text(path.read_text().replace('"limit": ', '"limit": "x", "limits": '))
    with pytest.raises(ValueError, match=r"case\.json is a damaged replay file: must be float, got 'x'"):
        replay_files.read(path)


class Losing(InThisProcess):
    """Loses the worker of every task."""

    def submit(self, fn, /, *args, **kwargs):
        future = super().submit(abs, 1)
        lost = type(future)()
        if self.calls <= GIVE_UP:
            lost.set_exception(WorkerLost("its process died", at={"what": "family x", "content": CASE.to_json()}))
        return lost


def test_a_kernel_that_loses_worker_after_worker_gets_no_more():
    tasks = [JudgeFamily(kernel="k", family=f"f{i}", profile="quick", seed=0) for i in range(GIVE_UP)]
    waiting = [SearchLaw(kernel="k", law=f"l{i}", max_examples=1, seed=0) for i in range(4)]

    class Cancelling(Losing):
        def submit(self, fn, /, *args, **kwargs):
            future = super().submit(fn, *args, **kwargs)
            future.cancel = lambda: future.set_running_or_notify_cancel() if type(future).cancel(future) else False
            return future

    outcomes = execute([*tasks, *waiting], Cancelling())
    assert [o.lost_worker for o in outcomes] == [True] * GIVE_UP + [False] * 4
    assert all(o.skipped for o in outcomes[GIVE_UP:])
    known = Introduction("k", claims=("family f0", "property l0"))
    summary = summarize([known], outcomes, None, profile="quick", seed=0)
    given_up, *lost = summary.failures
    assert (given_up.what, given_up.case) == (What(Part.GIVEN_UP), None)
    assert [f.case for f in lost] == [CASE.describe()] * GIVE_UP
    assert summary.kernels[0].coverage.not_tried == ("family f0", "property l0")
    assert summary.kernels[0].laws == ()


@pytest.mark.parametrize(
    ("verdicts", "failures", "expected"),
    [
        (["pass", "pass"], [], "pass"),
        (["pass", "inconclusive"], [], "inconclusive"),
        (["fail", "inconclusive"], [finding("k", LOADING, "m")], "fail"),
    ],
)
def test_a_finding_beats_too_little_and_too_little_beats_a_pass(verdicts, failures, expected):
    assert verdict_of([SimpleNamespace(verdict=verdict) for verdict in verdicts], failures) == expected


def test_a_kernel_that_cannot_be_loaded_has_a_finding_and_no_word_on_what_was_not_tried():
    summary = summarize(
        [Introduction("k", failed=Failure("No module named 'torch'"))], [], None, profile="quick", seed=0
    )
    assert [f.what for f in summary.failures] == [LOADING]
    assert (summary.kernels[0].verdict, summary.kernels[0].inconclusive) == ("fail", None)
