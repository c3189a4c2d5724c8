"""The words of which a description is made: what a CTA has, and the instructions of its warps, as PTX calls them.

:mod:`fa3_simulator.description` makes a kernel of them. Where an instruction costs time or can be unsafe, the operation
that it adds to the program says so (:class:`fa3_simulator.program.Op`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS
from fa3_simulator.program import (
    BY_THREADS,
    FAR,
    HOT,
    Builder,
    Gemm,
    Mbarrier,
    NamedBarrier,
    Op,
    Row,
    Slot,
    Stream,
    Work,
)
from fa3_simulator.rings import Barrier, Ring, Stage, work_on

ISSUED = ("fma", "alu", "mufu", "convert", "convert_e4m3", "shuffle", "other")
INSTRUCTIONS_PER_CHUNK = 32  # between which another warp may have a pipe: as many as four elements of a softmax have
OTHER_REGISTERS = 24  # registers of a thread for addresses and loop state
COPY_BYTES = 16  # what one thread copies by one cp.async
COPIES = 16  # groups of cp.async that are told apart
MMA_RATE = 0.664  # of mma.sync, as a share of the rate of wgmma: reports/h200/schedules/microbench.csv
MMA_CHAINS = 4  # sums of 16 x 8 that a warp needs for that rate: 24 cycles from one mma.sync to the next, likewise
Slots = Slot | Stage | Sequence[Slot | Stage]
_Call = tuple[str, str, int]  # the name of a ring, what is done with it, and how many stages it has


def _listed(slots: Slots) -> list[Slot]:
    """Return slots, those of a stage where one stands in their place."""
    given = [slots] if isinstance(slots, Slot | Stage) else slots
    return [slot for each in given for slot in (each.slots if isinstance(each, Stage) else [each])]


@dataclass(slots=True)
class Warps(Stream):
    """A warp, or warpgroups in lock-step: one instruction stream. Each method adds the instruction of its name."""

    fragments: dict[str, int] = field(default_factory=dict)  # registers of a thread, by name
    addresses: int = OTHER_REGISTERS
    uses: Counter[_Call] = field(default_factory=Counter)  # how often each call has gone round a ring
    known: dict[Hashable, tuple[list[Row], Counter[_Call]]] = field(default_factory=dict)  # of :meth:`repeated`
    life: str = ""  # which CTA in its place this is
    scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # of vector counts: times, plus a chunk

    def repeated(self, emit: Callable[..., None], *arguments: Hashable) -> None:
        """Add what ``emit(*arguments)`` adds: it is called once, and copied wherever rings are at the same places.

        It may depend on nothing but its arguments and on these places.
        """
        # stages come round in two phases; in the first round nobody waits to acquire one
        places = [n % (2 * s) + (2 * s if n < s and verb == "acquire" else 0) for (_, verb, s), n in self.uses.items()]
        key = emit.__name__, arguments, *places
        if key in self.known and not self.program.origin:
            rows, uses = self.known[key]
            self.rows += rows
            for call, more in uses.items():
                self.uses[call] += more
            return
        first = len(self.rows)
        before = self.uses.copy()
        emit(*arguments)
        self.known[key] = self.rows[first:], self.uses - before

    def last(self, ring: Ring, verb: str = "wait_full", back: int = 0) -> Stage:
        """Return the stage that a call used last, or the one ``back`` uses before."""
        return Stage(ring, self.uses[ring.name, verb, ring.stages] - 1 - back)

    def _next(self, ring: Ring, verb: str, use: int | None) -> Stage:
        key = ring.name, verb, ring.stages
        mine = self.uses[key] if use is None else use
        self.uses[key] = mine + 1
        return Stage(ring, mine)

    def acquire(self, ring: Ring, use: int | None = None) -> Stage:
        """Wait until the next stage may be written (``producer_acquire``). The first time round nobody waits, nor where
        nobody hands stages back.

        Every warp counts its own uses of a ring; ``use`` sets the count.
        """
        stage = self._next(ring, "acquire", use)
        empty = stage.empty if stage.use >= ring.stages else None
        if isinstance(empty, NamedBarrier):
            self.bar_sync(empty)
        elif empty:
            self.wait(empty, stage.use // ring.stages - 1)
        return stage

    def wait_full(self, ring: Ring, use: int | None = None) -> Stage:
        """Wait until the next stage has been written (``consumer_wait``)."""
        stage = self._next(ring, "wait_full", use)
        self.wait(stage.full, stage.use // ring.stages)
        return stage

    def release(self, stage: Stage) -> None:
        """Hand a stage back (``consumer_release``).

        An mbarrier that counts all threads of a warpgroup is described as one that counts the warpgroup: their arrivals
        take no longer (reports/h200/schedules/microbench.csv: less than 0.02 cycles each).
        """
        if isinstance(stage.empty, NamedBarrier):
            self.bar_arrive(stage.empty)
        elif stage.empty:
            self.arrive(stage.empty)

    def tma_load(
        self, to: Stage | Mbarrier, slots: Slots | None = None, *, far: bool = False, multicast: int = 1
    ) -> None:
        """Expect the bytes and copy them (``mbarrier.arrive.expect_tx``, ``cp.async.bulk.tensor``): all slots of a
        stage, or those that are named.

        ``far``: from HBM, as no other CTA has loaded them before. ``multicast``: CTAs of a cluster that share the copy.
        """
        barrier, all_slots = (to.full, to.slots) if isinstance(to, Stage) else (to, [])
        self.load(barrier, _listed(slots or all_slots), is_far=far, multicast=multicast)

    def cp_async(self, slots: Slots, *, far: bool = False) -> None:
        """Copy slots, 16 bytes a thread at a time, as one group (``cp.async``, ``cp.async.commit_group``)."""
        copied = _listed(slots)
        self.vector("cp.async", other=3 * -(-sum(slot.bytes for slot in copied) // (COPY_BYTES * self.threads)))
        self.load(self._start(), copied, is_far=far, by_threads=True)

    def cp_async_wait(self, in_flight: int = 0) -> None:
        """Wait for all but the last groups (``cp.async.wait_group``). Other threads may read behind a barrier only."""
        for group in range(self.uses["cp.async", "wait", COPIES], self.uses["cp.async", "start", COPIES] - in_flight):
            self.wait(self._copied(group), group // COPIES)
            if self._registers(group) in self.program.slots:
                Stream.read(self, self._registers(group))
            self.uses["cp.async", "wait", COPIES] = group + 1

    def _start(self) -> Mbarrier:
        self.uses["cp.async", "start", COPIES] += 1
        return self._copied(self.uses["cp.async", "start", COPIES] - 1)

    def _copied(self, group: int) -> Mbarrier:
        return Mbarrier(f"cp.async[{group % COPIES}] of {self.name}{self.life}", 1)

    def _registers(self, group: int) -> Slot:
        return Slot(f"registers of {self._copied(group).name}", 0)

    def wgmma(
        self,
        name: str,
        *,
        a: Slots | None,
        b: Slots,
        acc: Slot,
        n: int,
        k: int,
        m: int = 64,
        bits: int = 16,
    ) -> None:
        """Start the product of ``m`` x ``n`` x ``k`` as a group of its own (``wgmma.mma_async``,
        ``wgmma.commit_group``), or as part of a :meth:`group`.

        ``a`` None: from registers. ValueError for sizes that wgmma does not compute.
        """
        if m % 64 or k * bits % 256 or n % 8 or not 8 <= n <= 256:
            raise ValueError(f"{name}: no wgmma computes {m} x {n} x {k} of {bits} bits")
        first_a = None if a is None else _listed(a)[0]
        first_b, *more = _listed(b)
        for slot in (*([] if a is None else _listed(a)[1:]), *more):
            self.operand(slot)
        self.issue(Gemm(name, m // 64 * (k * bits // 256), n, bits, a is None), first_a, first_b, acc)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Make one group of all products that are started in a ``with`` block."""
        first = len(self.rows)
        yield
        started = [i for i in range(first, len(self.rows)) if self.rows[i][0] == Op.WGMMA]
        for i in started[:-1]:
            op, gemm, a, b, accumulator = self.rows[i]
            known = list(self.program.gemms)[gemm]
            self.rows[i] = (op, self.program.gemms[known._replace(is_open=True)], a, b, accumulator)

    def mma_sync(
        self,
        name: str,
        *,
        acc: Slot,
        n: int,
        k: int,
        m: int = 64,
        bits: int = 16,
        reads: Slots = (),
        waits: bool = True,
    ) -> None:
        """Compute a product by ``mma.sync``, and wait for it; ``reads`` is read by ``ldmatrix``.

        ``m`` are the rows of all warps together, a multiple of 16 for each; ValueError for others. Without ``waits``
        the warps do other work meanwhile, as where the next fragments are read, until :meth:`wgmma_wait`.
        """
        rows = min(64, self.threads // 2)  # 16 of each warp, of which four run at a time
        if m % rows or k * bits % 256:
            raise ValueError(f"{name}: no mma.sync of {self.threads} threads computes {m} x {n} x {k} of {bits} bits")
        for slot in _listed(reads):
            self.read(slot) if waits else Stream.read(self, slot)
        slow = max(1, MMA_CHAINS * 8 / (m // rows * n))  # of few sums each instruction waits for the one before
        gemm = Gemm(name, m // rows * (k * bits // 256), n, bits, True, MMA_RATE / slow, share=rows / 64 / slow)
        self.issue(gemm, None, Slot(f"registers of {self.name}", 0), acc)
        if waits:
            self.wgmma_wait(0)

    def wgmma_wait(self, in_flight: int, *read: Stage) -> None:
        """Wait until at most ``in_flight`` groups of wgmma, 0 to 7, are in flight; then hand back stages that the
        others have ``read``. ValueError for other numbers."""
        Stream.wgmma_wait(self, in_flight)
        for stage in read:
            self.release(stage)

    def vector(self, name: str, elements: int | None = None, *, chunks: int = 0, **counts: float) -> None:
        """Do arithmetic: instructions of a warp by pipe, for each of the ``elements`` that a lane has, or in all.

        ``counts`` are the fields of :class:`~fa3_simulator.program.Work`: fma, alu, mufu, convert, shuffle and other;
        and smem_bytes and stall, which are always in all.
        """
        work = work_on(name, elements, chunks=chunks, **counts)
        scaled = {pipe: round(getattr(work, pipe) * x + work.chunks * plus) for pipe, (x, plus) in self.scales.items()}
        work = work._replace(**scaled, warps=self.threads / WARPGROUP_THREADS)
        if elements is None and not chunks:
            issued = sum(getattr(work, pipe) for pipe in ISSUED)
            work = work._replace(chunks=max(1, -(-issued // INSTRUCTIONS_PER_CHUNK)))
        self.work(work)

    def fragment(self, name: str, columns: int, rows: int = 64, bits: int = 32, reuses: str = "") -> Slot:
        """Return an accumulator, or another fragment that is in registers for as long as the kernel runs.

        ``reuses`` names the fragments, joined with commas, whose registers it takes when they are not needed any more.
        """
        size = rows * columns * bits // 32 // self.threads
        dead = sum(self.fragments.get(other, 0) for other in reuses.split(", "))
        self.fragments[name] = max(0, size - dead)
        return Slot(f"{name} of {self.name}", 0)

    @property
    def registers_needed(self) -> int:
        """Registers of a thread for its fragments, and for addresses and loop state."""
        return sum(self.fragments.values()) + self.addresses

    def read(self, slot: Slot, *works: Work, own: bool = False) -> None:
        """Read a slot (``ld.shared``, ``ldmatrix``) and wait for it; reads one behind another wait together.

        ``works`` are its instructions, whose time has the latency. ``own``: each warp reads only what no other warp of
        the stream writes, which needs no barrier over the stream.
        """
        latency = "shared_load_cycles"
        waits = slot.bytes and self.program.has_latencies and not works
        if waits and self.rows and self.rows[-1][:2] == (Op.DELAY, self.program.delays[latency]):
            self.rows.pop()
            self.lines = self.lines[:-1]
        Stream.read(self, slot, *works, own=own)
        if waits:
            self.delay(latency)

    def fence(self) -> None:
        """Show what the threads have written to TMA and wgmma (``fence.proxy.async``)."""
        Stream.fence(self)
        if self.program.has_latencies:
            self.delay("proxy_fence_cycles")

    def global_load(self, size: int, *, far: bool = False, waits: bool = True) -> None:
        """Load so many bytes by all threads into registers (``ld.global``): from HBM if ``far``, else from L2.

        L2 has had them for long. Without ``waits`` they are a group of :meth:`cp_async_wait`.
        """
        slot = self.program.slots[self._registers(self.uses["cp.async", "start", COPIES])]
        barrier = self._start()
        self.expect(barrier, size)
        self._add(Op.LOAD, self.program.mbarriers[barrier], size, slot, BY_THREADS + (FAR if far else HOT))
        if waits:
            self.cp_async_wait(0)

    def arrive_and_wait(self, barrier: Mbarrier, phase: int) -> None:
        """Let all threads arrive at a phase of an mbarrier and wait for its end, so that they have met as well."""
        self.arrive(barrier)
        self.wait(barrier, phase)
        self.meet()


class Cta(Builder):
    """What the warps of a CTA share, and the warps themselves."""

    def __init__(self, name: str, origin: str = "", *, has_latencies: bool = True) -> None:
        """Begin a CTA; without ``has_latencies`` the work of its warps has those of their loads and fences."""
        super().__init__(name, origin)
        self.has_latencies = has_latencies
        self.warps: list[Warps] = []
        self.rank = ""  # which CTA of several on an SM, or of a cluster, is described now
        self.life = ""  # and which one behind others in the same place
        self.identities = 0
        self.scales: Mapping[str, Mapping[str, tuple[float, float]]] = {}  # of warps by name, as they have it

    def warp(self, name: str, *, registers: int = 24) -> Warps:
        """Return a warp of its own; ``registers`` of a thread, as setmaxnreg leaves them."""
        return self._warps(name, WARP_THREADS, registers)

    def warpgroup(self, name: str, *, registers: int = 240, warpgroups: int = 1) -> Warps:
        """Return a warpgroup, or several that do the same at the same time."""
        return self._warps(name, WARPGROUP_THREADS * warpgroups, registers)

    def _warps(self, name: str, threads: int, registers: int) -> Warps:
        full = self.rank + name
        known = [warps for warps in self.warps if warps.name == full]
        warps = known[0] if known else Warps(self, full, threads, registers, scales=self.scales.get(name, {}))
        if not known:
            self.warps.append(warps)
            self.streams.append(warps)
        warps.uses.clear()
        warps.life = self.life
        return warps

    def restart(self) -> None:
        """Forget all that warps do, to describe something else with the same warps; names keep their numbers."""
        for warps in self.warps:
            warps.rows = []
            warps.lines = []
            warps.uses.update({call: -uses for call, uses in warps.uses.items()})

    def smem(self, name: str, size: int, at: tuple[Slot, *tuple[int, ...]] | None = None, readers: int = 0) -> Slot:
        """Return a buffer of ``size`` bytes in shared memory: of its own, or from a byte ``at`` of another one on, in
        equal parts from each of several bytes on.

        Slots that share bytes alias. ``readers`` is how many of the warps read each content; 0: all that read any.
        """
        first = tuple(at[0].at[0] + byte for byte in at[1:]) if at else (0,)
        slot = Slot(self.rank + name, size, at[0].memory if at else self.rank + name, first, readers)
        _ = self.slots[slot]  # it takes memory whether or not it is used
        return slot

    def mbarrier(self, name: str, arrivals: int = 1) -> Mbarrier:
        """Return an mbarrier with so many arrivals in a phase."""
        barrier = Mbarrier(self.rank + name + self.life, arrivals)
        _ = self.mbarriers[barrier]
        return barrier

    def named_barrier(self, name: str, threads: int, identity: int | None = None) -> NamedBarrier:
        """Return a ``bar`` of its own id, counted from 1, as 0 is ``__syncthreads``."""
        if identity is None:
            self.identities += 1
            identity = self.identities
        return NamedBarrier(self.rank + name, identity, threads)

    def ring(
        self,
        name: str,
        stages: int,
        size: int | Mapping[str, int],
        *,
        consumers: int = 1,
        threads: int = 0,
        readers: int | None = None,
        full_arrivals: int = 1,
    ) -> Ring:
        """Return a ring of ``size`` bytes a stage, or of a part by name.

        A stage is free again when ``consumers`` have released it at an mbarrier, or at a named barrier of ``threads``;
        with 0 ``consumers`` nobody hands it back, as whoever writes it knows that it is free. ``readers`` is how many
        warps read each content, as many as release it unless stated.
        """
        sizes = {name: size} if isinstance(size, int) else size
        read_by = consumers if readers is None else readers
        parts: dict[str, list[Slot]] = {}
        for part, each in sizes.items():
            first = self.smem(f"{part}[0]", each, readers=read_by)
            parts[part] = [
                first,
                *(self.smem(f"{part}[{i}]", each, (first, i * each), read_by) for i in range(1, stages)),
            ]
        empty: list[Barrier] = [
            self.named_barrier(f"{name}_empty[{i}]", threads)
            if threads
            else self.mbarrier(f"{name}_empty[{i}]", consumers)
            for i in range(stages if consumers else 0)
        ]
        full = [self.mbarrier(f"{name}_full[{i}]", full_arrivals) for i in range(stages)]
        return Ring(self.rank + name, stages, parts, full, empty)

    def short_of_registers(self, more: float = 0) -> list[str]:
        """Return in words which warps' fragments do not fit their registers, of which a thread has ``more``."""
        short = [w for w in self.warps if w.fragments and w.registers_needed > w.registers + more]
        return [
            f"{w.name}: {' + '.join(f'{name} {count}' for name, count in w.fragments.items() if count)} "
            f"+ {w.addresses} for addresses are {w.registers_needed} registers, a thread has {w.registers + more:.0f}"
            for w in short
        ]
