"""The kernels that ship, as the simulator takes them, and how long one CTA of any kernel takes for its tiles.

What tells a forward from a backward is in :class:`ForwardKernel` and :class:`BackwardKernel`. A CTA is simulated in
full, or extrapolated from short runs where it has many blocks. That is possible as the time of a steady state is affine
in the number of blocks and of tiles. :mod:`fa3_simulator.run` simulates the longest CTA of a launch with this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from fa3_kernels.plan.choose import is_launchable, without_lengths
from fa3_kernels.plan.config import K_STEP, Config
from fa3_kernels.plan.families import FAMILIES, OURS
from fa3_kernels.plan.tile_order import TILE_COST, shape_of
from fa3_reference.problem import AttentionProblem
from fa3_simulator import backward_launch, engine, forward_launch
from fa3_simulator.backward import backward
from fa3_simulator.backward_choice import shipped_schedule
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.costs import TICKS, costs
from fa3_simulator.forward import forward
from fa3_simulator.forward_choice import is_plain
from fa3_simulator.launch import Launch, flops
from fa3_simulator.machine import Machine
from fa3_simulator.program import Program
from fa3_simulator.schedule import Cta
from fa3_simulator.schedules import TileBlocks, copies_queries, switches
from fa3_simulator.splits import merge_cycles, schedule_cycles
from fa3_simulator.turns import in_turn
from fa3_simulator.vector_work import estimated

EXACT_BLOCKS = 256  # CTAs of at most this many blocks are simulated in full
# blocks of the tiles in the two short runs from which longer ones are extrapolated
SHORT = 12
LONG = 24
KNOTS = (1, 2, 4, SHORT, LONG)  # blocks of the row tiles that are simulated; other lengths are interpolated

AnyConfig = Config | BackwardSchedule


class Cycles(NamedTuple):
    """Holds the cycles of one CTA: its duration, and those in which the tensor core, the special-function unit and the
    port of shared memory work."""

    cta: float
    tensor: float
    mufu: float
    smem: float


@lru_cache(maxsize=16)
def sharing_hbm(machine: Machine, clock_mhz: float) -> Machine:
    """Return the machine for a CTA that gets one SM's share of HBM, as all CTAs load from there at the same time."""
    return machine.with_values({"hbm_lone_bytes_per_cycle": machine["hbm_bytes_per_ns"] * 1000 / clock_mhz})


class SimulatedKernel(Protocol):
    """A kernel whose CTAs can be timed: equal ones have the same program for the same tiles.

    ``is_persistent`` says whether a CTA works through many tiles; otherwise every tile is timed alone.
    ``is_affine`` says whether tiles between :data:`KNOTS` may be interpolated.
    """

    @property
    def is_persistent(self) -> bool: ...

    is_affine: ClassVar[bool]

    def cta(self, tiles: Sequence[TileBlocks]) -> Cta:
        """Return the CTA that works through ``tiles``; ValueError for no tile, or one of no block."""
        ...

    def program(self, tiles: Sequence[TileBlocks]) -> Program:
        """Return the program of that CTA."""
        return self.cta(tiles).build()

    def on(self, machine: Machine, clock_mhz: float) -> Machine:
        """Return the machine to simulate one CTA on; unless stated otherwise the CTA has HBM for itself."""
        return machine


