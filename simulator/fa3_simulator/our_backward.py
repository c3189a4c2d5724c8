"""The warps of our backward kernel, transcribed from :mod:`fa3_kernels.gluon.backward` and what Triton makes of it.

Triton adds barriers over a warpgroup's warps, in front of what is written to shared memory and in front of wgmma that
reads it; they stand here as in the PTX of the launches that the audit compiles. The fence that shows staged dQ to TMA
is executed by the warp that adds it, behind the barrier.

Behind the last row block of a tile the scores of one more are computed that does not exist. They are of whatever its
slot holds and nobody reads them, so that the operand is none of the ring's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS
from fa3_simulator.backward_resources import BackwardResources
from fa3_simulator.backward_work import backward_work
from fa3_simulator.program import Builder, Gemm, Slot, Stream
from fa3_simulator.schedules import TileBlocks

_ACCUMULATORS = ("S", "dP", "dV", "dK", "dQ", "dQ low", "dQ high")
_ANY = Slot("any row block", 0)


class _Ours(ABC):
    """A consumer warpgroup: loop over tiles and row blocks, dQ, and the end of a tile."""

    def __init__(self, builder: Builder, shared: BackwardResources, index: int) -> None:
        self.shared = shared
        self.index = index
        self.s = shared.schedule
        self.stream = builder.actor(f"consumer {index}", WARPGROUP_THREADS, self.s.registers[1])
        self.work = backward_work(self.s)
        self.scores = Gemm("Q K^T", *self.s.scores, 16, False)
        self.grads = Gemm("dO V^T", *self.s.scores, 16, False)
        self.to_dv, self.to_dk = (Gemm(name, *self.s.gradients, 16, True) for name in ("P^T dO", "dS^T Q"))
        self.to_dq = Gemm("dS K", *self.s.queries, 16, False)
        self.accumulators = {name: Slot(f"{name}.{index}", 0) for name in _ACCUMULATORS}
        self.step = 0

    def run(self, tiles: list[TileBlocks]) -> None:
        stream = self.stream
        shared = self.shared
        for number, tile in enumerate(tiles):
            stream.mark("tile")
            stream.delay("cold_code_cycles")
            stream.wait(shared.kv_full, number)
            self.begin()
            for block in range(tile.blocks):
                self.row_block(is_masked=block < tile.masked, is_last=block + 1 == tile.blocks)
                self.step += 1
            stream.delay("cold_code_cycles")
            self.epilogue()
            stream.store_wait()
            self.join_warps()
            stream.bar_arrive(shared.kv_empty)
        stream.mark("end")

    @abstractmethod
    def begin(self) -> None:
        """Return what comes in front of a tile's first row block."""

    @abstractmethod
    def row_block(self, *, is_masked: bool, is_last: bool) -> None:
        """The products of one row block and what lies between them."""

    @abstractmethod
    def epilogue(self) -> None:
        """Return what comes behind a tile's last row block: dK and dV to memory."""

    def issue(self, gemm: Gemm, a: Slot | None, b: Sequence[Slot], name: str) -> None:
        """One product, a commit group for every part of the operand."""
        for part, slot in enumerate(b):
            count = gemm.instructions
            some = count * (part + 1) // len(b) - count * part // len(b)
            self.stream.wgmma(gemm._replace(instructions=some), a, slot, self.accumulators[name])

    def join_warps(self) -> None:
        self.stream.bar_sync(self.shared.own[self.index])

    def wait_q(self, step: int) -> None:
        ring = self.shared.q_full
        self.stream.wait(ring[step % len(ring)], step // len(ring))

    def wait_dout(self) -> None:
        ring = self.shared.dout_full
        self.stream.wait(ring[self.step % len(ring)], self.step // len(ring))

    def weights(self, q: int, *, is_masked: bool) -> None:
        self.stream.vector(self.work["beside exp2"])
        if is_masked:
            self.stream.vector(self.work["mask"])
        self.stream.vector(self.work["exp2"])

    def fence(self) -> None:
        self.stream.fence()
        self.stream.delay("proxy_fence_cycles")

    def hand_on(self, name: str, *, joins: bool) -> None:
        """dQ, or a part of it, to the warp that adds it."""
        stream = self.stream
        shared = self.shared
        w = self.index
        stream.bar_sync(shared.dq_empty[w])
        if joins:
            self.join_warps()
        stream.read(self.accumulators[name])
        stream.write(shared.dq[w])
        stream.vector(self.work["dQ to shared memory"])
        stream.bar_arrive(shared.dq_full[w])


class Paired(_Ours):
    """One of two warpgroups with half of the keys each."""

    def begin(self) -> None:
        self.wait_q(self.step)
        self.issue_scores(self.step)

    def issue_scores(self, step: int | None) -> None:
        slot = _ANY if step is None else self.shared.q[step % self.s.num_stages]
        self.issue(self.scores, self.shared.k[self.index], [slot], "S")

    def row_block(self, *, is_masked: bool, is_last: bool) -> None:
        stream = self.stream
        shared = self.shared
        w = self.index
        q, dout, ds = (self.step % n for n in (self.s.num_stages, self.s.dout_stages, self.s.ds_stages))
        stream.wgmma_wait(0)
        stream.read(self.accumulators["S"])
        self.wait_dout()
        self.issue(self.grads, shared.v[w], [shared.dout[dout]], "dP")
        stream.read(shared.lse[q])
        self.weights(q, is_masked=is_masked)
        stream.wgmma_wait(0)
        stream.read(self.accumulators["dP"])
        stream.read(shared.lse[q])
        stream.vector(self.work["beside dS"])
        self.issue(self.to_dv, None, [shared.dout[dout]], "dV")
        self.join_warps()
        stream.write(shared.ds[ds][w])
        stream.vector(self.work["dS"])
        self.fence()
        stream.bar_sync(shared.both)
        self.join_warps()
        stream.vector(self.work["descriptors of dQ"])
        self.issue_queries(ds)
        self.issue(self.to_dk, None, [shared.q[q]], "dK")
        stream.wgmma_wait(1)
        stream.release(shared.dout_empty[dout])
        self.hand_on("dQ", joins=False)
        if not is_last:
            self.wait_q(self.step + 1)
        stream.vector(self.work["descriptors of S"])
        self.issue_scores(None if is_last else self.step + 1)
        stream.wgmma_wait(1)
        stream.release(shared.q_empty[q])

    def issue_queries(self, ds: int) -> None:
        """dS of both warpgroups times all keys."""
        shared = self.shared
        parts = len(self.shared.k)
        for part in range(parts):
            count = self.to_dq.instructions
            some = count * (part + 1) // parts - count * part // parts
            gemm = self.to_dq._replace(instructions=some)
            self.stream.wgmma(gemm, shared.ds[ds][part], shared.k[part], self.accumulators["dQ"])

    def epilogue(self) -> None:
        stream = self.stream
        shared = self.shared
        w = self.index
        stream.wgmma_wait(0)
        stream.bar_sync(shared.both)  # the other one has read these keys for its dQ
        for name in ("dV", "dK"):
            stream.read(self.accumulators[name])
        stream.write(shared.v[w])
        self.join_warps()
        stream.write(shared.k[w])
        stream.vector(self.work["dK and dV to shared memory"])
        self.fence()
        stream.store(shared.v[w], shared.v[w].bytes)
        self.join_warps()
        stream.store(shared.k[w], shared.k[w].bytes)


class Split(_Ours):
    """At head_dim 256 the first of two warpgroups forms S and keeps dV, the second dP and dK; both all 64 keys."""

    def begin(self) -> None:
        """Nothing: scores do not run ahead of their row block here."""

    def row_block(self, *, is_masked: bool, is_last: bool) -> None:
        self.wait_q(self.step)
        if self.index == 0:
            self.scores_and_dv(is_masked=is_masked)
        else:
            self.differences_and_dk(is_masked=is_masked)
        self.queries()

    def scores_and_dv(self, *, is_masked: bool) -> None:
        stream = self.stream
        shared = self.shared
        q = self.step % self.s.num_stages
        stream.vector(self.work["descriptors of S"])
        self.issue(self.scores, shared.k[0], [shared.q[q]], "S")
        stream.read(shared.lse[q])
        stream.wgmma_wait(0)
        stream.release(shared.q_empty[q])
        stream.read(self.accumulators["S"])
        stream.write(shared.scores)
        stream.vector(self.work["S to shared memory"])
        stream.bar_arrive(shared.scores_ready)
        self.weights(q, is_masked=is_masked)
        self.wait_dout()
        self.issue(self.to_dv, None, [shared.dout[0]], "dV")
        stream.bar_sync(shared.both)

    def differences_and_dk(self, *, is_masked: bool) -> None:
        stream = self.stream
        shared = self.shared
        q = self.step % self.s.num_stages
        self.wait_dout()
        stream.vector(self.work["descriptors of S"])
        self.issue(self.grads, shared.v[0], [shared.dout[0]], "dP")
        stream.read(shared.lse[q])
        stream.bar_sync(shared.scores_ready)
        stream.read(shared.scores)
        stream.vector(self.work["S from shared memory"])
        self.weights(q, is_masked=is_masked)
        stream.wgmma_wait(0)
        stream.release(shared.dout_empty[0])
        stream.read(self.accumulators["dP"])
        stream.read(shared.lse[q])
        stream.write(shared.ds[0][0])
        stream.vector(self.work["dS"])
        self.fence()
        stream.bar_sync(shared.both)
        self.issue(self.to_dk, None, [shared.q[q]], "dK")
        self.join_warps()

    def queries(self) -> None:
        """Half of dQ's channels in two parts, behind dV or dK; what those read is handed back when they are done."""
        stream = self.stream
        shared = self.shared
        q = self.step % self.s.num_stages
        stream.vector(self.work["descriptors of dQ"])
        for name in ("dQ low", "dQ high"):
            self.issue(self.to_dq, shared.ds[0][0], shared.k, name)
        stream.wgmma_wait(1)
        stream.release(shared.dout_empty[0] if self.index == 0 else shared.q_empty[q])
        self.hand_on("dQ low", joins=self.index == 0)
        stream.wgmma_wait(0)
        self.hand_on("dQ high", joins=True)

    def epilogue(self) -> None:
        stream = self.stream
        shared = self.shared
        w = self.index
        slot = shared.k[0] if w else shared.v[0]
        stream.bar_sync(shared.both)  # the other one has read K and V
        stream.read(self.accumulators["dK" if w else "dV"])
        stream.write(slot)
        stream.vector(self.work["dK and dV to shared memory"])
        self.fence()
        self.join_warps()
        stream.store(slot, slot.bytes)


def produce(stream: Stream, shared: BackwardResources, tiles: list[TileBlocks]) -> None:
    """The producer: row blocks with their lse and D; K and V of a tile behind its first row block."""
    step = 0
    for number, tile in enumerate(tiles):
        for block in range(tile.blocks):
            stream.acquire(shared.q_empty, step)
            q = step % len(shared.q)
            stream.load(shared.q_full[q], (shared.q[q], shared.lse[q]))
            stream.acquire(shared.dout_empty, step)
            dout = step % len(shared.dout)
            stream.load(shared.dout_full[dout], (shared.dout[dout],))
            if block == 0:
                if number:
                    stream.bar_sync(shared.kv_empty)
                stream.load(shared.kv_full, (*shared.k, *shared.v), is_far=True)
            step += 1


def add_queries(stream: Stream, shared: BackwardResources, blocks: int) -> None:
    """The warp that adds dQ of both warpgroups by TMA, in as many parts as they hand on."""
    each = range(len(shared.dq))
    for w in each:
        stream.bar_arrive(shared.dq_empty[w])
    for _ in range(blocks * shared.schedule.dq_parts):
        for w in each:
            stream.bar_sync(shared.dq_full[w])
            stream.fence()
            stream.delay("proxy_fence_cycles")
            stream.store(shared.dq[w], shared.dq[w].bytes, adds=True)
        for w in each:
            stream.store_wait(len(each) - 1 - w)
            stream.bar_arrive(shared.dq_empty[w])


def our_backward(builder: Builder, shared: BackwardResources, tiles: list[TileBlocks]) -> None:
    """Add the actors of our kernel."""
    s = shared.schedule
    for index in range(s.consumers):
        (Split if s.splits_roles else Paired)(builder, shared, index).run(tiles)
    producer, _ = s.registers
    produce(builder.actor("producer", WARP_THREADS, producer), shared, tiles)
    add_queries(builder.actor("dQ warp", WARP_THREADS, producer), shared, sum(tile.blocks for tile in tiles))
