"""What a profiler is shown: each kernel of a cell once, behind a mark, and nothing of what fails. Kernels made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from fa3_reports.bench.cells import Cell
from fa3_reports.bench.kernels import TimedKernel
from fa3_reports.measured import counted

pytestmark = pytest.mark.optional
CELL = Cell("length", "fp16", 1, 1024, 1024, 4, 4, 128, False)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that reaches the GPU, on which every launch allocates 100 bytes and leaves none."""
    found: list[str] = []
    monkeypatch.setattr(counted, "draw", lambda cell, copies, seed: [copies])
    for name, stand_in in (
        ("synchronize", lambda: None),
        ("empty_cache", lambda: None),
        ("memory_allocated", lambda: 1000),
        ("reset_peak_memory_stats", lambda: None),
        ("max_memory_allocated", lambda: 1100),
        ("_sleep", lambda cycles: found.append("mark")),
        ("profiler", SimpleNamespace(start=lambda: found.append("start"), stop=lambda: found.append("stop"))),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return found


def kernel(name: str, log: list[str], error: str = "", **more: Any) -> TimedKernel:
    def prepare(cell: Cell, inputs: Any) -> Callable[[int], None]:
        if error:
            raise RuntimeError(error)
        return lambda i: log.append(name)

    return TimedKernel(name, "made up", ("fp16",), prepare, **more)


def test_only_the_last_launch_of_a_kernel_is_counted_and_a_mark_is_before_it(log: list[str]) -> None:
    (found,) = counted.launch_all([CELL], [kernel("sound", log)], 0)
    assert log == ["sound", "sound", "start", "mark", "sound", "stop"]
    assert (found.status, found.peak_bytes, found.schedule) == ("ok", 100, None)
    assert Cell(**found.cell) == CELL


def test_what_fails_shows_the_profiler_nothing_and_says_why(log: list[str]) -> None:
    kernels = [kernel("broken", log, "no\nsuch file"), kernel("absent", log, missing="not here"), kernel("sound", log)]
    found = counted.launch_all([CELL], kernels, 0)
    assert [(x.kernel, x.status) for x in found] == [("broken", "failed: no such file"), ("sound", "ok")]
    assert log.count("mark") == 1


def test_a_kernel_is_not_launched_on_what_it_does_not_take(log: list[str]) -> None:
    other = kernel("sound", log, belongs=lambda cell: cell.grid == "paper")
    assert not counted.launch_all([CELL], [other], 0)
    assert not log


def test_no_cell_is_begun_when_the_time_is_up(log: list[str]) -> None:
    assert not counted.launch_all([CELL], [kernel("sound", log)], 0, budget_s=-1.0)
    assert not log
