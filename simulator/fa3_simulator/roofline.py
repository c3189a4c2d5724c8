"""Simple models that are printed beside the simulation: bounds that no schedule can beat, and a closed form.

:func:`lower_bound` holds for any tile and schedule, :func:`roofline` for the tiles of one configuration, and
:func:`closed_form` is an estimate with two fitted constants. The simulation itself is :mod:`fa3_simulator.run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fa3_kernels.plan.barriers import WARP_THREADS
from fa3_kernels.plan.config import WARPGROUP_ROWS
from fa3_reference.problem import AttentionProblem
from fa3_simulator.costs import SMEM, TICKS, costs
from fa3_simulator.cta import AnyConfig, SimulatedKernel, kernel_of
from fa3_simulator.launch import hbm_cycles, visible_pairs
from fa3_simulator.machine import Machine
from fa3_simulator.program import Op
from fa3_simulator.schedules import TileBlocks

# Fitted on 20 published H100 timings of FlashAttention-3 (FlashGPU-Sim, arXiv 2609.15311): 6.1 % mean error there.
CLOSED_FORM_MUFU = 1.5
CLOSED_FORM_TILE_CYCLES = 3500
SUB_CORES = 4  # sub-cores of an SM, each with a special-function unit


@dataclass(frozen=True, slots=True)
class Roofline:
    """Cycles that each resource needs if nothing else has to be waited for; ``binds`` names the largest.

    Resources are tensor, mufu, smem, l2, hbm, issue of a warp's instructions, and reduce, additions to global memory.
    """

    needs: Mapping[str, float]

    @property
    def binds(self) -> str:
        return max(self.needs, key=lambda name: self.needs[name])

    @property
    def cycles(self) -> float:
        return self.needs[self.binds]


def tensor_cycles_per_block(config: AnyConfig, machine: Machine) -> float:
    """Return the tensor core's cycles for all GEMMs of one tile and one block, at full rate."""
    kernel = kernel_of(config)
    narrow = kernel.gemms // 2  # GEMMs over the channels of V; the others are over those of Q and K
    channels = (kernel.gemms - narrow) * config.head_dim + narrow * getattr(config, "head_dim_v", config.head_dim)
    flops = 2.0 * channels * config.tile_m * config.tile_n
    return flops / (machine["tensor_flops_16bit"] * (16 // config.bits))


def mufu_cycles_per_block(config: AnyConfig, machine: Machine) -> float:
    """Return the special-function unit's cycles for one tile and one block: one exponential per score, at full rate."""
    per_warp = config.tile_n / 2  # instructions of 32 lanes for 16 rows
    return per_warp * machine["mufu_cycles"] * (config.tile_m // WARPGROUP_ROWS)


def lower_bound(
    problem: AttentionProblem, config: AnyConfig, machine: Machine, clock_mhz: float | None = None
) -> Roofline:
    """Return the SM cycles that no tile and no schedule can beat, for a forward or a backward as ``config`` is.

    They are those of GEMMs and exponentials of all visible pairs, evenly over all SMs, and of HBM for every tensor
    once, each at full rate. Resources whose load depends on the tile are left out.
    """
    kernel = kernel_of(config)
    pairs = visible_pairs(problem) * problem.nheads / machine["sms"]
    narrow = kernel.gemms // 2
    channels = narrow * problem.head_dim_v + (kernel.gemms - narrow) * problem.head_dim  # dP and dV have those of V
    tensor = pairs * 2 * channels / (machine["tensor_flops_16bit"] * (16 // config.bits))
    exponentials = pairs / (WARP_THREADS * SUB_CORES) * machine["mufu_cycles"]
    clock = clock_mhz or machine["max_clock_mhz"]
    hbm = hbm_cycles(kernel.launch(problem, machine, clock).hbm_bytes, machine, clock)
    return Roofline({"tensor": tensor, "mufu": exponentials, "hbm": hbm})


def _traffic(kernel: SimulatedKernel, machine: Machine, blocks: int) -> np.ndarray:
    """Return four numbers of the program of a tile with so many blocks: cycles of the shared memory port, bytes loaded,
    instructions of a warp, and bytes added to global memory.
    """
    program = kernel.program([TileBlocks(blocks)])
    tables = costs(program, machine)
    ops = np.concatenate([actor.ops for actor in program.actors])
    gemms, works, loads, stores, adds = (
        ops[ops[:, 0] == kind, 1:] for kind in (Op.WGMMA, Op.VECTOR, Op.LOAD, Op.STORE, Op.REDUCE)
    )
    of_gemm = tables.gemm[:, 0] * tables.gemm[:, 2]
    of_work = tables.work[:, 0] * tables.work[:, SMEM]
    issued = np.array([w.fma + w.alu + w.mufu + w.convert + w.shuffle + w.other for w in program.works])
    port = int(of_gemm[gemms[:, 0]].sum() + of_work[works[:, 0]].sum())
    loaded = int(loads[:, 1].sum())
    smem = port / TICKS + (loaded + int(stores[:, 0].sum())) / machine["smem_bytes_per_cycle"]
    added = int(stores[stores[:, 2] > 0, 0].sum() + adds[:, 0].sum())
    return np.array([smem, loaded, int(issued[works[:, 0]].sum()), added])


def roofline(
    problem: AttentionProblem, config: AnyConfig, machine: Machine, clock_mhz: float | None = None
) -> Roofline:
    """Return lower bounds for the tiles of a configuration: what its blocks need of each resource.

    They are those of the busiest CTA, but for L2 and HBM, which all CTAs share. Times in nanoseconds become cycles of
    ``clock_mhz``, the machine's maximum by default.
    """
    clock = clock_mhz or machine["max_clock_mhz"]
    kernel = kernel_of(config).compiled(problem)
    launch = kernel.launch(problem, machine, clock)
    blocks = sum(tile.blocks for tile in launch.longest(int(machine["sms"])))
    smem, size, issue, added = _traffic(kernel, machine, 5) - _traffic(kernel, machine, 4)  # of one block more
    return Roofline(
        {
            "tensor": blocks * tensor_cycles_per_block(config, machine),
            "mufu": blocks * mufu_cycles_per_block(config, machine),
            "smem": blocks * smem,
            "l2": launch.blocks / machine["sms"] * size / machine["l2_bytes_per_cycle"],
            "hbm": hbm_cycles(launch.hbm_bytes, machine, clock),
            "issue": blocks * issue,
            "reduce": blocks * added / machine["reduce_bytes_per_ns"] * clock / 1000,
        }
    )


def closed_form(problem: AttentionProblem, config: AnyConfig, machine: Machine) -> float:
    """Return the cycles of a launch by a closed form, on the busiest SM; it was fitted to forwards.

    It is blocks * max(tensor, 1.5 MUFU) + 3500 per tile + launch, with the cycles of a block on both resources.
    """
    tiles = kernel_of(config).launch(problem, machine, machine["max_clock_mhz"]).longest(int(machine["sms"]))
    per_block = max(tensor_cycles_per_block(config, machine), CLOSED_FORM_MUFU * mufu_cycles_per_block(config, machine))
    blocks = sum(tile.blocks for tile in tiles)
    return blocks * per_block + CLOSED_FORM_TILE_CYCLES * len(tiles) + machine["launch_cycles"]
