"""What a run of :mod:`fa3_simulator.engine` leaves behind, in ticks: its end, busy times and marks, and where they are
asked for, spans of every actor and bursts of the tensor core.

:mod:`fa3_simulator.overlap` and :mod:`fa3_simulator.timeline` read spans and bursts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fa3_simulator.costs import TICKS


class Span(NamedTuple):
    """One operation of an actor, from tick to tick; ``row`` is its index in the actor's operations."""

    actor: int
    row: int
    start: int
    stop: int


class Burst(NamedTuple):
    """Tensor core time of one wgmma instruction, issued by operation ``row`` of an actor.

    ``taken`` are the ticks that vector work took from the tensor core since the burst before; they delayed that burst.
    """

    actor: int
    row: int
    start: int
    stop: int
    taken: int


class DeadlockError(RuntimeError):
    """A program cannot go on: each unfinished actor waits for something that no actor will do."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One run: ``end`` in ticks, ``busy`` ticks by resource, and when each actor passed its MARKs, in order.

    Where they were recorded, ``spans`` are in order of their end, operations that took no time left out, and
    ``bursts`` in order of their start.
    """

    end: int = 0
    busy: dict[str, int] = field(default_factory=dict)
    marks: list[list[int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    bursts: list[Burst] = field(default_factory=list)

    @property
    def cycles(self) -> float:
        return self.end / TICKS
