"""The warps of our backward kernel, transcribed from :mod:`fa3_kernels.gluon.backward` and what Triton makes of it.

:mod:`fa3_simulator.backward` builds the whole CTA from these consumers; those of upstream are in that module.

Triton adds barriers over a warpgroup's warps in front of writes to shared memory, and in front of wgmma and TMA that
read what was written. ``join_warps`` is such a barrier. They are placed as in the PTX of the launches that the audit
compiles, without the ones around the exchange of dS, which are removed there
(:mod:`fa3_kernels.gluon.surplus_barriers`). The fence that shows staged dQ to TMA is executed by the warp that adds dQ,
behind the barrier.

Behind the last row block of a tile the kernel computes the scores of one row block more, which does not exist. It reads
whatever is in the slot and nobody uses the result, so the program names an operand outside the ring (``_ANY``).
"""

from __future__ import annotations

from fa3_simulator.backward_consumer import BackwardConsumer
from fa3_simulator.program import Slot

_ANY = (Slot("any row block", 0),)


class _Ours(BackwardConsumer):
    """What both kinds of consumers of our kernel have in common."""

    def weights(self, *, is_masked: bool) -> None:
        self.stream.work(self.work["beside exp2"])
        super().weights(is_masked=is_masked)

    def hand_on(self, name: str, *, joins: bool) -> None:
        """Hand dQ, or the part of it in accumulator ``name``, to the warp that adds it to memory.

        ``joins``: the compiled code has a barrier over the warps in front of this write.
        """
        stream = self.stream
        shared = self.shared
        stream.bar_sync(shared.dq_empty[self.index])
        if joins:
            self.join_warps()
        stream.read(self.accumulators[name])
        stream.write(shared.dq[self.index])
        stream.work(self.work["dQ to shared memory"])
        stream.bar_arrive(shared.dq_full[self.index])


class Paired(_Ours):
    """One of two warpgroups that compute all five products, each for half of the keys."""

    def begin(self) -> None:
        self.wait_full(self.shared.q_full, self.step)
        self.issue_scores(self.step)

    def issue_scores(self, step: int | None) -> None:
        slots = _ANY if step is None else [self.shared.q[step % self.s.num_stages]]
        self.issue(self.scores, [self.shared.k[self.index]], slots, "S")

    def row_block(self, *, is_masked: bool, is_last: bool) -> None:
        stream = self.stream
        shared = self.shared
        stream.wgmma_wait(0)
        stream.read(self.accumulators["S"])
        self.wait_full(shared.dout_full, self.step)
        self.issue(self.grads, [shared.v[self.index]], [shared.dout[self.dout_slot]], "dP")
        stream.read(shared.lse[self.q_slot])
        self.weights(is_masked=is_masked)
        stream.wgmma_wait(0)
        stream.read(self.accumulators["dP"])
        stream.read(shared.lse[self.q_slot])
        stream.work(self.work["beside dS"])
        self.issue(self.to_dv, None, [shared.dout[self.dout_slot]], "dV")
        stream.write(shared.ds[self.ds_slot][self.index])
        stream.work(self.work["dS"])
        self.fence()
        stream.bar_sync(shared.both)
        stream.work(self.work["descriptors of dQ"])
        self.issue(self.to_dq, shared.ds[self.ds_slot], shared.k, "dQ")
        self.issue(self.to_dk, None, [shared.q[self.q_slot]], "dK")
        stream.wgmma_wait(1)
        stream.hand_back(shared.dout_empty[self.dout_slot])
        self.hand_on("dQ", joins=False)
        if not is_last:
            self.wait_full(shared.q_full, self.step + 1)
        stream.work(self.work["descriptors of S"])
        self.issue_scores(None if is_last else self.step + 1)
        stream.wgmma_wait(1)
        stream.hand_back(shared.q_empty[self.q_slot])

    def epilogue(self) -> None:
        stream = self.stream
        shared = self.shared
        stream.wgmma_wait(0)
        stream.bar_sync(shared.both)  # the other warpgroup has read these keys for its dQ
        for name in ("dV", "dK"):
            stream.read(self.accumulators[name])
        stream.write(shared.v[self.index])
        self.join_warps()  # Triton's barrier between two writes to shared memory
        stream.write(shared.k[self.index])
        stream.work(self.work["dK and dV to shared memory"])
        self.fence()
        stream.store(shared.v[self.index], shared.v[self.index].bytes)
        self.join_warps()  # one thread starts the store of what all warps have written
        stream.store(shared.k[self.index], shared.k[self.index].bytes)


