"""A whole kernel: row tiles handed to the SMs, the longest CTA simulated.

Tiles go longest first to the CTA that is free first, as the static schedule of :mod:`fa3_kernels.gluon` and the dynamic
scheduler of FlashAttention-3 do. Time is launch + the CTA with the most work; long CTAs are extrapolated from two short runs,
because a steady state is affine in blocks and in tiles.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fa3_kernels.tiles import Mask
from fa3_simulator import interpreter
from fa3_simulator.backward import BackwardSchedule, backward
from fa3_simulator.costs import TICKS, costs
from fa3_simulator.forward import forward
from fa3_simulator.machine import Machine
from fa3_simulator.program import Program
from fa3_simulator.schedules import Schedule, Tile, ships_integer_max

EXACT_BLOCKS = 256  # CTAs of at most this many key blocks are simulated in full
SHORT, LONG = 12, 24  # key blocks of the two short runs


AnySchedule = Schedule | BackwardSchedule


class Cycles(NamedTuple):
    """Of one CTA: all, and those in which the tensor core and the special-function unit work."""

    cta: float
    tensor: float
    mufu: float


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is asked to do; causal is bottom-right aligned."""

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
        if shape.causal and schedule.masks_every_block:
            unmasked = 0
        tiles.append(Tile(blocks, blocks - min(unmasked, blocks)))
    return tiles


def key_tiles(shape: Shape, schedule: BackwardSchedule) -> list[Tile]:
    """Key tiles of one head and the query blocks that see some key of each; backward."""
    blocks = -(-shape.seqlen_q // schedule.tile_m)
    offset = shape.seqlen_k - shape.seqlen_q
    tiles = []
    for first in range(0, shape.seqlen_k, schedule.tile_n):
        unseen = max(first - offset, 0) // schedule.tile_m if shape.causal else 0  # query blocks above the diagonal
        tiles.append(Tile(max(blocks - unseen, 0)))
    return tiles


def launched(shape: Shape, schedule: AnySchedule) -> AnySchedule:
    """The schedule as compiled for a shape: how row maxima are taken depends on whether keys are hidden."""
    if not isinstance(schedule, Schedule) or schedule.integer_max is not None:
        return schedule
    return replace(schedule, integer_max=ships_integer_max(schedule, shape.causal))


def head_tiles(shape: Shape, schedule: AnySchedule) -> list[Tile]:
    """Tiles of one head: row tiles forward, key tiles backward."""
    return row_tiles(shape, schedule) if isinstance(schedule, Schedule) else key_tiles(shape, schedule)


def longest_cta(shape: Shape, schedule: AnySchedule, ctas: int, tile_cost: float = 0.6) -> tuple[Tile, ...]:
    """Tiles of the CTA with the most work, when tiles go longest first to the CTA that is free first."""
    per_head = [tile for tile in head_tiles(shape, schedule) if tile.blocks]
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


def program_of(schedule: AnySchedule, tiles: Sequence[Tile]) -> Program:
    """Program of one CTA that works through ``tiles``: row tiles forward, key tiles backward.

    Raises
    ------
    ValueError
        For a tile without a block.
    """
    if isinstance(schedule, Schedule):
        return forward(schedule, list(tiles))
    return backward(schedule, [tile.blocks for tile in tiles])


@lru_cache(maxsize=4096)
def _simulate(schedule: AnySchedule, tiles: tuple[Tile, ...], machine: Machine, clock_mhz: float) -> Cycles:
    """One CTA, in full."""
    program = program_of(schedule, tiles)
    timing = interpreter.simulate(program, costs(program, machine, clock_mhz))
    return Cycles(timing.end / TICKS, timing.busy["tensor"] / TICKS, timing.busy["mufu"] / TICKS)


def _cta(schedule: AnySchedule, tiles: tuple[Tile, ...], machine: Machine, clock: float) -> Cycles:
    """As :func:`_simulate`; extrapolated from short runs where the CTA is long."""
    if sum(tile.blocks for tile in tiles) <= EXACT_BLOCKS:
        return _simulate(schedule, tiles, machine, clock)

    def run(tile: Tile, blocks: int, count: int) -> np.ndarray:
        short = Tile(blocks, min(tile.masked, blocks))
        return np.array(_simulate(schedule, (short,) * count, machine, clock))

    total = run(Tile(SHORT), SHORT, 1) - (run(Tile(SHORT), SHORT, 3) - run(Tile(SHORT), SHORT, 1)) / 2  # start and end
    for tile, count in Counter(tiles).items():
        short, long = min(tile.blocks, SHORT), min(tile.blocks, LONG)
        some, more = ((run(tile, n, 3) - run(tile, n, 1)) / 2 for n in (short, long))
        slope = (more - some) / (long - short) if long > short else np.zeros(3)
        total = total + count * (more + slope * (tile.blocks - long))
    return Cycles(*total.tolist())


def estimate(shape: Shape, schedule: AnySchedule, machine: Machine, clock_mhz: float | None = None) -> Estimate:
    """Simulate a launch; of a backward schedule its main kernel.

    Parameters
    ----------
    shape, machine
    schedule : Schedule or BackwardSchedule
    clock_mhz : float, optional
        SM clock, the machine's maximum by default.

    Returns
    -------
    Estimate
    """
    clock = clock_mhz or machine["max_clock_mhz"]
    schedule = launched(shape, schedule)
    tiles = longest_cta(shape, schedule, int(machine["sms"]))
    found = _cta(schedule, tiles, machine, clock) if tiles else Cycles(0.0, 0.0, 0.0)
    return Estimate(found.cta + machine["launch_cycles"], found.cta, found.tensor, found.mufu, tiles, clock)
