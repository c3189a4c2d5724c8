"""Explains a deadlock in words: which actor waits at which barrier, and which actors would have to arrive there.

The engine and :mod:`fa3_simulator.hazards` call it when no actor can go on.
"""

from __future__ import annotations

from collections.abc import Mapping

from fa3_simulator.program import Op, Program

_ARRIVALS = {Op.WAIT: (Op.ARRIVE, Op.EXPECT), Op.BAR_SYNC: (Op.BAR_ARRIVE, Op.BAR_SYNC)}


def waits_in_words(program: Program, blocked: Mapping[int, int]) -> str:
    """Return a circle of waits in words if there is one, else every wait.

    ``blocked`` holds the row of the operation at which each actor is stuck. An actor waits for the blocked actors that
    would still arrive at its barrier if they could go on; a barrier at which none of them would arrive is named as
    such.
    """
    waits = {actor: _awaited(program, actor, blocked) for actor in blocked}
    circle = _circle(waits)
    parts = []
    for actor in (a for a in blocked if a in (circle or blocked)):
        waiting = program.actors[actor]
        row = blocked[actor]
        names = " and ".join(program.actors[a].name for a in waits[actor])
        whom = f"{names} would arrive" if names else "nobody will arrive"
        parts.append(f"{waiting.name} at {program.describe(actor, row)} ({waiting.place(row)}), where {whom}")
    return "circle of waits: " * bool(circle) + "; ".join(parts)


def _awaited(program: Program, waiting: int, blocked: Mapping[int, int]) -> list[int]:
    """Return the blocked actors that would still arrive at the barrier at which ``waiting`` is stuck.

    Their arrivals are behind the row at which they are stuck themselves. An actor stuck at the same named barrier has
    arrived there already.
    """
    kind, barrier = (int(x) for x in program.actors[waiting].ops[blocked[waiting]][:2])
    arrivals = [[op, barrier] for op in _ARRIVALS.get(Op(kind), ())]
    rests = {other: program.actors[other].ops[row + 1 :, :2].tolist() for other, row in blocked.items()}
    if kind == Op.BAR_SYNC:
        del rests[waiting]  # it has arrived at its barrier already
    return [other for other, rest in rests.items() if any(row in arrivals for row in rest)]


def _circle(waits: dict[int, list[int]]) -> list[int]:
    """Return actors of which each waits for the next and the last for the first; [] if there is no such circle."""
    for start in waits:
        path = [start]
        while following := [a for a in waits[path[-1]] if a in waits]:
            step = following[0]
            if step in path:
                return path[path.index(step) :]
            path.append(step)
    return []
