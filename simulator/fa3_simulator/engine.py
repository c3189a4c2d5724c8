"""The discrete-event engine: runs one program on one machine, tick by tick, in the compiled loops of
:mod:`fa3_simulator.loops`, and returns its :class:`Trace`.

What happens at one tick has a fixed order, and all numbers are integers, so that a run is reproducible to the tick.
Model:

- Tensor core: one server per SM, n / 2 cycles per 64 x n wgmma, and more at a ``rate`` below wgmma's, whose operands
  do not come through shared memory; first come first served. A wait counts commit groups. Each warpgroup has at most
  ``wgmma_window`` instructions admitted. Multiply-adds issued while it is busy take ``fma_tensor_cycles`` from it.
  ``taken`` is the sum of that so far: the completion of an instruction is kept less ``taken`` when it was issued, and
  read plus ``taken`` at the time of reading. ``taken`` grows slower than time (a warp needs longer to issue a
  multiply-add), so that what is complete stays complete.
- Vector work: one warp of every warpgroup on each sub-core, so one sub-core stands for all four. A chunk takes the time
  that a warp alone needs, and longer where warps in chunks of their own want more of a pipe than there is: all are
  slowed in proportion, and a warp that another pipe slows wants less. The pipes are the port that issues all
  instructions, and the special-function unit. Beside a chunk of multiply-adds alone, which wait for no result, other
  chunks take at least ``held_up_factor`` times as long. All are slower while wgmma runs (``*_under_wgmma``).
- Shared memory port: operand fetch, TMA writes and matrix stores share its bytes per cycle.
- TMA: loads arrive after ``memory_latency_ns`` and in order at ``l2_bytes_per_cycle``; loads from HBM run beside them
  at ``hbm_lone_bytes_per_cycle``. What CTAs of a cluster share arrives at L2's rate for all of them, at most at that
  of an SM alone. ``cp.async`` is the same without an issue by TMA: its instructions are the actor's vector work. Loads
  into registers of what L2 has had for long have ``l2_latency_ns`` instead.
- Stores leave at ``store_bytes_per_cycle``, and those that add to memory at ``reduce_bytes_per_ns``, by TMA or by the
  threads themselves. Threads that add wait until their bytes have left, those that store while the queue is full.
- mbarriers and named barriers as in the PTX ISA; a waiter runs a hop after the last arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fa3_simulator import loops
from fa3_simulator.costs import RESOURCES, SCALARS, TICKS, Costs
from fa3_simulator.deadlock import waits_in_words
from fa3_simulator.program import Program


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


def _record(*names: str) -> np.dtype:
    return np.dtype([(name, np.int64) for name in names])


ACTOR = _record(
    "pc",  # row of the current operation
    "last",  # row behind its last operation
    "threads",
    "part",  # chunks or instructions of the current operation that are done
    "began",  # tick at which the current operation began
    "wake",  # loops.NEVER while asleep
    "sleeps_on",  # mbarrier x, or mbarriers + named barrier; -1 where on none
    "parity",
    "counted",  # groups of wgmma so far
    "issued",  # instructions of wgmma so far
    "marked",  # marks so far
    "until",  # end of the chunk of vector work under way
    "holds",  # how long other chunks take beside this one at least, in 1/64 of their own time
)
MBARRIER = _record("arrivals", "pending", "bytes", "phase")
NAMED = _record("threads", "arrived")
# Ticks at which the resources of the SM are free. Vector work takes time from the tensor core: ``taken`` is how much so
# far, ``seen`` how much it was at the last instruction, and ``loss`` the share that this one loses; the tensor core's
# times are kept less ``taken``. ``bursts`` counts the instructions that were recorded.
CORE = _record("end", "tensor", "port", "egress", "taken", "seen", "loss", "bursts")
ORIGIN = _record("head", "tail", "ingress")
SCALAR_FIELDS = _record(*SCALARS)


class State(NamedTuple):
    """Holds the tables of a run, which stay as they are, and the records that it changes, which are rows of arrays."""

    ops: np.ndarray  # (operations, 5), those of all actors one behind the other
    gemm: np.ndarray  # as :class:`~fa3_simulator.costs.Costs` has it, and so are the three below
    work: np.ndarray
    work_slow: np.ndarray
    delay: np.ndarray
    scalars: np.ndarray  # (1,)
    actors: np.ndarray
    mbarriers: np.ndarray
    named: np.ndarray
    core: np.ndarray  # (1,)
    origins: np.ndarray  # of loads: L2 and HBM
    loads: np.ndarray  # (origins, MOST_LOADS, 5), rings: next piece, pieces left, mbarrier, bytes, time of a piece
    wants: np.ndarray  # (actors, pipes): what its vector work needs of a pipe when it runs alone, in 1/64 of the pipe
    slowed: np.ndarray  # (actors, pipes): how long it takes by those that share the pipe, in 1/64 of its time alone
    groups: np.ndarray  # (actors, IN_FLIGHT): completion of the newest group, of the one before and so on
    stored: np.ndarray  # (actors, IN_FLIGHT): when stores have read their slots, likewise
    flight: np.ndarray  # (actors, window), rings: completion of the last instructions
    busy: np.ndarray  # ticks by resource
    marks: np.ndarray  # (actors, marks)
    spans: np.ndarray  # (operations, 2): when each began and ended; no rows where nothing is recorded
    bursts: np.ndarray  # (instructions, 5): of each wgmma its actor, operation, start, end and ``taken`` since the last


def _state_of(program: Program, costs: Costs, records: bool) -> State:
    """Return the state of a run that has not begun; ``records`` says whether it has room for spans and bursts."""
    count = len(program.actors)
    ops = np.concatenate([actor.ops for actor in program.actors])
    ends = np.cumsum([len(actor.ops) for actor in program.actors])
    actors = np.zeros(count, ACTOR)
    actors["pc"][1:] = ends[:-1]
    actors["last"] = ends
    actors["threads"] = [actor.threads for actor in program.actors]
    actors["sleeps_on"] = -1
    mbarriers = np.zeros(len(program.mbarriers), MBARRIER)
    mbarriers["arrivals"] = mbarriers["pending"] = [x.arrivals for x in program.mbarriers]
    named = np.zeros(len(program.named_barriers), NAMED)
    named["threads"] = [x.threads for x in program.named_barriers]
    instructions = int(costs.gemm[ops[ops[:, 0] == loops.WGMMA, 1], 0].sum()) if records else 0
    scalars = np.array([tuple(costs.scalars)], SCALAR_FIELDS)
    return State(
        ops,
        *costs[:4],
        scalars,
        actors,
        mbarriers,
        named,
        core=np.zeros(1, CORE),
        origins=np.zeros(2, ORIGIN),
        loads=np.zeros((2, loops.MOST_LOADS, 5), np.int64),
        wants=np.zeros((count, loops.PIPE_COUNT), np.int64),
        slowed=np.full((count, loops.PIPE_COUNT), 64, np.int64),
        groups=np.zeros((count, loops.IN_FLIGHT), np.int64),
        stored=np.zeros((count, loops.IN_FLIGHT), np.int64),
        flight=np.zeros((count, int(scalars["wgmma_window"][0])), np.int64),
        busy=np.zeros(len(RESOURCES), np.int64),
        marks=np.zeros((count, 1 + np.count_nonzero(ops[:, 0] == loops.MARK)), np.int64),
        spans=np.zeros((len(ops) * records, 2), np.int64),
        bursts=np.zeros((instructions, 5), np.int64),
    )


def simulate(program: Program, costs: Costs, *, records: bool = False) -> Trace:
    """Run a program from start to end.

    Parameters
    ----------
    program : Program
    costs : Costs
        Those of this program.
    records : bool
        Whether spans and bursts are recorded, for timelines and the ledger of idle ticks.

    Raises
    ------
    DeadlockError
        If some actors cannot go on; the message names the cycle, and each of them with what it waits for.
    """
    state = _state_of(program, costs, records)
    loops.run(state)
    end = int(state.core["end"][0])
    actors = state.actors
    first = actors["last"] - [len(actor.ops) for actor in program.actors]
    if stuck := [i for i, actor in enumerate(actors) if actor["pc"] < actor["last"]]:
        blocked = {i: int(actors["pc"][i] - first[i]) for i in stuck}
        raise DeadlockError(f"deadlock at cycle {end / TICKS:.0f}: {waits_in_words(program, blocked)}")
    marked = zip(state.marks.tolist(), actors["marked"].tolist(), strict=True)
    return Trace(
        end,
        dict(zip(RESOURCES, state.busy.tolist(), strict=True)),
        [marks[:count] for marks, count in marked],
        _spans(state.spans, first) if records else [],
        [Burst(actor, row - int(first[actor]), *times) for actor, row, *times in state.bursts.tolist()],
    )


def _spans(recorded: np.ndarray, first: np.ndarray) -> list[Span]:
    """Return the operations that took time, by their end; ``first`` is the row of each actor's first operation."""
    rows = np.flatnonzero(recorded[:, 1] > recorded[:, 0])
    rows = rows[np.argsort(recorded[rows, 1], kind="stable")]
    owners = np.searchsorted(first, rows, side="right") - 1
    columns = (owners, rows - first[owners], *recorded[rows].T)
    return [Span(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
