"""The words of which a description is made: rings and stages, and the instructions of warps, as PTX calls them.

:mod:`fa3_simulator.description` makes a kernel of them. Where an instruction costs time or can be unsafe, the operation
that it adds to the program says so (:class:`fa3_simulator.program.Op`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS
from fa3_simulator.program import Builder, Gemm, Mbarrier, NamedBarrier, Op, PlacedStream, Slot, Work

ELEMENTS_PER_CHUNK = 4  # elements of a lane, between which another warp may have a pipe
OTHER_REGISTERS = 24  # registers of a thread for addresses and loop state
COPY_BYTES = 16  # what one thread copies by one cp.async
COPIES = 32  # groups of cp.async that are told apart
MMA_RATE = 0.664  # of mma.sync, as a share of the rate of wgmma: reports/h200/schedules/microbench.csv
Barrier = Mbarrier | NamedBarrier
Slots = Slot | Sequence[Slot]


@dataclass(frozen=True, slots=True)
class Ring:
    """A circular buffer in shared memory: ``stages`` stages of some slots each, with a full and an empty barrier for
    each stage."""

    name: str
    stages: int
    parts: Mapping[str, Sequence[Slot]]
    full: Sequence[Mbarrier]
    empty: Sequence[Barrier]


@dataclass(frozen=True, slots=True)
class Stage:
    """One use of a stage of a ring: the ``use``-th, from 0, of all that go round. ``stage["A"]`` is its slot of the
    part A, and ``stage.slot`` its only slot."""

    ring: Ring
    use: int

    @property
    def index(self) -> int:
        return self.use % self.ring.stages

    def __getitem__(self, part: str) -> Slot:
        return self.ring.parts[part][self.index]

    @property
    def slots(self) -> list[Slot]:
        return [part[self.index] for part in self.ring.parts.values()]

    @property
    def slot(self) -> Slot:
        (only,) = self.slots
        return only

    @property
    def full(self) -> Mbarrier:
        return self.ring.full[self.index]

    @property
    def empty(self) -> Barrier:
        return self.ring.empty[self.index]


def _listed(slots: Slots) -> list[Slot]:
    return [slots] if isinstance(slots, Slot) else list(slots)


@dataclass(slots=True)
class Warps(PlacedStream):
    """A warp, or warpgroups in lock-step: one instruction stream. Each method adds the instruction of its name."""

    fragments: dict[str, int] = field(default_factory=dict)  # registers of a thread, by name
    uses: Counter[tuple[str, str]] = field(default_factory=Counter)  # how often each call has gone round a ring
    life: str = ""  # which CTA in its place this is

    def _next(self, ring: Ring, verb: str, use: int | None) -> Stage:
        key = ring.name, verb
        mine = self.uses[key] if use is None else use
        self.uses[key] = mine + 1
        return Stage(ring, mine)

    def acquire(self, ring: Ring, use: int | None = None) -> Stage:
        """Wait until the next stage may be written (``producer_acquire``). The first time round nobody waits.

        Every warp counts its own uses of a ring; ``use`` sets the count.
        """
        stage = self._next(ring, "acquire", use)
        self.wait_empty(ring.empty, stage.use)
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
        self.hand_back(stage.empty)

    def tma_load(
        self, to: Stage | Mbarrier, slots: Slots | None = None, *, far: bool = False, multicast: int = 1
    ) -> None:
        """Expect the bytes and copy them (``mbarrier.arrive.expect_tx``, ``cp.async.bulk.tensor``): all slots of a
        stage, or those that are named.

        ``far``: from HBM, as no other CTA has loaded them before. ``multicast``: CTAs of a cluster that share the copy.
        """
        barrier, all_slots = (to.full, to.slots) if isinstance(to, Stage) else (to, [])
        self.load(barrier, _listed(slots or all_slots), is_far=far, multicast=multicast)

    def tma_store(self, slot: Slot, size: int | None = None, *, adds: bool = False) -> None:
        """Copy a slot to global memory, or add it there (``cp.async.bulk``, ``cp.reduce.async.bulk``)."""
        self.store(slot, slot.bytes if size is None else size, adds=adds)

    def cp_async(self, slots: Slots, *, far: bool = False) -> None:
        """Copy slots, 16 bytes a thread at a time, as one group (``cp.async``, ``cp.async.commit_group``)."""
        copied = _listed(slots)
        group = self.uses["cp.async", "start"]
        self.uses["cp.async", "start"] += 1
        self.vector("cp.async", other=3 * -(-sum(slot.bytes for slot in copied) // (COPY_BYTES * self.threads)))
        self.load(self._copied(group), copied, is_far=far, by_threads=True)

    def cp_async_wait(self, in_flight: int = 0) -> None:
        """Wait for all but the last groups (``cp.async.wait_group``). Other threads may read behind a barrier only."""
        for group in range(self.uses["cp.async", "wait"], self.uses["cp.async", "start"] - in_flight):
            self.wait(self._copied(group), group // COPIES)
            self.uses["cp.async", "wait"] = group + 1

    def _copied(self, group: int) -> Mbarrier:
        return Mbarrier(f"cp.async[{group % COPIES}] of {self.name}{self.life}", 1)

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
        gemm = Gemm(name, m // 64 * (k * bits // 256), n, bits, a is None)
        self.issue(gemm, first_a, first_b, acc)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Make one group of all products that are started in a ``with`` block."""
        first = len(self.rows)
        yield
        started = [i for i in range(first, len(self.rows)) if self.rows[i][0] == Op.WGMMA]
        for i in started[:-1]:
            op, gemm, a, b, accumulator = self.rows[i]
            known = list(self.program.gemms.index)[gemm]
            self.rows[i] = (op, self.program.gemms(known._replace(is_open=True)), a, b, accumulator)

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
            self.read(slot)
        gemm = Gemm(name, m // rows * (k * bits // 256), n, bits, True, MMA_RATE)
        self.issue(gemm, None, Slot(f"registers of {self.name}", 0), acc)
        if waits:
            self.wgmma_wait(0)

    def vector(self, name: str, elements: int = 0, *, chunks: int = 0, **counts: float) -> None:
        """Do arithmetic: instructions of a warp by pipe, for each of the ``elements`` that a lane has, or in all.

        ``counts`` are the fields of :class:`~fa3_simulator.program.Work`: fma, alu, mufu, convert, shuffle and other;
        and smem_bytes and stall, which are always in all.
        """
        in_all = ("smem_bytes", "stall", "trips")
        times = elements or 1
        total = {pipe: round(count * (1 if pipe in in_all else times)) for pipe, count in counts.items()}
        self.work(Work(name, chunks or max(1, -(-elements // ELEMENTS_PER_CHUNK)), **total))

    def fragment(self, name: str, columns: int, rows: int = 64, bits: int = 32, reuses: str = "") -> Slot:
        """Return an accumulator, or another fragment that is in registers for as long as the kernel runs.

        ``reuses`` names the fragment whose registers it takes when that is not needed any more.
        """
        size = rows * columns * bits // 32 // self.threads
        self.fragments[name] = max(0, size - self.fragments.get(reuses, 0)) if reuses else size
        return Slot(f"{name} of {self.name}", 0)

    def global_store(self, size: int) -> None:
        """Store so many bytes by all threads (``st.global``)."""
        self.reduce(size, adds=False)

    def global_add(self, size: int) -> None:
        """Add so many bytes in global memory by all threads (``red.global.add``)."""
        self.reduce(size)

    def syncthreads(self, barrier: NamedBarrier) -> None:
        """Meet all warps of the CTA at ``barrier`` (``__syncthreads``)."""
        self.bar_sync(barrier)


class Cta(Builder):
    """What the warps of a CTA share, and the warps themselves."""

    def __init__(self, name: str, origin: str = "") -> None:
        super().__init__(name, origin)
        self.warps: list[Warps] = []
        self.rank = ""  # which CTA of several on an SM, or of a cluster, is described now
        self.life = ""  # and which one behind others in the same place
        self.identities = 0

    def warp(self, name: str, *, registers: int = 24) -> Warps:
        """Return a warp of its own; ``registers`` of a thread, as setmaxnreg leaves them."""
        return self._warps(name, WARP_THREADS, registers)

    def warpgroup(self, name: str, *, registers: int = 240, warpgroups: int = 1) -> Warps:
        """Return a warpgroup, or several that do the same at the same time."""
        return self._warps(name, WARPGROUP_THREADS * warpgroups, registers)

    def _warps(self, name: str, threads: int, registers: int) -> Warps:
        full = self.rank + name
        known = [warps for warps in self.warps if warps.name == full]
        warps = known[0] if known else Warps(self, full, threads, registers)
        if not known:
            self.warps.append(warps)
            self.streams.append(warps)
        warps.uses.clear()
        warps.life = self.life
        return warps

    def smem(self, name: str, size: int, at: tuple[Slot, int] | None = None, readers: int = 0) -> Slot:
        """Return a buffer of ``size`` bytes in shared memory: of its own, or from a byte ``at`` of another one on.

        Slots that share bytes alias. ``readers`` is how many of the warps read each content; 0: all that read any.
        """
        memory, first = (at[0].memory, at[0].at[0] + at[1]) if at else (self.rank + name, 0)
        slot = Slot(self.rank + name, size, memory, (first,), readers)
        self.slots(slot)
        return slot

    def mbarrier(self, name: str, arrivals: int = 1) -> Mbarrier:
        """Return an mbarrier with so many arrivals in a phase."""
        return Mbarrier(self.rank + name + self.life, arrivals)

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

        A stage is free again when ``consumers`` have released it at an mbarrier, or at a named barrier of ``threads``.
        ``readers`` is how many warps read each content, as many as release it unless stated.
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
            for i in range(stages)
        ]
        full = [self.mbarrier(f"{name}_full[{i}]", full_arrivals) for i in range(stages)]
        return Ring(self.rank + name, stages, parts, full, empty)

    def short_of_registers(self, more: float = 0) -> list[str]:
        """Return in words which warps' fragments do not fit their registers, of which a thread has ``more``."""
        found = []
        for warps in self.warps:
            held = sum(warps.fragments.values())
            if warps.fragments and held + OTHER_REGISTERS > warps.registers + more:
                parts = " + ".join(f"{name} {count}" for name, count in warps.fragments.items())
                found.append(
                    f"{warps.name}: {parts} + {OTHER_REGISTERS} for addresses are {held + OTHER_REGISTERS} registers, "
                    f"a thread has {warps.registers + more:.0f}"
                )
        return found
