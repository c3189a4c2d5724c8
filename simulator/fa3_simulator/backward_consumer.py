"""One consumer warpgroup of a backward kernel: its loop over key tiles and row blocks, which all kernels share.

The consumers of upstream are in :mod:`fa3_simulator.backward`, and those of our kernel in
:mod:`fa3_simulator.our_backward`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from fa3_kernels.plan.barriers import WARPGROUP_THREADS
from fa3_simulator.backward_resources import BackwardResources
from fa3_simulator.backward_work import backward_work
from fa3_simulator.program import Builder, Gemm, Mbarrier, Slot
from fa3_simulator.schedules import TileBlocks

_ACCUMULATORS = ("S", "dP", "dV", "dK", "dQ", "dQ low", "dQ high")


class BackwardConsumer(ABC):
    """One warpgroup, with its keys of every key tile and its share of dQ; methods add operations to its stream."""

    def __init__(self, builder: Builder, shared: BackwardResources, index: int) -> None:
        self.shared = shared
        self.index = index
        self.s = s = shared.schedule
        self.stream = builder.actor(f"consumer {index}", WARPGROUP_THREADS, s.registers[1])
        self.work = backward_work(s, index)
        holds_v = s.v_in_registers and not s.is_ours
        holds_scores = s.scores_transposed or s.is_ours
        self.scores = Gemm("Q K^T", *s.scores, 16, False)
        self.grads = Gemm("dO V^T", *s.scores, 16, holds_v)
        self.to_dv, self.to_dk = (Gemm(name, *s.gradients, 16, holds_scores) for name in ("P^T dO", "dS^T Q"))
        self.to_dq = Gemm("dS K", *s.queries(index), 16, False)
        self.accumulators = {name: Slot(f"{name}.{index}", 0) for name in _ACCUMULATORS}
        self.step = 0

    def run(self, tiles: list[TileBlocks]) -> None:
        """Add all key tiles of the CTA."""
        stream = self.stream
        for number, tile in enumerate(tiles):
            stream.mark("tile")
            stream.delay("cold_code_cycles")
            stream.wait(self.shared.kv_full, number)
            self.begin()
            for block in range(tile.blocks):
                self.row_block(is_masked=block < tile.masked, is_last=block + 1 == tile.blocks)
                self.step += 1
            stream.delay("cold_code_cycles")
            self.epilogue()
            stream.store_wait()
            if self.s.traits.joins_warps:  # Triton's barrier in front of handing K and V back
                self.join_warps()
            stream.bar_arrive(self.shared.kv_empty)
        stream.mark("end")

    @abstractmethod
    def begin(self) -> None:
        """Add the operations in front of a tile's first row block."""

    @abstractmethod
    def row_block(self, *, is_masked: bool, is_last: bool) -> None:
        """Add the products of one row block and what lies between them."""

    @abstractmethod
    def epilogue(self) -> None:
        """Add the operations behind a tile's last row block, which write dK and dV to memory."""

    def issue(self, gemm: Gemm, a: Sequence[Slot] | None, b: Sequence[Slot], name: str, slices: int = 1) -> int:
        """Start one of ``slices`` equal parts of a product into accumulator ``name``; return its wgmma groups.

        There is one group for each slot of the operand in more slots; ``a`` None is an operand in registers.
        """
        parts = max(len(a or ()), len(b))
        count = gemm.instructions // slices
        for part in range(parts):
            some = count * (part + 1) // parts - count * part // parts
            left = a[part % len(a)] if a else None
            self.stream.wgmma(gemm._replace(instructions=some), left, b[part % len(b)], self.accumulators[name])
        return parts

    def join_warps(self) -> None:
        self.stream.bar_sync(self.shared.own[self.index])

    def wait_full(self, ring: Sequence[Mbarrier], step: int) -> None:
        self.stream.wait(ring[step % len(ring)], step // len(ring))

    def weights(self, *, is_masked: bool) -> None:
        if is_masked:
            self.stream.vector(self.work["mask"])
        self.stream.vector(self.work["exp2"])

    def fence(self) -> None:
        self.stream.fence()
        self.stream.delay("proxy_fence_cycles")
