"""Why nothing goes on: who waits for which barrier, and who would have to arrive there."""

from __future__ import annotations

from collections.abc import Mapping

from fa3_simulator.program import Op, Program

_ARRIVALS = {Op.WAIT: (Op.ARRIVE, Op.EXPECT), Op.BAR_SYNC: (Op.BAR_ARRIVE, Op.BAR_SYNC)}


def waits_in_words(program: Program, blocked: Mapping[int, int]) -> str:
    """Name a circle of waits if there is one, else every wait; ``blocked`` has the row of each actor that cannot go on.

    An actor waits for those that are blocked too and have an arrival at its barrier before them; a barrier at which
    nobody will arrive any more is named as such.
    """
    waits = {actor: _awaited(program, actor, blocked) for actor in blocked}
    circle = _circle(waits)
    parts = []
    for actor, row in blocked.items():
        if circle and actor not in circle:
            continue
        names = [program.actors[a].name for a in waits[actor]]
        whom = f", where {' and '.join(names)} would arrive" if names else ", where nobody will arrive"
        parts.append(f"{program.actors[actor].name} at {program.describe(actor, row)} (row {row}){whom}")
    return ("circle of waits: " if circle else "") + "; ".join(parts)


def _awaited(program: Program, waiting: int, blocked: Mapping[int, int]) -> list[int]:
    """Blocked actors that have an arrival at the barrier of a wait before them: behind their own wait, at a named
    barrier of which they have arrived already.
    """
    kind, barrier = (int(x) for x in program.actors[waiting].ops[blocked[waiting]][:2])
    arrivals = _ARRIVALS.get(Op(kind), ())
    found = []
    for other, row in blocked.items():
        if other == waiting and kind == Op.BAR_SYNC:
            continue  # it is there already
        rest = program.actors[other].ops[row + 1 :, :2].tolist()
        if any(op in arrivals and x == barrier for op, x in rest):
            found.append(other)
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
