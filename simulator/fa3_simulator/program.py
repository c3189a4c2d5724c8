"""A schedule as data: what each warp or warpgroup of a CTA does, in order, and the builder of such programs.

Kernels are described in the words of :mod:`fa3_simulator.schedule`, which add operations to a program. It is read for
time (:mod:`fa3_simulator.engine`) and for safety (:mod:`fa3_simulator.hazards`). An operation is a row of five
integers: the :class:`Op` and up to four operands, which are sizes or indices into the program's lists.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, count, groupby
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple

import numpy as np

from fa3_simulator.shared_memory import Slot, regions

Row = tuple[int, int, int, int, int]  # an operation and its operands
NONE = -1
MOST_IN_FLIGHT = 7  # groups of wgmma that a wait may leave in flight in the PTX ISA, and here stores as well
FAR, BY_THREADS, HOT, OTHERS = 1, 2, 4, 8  # last operand of a load: bits, and what each further CTA of a multicast adds


class Op(IntEnum):
    """Operations and their operands."""

    VECTOR = 0  # work: arithmetic of the actor's own warps
    WGMMA = 1  # gemm, slot of A or NONE (registers), slot of B, accumulator slot: asynchronous; ends a commit group
    WGMMA_WAIT = 2  # groups that may stay in flight
    EXPECT = 3  # mbarrier, bytes: one arrival, and bytes its phase waits for
    LOAD = 4  # mbarrier, bytes, slot, sum of FAR, BY_THREADS, HOT and OTHERS: TMA or cp.async, asynchronous
    STORE = 5  # bytes, slot, whether it adds to what is there: TMA, asynchronous
    STORE_WAIT = 6  # stores that may still read their slots
    ARRIVE = 7  # mbarrier: one arrival
    WAIT = 8  # mbarrier, parity: passes while the current phase has the other parity (PTX mbarrier.try_wait)
    BAR_ARRIVE = 9  # named barrier
    BAR_SYNC = 10  # named barrier
    DELAY = 11  # machine constant in cycles, as an index into Program.delays
    READ = 12  # slot, whether each warp reads only what no other warp of the actor writes: by the actor's own threads
    WRITE = 13  # slot: the actor's own threads write it
    FENCE = 14  # fence.proxy.async: the actor's writes become visible to TMA and wgmma
    MARK = 15  # label
    REDUCE = (
        16  # bytes, whether they replace what is there, bytes of a thread at a time: threads write to global memory
    )
    OPERAND = 17  # slot: what else the next wgmma of this actor reads
    MEET = 18  # the actor's own warps wait for each other, in the time of other operations


class Gemm(NamedTuple):
    """``instructions`` wgmma of shape 64 x n x (256 bits of k).

    ``rate`` is a fraction of wgmma's, below 1 for ``mma.sync``, whose operands are all in registers, and which
    keeps ``share`` of the tensor cores busy. A gemm that ``is_open`` belongs to the commit group of the next one.
    """

    name: str
    instructions: int
    n: int
    bits: int  # of an operand element: 16 or 8
    a_in_registers: bool
    rate: float = 1.0
    is_open: bool = False
    share: float = 1.0


class Work(NamedTuple):
    """Vector work: the instructions of one warp by pipe, issued in ``chunks`` equal parts, and the shared memory
    traffic of all warps of the actor."""

    name: str
    chunks: int
    fma: int = 0
    alu: int = 0
    mufu: int = 0
    convert: int = 0  # two scores to 16 bits
    convert_e4m3: int = 0  # two scores to e4m3, by an instruction of twice the length
    shuffle: int = 0
    other: int = 0  # what needs the dispatch port alone: addresses, moves, branches
    smem_bytes: int = 0
    stall: int = 0  # cycles in which the warp issues nothing, as it waits for results
    trips: int = 0  # how often, one behind the other, it loads matrices, waits, permutes and stores them
    warps: float = 1.0  # of the actor on each of the four schedulers


class Mbarrier(NamedTuple):
    name: str
    arrivals: int  # per phase


class NamedBarrier(NamedTuple):
    name: str
    identity: int  # hardware id, 0..15
    threads: int


@dataclass(frozen=True, slots=True)
class Actor:
    """A group of warps that run one instruction stream; ``registers`` per thread after setmaxnreg.

    ``lines`` says for each operation where it stands in the file of a description; it is empty where that is not known.
    """

    name: str
    threads: int
    registers: int
    ops: np.ndarray  # int64 (operations, 5)
    lines: tuple[str, ...] = ()

    def place(self, row: int) -> str:
        """Return where an operation stands: in the file of a description, or else as a row."""
        return self.lines[row] if self.lines else f"row {row}"


@dataclass(frozen=True, slots=True)
class Program:
    """The program of one CTA: its actors, and the lists that the operands of their operations index."""

    name: str
    actors: tuple[Actor, ...]
    gemms: tuple[Gemm, ...]
    works: tuple[Work, ...]
    mbarriers: tuple[Mbarrier, ...]
    named_barriers: tuple[NamedBarrier, ...]
    slots: tuple[Slot, ...]
    delays: tuple[str, ...]
    labels: tuple[str, ...]

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the buffers and of the mbarriers; bytes that several buffers share count once."""
        return sum(regions(self.slots).values()) + 8 * len(self.mbarriers)

    def describe(self, actor: int, index: int) -> str:
        """Return operation ``index`` of an actor in words, for messages and timelines."""
        kind, x = (int(v) for v in self.actors[actor].ops[index][:2])
        op = Op(kind)
        names = {
            Op.VECTOR: lambda: self.works[x].name,
            Op.WGMMA: lambda: f"issue {self.gemms[x].name}",
            Op.WGMMA_WAIT: lambda: "wait wgmma",
            Op.EXPECT: lambda: f"expect {self.mbarriers[x].name}",
            Op.LOAD: lambda: f"load {self.mbarriers[x].name}",
            Op.STORE: lambda: "store",
            Op.STORE_WAIT: lambda: "wait store",
            Op.REDUCE: lambda: "reduce",
            Op.ARRIVE: lambda: f"arrive {self.mbarriers[x].name}",
            Op.WAIT: lambda: f"wait {self.mbarriers[x].name}",
            Op.BAR_ARRIVE: lambda: f"arrive {self.named_barriers[x].name}",
            Op.BAR_SYNC: lambda: f"wait {self.named_barriers[x].name}",
            Op.DELAY: lambda: self.delays[x],
            Op.READ: lambda: f"read {self.slots[x].name}",
            Op.OPERAND: lambda: f"operand {self.slots[x].name}",
            Op.WRITE: lambda: f"write {self.slots[x].name}",
            Op.FENCE: lambda: "fence",
            Op.MEET: lambda: "meet",
            Op.MARK: lambda: self.labels[x],
        }
        return names[op]()


