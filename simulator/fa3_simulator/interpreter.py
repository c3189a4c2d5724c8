"""The same model as :mod:`fa3_simulator.engine`, run by the compiled loops of :mod:`fa3_simulator.loops`.

It is fast, and :mod:`fa3_simulator.cta` and the tuner use it. It records no spans, only the end, busy ticks and marks;
timelines come from the engine. The two share no code, and a property test holds them to equal ticks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa3_simulator import loops
from fa3_simulator.costs import RESOURCES, TICKS, Costs
from fa3_simulator.deadlock import waits_in_words
from fa3_simulator.program import Program
from fa3_simulator.trace import DeadlockError


class Timing(NamedTuple):
    """Ticks of a run: when it ends, how long each resource is busy, and when each actor passes its MARKs, in order."""

    end: int
    busy: dict[str, int]
    marks: list[list[int]]

    @property
    def cycles(self) -> float:
        return self.end / TICKS


def _state_of(program: Program, costs: Costs) -> loops.State:
    """Return the state of a run that has not begun."""
    count = len(program.actors)
    ops = np.concatenate([actor.ops for actor in program.actors])
    ends = np.cumsum([len(actor.ops) for actor in program.actors])
    actors = np.zeros(count, loops.ACTOR)
    actors["pc"][1:] = ends[:-1]
    actors["last"] = ends
    actors["threads"] = [actor.threads for actor in program.actors]
    actors["sleeps_on"] = -1
    mbarriers = np.zeros(len(program.mbarriers), loops.MBARRIER)
    mbarriers["arrivals"] = mbarriers["pending"] = [x.arrivals for x in program.mbarriers]
    named = np.zeros(len(program.named_barriers), loops.NAMED)
    named["threads"] = [x.threads for x in program.named_barriers]
    scalars = np.array([tuple(costs.scalars)], loops.SCALAR_FIELDS)
    return loops.State(
        ops,
        *costs[:4],
        scalars,
        actors,
        mbarriers,
        named,
        core=np.zeros(1, loops.CORE),
        origins=np.zeros(2, loops.ORIGIN),
        loads=np.zeros((2, loops.MOST_LOADS, 4), np.int64),
        wants=np.zeros((count, loops.PIPE_COUNT), np.int64),
        slowed=np.full((count, loops.PIPE_COUNT), 64, np.int64),
        groups=np.zeros((count, loops.IN_FLIGHT), np.int64),
        stored=np.zeros((count, loops.IN_FLIGHT), np.int64),
        flight=np.zeros((count, int(scalars["wgmma_window"][0])), np.int64),
        busy=np.zeros(len(RESOURCES), np.int64),
        marks=np.zeros((count, 1 + np.count_nonzero(ops[:, 0] == loops.MARK)), np.int64),
    )


def simulate(program: Program, costs: Costs) -> Timing:
    """Run a program; the result has the same ticks as that of :func:`fa3_simulator.engine.simulate`.

    Raises
    ------
    DeadlockError
        If some actors cannot go on; the message names them and what they wait for.
    """
    state = _state_of(program, costs)
    loops.run(state)
    end = int(state.core["end"][0])
    actors = state.actors
    if stuck := [i for i, actor in enumerate(actors) if actor["pc"] < actor["last"]]:
        first = actors["last"] - [len(actor.ops) for actor in program.actors]
        blocked = {i: int(actors["pc"][i] - first[i]) for i in stuck}
        raise DeadlockError(f"deadlock at cycle {end / TICKS:.0f}: {waits_in_words(program, blocked)}")
    marked = zip(state.marks.tolist(), actors["marked"].tolist(), strict=True)
    return Timing(
        end, dict(zip(RESOURCES, state.busy.tolist(), strict=True)), [marks[:count] for marks, count in marked]
    )
