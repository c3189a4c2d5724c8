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


def forward(config: Config, tiles: list[TileBlocks]) -> Program:
    """Program of one CTA that works through ``tiles``.

    Raises
    ------
    ValueError
        For a tile without a key block.
    """
    if not tiles or any(tile.blocks < 1 or not 0 <= tile.masked <= tile.blocks for tile in tiles):
        raise ValueError("every tile needs at least one key block and at most as many masked ones")
    s = config
    builder = Builder(f"{s.family} {s.dtype} d{s.head_dim} {s.tile_m}x{s.tile_n}")
    shared = resources_of(s)
    for slot in (*shared.q, *shared.k, *shared.v, *shared.v_raw):  # the footprint does not depend on how many are used
        builder.slots(slot)
    if not s.warp_specialized:
        for index in range(s.consumers):
            Lockstep(builder, shared, index).run(tiles)
        return builder.build()
    producer_regs, consumer_regs = s.registers
    consumer = Consumer if starts_both(s) or s.softmax_stages == 3 else PartsConsumer
    for index in range(s.consumers):
        consumer(builder, shared, index, consumer_regs).run(tiles)
    Producer(builder, shared, producer_regs).run(tiles)
    return builder.build()
