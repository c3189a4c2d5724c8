"""The producer of a warp-specialised forward kernel: loads by TMA, and for e4m3 the transpose of V.

:mod:`fa3_simulator.forward` builds the whole CTA; its consumers are in :mod:`fa3_simulator.consumer`. The loads of a
backward are in :mod:`fa3_simulator.backward`.
"""

from __future__ import annotations

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS
from fa3_simulator.program import NONE, Builder, Mbarrier
from fa3_simulator.resources import Resources
from fa3_simulator.schedules import TileBlocks, copies_queries
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
        self.stream.acquire(shared.empty["q"], number)
        mine = shared.q[slot * self.s.consumers : (slot + 1) * self.s.consumers]
        self.stream.load(shared.q_full[slot], mine, is_far=True)

    def load_block(self, stored: Mbarrier | None, tile: int) -> None:
        """Load K of a block, then V. Where ``stored`` is given, wait in between until O of the tile before has left V's
        memory; ``tile`` is the number of that tile."""
        s = self.s
        shared = self.shared
        slot = self.step % self.s.num_stages
        self.stream.acquire(shared.empty["k"], self.step)
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
        self.stream.acquire(shared.empty["v"], step)
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
        self.stream.acquire(shared.empty["v"], step)
        self.stream.read(shared.v_raw[slot])
        self.stream.write(shared.v[slot])
        trip = transpose_trip(self.s)
        trips = transpose_trips(self.s)
        for number in range(trips):
            self.join_warps(number > 0)
            self.stream.vector(trip)
        self.stream.fence()
        self.join_warps(1)
        self.stream.arrive(shared.v_ready[slot])

    def join_warps(self, times: int) -> None:
        """Add Triton's barriers over the four warps of a transposing producer, around copies and trips."""
        if self.s.transposes_v and self.s.traits.joins_warps:
            for _ in range(times):
                self.stream.bar_sync(self.shared.producer)
