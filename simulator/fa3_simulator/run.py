"""A whole kernel: row tiles handed to the SMs, the longest CTA simulated.

Tiles go longest first to the CTA that is free first, as the static schedule of :mod:`fa3_kernels.gluon` and the dynamic
scheduler of FlashAttention-3 do. Time is launch + the CTA with the most work, or what HBM needs for every tensor once; long
CTAs are extrapolated from two short runs, because a steady state is affine in blocks and in tiles.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.config import WARPGROUP_ROWS
from fa3_kernels.plan.tiles import Mask, padded_group
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
    """What a kernel is asked to do; causal is bottom-right aligned.

    Parameters
    ----------
    batch, nheads, seqlen_q, seqlen_k : int
        ``nheads`` of Q.
    causal : bool
    nheads_kv : int
        Heads of K and V, which must divide ``nheads``; 0, as many.
    pack_gqa : bool
        Rows of a tile are (position, head of the group), so that the heads of a group read its K and V once.

    Raises
    ------
    ValueError
        Where the heads of K and V do not divide those of Q.
    """

    batch: int
    nheads: int
    seqlen_q: int
    seqlen_k: int
    causal: bool = False
    nheads_kv: int = 0
    pack_gqa: bool = False

    def __post_init__(self) -> None:
        if self.nheads % self.kv_heads:
            raise ValueError(f"nheads must be a multiple of nheads_kv, got {self.nheads} and {self.nheads_kv}")

    @property
    def kv_heads(self) -> int:
        return self.nheads_kv or self.nheads

    @property
    def tile_heads(self) -> int:
        """Heads of the whole batch with row tiles of their own."""
        return self.batch * (self.kv_heads if self.pack_gqa else self.nheads)

    def flops(self, head_dim: int) -> float:
        """4 * seqlen_q * seqlen_k * head_dim * nheads * batch, halved when causal: the field's convention."""
        full = 4.0 * self.batch * self.nheads * self.seqlen_q * self.seqlen_k * head_dim
        return full / 2 if self.causal else full

    def bytes(self, schedule: AnySchedule) -> float:
        """What a launch moves at least, every tensor once; a 16-bit output forward, an fp32 dQ backward."""
        rows, keys = self.nheads * self.seqlen_q, self.kv_heads * self.seqlen_k
        if isinstance(schedule, Schedule):
            each = rows * (schedule.bits / 8 + 2) + keys * 2 * schedule.bits / 8  # Q, O; K, V
        else:
            each = rows * (2 + 2 + 4) + keys * 4 * 2  # Q, dO, dQ; K, V, dK, dV
        return self.batch * schedule.head_dim * each


@dataclass(frozen=True, slots=True)
class Estimate:
    """Simulated time of a launch.

    ``cycles`` counts from launch to the end of the last CTA, or to when HBM has moved every tensor once, if that is later;
    ``tensor_cycles`` is the tensor work of that CTA.
    """

    cycles: float
    cta_cycles: float
    hbm_cycles: float
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
    """Row tiles of one head, of K and V where rows are packed, top to bottom; those without a key have 0 blocks.

    Raises
    ------
    ValueError
        For more than 64 packed heads: our kernel pads them to a power of two, all in one warpgroup.
    """
    mask = Mask(shape.seqlen_k, shape.seqlen_k - shape.seqlen_q, -1, 0 if shape.causal else -1)
    heads = shape.nheads // shape.kv_heads if shape.pack_gqa else 1
    if schedule.kernel == "gluon":
        heads = padded_group(heads)
        if heads > WARPGROUP_ROWS:
            raise ValueError(
                f"our kernels pack at most {WARPGROUP_ROWS} heads to one of K and V, got {shape.nheads // shape.kv_heads}"
            )
    tiles = []
    for row in range(0, shape.seqlen_q * heads, schedule.tile_m):
        first, last = row // heads, (min(row + schedule.tile_m, shape.seqlen_q * heads) - 1) // heads
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
    """Key tiles of one head and the query blocks that see some key of each; backward.

    Raises
    ------
    ValueError
        For packed heads, which the backward kernel does not know.
    """
    if shape.pack_gqa:
        raise ValueError("the backward kernel does not pack the heads of a group")
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
    heads = shape.tile_heads
    free = [(0.0, cta) for cta in range(min(ctas, heads * len(per_head)))]
    assigned: list[list[Tile]] = [[] for _ in free]
    for tile in sorted(per_head, reverse=True):
        for _ in range(heads):
            time, cta = heapq.heappop(free)
            assigned[cta].append(tile)
            heapq.heappush(free, (time + tile.blocks + tile_cost, cta))
    return tuple(assigned[max(free)[1]])


def hbm_cycles(shape: Shape, schedule: AnySchedule, machine: Machine, clock_mhz: float) -> float:
    """SM cycles in which HBM moves every tensor of a launch once, at the rate that all SMs together reach; L2 holds none of them before."""
    return shape.bytes(schedule) / (machine["hbm_bytes_per_ns"] * machine["sms"]) * clock_mhz / 1000


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
    """As :func:`_simulate`; extrapolated from short runs where the CTA is long. Without persistence, one CTA a tile after another."""
    if isinstance(schedule, Schedule) and not schedule.persistent and len(tiles) > 1:
        each = [count * np.array(_cta(schedule, (tile,), machine, clock)) for tile, count in Counter(tiles).items()]
        return Cycles(*np.sum(each, axis=0).tolist())
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
    hbm = hbm_cycles(shape, schedule, machine, clock)
    cycles = max(found.cta, hbm) + machine["launch_cycles"]
    return Estimate(cycles, found.cta, hbm, found.tensor, found.mufu, tiles, clock)
