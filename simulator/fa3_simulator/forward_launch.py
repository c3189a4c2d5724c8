"""A forward launch: the row tiles of a problem in the order in which they are handed out, its bytes, and what its CTAs
wait for each other. One CTA is in :mod:`fa3_simulator.forward`, and the same of a backward in
:mod:`fa3_simulator.backward_launch`.

Under a causal mask the persistent CTAs of FlashAttention-3 take tiles from a counter while the launch runs (upstream
hopper/tile_scheduler.hpp, DynamicPersistentTileScheduler). Heads are taken in groups, as many as have their K and V in
32 MiB of L2, a power of two of heads of K and V. In a group the last rows, which see most keys, come first, head by
head. The CTA that is free takes the next tile: a warp of the producer adds to the counter a tile ahead, so that nobody
waits for it. The order of our kernels is decided before the launch (:mod:`fa3_kernels.plan.tile_order`). Without a mask
all tiles are alike, and their order does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from fa3_kernels.plan import tile_order
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_kernels.plan.tiles import power_of_two, split_ranges
from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3_simulator.contention import LaunchTiles, Steps, ends
from fa3_simulator.limits import check_launch
from fa3_simulator.machine import Machine
from fa3_simulator.schedules import TileBlocks

L2_BYTES = 32 * 2**20
OUTPUT_BYTES = 2  # bytes of an element of O
MOST_BLOCKS = 64  # blocks of a CTA, on average, that are followed where CTAs share HBM: later ones hardly wait


def tile_heads(problem: AttentionProblem, config: Config) -> int:
    """Return the number of heads of the whole batch that have row tiles of their own: of K and V where rows are
    packed."""
    return problem.batch * (problem.nheads_kv if config.pack_gqa else problem.nheads)


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


@lru_cache(maxsize=2)
def handed_out(
    problem: AttentionProblem, config: Config, parts: tuple[int, ...], ctas: int
) -> list[tuple[int, int, int]]:
    """Return the tiles of all heads in the order in which they are handed out, each by its head, row tile and part.

    ``parts`` is how many parts each row tile of a head has. Where tiles come neither from our static order nor from a
    counter they are head by head.
    """
    heads = range(tile_heads(problem, config))
    if config.traits.is_built_here:
        shape = tile_order.shape_of(problem, pack_gqa=config.pack_gqa, num_splits=config.num_splits)
        order = tile_order.handed_out(shape, config.tile_m, config.tile_n, config.head_dim, ctas)
        return [(head, item.m_block, item.split) for head, item in order]
    if takes_from_counter(problem, config):
        most = heads_at_a_time(problem, config)
        sections = [heads[first : first + most] for first in range(0, len(heads), most)]
        return [(head, row, 0) for some in sections for row in reversed(range(len(parts))) for head in some]
    return [(head, row, part) for head in heads for row, count in enumerate(parts) for part in range(count)]


def row_tiles(problem: AttentionProblem, config: Config) -> list[list[TileBlocks]]:
    """Return the row tiles of one head, or of one head of K and V where rows are packed, top to bottom.

    Each is a list of the parts with a key that its keys are cut into. Where they are in one piece, a tile without a key
    is one part of 0 blocks.

    Raises
    ------
    ValueError
        For a problem that no forward program is written for, and for a launch that is too large; and if a kernel that
        pads packed heads to a power of two would have more than 64 of them, the rows of a warpgroup.
    """
    require(
        not (problem.is_varlen or problem.window != (-1, -1) or problem.softcap),
        "the forward is simulated for dense or causal problems without varlen, window and softcap",
    )
    check_launch(problem, "row", config.num_splits)
    shape = tile_order.shape_of(problem, pack_gqa=config.pack_gqa)
    heads = shape.group if config.pack_gqa else 1
    if config.traits.pads_group:
        heads = power_of_two(heads)
        require(
            heads <= WARPGROUP_ROWS,
            f"our kernels pack at most {WARPGROUP_ROWS} heads to one of K and V, got {problem.group}",
        )
    offset = problem.seqlen_k - problem.seqlen_q
    unmasked = problem.seqlen_k // config.tile_n
    tiles = []
    for row in range(0, problem.seqlen_q * heads, config.tile_m):
        first = row // heads
        last = (min(row + config.tile_m, problem.seqlen_q * heads) - 1) // heads
        blocks = tile_order.key_blocks(shape, 0, first, last, config.tile_n).stop
        plain = unmasked
        if problem.causal:
            seen = max(first + offset + 1, 0) // config.tile_n
            plain = min(plain, seen)
        tiles.append(_parts(blocks, min(plain, blocks), config.num_splits))
    return tiles


def _parts(blocks: int, plain: int, num_splits: int) -> list[TileBlocks]:
    """Return a tile whose first ``plain`` blocks are not masked, or its parts with a key, as a list."""
    if num_splits == 1:
        return [TileBlocks(blocks, blocks - plain)]
    parts = split_ranges(range(blocks), num_splits)
    return [TileBlocks(len(part), part.stop - max(part.start, min(plain, part.stop))) for part in parts if part]


def as_ordered(config: Config) -> Config:
    """Return the configuration with only the fields that its tiles depend on: equal ones hand out the same tiles."""
    kept = ("dtype", "head_dim", "tile_m", "tile_n", "promotion_interval", "num_splits", "pack_gqa", "family")
    return Config(**{name: getattr(config, name) for name in kept})


@lru_cache(maxsize=64)
def tiles_in_order(problem: AttentionProblem, config: Config, ctas: int) -> tuple[TileBlocks, ...]:
    """Return the tiles with a key of all heads in the order in which they are handed out to so many CTAs; ``config`` is
    of :func:`as_ordered`."""
    rows = row_tiles(problem, config)
    order = handed_out(problem, config, tuple(map(len, rows)), ctas)
    tiles = [rows[row][part] for _, row, part in order if rows[row][part].blocks]
    is_known = config.traits.is_built_here or takes_from_counter(problem, config)
    return tuple(tiles if is_known else sorted(tiles, reverse=True))


@lru_cache(maxsize=64)
def launched_tiles(problem: AttentionProblem, config: Config, ctas: int) -> LaunchTiles:
    """Return the first tiles of a launch, up to :data:`MOST_BLOCKS` blocks a CTA; a longer tile is cut to the blocks
    that it loads first, which are its last ones.
    """
    rows = [[part.blocks for part in row] for row in row_tiles(problem, config)]
    parts = [[(end - n, n) for end, n in zip(accumulate(row), row, strict=True)] for row in rows]
    per_kv = 1 if config.pack_gqa else problem.group
    handed = handed_out(problem, config, tuple(map(len, rows)), ctas)
    order = [(head // per_kv, *parts[row][part]) for head, row, part in handed if rows[row][part]]
    most = MOST_BLOCKS * ctas
    count = int(np.searchsorted(np.cumsum([n for *_, n in order]), most)) + 1
    last_blocks = [(head, first + max(0, n - most), min(n, most)) for head, first, n in order[:count]]
    tiles = np.array(last_blocks, np.int64).reshape(-1, 3)
    if len(tiles):
        tiles[:, 1] -= tiles[:, 1].min()  # blocks in front of them are loaded by nobody
    mine = tile_order.assign(tiles[:, 2].tolist(), ctas, tile_order.TILE_COST)[0] if config.traits.is_built_here else []
    begins = np.cumsum([0, *map(len, mine)])
    return LaunchTiles(tiles, np.array([i for each in mine for i in each], np.int64), begins, min(ctas, len(tiles)))


def moved_bytes(problem: AttentionProblem, config: Config) -> float:
    """Return the least bytes that the main kernel moves: every tensor once and without padding, O in 16 bits."""
    size = config.bits / 8
    rows = problem.nheads * problem.seqlen_q * (problem.head_dim * size + problem.head_dim_v * 2)
    keys = problem.nheads_kv * problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * size
    return problem.batch * (rows + keys)


def sharing(
    problem: AttentionProblem,
    config: Config,
    machine: Machine,
    clock_mhz: float,
    block: float,
    _start: float,
    tiles: Sequence[TileBlocks],
    cycles: float,
) -> tuple[float, float]:
    """Return the cycles of the CTA that ends last, and those that it waits for others as they share HBM.

    It takes ``cycles`` for its ``tiles`` when it runs alone, and ``block`` of them for a block. Channels that a kernel
    pads the tensors with are not loaded.
    """
    launch = launched_tiles(problem, as_ordered(config), int(machine["sms"]))
    size = config.bits // 8
    steps = Steps(
        block=block,
        tile=max(0.0, cycles - block * sum(tile.blocks for tile in tiles)) / len(tiles),
        latency=machine["memory_latency_ns"] * clock_mhz / 1000,
        stages=config.num_stages,
        crosses_tiles=config.crosses_tiles,
        half_bytes=config.tile_n * (problem.head_dim + problem.head_dim_v) * size // 2,
        query_bytes=config.tile_m * problem.head_dim * size,
        output_bytes=config.tile_m * problem.head_dim_v * OUTPUT_BYTES,
    )
    alone = machine["hbm_lone_bytes_per_cycle"]
    shared = machine["hbm_bytes_per_ns"] * machine["sms"] * 1000 / clock_mhz
    return cycles, ends(launch, steps, alone, shared) - ends(launch, steps, alone, np.inf)
