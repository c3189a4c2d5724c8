"""Simple models that are printed beside the simulation: bounds that no schedule can beat, and a closed form.

:func:`lower_bound` holds for any tile and schedule, :func:`roofline` for the tiles of one configuration, and
:func:`closed_form` is an estimate with two fitted constants. The simulation itself is :mod:`fa3_simulator.run`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa3_kernels.plan.barriers import WARP_THREADS
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_reference.problem import AttentionProblem
from fa3_simulator.costs import SMEM, TICKS, costs
from fa3_simulator.cta import AnyConfig, kernel_of
from fa3_simulator.machine import Machine
from fa3_simulator.program import Op
from fa3_simulator.run import all_tiles, hbm_cycles, launched, longest_cta, visible_pairs
from fa3_simulator.schedules import TileBlocks

# Fitted on 20 published H100 timings of FlashAttention-3 (FlashGPU-Sim, arXiv 2609.15311): 6.1 % mean error there.
CLOSED_FORM_MUFU = 1.5
CLOSED_FORM_TILE_CYCLES = 3500
SUB_CORES = 4  # sub-cores of an SM, each with a special-function unit


@dataclass(frozen=True, slots=True)
class Roofline:
    """Cycles that each resource needs if nothing else has to be waited for; ``binds`` names the largest."""

    tensor: float
    mufu: float
    smem: float
    l2: float
    hbm: float
    issue: float  # issue of a warp's instructions
    reduce: float  # additions to global memory

    @property
    def binds(self) -> str:
        return max(self.__dataclass_fields__, key=lambda name: getattr(self, name))

    @property
    def cycles(self) -> float:
        return getattr(self, self.binds)


def tensor_cycles_per_block(config: AnyConfig, machine: Machine) -> float:
    """Return the tensor core's cycles for all GEMMs of one tile and one block, at full rate."""
    gemms, bits = _gemms(config)
    narrow = gemms // 2  # GEMMs over the channels of V; the others are over those of Q and K
    channels = (gemms - narrow) * config.head_dim + narrow * getattr(config, "head_dim_v", config.head_dim)
    flops = 2.0 * channels * config.tile_m * config.tile_n
    return flops / (machine["tensor_flops_16bit"] * (16 // bits))


def mufu_cycles_per_block(config: AnyConfig, machine: Machine) -> float:
    """Return the special-function unit's cycles for one tile and one block: one exponential per score, at full rate."""
    per_warp = config.tile_n / 2  # instructions of 32 lanes for 16 rows
    return per_warp * machine["mufu_cycles"] * (config.tile_m // WARPGROUP_ROWS)


def lower_bound(
    problem: AttentionProblem, config: AnyConfig, machine: Machine, clock_mhz: float | None = None
) -> Roofline:
    """Return the SM cycles that no tile and no schedule can beat, for a forward or a backward as ``config`` is.

    They are those of GEMMs and exponentials of all visible pairs, evenly over all SMs, and of HBM for every tensor
    once, each at full rate. Resources whose load depends on the tile are 0.
    """
    gemms, bits = _gemms(config)
    pairs = visible_pairs(problem) * problem.nheads / machine["sms"]
    channels = gemms // 2 * problem.head_dim_v + (gemms - gemms // 2) * problem.head_dim  # dP and dV have those of V
    tensor = pairs * 2 * channels / (machine["tensor_flops_16bit"] * (16 // bits))
    exponentials = pairs / (WARP_THREADS * SUB_CORES) * machine["mufu_cycles"]
    hbm = hbm_cycles(problem, config, machine, clock_mhz or machine["max_clock_mhz"])
    return Roofline(tensor, exponentials, 0.0, 0.0, hbm, 0.0, 0.0)


def _gemms(config: AnyConfig) -> tuple[int, int]:
    """Return the number of GEMMs of a tile and a block, two forward and five backward, and their operands' bits."""
    return (2, config.bits) if isinstance(config, Config) else (5, 16)


def _traffic(config: AnyConfig, machine: Machine, blocks: int) -> np.ndarray:
    """Return four numbers of the program of a tile with so many blocks: cycles of the shared memory port, bytes loaded,
    instructions of a warp, and bytes added to global memory.
    """
    program = kernel_of(config).program([TileBlocks(blocks)])
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
    """Return lower bounds for the tiles of a configuration: what its blocks need of each resource.

    They are those of the busiest CTA, but for L2 and HBM, which all CTAs share. Times in nanoseconds become cycles of
    ``clock_mhz``, the machine's maximum by default.
    """
    blocks = sum(tile.blocks for tile in longest_cta(problem, config, int(machine["sms"])))
    total = sum(tile.blocks for tile in all_tiles(problem, config))
    config = launched(problem, config)
    smem, size, issue, added = _traffic(config, machine, 5) - _traffic(config, machine, 4)  # of one block more
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
    """Return the cycles of a forward launch by a closed form, on the busiest SM.

    It is blocks * max(tensor, 1.5 MUFU) + 3500 per tile + launch, with the cycles of a block on both resources.
    """
    tiles = longest_cta(problem, config, int(machine["sms"]))
    per_block = max(tensor_cycles_per_block(config, machine), CLOSED_FORM_MUFU * mufu_cycles_per_block(config, machine))
    blocks = sum(tile.blocks for tile in tiles)
    return blocks * per_block + CLOSED_FORM_TILE_CYCLES * len(tiles) + machine["launch_cycles"]
