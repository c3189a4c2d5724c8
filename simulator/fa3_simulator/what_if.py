"""What one kind of work costs a schedule: how many times as fast a CTA would be if that took no time at all.

The program runs again in :mod:`fa3_simulator.engine` with those costs at zero and all else equal. So work that hides
behind other work, or waits for it, gains little.
"""

from __future__ import annotations

import numpy as np

from fa3_simulator.costs import SCALARS, Costs, costs
from fa3_simulator.engine import Trace, simulate
from fa3_simulator.machine import THREADS_OF_REGISTERS, Machine
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
        "piece_thread_store",
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


# What a rate, given with --what-if, changes: constants of a machine that are rates, and those that are times.
RATES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tensor": (("tensor_flops_16bit",), ()),
    "mufu": ((), ("mufu_cycles", "mufu_lone_cycles", "mufu_port_cycles")),
    "vector": (
        (),
        ("issue_cycles", "alu_cycles", "mufu_cycles", "mufu_lone_cycles", "mufu_port_cycles", "shuffle_cycles"),
    ),
    "port": (("smem_bytes_per_cycle",), ()),
    "l2": (("l2_bytes_per_cycle",), ("memory_latency_ns",)),
    "hbm": (("hbm_bytes_per_ns", "hbm_lone_bytes_per_cycle"), ()),
    "barriers": ((), ("mbarrier_hop_cycles", "mbarrier_poll_cycles", "named_barrier_cycles")),
}
SIZES = {"smem": "smem_bytes", "registers": "registers"}  # what more of it, given with --what-if, changes


def changed(machine: Machine, name: str, factor: float = 1.0, more: float = 0.0) -> Machine:
    """Return a machine on which a rate, a key of :data:`RATES`, is ``factor`` times as high, or a size, a key of
    :data:`SIZES`, larger by ``more``: bytes of shared memory, or registers of each thread. What it changes is assumed.

    >>> from fa3_simulator.machine import load
    >>> changed(load("h200"), "hbm", 2)["hbm_bytes_per_ns"] / load("h200")["hbm_bytes_per_ns"]
    2.0
    """
    if name in SIZES:
        added = more * (THREADS_OF_REGISTERS if name == "registers" else 1)
        values = {SIZES[name]: machine[SIZES[name]] + added}
    else:
        rates, times = RATES[name]
        values = {each: machine[each] * factor for each in rates} | {each: machine[each] / factor for each in times}
    return machine.with_values(values, "assumed")


def costs_without(thing: str, program: Program, machine: Machine, clock_mhz: float | None) -> Costs:
    """Return the cost tables of a program in which ``thing``, a key of :data:`FREE`, takes no time."""
    free = machine.with_values({name: 0.0 for name in FREE[thing] if name not in SCALARS})
    tables = costs(program, free, clock_mhz)
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