@dataclass(frozen=True, slots=True)
class ForwardKernel(SimulatedKernel):
    """A forward of a Config: its tiles are row tiles.

    Its CTA has HBM for itself; :mod:`fa3_simulator.contention` adds what CTAs wait for each other.
    """

    config: Config
    is_affine: ClassVar[bool] = True
    gemms: ClassVar[int] = 2  # of a tile and a block

    @property
    def is_persistent(self) -> bool:
        return self.config.traits.tile_order != "a CTA each"

    @property
    def kind(self) -> str:
        """What a class of timings has in common beside the family."""
        return "e4m3" if self.config.is_fp8 else "16 bits"

    @property
    def built_here(self) -> Config | None:
        """The configuration of a forward of our own, whose kernels can be compiled and timed; else None."""
        return self.config if self.config.traits.is_built_here else None

    @property
    def estimated(self) -> list[str]:
        """What is estimated of the kernel in words, because nobody compiled such a tile."""
        return estimated(self.config)

    @property
    def row(self) -> tuple[int, bool, int | str, str, str]:
        """Parts of the keys, packing, stages, where P is, and the schedule in words."""
        c = self.config
        return c.num_splits, c.pack_gqa, c.num_stages, "reg" if c.pv_from_registers else "smem", switches(c)

    def cta(self, tiles: Sequence[TileBlocks]) -> Cta:
        return forward(self.config, tiles)

    def compiled(self, problem: AttentionProblem) -> ForwardKernel:
        """Return the kernel as it is compiled for a problem: the way to take row maxima depends on the mask."""
        shape = shape_of(without_lengths(problem))
        hides_keys = max(shape.left, shape.right) >= 0 if self.built_here else problem.causal
        return replace(self, config=replace(self.config, integer_max=self.config.takes_integer_max(hides_keys)))

    def as_program(self) -> ForwardKernel:
        """Return the kernel without the fields that only decide which tiles there are: equal ones have equal programs
        for the same tiles."""
        return replace(self, config=replace(self.config, num_splits=1, pack_gqa=copies_queries(self.config)))

    def launch(self, problem: AttentionProblem, machine: Machine, clock_mhz: float) -> Launch:
        """Return the launch for a problem; ValueError for a problem that no program is written for, and for one that is
        too large."""
        tiles, mine = forward_launch.tiles_in_order(
            problem, forward_launch.as_ordered(self.config), int(machine["sms"])
        )
        return Launch(
            tiles,
            operations(problem, self.config),
            forward_launch.moved_bytes(problem, self.config),
            self.is_persistent,
            order="static" if self.built_here else "free first",
            around_cycles=merge_cycles(problem, self.config, machine, clock_mhz),
            tile_cost=None if self.is_persistent and (problem.causal or not is_plain(problem)) else TILE_COST,
            dtype=problem.dtype,
            mine=mine,
            front_cycles=schedule_cycles(problem, machine, clock_mhz),
            waits=partial(forward_launch.sharing, problem, self.config, machine, clock_mhz),
        )

    def other_tiles(self) -> Iterator[list[Config]]:
        """Yield for each number of rows that the family builds, the own one first, the tiles that are legal with the
        other fields as they are, most keys first."""
        c = self.config
        for rows in sorted({c.tile_m, *c.size.rows}, key=lambda rows: rows != c.tile_m):
            keys = [
                n
                for n in range(256, 0, -K_STEP[c.dtype])
                if c.traits.takes_keys(n) and n % (c.promotion_interval or n) == 0
            ]
            yield [replace(c, tile_m=rows, tile_n=n, num_consumer_warpgroups=0) for n in keys]

    def is_shipped(self, problem: AttentionProblem) -> bool:
        """Tell whether the tile and the schedule are those that the family launches for a problem."""
        c = self.config
        own = (c.tile_m, c.tile_n, c.pingpong, c.pv_from_registers)
        is_usual = c.intra_wg_overlap and c.warp_specialized
        return is_usual and own == c.traits.shipped(without_lengths(problem))

    def is_chosen(self, problem: AttentionProblem, family: str) -> bool:
        """Tell whether a launch of our kernels can take this tile and schedule, or another family chooses it."""
        c = self.config
        if family == OURS:
            return is_launchable(problem, c)
        peer = FAMILIES[family]
        chosen = None if peer.refuses(problem) or problem.serving - peer.serving else peer.shipped(problem)
        if chosen is None:
            return False
        splits = peer.splits(problem, chosen.tile_m, chosen.tile_n)
        packs = peer.packs(problem, chosen.tile_m, splits)
        return c == Config(c.dtype, c.head_dim, num_splits=splits, pack_gqa=packs, family=c.family, **chosen._asdict())


