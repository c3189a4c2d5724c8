"""What one thing costs a schedule: how many times as fast a CTA would be if that took no time at all.

The program runs again with those of its costs at zero, all else being equal: what it hides behind, or waits for, stays.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fa3_simulator.costs import SCALARS, Costs, costs
from fa3_simulator.engine import simulate
from fa3_simulator.machine import Machine
from fa3_simulator.program import Program
from fa3_simulator.trace import Trace

# Constants of a machine, and scalars of Costs, that are zero where a thing is free. Copies are those by TMA, with the
# time they have the port of shared memory, and the transposition of V in FP8.
FREE: dict[str, tuple[str, ...]] = {
    "exponentials": ("mufu_port_cycles", "mufu_cycles", "mufu_lone_cycles"),
    "copies": (
        "trip_cycles",
        "tma_issue",
        "memory_latency",
        "piece",
        "piece_far",
        "piece_port",
        "piece_store",
        "piece_reduce",
    ),
    "synchronisation": (
        "mbarrier_hop_cycles",
        "mbarrier_poll_cycles",
        "named_barrier_cycles",
        "warp_skew_cycles",
        "proxy_fence_cycles",
    ),
}


def costs_without(thing: str, program: Program, machine: Machine, clock_mhz: float | None) -> Costs:
    """Cost tables of a program in which one of :data:`FREE` takes no time."""
    of_machine = {name: replace(getattr(machine, name), value=0.0) for name in FREE[thing] if name not in SCALARS}
    tables = costs(program, replace(machine, **of_machine), clock_mhz)
    kept = np.array([name not in FREE[thing] for name in SCALARS])
    return tables._replace(scalars=tables.scalars * kept)


def speedups(program: Program, machine: Machine, clock_mhz: float | None, trace: Trace) -> dict[str, float]:
    """Times as fast as in ``trace``, the program's run on this machine, by what of :data:`FREE` is free."""
    return {
        thing: trace.cycles / simulate(program, costs_without(thing, program, machine, clock_mhz)).cycles
        for thing in FREE
    }
