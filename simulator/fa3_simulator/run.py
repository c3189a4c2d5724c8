"""A whole launch: its tiles are handed to the SMs, and the CTA with the most work is simulated.

:func:`estimate` is what verbs and the tuner call. Tiles go to the CTA that is free first: our kernels hand them out by
their static schedule (:mod:`fa3_kernels.plan.tile_order`), others longest first or by the counter of FlashAttention-3
(:mod:`fa3_simulator.tile_queue`). The time is that of the launch, plus that of the CTA with the most work
(:mod:`fa3_simulator.cta`) and what CTAs of a forward wait for each other (:mod:`fa3_simulator.contention`); or, if that
is longer, what HBM needs to move every tensor once. A backward adds the kernels in front and behind, and keys cut into
parts add the kernel that merges them. Where key tiles of a backward take turns, all CTAs are simulated together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_kernels.plan.tile_order import TILE_COST, assign, key_blocks, shape_of
from fa3_kernels.plan.tiles import power_of_two, split_ranges
from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3_simulator import backward_launch
from fa3_simulator.backward_launch import key_tiles
from fa3_simulator.contention import LaunchTiles, launched_tiles, waited_cycles
from fa3_simulator.cta import LONG, SHORT, AnyConfig, BackwardKernel, Cycles, TimedCta, kernel_of
from fa3_simulator.limits import check_launch
from fa3_simulator.machine import Machine
from fa3_simulator.schedules import TileBlocks, copies_queries
from fa3_simulator.splits import merge_cycles
from fa3_simulator.tile_queue import counter_order, heads_at_a_time, static_order, takes_from_counter, tile_heads
from fa3_simulator.turns import makespan


@lru_cache(maxsize=64)
def visible_pairs(problem: AttentionProblem) -> float:
    """Return the number of pairs of a query and a key that it sees, for one head and all sequences."""
    left, right = problem.window
    last = 0 if problem.causal else right
    pairs = 0.0
    for sequence in problem.sequences():
        queries = sequence.seqlen_q
        keys = sequence.seqlen_k
        rows = np.arange(queries) + keys - queries
        stop = np.full(queries, keys) if last < 0 else np.clip(rows + last + 1, 0, keys)
        start = np.zeros(queries) if left < 0 else np.clip(rows - left, 0, keys)
        pairs += float(np.maximum(stop - start, 0).sum())
    return pairs


def flops(problem: AttentionProblem, head_dim: float) -> float:
    """Return 4 * seqlen_q * seqlen_k * head_dim * nheads * batch, halved when causal: the field's convention.

    Sequences of their own lengths are added up; with a window it is 4 * head_dim for every visible pair.
    """
    if problem.window == (-1, -1):
        pairs = sum(float(s.seqlen_q * s.seqlen_k) for s in problem.sequences()) / (2 if problem.causal else 1)
    else:
        pairs = visible_pairs(problem)
    return 4 * problem.nheads * pairs * head_dim


def operations(problem: AttentionProblem, config: AnyConfig) -> float:
    """Return the operations that TFLOP/s are counted from: :func:`flops`, times 2.5 for a backward; without padding."""
    head_dim = (problem.head_dim + problem.head_dim_v) / 2
    return flops(problem, head_dim) * (1 if isinstance(config, Config) else 2.5)


def moved_bytes(problem: AttentionProblem, config: AnyConfig) -> float:
    """Return the least bytes that a main kernel moves: every tensor once and without padding; a forward has a 16-bit
    output.
    """
    if not isinstance(config, Config):
        return backward_launch.moved_bytes(problem, config)
    size = config.bits / 8
    rows = problem.nheads * problem.seqlen_q * (problem.head_dim * size + problem.head_dim_v * 2)
    keys = problem.nheads_kv * problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * size
    return problem.batch * (rows + keys)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Simulated time of a launch; cycles are SM clocks.

    Parameters
    ----------
    cycles : float
        From launch to the end of the last CTA, or to when HBM has moved every tensor once, if that is later; plus
        ``around_cycles``.
    cta_cycles : float
        Duration of the CTA that ends last.
    hbm_cycles : float
        Time in which HBM moves every tensor of the main kernel once.
    tensor_cycles, mufu_cycles, smem_cycles : float
        How long the tensor core, the special-function unit, and the port of shared memory are busy in that CTA.
    tiles : tuple of TileBlocks
        Tiles of that CTA, in order.
    clock_mhz : float
        SM clock.
    around_cycles : float
        Duration of the kernels in front of and behind the main one: those of a backward, and the one that merges the
        parts of the keys.
    """

    cycles: float
    cta_cycles: float
    hbm_cycles: float
    tensor_cycles: float
    mufu_cycles: float
    smem_cycles: float
    tiles: tuple[TileBlocks, ...]
    clock_mhz: float
    around_cycles: float = 0.0

    @property
    def main_cycles(self) -> float:
        """Cycles of the main kernel alone."""
        return self.cycles - self.around_cycles

    @property
    def seconds(self) -> float:
        """Time of the launch at :attr:`clock_mhz`."""
        return self.cycles / (self.clock_mhz * 1e6)

    @property
    def tensor_efficiency(self) -> float:
        """Tensor work over time, of the longest CTA."""
        return self.tensor_cycles / self.cta_cycles


