"""Bounds and formulas printed beside the simulation: the roofline no schedule can beat, and a two-constant closed form."""

from __future__ import annotations

from dataclasses import dataclass

from fa3_simulator.costs import WARPGROUP_ROWS
from fa3_simulator.machine import Machine
from fa3_simulator.run import Shape, longest_cta, row_tiles
from fa3_simulator.schedules import Schedule, softmax_work

# Fitted on 20 published H100 timings of FlashAttention-3 (FlashGPU-Sim, arXiv 2609.15311): 6.1 % mean error there.
CLOSED_FORM_MUFU, CLOSED_FORM_TILE_CYCLES = 1.5, 3500


@dataclass(frozen=True, slots=True)
class Roofline:
    """Cycles of the longest CTA on each resource if it alone had to be waited for; ``binds`` is the largest."""

    tensor: float
    mufu: float
    l2: float
    vector: float

    @property
    def binds(self) -> str:
        return max(self.__dataclass_fields__, key=lambda name: getattr(self, name))

    @property
    def cycles(self) -> float:
        return getattr(self, self.binds)


def tensor_cycles_per_block(schedule: Schedule, machine: Machine) -> float:
    """Both GEMMs of one row tile and one key block."""
    flops = 4.0 * schedule.tile_m * schedule.tile_n * schedule.head_dim
    return flops / (machine["tensor_flops_16bit"] * (16 // schedule.bits))


def mufu_cycles_per_block(schedule: Schedule, machine: Machine) -> float:
    """One exponential per score, at full rate."""
    per_warp = schedule.tile_n / 2  # instructions for 16 rows
    return per_warp * machine["mufu_cycles"] * (schedule.tile_m // WARPGROUP_ROWS)


def roofline(shape: Shape, schedule: Schedule, machine: Machine) -> Roofline:
    """Lower bounds of the busiest CTA, whose blocks are at least the average."""
    blocks = sum(tile.blocks for tile in longest_cta(shape, schedule, int(machine["sms"])))
    total = shape.batch * shape.nheads * sum(tile.blocks for tile in row_tiles(shape, schedule))
    average = total / machine["sms"]
    work = softmax_work(schedule)
    issue = sum(w.fma + w.alu + w.mufu + w.convert for w in (work["max"], work["exp"], work["convert"]))
    size = 2 * schedule.tile_n * schedule.head_dim * schedule.bits / 8
    return Roofline(
        blocks * tensor_cycles_per_block(schedule, machine),
        blocks * mufu_cycles_per_block(schedule, machine),
        average * size / machine["l2_bytes_per_cycle"],
        blocks * issue * (schedule.tile_m // WARPGROUP_ROWS),
    )


def closed_form(shape: Shape, schedule: Schedule, machine: Machine) -> float:
    """Cycles of a launch: blocks * max(tensor, 1.5 MUFU) + 3500 per tile + launch, on the busiest SM."""
    tiles = longest_cta(shape, schedule, int(machine["sms"]))
    per_block = max(
        tensor_cycles_per_block(schedule, machine), CLOSED_FORM_MUFU * mufu_cycles_per_block(schedule, machine)
    )
    blocks = sum(tile.blocks for tile in tiles)
    return blocks * per_block + CLOSED_FORM_TILE_CYCLES * len(tiles) + machine["launch_cycles"]
