"""Programs of forward kernels: one CTA that works through a list of row tiles.

It is put together from consumers (:mod:`fa3_simulator.consumer`, ``partial_sums``) and a :class:`Producer`, which loads
by TMA and for e4m3 transposes V. A kernel without warp specialisation is made of :class:`Lockstep` instead, transcribed
from :mod:`fa3_kernels.gluon.forward_lockstep`. The programs of backward kernels are in :mod:`fa3_simulator.backward`.
"""

from __future__ import annotations

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS
from fa3_kernels.plan.config import Config
from fa3_simulator.consumer import Consumer
from fa3_simulator.partial_sums import PartsConsumer
from fa3_simulator.program import NONE, Builder, Mbarrier, Program, Slot
from fa3_simulator.resources import Resources, resources_of
from fa3_simulator.schedules import TileBlocks, copies_queries, starts_both
from fa3_simulator.vector_work import transpose_trip, transpose_trips


def _place(count: int, period: int) -> int:
    """Return the place of a count of steps or tiles in rings that come round in ``period``.

    The first round has places of its own, as nobody waits for slots in it; all later rounds are alike.

    >>> [_place(count, 4) for count in (3, 4, 7, 8, 13)]
    [3, 4, 7, 4, 5]
    """
    return count if count < period else period + count % period