def check_problem(problem: AttentionProblem, num_splits: int = 1) -> None:
    """Raise ValueError for a problem that no forward program is written for, and for a launch that is too large."""
    require(
        not (problem.is_varlen or problem.window != (-1, -1) or problem.softcap),
        "the forward is simulated for dense or causal problems without varlen, window and softcap",
    )
    check_launch(problem, "row", num_splits)


def in_words(problem: AttentionProblem) -> str:
    """Return a problem in words, half a line long.

    >>> in_words(AttentionProblem(32, 32, 8, 1, 8192, 128))
    'fp16 d128 dense, 32 x 32/8 heads, 1 x 8192'
    """
    p = problem
    heads = f"{p.nheads}/{p.nheads_kv}" if p.group > 1 else p.nheads
    mask = "causal" if p.causal else "dense" if p.window == (-1, -1) else "window {} {}".format(*p.window)
    return f"{p.dtype} d{p.head_dim} {mask}, {p.batch} x {heads} heads, {p.seqlen_q} x {p.seqlen_k}" + (
        f", softcap {p.softcap:g}" if p.softcap else ""
    )


def row_tiles(problem: AttentionProblem, config: Config) -> list[TileBlocks]:
    """Return the row tiles of one head, or of one head of K and V where rows are packed, top to bottom.

    A tile without a key has 0 blocks. Where keys are cut into parts, each part with a key counts as a tile.

    Raises
    ------
    ValueError
        If a kernel that pads packed heads to a power of two would have more than 64 of them, the rows of a warpgroup;
        and as :func:`check_problem`.
    """
    return [part for parts in _row_parts(problem, config) for part in parts]


def _row_parts(problem: AttentionProblem, config: Config) -> list[list[TileBlocks]]:
    """Return the parts of every row tile, as :func:`row_tiles` does in one list."""
    check_problem(problem, config.num_splits)
    shape = shape_of(problem, pack_gqa=config.pack_gqa)
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
        blocks = key_blocks(shape, 0, first, last, config.tile_n).stop
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


def launched(problem: AttentionProblem, config: AnyConfig) -> AnyConfig:
    """Return the configuration as it is compiled for a problem: the way to take row maxima depends on the mask."""
    if not isinstance(config, Config):
        return config
    return replace(config, integer_max=config.takes_integer_max(problem.causal))


def as_program(config: AnyConfig) -> AnyConfig:
    """Return the configuration without the fields that only decide which tiles there are.

    Two configurations for which it is equal have the same program for the same tiles.
    """
    return replace(config, num_splits=1, pack_gqa=copies_queries(config)) if isinstance(config, Config) else config


