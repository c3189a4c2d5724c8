"""bench as a user calls it: rows, who was not timed and why, exit codes, and what is said without a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fa3_reference.problem import AttentionProblem
from fa3verify.cli.main import main

SHAPE = (
    *("--batch", 4, "--nheads", 28, "--nheads-kv", 4, "--seqlen-q", 1024, "--seqlen", 4096),
    *("--dtype", "bf16", "--window", 128, 0, "--softcap", 30),
)


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["bench", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def row(kernel: str, status: str = "timed", reason: str = "", ms: float = math.nan) -> dict[str, Any]:
    figures = {"milliseconds": ms, "tflops": 2000 * ms, "times_ours": ms / 0.25, "sm_mhz": 1500.0, "bursts_ms": [ms]}
    return {"kernel": kernel, "status": status, "reason": reason, **figures}


class Timer:
    """Stands for the GPU: gives rows, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.rows = [row("gluon", ms=0.25)]
        self.asked: list[tuple[AttentionProblem, list[str]]] = []

    def __call__(self, problem: AttentionProblem, names: list[str]) -> dict[str, Any]:
        self.asked.append((problem, names))
        return {"problem": "a problem", "gpu": "a fake GPU", "kernels": self.rows}


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    pytest.importorskip("triton")
    found = Timer()
    monkeypatch.setattr("fa3verify.tensors.here.unavailable", lambda: None)
    monkeypatch.setattr("fa3verify.bench.kernels.speeds", found)
    return found


def test_without_a_gpu_it_leaves_with_3_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fa3verify.tensors.here.unavailable", lambda: "no CUDA device")
    code, out, err = run(*SHAPE, "--json", tmp_path / "x.json")
    assert (code, out, err) == (3, "", "fa3verify: bench needs a GPU: no CUDA device\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kernel", "gluon", "--kernel", "flash9"), "cuda.flex, or a pattern of them, got 'flash9'"),
        (("--nheads", 28, "--nheads-kv", 3), "28"),
        (("--kernel", "vllm"), "--kernel must be one of gluon, flash3"),  # which is judged, but not timed
    ],
)
def test_what_is_no_kernel_or_no_problem_is_refused_before_a_gpu_is_asked_for(options: tuple, said: str) -> None:
    code, _, err = run(*options)
    assert code == 2
    assert said in err


@pytest.mark.optional
def test_the_problem_is_that_of_the_options_and_patterns_choose_kernels(timer: Timer) -> None:
    assert run(*SHAPE)[0] == 0
    assert run("--kernel", "flash[34]*", "--kernel", "gluon")[0] == 0
    (problem, names), (_, some) = timer.asked
    assert problem == AttentionProblem(4, 28, 4, 1024, 4096, 128, dtype="bf16", window=(128, 0), softcap=30.0)
    assert names == ["gluon", "flash3", "flash3.dew", "flash4", "flash2", "cudnn", "cudnn.fp8", "cuda.flex"]
    assert some == ["gluon", "flash3", "flash3.dew", "flash4"]


@pytest.mark.optional
def test_one_row_for_each_kernel_and_a_line_for_each_that_has_no_time(timer: Timer) -> None:
    timer.rows = [
        row("gluon", ms=0.25),
        row("flash4", "missing", "no library is there"),
        row("flash3.dew", ms=0.2),
        row("cudnn", "refused", "it does not claim window"),
        row("cuda.flex", "failed", "RuntimeError: out of memory"),
    ]
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "a problem, on a fake GPU",
        "kernel             ms  TFLOP/s  time / ours  SM MHz",
        "gluon          0.2500    500.0         1.00    1500",
        "flash3.dew     0.2000    400.0         0.80    1500",
        "missing: flash4: no library is there",
        "refused: cudnn: it does not claim window",
        "failed: cuda.flex: RuntimeError: out of memory",
    ]


@pytest.mark.optional
@pytest.mark.parametrize(
    ("kernel", "status", "code"),
    [
        ("flash3", "wrong", 1),
        ("gluon", "wrong", 1),
        ("gluon", "failed", 1),
        ("flash3", "failed", 0),
        ("gluon", "refused", 0),
    ],
)
def test_a_wrong_kernel_has_no_speed_and_is_a_finding(timer: Timer, kernel: str, status: str, code: int) -> None:
    timer.rows = [row(kernel, status, "some reason"), row("cudnn", ms=0.5)]
    found, out, _ = run()
    assert found == code
    assert f"\n{status}: {kernel}: some reason\n" in out
    assert out.count(kernel) == 1


@pytest.mark.optional
def test_nothing_timed_is_no_pass(timer: Timer) -> None:
    timer.rows = [row("cudnn", "refused", "it does not claim window")]
    assert run()[0] == 5


@pytest.mark.optional
def test_json_is_written_even_of_a_wrong_kernel(timer: Timer, tmp_path: Path) -> None:
    timer.rows = [row("gluon", "wrong", "3 bits differ from the twin")]
    path = tmp_path / "x.json"
    assert run("--json", path)[0] == 1
    (found,) = json.loads(path.read_text())["kernels"]
    assert (found["status"], found["milliseconds"]) == ("wrong", "NaN")
    code, out, _ = run("--json", "-")
    assert code == 1
    assert json.loads(out)["gpu"] == "a fake GPU"
