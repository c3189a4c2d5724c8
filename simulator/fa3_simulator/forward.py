"""Forward kernels as descriptions: one CTA that works through a list of row tiles.

It is put together from consumers (:mod:`fa3_simulator.consumer`, ``partial_sums``) and a producer, which loads by TMA
and for e4m3 transposes V. A kernel without warp specialisation is made of :class:`Lockstep` instead. The backward
kernels are in :mod:`fa3_simulator.backward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fa3_kernels.plan.config import Config
from fa3_simulator.consumer import Consumer
from fa3_simulator.partial_sums import PartsConsumer
from fa3_simulator.resources import Resources
from fa3_simulator.rings import Ring
from fa3_simulator.schedule import Cta
from fa3_simulator.schedules import TileBlocks, copies_queries, starts_both
from fa3_simulator.vector_work import transpose_trip, transpose_trips


class Producer:
    """Describes the loads of Q, K and V by TMA; where V is transposed too, that is done a step behind the loads."""

    def __init__(self, cta: Cta, shared: Resources) -> None:
        self.shared = shared
        self.s = s = shared.config
        self.p = (cta.warpgroup if s.transposes_v else cta.warp)("producer", registers=s.registers[0])
        self.lag = int(s.transposes_v or s.softmax_stages == 3)  # blocks by which V is handed over behind K

    def run(self, tiles: Sequence[TileBlocks]) -> None:
        """Add all tiles of the CTA."""
        for number, tile in enumerate(tiles):
            if self.s.query_slots == 1:
                self.catch_up(0)  # without its V the tile before could not end and hand its only slot of Q back
            if not copies_queries(self.s):
                self.p.tma_load(self.p.acquire(self.shared.q), far=True)
            for block in range(tile.blocks):
                if number and block == 0 and self.s.traits.output_in_v:
                    self.load_block(number - 1)
                else:
                    self.p.repeated(self.load_block, None)
        self.catch_up(0)

    def load_block(self, stored: int | None) -> None:
        """Load K of a block, then V; in between wait until O of the tile ``stored`` has left V's memory."""
        keys = self.p.acquire(self.shared.k)
        self.join_warps(2)
        self.p.tma_load(keys)
        if stored is not None:
            self.catch_up(1)
            self.p.wait(self.shared.stored, stored)
        if self.shared.v_raw:
            if self.s.num_stages == 1:
                self.catch_up(1)
            self.join_warps(1)
            self.p.tma_load(self.p.acquire(self.shared.v_raw))
        # with three stages V waits for P V of two blocks before: in front of the next K it would hold up what is needed
        # sooner
        self.catch_up(self.lag)

    def catch_up(self, lag: int) -> None:
        """Hand over V of all blocks whose K is loaded, but for the last ``lag``: load it, or transpose it."""
        if self.p.last(self.shared.v, "acquire").use >= self.p.last(self.shared.k, "acquire", lag).use:
            return
        if not self.shared.v_raw:
            self.p.tma_load(self.p.acquire(self.shared.v))
            return
        self.join_warps(1)
        raw = self.p.wait_full(self.shared.v_raw)
        values = self.p.acquire(self.shared.v)
        self.p.read(raw.slot)
        self.p.write(values.slot)
        for number in range(transpose_trips(self.s)):
            self.join_warps(number > 0)
            self.p.work(transpose_trip(self.s))
        self.p.fence()
        self.join_warps(1)
        self.p.arrive(values.full)
        self.p.meet()

    def join_warps(self, times: int) -> None:
        """Add Triton's barriers over the four warps of a transposing producer, around copies and trips."""
        if self.s.transposes_v and self.s.traits.joins_warps:
            for _ in range(times):
                self.p.bar_sync(self.shared.producer)


class Lockstep(Consumer):
    """One warpgroup of a kernel without warp specialisation, which loads for itself.

    It is transcribed from :mod:`fa3_kernels.gluon.forward_lockstep`. Number 0 starts every load, after a barrier of the
    CTA.
    """

    def meet(self) -> None:
        """Add Triton's barrier over the CTA."""
        self.c.bar_sync(self.shared.epilogue[self.index])

    def load(self, ring: Ring, wanted: bool) -> None:
        self.meet()
        if wanted and self.index == 0:
            self.c.tma_load(self.c.acquire(ring), far=ring is self.shared.q)

    def run(self, tiles: Sequence[TileBlocks]) -> None:
        for tile in tiles:
            self.c.mark("tile")
            self.tile_code()
            self.c.store_wait()
            self.load(self.shared.q, True)
            for _ in range(min(self.s.num_stages, tile.blocks)):
                self.load(self.shared.k, True)
                self.load(self.shared.v, True)
            self.c.wait_full(self.shared.q)
            keys = self.c.wait_full(self.shared.k)
            self.first_scores(keys, 0)
            self.c.wgmma_wait(0)
            self.load(self.shared.k, tile.blocks > self.s.num_stages)
            self.only_softmax(keys, tile.masked > 0)
            for block in range(1, tile.blocks):
                self.step(block < tile.masked, tile.blocks - block - self.s.num_stages)
            self.last_output(self.c.wait_full(self.shared.v), None)
            self.tile_code()
            self.epilogue()
        self.c.store_wait()
        self.c.mark("end")

    def step(self, is_masked: bool, left: int) -> None:
        """Add P V of a block and the softmax of the next one; K of ``left`` blocks is still to be loaded."""
        self.c.delay("warp_skew_cycles")
        self.meet()
        keys = self.c.wait_full(self.shared.k)
        self.meet()
        values = self.c.wait_full(self.shared.v)
        if self.s.intra_wg_overlap:
            self.issue_scores(keys)
            self.issue_output(values)
            self.c.wgmma_wait(1)
        else:
            self.issue_output(values)
            self.c.wgmma_wait(0)
            self.issue_scores(keys)
            self.c.wgmma_wait(0)
        self.c.work(self.work["other"])
        self.load(self.shared.k, left > 0)
        self.row_max(keys, is_masked)
        self.c.work(self.work["early"])
        self.c.wgmma_wait(0)
        self.c.delay("warp_skew_cycles")  # the warps meet at the CTA's barrier in front of the next load
        self.load(self.shared.v, left >= 0)
        self.finish_softmax()


@lru_cache(maxsize=16)
def _warps(config: Config) -> tuple[Cta, list[Consumer | Producer]]:
    """Return a CTA in which nothing is done yet, and its warps, which know what earlier lists of tiles had them do."""
    cta = Cta(f"{config.family} {config.dtype} d{config.head_dim} {config.tile_m}x{config.tile_n}", has_latencies=False)
    shared = Resources(cta, config)
    in_turn = Consumer if starts_both(config) or config.softmax_stages == 3 else PartsConsumer
    consumer = in_turn if config.warp_specialized else Lockstep
    consumers = [consumer(cta, shared, index) for index in range(config.consumers)]
    return cta, [*consumers, *([Producer(cta, shared)] if config.warp_specialized else [])]


def forward(config: Config, tiles: Sequence[TileBlocks]) -> Cta:
    """Return one CTA that works through ``tiles``; the next call for the same configuration changes it.

    Its lists of works, barriers and so on may also hold entries of earlier calls.

    Raises
    ------
    ValueError
        If there is no tile, or a tile has no key block or more masked ones than blocks.
    """
    if not tiles or any(tile.blocks < 1 or not 0 <= tile.masked <= tile.blocks for tile in tiles):
        raise ValueError("every tile needs at least one key block and at most as many masked ones")
    cta, warps = _warps(config)
    cta.restart()
    for each in warps:
        each.run(tiles)
    return cta
