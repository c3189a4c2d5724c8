"""The verb timeline: what is recorded and where, and what is said without a GPU or evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fa3_reference.problem import AttentionProblem
from fa3_reports.cli.timeline import timeline

STAMPS = ("consumer 0,0,turn,0", "consumer 0,0,issued,400", "consumer 0,1,turn,2000")


def run(*arguments: object) -> tuple[int, str, str]:
    target, *others = map(str, arguments)
    stamps = str(Path(target).with_suffix(".stamps.csv"))
    result = CliRunner().invoke(timeline, [stamps, "--trace", target, *others])
    return result.exit_code, result.stdout, result.stderr


class Recorder:
    """Stands for the GPU: writes a file with the given slowdown and keeps what it was asked for."""

    def __init__(self, slowdown: float) -> None:
        self.slowdown = slowdown
        self.asked: list[tuple[AttentionProblem, dict[str, Any], Path]] = []

    def __call__(self, problem: AttentionProblem, options: dict[str, Any], path: Path) -> tuple[float, float]:
        from fa3_reports.measured import timelines

        self.asked.append((problem, options, path))
        facts = {name: getattr(problem, name) for name in ("dtype", "head_dim", "causal")} | {
            "seqlen": problem.seqlen_k
        }
        facts |= {"kernel": "gluon", "tile": "{}x{}".format(*options["tile"])}
        facts |= {"sm_mhz": 1234.5, "slowdown": self.slowdown}
        path.write_text(timelines.csv_text(facts, []) + "\n".join(STAMPS) + "\n")
        return self.slowdown, 1234.5


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder(1.02)
    monkeypatch.setattr("fa3verify.tensors.here.unavailable", lambda: None)
    monkeypatch.setattr("fa3_reports.measured.timelines.record", found)
    return found


def processes(path: Path) -> list[str]:
    return [e["args"]["name"] for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "process_name"]


def test_measure_without_a_gpu_leaves_with_3_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fa3verify.tensors.here.unavailable", lambda: "no CUDA device")
    code, _, err = run(tmp_path / "x.json", "--record")
    assert (code, err.strip()) == (3, "fa3verify: timeline --record needs a GPU: no CUDA device")
    assert not list(tmp_path.iterdir())


@pytest.mark.optional
def test_options_say_what_runs_and_what_is_simulated(recorder: Recorder, tmp_path: Path) -> None:
    problem = ("--dtype", "e4m3", "--head-dim", 64, "--seqlen", 2048, "--batch", 2, "--nheads", 4, "--causal")
    schedule = ("--tile", "128x64", "--schedule", "overlap", "--promotion-interval", 64)
    code, out, err = run(tmp_path / "x.json", "--record", *problem, *schedule)
    assert code == 0, err
    ((problem, options, path),) = recorder.asked
    assert problem == AttentionProblem(2, 4, 4, 2048, 2048, 64, dtype="e4m3", causal=True)
    assert options == {"tile": (128, 64), "pingpong": False, "intra_wg_overlap": True, "promotion_interval": 64}
    assert path == tmp_path / "x.stamps.csv"
    assert processes(tmp_path / "x.json") == [
        "gluon e4m3 d64 128x64, simulated H200",
        "gluon, measured at 1234 MHz, +2.0% by the stamps",
    ]
    assert "2000 measured" in out


@pytest.mark.optional
def test_both_timelines_are_at_the_measured_clock(recorder: Recorder, tmp_path: Path) -> None:
    """Cycles of 1234.5 MHz: what was recorded is drawn the same again from its file."""
    first, again = tmp_path / "x.json", tmp_path / "again.json"
    run(first, "--record", "--seqlen", 1024)
    events = [e for e in json.loads(first.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {1, 2}
    assert all(e["ts"] == pytest.approx(e["args"]["start_cycle"] / 1234.5) for e in events)
    (tmp_path / "x.stamps.csv").rename(tmp_path / "again.stamps.csv")
    run(again)
    assert first.read_text() == again.read_text()


@pytest.mark.optional
def test_a_refused_timeline_leaves_the_simulated_one_and_1(recorder: Recorder, tmp_path: Path) -> None:
    recorder.slowdown = 1.3
    target = tmp_path / "x.json"
    code, out, err = run(target, "--record", "--seqlen", 1024)
    assert code == 1
    assert err.strip() == (
        "fa3verify: x.stamps.csv: slowdown must be at most 1.03 for the stamps to be evidence, got 1.3"
    )
    assert processes(target) == ["gluon fp16 d128 128x128, simulated H200"]
    assert f"{target}: " in out
    event = next(e for e in json.loads(target.read_text())["traceEvents"] if e["ph"] == "X" and e["ts"])
    assert event["ts"] == pytest.approx(event["args"]["start_cycle"] / 1234.5)
    assert (tmp_path / "x.stamps.csv").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--clock-mhz", 1500), "does not take --clock-mhz"),
        (("--backward",), "does not take --backward"),
        (("--p-in-smem",), "does not take --p-in-smem"),
        (("--kernel", "flash3"), "got flash3 with 2 stages and pingpong+overlap"),
        (("--stages", 3, "--tile", "128x64"), "got gluon with 3 stages and pingpong+overlap"),
        (("--schedule", "overlap3", "--tile", "128x64"), "got gluon with 2 stages and overlap3"),
    ],
)
def test_what_our_kernel_does_not_run_is_not_measured(options: tuple, message: str, tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "x.json", "--record", *options)
    assert code == 2
    assert message in err
    assert not list(tmp_path.iterdir())
