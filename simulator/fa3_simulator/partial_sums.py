"""A consumer of our FP8 kernel where P V is summed in parts, transcribed from :mod:`fa3_kernels.gluon.forward_fp8`.

A part is a chunk of the keys (``promotion_interval``) times a slice of the channels (as many as registers allow).
Without promotion at head_dim 256 there is one part, straight into O. Two parts are in flight at a time, and Q K^T of
the next block follows the last one. With promotion at 192 and 256, or without overlap, each part is waited for before
the next is started. The softmax then waits for all of them, so that only the other warpgroup's GEMMs run under it.
:mod:`fa3_simulator.forward` decides which kernels have this consumer; the others have
:class:`fa3_simulator.consumer.Consumer`.
"""

from __future__ import annotations

from collections.abc import Callable

from fa3_simulator.consumer import Consumer
from fa3_simulator.program import Builder, Gemm, Slot, Work
from fa3_simulator.resources import Resources
from fa3_simulator.vector_work import ELEMENTS_PER_CHUNK


class PartsConsumer(Consumer):
    """One consumer warpgroup that starts P V of a block, in parts, in front of the scores of the next block."""

    def __init__(self, builder: Builder, shared: Resources, index: int, registers: int) -> None:
        super().__init__(builder, shared, index, registers)
        s = self.s
        slices, chunks = s.pv_parts
        self.slices = slices
        self.width = s.head_dim_v // slices  # channels of a part
        self.part = Gemm("P V", s.tile_n * s.bits // 256 // chunks, self.width, s.bits, True)
        self.outputs = [Slot(f"O.{index}[{part}]", 0) for part in range(slices * chunks)]
        elements = self.width // 2  # elements of a lane
        self.add = Work("add P V", max(1, elements // ELEMENTS_PER_CHUNK), fma=elements)

    def issue_part(self, part: int) -> None:
        self.issue(self.part, None, self.shared.v[self.step % self.s.num_stages], self.outputs[part])

    def add_parts(self, early: bool, last: Callable[[], None]) -> None:
        """Start all parts of P V and add those that are done to O.

        ``last`` starts what follows; if ``early`` it is called before the last part is waited for, and each part is
        started before the one in front of it is waited for. The parts of the last chunk of the keys are added in the
        softmax, unless registers are too short for that.
        """
        count = len(self.outputs)
        self.issue_part(0)
        for part in range(count):
            is_last = part + 1 == count
            if early:
                last() if is_last else self.issue_part(part + 1)
            self.stream.wgmma_wait(1 if early else 0)
            if self.s.promotion_interval and (self.s.adds_in_place or part < count - self.slices):
                self.add_part(part)
            if not early:
                last() if is_last else self.issue_part(part + 1)

    def add_part(self, part: int) -> None:
        """Add a part that is done to O; the same multiply-add rescales O."""
        self.stream.read(self.outputs[part])
        self.stream.work(self.add)

    def rotated_block(self) -> None:
        """Add P V and the next scores with two or three GEMMs in flight: a part of P V, or then a piece of the scores,
        is started when an earlier part has been added."""
        step = self.step
        count = len(self.outputs)
        pieces = max(1, self.s.tile_n // self.width)
        scores = self.qk._replace(n=self.s.tile_n // pieces)
        depth = self.s.sums_in_flight
        for part in range(depth):
            self.issue_part(part)
        for part in range(count):
            self.stream.wgmma_wait(min(part + depth, count + pieces) - part - 1)
            self.add_part(part)
            if part + 1 == count:
                self.release("v", step)
            if part + depth < count:
                self.issue_part(part + depth)
                continue
            if part + depth == count:
                self.join_warps()
                self.wait_full(self.shared.k_full, step + 1)
            if part + depth - count < pieces:
                k = self.shared.k[(step + 1) % self.s.num_stages]
                self.issue(scores, self.query(self.tile), k, self.scores_of(step + 1))

    def start_scores(self, tile: int, step: int) -> None:
        self.join_warps()
        self.wait_full(self.shared.k_full, step)
        self.issue_scores(tile, step)
        self.pass_turn()

    def block(self, is_masked: bool, more: bool) -> None:
        del more
        step = self.step
        self.wait_full(self.shared.v_ready, step)
        self.take_turn()
        if self.s.adds_in_place:
            self.rotated_block()
        elif self.s.overlaps:
            self.add_parts(True, lambda: self.start_scores(self.tile, step + 1))
            self.release("v", step)
        else:
            self.add_parts(False, lambda: self.release("v", step))
            self.start_scores(self.tile, step + 1)
        self.prepare()
        self.stream.wgmma_wait(0)
        if self.s.adds_in_place:
            self.pass_turn()
        self.release("k", step + 1)
        self.row_max(step + 1, is_masked)
        self.early()
        self.finish_softmax()

    def last_output(self, number: int, lead: int | None) -> None:
        if lead is not None:  # the next tile's Q has a slot of its own
            self.wait_full(self.shared.q_full, number + 1)
        self.take_turn()
        if lead is None:
            self.add_parts(False, self.pass_turn)
        else:
            self.add_parts(not self.s.adds_in_place, lambda: self.start_scores(number + 1, self.step + 1))
