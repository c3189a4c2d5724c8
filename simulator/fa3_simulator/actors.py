"""The actors of a warp-specialised forward kernel, transcribed from real ones: what each does for a list of tiles.

``gluon`` is :mod:`fa3_kernels.gluon`: consumers hand slots back through named barriers, and the first Q K^T of a tile is issued
with the last P V of the tile before. ``flash3`` is upstream FlashAttention-3 (hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp): slots
go back through mbarriers and a tile begins with its own Q K^T.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa3_kernels.barriers import NamedBarrier as NamedBarrierId
from fa3_kernels.barriers import slot_threads
from fa3_simulator.program import Builder, Gemm, Mbarrier, NamedBarrier, Slot, Stream
from fa3_simulator.schedules import WARP, WARPGROUP, Schedule, Tile, softmax_work, transpose_work


@dataclass(frozen=True, slots=True)
class Parts:
    """Names shared by the actors of one CTA."""

    schedule: Schedule
    q: tuple[Slot, ...]  # of one warpgroup each; one ring slot after the other
    k: tuple[Slot, ...]
    v: tuple[Slot, ...]
    v_raw: tuple[Slot, ...]  # as loaded, before the transpose
    q_full: tuple[Mbarrier, ...]
    k_full: tuple[Mbarrier, ...]
    v_full: tuple[Mbarrier, ...]
    v_ready: tuple[Mbarrier, ...]  # transposed; v_full itself without a transpose
    empty: dict[str, tuple]  # of NamedBarrier (gluon) or Mbarrier (flash3), by ring
    turn: tuple[NamedBarrier, ...]
    epilogue: tuple[NamedBarrier, ...]  # over one warpgroup

    @property
    def q_stages(self) -> int:
        return len(self.q_full)


def parts_of(schedule: Schedule) -> Parts:
    s, stages = schedule, schedule.num_stages
    row = s.head_dim * s.bits // 8
    q_stages = 2 if s.kernel == "gluon" and s.head_dim <= 128 and s.warp_specialized else 1
    threads = slot_threads(s.consumers, 4 if s.v_transpose else 1)

    def full(name: str, count: int = stages) -> tuple[Mbarrier, ...]:
        return tuple(Mbarrier(f"{name}_full[{i}]", 1) for i in range(count))

    def empty(name: str, first: int, count: int = stages) -> tuple:
        if s.kernel == "flash3":
            return tuple(Mbarrier(f"{name}_empty[{i}]", s.consumers) for i in range(count))
        return tuple(NamedBarrier(f"{name}_empty[{i}]", first + i, threads) for i in range(count))

    def ring(name: str, size: int) -> tuple[Slot, ...]:
        return tuple(Slot(f"{name}[{i}]", size) for i in range(stages))

    first = int(NamedBarrierId.K_EMPTY)  # where our kernels' rings fit two slots; deeper rings follow on
    turns = first if s.kernel == "flash3" else first + 2 * stages + q_stages
    transposes = s.v_transpose
    v_full = full("v")
    return Parts(
        schedule,
        tuple(Slot(f"q[{i}].{w}", 64 * row) for i in range(q_stages) for w in range(s.consumers)),
        ring("k", s.tile_n * row),
        ring("v", s.tile_n * row),
        ring("v_raw", s.tile_n * row) if transposes else (),
        full("q", q_stages),
        full("k"),
        v_full,
        tuple(Mbarrier(f"v_ready[{i}]", 1) for i in range(stages)) if transposes else v_full,
        {
            "k": empty("k", first),
            "v": empty("v", first + stages),
            "q": empty("q", first + 2 * stages, q_stages),
        },
        tuple(NamedBarrier(f"turn[{w}]", turns + w, 2 * WARPGROUP) for w in range(s.consumers)),
        tuple(NamedBarrier(f"epilogue[{w}]", w + (w > 0), WARPGROUP) for w in range(s.consumers)),
    )


class Consumer:
    """One consumer warpgroup of a warp-specialised kernel."""

    def __init__(self, builder: Builder, parts: Parts, index: int, registers: int) -> None:
        s = parts.schedule
        self.parts, self.s, self.index = parts, s, index
        self.stream = builder.actor(f"consumer {index}", WARPGROUP, registers)
        self.work = softmax_work(s)
        self.qk = Gemm("Q K^T", -(-s.head_dim * s.bits // 256), s.tile_n, s.bits, False)
        self.pv = Gemm("P V", s.tile_n * s.bits // 256, s.head_dim, s.bits, s.pv_from_registers)
        self.scores, self.output = Slot(f"S.{index}", 0), Slot(f"O.{index}", 0)
        self.p = None if s.pv_from_registers else Slot(f"P.{index}", 64 * s.tile_n * s.bits // 8)
        self.step = self.tile = 0

    def release(self, ring: str, slot: int) -> None:
        barrier = self.parts.empty[ring][slot]
        if isinstance(barrier, NamedBarrier):
            self.stream.bar_arrive(barrier)
        else:
            self.stream.arrive(barrier)

    def take_turn(self) -> None:
        if self.s.pingpong and self.s.consumers > 1:
            self.stream.bar_sync(self.parts.turn[self.index])

    def pass_turn(self) -> None:
        if self.s.pingpong and self.s.consumers > 1:
            self.stream.bar_arrive(self.parts.turn[(self.index + 1) % self.s.consumers])

    def wait_full(self, barriers: tuple[Mbarrier, ...], step: int) -> None:
        self.stream.wait(barriers[step % len(barriers)], step // len(barriers))

    def issue_scores(self, tile: int, step: int) -> None:
        q = self.parts.q[tile % self.parts.q_stages * self.s.consumers + self.index]
        self.stream.wgmma(self.qk, q, self.parts.k[step % self.s.num_stages], self.scores)

    def issue_output(self, step: int) -> None:
        self.stream.wgmma(self.pv, self.p, self.parts.v[step % self.s.num_stages], self.output)

    def softmax(self, masked: bool) -> None:
        stream = self.stream
        stream.read(self.scores)
        if masked:
            stream.vector(self.work["mask"])
        stream.vector(self.work["max"])
        stream.delay("row_reduction_cycles")
        stream.vector(self.work["exp"])

    def convert(self) -> None:
        self.stream.vector(self.work["convert"])
        if self.p:
            self.stream.write(self.p)
            self.stream.fence()

    def rescale(self) -> None:
        self.stream.read(self.output)
        self.stream.vector(self.work["rescale"])

    def overlapped_step(self, masked: bool) -> None:
        """P V of this block under the softmax of the next one."""
        step, stages = self.step, self.s.num_stages
        self.wait_full(self.parts.k_full, step + 1)
        self.take_turn()
        self.issue_scores(self.tile, step + 1)
        self.wait_full(self.parts.v_ready, step)
        self.issue_output(step)
        self.pass_turn()
        self.stream.wgmma_wait(1)
        self.release("k", (step + 1) % stages)
        self.softmax(masked)
        self.stream.wgmma_wait(0)
        self.release("v", step % stages)
        self.rescale()
        self.convert()
        self.step += 1

    def serial_step(self, masked: bool) -> None:
        """P V, then Q K^T of the next block, then its softmax."""
        step, stages = self.step, self.s.num_stages
        self.wait_full(self.parts.v_ready, step)
        self.wait_full(self.parts.k_full, step + 1)
        self.take_turn()
        self.issue_output(step)
        self.stream.wgmma_wait(0)
        self.release("v", step % stages)
        self.issue_scores(self.tile, step + 1)
        self.stream.wgmma_wait(0)
        self.release("k", (step + 1) % stages)
        self.pass_turn()
        self.softmax(masked)
        self.rescale()
        self.convert()
        self.step += 1

    def first_scores(self, tile: int, step: int) -> None:
        self.wait_full(self.parts.q_full, tile)
        self.wait_full(self.parts.k_full, step)
        self.take_turn()
        self.issue_scores(tile, step)
        self.pass_turn()

    def run(self, tiles: list[Tile]) -> None:
        """All tiles of the CTA."""
        stream, stages = self.stream, self.s.num_stages
        crosses = self.s.kernel == "gluon" and self.s.head_dim <= 128
        if self.index == self.s.consumers - 1:
            self.pass_turn()
        for number, tile in enumerate(tiles):
            self.tile = number
            stream.mark("tile")
            stream.delay("tile_overhead_cycles")
            if number == 0 or not crosses:
                self.first_scores(number, self.step)
            stream.wgmma_wait(0)
            self.release("k", self.step % stages)
            self.softmax(tile.masked > 0)
            self.convert()
            for block in range(1, tile.blocks):
                step = self.overlapped_step if self.s.intra_wg_overlap else self.serial_step
                step(block < tile.masked)
            if not self.stages_output_in_q:
                self.release("q", number % self.parts.q_stages)
            more = number + 1 < len(tiles)
            self.wait_full(self.parts.v_ready, self.step)
            if crosses and more:
                self.wait_full(self.parts.q_full, number + 1)
                self.take_turn()
                self.issue_output(self.step)
                self.wait_full(self.parts.k_full, self.step + 1)
                self.issue_scores(number + 1, self.step + 1)
                self.pass_turn()
                stream.wgmma_wait(1)
            else:
                self.issue_output(self.step)
                stream.wgmma_wait(0)
            self.release("v", self.step % stages)
            self.step += 1
            self.epilogue(number)
            if self.stages_output_in_q:
                stream.store_wait()
                self.release("q", number % self.parts.q_stages)
        stream.store_wait()
        stream.mark("end")

    @property
    def stages_output_in_q(self) -> bool:
        """Where shared memory is short our kernel stages O in the Q buffer; FlashAttention-3 always in V's."""
        return self.s.kernel == "gluon" and (self.s.head_dim > 128 or not self.s.warp_specialized) and self.s.bits == 16

    def epilogue(self, tile: int) -> None:
        stream, size = self.stream, 64 * self.s.head_dim * 2
        stream.read(self.output)
        stream.vector(self.work["epilogue"])
        stream.store_wait()
        if self.stages_output_in_q:
            out = self.parts.q[tile % self.parts.q_stages * self.s.consumers + self.index]
        else:
            out = Slot(f"out.{self.index}", size, "v" if self.s.kernel == "flash3" else "")
        stream.write(out)
        stream.vector(self.work["store"])
        stream.fence()
        stream.bar_sync(self.parts.epilogue[self.index])
        stream.store(out, size)


