"""Kernels whose processes misbehave: nothing of them lives when the reports are written, which say what was found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fa3verify import operations
from fa3verify.campaign.introduction import introduce
from fa3verify.campaign.lapses import lapses
from fa3verify.campaign.plan import JudgeFamily, SearchLaw
from fa3verify.campaign.pool import IsolatingPool
from fa3verify.campaign.summary import summarize
from fa3verify.campaign.tasks import CallTask, Task, execute
from tests.conftest import InThisProcess
from tests.harness.campaign.test_pool import hang, is_alive  # whose module a worker imports in half the time

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
HERE = "tests.harness.campaign.hostile_processes"
FOUND = {  # kernel: words of one of its findings
    "double_fork": "bound",
    "new_session": "bound",
    "forks_twenty": "bound",
    "ignores_and_dies": "died with exit code 0",
    "signals_its_parent": "killed by SIGTERM",
    "stops_itself": "no answer within",
    "hangs": "no answer within",
    "closes_its_pipes": "its process",
    "writes_over_the_reports": "bound",
    "raises_ten_megabytes": "RuntimeError: xxx",
    "leaves_a_thread": "bound",
}
QUICK = ("double_fork", "ignores_and_dies", "stops_itself", "writes_over_the_reports")  # one of every kind
IDENTITY = f"{HERE}:has_an_endless_identity"
PROGRAM = """
import os, sys
os.environ["HOSTILE_CAMPAIGN"] = str(os.getpid())
from fa3verify.cases import coverage
from fa3verify.campaign import plan as planned
coverage.REQUIRED = 0.0  # so little is tried here that no verdict would be given
plan, wanted = planned.plan, os.environ["HOSTILE_TASKS"].split(",")
planned.plan = lambda *given: [t for t in plan(*given) if (getattr(t, "law", "") or t.family) in wanted]
from fa3verify.cli.main import main
main(sys.argv[1:])
"""


class Ran:
    """One campaign in a process of its own: its exit code, what it printed, how long it took, what it left."""

    def __init__(self, folder: Path, kernels: list[str], tasks: str, *options: str) -> None:
        self.kernels = kernels
        self.out = folder / "out"
        notes = folder / "notes"
        notes.mkdir()
        path = os.pathsep.join(["", *(p for p in sys.path if p)])
        said = {"HOSTILE_NOTES": str(notes), "HOSTILE_OUT": str(self.out), "HOSTILE_TASKS": tasks, "PYTHONPATH": path}
        command = [sys.executable, "-c", PROGRAM, "verify", *kernels, "--quick", "--out", str(self.out)]
        self.environment = os.environ | said
        began = time.monotonic()
        done = subprocess.run(
            [*command, *options], env=self.environment, capture_output=True, text=True, timeout=300, check=False
        )
        self.passed_s = time.monotonic() - began
        self.code = done.returncode
        self.stdout = done.stdout
        self.stderr = done.stderr
        self.summary = json.loads((self.out / "summary.json").read_text())
        self.left = [int(note.name) for note in notes.iterdir()]


def named(*kernels: str) -> list[str]:
    return [f"{HERE}:kernel_{kernel}" for kernel in kernels]


@pytest.fixture(scope="module", params=[QUICK, pytest.param(tuple(FOUND), marks=pytest.mark.nightly)], ids=len)
def campaign(tmp_path_factory, request):
    kernels = [*named(*request.param, "uses_a_pool"), IDENTITY]
    return Ran(tmp_path_factory.mktemp("hostile"), kernels, "normal", "--workers", "3", "--task-limit", "2")


def test_every_kernel_gets_its_verdict(campaign):
    verdicts = {kernel["name"]: kernel["verdict"] for kernel in campaign.summary["kernels"]}
    (right,) = named("uses_a_pool")
    assert verdicts == dict.fromkeys(campaign.kernels, "fail") | {right: "pass"}, campaign.stdout
    for kernel, words in FOUND.items():
        if not {*named(kernel)} & {*campaign.kernels}:
            continue
        said = [f["what"] + f["message"] for f in campaign.summary["failures"] if f["kernel"] in named(kernel)]
        assert any(words in each for each in said), (kernel, said)


def test_none_is_alive_and_the_reports_are_those_of_the_campaign(campaign):
    assert len(campaign.left) >= 2 * (len(campaign.kernels) - 4)  # by which the test would notice that nobody stayed
    assert not [pid for pid in campaign.left if is_alive(pid)]
    assert campaign.code == campaign.summary["exit_code"] == 1
    assert campaign.summary["verdict"] == "fail"
    assert "VERIFY FAIL" in campaign.stdout
    assert not [line for line in campaign.stdout.splitlines() if line.startswith("VERIFY PASS")]
    assert "<html" in (campaign.out / "report.html").read_text()


def test_no_text_of_a_kernel_is_stored_whole(campaign):
    (identity,) = (kernel["identity"] for kernel in campaign.summary["kernels"] if kernel["name"] == IDENTITY)
    assert max(len(text or "") for text in identity.values()) <= 4096
    assert (campaign.out / "summary.json").stat().st_size < 10**6


def test_the_time_that_is_printed_is_the_time_that_passed(campaign):
    told_s = float(campaign.stdout.rpartition("outputs in ")[2].split()[0])
    assert campaign.summary["wall_s"] - 1 <= told_s <= campaign.passed_s + 0.5
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import fa3verify.commands.verify"], check=True, env=campaign.environment)
    begins_s = time.monotonic() - began  # an interpreter that begins and ends, on this machine as busy as it is
    assert campaign.passed_s - told_s < 0.5 + 2 * begins_s + 0.1 * campaign.passed_s


@pytest.mark.parametrize("workers", [1, 2])
def test_a_kernel_that_hangs_in_every_call_is_given_up_after_three(workers):
    tasks = [CallTask(f"{i}", hang, {"number": i}, kernel="k") for i in range(8)]
    with IsolatingPool(workers, limit_s=0.5) as pool:
        outcomes = execute([*tasks, CallTask("other", dict, {"key": "value"}, kernel="other")], pool)
    assert sum(outcome.lost_worker for outcome in outcomes[:-1]) == 3
    assert sum(outcome.skipped for outcome in outcomes) == 5
    assert not any(outcome.value for outcome in outcomes[:-1])
    assert outcomes[-1].value == {"key": "value"}
    assert all("no answer within" in (outcome.error or "no answer within") for outcome in outcomes)
    (found,) = lapses("k", operations.find("forward"), outcomes, [], [])
    assert str(found.what) == "given up"
    assert found.message == "3 of its processes hung or died; 5 of its 8 tasks were not run"
    assert not lapses("other", operations.find("forward"), outcomes, [], [])


@pytest.mark.nightly
def test_fail_fast_ends_what_runs(tmp_path):
    kernels = named("hangs", "double_fork")
    ran = Ran(tmp_path, kernels, "normal", "--workers", "2", "--fail-fast", "--task-limit", "60")
    assert ran.code == 1
    assert {f["kernel"] for f in ran.summary["failures"]} == {kernels[1]}
    assert ran.passed_s < 60  # and not the five times sixty that a first call may take
    assert not [pid for pid in ran.left if is_alive(pid)]


def test_a_signal_ends_in_a_line_a_code_and_a_report_of_what_was_found(tmp_path):
    kernels = named("writes_over_the_reports", "signals_the_campaign")
    ran = Ran(tmp_path, ["twin.fp16", *kernels], "normal", "--workers", "1", "--task-limit", "60")
    assert ran.code == ran.summary["exit_code"] == 128 + signal.SIGTERM
    verdicts = [kernel["verdict"] for kernel in ran.summary["kernels"]]
    assert (ran.summary["verdict"], verdicts) == ("fail", ["inconclusive", "fail", "inconclusive"])
    assert "interrupted when 2 of 3 tasks had ended" in ran.stdout
    line = " ".join(ran.stderr.split())
    assert "fa3verify: interrupted by SIGTERM" in line
    assert "goes on from 1 finished task of twins; kernels other than the twins begin anew" in line
    assert len(list((ran.out / ".partial").glob("*.json"))) == 1
    assert not [pid for pid in ran.left if is_alive(pid)]


@pytest.mark.parametrize(
    ("run", "laws", "words"),
    [
        ("lse_for_full_attention", (), "missing for family normal"),
        ("lse_for_full_attention", ("error_within_bound",), "missing for family normal"),
        ("lse_but_once", ("error_within_bound",), "missing for property error_within_bound, error_within_bound()"),
        ("uses_no_lse", ("error_within_bound",), None),
        ("ideal", ("error_within_bound",), None),
    ],
)
def test_an_lse_that_is_returned_in_some_calls_alone_is_a_finding(run, laws, words):
    (name,) = named(run)
    tasks: list[Task] = [JudgeFamily(kernel=name, family="normal", profile="quick", seed=0)]
    tasks += [SearchLaw(kernel=name, law=law, max_examples=8, seed=0) for law in laws]
    kernel = replace(introduce(name, "quick"), narrowed="a part")
    summary = summarize([kernel], execute(tasks, InThisProcess()), None, profile="quick", seed=0)
    said = [found.message for found in summary.failures]
    assert len(said) == (words is not None), said
    if words:
        assert said[0].startswith("lse is returned in some calls and missing in others: returned for ")
        assert words in said[0]
