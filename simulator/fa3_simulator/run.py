"""A whole kernel: row tiles handed to the SMs, the longest CTA simulated.

Tiles go longest first to the CTA that is free first, as the static schedule of :mod:`fa3_kernels.gluon` and the dynamic
scheduler of FlashAttention-3 do. Time is launch + the CTA with the most work; long CTAs are extrapolated from two short runs,
because a steady state is affine in blocks and in tiles.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from fa3_kernels.tiles import Mask
from fa3_simulator import interpreter
from fa3_simulator.costs import TICKS, costs
from fa3_simulator.forward import forward
from fa3_simulator.machine import Machine
from fa3_simulator.schedules import Schedule, Tile

EXACT_BLOCKS = 256  # CTAs of at most this many key blocks are simulated in full
SHORT, LONG = 12, 24  # key blocks of the two short runs


@dataclass(frozen=True, slots=True)
class Shape:
    """What a forward kernel is asked to do; causal is bottom-right aligned."""

    batch: int
    nheads: int
    seqlen_q: int
    seqlen_k: int
    causal: bool = False

    def flops(self, head_dim: int) -> float:
        """4 * seqlen_q * seqlen_k * head_dim * nheads * batch, halved when causal: the field's convention."""
        full = 4.0 * self.batch * self.nheads * self.seqlen_q * self.seqlen_k * head_dim
        return full / 2 if self.causal else full


@dataclass(frozen=True, slots=True)
class Estimate:
    """Simulated time of a launch.

    ``cycles`` counts from launch to the end of the last CTA; ``tensor_cycles`` is the tensor work of that CTA.
    """

    cycles: float
    cta_cycles: float
    tensor_cycles: float
    mufu_cycles: float
    tiles: tuple[Tile, ...]
    clock_mhz: float

    @property
    def seconds(self) -> float:
        return self.cycles / (self.clock_mhz * 1e6)

    @property
    def tensor_efficiency(self) -> float:
        """Tensor work over time, of the longest CTA."""
        return self.tensor_cycles / self.cta_cycles


def row_tiles(shape: Shape, schedule: Schedule) -> list[Tile]:
    """Row tiles of one head, top to bottom; those without a key have 0 blocks."""
    mask = Mask(shape.seqlen_k, shape.seqlen_k - shape.seqlen_q, -1, 0 if shape.causal else -1)
    tiles = []
    for first in range(0, shape.seqlen_q, schedule.tile_m):
        last = min(first + schedule.tile_m, shape.seqlen_q) - 1
        stop = shape.seqlen_k if not shape.causal else min(shape.seqlen_k, last + mask.offset + 1)
        blocks = -(-max(stop, 0) // schedule.tile_n)
        unmasked = shape.seqlen_k // schedule.tile_n
        if shape.causal:
            unmasked = min(unmasked, max(first + mask.offset + 1, 0) // schedule.tile_n)
        tiles.append(Tile(blocks, blocks - min(unmasked, blocks)))
    return tiles


def longest_cta(shape: Shape, schedule: Schedule, ctas: int, tile_cost: float = 0.6) -> tuple[Tile, ...]:
    """Tiles of the CTA with the most work, when tiles go longest first to the CTA that is free first."""
    per_head = [tile for tile in row_tiles(shape, schedule) if tile.blocks]
    if not per_head:
        return ()
    heads = shape.batch * shape.nheads
    free = [(0.0, cta) for cta in range(min(ctas, heads * len(per_head)))]
    assigned: list[list[Tile]] = [[] for _ in free]
    for tile in sorted(per_head, reverse=True):
        for _ in range(heads):
            time, cta = heapq.heappop(free)
            assigned[cta].append(tile)
            heapq.heappush(free, (time + tile.blocks + tile_cost, cta))
    return tuple(assigned[max(free)[1]])


@lru_cache(maxsize=4096)
def _simulate(
    schedule: Schedule, tiles: tuple[Tile, ...], machine: Machine, clock_mhz: float
) -> tuple[float, float, float]:
    """CTA cycles, tensor cycles and MUFU cycles."""
    program = forward(schedule, list(tiles))
    timing = interpreter.simulate(program, costs(program, machine, clock_mhz))
    return timing.end / TICKS, timing.busy["tensor"] / TICKS, timing.busy["mufu"] / TICKS


def _cta(schedule: Schedule, tiles: tuple[Tile, ...], machine: Machine, clock: float) -> tuple[float, float, float]:
    """As :func:`_simulate`; extrapolated from short runs where the CTA is long."""
    if sum(tile.blocks for tile in tiles) <= EXACT_BLOCKS:
        return _simulate(schedule, tiles, machine, clock)
    total = [0.0, 0.0, 0.0]
    for tile, count in Counter(tiles).items():
        points = {
            (blocks, n): _simulate(schedule, (Tile(blocks, min(tile.masked, blocks)),) * n, machine, clock)
            for blocks in (min(tile.blocks, SHORT), min(tile.blocks, LONG))
            for n in (1, 3)
        }
        short, long = min(tile.blocks, SHORT), min(tile.blocks, LONG)
        for i in range(3):
            per_tile = {b: (points[b, 3][i] - points[b, 1][i]) / 2 for b in (short, long)}
            slope = (per_tile[long] - per_tile[short]) / (long - short) if long > short else 0.0
            total[i] += count * (per_tile[long] + slope * (tile.blocks - long))
    fixed = [
        _simulate(schedule, (Tile(SHORT),), machine, clock)[i]
        - (_simulate(schedule, (Tile(SHORT),) * 3, machine, clock)[i] - _simulate(schedule, (Tile(SHORT),), machine, clock)[i]) / 2
        for i in range(3)
    ]  # fmt: skip
    return total[0] + fixed[0], total[1] + fixed[1], total[2] + fixed[2]


def estimate(shape: Shape, schedule: Schedule, machine: Machine, clock_mhz: float | None = None) -> Estimate:
    """Simulate a launch.

    Parameters
    ----------
    shape, schedule, machine
    clock_mhz : float, optional
        SM clock, the machine's maximum by default.

    Returns
    -------
    Estimate
    """
    clock = clock_mhz or machine["max_clock_mhz"]
    tiles = longest_cta(shape, schedule, int(machine["sms"]))
    cta, tensor, mufu = _cta(schedule, tiles, machine, clock) if tiles else (0.0, 0.0, 0.0)
    return Estimate(cta + machine["launch_cycles"], cta, tensor, mufu, tiles, clock)
