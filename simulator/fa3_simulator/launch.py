"""What a launch of a kernel is: its tiles as they are handed out, its operations and bytes, and what CTAs wait for.

:mod:`fa3_simulator.run` times a launch, of a kernel that ships as of one that somebody described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from fa3_kernels.plan.choose import check_sizes
from fa3_kernels.plan.config import WARPGROUP_ROWS
from fa3_kernels.plan.tile_order import TILE_COST, assign
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_simulator.machine import Machine
from fa3_simulator.schedules import TileBlocks

MOST_TILES = 1 << 18  # tiles of 64 rows: handing out this many takes some seconds, and a ranking two minutes
Tiles = Iterable[int | TileBlocks]
Order = Literal["free first", "static", "in turn"]
# A function of the cycles of a block, and of a tile beside its blocks, in a CTA that runs alone; and of the tiles of
# the CTA that ends last, and its cycles alone. It returns the cycles of that CTA, and those that it waits for others.
Waits = Callable[[float, float, Sequence[TileBlocks], float], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch of a kernel is.

    Parameters
    ----------
    tiles : sequence of int or TileBlocks
        Blocks of each tile, in the order in which tiles are handed out.
    flops : float
        Operations that TFLOP/s are counted from.
    hbm_bytes : float
        Bytes that HBM moves.
    persistent : bool
        Whether a CTA works through many tiles; otherwise each tile has a CTA of its own.
    ctas : int
        CTAs of a persistent launch; 0: as many as there is room for.
    occupancy : int
        CTAs on an SM at a time; 0: as many as registers, shared memory and threads leave room for.
    order : {"free first", "static", "in turn"}
        Whether a tile goes to the CTA that is free first; to the one that would be if a tile took 0.6 blocks beside its
        own, as decided before the launch; or tiles go to the CTAs in turn.
    cluster : int
        CTAs of a cluster.
    around_cycles : float
        Cycles of the kernels in front and behind.
    tile_cost : float, optional
        Time of a tile beside its blocks, in blocks, by which tiles are handed out; None: as simulated.
    drains : bool
        Whether the next launch waits for the machine's ``drain_cycles`` too.
    dtype : {"fp16", "bf16", "e4m3"}
        Operands of the products, on which the clock under load depends.
    waits : callable, optional
        What CTAs wait for each other; without it they do not.
    mine : sequence of range
        Which of the tiles each CTA has, where that is known; then no ``order`` is.
    front_cycles : float
        Cycles of a kernel in front that makes the schedule of the main one; they count as the main kernel's.
    """

    tiles: Sequence[int | TileBlocks]
    flops: float = 0.0
    hbm_bytes: float = 0.0
    persistent: bool = True
    ctas: int = 0
    occupancy: int = 1
    order: Order = "free first"
    cluster: int = 1
    around_cycles: float = 0.0
    tile_cost: float | None = TILE_COST
    drains: bool = True
    dtype: Dtype = "bf16"
    waits: Waits | None = None
    mine: Sequence[range] = ()
    front_cycles: float = 0.0

    @property
    def blocks(self) -> int:
        """Blocks of all tiles."""
        return sum(tile.blocks for tile in tiles_of(self.tiles))

    def longest(self, ctas: int, tile_cost: float = TILE_COST) -> tuple[TileBlocks, ...]:
        """Return the tiles of the CTA with the most work, the first of several; () where there are no tiles.

        ``tile_cost`` is the time of a tile beside its blocks, in blocks.
        """
        price = TILE_COST if self.order == "static" else tile_cost
        handed = _handed_out(tuple(self.tiles), self.order, ctas, price, tuple(self.mine))
        return max(handed, key=lambda mine: sum(tile.blocks for tile in mine) + tile_cost * len(mine), default=())


def check_launch(problem: AttentionProblem, tiles_of: Literal["row", "key"], num_splits: int = 1) -> None:
    """Raise ValueError for a launch that our kernels could not count, or of too many tiles: row tiles are those of a
    forward, key tiles those of a backward.
    """
    # sinks cost a forward nothing, and what a cache costs is in fa3_simulator.pages
    known = ("sinks", "attention_chunk", "paged", "seqused_k") if tiles_of == "row" else ()
    problem.check_plain("the simulator", frozenset(known))
    check_sizes(problem, num_splits)
    length = problem.seqlen_q if tiles_of == "row" else problem.seqlen_k
    tiles = problem.batch * problem.nheads * -(-length // WARPGROUP_ROWS) * num_splits
    if tiles > MOST_TILES:
        raise ValueError(
            f"launches of at most {MOST_TILES} {tiles_of} tiles of {WARPGROUP_ROWS} are simulated, got {tiles}"
        )


def tiles_of(tiles: Tiles) -> list[TileBlocks]:
    """Return tiles, of which some may be given by their blocks alone."""
    return [tile if isinstance(tile, TileBlocks) else TileBlocks(tile) for tile in tiles]


@lru_cache(maxsize=256)
def _handed_out(
    given: tuple[int | TileBlocks, ...], order: Order, ctas: int, price: float, mine: tuple[range, ...]
) -> tuple[tuple[TileBlocks, ...], ...]:
    """Return the tiles of every CTA; CTAs with equal tiles count once."""
    tiles = tiles_of(given)
    assigned: Sequence[Sequence[int]] = mine
    if order == "in turn":
        assigned = [range(first, len(tiles), ctas) for first in range(min(ctas, len(tiles)))]
    elif not mine:
        assigned = assign([tile.blocks for tile in tiles], ctas, price)[0]
    return tuple(dict.fromkeys(tuple(tiles[i] for i in mine) for mine in assigned))


def hbm_cycles(size: float, machine: Machine, clock_mhz: float) -> float:
    """Return the SM cycles in which HBM moves so many bytes, at the rate of all SMs, from a cold L2."""
    return size / (machine["hbm_bytes_per_ns"] * machine["sms"]) * clock_mhz / 1000


@lru_cache(maxsize=64)
def visible_pairs(problem: AttentionProblem) -> float:
    """Return the number of pairs of a query and a key that it sees, for one head and all sequences."""
    seen = (problem.visible_keys(np.arange(s.seqlen_q), s.seqlen_q, s.seqlen_k) for s in problem.sequences())
    return sum((float(np.maximum(stop - start, 0).sum()) for start, stop in seen), 0.0)


def flops(problem: AttentionProblem, head_dim: float) -> float:
    """Return 4 * seqlen_q * seqlen_k * head_dim * nheads * batch, halved when causal: the field's convention.

    Sequences of their own lengths are added up; with a window or chunks it is 4 * head_dim for every visible pair.
    """
    dense = sum(float(s.seqlen_q * s.seqlen_k) for s in problem.sequences()) / (2 if problem.causal else 1)
    pairs = visible_pairs(problem) if problem.is_windowed else dense
    return 4 * problem.nheads * pairs * head_dim
