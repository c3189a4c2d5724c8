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
from itertools import accumulate, pairwise

import numpy as np

from fa3_kernels.plan import packed_order, tile_order
from fa3_kernels.plan.choose import without_lengths
from fa3_kernels.plan.config import Config
from fa3_kernels.plan.tiles import power_of_two, split_ranges
from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3_simulator.contention import LaunchTiles, Steps, ends
from fa3_simulator.forward_choice import is_plain
from fa3_simulator.launch import check_launch
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


def keeps_empty(problem: AttentionProblem) -> bool:
    """Tell whether tiles that see no key are worked on: over a cache, and with sinks."""
    return problem.cache is not None or problem.sinks


@lru_cache(maxsize=256)
def row_parts(
    problem: AttentionProblem, config: Config, lengths: tuple[int, int] | None = None
) -> list[list[tuple[range, int]]]:
    """Return the row tiles of one head of a sequence, or of one head of K and V where rows are packed, top to bottom.

    Each is a list of the parts that its keys are cut into: the key blocks of a part, and how many of them are masked.
    Parts without a key are left out, unless they are worked on, on a block that is masked. Where keys are in one piece,
    a tile without a key is one part of no block. ``lengths`` are the queries and keys of the sequence, where they are
    not those of the problem.

    Raises
    ------
    ValueError
        For a problem that no forward program is written for, and for a launch that is too large.
    """
    require(not problem.softcap, "the forward is simulated without softcap")
    require(
        config.traits.is_built_here or is_plain(problem),
        "windows, packed sequences and pages are simulated for the forward of our own kernels",
    )
    check_launch(problem, "row", config.num_splits)
    queries, keys = lengths or (problem.seqlen_q, problem.seqlen_k)
    shape = tile_order.shape_of(without_lengths(problem))._replace(seqlens_q=(queries,), seqlens_k=(keys,))
    heads = 1 if not config.pack_gqa else power_of_two(shape.group) if config.traits.pads_group else shape.group
    offset = keys - queries
    tiles = []
    for row in range(0, queries * heads, config.tile_m):
        first = row // heads
        last = (min(row + config.tile_m, queries * heads) - 1) // heads
        blocks = tile_order.key_blocks(shape, 0, first, last, config.tile_n)
        stop = keys if shape.right < 0 else min(keys, max(first + offset + shape.right + 1, 0))
        start = 0 if shape.left < 0 else max(last + offset - shape.left, 0)
        if shape.chunk:
            stop = min(stop, max(first + offset, 0) // shape.chunk * shape.chunk + shape.chunk)
            start = max(start, max(last + offset, 0) // shape.chunk * shape.chunk)
        plain = range(-(-start // config.tile_n), stop // config.tile_n)  # blocks of which every row sees all keys
        parts = split_ranges(blocks, config.num_splits)
        if keeps_empty(problem):
            parts = [part or range(blocks.stop, blocks.stop + 1) for part in parts]
        tiles.append([(part, _masked(problem, part, plain)) for part in parts if part or config.num_splits == 1])
    return tiles


def _masked(problem: AttentionProblem, part: range, plain: range) -> int:
    """Return how many blocks of a part are masked: all that are not plain, and of packed sequences always the first."""
    inside = min(part.stop, plain.stop) - max(part.start, plain.start)
    return max(len(part) - max(0, inside), min(len(part), int(problem.is_varlen)))


def as_ordered(config: Config) -> Config:
    """Return the configuration with only the fields that its tiles depend on: equal ones hand out the same tiles."""
    kept = ("dtype", "head_dim", "tile_m", "tile_n", "promotion_interval", "num_splits", "pack_gqa", "family")
    return Config(**{name: getattr(config, name) for name in kept})


@lru_cache(maxsize=64)
def parts_in_order(problem: AttentionProblem, config: Config, ctas: int) -> list[list[tuple[int, range, int]]]:
    """Return the tiles with a key of all heads in the order in which they are handed out to so many CTAs, as one list;
    of packed sequences a list for every CTA. ``config`` is of :func:`as_ordered`.

    A tile is its head of K and V, its key blocks, and how many of them are masked.
    """
    rows = [row_parts(problem, config, (s.seqlen_q, s.seqlen_k)) for s in problem.sequences()]
    if problem.seqlens_q and problem.seqlens_k:
        shape = tile_order.shape_of(without_lengths(problem), pack_gqa=config.pack_gqa)
        one = packed_order.order_of(shape, config, keeps_empty=keeps_empty(problem))
        order, (ctas, _) = one.of_launch(problem.batch, sum(problem.seqlens_q), problem.seqlen_q, ctas)
        dealt = packed_order.dealt_out(order, problem.seqlens_q, problem.seqlens_k, ctas)
        lists = dealt if any(s.seqlen_q and s.seqlen_k for s in problem.sequences()) else []  # else no query has a key
    else:
        lists = [handed_out(problem, config, tuple(map(len, rows[0])), ctas)]
    of_sequence = tile_heads(problem, config) // problem.batch
    per_kv = 1 if config.pack_gqa else problem.group
    found = [[(head // per_kv, *rows[head // of_sequence][row][part]) for head, row, part in each] for each in lists]
    return [[tile for tile in each if tile[1]] or [(0, range(1), 1)] * problem.is_varlen for each in found]


@lru_cache(maxsize=64)
def tiles_in_order(
    problem: AttentionProblem, config: Config, ctas: int
) -> tuple[tuple[TileBlocks, ...], tuple[range, ...]]:
    """Return the tiles of :func:`parts_in_order` as tiles of a program, list after list; and of packed sequences which
    of them each CTA has.
    """
    lists = parts_in_order(problem, config, ctas)
    tiles = [TileBlocks(len(blocks), masked) for each in lists for _, blocks, masked in each]
    is_known = config.traits.is_built_here or takes_from_counter(problem, config)
    return tuple(tiles if is_known else sorted(tiles, reverse=True)), _places(lists) if problem.is_varlen else ()


def _places(lists: Sequence[Sequence[object]]) -> tuple[range, ...]:
    """Return the indices that the elements of each list have when the lists are put one behind another."""
    return tuple(range(*each) for each in pairwise(accumulate(map(len, lists), initial=0)))


@lru_cache(maxsize=64)
def launched_tiles(problem: AttentionProblem, config: Config, ctas: int) -> LaunchTiles:
    """Return the first tiles of a launch, up to :data:`MOST_BLOCKS` blocks a CTA; a longer tile is cut to the blocks
    that it loads first, which are its last ones.
    """
    lists = parts_in_order(problem, config, ctas)
    most = MOST_BLOCKS * (1 if problem.is_varlen else ctas)
    kept = [
        [tile for tile, n in zip(each, accumulate((len(part) for _, part, _ in each), initial=0)) if n < most]
        for each in lists
    ]
    last_blocks = [(h, max(part.start, part.stop - most), min(len(part), most)) for each in kept for h, part, _ in each]
    tiles = np.array(last_blocks, np.int64).reshape(-1, 3)
    if len(tiles):
        tiles[:, 1] -= tiles[:, 1].min()  # blocks in front of them are loaded by nobody
    mine: Sequence[Sequence[int]] = []
    if config.traits.is_built_here:
        mine = _places(kept) if problem.is_varlen else tile_order.assign(tiles[:, 2].tolist(), ctas)[0]
    indices = np.array([i for each in mine for i in each], np.int64)
    return LaunchTiles(tiles, indices, np.cumsum([0, *map(len, mine)]), len(mine) or min(ctas, len(tiles)))


def moved_bytes(problem: AttentionProblem, config: Config) -> float:
    """Return the least bytes that the main kernel moves: every tensor once and without padding, O in 16 bits, and of K
    and V the keys that a window or a chunk leaves some query."""
    size = config.bits / 8
    rows = problem.nheads * (problem.head_dim * size + problem.head_dim_v * 2)
    keys = problem.nheads_kv * (problem.head_dim + problem.head_dim_v) * size
    moved = 0.0
    for s in problem.sequences():
        first, stop = problem.visible_keys(np.array([0, s.seqlen_q - 1]), s.seqlen_q, s.seqlen_k)  # both only rise
        moved += rows * s.seqlen_q + keys * max(0, int(stop[1] - first[0]))
    return moved


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
