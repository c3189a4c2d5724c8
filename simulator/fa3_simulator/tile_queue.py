"""The order in which tiles of a forward are handed out: our kernels' static order, and FlashAttention-3's counter.

Under a causal mask the persistent CTAs of FlashAttention-3 take tiles from a counter while the launch runs (upstream
hopper/tile_scheduler.hpp, DynamicPersistentTileScheduler). Heads are taken in groups, as many as have their K and V in
32 MiB of L2, a power of two of heads of K and V. In a group the last rows, which see most keys, come first, head by
head. The CTA that is free takes the next tile: a warp of the producer adds to the counter a tile ahead, so that nobody
waits for it. The order of our kernels is decided before the launch (:mod:`fa3_kernels.plan.tile_order`). Without a mask
all tiles are alike, and their order does not matter.
"""

from __future__ import annotations

from functools import lru_cache

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.tile_order import Item, handed_out, shape_of
from fa3_reference.problem import AttentionProblem
from fa3_simulator.schedules import TileBlocks

L2_BYTES = 32 * 2**20


def tile_heads(problem: AttentionProblem, config: Config) -> int:
    """Return the number of heads of the whole batch that have row tiles of their own: of K and V where rows are
    packed."""
    return problem.batch * (problem.nheads_kv if config.pack_gqa else problem.nheads)


@lru_cache(maxsize=2)
def static_order(problem: AttentionProblem, config: Config, ctas: int | None) -> tuple[tuple[int, Item], ...]:
    """Return the tiles of our kernels in the order in which they are handed out to ``ctas``, each with its head.

    Where ``ctas`` is None they are longest first in every group of heads.
    """
    shape = shape_of(problem, pack_gqa=config.pack_gqa, num_splits=config.num_splits)
    return tuple(handed_out(shape, config.tile_m, config.tile_n, config.head_dim, ctas))


def takes_from_counter(problem: AttentionProblem, config: Config) -> bool:
    """Tell whether CTAs take tiles from a counter; where keys are cut into parts every tile has a CTA of its own."""
    is_dynamic = not config.traits.is_built_here and config.traits.tile_order == "longest first"
    return is_dynamic and problem.causal and config.num_splits == 1


def heads_at_a_time(problem: AttentionProblem, config: Config) -> int:
    """Return how many heads with tiles of their own have their K and V in L2 together.

    >>> heads_at_a_time(AttentionProblem(1, 16, 16, 16384, 16384, 128, causal=True), Config(family="flash3"))
    4
    """
    size = problem.seqlen_k * (config.head_dim + config.head_dim_v) * config.bits // 8
    of_keys = 1 << max(0, (L2_BYTES // size).bit_length() - 1)
    return of_keys * (1 if config.pack_gqa else problem.group)


def counter_order(tiles: list[TileBlocks], heads: int, at_a_time: int) -> list[TileBlocks]:
    """Return the tiles of all heads in the order of the counter; ``tiles`` are those of one head, top to bottom.

    >>> counter_order([TileBlocks(1), TileBlocks(2)], 3, 2)[:4]
    [TileBlocks(blocks=2, masked=0), TileBlocks(blocks=2, masked=0), TileBlocks(blocks=1, masked=0), \
TileBlocks(blocks=1, masked=0)]
    """
    sections = counter_heads(heads, at_a_time)
    return [tile for some in sections for tile in reversed(tiles) if tile.blocks for _ in some]


def counter_heads(heads: int, at_a_time: int) -> list[range]:
    """Return the groups of heads that are worked on together.

    >>> counter_heads(3, 2)
    [range(0, 2), range(2, 3)]
    """
    return [range(first, min(first + at_a_time, heads)) for first in range(0, heads, at_a_time)]