@dataclass(frozen=True, slots=True)
class BackwardKernel(SimulatedKernel):
    """A backward of a BackwardSchedule: its tiles are key tiles, and a CTA gets one SM's share of HBM.

    ``adds_gradients`` is for one in which several heads add to dK and dV in fp32. What its properties and methods are
    is said in :class:`ForwardKernel`.
    """

    config: BackwardSchedule
    adds_gradients: bool = False
    is_affine: ClassVar[bool] = False
    gemms: ClassVar[int] = 5
    kind: ClassVar[str] = "backward"
    built_here: ClassVar[Config | None] = None
    estimated: ClassVar[Sequence[str]] = ()

    @property
    def is_persistent(self) -> bool:
        return self.config.is_ours

    @property
    def row(self) -> tuple[int, bool, int | str, str, str]:
        """One part of the keys, heads apart, the stages of Q, dO and dS, the consumers, and the layout."""
        c = self.config
        return 1, False, f"{c.num_stages}/{c.dout_stages}/{c.ds_stages}", f"{c.consumers} wg", c.layout

    def cta(self, tiles: Sequence[TileBlocks]) -> Cta:
        return backward(self.config, tiles, adds_gradients=self.adds_gradients)

    def on(self, machine: Machine, clock_mhz: float) -> Machine:
        return sharing_hbm(machine, clock_mhz)

    def compiled(self, problem: AttentionProblem) -> BackwardKernel:
        return replace(self, adds_gradients=self.config.adds_gradients(problem.group))

    def as_program(self) -> BackwardKernel:
        return self

    def launch(self, problem: AttentionProblem, machine: Machine, clock_mhz: float) -> Launch:
        return Launch(
            [tile.work for tile in backward_launch.key_tiles(problem, self.config)],
            operations(problem, self.config),
            backward_launch.moved_bytes(problem, self.config),
            self.is_persistent,
            around_cycles=backward_launch.around_cycles(problem, self.config, machine, clock_mhz),
            drains=False,
            dtype=problem.dtype,
            waits=None if self.config.turns == "free" else partial(in_turn, problem, self.config, machine, clock_mhz),
        )

    def other_tiles(self) -> Iterator[list[Config]]:
        return iter(())

    def is_shipped(self, problem: AttentionProblem) -> bool:
        return self.is_chosen(problem, self.config.family)

    def is_chosen(self, problem: AttentionProblem, family: str) -> bool:
        return self.config == shipped_schedule(problem, family)


_KERNELS: Mapping[type, type[ForwardKernel | BackwardKernel]] = {
    Config: ForwardKernel,
    BackwardSchedule: BackwardKernel,
}


def kernel_of(config: AnyConfig) -> ForwardKernel | BackwardKernel:
    """Return the kernel of a configuration, forward or backward."""
    return _KERNELS[type(config)](config)  # type: ignore[arg-type]  # each takes the configuration that it is found by


def operations(problem: AttentionProblem, config: AnyConfig) -> float:
    """Return the operations that TFLOP/s are counted from: :func:`fa3_simulator.launch.flops`, times 2.5 for a
    backward; without padding."""
    return flops(problem, (problem.head_dim + problem.head_dim_v) / 2) * (kernel_of(config).gemms / 2)


