"""An execution of a program by :mod:`fa3_simulator.hazards`: the order of its steps, and what is kept of each region of
memory and of each barrier."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from fa3_simulator.program import NONE

_CHANGES = 1 / 32  # probability that the precedence changes before a step


class Order:
    """The order in which actors go on and loads land.

    Without a seed the first actor that can goes on, and loads land where none can. With a seed each step is drawn. An
    order that is uneven draws precedences of the actors and of the loads, which change now and then, so that some run
    far ahead of others.
    """

    def __init__(self, actors: int, seed: int | None, *, is_uneven: bool) -> None:
        self.rng = None if seed is None else random.Random(seed)
        self.precedence = [
            self.rng.random() if self.rng and is_uneven else 0.0 for _ in range(actors + 1)
        ]  # loads last

    def choose(self, ready: Sequence[int], loads: int) -> int:
        """Return the index of the actor in ``ready`` that goes on, or beyond them that of the load that lands."""
        if self.rng is None:
            return 0
        if self.rng.random() < _CHANGES:
            self.rng.shuffle(self.precedence)
        steps = [(self.precedence[who], self.rng.random()) for who in (*ready, *repeat(-1, loads))]
        return steps.index(min(steps))


@dataclass(slots=True)
class Access:
    """The last write of a region of memory, and the reads since.

    An event is known by its epoch, (component of the vector clock, value): an actor has seen it if that component of
    the actor's clock has reached the value.
    """

    written: int = 0  # number of writes so far
    writer: str = "nobody"
    loaded: int = NONE  # the slot that was loaded, if the last write is by TMA
    readers: set[str] = field(default_factory=set)  # actors that read the contents of the last write
    # for each slot and set of readers of its contents, the number of the first load that had them
    loads: dict[tuple[int, frozenset[str]], int] = field(default_factory=dict)
    issue: tuple[int, int] | None = None  # epoch of the wgmma group that writes, for an accumulator
    reads: dict[int, tuple[int, str]] = field(default_factory=dict)  # value and name of each component's last read

    def replaced(self, writer: str, loaded: int = NONE) -> None:
        """Note that ``writer`` replaces the contents, by a load of slot ``loaded`` unless that is NONE."""
        self.keep_readers()
        self.written, self.writer, self.loaded, self.readers = self.written + 1, writer, loaded, set()

    def keep_readers(self) -> None:
        if self.loaded != NONE:
            self.loads.setdefault((self.loaded, frozenset(self.readers)), self.written)


@dataclass(slots=True)
class Phase:
    """An mbarrier or a named barrier: its arrivals, and the clock that an actor acquires by waiting."""

    pending: int  # arrivals, or threads, that are missing
    bytes: int = 0  # bytes that are missing
    done: int = 0  # completed phases
    members: list[int] = field(default_factory=list)  # actors that have entered this round
    gathered: list[int] = field(default_factory=list)  # the clocks of all arrivals, merged
    released: list[int] = field(default_factory=list)  # what was gathered when the last round ended
    waited: dict[int, tuple[int, str]] = field(default_factory=dict)  # by actor: own clock and name at its last wait

    def end(self, component: int, pending: int) -> None:
        """End a round, which the clock of the barrier's own ``component`` counts; the next one needs ``pending``."""
        self.done += 1
        self.pending = pending
        self.gathered[component] = self.done
        self.released = self.gathered[:]


def missing(enough: int, readers: frozenset[str], everyone: frozenset[str]) -> list[str]:
    """Return who does not read a content of a slot that ``enough`` actors read, with 0 ``everyone`` who reads any."""
    if not (readers if enough else everyone):
        return ["anyone"]
    if enough > len(readers):
        return [f"{enough} actors but by {' and '.join(sorted(readers))} alone"]
    return [] if enough else sorted(everyone - readers)