@dataclass(slots=True)
class Stream:
    """Operations of one actor under construction; each method adds the operation of its name."""

    program: Builder
    name: str
    threads: int
    registers: int
    rows: list[Row] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # as of :class:`Actor`

    def _add(self, op: Op, x: int = 0, y: int = 0, z: int = 0, w: int = 0) -> None:
        self.rows.append((op, x, y, z, w))
        if self.program.origin:
            self.lines.append(_place(self.program.origin))

    def work(self, *works: Work) -> None:
        """Do vector work, one behind the other; what has no instructions is left out."""
        for work in works:
            if work.chunks:
                self._add(Op.VECTOR, self.program.works[work])

    def issue(self, gemm: Gemm, a: Slot | None, b: Slot, accumulator: Slot) -> None:
        slots = self.program.slots
        self._add(Op.WGMMA, self.program.gemms[gemm], NONE if a is None else slots[a], slots[b], slots[accumulator])

    def wgmma_wait(self, in_flight: int) -> None:
        """Wait until at most ``in_flight`` groups of wgmma, 0 to 7, are in flight; ValueError for other numbers."""
        self._add(Op.WGMMA_WAIT, _checked(in_flight, "groups of wgmma"))

    def operand(self, slot: Slot) -> None:
        """Let the next wgmma read this slot too, as where A or B lies in several slots."""
        self._add(Op.OPERAND, self.program.slots[slot])

    def load(
        self,
        barrier: Mbarrier,
        slots: Iterable[Slot],
        *,
        is_far: bool = False,
        by_threads: bool = False,
        multicast: int = 1,
    ) -> None:
        """Expect the bytes of all slots at a barrier, and load them as :meth:`load_only` does."""
        slots = tuple(slots)
        self.expect(barrier, sum(slot.bytes for slot in slots))
        self.load_only(barrier, slots, is_far=is_far, by_threads=by_threads, multicast=multicast)

    def expect(self, barrier: Mbarrier, size: int) -> None:
        """Arrive at a barrier, whose phase then waits for so many bytes more."""
        self._add(Op.EXPECT, self.program.mbarriers[barrier], size)

    def load_only(
        self,
        barrier: Mbarrier,
        slots: Iterable[Slot],
        *,
        is_far: bool = False,
        by_threads: bool = False,
        multicast: int = 1,
    ) -> None:
        """Load slots whose bytes somebody expects at a barrier.

        Parameters
        ----------
        barrier : Mbarrier
        slots : iterable of Slot
        is_far : bool
            Whether they come from HBM and not from L2, as no other CTA has loaded them before.
        by_threads : bool
            Whether all threads of the actor load them by ``cp.async`` and not one of them by TMA.
        multicast : int
            CTAs of a cluster that share the load.

        Raises
        ------
        ValueError
            If ``multicast`` is below 1, or above 1 for ``cp.async``, which has none.
        """
        if multicast < 1 or (by_threads and multicast > 1):
            raise ValueError(f"a load is for 1 CTA or more, by cp.async for 1, got {multicast}")
        how = FAR * is_far + BY_THREADS * by_threads + OTHERS * (multicast - 1)
        for slot in slots:
            self._add(Op.LOAD, self.program.mbarriers[barrier], slot.bytes, self.program.slots[slot], how)

    def tma_store(self, slot: Slot, size: int | None = None, *, adds: bool = False) -> None:
        """Copy a slot to global memory, or add it there (``cp.async.bulk``, ``cp.reduce.async.bulk``)."""
        self._add(Op.STORE, slot.bytes if size is None else size, self.program.slots[slot], int(adds))

    def store_wait(self, in_flight: int = 0) -> None:
        """Wait until at most ``in_flight`` stores, 0 to 7, read their slots; ValueError for other numbers."""
        self._add(Op.STORE_WAIT, _checked(in_flight, "stores"))

    def global_store(self, size: int, *, width: int = 16) -> None:
        """Store so many bytes by all threads (``st.global``), ``width`` by one instruction of a thread."""
        self._add(Op.REDUCE, size, 1, width)

    def global_add(self, size: int) -> None:
        """Add so many bytes in global memory by all threads (``red.global.add``)."""
        self._add(Op.REDUCE, size)

    def arrive(self, barrier: Mbarrier) -> None:
        self._add(Op.ARRIVE, self.program.mbarriers[barrier])

    def wait(self, barrier: Mbarrier, parity: int) -> None:
        self._add(Op.WAIT, self.program.mbarriers[barrier], parity & 1)

    def bar_arrive(self, barrier: NamedBarrier) -> None:
        self._add(Op.BAR_ARRIVE, self.program.named_barriers[barrier])

    def bar_sync(self, barrier: NamedBarrier) -> None:
        self._add(Op.BAR_SYNC, self.program.named_barriers[barrier])

    def meet(self) -> None:
        """Let the warps of the actor wait for each other at a barrier whose time is that of other operations."""
        self._add(Op.MEET)

    def delay(self, constant: str) -> None:
        self._add(Op.DELAY, self.program.delays[constant])

    def read(self, slot: Slot, *works: Work, own: bool = False) -> None:
        """Read a slot, by instructions that may be given; ``own``: each warp only what no other of the actor writes."""
        self._add(Op.READ, self.program.slots[slot], own)
        self.work(*works)

    def write(self, slot: Slot, *works: Work) -> None:
        """Write a slot, by instructions that may be given."""
        self._add(Op.WRITE, self.program.slots[slot])
        self.work(*works)

    def fence(self) -> None:
        self._add(Op.FENCE)

    def mark(self, label: str) -> None:
        self._add(Op.MARK, self.program.labels[label])


