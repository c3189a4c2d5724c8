"""This module says how long a launch takes with each of its tiles, by which the plan chooses one.

A launch takes ``launch_cycles`` and, until its last CTA ends, ``block_cycles`` for each key block and for the
``tile_blocks`` that the prologue and epilogue of a tile are worth. The three numbers of every tile were fitted to
simulated launches and stand in ``tile_times.csv`` (``python -m fa3_reports.measured.tile_times`` makes it). Packed
sequences and windows are not in it: a host does not know the first, and few tiles hold the second.
"""

from __future__ import annotations

import csv
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.tile_order import Item, Shape, count_items, items, shape_of
from fa3_kernels.plan.tiles import power_of_two
from fa3_reference.problem import AttentionProblem

MAX_GROUP = 64  # heads that rows of a warpgroup hold
PACKING = 1.03
SMS = 132  # of an H100 SXM and of an H200; a constant, so that no bit depends on the GPU
FILE = "tile_times.csv"


class TileTime(NamedTuple):
    """A tile of a compiled size and what a launch takes with it; ``operands`` are of 16 bits or e4m3."""

    operands: str
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    launch_cycles: float
    block_cycles: float
    tile_blocks: float

    def cycles(self, shape: Shape) -> float:
        """SM cycles of a launch of equal sequences."""
        work = items(shape, 0, self.tile_m, self.tile_n)
        return self.launch_cycles + self.block_cycles * last_end(
            work, len(shape.seqlens_q) * shape.tile_heads, self.tile_blocks
        )


@lru_cache(maxsize=1)
def table() -> dict[tuple[str, int, int], tuple[TileTime, ...]]:
    """Return the tiles of every compiled size, by operands, head_dim and head_dim_v."""
    found: dict[tuple[str, int, int], tuple[TileTime, ...]] = {}
    with (files(__package__) / FILE).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            sizes = (int(row[name]) for name in TileTime._fields[1:5])
            times = (float(row[name]) for name in TileTime._fields[5:])
            tile = TileTime(row["operands"], *sizes, *times)
            key = tile.operands, tile.head_dim, tile.head_dim_v
            found[key] = (*found.get(key, ()), tile)
    return found


def of(problem: AttentionProblem, head_dim: int, head_dim_v: int) -> tuple[TileTime, ...]:
    """Return the tiles of compiled head_dims, which 16-bit operands of either format have alike; empty for none."""
    return table().get(("e4m3" if problem.dtype == "e4m3" else "16 bits", head_dim, head_dim_v), ())


def last_end(work: list[Item], heads: int, tile_blocks: float, ctas: int = SMS) -> float:
    """When the last CTA ends, in key blocks, if tiles go longest first to the CTAs that are free first.

    Each of ``work`` is a tile in every one of ``heads`` heads; whole rounds of a tile go to all CTAs.

    >>> last_end([Item(0, 0, 8)], 132, 0.0), last_end([Item(0, 0, 8)], 133, 0.0)
    (8.0, 16.0)
    """
    loads = np.zeros(ctas)
    rounds, rest = divmod(heads, ctas)
    for item in sorted(work, key=lambda item: -item.blocks):
        blocks = item.blocks + tile_blocks
        loads += rounds * blocks
        if rest:
            loads[np.argpartition(loads, rest - 1)[:rest]] += blocks
    return float(loads.max())


def can_pack(problem: AttentionProblem) -> bool:
    """Tell whether PackGQA is possible: more than one head per kv head, at most 64, and with varlen a power of two."""
    group = problem.group
    return 1 < group <= MAX_GROUP and (not problem.is_varlen or group == power_of_two(group))


@lru_cache(maxsize=4096)
def fastest(problem: AttentionProblem, tiles: tuple[TileTime, ...]) -> tuple[TileTime, bool]:
    """Return the tile with which a launch of equal sequences ends first, and whether it packs the heads of a group.

    Packing counts as slower by :data:`PACKING` where it does not make fewer row tiles, and not packing where it does:
    so much the fit does not know of what K and V cost that several CTAs read.
    """
    plain = shape_of(problem)
    packed = shape_of(problem, pack_gqa=True) if can_pack(problem) else plain
    found = []
    for tile in tiles:
        is_less = count_items(packed, tile.tile_m) < count_items(plain, tile.tile_m)
        found.append((tile.cycles(plain) * (PACKING if is_less else 1.0), (tile, False)))
        if packed is not plain:
            found.append((tile.cycles(packed) * (1.0 if is_less else PACKING), (tile, True)))
    return min(found, key=lambda pair: pair[0])[1]
