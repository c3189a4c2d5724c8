"""Schedules timed: cycles by the counted clock, and none for wrong bits. No GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import torch

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.request import Choices
from fa3_reference.problem import AttentionProblem
from fa3verify.bench import check, graphs, kernels, tuning
from fa3verify.timed import timing

pytestmark = pytest.mark.optional
PROBLEM = AttentionProblem(1, 4, 4, 1024, 1024, 128)


def test_cycles_are_time_at_the_counted_clock_and_wrong_bits_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(problem: AttentionProblem, inputs: list, choices: Choices) -> Callable[[int], tuple]:
        return lambda i: (choices.tile, None)

    def measure(runs: dict, pace: timing.Pace) -> dict:
        bursts = [timing.LaunchTime(ms, 1500.0) for ms in (0.3, 0.2, 0.1)]
        return dict.fromkeys(runs, bursts)

    graph = SimpleNamespace(time=lambda launches: None)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20),
    )
    monkeypatch.setattr(kernels, "our_launch", launched)
    monkeypatch.setattr(kernels, "draw", lambda problem, copies, seed: ["inputs"] * copies)
    monkeypatch.setattr(check, "last_tiles", lambda problem, inputs, output, count: [output.out])
    monkeypatch.setattr(check, "bits_differing", lambda tile, config: 7 * (tile == (128, 32)))
    monkeypatch.setattr(graphs, "GraphTimed", lambda launch: graph)
    monkeypatch.setattr(timing, "measure", measure)
    options = [{"tile": tile} for tile in ((128, 128), (192, 48), (128, 32))]
    timed, refused, wrong = tuning.measure_cycles(PROBLEM, options)
    assert timed == pytest.approx(0.2 * 1500e3)
    assert str(refused).startswith("refused: ")
    assert "48" in str(refused)
    assert wrong == "wrong: 7 bits differ from the twin"


def test_options_are_those_of_the_launch() -> None:
    fp8 = Config(dtype="e4m3", promotion_interval=64, tile_n=64, pack_gqa=True)
    options = tuning.options_of(fp8, AttentionProblem(1, 8, 2, 1, 512, 128, dtype="e4m3"))
    assert Choices(**options).pack_gqa
