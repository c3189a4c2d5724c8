"""How a launch is timed: CUDA graphs and events where possible, pauses that keep the chip cool, and the SM clock beside it."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

LAUNCHES = 3  # launches of one burst
DUTY = 0.03  # share of the time a burst may fill: 9 ms of 0.3 s. Measured: H200 bursts then end at its 1980 MHz
SUSTAINED_MS = 40.0
WARM_REPLAYS = 4  # times SUSTAINED_MS of the kernel's own heat: clocks otherwise depend on what ran before


class Timed(Protocol):
    """A prepared launch."""

    timed_by: str

    def time(self, launches: int, probe: Callable[[], None]) -> float:
        """Milliseconds per launch of ``launches`` back to back; ``probe`` is called while they run."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How long and how often: at most ``pause_s`` after every burst, less for short ones, ``rounds`` interleaved rounds."""

    rounds: int = 5
    pause_s: float = 0.3
    sustained: bool = True


@dataclass(slots=True)
class Times:
    """Milliseconds per launch and SM MHz of every burst, and of the sustained runs."""

    burst_ms: list[float] = field(default_factory=list)
    burst_mhz: list[float] = field(default_factory=list)
    sustained_ms: list[float] = field(default_factory=list)
    sustained_mhz: list[float] = field(default_factory=list)


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
        SM clock in MHz, read while a run is under way.
    sleep : callable
        Replaced in tests.

    Returns
    -------
    dict of name to Times
    """
    times = {name: Times() for name in runs}
    pause = pace.pause_s
    for _ in range(pace.rounds):
        for name, run in runs.items():
            sleep(pause)
            record = times[name]
            record.burst_ms.append(run.time(LAUNCHES, lambda record=record: record.burst_mhz.append(clock())))
            pause = min(pace.pause_s, LAUNCHES * record.burst_ms[-1] / 1e3 / DUTY)
    if not pace.sustained:
        return times
    launches = {name: max(LAUNCHES, int(SUSTAINED_MS / statistics.median(t.burst_ms))) for name, t in times.items()}
    for _ in range(3):
        for name, run in runs.items():
            for _ in range(WARM_REPLAYS):
                run.time(launches[name], _no_probe)
            record = times[name]
            probe = lambda record=record: record.sustained_mhz.append(clock())  # noqa: E731
            record.sustained_ms.append(run.time(launches[name], probe))
    return times


def _no_probe() -> None:
    """Nothing to read."""


class GraphTimed:
    """Launches captured in a CUDA graph and timed by events."""

    timed_by = "CUDA graph"

    def __init__(self, launch: Callable[[int], object]) -> None:
        self.launch = launch
        self._graphs: dict[int, object] = {}

    def time(self, launches: int, probe: Callable[[], None]) -> float:
        torch = import_module("torch")
        graph = self._graphs.get(launches) or self._capture(launches)
        return _between_events(torch, graph.replay, probe) / launches  # type: ignore[attr-defined]

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

    def time(self, launches: int, probe: Callable[[], None]) -> float:
        torch = import_module("torch")
        self.launch(0)
        torch.cuda.synchronize()
        return _between_events(torch, lambda: [self.launch(i) for i in range(launches)], probe) / launches


def _between_events(torch, run: Callable[[], object], probe: Callable[[], None]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    probe()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


class Clock:
    """SM clock in MHz, by query only: NVML where its bindings are installed, else nvidia-smi."""

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
