"""One consumer warpgroup of a backward kernel, as all kernels have it: the rings and barriers that it shares with the
other warps of its CTA, its vector work by class, and its loop over key tiles and row blocks.

The consumers of upstream are in :mod:`fa3_simulator.backward`, and those of our kernel in
:mod:`fa3_simulator.our_backward`. The forward has :mod:`fa3_simulator.resources` and :mod:`fa3_simulator.vector_work`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS, slot_threads
from fa3_simulator.backward_schedule import WGMMA_K, BackwardSchedule
from fa3_simulator.program import Slot, Work
from fa3_simulator.rings import work_on
from fa3_simulator.schedule import Cta
from fa3_simulator.schedules import TileBlocks

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
    """Rings, barriers and buffers that the warps share.

    K, V, P, dS and dQ have one buffer for each consumer; where consumers split roles, K, V, P and dS have one for all.
    In our kernel lse and D of a row block lie side by side in the slot of lse.
    """

    def __init__(self, cta: Cta, s: BackwardSchedule) -> None:
        rows = 2 * s.tile_m * s.head_dim
        each = range(s.consumers)
        parts = range(1 if s.splits_roles else s.consumers)
        threads = slot_threads(s.consumers) if s.traits.named_rings else 0
        # The first identities of named barriers are taken: by Triton's partitions, which have five, or else by one
        # barrier for each consumer.
        self.own = [cta.named_barrier(f"warps[{w}]", WARPGROUP_THREADS, w + (w > 0)) for w in each]
        cta.identities = 4 if s.is_ours else s.consumers
        self.both = cta.named_barrier("all warpgroups", WARPGROUP_THREADS * s.consumers)
        self.kv_empty = cta.named_barrier("kv_empty", slot_threads(s.consumers))
        self.kv_full = cta.mbarrier("kv_full")
        beside, delta = (8 * s.tile_m, {}) if s.is_ours else (4 * s.tile_m, {"delta": 4 * s.tile_m})
        self.q = cta.ring("q", s.num_stages, {"q": rows, "lse": beside}, consumers=s.consumers, threads=threads)
        self.dout = cta.ring("dout", s.dout_stages, {"dout": rows} | delta, consumers=s.consumers, threads=threads)
        self.k, self.v = (
            [cta.smem(f"{name}.{w}", 2 * s.tile_n * s.head_dim // len(parts)) for w in parts] for name in "kv"
        )
        self.ds, self.p = (
            [[cta.smem(f"{name}[{i}].{w}", 2 * s.tile_m * s.tile_n // len(parts)) for w in parts] for i in range(slots)]
            for name, slots in (("ds", s.ds_stages), ("p", 0 if s.scores_transposed else s.ds_stages))
        )
        if s.dq == "tma warp":
            self.dq = [cta.smem(f"dq.{w}", 4 * s.staged(w)) for w in each]
            self.dq_full, self.dq_empty = (
                [cta.named_barrier(f"{name}[{w}]", WARPGROUP_THREADS + WARP_THREADS) for w in each]
                for name in ("dq_full", "dq_empty")
            )
        if s.splits_roles:
            self.scores = cta.smem("scores", 4 * s.tile_m * s.tile_n)
            self.scores_ready = cta.named_barrier("scores_ready", WARPGROUP_THREADS * s.consumers)


class BackwardConsumer(ABC):
    """One warpgroup, with its keys of every key tile and its share of dQ; the methods describe what it does."""

    def __init__(
        self, cta: Cta, shared: BackwardResources, schedule: BackwardSchedule, index: int, adds_gradients: bool
    ) -> None:
        self.shared = shared
        self.adds_gradients = adds_gradients
        self.index = index
        self.s = s = schedule
        self.c = cta.warpgroup(f"consumer {index}", registers=s.registers[1])
        self.work = backward_work(s, index)
        names = ("S", "dP", "dV", "dK", "dQ", "dQ low", "dQ high")
        self.sums = {name: Slot(f"{name}.{index}", 0) for name in names}
        self.products = {  # by the accumulator that each adds to
            "S": ("Q K^T", s.scores),
            "dP": ("dO V^T", s.scores),
            "dV": ("P^T dO", s.gradients),
            "dK": ("dS^T Q", s.gradients),
            "dQ": ("dS K", s.queries(index)),
        }

        self.hold()

    def hold(self) -> None:
        """Count the registers: S and dP, later dS and dQ; dK and dV; and V if it is in registers."""
        s = self.s
        scores = s.tile_m * s.tile_n // (1 if s.splits_roles else s.consumers)
        keys = s.tile_n * s.head_dim // s.consumers
        rows = s.tile_m * s.head_dim // (s.consumers * s.dq_slices)
        self.c.fragment("S and dP", 2, scores)
        self.c.fragment("dK and dV", 2, keys)
        self.c.fragment("dS and dQ", 1, rows + (scores // 2 if s.scores_transposed else 0), reuses="S and dP")
        if s.v_in_registers:
            self.c.fragment("V", 1, keys, bits=16)

    def run(self, tiles: Sequence[TileBlocks]) -> None:
        """Add all key tiles of the CTA."""
        for number, tile in enumerate(tiles):
            self.c.mark("tile")
            self.c.delay("cold_code_cycles")
            self.c.wait(self.shared.kv_full, number)
            self.begin()
            for block in range(tile.blocks):
                self.row_block(is_masked=block < tile.masked, is_last=block + 1 == tile.blocks)
            self.c.delay("cold_code_cycles")
            self.epilogue()
            self.c.store_wait()
            if self.s.traits.joins_warps:  # Triton's barrier in front of handing K and V back
                self.join_warps()
            self.c.bar_arrive(self.shared.kv_empty)
        self.c.mark("end")

    @abstractmethod
    def begin(self) -> None:
        """Add the operations in front of a tile's first row block."""

    @abstractmethod
    def row_block(self, *, is_masked: bool, is_last: bool) -> None:
        """Add the products of one row block and what lies between them."""

    @abstractmethod
    def epilogue(self) -> None:
        """Add the operations behind a tile's last row block, which write dK and dV to memory."""

    def issue(self, name: str, a: Sequence[Slot] | None, b: Sequence[Slot], *, part: str = "", slices: int = 1) -> int:
        """Start the product of an accumulator, or one of ``slices`` equal parts of it; return its wgmma groups.

        There is one group for each slot of the operand in more slots; ``a`` None is an operand in registers. ``part``
        names the accumulator of a product that is computed in parts.
        """
        word, product = self.products[name]
        groups = max(len(a or ()), len(b))
        count = product.instructions // slices
        for i in range(groups):
            some = count * (i + 1) // groups - count * i // groups
            self.c.wgmma(
                word,
                a=a[i % len(a)] if a else None,
                b=b[i % len(b)],
                acc=self.sums[name + part],
                n=product.columns,
                k=WGMMA_K * some,
            )
        return groups

    def join_warps(self) -> None:
        self.c.bar_sync(self.shared.own[self.index])

    def weights(self, *, is_masked: bool) -> None:
        names = ("beside exp2", *(["mask"] if is_masked else []), "exp2")
        self.c.work(*(self.work[name] for name in names if name in self.work))

    def fence(self) -> None:
        self.c.fence()
        self.c.delay("proxy_fence_cycles")
