"""How long one CTA takes for its tiles: simulated in full, or extrapolated from short runs where it has many blocks.

That is possible as the time of a steady state is affine in the number of blocks and of tiles.
:mod:`fa3_simulator.run` hands out the tiles of a whole launch and simulates its longest CTA with this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from fa3_kernels.plan.config import Config
from fa3_simulator import engine
from fa3_simulator.backward import backward
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.costs import TICKS, costs
from fa3_simulator.forward import Forward
from fa3_simulator.machine import Machine
from fa3_simulator.program import Program
from fa3_simulator.schedules import TileBlocks

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
    share = machine["hbm_bytes_per_ns"] * 1000 / clock_mhz
    return replace(machine, hbm_lone_bytes_per_cycle=replace(machine.hbm_lone_bytes_per_cycle, value=share))


class Kernel(Protocol):
    """A kernel whose CTAs can be timed: equal ones have the same program for the same tiles.

    ``is_persistent`` says whether a CTA works through many tiles; otherwise every tile is timed alone.
    ``is_affine`` says whether tiles between :data:`KNOTS` may be interpolated.
    """

    @property
    def is_persistent(self) -> bool: ...

    is_affine: ClassVar[bool]

    def program(self, tiles: Sequence[TileBlocks]) -> Program:
        """Return the program of one CTA that works through ``tiles``; ValueError for no tile, or one of no block."""
        ...

    def on(self, machine: Machine, clock_mhz: float) -> Machine:
        """Return the machine to simulate one CTA on."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardKernel:
    """A forward of a Config: its tiles are row tiles.

    Its CTA has HBM for itself; :mod:`fa3_simulator.contention` adds what CTAs wait for each other.
    """

    config: Config
    is_affine: ClassVar[bool] = True

    @property
    def is_persistent(self) -> bool:
        return self.config.traits.tile_order != "a CTA each"

    def program(self, tiles: Sequence[TileBlocks]) -> Program:
        return _forward(self.config).program(list(tiles))

    def on(self, machine: Machine, clock_mhz: float) -> Machine:
        del clock_mhz
        return machine


@dataclass(frozen=True, slots=True)
class BackwardKernel:
    """A backward of a BackwardSchedule: its tiles are key tiles, and a CTA gets one SM's share of HBM.

    ``adds_gradients`` is for one in which several heads add to dK and dV in fp32.
    """

    schedule: BackwardSchedule
    adds_gradients: bool = False
    is_affine: ClassVar[bool] = False

    @property
    def is_persistent(self) -> bool:
        return self.schedule.is_ours

    def program(self, tiles: Sequence[TileBlocks]) -> Program:
        return backward(self.schedule, list(tiles), adds_gradients=self.adds_gradients)

    def on(self, machine: Machine, clock_mhz: float) -> Machine:
        return sharing_hbm(machine, clock_mhz)


def kernel_of(config: AnyConfig, *, adds_gradients: bool = False) -> ForwardKernel | BackwardKernel:
    """Return the kernel of a configuration, forward or backward."""
    if isinstance(config, Config):
        return ForwardKernel(config)
    return BackwardKernel(config, adds_gradients)


@dataclass(frozen=True, slots=True)
class TimedCta:
    """A CTA of a launch, which its methods run with the tiles that they are given."""

    kernel: Kernel
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
        return _one_more(self, TileBlocks(blocks, min(tile.masked, blocks)))


@lru_cache(maxsize=4096)
def _one_more(cta: TimedCta, tile: TileBlocks) -> np.ndarray:
    return (cta.exact((tile,) * 3) - cta.exact((tile,))) / 2


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


@lru_cache(maxsize=16)
def _forward(config: Config) -> Forward:
    """Return the builder of a configuration's programs, which knows again what an earlier program has repeated."""
    return Forward(config)
