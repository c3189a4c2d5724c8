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
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

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

    def time(self, launches: int, probe: Callable[[], None] = ..., repeats: int = 1) -> LaunchTime:
        """Run ``launches`` back to back ``repeats`` times; ``probe`` is called while they run."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """Says how often runs are timed: in ``rounds`` interleaved rounds, with a pause of at most ``pause_s`` after each
    burst, shorter after short ones.
    """

    rounds: int = 5
    pause_s: float = 0.3


def measure(
    runs: Mapping[str, Timed],
    pace: Pace,
    probe: Callable[[str], None] = lambda name: None,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, list[LaunchTime]]:
    """Time every run in interleaved cool bursts.

    Parameters
    ----------
    runs : mapping of name to Timed
    pace : Pace
    probe : callable
        Called with the name of a run while a burst of it is under way.
    sleep : callable
        Replaced in tests.

    Returns
    -------
    dict of name to list of LaunchTime
    """
    bursts: dict[str, list[LaunchTime]] = {name: [] for name in runs}
    launches = {name: _burst_launches(run) for name, run in runs.items()} if pace.rounds else {}
    pause = pace.pause_s
    for _ in range(pace.rounds):
        for name, run in runs.items():
            sleep(pause)
            burst = run.time(launches[name], partial(probe, name))
            bursts[name].append(burst)
            pause = min(pace.pause_s, launches[name] * burst.ms / 1e3 / DUTY)
    return bursts


def _burst_launches(run: Timed) -> int:
    """Return how many launches last :data:`BURST_MS`. Running them captures their graph now, not in the first round."""
    launches = max(LAUNCHES, math.ceil(BURST_MS / run.time(LAUNCHES).ms))
    if launches > LAUNCHES:
        run.time(launches)
    return launches


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


def device_name() -> str:
    """Index or UUID by which the driver knows the GPU that this process calls the first, in the order of PCI."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"


def query(field_name: str) -> str:
    """One field of nvidia-smi, such as ``driver_version``."""
    command = ["nvidia-smi", f"--query-gpu={field_name}", "--format=csv,noheader,nounits", "-i", device_name()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
