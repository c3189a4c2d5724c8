"""Schedules built and timed: cycles by the counted clock, none for wrong bits, and what ptxas makes of them. No GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.request import Choices
from fa3_reference.problem import AttentionProblem
from fa3verify.bench import check, kernels, tuning
from fa3verify.timed import timing
from fa3verify.timed.cells import Cell

pytestmark = pytest.mark.optional
CELL = Cell("schedules", "fp16", 1, 1024, 1024, 4, 4, 128, False)
PROBLEM = AttentionProblem(1, 4, 4, 1024, 1024, 128)


def test_cycles_are_time_at_the_counted_clock_and_wrong_bits_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(name: str, about: str, dtypes: tuple, **options):
        def prepare(cell: Cell, inputs: list):
            if options["tile"] == (192, 64):
                raise kernels.Unsupported("tile_m must be 128")
            return lambda i: options["tile"]

        return SimpleNamespace(prepare=prepare, configure=lambda cell: None)

    def measure(runs: dict, pace: timing.Pace, clock: object) -> dict:
        bursts = [SimpleNamespace(ms=ms, sm_mhz=1500.0) for ms in (0.3, 0.2, 0.1)]
        return {name: SimpleNamespace(bursts=bursts) for name in runs}

    monkeypatch.setattr(kernels, "our_kernel", ours)
    monkeypatch.setattr(kernels, "draw", lambda cell, copies, seed: ["inputs"] * copies)
    monkeypatch.setattr(check, "gather", lambda cell, inputs, out, config: out)
    monkeypatch.setattr(check, "judge", lambda out: SimpleNamespace(bits_differing=7 * (out == (128, 32))))
    monkeypatch.setattr(timing, "Clock", object)
    monkeypatch.setattr(timing, "measure", measure)
    options = [{"tile": tile} for tile in ((128, 128), (192, 64), (128, 32))]
    assert tuning.measure_cycles(CELL, options) == [
        pytest.approx(0.2 * 1500e3),
        "refused: tile_m must be 128",
        "7 bits differ from the twin",
    ]


def test_options_are_those_of_the_launch_and_a_sound_schedule_compiles() -> None:
    fp8 = Config(dtype="e4m3", promotion_interval=64, tile_n=64, pack_gqa=True)
    options = tuning.options_of(fp8, AttentionProblem(1, 8, 2, 1, 512, 128, dtype="e4m3"))
    assert Choices(**options).pack_gqa
    built = tuning.compile_schedule(PROBLEM, Config(tile_n=64))
    assert (built.spill_bytes, built.note) == (0, "")
    assert 100 < built.registers <= 240
    assert tuning.compile_schedule(PROBLEM, Config(tile_n=48)).note.startswith("refused: tile_n must be")
