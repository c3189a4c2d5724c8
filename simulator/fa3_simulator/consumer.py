"""The consumer warpgroups of a forward kernel in the language of descriptions, transcribed from real kernels.

The real kernels are our own (:mod:`fa3_kernels.gluon`) and upstream FlashAttention-3
(hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp); their differences are listed in :mod:`fa3_kernels.plan.families`.
:mod:`fa3_simulator.resources` has what the warps of a CTA share, and :mod:`fa3_simulator.forward` the loads and the
whole CTA. With two slots for Q the first Q K^T of a tile is issued with the last P V of the tile before; with one slot
a tile begins with its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from fa3_kernels.plan.barriers import WARPGROUP_THREADS
from fa3_kernels.plan.call import box_channels, slices_of
from fa3_kernels.plan.config import K_STEP, WARPGROUP_ROWS
from fa3_kernels.plan.variant import staged_channels
from fa3_simulator.program import Slot
from fa3_simulator.resources import Resources
from fa3_simulator.rings import Stage
from fa3_simulator.schedule import COPY_BYTES, Cta
from fa3_simulator.schedules import TileBlocks, copies_queries, early_exponentials, starts_both
from fa3_simulator.vector_work import softmax_work


class Consumer:
    """One consumer warpgroup of a warp-specialised kernel; its methods describe what it does."""

    def __init__(self, cta: Cta, shared: Resources, index: int) -> None:
        self.shared = shared
        self.s = s = shared.config
        self.index = index
        self.c = cta.warpgroup(f"consumer {index}", registers=s.registers[1] if s.warp_specialized else 255)
        self.work = softmax_work(s)
        self.hold()
        self.serializes = s.traits.is_serialised and self.c.registers_needed > s.registers[1]
        self.takes_turns = s.pingpong and s.consumers > 1
        self.ahead = s.softmax_stages - 2  # blocks whose scores are begun before the softmax of the current one
        self.scores = [Slot(f"S[{i}] of {self.c.name}", 0) for i in range(1 + self.ahead)]
        self.outputs = [(Slot(f"O[{i}] of {self.c.name}", 0), n) for i, n in enumerate(self.output_parts())]
        self.p = None if s.pv_from_registers else shared.p[index]

    def output_parts(self) -> list[int]:
        """Return the channels of each product that P V is cut into: one product for each slice of O."""
        channels = self.s.head_dim_v
        box = box_channels(channels, self.s.bits) if self.s.traits.is_built_here else channels
        return [count for _, count in slices_of(channels, box, self.s.pv_parts[0])]

    def hold(self) -> None:
        """Count the registers: S (two of them with three stages), O, Q if it is in registers, and P with the promoted
        partial sums, which take those of S unless products run under the softmax."""
        s = self.s
        self.c.addresses = s.traits.other_registers[s.is_fp8]
        self.c.fragment("S", s.tile_n * (s.softmax_stages - 1))
        self.c.fragment("O", s.head_dim_v)
        if s.holds_queries:
            self.c.fragment("Q", s.head_dim, bits=16)
        p = s.tile_n * s.bits // 32 if s.pv_from_registers else 0
        in_parts = s.head_dim_v // s.pv_parts[0] * (s.sums_in_flight if s.adds_in_place else 1)
        sums = 0 if not s.promotion_interval else s.head_dim_v if starts_both(s) else in_parts
        self.c.fragment("P and sums", p + sums, reuses="" if s.overlaps else "S")

    def take_turn(self) -> None:
        if self.takes_turns:
            self.c.bar_sync(self.shared.turn[self.index])

    def pass_turn(self) -> None:
        if self.takes_turns:
            self.c.bar_arrive(self.shared.turn[(self.index + 1) % self.s.consumers])

    def multiply(self, name: str, a: Slot | None, b: Slot, acc: Slot, *, n: int, k: int) -> None:
        """Start a product; where registers are short, wait for every single wgmma of it."""
        step = K_STEP[self.s.dtype]
        parts = -(-k // step) if self.serializes else 1
        for _ in range(parts):
            self.c.wgmma(name, a=a, b=b, acc=acc, n=n, k=-(-k // step) * step // parts, bits=self.s.bits)
            if self.serializes:
                self.c.wgmma_wait(0)

    def issue_scores(self, keys: Stage, *, is_first: bool = False, pieces: int = 1) -> None:
        """Start Q K^T of a block, or a piece of it; for the first blocks of a tile Q is read from shared memory in
        every kernel."""
        query = None if self.s.holds_queries and not is_first else self.own_query
        self.multiply("Q K^T", query, keys.slot, self.scores_of(keys), n=self.s.tile_n // pieces, k=self.s.head_dim)

    @property
    def own_query(self) -> Slot:
        """This warpgroup's rows of the tile's Q."""
        return self.c.last(self.shared.q)[f"q.{self.index}"]

    def scores_of(self, keys: Stage) -> Slot:
        return self.scores[keys.use % len(self.scores)]

    def issue_output(self, values: Stage) -> None:
        if self.s.size.scales_late:
            self.c.work(self.work["last"])
        for output, channels in self.outputs:
            self.multiply("P V", self.p, values.slot, output, n=channels, k=self.s.tile_n)

    def join_warps(self) -> None:
        """Let the four warps meet for the next wgmma; Triton's kernels have a barrier there, in front of the wait for
        K."""
        if self.s.consumers > 1:  # else nothing drives them apart
            self.c.delay("warp_skew_cycles")
        if self.s.traits.joins_warps:
            self.c.bar_sync(self.shared.epilogue[self.index])

    def row_max(self, keys: Stage, masked: bool) -> None:
        names = (*(["mask"] if masked else []), "max", "quad")
        self.c.read(self.scores_of(keys), *(self.work[name] for name in names))

    def only_softmax(self, keys: Stage, masked: bool) -> None:
        """Add the softmax of a tile's first block, which has no O to rescale."""
        names = (*(["mask"] if masked else []), "first max", "quad", "first")
        self.c.read(self.scores_of(keys), *(self.work[name] for name in names))
        self.share_p()

    def finish_softmax(self) -> None:
        """Add the exponentials that are not early, the conversion to P and the rescaling of O.

        Where sums are promoted O is rescaled before the exponentials, to add them to it.
        """
        self.read_output()
        names = ("rescale", "rest") if self.s.promotes else ("rest", "rescale")
        self.c.work(*(self.work[name] for name in names), self.work["drain"])
        self.share_p()

    def share_p(self) -> None:
        if self.p:
            self.c.write(self.p)
            self.c.fence()

    def overlapped_step(self, masked: bool) -> None:
        """Add P V of this block under the softmax of the next one."""
        self.join_warps()
        keys = self.c.wait_full(self.shared.k)
        self.take_turn()
        self.issue_scores(keys)
        values = self.c.wait_full(self.shared.v)
        self.issue_output(values)
        if not self.s.holds_turn:
            self.pass_turn()
        self.c.work(self.work["other"])
        self.c.wgmma_wait(len(self.outputs), keys)
        if early_exponentials(self.s) < 0:  # ptxas puts that wait in front of the row maxima too
            self.c.wgmma_wait(0)
        self.row_max(keys, masked)
        if self.s.holds_turn:
            self.pass_turn()
        self.c.work(self.work["early"])
        self.c.wgmma_wait(0, values)

    def three_stage_step(self, masked: bool, more: bool) -> None:
        """Add P V of this block, and with ``more`` Q K^T of the block after next, under the next block's softmax."""
        self.join_warps()
        keys = self.c.last(self.shared.k)
        following = [self.c.wait_full(self.shared.k)] if more else []
        self.take_turn()
        for stage in following:
            self.issue_scores(stage)
        values = self.c.wait_full(self.shared.v)
        self.issue_output(values)
        self.pass_turn()
        self.c.work(self.work["other"])
        self.row_max(keys, masked)
        self.c.work(self.work["early"])
        self.c.wgmma_wait(0, *following, values)

    def serial_step(self, masked: bool) -> None:
        """Add P V of this block, then Q K^T of the next one, then the next one's softmax."""
        self.join_warps()
        values = self.c.wait_full(self.shared.v)
        keys = self.c.wait_full(self.shared.k)
        self.take_turn()
        self.issue_output(values)
        self.c.wgmma_wait(0, values)
        self.issue_scores(keys)
        self.c.work(self.work["other"])
        self.c.wgmma_wait(0)
        self.row_max(keys, masked)
        self.c.work(self.work["early"])
        self.c.release(keys)
        self.pass_turn()

    def block(self, is_masked: bool, more: bool) -> None:
        """Add P V of a block and the softmax of the next one; ``more`` if the tile has another block behind that."""
        if self.s.softmax_stages == 3:
            self.three_stage_step(is_masked, more)
        elif self.s.intra_wg_overlap:
            self.overlapped_step(is_masked)
        else:
            self.serial_step(is_masked)
        self.finish_softmax()

    def first_scores(self, keys: Stage, lead: int) -> None:
        """Start Q K^T of a tile's first block, whose K is there, and with ``lead`` of the block behind it."""
        self.issue_scores(keys, is_first=True)
        if lead:
            self.issue_scores(self.c.wait_full(self.shared.k), is_first=True)

    def run(self, tiles: Sequence[TileBlocks]) -> None:
        """Add all tiles of the CTA; each has at least one block."""
        leads = [min(self.ahead, tile.blocks - 1) for tile in tiles]
        crosses = self.s.crosses_tiles
        if self.index == self.s.consumers - 1:  # so that warpgroup 0 has the first turn
            self.pass_turn()
        for number, tile in enumerate(tiles):
            self.c.mark("tile")
            if not (crosses and number):  # else its first scores were started with the tile before
                self.c.repeated(self.start_tile, leads[number])
            self.c.repeated(self.first_softmax, leads[number], tile.masked > 0)
            for block in range(1, tile.blocks):
                self.c.repeated(self.block, block < tile.masked, block + self.ahead < tile.blocks)
            self.c.repeated(self.finish_tile, leads[number + 1] if crosses and number + 1 < len(tiles) else None)
        self.c.store_wait()
        self.c.mark("end")

    def start_tile(self, lead: int) -> None:
        """Start a tile's first scores; ``lead`` is how many blocks more have their scores started ahead."""
        if copies_queries(self.s):  # its own rows by its own threads, 16 bytes each at a time, none of it ahead
            query = self.c.acquire(self.shared.q)
            mine = query[f"q.{self.index}"]
            self.c.vector("copy Q", chunks=1, other=-(-mine.bytes // (COPY_BYTES * WARPGROUP_THREADS)))
            self.c.tma_load(query.full, mine, far=True)
        self.c.wait_full(self.shared.q)
        keys = self.c.wait_full(self.shared.k)
        self.take_turn()
        self.first_scores(keys, lead)
        self.pass_turn()

    def first_softmax(self, lead: int, is_masked: bool) -> None:
        """Add the wait for a tile's first scores, and their softmax."""
        self.tile_code()
        keys = self.c.last(self.shared.k, back=lead)
        self.c.wgmma_wait(lead, keys)
        if self.s.holds_queries:
            self.c.read(self.own_query, self.work["hold"])
            self.c.release(self.c.last(self.shared.q))
        self.only_softmax(keys, is_masked)
        if lead:
            self.c.wgmma_wait(0, self.c.last(self.shared.k))

    def tile_code(self) -> None:
        """Add half of the code that a tile executes once, around its main loop; it is fetched anew, and with stalls."""
        self.c.delay("cold_code_cycles")
        self.c.work(self.work["tile"])

    def finish_tile(self, lead: int | None) -> None:
        """Add a tile's last P V and its epilogue, and between them the first Q K^T of the next tile and ``lead`` more.

        A ``lead`` of None leaves those of the next tile out.
        """
        query = self.c.last(self.shared.q)
        if not (self.s.output_in_query_slot or self.s.holds_queries):
            self.c.release(query)
        values = self.c.wait_full(self.shared.v)
        self.last_output(values, lead)
        self.tile_code()
        if self.s.promotes and not self.s.adds_in_place:
            self.read_output()
            self.c.work(self.work["last"])
        self.c.release(values)
        self.epilogue()
        if self.s.output_in_query_slot:
            self.c.store_wait()
            self.c.release(query)

    def last_output(self, values: Stage, lead: int | None) -> None:
        if lead is None:
            self.issue_output(values)
            self.c.wgmma_wait(0)
            return
        self.c.wait_full(self.shared.q)
        self.join_warps()
        self.take_turn()
        self.issue_output(values)
        self.first_scores(self.c.wait_full(self.shared.k), lead)
        self.pass_turn()
        self.c.wgmma_wait(1 + lead)

    def read_output(self) -> None:
        for output, _ in self.outputs:
            self.c.read(output)

    def epilogue(self) -> None:
        """Write O to global memory through a buffer in shared memory, for FP8 in parts of 128 channels."""
        self.read_output()
        self.c.work(self.work["epilogue"])
        if self.s.traits.output_in_v:
            self.store_together()
            return
        out = self.own_query if self.s.output_in_query_slot else self.shared.out[self.index]
        staged = staged_channels(self.s)
        for _ in range(0, self.s.head_dim_v, staged):
            self.c.store_wait()
            self.c.meet()
            self.write_output(out)
            self.c.bar_sync(self.shared.epilogue[self.index])
            self.c.tma_store(out, WARPGROUP_ROWS * staged * 2)

    def write_output(self, out: Slot) -> None:
        self.c.write(out, self.work["store"])
        self.c.fence()

    def store_together(self) -> None:
        """Write O of all consumers to global memory through V's memory, when all have read V.

        The last consumer stores it for all, and V may be loaded again when it has left.
        """
        self.c.bar_sync(self.shared.together)
        self.write_output(self.shared.out[self.index])
        if self.index < self.s.consumers - 1:
            self.c.bar_arrive(self.shared.together)
            return
        self.c.bar_sync(self.shared.together)
        for out in self.shared.out:
            self.c.tma_store(out)
        self.c.store_wait()
        self.c.arrive(self.shared.stored)
