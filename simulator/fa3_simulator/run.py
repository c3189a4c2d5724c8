"""A whole kernel: row tiles handed to the SMs, the longest CTA simulated.

Tiles go longest first to the CTA that is free first, as the static schedule of :mod:`fa3_kernels.plan.tile_order` and
the dynamic scheduler of FlashAttention-3 do. Time is launch + the CTA with the most work, or what HBM needs for every
tensor once; long CTAs are extrapolated from two short runs, because a steady state is affine in blocks and in tiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.choose import shape_of
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_kernels.plan.tile_order import assign, key_blocks
from fa3_kernels.plan.tiles import padded_group
from fa3_reference.problem import AttentionProblem
from fa3_simulator import interpreter
from fa3_simulator.backward import BackwardConfig, backward
from fa3_simulator.costs import TICKS, costs
from fa3_simulator.forward import forward
from fa3_simulator.machine import Machine
from fa3_simulator.program import Program
from fa3_simulator.schedules import TileBlocks

EXACT_BLOCKS = 256  # CTAs of at most this many key blocks are simulated in full
SHORT, LONG = 12, 24  # key blocks of the two short runs


AnyConfig = Config | BackwardConfig


class Cycles(NamedTuple):
    """Of one CTA: all, and those in which the tensor core and the special-function unit work."""

    cta: float
    tensor: float
    mufu: float


def flops(problem: AttentionProblem, head_dim: int) -> float:
    """4 * seqlen_q * seqlen_k * head_dim * nheads * batch, halved when causal: the field's convention."""
    full = 4.0 * problem.batch * problem.nheads * problem.seqlen_q * problem.seqlen_k * head_dim
    return full / 2 if problem.causal else full


def moved_bytes(problem: AttentionProblem, config: AnyConfig) -> float:
    """What a launch moves at least, every tensor once; a 16-bit output forward, an fp32 dQ backward."""
    rows, keys = problem.nheads * problem.seqlen_q, problem.nheads_kv * problem.seqlen_k
    if isinstance(config, Config):
        each = rows * (config.bits / 8 + 2) + keys * 2 * config.bits / 8  # Q, O; K, V
    else:
        each = rows * (2 + 2 + 4) + keys * 4 * 2  # Q, dO, dQ; K, V, dK, dV
    return problem.batch * config.head_dim * each


