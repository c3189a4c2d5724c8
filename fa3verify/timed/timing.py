"""How launches are timed: interleaved bursts with cooling pauses, then sustained load; the SMs' clock is read as well.

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
GRAPH_MS = 40.0  # duration of the launches that are captured in one graph for a sustained run
WARM_REPLAYS = 8  # replays that heat the GPU before a sustained run; else its clock depends on the kernel before
SUSTAINED_REPLAYS = 28  # 1.1 s: in SAMPLED_S of them the energy counter ticks at least every 0.1 s
SAMPLED_S = 1.0
SUSTAINED_ROUNDS = 2  # rounds of sustained load at most


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
    burst, shorter after short ones; and whether sustained load follows.
    """

    rounds: int = 5
    pause_s: float = 0.3
    sustained: bool = True


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
    """Time every run: interleaved cool bursts first, then sustained load.

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
    if pace.sustained:
        _sustain(runs, times, min(pace.rounds, SUSTAINED_ROUNDS), clock)
    return times


def _sustain(runs: Mapping[str, Timed], times: Mapping[str, Times], rounds: int, clock: Clock) -> None:
    """Time and weigh every run under its own heat, in interleaved rounds of more than a second each."""
    launches = {n: max(LAUNCHES, int(GRAPH_MS / statistics.median(b.ms for b in t.bursts))) for n, t in times.items()}
    for _ in range(rounds):
        for name, run in runs.items():
            run.time(launches[name], _no_probe, WARM_REPLAYS)
            record = times[name]

            def probe(run: Timed = run, record: Times = record) -> None:
                record.sustained_driver_mhz.append(clock())
                # Without a graph the host still starts launches when this is called, and the GPU may be idle between.
                if run.timed_by == BY_GRAPH:
                    record.sustained_w.append(power_w(clock.energy_j, SAMPLED_S))

            record.sustained.append(run.time(launches[name], probe, SUSTAINED_REPLAYS))


def power_w(energy_j: Callable[[], float], seconds: float, now: Callable[[], float] = time.monotonic) -> float:
    """Mean power over ``seconds``, from one step of an energy counter that moves in steps to another.

    Parameters
    ----------
    energy_j : callable
        The counter, in joules; NaN where there is none.
    seconds : float
    now : callable
        Seconds; replaced in tests.

    Returns
    -------
    float
        Watts, with a relative error of about the time between two readings over ``seconds``; NaN if the counter made
        fewer than two steps.
    """
    started = now()
    last = energy_j()
    steps: list[tuple[float, float]] = []
    while (at := now()) - started < seconds:
        if (reading := energy_j()) > last:
            steps.append((at, reading))
            last = reading
    if len(steps) < 2:
        return math.nan
    (begin, first), (end, final) = steps[0], steps[-1]
    return (final - first) / (end - begin)


def _burst_launches(run: Timed) -> int:
    """Return how many launches last :data:`BURST_MS`. Running them captures their graph now, not in the first round."""
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
