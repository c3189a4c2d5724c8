"""A consumer of our FP8 kernel where P V is summed in parts, transcribed from :mod:`fa3_kernels.gluon.forward_fp8`.

A part is a chunk of the keys (``promotion_interval``) times a slice of the channels (as many as registers allow).
Without promotion at head_dim 256 there is one part, straight into O. Two parts are in flight at a time, and Q K^T of
the next block follows the last one. With promotion from 160 on, or without overlap, each part is waited for before
the next is started. The softmax then waits for all of them, so that only the other warpgroup's GEMMs run under it.
:mod:`fa3_simulator.forward` decides which kernels have this consumer; the others have
:class:`fa3_simulator.consumer.Consumer`.
"""

from __future__ import annotations

from collections.abc import Callable

from fa3_simulator.consumer import Consumer
from fa3_simulator.rings import Stage


class PartsConsumer(Consumer):
    """One consumer warpgroup that starts P V of a block, in parts, in front of the scores of the next block."""

    def output_parts(self) -> list[int]:
        return super().output_parts() * self.s.pv_parts[1]

    def issue_part(self, values: Stage, part: int) -> None:
        output, channels = self.outputs[part]
        self.multiply("P V", None, values.slot, output, n=channels, k=self.s.tile_n // self.s.pv_parts[1])

    def add_parts(self, values: Stage, early: bool, last: Callable[[], None]) -> None:
        """Start all parts of P V and add those that are done to O.

        ``last`` starts what follows; if ``early`` it is called before the last part is waited for, and each part is
        started before the one in front of it is waited for. The parts of the last chunk of the keys are added in the
        softmax, unless registers are too short for that.
        """
        count = len(self.outputs)

        def start(part: int) -> None:
            last() if part == count else self.issue_part(values, part)

        start(0)
        for part in range(count):
            if early:
                start(part + 1)
            self.c.wgmma_wait(1 if early else 0)
            if self.s.promotion_interval and (self.s.adds_in_place or part < count - count // self.s.pv_parts[1]):
                self.add_part(part)
            if not early:
                start(part + 1)

    def add_part(self, part: int) -> None:
        """Add a part that is done to O; the same multiply-add rescales O."""
        output, channels = self.outputs[part]
        self.c.read(output)
        self.c.vector("add P V", channels // 2, fma=1)

    def rotated_block(self, values: Stage) -> None:
        """Add P V and the next scores with two or three GEMMs in flight: a part of P V, or then a piece of the scores,
        is started when an earlier part has been added."""
        count = len(self.outputs)
        pieces = max(n for n in (*range(2, self.s.tile_n // self.outputs[0][1] + 1), 1) if not self.s.tile_n % (8 * n))
        depth = self.s.sums_in_flight
        for part in range(depth):
            self.issue_part(values, part)
        for part in range(count):
            self.c.wgmma_wait(min(part + depth, count + pieces) - part - 1)
            self.add_part(part)
            if part + 1 == count:
                self.c.release(values)
            if part + depth < count:
                self.issue_part(values, part + depth)
                continue
            if part + depth == count:
                self.wait_keys()
            if part + depth - count < pieces:
                self.issue_scores(self.c.last(self.shared.k), pieces=pieces)

    def wait_keys(self) -> Stage:
        self.join_warps()
        return self.c.wait_full(self.shared.k)

    def start_scores(self) -> None:
        self.issue_scores(self.wait_keys())
        self.pass_turn()

    def block(self, is_masked: bool, more: bool) -> None:
        values = self.c.wait_full(self.shared.v)
        self.take_turn()
        if self.s.adds_in_place:
            self.rotated_block(values)
        elif self.s.overlaps:
            self.add_parts(values, True, self.start_scores)
            self.c.release(values)
        else:
            self.add_parts(values, False, lambda: self.c.release(values))
            self.start_scores()
        self.c.work(self.work["other"])
        self.c.wgmma_wait(0)
        if self.s.adds_in_place:
            self.pass_turn()
        keys = self.c.last(self.shared.k)
        self.c.release(keys)
        self.row_max(keys, is_masked)
        self.c.work(self.work["early"])
        self.finish_softmax()

    def last_output(self, values: Stage, lead: int | None) -> None:
        crosses = lead is not None
        if crosses:  # the next tile's Q has a slot of its own
            self.c.wait_full(self.shared.q)
        self.take_turn()
        last = self.start_scores if crosses else self.pass_turn
        self.add_parts(values, crosses and not self.s.adds_in_place, last)
