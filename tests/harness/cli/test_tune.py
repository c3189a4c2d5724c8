"""tune as a user calls it: which kernel, what the compiler and the GPU add, and what is said where they are absent."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from fa3_simulator.run import Shape
from fa3_simulator.schedules import Schedule
from fa3verify.cli.main import main
from fa3verify.gpu import tuning as tune_build
from fa3verify.gpu.bench import check, kernels, timing
from fa3verify.gpu.bench import run as bench_run
from fa3verify.gpu.bench.cells import Cell

SHORT = ("--seqlen", 1024, "--nheads", 4)
CELL = Cell("schedules", "fp16", 1, 1024, 1024, 4, 4, 128, False)
SHAPE = Shape(1, 4, 1024, 1024)


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
    monkeypatch.setattr(tune_build, "cannot_compile", lambda: "package triton is not installed (extra 'gpu')")
    code, out, _ = run("--compile")
    assert code == 0
    assert "not compiled: package triton is not installed (extra 'gpu'); registers are estimated" in out


def test_registers_and_spills_are_shown_and_bad_schedules_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([tune_build.Built(240, 64, "2 spill instructions in the loops"), tune_build.Built(190, 0)])
    monkeypatch.setattr(tune_build, "cannot_compile", lambda: None)
    monkeypatch.setattr(tune_build, "compile_schedule", lambda shape, schedule: next(answers))
    code, out, _ = run("--compile", "--top", 2)
    first, second = (line for line in out.splitlines() if " registers, " in line)
    assert code == 0
    assert first.endswith("240 registers, 64 bytes spilled, ! 2 spill instructions in the loops")
    assert second.endswith("190 registers, 0 bytes spilled")


def test_only_what_the_kernels_take_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Schedule] = []
    monkeypatch.setattr(tune_build, "cannot_compile", lambda: None)
    monkeypatch.setattr(tune_build, "compile_schedule", lambda shape, s: seen.append(s) or tune_build.Built(1))
    run("--compile", "--top", 100)
    assert len(seen) == 20
    assert {(s.num_stages, s.softmax_stages, s.pv_from_registers, s.kernel) for s in seen} == {(2, 2, True, "gluon")}
    assert {(s.tile_m, s.tile_n) for s in seen} == {(128, 32), (128, 64), (128, 128), (192, 32), (192, 64)}


def test_measure_without_a_gpu_leaves_with_3(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise bench_run.NoDevice("no CUDA device")

    monkeypatch.setattr(bench_run, "check_device", none)
    code, _, err = run("--measure", 3)
    assert (code, err.strip()) == (3, "fa3verify: tune --measure needs a GPU: no CUDA device")


def test_measured_stands_beside_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four timed; the simulated best is measured 20 % slower than the second."""
    monkeypatch.setattr(bench_run, "check_device", lambda: None)
    monkeypatch.setattr(tune_build, "measure_cycles", lambda cell, options: [12e3, 10e3, "refused: no", 13e3])
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


def test_cycles_are_time_at_the_counted_clock_and_wrong_bits_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(name: str, about: str, dtypes: tuple, **options):
        def prepare(cell: Cell, inputs: list):
            if options["tile"] == (192, 64):
                raise kernels.Unsupported("tile_m must be 128")
            return SimpleNamespace(timed=options["tile"], output=lambda: options["tile"])

        return SimpleNamespace(prepare=prepare, configure=lambda cell: None)

    def measure(runs: dict, pace: timing.Pace, clock: object) -> dict:
        bursts = [SimpleNamespace(ms=ms, sm_mhz=1500.0) for ms in (0.3, 0.2, 0.1)]
        return {name: SimpleNamespace(bursts=bursts) for name in runs}

    monkeypatch.setattr(kernels, "our_kernel", ours)
    monkeypatch.setattr(kernels, "draw", lambda cell, copies, seed: ["inputs"] * copies)
    monkeypatch.setattr(check, "judge", lambda c, i, out, g: SimpleNamespace(bits_differing=7 * (out == (128, 32))))
    monkeypatch.setattr(timing, "Clock", object)
    monkeypatch.setattr(timing, "measure", measure)
    options = [{"tile": tile} for tile in ((128, 128), (192, 64), (128, 32))]
    assert tune_build.measure_cycles(CELL, options) == [
        pytest.approx(0.2 * 1500e3), "refused: tile_m must be 128", "7 bits differ from the twin",
    ]  # fmt: skip


@pytest.mark.optional
def test_options_are_those_of_the_launch_and_a_sound_schedule_compiles() -> None:
    if reason := tune_build.cannot_compile():
        pytest.skip(reason)
    from fa3_kernels.gluon.launch import forward

    fp8 = Schedule(dtype="e4m3", v_transpose=True, promotion_interval=64, tile_n=64)
    assert set(tune_build.options_of(fp8, Shape(1, 8, 1, 512, nheads_kv=2, pack_gqa=True))) <= set(
        inspect.signature(forward).parameters
    )
    built = tune_build.compile_schedule(SHAPE, Schedule(tile_n=64))
    assert (built.spill_bytes, built.note) == (0, "")
    assert 100 < built.registers <= 240
    assert tune_build.compile_schedule(SHAPE, Schedule(tile_n=48)).note.startswith("refused: tile_n must be")
