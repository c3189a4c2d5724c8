"""The warpgroups of a forward kernel without warp specialisation, which run in lock-step and load for themselves.

They are transcribed from :mod:`fa3_kernels.gluon.forward_lockstep`; :mod:`fa3_simulator.forward` builds the CTA.
"""

from __future__ import annotations

from fa3_simulator.consumer import Consumer
from fa3_simulator.program import Builder, Mbarrier, Slot
from fa3_simulator.resources import Resources
from fa3_simulator.schedules import TileBlocks


class Lockstep(Consumer):
    """One warpgroup of a kernel without warp specialisation. Number 0 starts every load, after a barrier of the CTA."""

    def __init__(self, builder: Builder, shared: Resources, index: int) -> None:
        super().__init__(builder, shared, index, 255)
        self.barrier = shared.epilogue[index]

    def join_warps(self) -> None:
        """Add Triton's barrier over the CTA in front of the wait for K; another is in front of the wait for V."""
        self.stream.delay("warp_skew_cycles")
        self.stream.bar_sync(self.barrier)

    def load(self, barriers: tuple[Mbarrier, ...], slots: tuple[Slot, ...], step: int, wanted: bool) -> None:
        self.stream.bar_sync(self.barrier)
        if wanted and self.index == 0:
            self.stream.load(barriers[step % len(barriers)], (slots[step % len(slots)],))

    def run(self, tiles: list[TileBlocks]) -> None:
        stream = self.stream
        shared = self.shared
        stages = self.s.num_stages
        base = 0  # steps of the tiles before; the parities of barriers go on from tile to tile
        for number, tile in enumerate(tiles):
            self.tile = number
            stream.mark("tile")
            self.tile_code()
            stream.store_wait()
            stream.bar_sync(self.barrier)
            if self.index == 0:
                stream.load(shared.q_full[0], shared.q, is_far=True)
            for j in range(min(stages, tile.blocks)):
                self.load(shared.k_full, shared.k, base + j, wanted=True)
                self.load(shared.v_full, shared.v, base + j, wanted=True)
            self.wait_full(shared.q_full, number)
            self.wait_full(shared.k_full, base)
            self.issue_scores(number, base)
            stream.wgmma_wait(0)
            self.load(shared.k_full, shared.k, base + stages, wanted=tile.blocks > stages)
            self.row_max(base, tile.masked > 0, is_first=True)
            self.finish_softmax("first")
            for j in range(1, tile.blocks):
                self.step_of(base, j, tile)
            self.step = base + tile.blocks - 1
            self.wait_full(shared.v_full, self.step)
            self.issue_output(self.step)
            stream.wgmma_wait(0)
            self.tile_code()
            self.epilogue(number)
            base += tile.blocks
        stream.store_wait()
        stream.mark("end")

    def step_of(self, base: int, j: int, tile: TileBlocks) -> None:
        """Add block ``j`` of a tile whose first step is ``base``."""
        stream = self.stream
        shared = self.shared
        stages = self.s.num_stages
        self.join_warps()
        self.wait_full(shared.k_full, base + j)
        stream.bar_sync(self.barrier)
        self.wait_full(shared.v_full, base + j - 1)
        if self.s.intra_wg_overlap:
            self.issue_scores(self.tile, base + j)
            self.issue_output(base + j - 1)
            stream.wgmma_wait(1)
        else:
            self.issue_output(base + j - 1)
            stream.wgmma_wait(0)
            self.issue_scores(self.tile, base + j)
            stream.wgmma_wait(0)
        self.prepare()
        self.load(shared.k_full, shared.k, base + j + stages, wanted=j + stages < tile.blocks)
        self.row_max(base + j, j < tile.masked)
        self.early()
        stream.wgmma_wait(0)
        stream.delay("warp_skew_cycles")  # the warps meet at the CTA's barrier in front of the next load
        self.load(shared.v_full, shared.v, base + j - 1 + stages, wanted=j - 1 + stages < tile.blocks)
        self.finish_softmax()