def all_tiles(problem: AttentionProblem, config: AnyConfig, ctas: int | None = None) -> list[TileBlocks]:
    """Return the tiles of all heads in the order in which they are handed out: row tiles forward, key tiles backward.

    The order of our forward kernels depends on the number of CTAs.
    """
    if not isinstance(config, Config):
        return [tile.work for tile in key_tiles(problem, config)]
    if config.traits.is_built_here:
        rows = _row_parts(problem, config)
        return [rows[item.m_block][item.split] for _, item in static_order(problem, config, ctas)]
    tiles = row_tiles(problem, config)
    heads = tile_heads(problem, config)
    if takes_from_counter(problem, config):
        return counter_order(tiles, heads, heads_at_a_time(problem, config))
    return [tile for tile in sorted(tiles, reverse=True) if tile.blocks for _ in range(heads)]


def longest_cta(
    problem: AttentionProblem, config: AnyConfig, ctas: int, tile_cost: float = TILE_COST
) -> tuple[TileBlocks, ...]:
    """Return the tiles of the CTA with the most work, where each tile goes to the CTA that is free first.

    It is () where there are no tiles. ``tile_cost`` is the time of a tile beside its blocks, in blocks; our kernels
    hand tiles out at a price of their own.
    """
    is_static = isinstance(config, Config) and config.traits.is_built_here
    order = _order(problem, as_ordered(config), ctas)
    handed = _handed_out(order, ctas, TILE_COST if is_static else tile_cost)
    return max(handed, key=lambda mine: _work(mine, tile_cost), default=())  # the first of several that end last


def as_ordered(config: AnyConfig) -> AnyConfig:
    """Return the configuration with only the fields that its tiles depend on: equal ones hand out the same tiles."""
    if not isinstance(config, Config):
        return config
    kept = ("dtype", "head_dim", "tile_m", "tile_n", "promotion_interval", "num_splits", "pack_gqa", "family")
    return Config(**{name: getattr(config, name) for name in kept})


@lru_cache(maxsize=64)
def _order(problem: AttentionProblem, config: AnyConfig, ctas: int) -> tuple[TileBlocks, ...]:
    return tuple(all_tiles(problem, config, ctas))


def _work(tiles: tuple[TileBlocks, ...], tile_cost: float) -> float:
    return sum(tile.blocks for tile in tiles) + tile_cost * len(tiles)


@lru_cache(maxsize=256)
def _handed_out(order: tuple[TileBlocks, ...], ctas: int, price: float) -> tuple[tuple[TileBlocks, ...], ...]:
    """Return the tiles of every CTA; CTAs with equal tiles count once."""
    assigned, _ = assign([tile.blocks for tile in order], ctas, price)
    return tuple(dict.fromkeys(tuple(order[i] for i in mine) for mine in assigned))


def tiles_of(problem: AttentionProblem, cta: TimedCta, config: AnyConfig) -> tuple[TileBlocks, ...]:
    """Return the tiles of the CTA that ends last.

    Where tiles differ in their blocks, the time of a tile beside its blocks decides; it is taken from the simulated
    times of a short and a long tile.
    """
    sms = int(cta.machine["sms"])
    if not isinstance(config, Config) or not problem.causal or not cta.kernel.is_persistent:
        return longest_cta(problem, config, sms)
    short, long = (cta.one_more(TileBlocks(blocks), blocks)[0] for blocks in (SHORT, LONG))
    block = (long - short) / (LONG - SHORT)
    return longest_cta(problem, config, sms, round(short / block - SHORT, 2))


def hbm_cycles(problem: AttentionProblem, config: AnyConfig, machine: Machine, clock_mhz: float) -> float:
    """Return the SM cycles in which HBM moves every tensor of a launch once, at the rate of all SMs, from a cold L2."""
    return moved_bytes(problem, config) / (machine["hbm_bytes_per_ns"] * machine["sms"]) * clock_mhz / 1000


