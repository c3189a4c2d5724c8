"""bench as a user calls it: rows, who was not timed and why, exit codes, and what is said without a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fa3_reference.problem import AttentionProblem
from fa3verify.cases.lines import Asked, lines_of_models, read_line
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
        self.asked: list[tuple[Asked, list[str]]] = []

    def __call__(self, asked: Asked, names: list[str]) -> dict[str, Any]:
        self.asked.append((asked, names))
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
        (("--kernel", "gluon", "--kernel", "flash9"), "gluon.deterministic, or a pattern of them, got 'flash9'"),
        (("--nheads", 28, "--nheads-kv", 3), "28"),
        (("--kernel", "cuda.math"), "--kernel must be one of gluon, flash3"),  # which is judged, but not timed
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
    ((problem, operation), names), (_, some) = timer.asked
    assert operation == "forward"
    assert problem == AttentionProblem(4, 28, 4, 1024, 4096, 128, dtype="bf16", window=(128, 0), softcap=30.0)
    serving = ["vllm", "sglang"]
    assert names == ["gluon", "flash3", "flash3.dew", *serving, "flash4", "flash2", "cudnn", "cuda.flex"]
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


@pytest.mark.optional
def test_lines_files_and_models_are_timed_one_after_the_other(timer: Timer, tmp_path: Path) -> None:
    path, found = tmp_path / "problems.txt", tmp_path / "x.json"
    path.write_text("# ours\n16 2 x 300 causal  # a layer\n\n8 2 x 90 backward\n")
    given = ("--problem", "28/4 8 x 1 x 7700 page 16", "--problem", "8 2 x 5-90", "--problems", path, "--models")
    code, out, _ = run(*given, "--json", found)
    lines = ["28/4 8 x 1 x 7700 page 16", "8 2 x 5-90", "16 2 x 300 causal", "8 2 x 90 backward"]
    lines += dict.fromkeys(lines_of_models())
    assert code == 0
    assert [asked for asked, _ in timer.asked] == [read_line(line) for line in lines]
    assert out.count("a problem, on a fake GPU") == len(json.loads(found.read_text())["problems"]) == len(lines)
    backward = ["gluon", "gluon.deterministic", "flash3.dew", "cudnn", "flash2", "flash4"]
    assert [names == backward for _, names in timer.asked] == ["backward" in line for line in lines]


@pytest.mark.optional
def test_a_dtype_is_that_of_every_line_and_other_options_of_a_problem_are_refused_beside_lines(timer: Timer) -> None:
    assert run("--problem", "8 2 x 90", "--problem", "8 2 x 64 causal", "--dtype", "e4m3")[0] == 0
    assert [asked for asked, _ in timer.asked] == [read_line(x) for x in ("8 2 x 90 e4m3", "8 2 x 64 causal e4m3")]
    code, _, err = run("--problem", "8 2 x 90 bf16", "--dtype", "e4m3")
    assert (code, "'e4m3' states again what another word did" in err) == (2, True)
    code, _, err = run("--problem", "8 2 x 90", "--causal", "--nheads", 16)
    assert code == 2
    assert "lines say all but --dtype of their problems, got " in err
    assert "--causal" in err


def test_a_word_that_is_not_understood_is_named_before_a_gpu_is_asked_for() -> None:
    code, _, err = run("--problem", "28/4 8 x 7700 pge 16")
    assert (code, err.count("\n")) == (2, 1)
    assert "'pge' is not understood" in err


def test_a_dry_run_says_what_would_be_timed_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FA3VERIFY_PEERS", raising=False)
    monkeypatch.setattr("fa3verify.tensors.here.no_device", lambda: "no CUDA device")
    problems = ("28/4 8 x 1 x 7700 page 16", "4 1 x 1024 causal backward", "4 1 x 512 d100")
    given = [x for line in problems for x in ("--problem", line)]
    code, out, err = run("--dry-run", *given)
    assert (code, err) == (0, "")
    for line in (
        "bf16 d128 dense, 8 x 28/4 heads, 1 x 7700, 8 x 61600 packed, pages of 16: 0.8831 GFLOP, 0.1263 GB, ",
        "  launch: tile 64 x 128, heads packed, 4 parts: packed_order, forward_fp16, combine\n",
        "  gluon: would be timed\n",
        "  flash3: it does not claim paged\n",
        "  vllm: vllm.so is looked for in the folder that --peers or FA3VERIFY_PEERS names",
        "causal, 1 x 4 heads, 1024 x 1024, backward: 2.684 GFLOP",
        "  launch: tile 64 x 128: backward_start, backward, backward_finish\n",
        "  gluon.deterministic: would be timed\n",
        "  gluon: head_dim must be a multiple of 8 (TMA), got 100\n",
    ):
        assert line in out
    code, out, _ = run("--dry-run", *given, "--json", "-")
    step, backward, refused = json.loads(out)["problems"]
    assert (step["gflop"], step["gbytes"]) == (
        4 * 28 * 128 * 7700 * 8 / 1e9,
        2 * 128 * (2 * 28 * 8 + 2 * 4 * 61600) / 1e9,
    )
    assert 0.02 < step["milliseconds"] < 0.06
    assert "cudnn" in backward["kernels"]
    assert "flash3" not in backward["kernels"]
    assert (refused["launch"], refused["milliseconds"]) == ("", "NaN")


def test_what_a_dry_run_simulates_is_what_simulate_says() -> None:
    given = ("--batch", 2, "--nheads", 8, "--nheads-kv", 2, "--seqlen", 3000, "--causal", "--dtype", "bf16")
    _, out, _ = run("--dry-run", *given, "--kernel", "gluon", "--json", "-")
    (planned,) = json.loads(out)["problems"]
    said = CliRunner().invoke(main, ["simulate", *map(str, given), "--pack-gqa", "--json", "-"]).stdout
    packed = json.loads(said)["milliseconds"]
    said = CliRunner().invoke(main, ["simulate", *map(str, given), "--json", "-"]).stdout
    assert planned["milliseconds"] in (packed, json.loads(said)["milliseconds"])
