"""Programs of forward kernels: one CTA that works through a list of tiles."""

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
    """Programs of CTAs of one configuration, one for every list of tiles."""

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
        """Program of one CTA that works through ``tiles``; its lists also name what other programs of this object use.

        Raises
        ------
        ValueError
            For a tile without a key block.
        """
        if not tiles or any(tile.blocks < 1 or not 0 <= tile.masked <= tile.blocks for tile in tiles):
            raise ValueError("every tile needs at least one key block and at most as many masked ones")
        self.builder.restart()
        for actor in self.actors:
            actor.run(tiles)
        return self.builder.build()


def forward(config: Config, tiles: list[TileBlocks]) -> Program:
    """Program of one CTA that works through ``tiles``; ValueError as in :meth:`Forward.program`."""
    return Forward(config).program(tiles)
