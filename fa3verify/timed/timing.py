"""How launches are timed: interleaved bursts with cooling pauses; the SMs' clock is read as well.

A launch is anything with the method of :class:`Timed`, such as a CUDA graph of :mod:`fa3verify.bench.graphs`.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

BY_GRAPH = "CUDA graph"
LAUNCHES = 3  # launches of one burst, at least
BURST_MS = 1.0  # a burst lasts at least so long: an SM's clock may tick in steps of 1 us, which is then 0.1 %
DUTY = 0.03  # largest fraction of the time that bursts may fill: 9 ms of 0.3 s


def median(values: Iterable[float]) -> float:
    """Return the median; NaN of nothing."""
    values = list(values)
    return float(statistics.median(values)) if values else math.nan


class LaunchTime(NamedTuple):
    """Milliseconds per launch, and the MHz the SMs ran at by their own counters."""

    ms: float
    sm_mhz: float


def cycles(burst: LaunchTime) -> float:
    """SM cycles of one launch.

    >>> cycles(LaunchTime(ms=0.5, sm_mhz=1800.0))
    900000.0
    """
    return burst.ms * burst.sm_mhz * 1e3


class Timed(Protocol):
    """A prepared launch."""

    timed_by: str

    def time(self, launches: int, probe: Callable[[], None], repeats: int = 1) -> LaunchTime:
        """Run ``launches`` back to back ``repeats`` times; ``probe`` is called while they run."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """Says how often runs are timed: in ``rounds`` interleaved rounds, with a pause of at most ``pause_s`` after each
    burst, shorter after short ones.
    """

    rounds: int = 5
    pause_s: float = 0.3


@dataclass(slots=True)
class Times:
    """Holds the time of every burst and sustained run, with the SM clock in MHz that the driver reported during it."""

    bursts: list[LaunchTime] = field(default_factory=list)
    burst_driver_mhz: list[float] = field(default_factory=list)
    sustained: list[LaunchTime] = field(default_factory=list)
    sustained_driver_mhz: list[float] = field(default_factory=list)
    sustained_w: list[float] = field(default_factory=list)


def measure(
    runs: Mapping[str, Timed],
    pace: Pace,
    clock: Clock,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Times]:
    """Time every run in interleaved cool bursts.

    Parameters
    ----------
    runs : mapping of name to Timed
    pace : Pace
    clock : Clock
        Read while a run is under way.
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
    return times


def _burst_launches(run: Timed) -> int:
    """Return how many launches last :data:`BURST_MS`. Running them captures their graph now, not in the first round."""
    launches = max(LAUNCHES, math.ceil(BURST_MS / run.time(LAUNCHES, no_probe).ms))
    if launches > LAUNCHES:
        run.time(launches, no_probe)
    return launches


def no_probe() -> None:
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
    """Reads the driver's figures of torch's first GPU: the SM clock in MHz when called, ``energy_j()`` used in joules.

    NVML is asked if its bindings are installed; else nvidia-smi gives the clock, and the energy is NaN.
    """

    def __init__(self) -> None:
        try:
            import pynvml as nvml  # pyright: ignore[reportMissingImports] (optional: nvidia-smi is slower)
        except ImportError:
            self._read = lambda: float(query("clocks.sm"))
            self.energy_j = lambda: math.nan
            return
        nvml.nvmlInit()
        name = device_name()
        handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
        self._read = lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        self.energy_j = lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3

    def __call__(self) -> float:
        return self._read()


def device_name() -> str:
    """Index or UUID by which the driver knows the GPU that this process calls the first, in the order of PCI."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"


def query(field_name: str) -> str:
    """One field of nvidia-smi, such as ``driver_version``."""
    command = ["nvidia-smi", f"--query-gpu={field_name}", "--format=csv,noheader,nounits", "-i", device_name()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
