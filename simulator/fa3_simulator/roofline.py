"""Printed beside the simulation: the roofline no schedule can beat, and a closed form of two constants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa3_kernels.plan.barriers import WARP_THREADS
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_reference.problem import AttentionProblem
from fa3_simulator.costs import SMEM, TICKS, costs
from fa3_simulator.cta import AnyConfig, program_of
from fa3_simulator.machine import Machine
from fa3_simulator.program import Op
from fa3_simulator.run import all_tiles, hbm_cycles, launched, longest_cta, visible_pairs
from fa3_simulator.schedules import TileBlocks

# Fitted on 20 published H100 timings of FlashAttention-3 (FlashGPU-Sim, arXiv 2609.15311): 6.1 % mean error there.
CLOSED_FORM_MUFU = 1.5
CLOSED_FORM_TILE_CYCLES = 3500
SUB_CORES = 4  # of an SM, each with a special-function unit


@dataclass(frozen=True, slots=True)
class Roofline:
    """Cycles of the longest CTA on each resource if it alone had to be waited for; ``binds`` is the largest."""

    tensor: float
    mufu: float
    smem: float
    l2: float
    hbm: float
    issue: float  # of a warp's instructions
    reduce: float  # what is added to global memory

    @property
    def binds(self) -> str:
        return max(self.__dataclass_fields__, key=lambda name: getattr(self, name))

    @property
    def cycles(self) -> float:
        return getattr(self, self.binds)


def tensor_cycles_per_block(config: AnyConfig, machine: Machine) -> float:
    """Return the cycles of all GEMMs of one tile and one block."""
    gemms, bits = _gemms(config)
    narrow = gemms // 2  # of V's channels
    channels = (gemms - narrow) * config.head_dim + narrow * getattr(config, "head_dim_v", config.head_dim)
    flops = 2.0 * channels * config.tile_m * config.tile_n
    return flops / (machine["tensor_flops_16bit"] * (16 // bits))


def mufu_cycles_per_block(config: AnyConfig, machine: Machine) -> float:
    """One exponential per score, at full rate."""
    per_warp = config.tile_n / 2  # instructions for 16 rows
    return per_warp * machine["mufu_cycles"] * (config.tile_m // WARPGROUP_ROWS)


def lower_bound(
    problem: AttentionProblem, config: AnyConfig, machine: Machine, clock_mhz: float | None = None
) -> Roofline:
    """Return what no tile and no schedule can beat, forward or backward as ``config`` is, in SM cycles.

    GEMMs and exponentials of the pairs that are visible, evenly over all SMs, and HBM for every tensor once, each at
    full rate. What depends on tiles is 0.
    """
    gemms, bits = _gemms(config)
    pairs = visible_pairs(problem) * problem.nheads / machine["sms"]
    channels = gemms // 2 * problem.head_dim_v + (gemms - gemms // 2) * problem.head_dim  # dP and dV have those of V
    tensor = pairs * 2 * channels / (machine["tensor_flops_16bit"] * (16 // bits))
    exponentials = pairs / (WARP_THREADS * SUB_CORES) * machine["mufu_cycles"]
    hbm = hbm_cycles(problem, config, machine, clock_mhz or machine["max_clock_mhz"])
    return Roofline(tensor, exponentials, 0.0, 0.0, hbm, 0.0, 0.0)


def _gemms(config: AnyConfig) -> tuple[int, int]:
    """GEMMs over a tile and a block, two forward and five backward, and the bits of their operands."""
    return (2, config.bits) if isinstance(config, Config) else (5, 16)


def _traffic(config: AnyConfig, machine: Machine, blocks: int) -> np.ndarray:
    """Return, of a tile's program, cycles of the shared memory port, bytes loaded, instructions of a warp, bytes
    added.
    """
    program = program_of(config, [TileBlocks(blocks)])
    tables = costs(program, machine)
    port = loaded = stored = issued = added = 0
    for actor in program.actors:
        for kind, x, y, z, _ in actor.ops.tolist():
            if kind == Op.WGMMA:
                port += int(tables.gemm[x, 0] * tables.gemm[x, 2])
            elif kind == Op.VECTOR:
                work = program.works[x]
                port += int(tables.work[x, 0] * tables.work[x, SMEM])
                issued += work.fma + work.alu + work.mufu + work.convert + work.shuffle + work.other
            elif kind == Op.LOAD:
                loaded += y
            elif kind == Op.STORE:
                stored += x
                added += x if z else 0
            elif kind == Op.REDUCE:
                added += x
    smem = port / TICKS + (loaded + stored) / machine["smem_bytes_per_cycle"]
    return np.array([smem, loaded, issued, added])


def roofline(
    problem: AttentionProblem, config: AnyConfig, machine: Machine, clock_mhz: float | None = None
) -> Roofline:
    """Lower bounds of the busiest CTA, whose blocks are at least the average: of each resource what blocks need.

    ``clock_mhz``, the maximum by default, is what HBM's time is counted in.
    """
    blocks = sum(tile.blocks for tile in longest_cta(problem, config, int(machine["sms"])))
    total = sum(tile.blocks for tile in all_tiles(problem, config))
    config = launched(problem, config)
    smem, size, issue, added = _traffic(config, machine, 5) - _traffic(config, machine, 4)
    clock = clock_mhz or machine["max_clock_mhz"]
    return Roofline(
        blocks * tensor_cycles_per_block(config, machine),
        blocks * mufu_cycles_per_block(config, machine),
        blocks * smem,
        total / machine["sms"] * size / machine["l2_bytes_per_cycle"],
        hbm_cycles(problem, config, machine, clock),
        blocks * issue,
        blocks * added / machine["reduce_bytes_per_ns"] * clock / 1000,
    )


def closed_form(problem: AttentionProblem, config: Config, machine: Machine) -> float:
    """Cycles of a launch: blocks * max(tensor, 1.5 MUFU) + 3500 per tile + launch, on the busiest SM."""
    tiles = longest_cta(problem, config, int(machine["sms"]))
    per_block = max(tensor_cycles_per_block(config, machine), CLOSED_FORM_MUFU * mufu_cycles_per_block(config, machine))
    blocks = sum(tile.blocks for tile in tiles)
    return blocks * per_block + CLOSED_FORM_TILE_CYCLES * len(tiles) + machine["launch_cycles"]
