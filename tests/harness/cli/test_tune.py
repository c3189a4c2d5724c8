"""tune as a user calls it: which kernel, what the compiler and the GPU add, and what is said where they are absent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from fa3_kernels.plan.config import Config
from fa3verify.cli.main import main

SHORT = ("--seqlen", 1024, "--nheads", 4)


@pytest.fixture
def tuning() -> Any:
    """The GPU's side of tune, for tests that replace parts of it."""
    from fa3verify.gpu import tuning

    return tuning


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["tune", *map(str, (*SHORT, *arguments))])
    return result.exit_code, result.stdout, result.stderr


def figures(*arguments: object) -> dict:
    return json.loads(run(*arguments, "--json", "-")[1])


def test_the_kernel_is_a_choice_and_flash3_the_default() -> None:
    assert figures() == figures("--kernel", "flash3")
    gluon = figures("--kernel", "gluon")
    assert gluon["kernel"] == "gluon"
    assert [r["cycles"] for r in gluon["ranked"]] != [r["cycles"] for r in figures()["ranked"]]


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa3_kernels.gluon.unsupported", lambda: "package triton is not installed (extra 'gpu')")
    code, out, _ = run("--compile")
    assert code == 0
    assert "not compiled: package triton is not installed (extra 'gpu'); registers are estimated" in out


@pytest.mark.optional
def test_registers_and_spills_are_shown_and_bad_schedules_marked(tuning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([tuning.Built(240, 64, "2 spill instructions in the loops"), tuning.Built(190, 0)])
    monkeypatch.setattr("fa3_kernels.gluon.unsupported", lambda: None)
    monkeypatch.setattr(tuning, "compile_schedule", lambda problem, config: next(answers))
    code, out, _ = run("--compile", "--top", 2)
    first, second = (line for line in out.splitlines() if " registers, " in line)
    assert code == 0
    assert first.endswith("240 registers, 64 bytes spilled, ! 2 spill instructions in the loops")
    assert second.endswith("190 registers, 0 bytes spilled")


@pytest.mark.optional
def test_only_what_the_kernels_take_is_built(tuning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr("fa3_kernels.gluon.unsupported", lambda: None)
    monkeypatch.setattr(tuning, "compile_schedule", lambda problem, s: seen.append(s) or tuning.Built(1))
    run("--compile", "--top", 100)
    assert len(seen) == 20
    assert {(s.num_stages, s.softmax_stages, s.pv_from_registers, s.family) for s in seen} == {(2, 2, True, "gluon")}
    assert {(s.tile_m, s.tile_n) for s in seen} == {(128, 32), (128, 64), (128, 128), (192, 32), (192, 64)}


def test_measure_without_a_gpu_leaves_with_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa3verify.gpu.unavailable", lambda: "no CUDA device")
    code, _, err = run("--measure", 3)
    assert (code, err.strip()) == (3, "fa3verify: tune --measure needs a GPU: no CUDA device")


@pytest.mark.optional
def test_measured_stands_beside_simulated(tuning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four timed; the simulated best is measured 20 % slower than the second."""
    monkeypatch.setattr("fa3verify.gpu.unavailable", lambda: None)
    monkeypatch.setattr(tuning, "measure_cycles", lambda cell, options: [12e3, 10e3, "refused: no", 13e3])
    found = figures("--measure", 4)
    assert [r.get("measured_cycles") for r in found["ranked"]] == [12e3, 10e3, None, 13e3]
    assert found["tau"] == pytest.approx(1 / 3)
    assert found["regret"] == [pytest.approx(0.2), 0.0]
    out = run("--measure", 4)[1]
    assert "! not measured: refused: no" in out
    assert "Kendall tau 0.33, regret top-1 20.0%, top-3 0.0%" in out


@pytest.mark.parametrize("option", [("--compile",), ("--measure", 3)])
def test_building_upstreams_kernel_is_refused(option: tuple) -> None:
    code, _, err = run("--kernel", "flash3", *option)
    assert code == 2
    assert "--compile and --measure are for --kernel gluon, got flash3" in err