def _checked(in_flight: int, what: str) -> int:
    if not 0 <= in_flight <= MOST_IN_FLIGHT:
        raise ValueError(f"a wait leaves 0 to {MOST_IN_FLIGHT} {what} in flight, got {in_flight}")
    return in_flight


def numbered() -> defaultdict[Any, int]:
    """Return a dictionary that numbers items from 0 when they are first asked for."""
    return defaultdict(count().__next__)


def _place(origin: str) -> str:
    """Return where the operation that is being added stands in the file of a description."""
    stack = groupby(walk_stack(sys._getframe(1)), lambda x: x[0].f_code.co_filename == origin)
    numbers = next(([str(line) for _, line in frames] for is_own, frames in stack if is_own), [])
    ends = dict.fromkeys(numbers[:1] + numbers[-1:])
    return f"{Path(origin).name}:{', called at '.join(ends)}"


class Builder:
    """Collects the streams of a program; gemms, barriers, slots and so on get their indices at first use.

    With an ``origin``, the file of a description as Python names it, each operation remembers where it stands in it.
    """

    def __init__(self, name: str, origin: str = "") -> None:
        self.name = name
        self.origin = origin
        self.has_latencies = True  # whether loads and fences wait by themselves
        self.streams: list[Stream] = []
        self.gemms, self.works, self.mbarriers, self.named_barriers = numbered(), numbered(), numbered(), numbered()
        self.slots, self.delays, self.labels = numbered(), numbered(), numbered()

    def actor(self, name: str, threads: int, registers: int) -> Stream:
        stream = Stream(self, name, threads, registers)
        self.streams.append(stream)
        return stream

    def build(self) -> Program:
        actors = tuple(
            Actor(
                s.name,
                s.threads,
                s.registers,
                np.fromiter(chain.from_iterable(s.rows), np.int64).reshape(-1, 5),
                tuple(s.lines),
            )
            for s in self.streams
        )
        lists = (self.gemms, self.works, self.mbarriers, self.named_barriers, self.slots, self.delays, self.labels)
        return Program(self.name, actors, *map(tuple, lists))
