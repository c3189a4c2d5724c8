"""What a simulated run leaves behind: spans of every actor, bursts of the tensor core, marks, busy
times, in ticks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fa3_simulator.costs import TICKS


class Span(NamedTuple):
    """Holds what an actor did between two ticks; ``row`` is that of the operation."""

    actor: int
    row: int
    start: int
    stop: int


class Burst(NamedTuple):
    """Tensor core time of one wgmma instruction; what vector work took since the one before adds to that one's."""

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
    """Nothing goes on: each unfinished actor waits for something that nobody will do."""


@dataclass(slots=True)
class Trace:
    """One run: ``end`` in ticks; spans and bursts in order of their start per actor; ``busy`` ticks by resource."""

    end: int = 0
    spans: list[Span] = field(default_factory=list)
    bursts: list[Burst] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    busy: dict[str, int] = field(default_factory=dict)

    @property
    def cycles(self) -> float:
        return self.end / TICKS
