"""What the operations of a program cost on a machine, in integer ticks of 1/64 cycle.

The engine reads these tables. The constants come from
:mod:`fa3_simulator.machine`, and the work of kernels from :mod:`fa3_simulator.vector_work`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.config import WARPGROUP_ROWS
from fa3_simulator.machine import Machine
from fa3_simulator.program import Gemm, Program, Work

TICKS = 64  # per cycle
SHARES = 64  # a whole, in the unit of shares and factors
PIPES = ("port", "mufu")  # the port that issues all instructions, and the special-function unit
RESOURCES = ("tensor", "smem", *PIPES, "l2", "reduce")  # resources whose busy time a run counts
OPERAND_BYTES = 32  # bytes of one operand row along k in one wgmma: 256 bits
SMEM, ALONE, TAKEN, HOLD = (1 + len(PIPES) + i for i in range(4))  # columns of Costs.work behind the pipes
L2_LONE_BYTES = 99  # per cycle, of one SM alone: as h200.toml has it beside l2_bytes_per_cycle
PIECE_BYTES = 4096  # granularity at which TMA writes and operand fetches share the shared memory port


class Costs(NamedTuple):
    """The int64 arrays that the engine reads, in ticks; one row per gemm, work or delay of the program."""

    # (gemms, 7): number of wgmma instructions; then of each of them: time on the tensor core, time at the shared memory
    # port, how much of the time that works take from wgmma (TAKEN) it loses, in 1/SHARES, and time until the next
    # issue; whether they end a commit group; and time from the end of the last one to visible accumulators
    gemm: np.ndarray
    # (works, 7): number of chunks; then of each chunk: time on each of PIPES, time at the shared memory port (SMEM),
    # time if its warp runs alone (ALONE), time taken from wgmma (TAKEN), and the least time of a chunk of another warp
    # beside it, in 1/SHARES of that chunk's own time (HOLD)
    work: np.ndarray
    work_slow: np.ndarray  # the same while wgmma runs
    delay: np.ndarray  # (delays,)
    scalars: np.ndarray  # in the order of SCALARS


SCALARS = (
    "wgmma_window",
    "mbarrier_hop",
    "mbarrier_poll",
    "named_barrier",
    "tma_issue",
    "tma_box_bytes",
    "memory_latency",
    "l2_latency",
    "store_queue",
    "piece",
    "piece_far",
    "piece_port",
    "piece_store",
    "piece_thread_store",
    "piece_reduce",
    "piece_lone",
)


def tick(cycles: float) -> int:
    """Return cycles as ticks, rounded to nearest."""
    return round(cycles * TICKS)


def _loss(n: int, machine: Machine) -> int:
    """Return the share of ``fma_tensor_cycles`` that a wgmma of n columns loses, in 1/SHARES: all at 128 columns."""
    shares = (machine["fma_tensor_narrow"], 1.0, machine["fma_tensor_wide"])
    return round(SHARES * float(np.interp(n, (64, 128, 256), shares)))


def _gemm(gemm: Gemm, machine: Machine) -> tuple[int, ...]:
    rate = machine["tensor_flops_16bit"] * (16 // gemm.bits)
    tensor = tick(2 * WARPGROUP_ROWS * gemm.n * (256 // gemm.bits) / rate)
    rows = gemm.n + (0 if gemm.a_in_registers else WARPGROUP_ROWS)
    issue = tick(machine["wgmma_issue_cycles"] * gemm.n / 128)
    tail = tick(machine["wgmma_tail_cycles"])
    if gemm.rate < 1:
        rows, tail = 0, tick(machine["mma_tail_cycles"])
        if gemm.share < 1:
            issue = round(tensor / gemm.rate)  # its warps take so long, the tensor cores less
        tensor = round(tensor * gemm.share / gemm.rate)
    elif gemm.a_in_registers:
        tensor += tick(machine["wgmma_rs_cycles"])
    port = tick(rows * OPERAND_BYTES / machine["smem_bytes_per_cycle"])
    return gemm.instructions, tensor, port, _loss(gemm.n, machine), issue, int(not gemm.is_open), tail


@lru_cache(maxsize=8192)
def _work(work: Work, machine: Machine, *, under_wgmma: bool) -> tuple[int, ...]:
    def cycles(name: str) -> float:
        return machine[f"{name}_cycles"] * (machine[f"{name}_under_wgmma"] if under_wgmma else 1)

    alu = work.alu + work.convert + 2 * work.convert_e4m3
    port = alu * cycles("alu") + work.mufu * cycles("mufu_port") + (work.fma + work.other) * cycles("issue")
    issued = (work.fma + work.other + work.shuffle + alu + work.mufu) * cycles("issue")
    waits = work.stall + work.shuffle * cycles("shuffle") + work.trips * cycles("trip")
    alone = max(issued, port, work.mufu * cycles("mufu_lone")) + waits
    mufu = work.mufu * cycles("mufu")
    alone = max(alone, work.warps * max(issued, port, mufu) if work.warps > 1 else 0)
    smem = work.smem_bytes / machine["smem_bytes_per_cycle"]
    taken = work.fma * machine["fma_tensor_cycles"] if under_wgmma else 0
    never_waits = work.fma > 0 and not (alu or work.mufu or work.shuffle)
    hold = round(machine["held_up_factor"] * SHARES) if never_waits else SHARES
    each = (tick(x / work.chunks) for x in (port * work.warps, mufu * work.warps, smem, alone, taken))
    return (work.chunks, *each, hold)


def costs(program: Program, machine: Machine, clock_mhz: float | None = None) -> Costs:
    """Return the cost tables of a program on a machine.

    ``clock_mhz``, the machine's maximum by default, turns nanoseconds into cycles.
    """
    return _tables(program.gemms, program.works, program.delays, machine, clock_mhz or machine["max_clock_mhz"])


@lru_cache(maxsize=16)
def _tables(
    gemms: tuple[Gemm, ...], works: tuple[Work, ...], delays: tuple[str, ...], machine: Machine, clock: float
) -> Costs:
    scalars = (
        int(machine["wgmma_window"]),
        tick(machine["mbarrier_hop_cycles"]),
        tick(machine["mbarrier_poll_cycles"]),
        tick(machine["named_barrier_cycles"]),
        tick(machine["tma_issue_cycles"]),
        int(machine["tma_box_bytes"]),
        tick(machine["memory_latency_ns"] * clock / 1000),
        tick(machine["l2_latency_ns"] * clock / 1000),
        tick(machine["store_queue_bytes"] / machine["thread_store_bytes_per_cycle"]),
        tick(PIECE_BYTES / machine["l2_bytes_per_cycle"]),
        tick(PIECE_BYTES / machine["hbm_lone_bytes_per_cycle"]),
        tick(PIECE_BYTES / machine["smem_bytes_per_cycle"]),
        tick(PIECE_BYTES / machine["store_bytes_per_cycle"]),
        tick(PIECE_BYTES / machine["thread_store_bytes_per_cycle"]),
        tick(PIECE_BYTES / machine["reduce_bytes_per_ns"] * clock / 1000),
        tick(PIECE_BYTES / L2_LONE_BYTES),
    )
    return Costs(
        np.array([_gemm(g, machine) for g in gemms], np.int64).reshape(-1, 7),
        np.array([_work(w, machine, under_wgmma=False) for w in works], np.int64).reshape(-1, 1 + HOLD),
        np.array([_work(w, machine, under_wgmma=True) for w in works], np.int64).reshape(-1, 1 + HOLD),
        np.array([tick(machine[name] * (clock / 1000 if name.endswith("_ns") else 1)) for name in delays], np.int64),
        np.array(scalars, np.int64),
    )
