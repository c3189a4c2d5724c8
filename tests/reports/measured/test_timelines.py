"""Recorded timelines: what is checked before, how slowdown is counted, which blocks are kept; kernels made up."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from fa3_kernels.audit.evidence import evidence_sha256
from fa3_kernels.gluon.arguments import NO_DESCALES
from fa3_kernels.plan.request import Choices, Semantics
from fa3_kernels.plan.stamps import COLUMNS
from fa3_reference.problem import AttentionProblem
from fa3_reports import stamps as reader
from fa3_reports.measured import timelines
from fa3verify.bench import kernels
from fa3verify.bench.graphs import GraphTimed
from fa3verify.timed import timing
from fa3verify.timed.timing import LaunchTime

pytestmark = pytest.mark.optional
PROBLEM = AttentionProblem(1, 4, 4, 1024, 1024, 128, causal=True, window=(512, -1))
OPTIONS = {"tile": (128, 64), "pingpong": False, "intra_wg_overlap": True}
SMS = 3


class Device:
    """A GPU whose traced kernel stamps 30 blocks, takes ``cost`` times as long and adds ``error`` to one output."""

    def __init__(self, cost: float = 1.02, error: dict[str, float] | None = None, mhz: float = 1500.0) -> None:
        self.cost, self.error, self.mhz = cost, error or {}, mhz
        self.launches: list[dict[str, Any]] = []
        self.events = range(4)

    def forward(self, *given: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.launches.append({"given": given[3:], **options})
        error = self.error if "stamps" in options else {}
        if "stamps" in options:
            stamps = options["stamps"]
            for step in range(30):
                for event in self.events:
                    stamps[:, :, step, event] += 1000 + 100 * step + event  # a stamp on top of an old one shows
        out, lse = torch.full((4,), math.nan, dtype=torch.float16), torch.zeros(2)
        out[0], lse[0] = error.get("out", 0.0), error.get("lse", 0.0)
        return out, lse

    def measure(self, runs: dict[str, GraphTimed], pace: timing.Pace) -> dict[str, list[LaunchTime]]:
        """Slow outliers in one round; the clock falls as much as the time grows, which is no cost of the stamps."""
        for run in runs.values():
            run.launch(1)
        assert pace.rounds == 5
        bursts = {"plain": LaunchTime(1.0, 1.1 * self.mhz), "stamped": LaunchTime(1.1 * self.cost, self.mhz)}
        return {name: [bursts[name]] * 4 + [LaunchTime(9.0, 1000.0)] for name in runs}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    operand = torch.zeros(1)
    inputs = kernels.Given(operand, operand, operand)
    monkeypatch.setattr(kernels, "forward", found.forward)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=SMS))
    monkeypatch.setattr(kernels, "draw", lambda problem, copies, seed: [inputs] * copies)
    monkeypatch.setattr(timing, "query", lambda field: f"some {field}")
    monkeypatch.setattr(timing, "measure", found.measure)
    return found


def test_a_recorded_file_is_one_that_is_read(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "x.stamps.csv"
    assert timelines.record(PROBLEM, OPTIONS, path) == (1.02, 1500.0)
    found = reader.read(path)
    assert (found.kernel, found.dtype, found.head_dim, found.tile) == ("gluon", "fp16", 128, (128, 64))
    assert (found.seqlen, found.causal, found.sm_mhz, found.slowdown) == (1024, True, 1500.0, 1.02)
    assert found.cycles_per_block == 100
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert "# gpu=some name" in head
    assert {"# pingpong=False", "# driver=some driver_version", "# nheads=4"} < set(head)
    assert {"# evidence_of=timeline", f"# launches_sha256={evidence_sha256('timeline')}"} < set(head)


def test_what_is_written_comes_from_one_launch_with_zeroed_stamps(device: Device, tmp_path: Path) -> None:
    """The made-up kernel adds to what is there: stamps of three launches would be thrice as large."""
    path = tmp_path / "x.csv"
    timelines.record(PROBLEM, OPTIONS, path)
    assert path.read_text().splitlines()[-1] == "producer,23,v_issued,2303"


def test_every_launch_takes_the_same_options_and_stamps_fit_the_gpu(device: Device, tmp_path: Path) -> None:
    timelines.record(PROBLEM, OPTIONS, tmp_path / "x.csv")
    plain = [x for x in device.launches if "stamps" not in x]
    stamped = [x for x in device.launches if "stamps" in x]
    assert len(plain) == 2
    given = (Semantics.of(PROBLEM), Choices(**OPTIONS))
    assert all(x == {"given": given, "descales": NO_DESCALES, "packed": None} for x in plain)
    assert all({k: v for k, v in x.items() if k != "stamps"} == plain[0] for x in stamped)
    assert {tuple(x["stamps"].shape) for x in stamped} == {(SMS, 3, timelines.STEPS, COLUMNS)}


@pytest.mark.parametrize("name", ["out", "lse"])
def test_an_instrumented_kernel_with_other_bits_is_not_timed(name: str, device: Device, tmp_path: Path) -> None:
    """-0 equals 0 as a number and differs as bits; NaN equals itself as bits alone."""
    device.error = {name: -0.0}
    with pytest.raises(RuntimeError, match=f"must give the bits of the kernel, but its {name} differs"):
        timelines.record(PROBLEM, OPTIONS, tmp_path / "x.csv")
    assert len(device.launches) == 2
    assert not list(tmp_path.iterdir())


def test_a_timeline_that_its_stamps_slowed_down_is_written_and_refused(device: Device, tmp_path: Path) -> None:
    device.cost = 1.0301
    path = tmp_path / "x.csv"
    assert timelines.record(PROBLEM, OPTIONS, path)[0] == 1.0301
    with pytest.raises(ValueError, match=r"slowdown must be at most 1\.03"):
        reader.read(path)


def test_a_schedule_whose_consumers_stamp_nothing_is_refused(device: Device, tmp_path: Path) -> None:
    device.events = range(0)
    with pytest.raises(ValueError, match="CTA 0 has no stamps"):
        timelines.record(PROBLEM, OPTIONS, tmp_path / "x.csv")
    device.events = range(1, 4)
    with pytest.raises(ValueError, match=r"fp16 schedule with .* has consumers that stamp nothing"):
        timelines.record(PROBLEM, OPTIONS, tmp_path / "x.csv")


def test_no_clock_is_no_timeline(device: Device, tmp_path: Path) -> None:
    device.mhz = math.nan
    with pytest.raises(RuntimeError, match="the SMs' counters gave no clock"):
        timelines.record(PROBLEM, OPTIONS, tmp_path / "x.csv")


def test_an_actor_is_kept_until_it_comes_to_the_first_block_too_many() -> None:
    """An FP8 producer loads block 2 before it transposes V of block 1: what follows the load would look like a wait."""
    stamps = np.zeros((2, 2, 4, COLUMNS), np.int32)
    stamps[0, 0, :3, 0] = 500, 700, 900
    stamps[0, 1, :3, 0] = 10, 20, 110  # k_free
    stamps[0, 1, :3, 2] = 30, 120, 200  # v_free
    kept = [(x.actor, x.step, x.event) for x in timelines.first_blocks(stamps, 2)]
    assert kept == [
        ("consumer 0", 0, "turn"),
        ("consumer 0", 1, "turn"),
        ("producer", 0, "k_free"),
        ("producer", 1, "k_free"),
        ("producer", 0, "v_free"),
    ]