class Split(_Ours):
    """One of two warpgroups that share the products at head_dim 192 and 256: the first computes S and dV of all keys,
    the second dP and dK."""

    def begin(self) -> None:
        """Nothing: scores do not run ahead of their row block here."""

    def row_block(self, *, is_masked: bool, is_last: bool) -> None:
        self.wait_full(self.shared.q_full, self.step)
        if self.index == 0:
            self.scores_and_dv(is_masked=is_masked)
        else:
            self.differences_and_dk(is_masked=is_masked)
        self.queries()

    def scores_and_dv(self, *, is_masked: bool) -> None:
        stream = self.stream
        shared = self.shared
        stream.work(self.work["descriptors of S"])
        self.issue(self.scores, [shared.k[0]], [shared.q[self.q_slot]], "S")
        stream.read(shared.lse[self.q_slot])
        stream.wgmma_wait(0)
        stream.hand_back(shared.q_empty[self.q_slot])
        stream.read(self.accumulators["S"])
        stream.write(shared.scores)
        stream.work(self.work["S to shared memory"])
        stream.bar_arrive(shared.scores_ready)
        self.weights(is_masked=is_masked)
        self.wait_full(shared.dout_full, self.step)
        self.issue(self.to_dv, None, [shared.dout[self.dout_slot]], "dV")
        stream.bar_sync(shared.both)

    def differences_and_dk(self, *, is_masked: bool) -> None:
        stream = self.stream
        shared = self.shared
        self.wait_full(shared.dout_full, self.step)
        stream.work(self.work["descriptors of S"])
        self.issue(self.grads, [shared.v[0]], [shared.dout[self.dout_slot]], "dP")
        stream.read(shared.lse[self.q_slot])
        stream.bar_sync(shared.scores_ready)
        stream.read(shared.scores)
        stream.work(self.work["S from shared memory"])
        self.weights(is_masked=is_masked)
        stream.wgmma_wait(0)
        stream.hand_back(shared.dout_empty[self.dout_slot])
        stream.read(self.accumulators["dP"])
        stream.read(shared.lse[self.q_slot])
        stream.write(shared.ds[0][0])
        stream.work(self.work["dS"])
        self.fence()
        stream.bar_sync(shared.both)
        self.issue(self.to_dk, None, [shared.q[self.q_slot]], "dK")
        self.join_warps()

    def queries(self) -> None:
        """Add this warpgroup's channels of dQ, behind its dV or dK, and hand back the slot that dV or dK has read."""
        stream = self.stream
        shared = self.shared
        stream.work(self.work["descriptors of dQ"])
        names = ("dQ low", "dQ high")[: self.s.dq_parts]
        for name in names:
            self.issue(self.to_dq, shared.ds[0], shared.k, name)
        for part, name in enumerate(names):
            stream.wgmma_wait(len(names) - 1 - part)
            if part == 0:
                stream.hand_back(shared.dout_empty[self.dout_slot] if self.index == 0 else shared.q_empty[self.q_slot])
            self.hand_on(name, joins=self.index == 0 or part > 0)

    def epilogue(self) -> None:
        stream = self.stream
        shared = self.shared
        slot = shared.k[0] if self.index else shared.v[0]
        stream.bar_sync(shared.both)  # the other warpgroup has read K and V
        stream.read(self.accumulators["dK" if self.index else "dV"])
        stream.write(slot)
        stream.work(self.work["dK and dV to shared memory"])
        self.fence()
        self.join_warps()  # one thread starts the store of what all warps have written
        stream.store(slot, slot.bytes)
