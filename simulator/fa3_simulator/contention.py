"""How long the CTAs of a forward launch wait because they share HBM, which a simulated CTA has for itself.

:mod:`fa3_simulator.forward_launch` adds this to the time of the longest CTA. A launch is followed block by block: CTAs
take their tiles, and load Q, K and V as far ahead as they have slots. Data that no CTA has loaded before comes from
HBM, which serves all CTAs at its rate, first come first served, and none faster than a CTA that runs alone. Every
tile's O goes there too, when its last block is loaded. A block and a tile take as long as in the simulation of one CTA
(:mod:`fa3_simulator.cta`). The wait is how much later the last CTA ends than if HBM served each CTA as if it were
alone.
"""

from __future__ import annotations

from heapq import heappop, heapreplace
from typing import NamedTuple

import numpy as np
from numba import njit


class LaunchTiles(NamedTuple):
    """Tiles in the order in which they are handed out, and those of every CTA.

    ``mine`` is empty where a CTA takes the next tile when it is free.
    """

    tiles: np.ndarray  # int64 (tiles, 3): head of K and V, first key block, blocks
    mine: np.ndarray  # int64, indices of the tiles of every CTA, CTA after CTA
    begins: np.ndarray  # (ctas + 1,), where the indices of each CTA begin in ``mine``
    ctas: int


class Steps(NamedTuple):
    """Holds what a CTA does with a block and a tile, in cycles and bytes."""

    block: float  # cycles of a key block
    tile: float  # cycles of a tile beside its blocks
    latency: float  # cycles from a load to its data, beside the time of its bytes
    stages: int  # slots of K and V
    crosses_tiles: bool  # whether Q of the next tile has a slot of its own
    half_bytes: int  # K or V of a key block
    query_bytes: int  # Q of a tile
    output_bytes: int  # O of a tile


@njit(cache=True)
def ends(launch, steps, alone, shared):
    """Return the cycle at which the last CTA ends; HBM serves one CTA with at most ``alone`` bytes a cycle, and all
    together with ``shared``."""
    ctas = launch.ctas
    tiles = launch.tiles
    # when K and V of each head and block are in L2; -1 if they are not
    there = np.full((tiles[:, 0].max() + 1, (tiles[:, 1] + tiles[:, 2]).max(), 2), -1.0)
    ready = [(0.0, cta) for cta in range(ctas)]  # heap: when each CTA can load its next block
    # the tile that each CTA loads, -1 for none, and its blocks that are not loaded yet
    tile = np.full(ctas, -1)
    left = np.zeros(ctas, np.int64)
    # tiles that each CTA has taken, and blocks that it has loaded
    taken = np.zeros(ctas, np.int64)
    loaded = np.zeros(ctas, np.int64)
    # when the blocks in the slots of K and V, and the last two tiles, are done
    block_end = np.zeros((ctas, steps.stages))
    tile_end = np.zeros((ctas, 2))
    # when the last block of each CTA ends, and when its Q and V arrive
    last = np.zeros(ctas)
    query = np.zeros(ctas)
    value = np.zeros(ctas)
    served = 0.0  # when HBM has served everything so far
    handed = 0  # tiles handed out so far
    while ready:
        now, cta = ready[0]
        if tile[cta] < 0:
            place = launch.begins[cta] + taken[cta] if launch.mine.size else handed
            is_over = place == (launch.begins[cta + 1] if launch.mine.size else len(tiles))
            if is_over:
                heappop(ready)
                continue
            handed += 1
            tile[cta] = launch.mine[place] if launch.mine.size else place
            left[cta] = tiles[tile[cta], 2]
            free = tile_end[cta, taken[cta] % 2] if steps.crosses_tiles else last[cta]
            taken[cta] += 1
            if free > now:  # the slot of Q is not free yet
                heapreplace(ready, (free, cta))
                continue
        head, first, blocks = tiles[tile[cta]]
        begin = max(last[cta], value[cta])
        if left[cta] == blocks:
            served = max(now, served) + steps.query_bytes / shared
            query[cta] = max(served, now + steps.query_bytes / alone) + steps.latency
            begin = max(last[cta], query[cta])
        left[cta] -= 1
        for half in range(2):  # K, which the block needs to begin, then V, which the next block waits for
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