def _in_turns(problem: AttentionProblem, cta: TimedCta) -> float:
    """Return the cycles of the last CTA where key tiles take turns, from the steps of a CTA that never waits."""
    assert isinstance(cta.kernel, BackwardKernel)
    schedule = cta.kernel.schedule
    short, long = (cta.exact((TileBlocks(blocks),))[0] for blocks in (SHORT, LONG))
    block = (long - short) / (LONG - SHORT)
    machine = cta.machine
    size = 4 * schedule.tile_m * schedule.head_dim
    waits = 1 if schedule.signals_early else 2  # trips to L2: to read the turn, and for the sum to become visible
    added = (size / machine["reduce_bytes_per_ns"] + waits * machine["l2_latency_ns"]) * cta.clock_mhz / 1000
    cycles = (block, short - SHORT * block, added)
    return makespan(key_tiles(problem, schedule), schedule.turns, cycles, machine)


def _waited(
    problem: AttentionProblem, config: Config, cta: TimedCta, tiles: tuple[TileBlocks, ...], cycles: float
) -> float:
    """Return the cycles that the CTAs of a forward launch wait for each other.

    The longest CTA takes ``cycles`` for its ``tiles`` when it runs alone.
    """
    short, long = (cta.alone(TileBlocks(blocks))[0] for blocks in (SHORT, LONG))
    block = (long - short) / (LONG - SHORT)
    tile = max(0.0, cycles - block * sum(tile.blocks for tile in tiles)) / len(tiles)
    launch = _launched(problem, as_ordered(config), int(cta.machine["sms"]))
    return waited_cycles(launch, problem, config, cta.machine, cta.clock_mhz, block=block, tile=tile)


@lru_cache(maxsize=64)
def _launched(problem: AttentionProblem, config: Config, ctas: int) -> LaunchTiles:
    return launched_tiles(problem, config, _row_parts(problem, config), ctas)


def estimate(
    problem: AttentionProblem, config: AnyConfig, machine: Machine, clock_mhz: float | None = None
) -> Estimate:
    """Simulate a launch, with the kernels in front of and behind the main one.

    Parameters
    ----------
    problem : AttentionProblem
        Forward dense or causal; backward with windows and sequences of their own lengths too.
    config : Config or BackwardSchedule
        The kernel: a Config for a forward, a BackwardSchedule for a backward.
    machine : Machine
        The GPU.
    clock_mhz : float, optional
        SM clock, the machine's maximum by default.

    Returns
    -------
    Estimate
        The simulated time and what it is made of.

    Raises
    ------
    ValueError
        For a problem that no program is written for, and for a launch that is too large.
    """
    clock = clock_mhz or machine["max_clock_mhz"]
    config = launched(problem, config)
    adds = not isinstance(config, Config) and config.adds_gradients(problem.group)
    cta = TimedCta(kernel_of(as_program(config), adds_gradients=adds), machine, clock)
    tiles = tiles_of(problem, cta, config)
    longest = cta.run(tiles) if tiles else Cycles(0.0, 0.0, 0.0, 0.0)
    waited = 0.0
    drain = 0.0
    if isinstance(config, Config):
        around = merge_cycles(problem, config, machine, clock)
        drain = machine["drain_cycles"]
        waited = _waited(problem, config, cta, tiles, longest.cta) if tiles else 0.0
    else:
        around = backward_launch.around_cycles(problem, config, machine, clock)
        if config.turns != "free" and tiles:
            longest = longest._replace(cta=_in_turns(problem, cta))
    hbm = hbm_cycles(problem, config, machine, clock)
    cycles = max(longest.cta + waited, hbm) + machine["launch_cycles"] + drain + around
    return Estimate(
        cycles=cycles,
        cta_cycles=longest.cta,
        hbm_cycles=hbm,
        tensor_cycles=longest.tensor,
        mufu_cycles=longest.mufu,
        smem_cycles=longest.smem,
        tiles=tiles,
        clock_mhz=clock,
        around_cycles=around,
    )