def tile_heads(problem: AttentionProblem, config: AnyConfig) -> int:
    """Heads of the whole batch with tiles of their own."""
    packs = isinstance(config, Config) and config.pack_gqa
    return problem.batch * (problem.nheads_kv if packs else problem.nheads)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Simulated time of a launch.

    ``cycles`` counts from launch to the end of the last CTA, or to when HBM has moved every tensor once, if that is
    later; ``tensor_cycles`` is the tensor work of that CTA.
    """

    cycles: float
    cta_cycles: float
    hbm_cycles: float
    tensor_cycles: float
    mufu_cycles: float
    tiles: tuple[TileBlocks, ...]
    clock_mhz: float

    @property
    def seconds(self) -> float:
        return self.cycles / (self.clock_mhz * 1e6)

    @property
    def tensor_efficiency(self) -> float:
        """Tensor work over time, of the longest CTA."""
        return self.tensor_cycles / self.cta_cycles


def check_problem(problem: AttentionProblem) -> None:
    """Raise ValueError for what no program is written for."""
    if problem.is_varlen or problem.window != (-1, -1) or problem.softcap:
        raise ValueError("the simulator takes dense or causal problems without varlen, window and softcap")


def row_tiles(problem: AttentionProblem, config: Config) -> list[TileBlocks]:
    """Row tiles of one head, of K and V where rows are packed, top to bottom; those without a key have 0 blocks.

    Raises
    ------
    ValueError
        For more than 64 packed heads where the kernel pads them to a power of two, all in one warpgroup; and as
        :func:`check_problem`.
    """
    check_problem(problem)
    shape = shape_of(problem, pack_gqa=config.pack_gqa)
    heads = shape.group if config.pack_gqa else 1
    if config.traits.pads_group:
        heads = padded_group(heads)
        if heads > WARPGROUP_ROWS:
            raise ValueError(f"our kernels pack at most {WARPGROUP_ROWS} heads to one of K and V, got {problem.group}")
    offset, unmasked = problem.seqlen_k - problem.seqlen_q, problem.seqlen_k // config.tile_n
    tiles = []
    for row in range(0, problem.seqlen_q * heads, config.tile_m):
        first, last = row // heads, (min(row + config.tile_m, problem.seqlen_q * heads) - 1) // heads
        blocks = key_blocks(shape, 0, first, last, config.tile_n).stop
        plain = unmasked
        if problem.causal:
            seen = max(first + offset + 1, 0) // config.tile_n
            plain = 0 if config.adds_in_place else min(plain, seen)
        tiles.append(TileBlocks(blocks, blocks - min(plain, blocks)))
    return tiles


def key_tiles(problem: AttentionProblem, config: BackwardConfig) -> list[TileBlocks]:
    """Key tiles of one head and the query blocks that see some key of each; backward."""
    check_problem(problem)
    blocks = -(-problem.seqlen_q // config.tile_m)
    offset = problem.seqlen_k - problem.seqlen_q
    tiles = []
    for first in range(0, problem.seqlen_k, config.tile_n):
        unseen = max(first - offset, 0) // config.tile_m if problem.causal else 0  # query blocks above the diagonal
        tiles.append(TileBlocks(max(blocks - unseen, 0)))
    return tiles


def launched(problem: AttentionProblem, config: AnyConfig) -> AnyConfig:
    """The configuration as compiled for a problem: how row maxima are taken depends on whether keys are hidden."""
    if not isinstance(config, Config):
        return config
    return replace(config, integer_max=config.takes_integer_max(problem.causal))


def head_tiles(problem: AttentionProblem, config: AnyConfig) -> list[TileBlocks]:
    """Tiles of one head: row tiles forward, key tiles backward."""
    return row_tiles(problem, config) if isinstance(config, Config) else key_tiles(problem, config)


def longest_cta(problem: AttentionProblem, config: AnyConfig, ctas: int) -> tuple[TileBlocks, ...]:
    """Tiles of the CTA with the most work, when tiles go longest first to the CTA that is free first."""
    heads = tile_heads(problem, config)
    per_head = sorted((tile for tile in head_tiles(problem, config) if tile.blocks), reverse=True)
    order = [tile for tile in per_head for _ in range(heads)]
    assigned, last = assign([tile.blocks for tile in order], ctas)
    return tuple(order[i] for i in assigned[last]) if order else ()


def hbm_cycles(problem: AttentionProblem, config: AnyConfig, machine: Machine, clock_mhz: float) -> float:
    """SM cycles in which HBM moves every tensor of a launch once, at the rate of all SMs; L2 holds none before."""
    return moved_bytes(problem, config) / (machine["hbm_bytes_per_ns"] * machine["sms"]) * clock_mhz / 1000


def program_of(config: AnyConfig, tiles: Sequence[TileBlocks]) -> Program:
    """Program of one CTA that works through ``tiles``: row tiles forward, key tiles backward.

    Raises
    ------
    ValueError
        For a tile without a block.
    """
    if isinstance(config, Config):
        return forward(config, list(tiles))
    return backward(config, [tile.blocks for tile in tiles])


@lru_cache(maxsize=4096)
def _simulate(config: AnyConfig, tiles: tuple[TileBlocks, ...], machine: Machine, clock_mhz: float) -> Cycles:
    """One CTA, in full."""
    program = program_of(config, tiles)
    timing = interpreter.simulate(program, costs(program, machine, clock_mhz))
    return Cycles(timing.end / TICKS, timing.busy["tensor"] / TICKS, timing.busy["mufu"] / TICKS)


def _cta(config: AnyConfig, tiles: tuple[TileBlocks, ...], machine: Machine, clock: float) -> Cycles:
    """As :func:`_simulate`, from short runs where the CTA is long; where tiles have a CTA each, one after another."""
    if isinstance(config, Config) and config.traits.tile_order == "a CTA each" and len(tiles) > 1:
        each = [count * np.array(_cta(config, (tile,), machine, clock)) for tile, count in Counter(tiles).items()]
        return Cycles(*np.sum(each, axis=0).tolist())
    if sum(tile.blocks for tile in tiles) <= EXACT_BLOCKS:
        return _simulate(config, tiles, machine, clock)

    def run(tile: TileBlocks, blocks: int, count: int) -> np.ndarray:
        short = TileBlocks(blocks, min(tile.masked, blocks))
        return np.array(_simulate(config, (short,) * count, machine, clock))

    total = (
        run(TileBlocks(SHORT), SHORT, 1) - (run(TileBlocks(SHORT), SHORT, 3) - run(TileBlocks(SHORT), SHORT, 1)) / 2
    )  # start and end
    for tile, count in Counter(tiles).items():
        short, long = min(tile.blocks, SHORT), min(tile.blocks, LONG)
        some, more = ((run(tile, n, 3) - run(tile, n, 1)) / 2 for n in (short, long))
        slope = (more - some) / (long - short) if long > short else np.zeros(3)
        total = total + count * (more + slope * (tile.blocks - long))
    return Cycles(*total.tolist())


def estimate(
    problem: AttentionProblem, config: AnyConfig, machine: Machine, clock_mhz: float | None = None
) -> Estimate:
    """Simulate a launch; of the backward its main kernel.

    Parameters
    ----------
    problem : AttentionProblem
        Dense or causal.
    config : Config or BackwardConfig
    machine : Machine
    clock_mhz : float, optional
        SM clock, the machine's maximum by default.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        For a problem that no program is written for.
    """
    clock = clock_mhz or machine["max_clock_mhz"]
    config = launched(problem, config)
    tiles = longest_cta(problem, config, int(machine["sms"]))
    found = _cta(config, tiles, machine, clock) if tiles else Cycles(0.0, 0.0, 0.0)
    hbm = hbm_cycles(problem, config, machine, clock)
    cycles = max(found.cta, hbm) + machine["launch_cycles"]
    return Estimate(cycles, found.cta, hbm, found.tensor, found.mufu, tiles, clock)