def _acquire(stream: Stream, barriers: tuple, use: int) -> None:
    """The producer waits until a slot's ``use``-th occupant (from 0) may be written."""
    slot, turn = use % len(barriers), use // len(barriers)
    if turn == 0:
        return
    barrier = barriers[slot]
    if isinstance(barrier, NamedBarrier):
        stream.bar_sync(barrier)
    else:
        stream.wait(barrier, turn - 1)


class Producer:
    """Loads Q, K and V by TMA; a warpgroup that transposes V too does so a step behind the loads."""

    def __init__(self, builder: Builder, parts: Parts, registers: int) -> None:
        self.parts, self.s = parts, parts.schedule
        self.stream = builder.actor("producer", WARPGROUP if self.s.v_transpose else WARP, registers)
        self.step = 0
        self.pending: int | None = None  # step whose V is loaded and not yet transposed

    def run(self, tiles: list[Tile]) -> None:
        s, parts = self.s, self.parts
        for number, tile in enumerate(tiles):
            if parts.q_stages == 1:
                self.transpose_pending()  # or the tile before could not end and hand Q back
            _acquire(self.stream, parts.empty["q"], number)
            first = number % parts.q_stages * s.consumers
            self.stream.load(parts.q_full[number % parts.q_stages], parts.q[first : first + s.consumers])
            for _ in range(tile.blocks):
                self.load_block()
        self.transpose_pending()

    def load_block(self) -> None:
        s, parts, slot = self.s, self.parts, self.step % self.s.num_stages
        _acquire(self.stream, parts.empty["k"], self.step)
        self.stream.load(parts.k_full[slot], parts.k[slot : slot + 1])
        if not s.v_transpose:
            _acquire(self.stream, parts.empty["v"], self.step)
            self.stream.load(parts.v_full[slot], parts.v[slot : slot + 1])
        else:  # the slot was transposed by these very warps
            if s.num_stages == 1:
                self.transpose_pending()
            self.stream.load(parts.v_full[slot], parts.v_raw[slot : slot + 1])
            self.transpose_pending()
            self.pending = self.step
        self.step += 1

    def transpose_pending(self) -> None:
        if self.pending is None:
            return
        parts, slot = self.parts, self.pending % self.s.num_stages
        self.stream.wait(parts.v_full[slot], self.pending // self.s.num_stages)
        _acquire(self.stream, parts.empty["v"], self.pending)
        self.stream.read(parts.v_raw[slot])
        self.stream.write(parts.v[slot])
        self.stream.vector(transpose_work(self.s))
        self.stream.fence()
        self.stream.arrive(parts.v_ready[slot])
        self.pending = None
