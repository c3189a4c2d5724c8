"""Estimates of how long a launch takes with each tile it could have, by which our tile and PackGQA are chosen.

:mod:`fa3_kernels.plan.families.ours` asks for the tile, :mod:`fa3_kernels.plan.choose` for PackGQA. A launch takes
``launch_cycles``, and ``block_cycles`` for each key block until its last CTA ends; the prologue and epilogue of a tile
count as ``tile_blocks`` key blocks. The three numbers of every tile, for launches that hide keys and for those that do
not, were fitted to simulated launches and to recorded timings. They stand in ``tile_times.csv``, which ``python -m
fa3_reports.measured.tile_times`` makes. Packed sequences are not in it, as a host does not know their lengths.
"""

from __future__ import annotations

import csv
import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.tile_order import Shape, count_items, shape_of
from fa3_kernels.plan.tiles import power_of_two
from fa3_reference.problem import AttentionProblem

MAX_GROUP = 64  # heads that fit the rows of a warpgroup
PACKING = 1.03  # the gain that must be exceeded for a choice that makes more row tiles; assumed
ROUNDS = 4  # that are followed one by one; for 9 launches in 10 the estimate with 8 or all differs by less than 1 %
SMS = 132  # of an H100 SXM and of an H200; a constant, so that no bit depends on the GPU
FILE = Path(__file__).parent / "tile_times.csv"


class TileTime(NamedTuple):
    """A tile of a compiled size, and the three numbers of the time that a launch takes with it.

    ``operands`` is "16 bits" or "e4m3"; ``keys`` is "all", or "some" if a causal mask or a window hides keys.
    """

    operands: str
    head_dim: int
    head_dim_v: int
    keys: str
    tile_m: int
    tile_n: int
    launch_cycles: float
    block_cycles: float
    tile_blocks: float

    def cycles(self, shape: Shape) -> float:
        """Return the SM cycles of a launch of equal sequences."""
        blocks = blocks_of(shape, self.tile_m, self.tile_n)
        ends = last_end(blocks, len(shape.seqlens_q) * shape.tile_heads, self.tile_blocks)
        return self.launch_cycles + self.block_cycles * ends


@lru_cache(maxsize=1)
def table() -> dict[tuple[str, int, int, str], tuple[TileTime, ...]]:
    """Return the tiles of every compiled size, by operands, head_dim, head_dim_v and keys."""
    found: dict[tuple[str, int, int, str], tuple[TileTime, ...]] = {}
    with FILE.open(encoding="utf-8", newline="") as file:
        for operands, head_dim, head_dim_v, keys, *rest in list(csv.reader(file))[1:]:
            tile_m, tile_n, *times = rest
            key = operands, int(head_dim), int(head_dim_v), keys
            tile = TileTime(*key, int(tile_m), int(tile_n), *map(float, times))
            found[key] = (*found.get(key, ()), tile)
    return found


def of(problem: AttentionProblem, head_dim: int, head_dim_v: int) -> tuple[TileTime, ...]:
    """Return the tiles of a problem's kernels by their compiled head_dims; empty if no times were fitted.

    fp16 and bf16 share their times.
    """
    keys = "some" if problem.causal or problem.is_windowed else "all"
    return table().get(("e4m3" if problem.dtype == "e4m3" else "16 bits", head_dim, head_dim_v, keys), ())


def blocks_of(shape: Shape, tile_m: int, tile_n: int) -> np.ndarray:
    """Return how many key blocks each row tile of a head visits, int64; tiles that see no key are left out.

    The numbers are those of :func:`fa3_kernels.plan.tile_order.items`.

    >>> blocks_of(Shape((300,), (300,), 1, 1, right=0), 128, 128)
    array([1, 2, 3])
    """
    seqlen_q = shape.seqlens_q[0]
    seqlen_k = shape.seqlens_k[0]
    positions = tile_m // power_of_two(shape.group) if shape.pack_gqa else tile_m
    count = -(-seqlen_q // positions)
    if shape.left < 0 and shape.right < 0:
        return np.full(count, -(-seqlen_k // tile_n))
    first = np.arange(count) * positions + (seqlen_k - seqlen_q)  # the key at the first row of a tile
    stop = first + (positions + shape.right if shape.right >= 0 else seqlen_q)
    stop = np.minimum(stop, seqlen_k)
    blocks = (stop + (tile_n - 1)) // tile_n
    start = np.maximum(first - shape.left, 0) if shape.left >= 0 else 0 * first
    if shape.chunk:
        last = np.minimum(first + positions, seqlen_k) - 1
        ends = np.maximum(last, 0) // shape.chunk * shape.chunk + shape.chunk
        blocks = np.minimum(blocks, (ends + (tile_n - 1)) // tile_n)
        start = np.maximum(start, np.maximum(first, 0) // shape.chunk * shape.chunk)
    blocks = blocks - start // tile_n
    return blocks[blocks > 0]


def last_end(blocks: np.ndarray, heads: int, tile_blocks: float) -> float:
    """Return when the last CTA ends, in key blocks, if tiles are dealt out in rounds.

    In each round every CTA takes one tile, and the CTA that is free first takes the longest. Each of the ``heads``
    heads has a tile for each element of ``blocks``. Rounds before the last :data:`ROUNDS` count as balanced.

    >>> last_end(np.array([8]), 132, 0.0), last_end(np.array([8]), 133, 0.0)
    (8.0, 16.0)
    """
    count = len(blocks) * heads
    rounds = -(-count // SMS)
    if not count or blocks[0] == blocks[-1] == blocks.max():
        return rounds * (float(blocks[0]) + tile_blocks) if count else 0.0
    costs = np.sort(blocks)[::-1] + tile_blocks
    shown = min(rounds, ROUNDS)
    first = (rounds - shown) * SMS
    tiles = np.zeros(shown * SMS)
    tiles[: count - first] = costs[np.arange(first, count) // heads]
    before = (float(costs.sum()) * heads - float(tiles.sum())) / SMS
    ends = np.full(SMS, before)
    for taken in tiles.reshape(shown, SMS):
        ends.sort()
        ends += taken
    return float(max(ends.max(), costs[0]))


def can_pack(problem: AttentionProblem) -> bool:
    """Tell whether PackGQA is possible: more than one head per kv head, and at most 64."""
    return 1 < problem.group <= MAX_GROUP


@lru_cache(maxsize=4096)
def cycles_of(problem: AttentionProblem, tile: TileTime) -> tuple[float, float]:
    """Return SM cycles of a launch of equal sequences, without and with the heads of a group packed.

    The choice that makes more row tiles counts as slower by :data:`PACKING`: the fit does not know how much it costs
    that several CTAs read the same K and V. Where packing is not possible its time is infinite.
    """
    plain = shape_of(problem)
    if not can_pack(problem):
        return tile.cycles(plain), math.inf
    packed = shape_of(problem, pack_gqa=True)
    is_less = count_items(packed, tile.tile_m) < count_items(plain, tile.tile_m)
    factors = (PACKING, 1.0) if is_less else (1.0, PACKING)
    return tile.cycles(plain) * factors[0], tile.cycles(packed) * factors[1]
