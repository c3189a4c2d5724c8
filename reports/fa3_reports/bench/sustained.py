"""Cool bursts beside the clock that the driver reports, and then sustained load: launches timed and weighed under their
own heat.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fa3verify.timed import timing
from fa3verify.timed.timing import LAUNCHES, LaunchTime, Pace, device_name, measure, query

GRAPH_MS = 40.0  # duration of the launches that are captured in one graph for a sustained run
WARM_REPLAYS = 8  # replays that heat the GPU before a sustained run; else its clock depends on the kernel before
SUSTAINED_REPLAYS = 28  # 1.1 s: in SAMPLED_S of them the energy counter ticks at least every 0.1 s
SAMPLED_S = 1.0
SUSTAINED_ROUNDS = 2  # rounds of sustained load at most

BY_GRAPH = "CUDA graph"


class Timed(timing.Timed, Protocol):
    """A prepared launch, which says how it is timed."""

    timed_by: str


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


@dataclass(slots=True)
class Times:
    """Holds the time of every burst and sustained run, with the SM clock in MHz that the driver reported during it."""

    bursts: list[LaunchTime] = field(default_factory=list)
    burst_driver_mhz: list[float] = field(default_factory=list)
    sustained: list[LaunchTime] = field(default_factory=list)
    sustained_driver_mhz: list[float] = field(default_factory=list)
    sustained_w: list[float] = field(default_factory=list)


def burst(runs: Mapping[str, Timed], pace: Pace, clock: Clock) -> dict[str, Times]:
    """Time every run in interleaved cool bursts, and read the driver's clock during each."""
    driver: dict[str, list[float]] = {name: [] for name in runs}
    bursts = measure(runs, pace, lambda name: driver[name].append(clock()))
    return {name: Times(bursts[name], driver[name]) for name in runs}


def sustain(runs: Mapping[str, Timed], times: Mapping[str, Times], rounds: int, clock: Clock) -> None:
    """Time and weigh every run under its own heat, in interleaved rounds of more than a second each."""
    launches = {n: max(LAUNCHES, int(GRAPH_MS / statistics.median(b.ms for b in t.bursts))) for n, t in times.items()}
    for _ in range(rounds):
        for name, run in runs.items():
            run.time(launches[name], repeats=WARM_REPLAYS)
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
