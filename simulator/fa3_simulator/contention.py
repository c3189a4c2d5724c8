"""What the CTAs of a forward launch wait for each other at HBM, which one CTA alone has for itself.

A launch block by block: CTAs take their tiles, and load Q, K and V as far ahead as there are slots. What no CTA has
loaded before comes from HBM, which serves all of them at its rate, first come first served, and none of them faster
than a CTA alone; every tile's O goes there too, when its last block is loaded. A block and a tile take what they do in
the simulation of one CTA. Waited is how much later the last CTA ends than where HBM has no limit but that of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heapreplace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numba import njit

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.tile_order import TILE_COST, assign
from fa3_reference.problem import AttentionProblem
from fa3_simulator.machine import Machine
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.tile_queue import counter_heads, heads_at_a_time, static_order, takes_from_counter, tile_heads

OUTPUT_BYTES = 2  # of an element of O
MOST_BLOCKS = 64  # of a CTA, on average: later ones hardly wait
Tile = tuple[int, int, int]  # head of K and V, first key block, blocks


class LaunchTiles(NamedTuple):
    """Tiles in the order they are handed out, and those of every CTA; none where they are taken from a counter."""

    tiles: np.ndarray  # (tiles, 3), of Tile
    mine: np.ndarray  # indices of them, CTA after CTA
    begins: np.ndarray  # (ctas + 1,), of a CTA's among these
    ctas: int


class Steps(NamedTuple):
    """Holds what a CTA does, in cycles and bytes."""

    block: float  # of a key block
    tile: float  # of a tile beside its blocks
    latency: float
    stages: int
    crosses_tiles: bool
    half_bytes: int  # K or V of a key block
    query_bytes: int
    output_bytes: int


@njit(cache=True)
def ends(launch, steps, alone, shared):
    """When the last CTA ends; HBM serves ``alone`` bytes a cycle of one CTA, ``shared`` of all."""
    ctas = launch.ctas
    tiles = launch.tiles
    there = np.full((tiles[:, 0].max() + 1, (tiles[:, 1] + tiles[:, 2]).max(), 2), -1.0)  # K and V of a block in L2
    ready = [(0.0, cta) for cta in range(ctas)]  # when its next block can be loaded
    # that is loaded, and blocks of it that are not
    tile = np.full(ctas, -1)
    left = np.zeros(ctas, np.int64)
    # tiles and blocks
    taken = np.zeros(ctas, np.int64)
    loaded = np.zeros(ctas, np.int64)
    block_end = np.zeros((ctas, steps.stages))
    tile_end = np.zeros((ctas, 2))
    # end, Q and V of the block before
    last = np.zeros(ctas)
    query = np.zeros(ctas)
    value = np.zeros(ctas)
    served = 0.0
    handed = 0
    while ready:
        now, cta = ready[0]
        if tile[cta] < 0:
            place = handed
            if launch.mine.size:
                place = launch.begins[cta] + taken[cta]
            is_over = place == (launch.begins[cta + 1] if launch.mine.size else len(tiles))
            if is_over:
                heappop(ready)
                continue
            handed += 1
            tile[cta] = launch.mine[place] if launch.mine.size else place
            left[cta] = tiles[tile[cta], 2]
            free = tile_end[cta, taken[cta] % 2] if steps.crosses_tiles else last[cta]
            taken[cta] += 1
            if free > now:  # the slot of Q
                heapreplace(ready, (free, cta))
                continue
        head, first, blocks = tiles[tile[cta]]
        begin = max(last[cta], value[cta])
        if left[cta] == blocks:
            served = max(now, served) + steps.query_bytes / shared
            query[cta] = max(served, now + steps.query_bytes / alone) + steps.latency
            begin = max(last[cta], query[cta])
        left[cta] -= 1
        for half in range(2):
            arrives = there[head, first + left[cta], half]
            if arrives < 0:
                served = max(now, served) + steps.half_bytes / shared
                arrives = max(served, now + steps.half_bytes / alone) + steps.latency
                there[head, first + left[cta], half] = arrives
            arrives = max(arrives, now + steps.latency)
            if half == 0:
                begin = max(begin, arrives)
            else:
                value[cta] = arrives
        end = begin + steps.block
        if left[cta] == 0:
            end = max(end, value[cta]) + steps.tile
            served += steps.output_bytes / shared
            tile_end[cta, (taken[cta] - 1) % 2] = end
            tile[cta] = -1
        last[cta] = block_end[cta, loaded[cta] % steps.stages] = end
        loaded[cta] += 1
        heapreplace(ready, (max(now, block_end[cta, loaded[cta] % steps.stages]), cta))
    return last.max()


def waited_cycles(
    launch: LaunchTiles,
    problem: AttentionProblem,
    config: Config,
    machine: Machine,
    clock_mhz: float,
    *,
    block: float,
    tile: float,
) -> float:
    """Cycles that a launch takes longer because its CTAs share HBM.

    ``block``, ``tile``: cycles of a key block, and of a tile beside its blocks, of a CTA alone. Channels that a kernel
    adds to those of the tensors are not loaded.
    """
    size = config.bits // 8
    steps = Steps(
        block,
        tile,
        machine["memory_latency_ns"] * clock_mhz / 1000,
        config.num_stages,
        config.crosses_tiles,
        config.tile_n * (problem.head_dim + problem.head_dim_v) * size // 2,
        config.tile_m * problem.head_dim * size,
        config.tile_m * problem.head_dim_v * OUTPUT_BYTES,
    )
    alone = machine["hbm_lone_bytes_per_cycle"]
    shared = machine["hbm_bytes_per_ns"] * machine["sms"] * 1000 / clock_mhz
    return ends(launch, steps, alone, shared) - ends(launch, steps, alone, np.inf)


def launched_tiles(
    problem: AttentionProblem, config: Config, rows: Sequence[Sequence[TileBlocks]], ctas: int
) -> LaunchTiles:
    """The first tiles of a launch, of :data:`MOST_BLOCKS` a CTA; of a longer tile those loaded first.

    ``rows``: row tiles of a head, top to bottom, each with the parts that its keys are cut into.
    """
    blocks = [[part.blocks for part in row] for row in rows]
    parts = [[(end - n, n) for end, n in zip(accumulate(row), row, strict=True)] for row in blocks]
    order = [tile for tile in _order(problem, config, parts, ctas) if tile[2]]
    most = MOST_BLOCKS * ctas
    kept = int(np.searchsorted(np.cumsum([n for *_, n in order]), most)) + 1
    last_blocks = [(head, first + max(0, n - most), min(n, most)) for head, first, n in order[:kept]]
    tiles = np.array(last_blocks, np.int64).reshape(-1, 3)
    if len(tiles):
        tiles[:, 1] -= tiles[:, 1].min()  # blocks in front of them are loaded by nobody
    mine = assign(tiles[:, 2].tolist(), ctas, TILE_COST)[0] if config.traits.is_built_here else []
    begins = np.cumsum([0, *map(len, mine)])
    return LaunchTiles(tiles, np.array([i for each in mine for i in each], np.int64), begins, min(ctas, len(tiles)))


def _order(
    problem: AttentionProblem, config: Config, parts: Sequence[Sequence[tuple[int, int]]], ctas: int
) -> list[Tile]:
    """Tiles as they are handed out; ``parts`` of every row tile: first key block and blocks."""
    per_kv = 1 if config.pack_gqa else problem.group
    if config.traits.is_built_here:
        items = static_order(problem, config, ctas)
        return [(head // per_kv, *parts[item.m_block][item.split]) for head, item in items]
    heads = tile_heads(problem, config)
    if not takes_from_counter(problem, config):
        return [(head // per_kv, *part) for head in range(heads) for row in parts for part in row]
    sections = counter_heads(heads, heads_at_a_time(problem, config))
    return [(head // per_kv, *row[0]) for some in sections for row in reversed(parts) for head in some]
