"""What a run of :mod:`fa3_simulator.engine` leaves behind: spans of every actor, bursts of the tensor core, marks and
busy times, all in ticks.

:mod:`fa3_simulator.overlap` and :mod:`fa3_simulator.timeline` read it.
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


class Mark(NamedTuple):
    actor: int
    label: int
    tick: int


class DeadlockError(RuntimeError):
    """A program cannot go on: each unfinished actor waits for something that no actor will do."""


@dataclass(slots=True)
class Trace:
    """One run: ``end`` in ticks; spans of each actor and bursts in order of their start; ``busy`` ticks by resource."""

    end: int = 0
    spans: list[Span] = field(default_factory=list)
    bursts: list[Burst] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    busy: dict[str, int] = field(default_factory=dict)

    @property
    def cycles(self) -> float:
        return self.end / TICKS
