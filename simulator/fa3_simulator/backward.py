"""Program of a backward kernel: one CTA per key tile, five products per row block, dQ added to global memory.

The consumers in this module are transcribed from upstream FlashAttention-3
(hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp), whose schedules differ in the fields of
:mod:`fa3_simulator.backward_schedule`. The consumers of our kernel are in :mod:`fa3_simulator.our_backward`, and what
both have in common in :mod:`fa3_simulator.backward_consumer`.
"""

from __future__ import annotations

from fa3_kernels.plan.barriers import WARP_THREADS
from fa3_simulator.backward_consumer import BackwardConsumer, BackwardResources
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.our_backward import Paired, Split
from fa3_simulator.program import Builder, Program, Slot, Stream
from fa3_simulator.schedules import TileBlocks


class _Upstream(BackwardConsumer):
    """A consumer of FlashAttention-3."""

    def begin(self) -> None:
        if self.s.v_in_registers:
            self.stream.read(self.shared.v[self.index])
            self.stream.work(self.work["load V"])

    def row_block(self, *, is_masked: bool, is_last: bool) -> None:
        del is_last
        stream = self.stream
        shared = self.shared
        s = self.s
        self.wait_full(shared.q_full, self.step)
        self.issue(self.scores, [shared.k[self.index]], [shared.q[self.q_slot]], "S")
        self.wait_full(shared.dout_full, self.step)
        self.issue(
            self.grads, None if s.v_in_registers else [shared.v[self.index]], [shared.dout[self.dout_slot]], "dP"
        )
        stream.read(shared.lse[self.q_slot])
        stream.wgmma_wait(1)
        stream.read(self.accumulators["S"])
        self.weights(is_masked=is_masked)
        stream.read(shared.delta[self.dout_slot])
        stream.wgmma_wait(0)
        if s.dq_slices > 1:
            self.products_in_slices()
        else:
            self.products()
        stream.wgmma_wait(0)
        stream.hand_back(shared.q_empty[self.q_slot])

    def products(self) -> None:
        """Start dV and dQ behind dS, and dK when dV is done."""
        stream = self.stream
        shared = self.shared
        self.make_ds()
        self.issue(self.to_dv, *self.operands(shared.p[self.ds_slot], shared.dout[self.dout_slot]), "dV")
        self.share()
        stream.wgmma_wait(self.issue(self.to_dq, shared.ds[self.ds_slot], shared.k, "dQ"))
        stream.hand_back(shared.dout_empty[self.dout_slot])
        stream.wgmma_wait(self.issue(self.to_dk, *self.operands(shared.ds[self.ds_slot], shared.q[self.q_slot]), "dK"))
        self.add_dq()

    def products_in_slices(self) -> None:
        """Start the same products in two parts of the channels, so that registers hold half of dQ at a time."""
        stream = self.stream
        shared = self.shared
        self.make_ds()
        to_dv = self.operands(shared.p[self.ds_slot], shared.dout[self.dout_slot])
        to_dk = self.operands(shared.ds[self.ds_slot], shared.q[self.q_slot])
        self.issue(self.to_dv, *to_dv, "dV", 2)
        self.share()
        self.issue(self.to_dq, shared.ds[self.ds_slot], shared.k, "dQ", 2)
        stream.wgmma_wait(self.issue(self.to_dv, *to_dv, "dV", 2))
        self.add_dq()
        stream.wgmma_wait(self.issue(self.to_dk, *to_dk, "dK", 2))
        stream.hand_back(shared.dout_empty[self.dout_slot])
        self.issue(self.to_dq, shared.ds[self.ds_slot], shared.k, "dQ", 2)
        stream.wgmma_wait(0)
        self.add_dq()
        self.issue(self.to_dk, *to_dk, "dK", 2)

    def operands(self, shared_parts: list[Slot], rows: Slot) -> tuple[list[Slot] | None, list[Slot]]:
        """Return the operands of dV and dK: P or dS, in registers or in parts in shared memory, and dO or Q."""
        return (None, [rows]) if self.s.scores_transposed else (shared_parts, [rows])

    def make_ds(self) -> None:
        """Write dS, and P unless it stays in registers, to their slot in shared memory.

        With two slots everybody has read the contents of two blocks before; with one slot that needs a barrier.
        """
        stream = self.stream
        shared = self.shared
        stream.read(self.accumulators["dP"])
        if self.s.ds_stages == 1:
            stream.bar_sync(shared.both)
        if not self.s.scores_transposed:
            stream.write(shared.p[self.ds_slot][self.index])
            stream.work(self.work["P to shared memory"])
            self.share()
        stream.write(shared.ds[self.ds_slot][self.index])
        stream.work(self.work["dS"])

    def share(self) -> None:
        """Let all warpgroups use as an operand what all threads have written to shared memory."""
        self.fence()
        self.stream.bar_sync(self.shared.both)

    def add_dq(self) -> None:
        """Send dQ, or a slice of it, to global memory."""
        stream = self.stream
        shared = self.shared
        stream.read(self.accumulators["dQ"])
        if self.s.dq == "registers":
            stream.work(self.work["dQ to memory"])
            stream.reduce(shared.dq[self.index].bytes // self.s.dq_slices)
            return
        stream.bar_sync(shared.dq_empty[self.index])
        stream.write(shared.dq[self.index])
        stream.work(self.work["dQ to shared memory"])
        self.fence()
        stream.bar_arrive(shared.dq_full[self.index])

    def epilogue(self) -> None:
        """Write dV and dK to global memory through the memory of V and K.

        Gradients that several heads add to are in fp32, and each of them then takes the memory of both.
        """
        stream = self.stream
        shared = self.shared
        stream.bar_sync(shared.both)  # the others read this part of K for dQ
        slots = (shared.v[self.index], shared.k[self.index])
        for names in (("dV",), ("dK",)) if shared.adds_gradients else (("dV", "dK"),):
            stream.store_wait()
            for name in names:
                stream.read(self.accumulators[name])
            for slot in slots:
                stream.write(slot)
            stream.work(self.work["dK and dV to shared memory"])
            stream.fence()
            stream.bar_sync(shared.own[self.index])
            for slot in slots:
                stream.store(slot, slot.bytes, adds=shared.adds_gradients)


def _produce(stream: Stream, shared: BackwardResources, tiles: list[TileBlocks]) -> None:
    """Add the loads: row blocks with their lse and D, and K and V of every tile, in our kernel behind its first row
    block."""
    step = 0
    rings = (
        (shared.q_full, shared.q_empty, (shared.q, shared.lse)),
        (shared.dout_full, shared.dout_empty, (shared.dout, shared.delta)),
    )
    for number, tile in enumerate(tiles):
        for block in range(tile.blocks):
            if block == 0 and not shared.schedule.is_ours:
                _load_keys(stream, shared, number)
            for full, empty, slots in rings:
                stream.wait_empty(empty, step)
                stream.load(full[step % len(full)], [ring[step % len(full)] for ring in slots if ring])
            if block == 0 and shared.schedule.is_ours:
                _load_keys(stream, shared, number)
            step += 1


def _load_keys(stream: Stream, shared: BackwardResources, number: int) -> None:
    if number:
        stream.bar_sync(shared.kv_empty)
    stream.load(shared.kv_full, (*shared.k, *shared.v), is_far=True)


def _add_queries(stream: Stream, shared: BackwardResources, blocks: int) -> None:
    """Add the operations of the warp that adds dQ of every consumer to memory by TMA and hands their buffers back.

    ``blocks`` is the number of row blocks of the CTA; consumers hand on dQ of each in ``dq_parts`` parts.
    """
    is_ours = shared.schedule.is_ours
    parts = blocks * shared.schedule.dq_parts
    each = range(len(shared.dq))
    for w in each:
        stream.bar_arrive(shared.dq_empty[w])
    for part in range(parts):
        for w in each:
            stream.bar_sync(shared.dq_full[w])
            if is_ours:  # in our kernel this warp executes the fence, in upstream's the consumer does
                stream.fence()
                stream.delay("proxy_fence_cycles")
            stream.store(shared.dq[w], shared.dq[w].bytes, adds=True)
        for w in each:
            stream.store_wait(len(each) - 1 - w)
            if is_ours or part + 1 < parts:
                stream.bar_arrive(shared.dq_empty[w])


def backward(schedule: BackwardSchedule, tiles: list[TileBlocks], *, adds_gradients: bool = False) -> Program:
    """Return the program of one CTA that works through key tiles, each with its row blocks, of which the first are
    masked.

    With ``adds_gradients`` dK and dV are added to memory in fp32, as several heads share keys.

    Raises
    ------
    ValueError
        If there is no tile, or a tile has no row block or more masked ones than row blocks.
    """
    if not tiles or any(tile.blocks < 1 or not 0 <= tile.masked <= tile.blocks for tile in tiles):
        raise ValueError(f"every key tile needs at least one row block and at most as many masked ones, got {tiles}")
    s = schedule
    builder = Builder(f"{s.family} backward d{s.head_dim} {s.tile_m}x{s.tile_n}")
    shared = BackwardResources(s, adds_gradients=adds_gradients)
    rings = (shared.q, shared.dout, shared.lse, shared.delta, *shared.ds)  # ours keeps D beside lse
    for slot in (slot for ring in rings for slot in ring):  # the footprint does not depend on how many are used
        builder.slots(slot)
    consumer = _Upstream if not s.is_ours else Split if s.splits_roles else Paired
    for index in range(s.consumers):
        consumer(builder, shared, index).run(tiles)
    producer, _ = s.registers
    _produce(builder.actor("producer", WARP_THREADS, producer), shared, tiles)
    if s.dq == "tma warp":
        blocks = sum(tile.blocks for tile in tiles)
        _add_queries(builder.actor("dQ warp", WARP_THREADS, producer), shared, blocks)
    return builder.build()
