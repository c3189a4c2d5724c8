"""The consumer warpgroups of a forward kernel, as programs of the simulator, transcribed from real kernels.

The real kernels are our own (:mod:`fa3_kernels.gluon`) and upstream FlashAttention-3
(hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp); their differences are listed in :mod:`fa3_kernels.plan.families`.
:mod:`fa3_simulator.forward` builds the whole CTA, whose loads are in :mod:`fa3_simulator.forward`. With two slots for
Q the first Q K^T of a tile is issued with the last P V of the tile before; with one slot a tile begins with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from fa3_kernels.plan.barriers import WARPGROUP_THREADS
from fa3_kernels.plan.call import boxes
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_kernels.plan.variant import staged_channels
from fa3_simulator.program import Builder, Gemm, Mbarrier, Slot, Work
from fa3_simulator.resources import Resources
from fa3_simulator.schedules import TileBlocks, copies_queries, early_exponentials, serializes
from fa3_simulator.vector_work import softmax_work

COPY_BYTES = 16  # what one thread copies by one cp.async


def _output_parts(config: Config) -> list[int]:
    """Return the channels of each product that P V is cut into: one product for each slice of O. Our kernels cut three
    boxes of channels into two and one."""
    slices = config.pv_parts[0]
    channels = config.head_dim_v
    is_boxed = slices == 1 and config.traits.is_built_here and boxes(channels) == 3
    return [2 * channels // 3, channels // 3] if is_boxed else [channels // slices] * slices


class Consumer:
    """One consumer warpgroup of a warp-specialised kernel; its methods add operations to the warpgroup's stream."""

    def __init__(self, builder: Builder, shared: Resources, index: int, registers: int) -> None:
        s = shared.config
        self.shared = shared
        self.s = s
        self.index = index
        self.serializes, self.early_share = serializes(s), early_exponentials(s)
        self.stream = builder.actor(f"consumer {index}", WARPGROUP_THREADS, registers)
        self.work = softmax_work(s)
        self.qk = Gemm("Q K^T", -(-s.head_dim * s.bits // 256), s.tile_n, s.bits, False)
        self.qk_held = self.qk._replace(a_in_registers=True)
        steps = s.tile_n * s.bits // 256
        self.pv = [Gemm("P V", steps, n, s.bits, s.pv_from_registers) for n in _output_parts(s)]
        self.ahead = s.softmax_stages - 2  # blocks whose scores are begun before the softmax of the current one
        self.scores = [Slot(f"S.{index}" + f"[{i}]" * self.ahead, 0) for i in range(1 + self.ahead)]
        parts = len(self.pv)
        self.outputs = [Slot(f"O.{index}" + f"[{part}]" * (parts > 1), 0) for part in range(parts)]
        self.p = None if s.pv_from_registers else Slot(f"P.{index}", shared.bytes_of["p"])
        # ``round``: steps after which slots and parities are as before; ``step``: key blocks so far; ``tile``: tiles
        self.query_slots = s.query_slots
        self.round = 2 * s.num_stages
        self.step = self.tile = 0

    def release(self, ring: str, use: int) -> None:
        """Hand back the slot of a ring ("q", "k", "v") that its ``use``-th content was in: a step's, for Q a tile's."""
        barriers = self.shared.empty[ring]
        self.stream.hand_back(barriers[use % len(barriers)])

    def query(self, tile: int) -> Slot:
        """Return the slot of this warpgroup's rows of a tile's Q."""
        return self.shared.q[tile % self.s.query_slots * self.s.consumers + self.index]

    def take_turn(self) -> None:
        if self.s.pingpong and self.s.consumers > 1:
            self.stream.bar_sync(self.shared.turn[self.index])

    def pass_turn(self) -> None:
        if self.s.pingpong and self.s.consumers > 1:
            self.stream.bar_arrive(self.shared.turn[(self.index + 1) % self.s.consumers])

    def wait_full(self, barriers: tuple[Mbarrier, ...], step: int) -> None:
        self.stream.wait(barriers[step % len(barriers)], step // len(barriers))

    def issue(self, gemm: Gemm, a: Slot | None, b: Slot, accumulator: Slot) -> None:
        if not self.serializes:
            self.stream.issue(gemm, a, b, accumulator)
            return
        for _ in range(gemm.instructions):
            self.stream.issue(gemm._replace(instructions=1), a, b, accumulator)
            self.stream.wgmma_wait(0)

    def issue_scores(self, tile: int, step: int, is_first: bool = False) -> None:
        """Start Q K^T of a block; for the first blocks of a tile Q is read from shared memory in every kernel."""
        k = self.shared.k[step % self.s.num_stages]
        if self.s.holds_queries and not is_first:
            self.issue(self.qk_held, None, k, self.scores_of(step))
        else:
            self.issue(self.qk, self.query(tile), k, self.scores_of(step))

    def scores_of(self, step: int) -> Slot:
        return self.scores[step % len(self.scores)]

    def issue_output(self, step: int) -> None:
        for gemm, output in zip(self.pv, self.outputs, strict=True):
            self.issue(gemm, self.p, self.shared.v[step % self.s.num_stages], output)

    def join_warps(self) -> None:
        """Let the four warps meet for the next wgmma; Triton's kernels have a barrier there, in front of the wait for
        K."""
        if self.s.consumers > 1:  # else nothing drives them apart
            self.stream.delay("warp_skew_cycles")
        if self.s.traits.joins_warps:
            self.stream.bar_sync(self.shared.epilogue[self.index])

    def row_max(self, step: int, masked: bool, is_first: bool = False) -> None:
        stream = self.stream
        stream.read(self.scores_of(step))
        if masked:
            stream.work(self.work["mask"])
        stream.work(self.work["first max" if is_first else "max"])
        stream.work(self.work["quad"])

    def early(self) -> None:
        """Add the exponentials that ptxas issues before the wait for the previous P V, or before the turn is passed."""
        self.stream.work(self.work["early"])

    def finish_softmax(self, work: str = "rest") -> None:
        """Add the other exponentials, the conversion to P and the rescaling of O.

        For a tile's first block, which has no O to rescale, ``work`` is "first".
        """
        # where sums are promoted O is rescaled before the exponentials, to add them to it
        if work == "rest":
            self.read_output()
            if self.s.promotes:
                self.stream.work(self.work["rescale"])
        self.stream.work(self.work[work])
        if work == "rest" and not self.s.promotes:
            self.stream.work(self.work["rescale"])
        if work == "rest" and self.work["drain"].stall:
            self.stream.work(self.work["drain"])
        if self.p:
            self.stream.write(self.p)
            self.stream.fence()

    def prepare(self) -> None:
        """Add the work on addresses and descriptors, in front of a step's waits."""
        self.stream.work(self.work["other"])

    def overlapped_step(self, masked: bool) -> None:
        """Add P V of this block under the softmax of the next one."""
        step = self.step
        self.join_warps()
        self.wait_full(self.shared.k_full, step + 1)
        self.take_turn()
        self.issue_scores(self.tile, step + 1)
        self.wait_full(self.shared.v_ready, step)
        self.issue_output(step)
        if not self.s.holds_turn:
            self.pass_turn()
        self.prepare()
        self.stream.wgmma_wait(len(self.outputs))
        self.release("k", step + 1)
        if self.early_share < 0:  # ptxas puts that wait in front of the row maxima too
            self.stream.wgmma_wait(0)
        self.row_max(step + 1, masked)
        if self.s.holds_turn:
            self.pass_turn()
        self.early()
        self.stream.wgmma_wait(0)
        self.release("v", step)
        self.finish_softmax()

    def three_stage_step(self, masked: bool, more: bool) -> None:
        """Add P V of this block, and with ``more`` Q K^T of the block after next, under the next block's softmax."""
        step = self.step
        self.join_warps()
        if more:
            self.wait_full(self.shared.k_full, step + 2)
        self.take_turn()
        if more:
            self.issue_scores(self.tile, step + 2)
        self.wait_full(self.shared.v_ready, step)
        self.issue_output(step)
        self.pass_turn()
        self.prepare()
        self.row_max(step + 1, masked)
        self.early()
        self.stream.wgmma_wait(0)
        if more:
            self.release("k", step + 2)
        self.release("v", step)
        self.finish_softmax()

    def serial_step(self, masked: bool) -> None:
        """Add P V of this block, then Q K^T of the next one, then the next one's softmax."""
        step = self.step
        self.join_warps()
        self.wait_full(self.shared.v_ready, step)
        self.wait_full(self.shared.k_full, step + 1)
        self.take_turn()
        self.issue_output(step)
        self.stream.wgmma_wait(0)
        self.release("v", step)
        self.issue_scores(self.tile, step + 1)
        self.prepare()
        self.stream.wgmma_wait(0)
        self.row_max(step + 1, masked)
        self.early()
        self.release("k", step + 1)
        self.pass_turn()
        self.finish_softmax()

    def copy_query(self, number: int) -> None:
        """Copy this warpgroup's rows of a tile's Q by its own threads, 16 bytes each at a time, none of it ahead."""
        q = self.query(number)
        self.stream.work(Work("copy Q", 1, other=-(-q.bytes // (COPY_BYTES * WARPGROUP_THREADS))))
        self.stream.load(self.shared.q_full[number % self.s.query_slots], (q,), is_far=True)

    def release_query(self, number: int) -> None:
        if not copies_queries(self.s):  # a warpgroup that copies its own Q is the only one to write there
            self.release("q", number)

    def first_scores(self, tile: int, step: int, lead: int) -> None:
        """Start Q K^T of a tile's first block, whose K is there, and of ``lead`` blocks more."""
        self.issue_scores(tile, step, is_first=True)
        for ahead in range(1, lead + 1):
            self.wait_full(self.shared.k_full, step + ahead)
            self.issue_scores(tile, step + ahead, is_first=True)

    def block(self, is_masked: bool, more: bool) -> None:
        """Add the softmax of a block and P V of the one before; ``more`` if the tile has another block behind it."""
        if self.s.softmax_stages == 3:
            self.three_stage_step(is_masked, more)
        elif self.s.intra_wg_overlap:
            self.overlapped_step(is_masked)
        else:
            self.serial_step(is_masked)

    def run(self, tiles: list[TileBlocks]) -> None:
        """Add all tiles of the CTA; each has at least one block."""
        self.step = 0
        leads = [min(self.ahead, tile.blocks - 1) for tile in tiles]
        crosses = self.s.crosses_tiles
        if self.index == self.s.consumers - 1:  # so that warpgroup 0 has the first turn
            self.pass_turn()
        for number, tile in enumerate(tiles):
            self.tile = number
            following = leads[number + 1] if crosses and number + 1 < len(tiles) else None
            is_fed = crosses and number > 0  # its first scores were issued with the tile before
            self.repeated(self.start_tile, leads[number], tile.masked > 0, is_fed, waits_for_q=not is_fed)
            masked = max(tile.masked, 1)
            self.add_blocks(masked - 1, True, masked == tile.blocks)
            self.add_blocks(tile.blocks - masked, False, True)
            self.repeated(self.finish_tile, following, waits_for_q=following is not None)
            self.step += 1
        self.stream.store_wait()
        self.stream.mark("end")

    def repeated(self, emit: Callable[..., None], *arguments: Hashable, waits_for_q: bool = False) -> None:
        """Add operations by :meth:`Stream.repeated`: they are the same for the same method, arguments and place in the
        rings. A method that waits for Q also depends on the parity of its barrier."""
        place = (self.step % self.round, self.tile % (self.query_slots * (2 if waits_for_q else 1)))
        self.stream.repeated((*place, emit.__name__, arguments), emit, *arguments)

    def add_blocks(self, count: int, is_masked: bool, is_last: bool) -> None:
        """Add ``count`` blocks behind a tile's first one; ``is_last`` if the tile ends with them."""
        if count:
            first = self.step
            self.repeated(self.blocks, count, is_masked, is_last and self.ahead > 0)
            self.step = first + count

    def blocks(self, count: int, is_masked: bool, is_last: bool) -> None:
        """Add blocks as :meth:`add_blocks` does. Whole rounds of the rings are alike, so one is built and repeated."""
        rounds = (count - 1) // self.round
        for _ in range(rounds):
            self.add_blocks(self.round, is_masked, False)
        for left in reversed(range(count - rounds * self.round)):
            self.repeated(self.block, is_masked, left > 0 or not is_last)
            self.step += 1

    def start_tile(self, lead: int, is_masked: bool, is_fed: bool) -> None:
        """Add the softmax of a tile's first block; its scores too, unless ``is_fed``: the tile before issued them.

        ``lead`` is how many blocks more have their scores issued ahead.
        """
        stream = self.stream
        stream.mark("tile")
        if not is_fed:
            if copies_queries(self.s):
                self.copy_query(self.tile)
            self.wait_full(self.shared.q_full, self.tile)
            self.wait_full(self.shared.k_full, self.step)
            self.take_turn()
            self.first_scores(self.tile, self.step, lead)
            self.pass_turn()
        self.tile_code()
        stream.wgmma_wait(lead)
        self.release("k", self.step)
        if self.s.holds_queries:
            stream.read(self.query(self.tile))
            stream.work(self.work["hold"])
            self.release_query(self.tile)
        self.row_max(self.step, is_masked, is_first=True)
        self.finish_softmax("first")
        if lead:
            stream.wgmma_wait(0)
            self.release("k", self.step + 1)

    def tile_code(self) -> None:
        """Add half of the code that a tile executes once, around its main loop; it is fetched anew, and with stalls."""
        self.stream.delay("cold_code_cycles")
        self.stream.work(self.work["tile"])

    def finish_tile(self, lead: int | None) -> None:
        """Add a tile's last P V and its epilogue, and between them the first Q K^T of the next tile and ``lead`` more.

        A ``lead`` of None leaves those of the next tile out.
        """
        number = self.tile
        if not (self.s.output_in_query_slot or self.s.holds_queries):
            self.release_query(number)
        self.wait_full(self.shared.v_ready, self.step)
        self.last_output(number, lead)
        self.tile_code()
        self.add_last()
        self.release("v", self.step)
        self.epilogue(number)
        if self.s.output_in_query_slot:
            self.stream.store_wait()
            self.release_query(number)

    def last_output(self, number: int, lead: int | None) -> None:
        if lead is None:
            self.issue_output(self.step)
            self.stream.wgmma_wait(0)
            return
        self.wait_full(self.shared.q_full, number + 1)
        self.join_warps()
        self.take_turn()
        self.issue_output(self.step)
        self.wait_full(self.shared.k_full, self.step + 1)
        self.first_scores(number + 1, self.step + 1, lead)
        self.pass_turn()
        self.stream.wgmma_wait(1 + lead)

    def add_last(self) -> None:
        """Add a tile's last P V to O, where promoted sums have accumulators of their own."""
        if self.s.promotes and not self.s.adds_in_place:
            self.read_output()
            self.stream.work(self.work["last"])

    def read_output(self) -> None:
        for output in self.outputs:
            self.stream.read(output)

    def epilogue(self, tile: int) -> None:
        """Write O to global memory through a buffer in shared memory, for FP8 in parts of 128 channels."""
        stream = self.stream
        size = WARPGROUP_ROWS * self.s.head_dim_v * 2
        self.read_output()
        stream.work(self.work["epilogue"])
        if self.s.traits.output_in_v:
            self.store_together()
            return
        out = self.query(tile) if self.s.output_in_query_slot else self.shared.out[self.index]
        staged = WARPGROUP_ROWS * staged_channels(self.s) * 2
        for _ in range(-(-size // staged)):
            stream.store_wait()
            stream.write(out)
            stream.work(self.work["store"])
            stream.fence()
            stream.bar_sync(self.shared.epilogue[self.index])
            stream.store(out, staged)

    def store_together(self) -> None:
        """Write O of all consumers to global memory through V's memory, when all have read V.

        The last consumer stores it for all, and V may be loaded again when it has left.
        """
        stream = self.stream
        last = self.s.consumers - 1
        stream.bar_sync(self.shared.together)
        stream.write(self.shared.out[self.index])
        stream.work(self.work["store"])
        stream.fence()
        if self.index < last:
            stream.bar_arrive(self.shared.together)
            return
        stream.bar_sync(self.shared.together)
        for out in self.shared.out:
            stream.store(out, out.bytes)
        stream.store_wait()
        stream.arrive(self.shared.stored)
