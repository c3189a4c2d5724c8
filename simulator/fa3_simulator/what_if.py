"""What one kind of work costs a schedule: how many times as fast a CTA would be if that took no time at all.

The program runs again in :mod:`fa3_simulator.engine` with those costs at zero and all else equal. So work that hides
behind other work, or waits for it, gains little.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fa3_simulator.costs import SCALARS, Costs, costs
from fa3_simulator.engine import Trace, simulate
from fa3_simulator.machine import Machine
from fa3_simulator.program import Program

# For each kind of work the constants of a machine, and the scalars of Costs, that are zero where it is free. "copies"
# are those by TMA, with their time at the port of shared memory, and the transposition of V in FP8.
FREE: dict[str, tuple[str, ...]] = {
    "exponentials": ("mufu_port_cycles", "mufu_cycles", "mufu_lone_cycles"),
    "copies": (
        "trip_cycles",
        "tma_issue",
        "memory_latency",
        "piece",
        "piece_far",
        "piece_lone",
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
    """Return the cost tables of a program in which ``thing``, a key of :data:`FREE`, takes no time."""
    of_machine = {name: replace(getattr(machine, name), value=0.0) for name in FREE[thing] if name not in SCALARS}
    tables = costs(program, replace(machine, **of_machine), clock_mhz)
    mask = np.array([name not in FREE[thing] for name in SCALARS])
    return tables._replace(scalars=tables.scalars * mask)


def speedups(program: Program, machine: Machine, clock_mhz: float | None, trace: Trace) -> dict[str, float]:
    """Return for each key of :data:`FREE` how many times as fast the program runs without it as in ``trace``.

    ``trace`` is the program's run on this machine with all costs.
    """
    return {
        thing: trace.cycles / simulate(program, costs_without(thing, program, machine, clock_mhz)).cycles
        for thing in FREE
    }