class Producer:
    """Adds the loads of Q, K and V by TMA; where V is transposed too, that is done a step behind the loads."""

    def __init__(self, builder: Builder, shared: Resources, registers: int) -> None:
        self.shared = shared
        self.s = shared.config
        self.stream = builder.actor("producer", WARPGROUP_THREADS if self.s.transposes_v else WARP_THREADS, registers)
        self.step = 0
        self.pending: int | None = None  # step whose V is not loaded, or not transposed, yet

    def run(self, tiles: list[TileBlocks]) -> None:
        """Add all tiles of the CTA; from the second round of the rings on the operations are repeated."""
        self.step = 0
        self.pending = None
        s = self.s
        for number, tile in enumerate(tiles):
            first = self.step
            is_behind = self.pending is not None
            place = (_place(first, 2 * s.num_stages), _place(number, 2 * s.query_slots))
            self.stream.repeated((*place, tile.blocks, is_behind), self.load_tile, number, tile.blocks)
            self.step = first + tile.blocks
            self.pending = self.step - 1 if s.softmax_stages == 3 or s.transposes_v else None
        self.finish_pending()

    def load_tile(self, number: int, blocks: int) -> None:
        s = self.s
        if s.query_slots == 1:
            self.finish_pending()  # without its V the tile before could not end and hand its only slot of Q back
        if not copies_queries(s):
            self.load_q(number)
        for block in range(blocks):
            stored = self.shared.stored if number and block == 0 and s.traits.output_in_v else None
            if stored:  # O of the tile before must have left V's memory
                self.load_block(stored, number - 1)
            else:
                place = (_place(self.step, 2 * s.num_stages), self.pending is None)
                self.stream.repeated(place, self.load_block, None, NONE)
            self.pending = self.step if s.softmax_stages == 3 or s.transposes_v else None
            self.step += 1

    def load_q(self, number: int) -> None:
        shared = self.shared
        slot = number % self.s.query_slots
        self.stream.wait_empty(shared.empty["q"], number)
        mine = shared.q[slot * self.s.consumers : (slot + 1) * self.s.consumers]
        self.stream.load(shared.q_full[slot], mine, is_far=True)

    def load_block(self, stored: Mbarrier | None, tile: int) -> None:
        """Load K of a block, then V. Where ``stored`` is given, wait in between until O of the tile before has left V's
        memory; ``tile`` is the number of that tile."""
        s = self.s
        shared = self.shared
        slot = self.step % self.s.num_stages
        self.stream.wait_empty(shared.empty["k"], self.step)
        self.join_warps(2)
        self.stream.load(shared.k_full[slot], shared.k[slot : slot + 1])
        if stored:
            self.finish_pending()
            self.stream.wait(stored, tile)
        if s.transposes_v:  # the slot was transposed by these very warps
            if s.num_stages == 1:
                self.finish_pending()
            self.join_warps(1)
            self.stream.load(shared.v_full[slot], shared.v_raw[slot : slot + 1])
            self.finish_pending()
        elif s.softmax_stages == 3:
            # V waits for P V of two blocks before: in front of the next K it would hold up what is needed sooner
            self.finish_pending()
        else:
            self.load_v(self.step)

    def load_v(self, step: int) -> None:
        shared = self.shared
        slot = step % self.s.num_stages
        self.stream.wait_empty(shared.empty["v"], step)
        self.stream.load(shared.v_full[slot], shared.v[slot : slot + 1])

    def finish_pending(self) -> None:
        """Finish the V that is pending, if there is one: transpose it and hand it over, or load it only now."""
        if self.pending is None:
            return
        step = self.pending
        self.pending = None
        if not self.s.transposes_v:
            self.load_v(step)
            return
        shared = self.shared
        slot = step % self.s.num_stages
        self.join_warps(1)
        self.stream.wait(shared.v_full[slot], step // self.s.num_stages)
        self.stream.wait_empty(shared.empty["v"], step)
        self.stream.read(shared.v_raw[slot])
        self.stream.write(shared.v[slot])
        trip = transpose_trip(self.s)
        trips = transpose_trips(self.s)
        for number in range(trips):
            self.join_warps(number > 0)
            self.stream.work(trip)
        self.stream.fence()
        self.join_warps(1)
        self.stream.arrive(shared.v_ready[slot])

    def join_warps(self, times: int) -> None:
        """Add Triton's barriers over the four warps of a transposing producer, around copies and trips."""
        if self.s.transposes_v and self.s.traits.joins_warps:
            for _ in range(times):
                self.stream.bar_sync(self.shared.producer)


class Lockstep(Consumer):
    """One warpgroup of a kernel without warp specialisation, which loads for itself.

    Number 0 starts every load, after a barrier of the CTA.
    """

    def __init__(self, builder: Builder, shared: Resources, index: int) -> None:
        super().__init__(builder, shared, index, 255)
        self.barrier = shared.epilogue[index]

    def join_warps(self) -> None:
        """Add Triton's barrier over the CTA in front of the wait for K; another is in front of the wait for V."""
        self.stream.delay("warp_skew_cycles")
        self.stream.bar_sync(self.barrier)

    def load(self, barriers: tuple[Mbarrier, ...], slots: tuple[Slot, ...], step: int, wanted: bool) -> None:
        self.stream.bar_sync(self.barrier)
        if wanted and self.index == 0:
            self.stream.load(barriers[step % len(barriers)], (slots[step % len(slots)],))

    def run(self, tiles: list[TileBlocks]) -> None:
        stream = self.stream
        shared = self.shared
        stages = self.s.num_stages
        base = 0  # steps of the tiles before; the parities of barriers go on from tile to tile
        for number, tile in enumerate(tiles):
            self.tile = number
            stream.mark("tile")
            self.tile_code()
            stream.store_wait()
            stream.bar_sync(self.barrier)
            if self.index == 0:
                stream.load(shared.q_full[0], shared.q, is_far=True)
            for j in range(min(stages, tile.blocks)):
                self.load(shared.k_full, shared.k, base + j, wanted=True)
                self.load(shared.v_full, shared.v, base + j, wanted=True)
            self.wait_full(shared.q_full, number)
            self.wait_full(shared.k_full, base)
            self.issue_scores(number, base)
            stream.wgmma_wait(0)
            self.load(shared.k_full, shared.k, base + stages, wanted=tile.blocks > stages)
            self.row_max(base, tile.masked > 0, is_first=True)
            self.finish_softmax("first")
            for j in range(1, tile.blocks):
                self.step_of(base, j, tile)
            self.step = base + tile.blocks - 1
            self.wait_full(shared.v_full, self.step)
            self.issue_output(self.step)
            stream.wgmma_wait(0)
            self.tile_code()
            self.epilogue(number)
            base += tile.blocks
        stream.store_wait()
        stream.mark("end")

    def step_of(self, base: int, j: int, tile: TileBlocks) -> None:
        """Add block ``j`` of a tile whose first step is ``base``."""
        stream = self.stream
        shared = self.shared
        stages = self.s.num_stages
        self.join_warps()
        self.wait_full(shared.k_full, base + j)
        stream.bar_sync(self.barrier)
        self.wait_full(shared.v_full, base + j - 1)
        if self.s.intra_wg_overlap:
            self.issue_scores(self.tile, base + j)
            self.issue_output(base + j - 1)
            stream.wgmma_wait(1)
        else:
            self.issue_output(base + j - 1)
            stream.wgmma_wait(0)
            self.issue_scores(self.tile, base + j)
            stream.wgmma_wait(0)
        self.prepare()
        self.load(shared.k_full, shared.k, base + j + stages, wanted=j + stages < tile.blocks)
        self.row_max(base + j, j < tile.masked)
        self.early()
        stream.wgmma_wait(0)
        stream.delay("warp_skew_cycles")  # the warps meet at the CTA's barrier in front of the next load
        self.load(shared.v_full, shared.v, base + j - 1 + stages, wanted=j - 1 + stages < tile.blocks)
        self.finish_softmax()


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
