"""Why nothing goes on: who waits for which barrier, and who would have to arrive there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fa3_simulator.program import Op, Program

_ARRIVALS = {Op.WAIT: (Op.ARRIVE, Op.EXPECT), Op.BAR_SYNC: (Op.BAR_ARRIVE, Op.BAR_SYNC)}


class Blocked(NamedTuple):
    """An actor that cannot go on: the row of its wait, and whether it has entered a named barrier there."""

    actor: int
    row: int
    has_joined: bool = False


def waits_in_words(program: Program, blocked: Sequence[Blocked]) -> str:
    """Name a circle of waits if there is one, else every wait.

    An actor waits for those that are blocked too and have an arrival at its barrier before them; a barrier at which
    nobody will arrive any more is named as such.
    """
    waits = {b.actor: _awaited(program, b, blocked) for b in blocked}
    circle = _circle(waits)
    parts = []
    for b in blocked:
        if circle and b.actor not in circle:
            continue
        names = [program.actors[a].name for a in waits[b.actor]]
        whom = f", where {' and '.join(names)} would arrive" if names else ", where nobody will arrive"
        where = f"{program.actors[b.actor].name} at {program.describe(b.actor, b.row)} (row {b.row})"
        parts.append(where + whom)
    return ("circle of waits: " if circle else "") + "; ".join(parts)


def _awaited(program: Program, waiting: Blocked, blocked: Sequence[Blocked]) -> list[int]:
    """Blocked actors that have an arrival at the barrier of a wait before them."""
    kind, barrier = (int(x) for x in program.actors[waiting.actor].ops[waiting.row][:2])
    arrivals = _ARRIVALS.get(Op(kind), ())
    found = []
    for other in blocked:
        if other.actor == waiting.actor and kind == Op.BAR_SYNC:
            continue  # it is there already
        rest = program.actors[other.actor].ops[other.row + other.has_joined :, :2].tolist()
        if any(op in arrivals and x == barrier for op, x in rest):
            found.append(other.actor)
    return found


def _circle(waits: dict[int, list[int]]) -> list[int]:
    """Actors of which each waits for the next, and the last for the first."""
    for start in waits:
        path = [start]
        while following := [a for a in waits[path[-1]] if a in waits]:
            step = following[0]
            if step in path:
                return path[path.index(step) :]
            path.append(step)
    return []
