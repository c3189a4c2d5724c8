"""How a launch is timed: CUDA graphs and events where possible, pauses that keep the chip cool, and the SMs' cycles beside it."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
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
    """How long and how often: at most ``pause_s`` after every burst, less for short ones, ``rounds`` interleaved rounds."""

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


class GraphTimed:
    """Launches captured in a CUDA graph and timed by events."""

    timed_by = "CUDA graph"

    def __init__(self, launch: Callable[[int], object]) -> None:
        self.launch = launch
        self._graphs: dict[int, object] = {}

    def time(self, launches: int, probe: Callable[[], None]) -> Burst:
        torch = import_module("torch")
        graph = self._graphs.get(launches) or self._capture(launches)
        return _between_events(torch, graph.replay, launches, probe)  # type: ignore[attr-defined]

    def _capture(self, launches: int):
        torch = import_module("torch")
        for i in range(LAUNCHES):
            self.launch(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                self.launch(i)
        graph.replay()
        torch.cuda.synchronize()
        self._graphs = {launches: graph}  # one at a time: a graph keeps its outputs
        return graph


class EventTimed:
    """Plain launches between two events, for what cannot be captured; short kernels then show the host's pace."""

    timed_by = "events, no graph"

    def __init__(self, launch: Callable[[int], object]) -> None:
        self.launch = launch

    def time(self, launches: int, probe: Callable[[], None]) -> Burst:
        torch = import_module("torch")
        self.launch(0)
        torch.cuda.synchronize()
        return _between_events(torch, lambda: [self.launch(i) for i in range(launches)], launches, probe)


def _between_events(torch, run: Callable[[], object], launches: int, probe: Callable[[], None]) -> Burst:
    """Time ``run``; the counters are read just outside the two events, on the same stream."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    counters = _counters()
    counters.begin()
    start.record()
    run()
    stop.record()
    counters.end()
    probe()
    torch.cuda.synchronize()
    return Burst(start.elapsed_time(stop) / launches, sm_mhz(*counters.readings()))


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


class Counters:
    """Cycle counter and time of every SM, read on the GPU before and after a run."""

    def __init__(self) -> None:
        torch, clock = import_module("torch"), import_module("fa3_kernels.gluon.clock")
        self._sms = torch.cuda.get_device_properties(0).multi_processor_count
        self._readings = torch.zeros((2, clock.SLOTS, 2), dtype=torch.int64, device="cuda")
        self._clock = clock

    def _read(self, which: int) -> None:
        self._clock.read_clocks[(self._sms,)](self._readings[which], self._clock.SLOTS, num_warps=1)

    def begin(self) -> None:
        self._readings.zero_()
        self._read(0)

    def end(self) -> None:
        self._read(1)

    def readings(self) -> tuple[np.ndarray, np.ndarray]:
        before, after = self._readings.cpu().numpy()
        return before, after


@lru_cache(maxsize=1)
def _counters() -> Counters:
    return Counters()


class Clock:
    """SM clock in MHz as the driver reports it, by query only: NVML where its bindings are installed, else nvidia-smi."""

    def __init__(self) -> None:
        try:
            nvml = import_module("pynvml")
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
