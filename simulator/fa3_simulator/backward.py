"""Backward kernels as descriptions: one CTA per key tile, five products per row block, dQ added to global memory.

The consumers in this module are transcribed from upstream FlashAttention-3
(hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp), whose schedules differ in the fields of
:mod:`fa3_simulator.backward_schedule`. The consumers of our kernel are in :mod:`fa3_simulator.our_backward`, and what
both have in common in :mod:`fa3_simulator.backward_consumer`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fa3_simulator.backward_consumer import BackwardConsumer, BackwardResources
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.our_backward import Paired, Split
from fa3_simulator.rings import Stage
from fa3_simulator.schedule import Cta
from fa3_simulator.schedules import TileBlocks


class _Upstream(BackwardConsumer):
    """A consumer of FlashAttention-3."""

    def begin(self) -> None:
        if self.s.v_in_registers:
            self.c.read(self.shared.v[self.index], self.work["load V"])

    def row_block(self, *, is_masked: bool, is_last: bool) -> None:
        q = self.c.wait_full(self.shared.q)
        self.issue("S", [self.shared.k[self.index]], [q["q"]])
        dout = self.c.wait_full(self.shared.dout)
        self.issue("dP", None if self.s.v_in_registers else [self.shared.v[self.index]], [dout["dout"]])
        self.c.read(q["lse"])
        self.c.wgmma_wait(1)
        self.c.read(self.sums["S"])
        self.weights(is_masked=is_masked)
        self.c.read(dout["delta"])
        self.c.wgmma_wait(0)
        self.make_ds(q)
        self.multiply(q, dout)
        self.c.wgmma_wait(0, q)

    def multiply(self, q: Stage, dout: Stage) -> None:
        """Start dV and dQ behind dS, and dK when dV is done.

        In two slices they are started in two parts of the channels, so that registers hold half of dQ at a time.
        """
        slices = self.s.dq_slices
        place = q.use % self.s.ds_stages
        ds = self.shared.ds[place]
        # P and dS are in registers, or in parts in shared memory
        to_dv = (None if self.s.scores_transposed else self.shared.p[place], [dout["dout"]])
        to_dk = (None if self.s.scores_transposed else ds, [q["q"]])
        self.issue("dV", *to_dv, slices=slices)
        self.share()
        groups = self.issue("dQ", ds, self.shared.k, slices=slices)
        if slices == 1:
            self.c.wgmma_wait(groups, dout)
            self.c.wgmma_wait(self.issue("dK", *to_dk))
            self.add_dq()
            return
        self.c.wgmma_wait(self.issue("dV", *to_dv, slices=slices))
        self.add_dq()
        self.c.wgmma_wait(self.issue("dK", *to_dk, slices=slices), dout)
        self.issue("dQ", ds, self.shared.k, slices=slices)
        self.c.wgmma_wait(0)
        self.add_dq()
        self.issue("dK", *to_dk, slices=slices)

    def make_ds(self, q: Stage) -> None:
        """Write dS, and P unless it stays in registers, to their slot in shared memory.

        With two slots everybody has read the contents of two blocks before; with one slot that needs a barrier.
        """
        place = q.use % self.s.ds_stages
        self.c.read(self.sums["dP"])
        if self.s.ds_stages == 1:
            self.c.bar_sync(self.shared.both)
        if not self.s.scores_transposed:
            self.c.write(self.shared.p[place][self.index], self.work["P to shared memory"])
            self.share()
        self.c.write(self.shared.ds[place][self.index], self.work["dS"])

    def share(self) -> None:
        """Let all warpgroups use as an operand what all threads have written to shared memory."""
        self.fence()
        self.c.bar_sync(self.shared.both)

    def add_dq(self) -> None:
        """Send dQ, or a slice of it, to global memory."""
        self.c.read(self.sums["dQ"])
        if self.s.dq == "registers":
            self.c.work(self.work["dQ to memory"])
            self.c.global_add(4 * self.s.staged(self.index) // self.s.dq_slices)
            return
        self.c.bar_sync(self.shared.dq_empty[self.index])
        self.c.write(self.shared.dq[self.index], self.work["dQ to shared memory"])
        self.fence()
        self.c.bar_arrive(self.shared.dq_full[self.index])

    def epilogue(self) -> None:
        """Write dV and dK to global memory through the memory of V and K.

        Gradients that several heads add to are in fp32, and each of them then takes the memory of both.
        """
        self.c.bar_sync(self.shared.both)  # the others read this part of K for dQ
        slots = (self.shared.v[self.index], self.shared.k[self.index])
        for names in (("dV",), ("dK",)) if self.adds_gradients else (("dV", "dK"),):
            self.c.store_wait()
            if self.adds_gradients:
                self.c.meet()  # upstream has a barrier between the wait for the store and the next writes
            for name in names:
                self.c.read(self.sums[name])
            for slot in slots:
                self.c.write(slot)
            self.c.work(self.work["dK and dV to shared memory"])
            self.c.fence()
            self.join_warps()
            for slot in slots:
                self.c.tma_store(slot, adds=self.adds_gradients)


def _produce(cta: Cta, shared: BackwardResources, schedule: BackwardSchedule, tiles: Sequence[TileBlocks]) -> None:
    """Describe the loads: row blocks with their lse and D, and K and V of every tile, in our kernel behind its first
    row block."""
    p = cta.warp("producer", registers=schedule.registers[0])
    for number, tile in enumerate(tiles):
        for block in range(tile.blocks + 1):
            if block == int(schedule.is_ours):
                if number:
                    p.bar_sync(shared.kv_empty)
                p.tma_load(shared.kv_full, [*shared.k, *shared.v], far=True)
            if block < tile.blocks:
                p.tma_load(p.acquire(shared.q))
                p.tma_load(p.acquire(shared.dout))


def _add_queries(cta: Cta, shared: BackwardResources, schedule: BackwardSchedule, blocks: int) -> None:
    """Describe the warp that adds dQ of every consumer to memory by TMA and hands their buffers back.

    ``blocks`` is the number of row blocks of the CTA; consumers hand on dQ of each in ``dq_parts`` parts.
    """
    warp = cta.warp("dQ warp", registers=schedule.registers[0])
    parts = blocks * schedule.dq_parts
    for empty in shared.dq_empty:
        warp.bar_arrive(empty)
    for part in range(parts):
        for full, dq in zip(shared.dq_full, shared.dq, strict=True):
            warp.bar_sync(full)
            if schedule.is_ours:  # in our kernel this warp executes the fence, in upstream's the consumer does
                warp.fence()
                warp.delay("proxy_fence_cycles")
            warp.tma_store(dq, adds=True)
        for w, empty in enumerate(shared.dq_empty):
            warp.store_wait(schedule.consumers - 1 - w)
            if schedule.is_ours or part + 1 < parts:
                warp.bar_arrive(empty)


def backward(schedule: BackwardSchedule, tiles: Sequence[TileBlocks], *, adds_gradients: bool = False) -> Cta:
    """Return one CTA that works through key tiles, each with its row blocks, of which the first are
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
    cta = Cta(f"{s.family} backward d{s.head_dim} {s.tile_m}x{s.tile_n}", has_latencies=False)
    shared = BackwardResources(cta, s)
    consumer = _Upstream if not s.is_ours else Split if s.splits_roles else Paired
    for index in range(s.consumers):
        consumer(cta, shared, s, index, adds_gradients).run(tiles)
    _produce(cta, shared, s, tiles)
    if s.dq == "tma warp":
        _add_queries(cta, shared, s, sum(tile.blocks for tile in tiles))
    return cta
