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
from fa3_simulator.rings import Stage

_ANY = Slot("any row block", 0)


class _Ours(BackwardConsumer):
    """What both kinds of consumers of our kernel have in common."""

    def hand_on(self, name: str, *, joins: bool) -> None:
        """Hand dQ, or the part of it in accumulator ``name``, to the warp that adds it to memory.

        ``joins``: the compiled code has a barrier over the warps in front of this write.
        """
        self.c.bar_sync(self.shared.dq_empty[self.index])
        if joins:
            self.join_warps()
        self.c.read(self.sums[name])
        self.c.write(self.shared.dq[self.index], self.work["dQ to shared memory"])
        self.c.bar_arrive(self.shared.dq_full[self.index])


class Paired(_Ours):
    """One of two warpgroups that compute all five products, each for half of the keys."""

    def begin(self) -> None:
        self.rows = self.c.wait_full(self.shared.q)
        self.issue_scores(self.rows["q"])

    def issue_scores(self, rows: Slot) -> None:
        self.issue("S", [self.shared.k[self.index]], [rows])

    def row_block(self, *, is_masked: bool, is_last: bool) -> None:
        q = self.rows
        ds = self.shared.ds[q.use % self.s.ds_stages]
        self.c.wgmma_wait(0)
        self.c.read(self.sums["S"])
        dout = self.c.wait_full(self.shared.dout)
        self.issue("dP", [self.shared.v[self.index]], [dout.slot])
        self.c.read(q["lse"])
        self.weights(is_masked=is_masked)
        self.c.wgmma_wait(0)
        self.c.read(self.sums["dP"])
        self.c.read(q["lse"], self.work["beside dS"])
        self.issue("dV", None, [dout.slot])
        self.c.write(ds[self.index], self.work["dS"])
        self.fence()
        self.c.bar_sync(self.shared.both)
        self.c.work(self.work["descriptors of dQ"])
        self.issue("dQ", ds, self.shared.k)
        self.issue("dK", None, [q["q"]])
        self.c.wgmma_wait(1, dout)
        self.hand_on("dQ", joins=False)
        if not is_last:
            self.rows = self.c.wait_full(self.shared.q)
        self.c.work(self.work["descriptors of S"])
        self.issue_scores(_ANY if is_last else self.rows["q"])
        self.c.wgmma_wait(1, q)

    def epilogue(self) -> None:
        self.c.wgmma_wait(0)
        self.c.bar_sync(self.shared.both)  # the other warpgroup has read these keys for its dQ
        for name in ("dV", "dK"):
            self.c.read(self.sums[name])
        self.c.write(self.shared.v[self.index])
        self.join_warps()  # Triton's barrier between two writes to shared memory
        self.c.write(self.shared.k[self.index], self.work["dK and dV to shared memory"])
        self.fence()
        self.c.tma_store(self.shared.v[self.index])
        self.join_warps()  # one thread starts the store of what all warps have written
        self.c.tma_store(self.shared.k[self.index])


class Split(_Ours):
    """One of two warpgroups that share the products from head_dim 160 on: the first computes S and dV of all keys,
    the second dP and dK."""

    def begin(self) -> None:
        """Nothing: scores do not run ahead of their row block here."""

    def row_block(self, *, is_masked: bool, is_last: bool) -> None:
        q = self.c.wait_full(self.shared.q)
        if self.index == 0:
            self.scores_and_dv(q, is_masked=is_masked)
        else:
            self.differences_and_dk(q, is_masked=is_masked)

    def scores_and_dv(self, q: Stage, *, is_masked: bool) -> None:
        self.c.work(self.work["descriptors of S"])
        self.issue("S", self.shared.k, [q["q"]])
        self.c.read(q["lse"])
        self.c.wgmma_wait(0, q)
        self.c.read(self.sums["S"])
        self.c.write(self.shared.scores, self.work["S to shared memory"])
        self.c.bar_arrive(self.shared.scores_ready)
        self.weights(is_masked=is_masked)
        dout = self.c.wait_full(self.shared.dout)
        self.issue("dV", None, [dout.slot])
        self.c.bar_sync(self.shared.both)
        self.queries(dout)

    def differences_and_dk(self, q: Stage, *, is_masked: bool) -> None:
        dout = self.c.wait_full(self.shared.dout)
        self.c.work(self.work["descriptors of S"])
        self.issue("dP", self.shared.v, [dout.slot])
        self.c.read(q["lse"])
        self.c.bar_sync(self.shared.scores_ready)
        self.c.read(self.shared.scores, self.work["S from shared memory"])
        self.weights(is_masked=is_masked)
        self.c.wgmma_wait(0, dout)
        self.c.read(self.sums["dP"])
        self.c.read(q["lse"])
        self.c.write(self.shared.ds[0][0], self.work["dS"])
        self.fence()
        self.c.bar_sync(self.shared.both)
        self.issue("dK", None, [q["q"]])
        self.join_warps()
        self.queries(q)

    def queries(self, rows: Stage) -> None:
        """Add this warpgroup's channels of dQ, behind its dV or dK, and hand back the rows that dV or dK has read."""
        self.c.work(self.work["descriptors of dQ"])
        parts = (" low", " high")[: self.s.dq_parts]
        for part in parts:
            self.issue("dQ", self.shared.ds[0], self.shared.k, part=part)
        for number, part in enumerate(parts):
            self.c.wgmma_wait(len(parts) - 1 - number)
            if number == 0:
                self.c.release(rows)
            self.hand_on("dQ" + part, joins=self.index == 0 or number > 0)

    def epilogue(self) -> None:
        slot = self.shared.k[0] if self.index else self.shared.v[0]
        self.c.bar_sync(self.shared.both)  # the other warpgroup has read K and V
        self.c.read(self.sums["dK" if self.index else "dV"])
        self.c.write(slot, self.work["dK and dV to shared memory"])
        self.fence()
        self.join_warps()  # one thread starts the store of what all warps have written
        self.c.tma_store(slot)