@dataclass(frozen=True, slots=True)
class TimedCta:
    """A CTA of a launch, which its methods run with the tiles that they are given."""

    kernel: SimulatedKernel
    machine: Machine
    clock_mhz: float

    def exact(self, tiles: tuple[TileBlocks, ...]) -> np.ndarray:
        """Return the numbers of :class:`Cycles` as an array, simulated in full."""
        return np.array(_simulate(self, tiles))

    def run(self, tiles: tuple[TileBlocks, ...]) -> Cycles:
        """Return the cycles for some tiles, extrapolated from short runs where they have many blocks.

        Where every tile has a CTA of its own, the CTAs run one after another.
        """
        if not self.kernel.is_persistent:
            each = [count * self.alone(tile) for tile, count in Counter(tiles).items()]
            return Cycles(*np.sum(each, axis=0).tolist())
        if sum(tile.blocks for tile in tiles) <= EXACT_BLOCKS:
            return Cycles(*self.exact(tiles).tolist())
        short = self.exact((TileBlocks(SHORT),))
        total = short - self.one_more(TileBlocks(SHORT), SHORT)  # what a CTA takes beside its tiles: start and end
        for tile, count in Counter(tiles).items():
            total = total + count * (self.row_tile(tile) if self.kernel.is_affine else self.key_tile(tile))
        return Cycles(*total.tolist())

    def tile_times(self, time: Callable[[TileBlocks], np.ndarray]) -> tuple[float, float]:
        """Return the cycles of a block, and of a tile beside its blocks, of the cycles that ``time`` returns for a
        short and a long tile."""
        short, long = (time(TileBlocks(blocks))[0] for blocks in (SHORT, LONG))
        block = (long - short) / (LONG - SHORT)
        return block, short - SHORT * block

    def tile_cost(self) -> float:
        """Return the time of one more tile beside its blocks, in blocks."""
        block, start = self.tile_times(lambda tile: self.one_more(tile, tile.blocks))
        return round(start / block, 2)

    def row_tile(self, tile: TileBlocks) -> np.ndarray:
        """Return the cycles of one more row tile, which are affine in blocks between :data:`KNOTS` and beyond them."""
        high = next((i for i, knot in enumerate(KNOTS) if knot >= tile.blocks), len(KNOTS) - 1)
        above = self.one_more(tile, KNOTS[high])
        if KNOTS[high] == tile.blocks:
            return above
        below = self.one_more(tile, KNOTS[high - 1])
        return below + (above - below) * (tile.blocks - KNOTS[high - 1]) / (KNOTS[high] - KNOTS[high - 1])

    def key_tile(self, tile: TileBlocks) -> np.ndarray:
        """Return the cycles of one more key tile of a backward, simulated up to LONG blocks and extrapolated beyond."""
        more = self.one_more(tile, min(tile.blocks, LONG))
        if tile.blocks <= LONG:
            return more
        return more + (more - self.one_more(tile, SHORT)) / (LONG - SHORT) * (tile.blocks - LONG)

    def alone(self, tile: TileBlocks) -> np.ndarray:
        """Return the cycles of a CTA with one tile.

        A backward is simulated up to LONG blocks only, as its tiles may have as many lengths as there are key tiles.
        """
        most = EXACT_BLOCKS if self.kernel.is_affine else LONG
        if tile.blocks <= most:
            return self.exact((tile,))
        blocks = LONG
        exact = self.exact((TileBlocks(blocks, min(tile.masked, blocks)),))
        step = exact - self.exact((TileBlocks(SHORT, min(tile.masked, SHORT)),))
        return exact + step / (LONG - SHORT) * (tile.blocks - blocks)

    def one_more(self, tile: TileBlocks, blocks: int) -> np.ndarray:
        """Return the cycles of one more tile behind others, masked like ``tile`` but with ``blocks`` blocks."""
        each = TileBlocks(blocks, min(tile.masked, blocks))
        return (self.exact((each,) * 3) - self.exact((each,))) / 2


@lru_cache(maxsize=4096)
def _simulate(cta: TimedCta, tiles: tuple[TileBlocks, ...]) -> Cycles:
    program = cta.kernel.program(tiles)
    tables = costs(program, cta.kernel.on(cta.machine, cta.clock_mhz), cta.clock_mhz)
    timing = engine.simulate(program, tables)
    return Cycles(
        cta=timing.end / TICKS,
        tensor=timing.busy["tensor"] / TICKS,
        mufu=timing.busy["mufu"] / TICKS,
        smem=timing.busy["smem"] / TICKS,
    )
