"""Launches timed on the GPU as CUDA graphs, between events; the SMs' counters are read around them.

:mod:`fa3verify.timed.timing` says in what rounds they are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fa3_kernels.gluon.clock import SLOTS, read_clocks
from fa3verify.timed.timing import LAUNCHES, LaunchTime, sm_mhz

_READ_CLOCKS: Any = read_clocks  # the annotations of gluon.jit hide that a kernel is launched
HEAD_START_CYCLES = 1_000_000  # half a millisecond: the host needs 30 to 200 us to start a graph


class GraphTimed:
    """Launches captured in a CUDA graph and timed by events; RuntimeError for what cannot be captured."""

    def __init__(self, launch: Callable[[int], object]) -> None:
        self.launch = launch
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def time(self, launches: int, probe: Callable[[], None] = lambda: None, repeats: int = 1) -> LaunchTime:
        graph = self._graphs.get(launches) or self._capture(launches)
        return between_events(lambda: [graph.replay() for _ in range(repeats)], launches * repeats, probe)

    def _capture(self, launches: int) -> torch.cuda.CUDAGraph:
        for i in range(LAUNCHES):
            self.launch(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                self.launch(i)
        graph.replay()
        torch.cuda.synchronize()
        self._graphs = {launches: graph}  # only the last one, as a graph holds the memory of its outputs
        return graph


def between_events(run: Callable[[], object], launches: int, probe: Callable[[], None]) -> LaunchTime:
    """Time ``run``; the counters are read just outside the two events, on the same stream.

    The GPU sleeps first while the host queues the rest. Otherwise it passes the first event before the host has started
    the graph, and every burst reads some 30 us too long (decision 0020).
    """
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    readings = torch.zeros((2, SLOTS, 2), dtype=torch.int64, device="cuda")  # cycles and time of every SM
    torch.cuda._sleep(HEAD_START_CYCLES)
    _READ_CLOCKS[(sms,)](readings[0], SLOTS, num_warps=1)
    start.record()
    run()
    stop.record()
    _READ_CLOCKS[(sms,)](readings[1], SLOTS, num_warps=1)
    probe()
    torch.cuda.synchronize()
    return LaunchTime(start.elapsed_time(stop) / launches, sm_mhz(*readings.cpu().numpy()))
