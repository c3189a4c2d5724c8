"""Rings of stages in shared memory, and vector work by elements: what descriptions and shipped kernels are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fa3_simulator.program import Mbarrier, NamedBarrier, Slot, Work

ELEMENTS_PER_CHUNK = 4  # elements of a lane, between which another warp may have a pipe
IN_ALL = ("smem_bytes", "stall", "trips")  # counts of a piece of vector work that no element multiplies
Barrier = Mbarrier | NamedBarrier


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
    def empty(self) -> Barrier | None:
        return self.ring.empty[self.index] if self.ring.empty else None


def work_on(name: str, elements: int | None = None, *, chunks: int = 0, **counts: float) -> Work:
    """Return what :meth:`Warps.vector` does; nothing for no elements."""
    times = 1 if elements is None else elements
    total = {pipe: round(count * (1 if pipe in IN_ALL else times)) for pipe, count in counts.items()}
    return Work(name, chunks or -(-times // ELEMENTS_PER_CHUNK), **total)
