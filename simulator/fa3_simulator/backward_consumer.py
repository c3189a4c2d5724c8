"""One consumer warpgroup of a backward kernel, as all kernels have it: the slots and barriers that it shares with the
other warps of its CTA, its vector work by class, and its loop over key tiles and row blocks.

The consumers of upstream are in :mod:`fa3_simulator.backward`, and those of our kernel in
:mod:`fa3_simulator.our_backward`. The forward has :mod:`fa3_simulator.resources` and :mod:`fa3_simulator.vector_work`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS, slot_threads
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.program import Builder, Gemm, Mbarrier, NamedBarrier, Slot, Work
from fa3_simulator.resources import emptied, filled, slots
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.vector_work import work_on

WAVEFRONT_BYTES = 128  # bytes of the shared memory port that a warp's instruction takes at least

# For a row block of our kernel as compiled (SASS of dense fp16, mean of both warpgroups), by head_dim: the instructions
# that a warp executes beside the other classes of Work, and the cycles that it waits between them because nothing else
# can be issued. There are four places: beside the exponentials, beside dS, in front of the wgmma of dQ and dK, and in
# front of the wgmma of the next scores.
OTHERS = {
    64: ((44, 0), (40, 0), (34, 93), (34, 54)),
    96: ((48, 0), (35, 0), (44, 85), (48, 63)),
    128: ((44, 0), (31, 0), (27, 70), (45, 75)),
}
OTHERS_SPLIT = {192: ((34, 0), (0, 0), (12, 45), (62, 93)), 256: ((30, 0), (0, 0), (11, 60), (70, 52))}
_PLACES = ("beside exp2", "beside dS", "descriptors of dQ", "descriptors of S")


def backward_work(schedule: BackwardSchedule, consumer: int = 0) -> dict[str, Work]:
    """Return the vector work of one warp of a consumer, by the names that consumers use.

    A score takes a multiply-add, an exponential, a subtraction, a multiplication and two halves of a conversion. Where
    the keys are the rows of S, a lane reads lse and D of a quarter of its columns, two with every instruction;
    otherwise it reads those of its two rows.
    """
    s = schedule
    threads = WARPGROUP_THREADS * s.consumers
    lane = s.tile_m * s.tile_n // (WARPGROUP_THREADS if s.splits_roles else threads)
    outputs = s.staged(consumer) // WARPGROUP_THREADS
    columns = s.tile_m // 8 if s.scores_transposed else 2
    statistics = 4 * columns * WAVEFRONT_BYTES  # bytes that the four warps of a consumer read
    shared = 2 * lane * WARPGROUP_THREADS  # bytes of P or dS of a consumer in 16 bits
    staged = 4 * outputs * WARPGROUP_THREADS
    gradients = s.tile_n * s.head_dim // threads
    counted: tuple[tuple[int, int], ...] = ()
    if s.is_ours:
        known, largest = (OTHERS_SPLIT, 256) if s.splits_roles else (OTHERS, 128)
        counted = known.get(s.head_dim, known[largest])
    others = {name: Work(name, 1, other=n, stall=wait) for name, (n, wait) in zip(_PLACES, counted, strict=False)}
    return others | {
        "mask": work_on("mask", lane, alu=2),
        "exp2": work_on("exp2", lane, fma=1, mufu=1, convert=0.5, smem_bytes=statistics),
        "P to shared memory": work_on("P to shared memory", lane, other=0.25, smem_bytes=shared),
        "dS": work_on("dS", lane, fma=2, convert=0.5, other=0.25, smem_bytes=shared + statistics),
        "dQ to shared memory": work_on("dQ to shared memory", outputs, other=0.5, smem_bytes=staged),
        "dQ to memory": work_on("dQ to memory", outputs // s.dq_slices, other=0.25),
        "S to shared memory": work_on("S to shared memory", lane, other=0.5, smem_bytes=4 * lane * WARPGROUP_THREADS),
        "S from shared memory": work_on(
            "S from shared memory", lane, other=0.5, smem_bytes=4 * lane * WARPGROUP_THREADS
        ),
        "load V": work_on("load V", gradients // 2, other=0.25, smem_bytes=2 * s.tile_n * s.head_dim // s.consumers),
        "dK and dV to shared memory": work_on(
            "dK and dV to shared memory",
            2 * gradients,
            convert=0.5,
            other=0.25,
            smem_bytes=4 * s.tile_n * s.head_dim // s.consumers,
        ),
    }


class BackwardResources:
    """Slots and barriers that the warps share.

    K, V, P, dS and dQ have one slot for each consumer; where consumers split roles, K, V, P and dS have one slot for
    all. In our kernel lse and D of a row block lie side by side in the slot of lse, and ``delta`` is ().
    """

    def __init__(self, s: BackwardSchedule, *, adds_gradients: bool) -> None:
        self.schedule = s
        self.adds_gradients = adds_gradients
        row = 2 * s.head_dim
        each = range(s.consumers)
        parts = range(1 if s.splits_roles else s.consumers)
        part = 2 * s.tile_m * s.tile_n // len(parts)
        self.q = slots("q", s.num_stages, s.tile_m * row)
        self.lse = slots("lse", s.num_stages, (8 if s.is_ours else 4) * s.tile_m)
        self.dout = slots("dout", s.dout_stages, s.tile_m * row)
        self.delta = () if s.is_ours else slots("delta", s.dout_stages, 4 * s.tile_m)
        self.k, self.v = ([Slot(f"{name}.{w}", s.tile_n * row // len(parts)) for w in parts] for name in "kv")
        self.ds, self.p = (
            [[Slot(f"{name}[{i}].{w}", part) for w in parts] for i in range(s.ds_stages)] for name in ("ds", "p")
        )
        self.dq = [Slot(f"dq.{w}", 4 * s.staged(w)) for w in each]
        self.scores = Slot("scores", 4 * s.tile_m * s.tile_n)
        self.q_full = filled("q", s.num_stages)
        self.dout_full = filled("dout", s.dout_stages)
        self.kv_full = Mbarrier("kv_full", 1)
        # The first identities of named barriers are taken: by Triton's partitions, which have five, or else by one
        # barrier for each consumer.
        first = 5 if s.is_ours else 1 + s.consumers
        self.own = [NamedBarrier(f"warps[{w}]", w + (w > 0), WARPGROUP_THREADS) for w in each]
        self.both = NamedBarrier("all warpgroups", first, WARPGROUP_THREADS * s.consumers)
        self.kv_empty = NamedBarrier("kv_empty", first + 1, slot_threads(s.consumers))
        self.q_empty = emptied("q", s.num_stages, s, first + 2)
        self.dout_empty = emptied("dout", s.dout_stages, s, first + 2 + s.num_stages)
        names = count(first + 2 + (s.num_stages + s.dout_stages) * s.traits.named_rings)
        if s.dq == "tma warp":
            self.dq_full, self.dq_empty = (
                [NamedBarrier(f"{name}[{w}]", next(names), WARPGROUP_THREADS + WARP_THREADS) for w in each]
                for name in ("dq_full", "dq_empty")
            )
        if s.splits_roles:
            self.scores_ready = NamedBarrier("scores_ready", next(names), WARPGROUP_THREADS * s.consumers)


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

    @property
    def q_slot(self) -> int:
        """Return the slot of Q of the row block."""
        return self.step % self.s.num_stages

    @property
    def dout_slot(self) -> int:
        """Return the slot of dO of the row block."""
        return self.step % self.s.dout_stages

    @property
    def ds_slot(self) -> int:
        """Return the slot of dS, and of P, of the row block."""
        return self.step % self.s.ds_stages

    def issue(self, gemm: Gemm, a: Sequence[Slot] | None, b: Sequence[Slot], name: str, slices: int = 1) -> int:
        """Start one of ``slices`` equal parts of a product into accumulator ``name``; return its wgmma groups.

        There is one group for each slot of the operand in more slots; ``a`` None is an operand in registers.
        """
        parts = max(len(a or ()), len(b))
        count = gemm.instructions // slices
        for part in range(parts):
            some = count * (part + 1) // parts - count * part // parts
            left = a[part % len(a)] if a else None
            self.stream.issue(gemm._replace(instructions=some), left, b[part % len(b)], self.accumulators[name])
        return parts

    def join_warps(self) -> None:
        self.stream.bar_sync(self.shared.own[self.index])

    def wait_full(self, ring: Sequence[Mbarrier], step: int) -> None:
        self.stream.wait(ring[step % len(ring)], step // len(ring))

    def weights(self, *, is_masked: bool) -> None:
        if is_masked:
            self.stream.work(self.work["mask"])
        self.stream.work(self.work["exp2"])

    def fence(self) -> None:
        self.stream.fence()
        self.stream.delay("proxy_fence_cycles")
