"""What the operations of a program cost on a machine, in integer ticks of 1/64 cycle."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.config import WARPGROUP_ROWS
from fa3_simulator.machine import Machine
from fa3_simulator.program import Gemm, Program, Work

TICKS = 64  # per cycle
PIPES = ("port", "mufu")
RESOURCES = ("tensor", "smem", *PIPES, "l2", "reduce")  # whose busy time a run counts
OPERAND_BYTES = 32  # of k per wgmma: 256 bits
SMEM, ALONE, TAKEN, HOLD = (1 + len(PIPES) + i for i in range(4))  # columns of Costs.work behind the pipes
PIECE_BYTES = 4096  # granularity at which TMA writes and operand fetches share the shared memory port


class Costs(NamedTuple):
    """Arrays the engines read. Ticks throughout; one row per gemm, work or delay of the program."""

    gemm: np.ndarray  # (gemms, 5): instructions; of one, tensor, shared memory port, share of TAKEN in 1/64, issue
    # (works, 7): chunks; of one, PIPES, shared memory port, a warp alone, what wgmma loses, and how many 64ths as long
    # those of other warps take beside it at least
    work: np.ndarray
    work_slow: np.ndarray  # the same while wgmma runs
    delay: np.ndarray
    scalars: np.ndarray  # in the order of SCALARS


SCALARS = (
    "wgmma_tail",
    "wgmma_window",
    "mbarrier_hop",
    "mbarrier_poll",
    "named_barrier",
    "tma_issue",
    "tma_box_bytes",
    "memory_latency",
    "piece",
    "piece_far",
    "piece_port",
    "piece_store",
    "piece_reduce",
)


def tick(cycles: float) -> int:
    """Cycles as ticks, to nearest."""
    return round(cycles * TICKS)


def _loss(n: int, machine: Machine) -> int:
    """Share, in 1/64, of ``fma_tensor_cycles`` that a wgmma of n columns loses: all at 128, less for fewer or more."""
    shares = (machine["fma_tensor_narrow"], 1.0, machine["fma_tensor_wide"])
    return round(64 * float(np.interp(n, (64, 128, 256), shares)))


def _gemm(gemm: Gemm, machine: Machine) -> tuple[int, int, int, int, int]:
    rate = machine["tensor_flops_16bit"] * (16 // gemm.bits)
    k = 256 // gemm.bits
    tensor = tick(2 * WARPGROUP_ROWS * gemm.n * k / rate)
    rows = gemm.n + (0 if gemm.a_in_registers else WARPGROUP_ROWS)
    if gemm.a_in_registers:
        tensor += tick(machine["wgmma_rs_cycles"])
    port = tick(rows * OPERAND_BYTES / machine["smem_bytes_per_cycle"])
    issue = tick(machine["wgmma_issue_cycles"] * gemm.n / 128)
    return gemm.instructions, tensor, port, _loss(gemm.n, machine), issue


@lru_cache(maxsize=8192)
def _work(work: Work, machine: Machine, *, under_wgmma: bool) -> tuple[int, ...]:
    def cycles(name: str) -> float:
        return machine[f"{name}_cycles"] * (machine[f"{name}_under_wgmma"] if under_wgmma else 1)

    alu = work.alu + work.convert + 2 * work.convert_e4m3
    port = alu * cycles("alu") + work.mufu * cycles("mufu_port") + (work.fma + work.other) * cycles("issue")
    issued = (work.fma + work.other + work.shuffle + alu + work.mufu) * cycles("issue")
    waits = work.stall + work.shuffle * cycles("shuffle") + work.trips * cycles("trip")
    alone = max(issued, port, work.mufu * cycles("mufu_lone")) + waits
    smem = work.smem_bytes / machine["smem_bytes_per_cycle"]
    taken = work.fma * machine["fma_tensor_cycles"] if under_wgmma else 0
    never_waits = work.fma > 0 and not (alu or work.mufu or work.shuffle)
    hold = tick(machine["held_up_factor"]) if never_waits else TICKS
    each = (tick(x / work.chunks) for x in (port, work.mufu * cycles("mufu"), smem, alone, taken))
    return (work.chunks, *each, hold)


def costs(program: Program, machine: Machine, clock_mhz: float | None = None) -> Costs:
    """Cost tables of a program; ``clock_mhz`` (the maximum by default) sets the cycles of a memory latency."""
    clock = clock_mhz or machine["max_clock_mhz"]
    return _tables(program.gemms, program.works, program.delays, machine, clock)


@lru_cache(maxsize=16)
def _tables(
    gemms: tuple[Gemm, ...], works: tuple[Work, ...], delays: tuple[str, ...], machine: Machine, clock: float
) -> Costs:
    scalars = (
        tick(machine["wgmma_tail_cycles"]),
        int(machine["wgmma_window"]),
        tick(machine["mbarrier_hop_cycles"]),
        tick(machine["mbarrier_poll_cycles"]),
        tick(machine["named_barrier_cycles"]),
        tick(machine["tma_issue_cycles"]),
        int(machine["tma_box_bytes"]),
        tick(machine["memory_latency_ns"] * clock / 1000),
        tick(PIECE_BYTES / machine["l2_bytes_per_cycle"]),
        tick(PIECE_BYTES / machine["hbm_lone_bytes_per_cycle"]),
        tick(PIECE_BYTES / machine["smem_bytes_per_cycle"]),
        tick(PIECE_BYTES / machine["store_bytes_per_cycle"]),
        tick(PIECE_BYTES / machine["reduce_bytes_per_ns"] * clock / 1000),
    )
    return Costs(
        np.array([_gemm(g, machine) for g in gemms], np.int64).reshape(-1, 5),
        np.array([_work(w, machine, under_wgmma=False) for w in works], np.int64).reshape(-1, 1 + HOLD),
        np.array([_work(w, machine, under_wgmma=True) for w in works], np.int64).reshape(-1, 1 + HOLD),
        np.array([tick(machine[name]) for name in delays], np.int64),
        np.array(scalars, np.int64),
    )
