"""Program of a backward kernel: one CTA per key tile, five products per row block, dQ added to global memory.

The consumers here are transcribed from upstream FlashAttention-3 (hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp); what tells
its schedules apart stands in :mod:`fa3_simulator.backward_schedule`. Our kernel is :mod:`fa3_simulator.our_backward`.
"""

from __future__ import annotations

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS
from fa3_simulator.backward_resources import BackwardResources
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.backward_work import backward_work
from fa3_simulator.our_backward import our_backward
from fa3_simulator.program import Builder, Gemm, Program, Slot, Stream
from fa3_simulator.schedules import TileBlocks


class _Consumer:
    """One warpgroup: its keys of every key tile, its share of dQ."""

    def __init__(self, builder: Builder, shared: BackwardResources, index: int) -> None:
        self.shared = shared
        self.index = index
        self.s = s = shared.schedule
        self.stream = builder.actor(f"consumer {index}", WARPGROUP_THREADS, s.registers[1])
        self.work = backward_work(s)
        self.scores = Gemm("Q K^T", *s.scores, 16, False)
        self.grads = Gemm("dO V^T", *s.scores, 16, s.v_in_registers)
        self.to_dv, self.to_dk = (Gemm(name, *s.gradients, 16, s.scores_transposed) for name in ("P^T dO", "dS^T Q"))
        self.to_dq = Gemm("dS K", *s.queries, 16, False)
        self.accumulators = {name: Slot(f"{name}.{index}", 0) for name in ("S", "dP", "dV", "dK", "dQ")}
        self.step = 0

    def run(self, tiles: list[TileBlocks]) -> None:
        stream = self.stream
        shared = self.shared
        for number, tile in enumerate(tiles):
            stream.mark("tile")
            stream.delay("cold_code_cycles")
            stream.wait(shared.kv_full, number)
            if self.s.v_in_registers:
                stream.read(shared.v[self.index])
                stream.vector(self.work["load V"])
            for block in range(tile.blocks):
                self.row_block(is_masked=block < tile.masked)
            stream.delay("cold_code_cycles")
            self.epilogue()
            stream.bar_arrive(shared.kv_empty)
        stream.mark("end")

    def issue(self, gemm: Gemm, a: list[Slot] | None, b: list[Slot], name: str, slices: int = 1) -> int:
        """One of ``slices`` parts of a product; how many groups it is: one for each part of an operand it reads."""
        parts = max(len(a or ()), len(b))
        count = gemm.instructions // slices
        for part in range(parts):
            some = count * (part + 1) // parts - count * part // parts
            left = a[part % len(a)] if a else None
            self.stream.wgmma(gemm._replace(instructions=some), left, b[part % len(b)], self.accumulators[name])
        return parts

    def row_block(self, *, is_masked: bool) -> None:
        stream = self.stream
        shared = self.shared
        s = self.s
        w = self.index
        q = self.step % s.num_stages
        dout = self.step % s.dout_stages
        stream.wait(shared.q_full[q], self.step // s.num_stages)
        self.issue(self.scores, [shared.k[w]], [shared.q[q]], "S")
        stream.wait(shared.dout_full[dout], self.step // s.dout_stages)
        self.issue(self.grads, None if s.v_in_registers else [shared.v[w]], [shared.dout[dout]], "dP")
        stream.read(shared.lse[q])
        stream.wgmma_wait(1)
        stream.read(self.accumulators["S"])
        if is_masked:
            stream.vector(self.work["mask"])
        stream.vector(self.work["exp2"])
        stream.read(shared.delta[dout])
        stream.wgmma_wait(0)
        if s.dq_slices > 1:
            self.products_in_slices(q, dout)
        else:
            self.products(q, dout)
        stream.wgmma_wait(0)
        stream.release(shared.q_empty[q])
        self.step += 1

    def products(self, q: int, dout: int) -> None:
        """Start dV and dQ behind dS, and dK when dV is done."""
        stream = self.stream
        shared = self.shared
        s = self.s
        slot = self.step % s.ds_stages
        self.make_ds(slot)
        self.issue(self.to_dv, *self.operands(shared.p[slot], shared.dout[dout]), "dV")
        self.share()
        stream.wgmma_wait(self.issue(self.to_dq, shared.ds[slot], shared.k, "dQ"))
        stream.release(shared.dout_empty[dout])
        stream.wgmma_wait(self.issue(self.to_dk, *self.operands(shared.ds[slot], shared.q[q]), "dK"))
        self.add_dq()

    def products_in_slices(self, q: int, dout: int) -> None:
        """The same in two parts of the channels, so that half of dQ is held at a time."""
        stream = self.stream
        shared = self.shared
        s = self.s
        slot = self.step % s.ds_stages
        self.make_ds(slot)
        to_dv = self.operands(shared.p[slot], shared.dout[dout])
        to_dk = self.operands(shared.ds[slot], shared.q[q])
        self.issue(self.to_dv, *to_dv, "dV", 2)
        self.share()
        self.issue(self.to_dq, shared.ds[slot], shared.k, "dQ", 2)
        stream.wgmma_wait(self.issue(self.to_dv, *to_dv, "dV", 2))
        self.add_dq()
        stream.wgmma_wait(self.issue(self.to_dk, *to_dk, "dK", 2))
        stream.release(shared.dout_empty[dout])
        self.issue(self.to_dq, shared.ds[slot], shared.k, "dQ", 2)
        stream.wgmma_wait(0)
        self.add_dq()
        self.issue(self.to_dk, *to_dk, "dK", 2)

    def operands(self, shared_parts: list[Slot], rows: Slot) -> tuple[list[Slot] | None, list[Slot]]:
        """Return the operands of dV and dK: P or dS, in registers or in parts in shared memory, and dO or Q."""
        return (None, [rows]) if self.s.scores_transposed else (shared_parts, [rows])

    def make_ds(self, slot: int) -> None:
        """dS, and P where it is shared, to shared memory, whose contents of ``ds_stages`` blocks before were read."""
        stream = self.stream
        shared = self.shared
        s = self.s
        stream.read(self.accumulators["dP"])
        if s.ds_stages == 1:
            stream.bar_sync(shared.both)
        if not s.scores_transposed:
            stream.write(shared.p[slot][self.index])
            stream.vector(self.work["P to shared memory"])
            self.share()
        stream.write(shared.ds[slot][self.index])
        stream.vector(self.work["dS"])

    def share(self) -> None:
        """Let what all threads wrote to shared memory become an operand for all."""
        self.stream.fence()
        self.stream.delay("proxy_fence_cycles")
        self.stream.bar_sync(self.shared.both)

    def add_dq(self) -> None:
        """dQ, or a slice of it, to global memory."""
        stream = self.stream
        shared = self.shared
        s = self.s
        w = self.index
        stream.read(self.accumulators["dQ"])
        if s.dq == "registers":
            stream.vector(self.work["dQ to memory"])
            stream.reduce(shared.dq[w].bytes // s.dq_slices)
            return
        stream.bar_sync(shared.dq_empty[w])
        stream.write(shared.dq[w])
        stream.vector(self.work["dQ to shared memory"])
        stream.fence()
        stream.delay("proxy_fence_cycles")
        stream.bar_arrive(shared.dq_full[w])

    def epilogue(self) -> None:
        """dV and dK through the memory of V and K; of grouped heads they are added in fp32, which takes both."""
        stream = self.stream
        shared = self.shared
        w = self.index
        stream.bar_sync(shared.both)  # the others read this part of K for dQ
        slots = (shared.v[w], shared.k[w])
        for names in (("dV",), ("dK",)) if shared.adds_gradients else (("dV", "dK"),):
            stream.store_wait()
            for name in names:
                stream.read(self.accumulators[name])
            for slot in slots:
                stream.write(slot)
            stream.vector(self.work["dK and dV to shared memory"])
            stream.fence()
            stream.bar_sync(shared.own[w])
            for slot in slots:
                stream.store(slot, slot.bytes, adds=shared.adds_gradients)
        stream.store_wait()


def _produce(stream: Stream, shared: BackwardResources, tiles: list[TileBlocks]) -> None:
    step = 0
    for number, tile in enumerate(tiles):
        if number:
            stream.bar_sync(shared.kv_empty)
        stream.load(shared.kv_full, (*shared.k, *shared.v), is_far=True)
        for _ in range(tile.blocks):
            for full, empty, slots in (
                (shared.q_full, shared.q_empty, (shared.q, shared.lse)),
                (shared.dout_full, shared.dout_empty, (shared.dout, shared.delta)),
            ):
                stream.acquire(empty, step)
                stream.load(full[step % len(full)], [ring[step % len(full)] for ring in slots])
            step += 1


def _add_queries(stream: Stream, shared: BackwardResources, blocks: int) -> None:
    """The warp that adds dQ of every consumer by TMA and hands their buffers back."""
    each = range(len(shared.dq))
    for w in each:
        stream.bar_arrive(shared.dq_empty[w])
    for block in range(blocks):
        for w in each:
            stream.bar_sync(shared.dq_full[w])
            stream.store(shared.dq[w], shared.dq[w].bytes, adds=True)
        for w in each:
            stream.store_wait(len(each) - 1 - w)
            if block + 1 < blocks:
                stream.bar_arrive(shared.dq_empty[w])


def backward(schedule: BackwardSchedule, tiles: list[TileBlocks], *, adds_gradients: bool = False) -> Program:
    """Program of one CTA that works through key tiles with so many row blocks each, of which the first are masked.

    ``adds_gradients``: dK and dV are added in fp32, as several heads share keys.

    Raises
    ------
    ValueError
        For a tile without a row block.
    """
    if not tiles or any(tile.blocks < 1 or not 0 <= tile.masked <= tile.blocks for tile in tiles):
        raise ValueError(f"every key tile needs at least one row block and at most as many masked ones, got {tiles}")
    s = schedule
    builder = Builder(f"{s.family} backward d{s.head_dim} {s.tile_m}x{s.tile_n}")
    shared = BackwardResources(s, adds_gradients=adds_gradients)
    rings = (shared.q, shared.dout, shared.lse, shared.delta, *shared.ds)  # ours keeps D beside lse
    for slot in (slot for ring in rings for slot in ring):  # the footprint does not depend on how many are used
        builder.slots(slot)
    if s.is_ours:
        our_backward(builder, shared, tiles)
        return builder.build()
    for index in range(s.consumers):
        _Consumer(builder, shared, index).run(tiles)
    producer, _ = s.registers
    _produce(builder.actor("producer", WARP_THREADS, producer), shared, tiles)
    if s.dq == "tma warp":
        blocks = sum(tile.blocks for tile in tiles)
        _add_queries(builder.actor("dQ warp", WARP_THREADS, producer), shared, blocks)
    return builder.build()
