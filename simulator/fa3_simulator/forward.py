"""Programs of forward kernels: one CTA that works through a list of row tiles.

It is put together from consumers (:mod:`fa3_simulator.consumer`, ``partial_sums``, ``lockstep``) and a producer. The
programs of backward kernels are in :mod:`fa3_simulator.backward`.
"""

from __future__ import annotations

from fa3_kernels.plan.config import Config
from fa3_simulator.consumer import Consumer
from fa3_simulator.lockstep import Lockstep
from fa3_simulator.partial_sums import PartsConsumer
from fa3_simulator.producer import Producer
from fa3_simulator.program import Builder, Program
from fa3_simulator.resources import resources_of
from fa3_simulator.schedules import TileBlocks, starts_both


class Forward:
    """Builds the programs of one configuration, one for every list of tiles, and reuses what they have in common."""

    def __init__(self, config: Config) -> None:
        s = config
        shared = resources_of(config)
        self.builder = Builder(f"{s.family} {s.dtype} d{s.head_dim} {s.tile_m}x{s.tile_n}")
        for slot in (*shared.q, *shared.k, *shared.v, *shared.v_raw):  # the footprint does not depend on the tiles
            self.builder.slots(slot)
        self.actors: list[Consumer | Producer]
        if not s.warp_specialized:
            self.actors = [Lockstep(self.builder, shared, index) for index in range(s.consumers)]
            return
        producer_regs, consumer_regs = s.registers
        consumer = Consumer if starts_both(s) or s.softmax_stages == 3 else PartsConsumer
        self.actors = [consumer(self.builder, shared, index, consumer_regs) for index in range(s.consumers)]
        self.actors.append(Producer(self.builder, shared, producer_regs))

    def program(self, tiles: list[TileBlocks]) -> Program:
        """Return the program of one CTA that works through ``tiles``.

        Its lists of works, barriers and so on may also hold entries that only earlier programs of this object use.

        Raises
        ------
        ValueError
            If there is no tile, or a tile has no key block or more masked ones than blocks.
        """
        if not tiles or any(tile.blocks < 1 or not 0 <= tile.masked <= tile.blocks for tile in tiles):
            raise ValueError("every tile needs at least one key block and at most as many masked ones")
        self.builder.restart()
        for actor in self.actors:
            actor.run(tiles)
        return self.builder.build()


def forward(config: Config, tiles: list[TileBlocks]) -> Program:
    """Return the program of one CTA that works through ``tiles``; ValueError as in :meth:`Forward.program`."""
    return Forward(config).program(tiles)
