"""How launches are timed: interleaved bursts, cooling pauses, then sustained load, with the SMs' clock beside it."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

LAUNCHES = 3  # launches of one burst, at least
BURST_MS = 1.0  # at least: the time an SM reads may move in steps of 1 us, which is then 0.1 %
DUTY = 0.03  # share of the time a burst may fill: 9 ms of 0.3 s
SUSTAINED_MS = 40.0
WARM_REPLAYS = 4  # times SUSTAINED_MS of the kernel's own heat: clocks otherwise depend on what ran before


class Burst(NamedTuple):
    """Milliseconds per launch, and the MHz the SMs ran at by their own counters."""

    ms: float
    sm_mhz: float


class Timed(Protocol):
    """A prepared launch."""

    timed_by: str

    def time(self, launches: int, probe: Callable[[], None]) -> Burst:
        """Run ``launches`` back to back; ``probe`` is called while they run."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How long and how often: up to ``pause_s`` after a burst, less for short ones, ``rounds`` interleaved rounds."""

    rounds: int = 5
    pause_s: float = 0.3
    sustained: bool = True


@dataclass(slots=True)
class Times:
    """Every burst and sustained run: what was measured, and the SM clock in MHz as the driver reports it."""

    bursts: list[Burst] = field(default_factory=list)
    burst_driver_mhz: list[float] = field(default_factory=list)
    sustained: list[Burst] = field(default_factory=list)
    sustained_driver_mhz: list[float] = field(default_factory=list)


def measure(
    runs: Mapping[str, Timed],
    pace: Pace,
    clock: Callable[[], float],
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Times]:
    """Time every run: interleaved cool bursts first, then sustained load.

    Parameters
    ----------
    runs : mapping of name to Timed
    pace : Pace
    clock : callable
        SM clock in MHz as the driver reports it, read while a run is under way.
    sleep : callable
        Replaced in tests.

    Returns
    -------
    dict of name to Times
    """
    times = {name: Times() for name in runs}
    launches = {name: _burst_launches(run) for name, run in runs.items()} if pace.rounds else {}
    pause = pace.pause_s
    for _ in range(pace.rounds):
        for name, run in runs.items():
            sleep(pause)
            record = times[name]
            probe = lambda record=record: record.burst_driver_mhz.append(clock())  # noqa: E731
            record.bursts.append(run.time(launches[name], probe))
            pause = min(pace.pause_s, launches[name] * record.bursts[-1].ms / 1e3 / DUTY)
    if not pace.sustained:
        return times
    for name, record in times.items():
        launches[name] = max(LAUNCHES, int(SUSTAINED_MS / statistics.median(b.ms for b in record.bursts)))
    for _ in range(3):
        for name, run in runs.items():
            for _ in range(WARM_REPLAYS):
                run.time(launches[name], _no_probe)
            record = times[name]
            probe = lambda record=record: record.sustained_driver_mhz.append(clock())  # noqa: E731
            record.sustained.append(run.time(launches[name], probe))
    return times


def _burst_launches(run: Timed) -> int:
    """Launches that last :data:`BURST_MS`; a graph of as many is captured now, not in the first round."""
    launches = max(LAUNCHES, math.ceil(BURST_MS / run.time(LAUNCHES, _no_probe).ms))
    if launches > LAUNCHES:
        run.time(launches, _no_probe)
    return launches


def _no_probe() -> None:
    """Nothing to read."""


def sm_mhz(before: np.ndarray, after: np.ndarray) -> float:
    """Clock that the SMs ran at between two readings.

    Parameters
    ----------
    before, after : int64 (slots, 2)
        Cycles and nanoseconds of every SM; 0 where there is none.

    Returns
    -------
    float
        MHz, the median over the SMs in both readings; NaN without one.

    >>> sm_mhz(np.array([[1000, 5], [0, 0]]), np.array([[2000, 505], [7, 9]]))  # 1000 cycles in 500 ns
    2000.0
    """
    seen = (before[:, 1] > 0) & (after[:, 1] > before[:, 1])
    cycles, time_ns = (after - before)[seen].T
    return float(np.median(cycles / time_ns) * 1e3) if seen.any() else math.nan


class Clock:
    """SM clock in MHz as the driver reports it, by query: NVML where its bindings are installed, else nvidia-smi."""

    def __init__(self) -> None:
        try:
            import pynvml as nvml  # pyright: ignore[reportMissingImports] (optional: nvidia-smi is slower)

            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByIndex(0)
            self._read = lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        except ImportError:
            self._read = lambda: float(query("clocks.sm"))

    def __call__(self) -> float:
        return self._read()


def query(field_name: str) -> str:
    """One field of nvidia-smi, such as ``driver_version``."""
    command = ["nvidia-smi", f"--query-gpu={field_name}", "--format=csv,noheader,nounits", "-i", "0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
