"""The same model as :mod:`fa3_simulator.engine`, as one compiled loop over the program's tables.

No code is shared with the engine: a property test holds the two to equal ticks. It records no spans, only what tuning
needs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from fa3_simulator.costs import PIECE_BYTES, PIPES, RESOURCES, SCALARS, TICKS, Costs
from fa3_simulator.deadlock import Blocked, waits_in_words
from fa3_simulator.program import Op, Program
from fa3_simulator.trace import DeadlockError

# Numba's cache on disk is renewed when this file changes, not when another does: what the loop was compiled with is
# written here, and compared with its origin at import.
OPS = (
    "VECTOR",
    "WGMMA",
    "WGMMA_WAIT",
    "EXPECT",
    "LOAD",
    "STORE",
    "STORE_WAIT",
    "ARRIVE",
    "WAIT",
    "BAR_ARRIVE",
    "BAR_SYNC",
    "DELAY",
    "READ",
    "WRITE",
    "FENCE",
    "MARK",
    "REDUCE",
)
(
    VECTOR,
    WGMMA,
    WGMMA_WAIT,
    EXPECT,
    LOAD,
    STORE,
    STORE_WAIT,
    ARRIVE,
    WAIT,
    BAR_ARRIVE,
    BAR_SYNC,
    DELAY,
    READ,
    WRITE,
    FENCE,
    MARK,
    REDUCE,
) = range(len(OPS))
(TAIL, WINDOW, HOP, POLL, BAR_HOP, TMA_ISSUE, BOX, LATENCY, PIECE, PIECE_FAR, PIECE_PORT, PIECE_STORE, PIECE_REDUCE) = (
    range(13)
)
PIPE_COUNT = 2
PIECE_SIZE = 4096
IN_FLIGHT = 6  # wgmma groups and stores of an actor that a wait may leave, and one
NEVER = np.iinfo(np.int64).max
_SCALARS = (
    "wgmma_tail",
    "wgmma_window",
    "mbarrier_hop",
    "mbarrier_poll",
    "named_barrier",
    "tma_issue",
    "tma_box_bytes",
    "memory_latency",
    "piece",
    "piece_far",
    "piece_port",
    "piece_store",
    "piece_reduce",
)
if (tuple(op.name for op in Op), SCALARS, len(PIPES), PIECE_BYTES) != (OPS, _SCALARS, PIPE_COUNT, PIECE_SIZE):
    raise ImportError("the interpreter's constants differ from those of program and costs")


class Timing(NamedTuple):
    """Ticks: of the whole run, busy by resource, and of every MARK per actor in order."""

    end: int
    busy: dict[str, int]
    marks: list[list[int]]

    @property
    def cycles(self) -> float:
        return self.end / TICKS


@njit(cache=True)
def _complete(b, now, hop, pending, tx, phase, arrivals, sleeps_on, parity, wake):  # noqa: PLR0913
    """End the phase of mbarrier ``b`` if all has arrived, and wake those who wait for it."""
    if pending[b] > 0 or tx[b] > 0:
        return
    phase[b] += 1
    pending[b] += arrivals[b]
    for a in range(wake.size):
        if sleeps_on[a] == b and (phase[b] & 1) != parity[a]:
            sleeps_on[a] = -1
            wake[a] = now + hop


@njit(cache=True)
def _push(newest, value):
    """Put a value in front of others, of which the last is dropped."""
    for i in range(newest.size - 1, 0, -1):
        newest[i] = newest[i - 1]
    newest[0] = value


@njit(cache=True)
def _run(ops, first, threads, gemm, work, work_slow, delay, scalar, arrivals, bar_threads, marks):  # noqa: PLR0913
    actors = threads.size
    pc = first[:-1].copy()
    last = first[1:]
    part = np.zeros(actors, np.int64)
    wake = np.zeros(actors, np.int64)  # NEVER while asleep
    sleeps_on = np.full(actors, -1, np.int64)  # mbarrier x, or mbarriers + named barrier
    parity = np.zeros(actors, np.int64)
    groups = np.zeros((actors, IN_FLIGHT), np.int64)  # completion of the newest group, of the one before and so on
    counted = np.zeros(actors, np.int64)
    stored = np.zeros((actors, IN_FLIGHT), np.int64)  # when stores have read their slots, likewise
    marked = np.zeros(actors, np.int64)
    pending = arrivals.copy()
    tx = np.zeros(arrivals.size, np.int64)
    phase = np.zeros(arrivals.size, np.int64)
    arrived = np.zeros(bar_threads.size, np.int64)
    until = np.zeros(actors, np.int64)  # of vector work: end of the chunk under way
    wants = np.zeros((actors, PIPE_COUNT), np.int64)  # alone, in 1/64 of a pipe
    slowed = np.full((actors, PIPE_COUNT), 64, np.int64)  # by those that share the pipe, in 1/64
    holds = np.zeros(actors, np.int64)  # what it makes of others' time, likewise
    busy = np.zeros(4 + PIPE_COUNT, np.int64)
    # tensor, groups and flight are kept less what was taken by then
    tensor = port = egress = taken = loss = np.int64(0)
    ingress = np.zeros(2, np.int64)  # from L2 and from HBM
    window = scalar[WINDOW]
    flight = np.zeros((actors, window), np.int64)  # ring: completion of the last instructions
    issued = np.zeros(actors, np.int64)
    loads = np.zeros((2, 64, 4), np.int64)  # rings of loads from each: first piece, pieces left, mbarrier, bytes
    head = np.zeros(2, np.int64)
    tail = np.zeros(2, np.int64)
    end = np.int64(0)
    while True:
        actor = -1
        for a in range(actors):
            if wake[a] != NEVER and (actor < 0 or wake[a] < wake[actor]):
                actor = a
        now = wake[actor] if actor >= 0 else NEVER
        far = -1  # origin of the next piece that is not after the actor
        for origin in range(2):
            if head[origin] != tail[origin]:
                when = loads[origin, head[origin] % 64, 0]
                if when <= now and (far < 0 or when < loads[far, head[far] % 64, 0]):
                    far = origin
        if far >= 0:
            entry = loads[far, head[far] % 64]
            now = entry[0]
            end = max(end, now)
            port = max(now, port) + scalar[PIECE_PORT]
            busy[1] += scalar[PIECE_PORT]
            entry[1] -= 1
            entry[0] += scalar[PIECE_FAR] if far else scalar[PIECE]
            if entry[1] == 0:
                head[far] += 1
                tx[entry[2]] -= entry[3]
                _complete(entry[2], now, scalar[HOP], pending, tx, phase, arrivals, sleeps_on, parity, wake)
            continue
        if actor < 0:
            break
        end = max(end, now)
        resume = now
        while resume == now and pc[actor] < last[actor]:
            kind = ops[pc[actor], 0]
            x = ops[pc[actor], 1]
            y = ops[pc[actor], 2]
            finished = True
            completes = -1  # mbarrier with a new arrival
            if kind == VECTOR:
                if part[actor] < work[x, 0]:
                    part[actor] += 1
                    finished = False
                    row = work_slow[x] if now < tensor + taken else work[x]
                    taken += row[3 + PIPE_COUNT] * loss // 64
                    held = np.int64(64)
                    if row[4 + PIPE_COUNT] == 64:
                        for a in range(actors):
                            if a != actor and until[a] > now:
                                held = max(held, holds[a])
                    holds[actor] = row[4 + PIPE_COUNT]
                    slowest = held
                    for p in range(PIPE_COUNT):
                        cost = row[1 + p]
                        wanted = wants[actor, p] = min(64, 64 * cost // max(1, row[2 + PIPE_COUNT]))
                        if cost > 0:
                            for a in range(actors):
                                if a != actor and until[a] > now:
                                    wanted += 64 * wants[a, p] // slowed[a, 1 - p]
                            busy[2 + p] += cost
                        slowed[actor, p] = max(64, wanted)
                        slowest = max(slowest, wanted)
                    slowed[actor, 0] = max(slowed[actor, 0], held)
                    resume = now + row[2 + PIPE_COUNT] * slowest // 64
                    if row[1 + PIPE_COUNT] > 0:
                        port = max(now, port) + row[1 + PIPE_COUNT]
                        busy[1] += row[1 + PIPE_COUNT]
                        resume = max(resume, port)
                    until[actor] = resume
            elif kind == WGMMA:
                if part[actor] < gemm[x, 0]:
                    finished = False
                    oldest = flight[actor, issued[actor] % window] + taken
                    if issued[actor] >= window and oldest > now:
                        resume = oldest
                    else:
                        port = max(now, port) + gemm[x, 2]
                        tensor = max(max(now, tensor + taken) + gemm[x, 1], port) - taken
                        loss = gemm[x, 3]
                        flight[actor, issued[actor] % window] = tensor
                        issued[actor] += 1
                        busy[0] += gemm[x, 1]
                        busy[1] += gemm[x, 2]
                        part[actor] += 1
                        if part[actor] == gemm[x, 0]:
                            _push(groups[actor], tensor + scalar[TAIL])
                            counted[actor] += 1
                        resume = now + gemm[x, 4]
            elif kind == WGMMA_WAIT:
                if counted[actor] > x and groups[actor, x] + taken > now:
                    finished = False
                    resume = groups[actor, x] + taken
            elif kind == EXPECT:
                tx[x] += y
                completes = x
            elif kind == ARRIVE:
                completes = x
            elif kind == LOAD:
                if part[actor] == 0:
                    part[actor] = 1
                    finished = False
                    pieces = -(-y // PIECE_SIZE)
                    source = ops[pc[actor], 4]
                    piece = scalar[PIECE_FAR] if source else scalar[PIECE]
                    begin = max(now + scalar[LATENCY], ingress[source])
                    ingress[source] = begin + pieces * piece
                    if not source:
                        busy[2 + PIPE_COUNT] += pieces * piece
                    entry = loads[source, tail[source] % 64]
                    entry[0] = begin + piece
                    entry[1] = pieces
                    entry[2] = x
                    entry[3] = y
                    tail[source] += 1
                    resume = now + -(-y // scalar[BOX]) * scalar[TMA_ISSUE]
            elif kind == STORE:
                if part[actor] == 0:
                    part[actor] = 1
                    finished = False
                    pieces = -(-x // PIECE_SIZE)
                    port = max(now + scalar[TMA_ISSUE], port) + pieces * scalar[PIECE_PORT]
                    busy[1] += pieces * scalar[PIECE_PORT]
                    adds = ops[pc[actor], 3]
                    leaving = pieces * (scalar[PIECE_REDUCE] if adds else scalar[PIECE_STORE])
                    egress = max(now + scalar[TMA_ISSUE], egress) + leaving
                    busy[3 + PIPE_COUNT] += leaving if adds else 0
                    _push(stored[actor], max(port, egress))
                    resume = now + scalar[TMA_ISSUE]
            elif kind == STORE_WAIT:
                if stored[actor, x] > now:
                    finished = False
                    resume = stored[actor, x]
            elif kind == REDUCE:
                if part[actor] == 0:
                    part[actor] = 1
                    finished = False
                    leaving = -(-x // PIECE_SIZE) * scalar[PIECE_REDUCE]
                    egress = max(now, egress) + leaving
                    busy[3 + PIPE_COUNT] += leaving
                    resume = egress
            elif kind == WAIT:
                if part[actor] == 0:
                    part[actor] = 1
                    finished = False
                    if (phase[x] & 1) != y:
                        resume = now + scalar[POLL]
                    else:
                        sleeps_on[actor] = x
                        parity[actor] = y
                        resume = NEVER
            elif kind == BAR_ARRIVE or (kind == BAR_SYNC and part[actor] == 0):
                if kind == BAR_SYNC:
                    part[actor] = 1
                    finished = False
                    sleeps_on[actor] = arrivals.size + x
                    resume = NEVER
                arrived[x] += threads[actor]
                if arrived[x] >= bar_threads[x]:
                    arrived[x] = 0
                    for a in range(actors):
                        if sleeps_on[a] == arrivals.size + x:
                            sleeps_on[a] = -1
                            wake[a] = now + scalar[BAR_HOP]
                    if kind == BAR_SYNC:
                        resume = now + scalar[BAR_HOP]
            elif kind == DELAY:
                if part[actor] == 0:
                    part[actor] = 1
                    finished = False
                    resume = now + delay[x]
            elif kind == MARK:
                marks[actor, marked[actor]] = now
                marked[actor] += 1
            if completes >= 0:
                pending[completes] -= 1
                _complete(completes, now, scalar[HOP], pending, tx, phase, arrivals, sleeps_on, parity, wake)
            if finished:
                pc[actor] += 1
                part[actor] = 0
        wake[actor] = resume if pc[actor] < last[actor] else NEVER
    return end, busy, pc, marked


def simulate(program: Program, costs: Costs) -> Timing:
    """Run a program; the ticks of :func:`fa3_simulator.engine.simulate`.

    Raises
    ------
    DeadlockError
        Naming the actors that cannot go on and what they wait for.
    """
    ops = np.concatenate([actor.ops for actor in program.actors])
    first = np.cumsum([0, *(len(actor.ops) for actor in program.actors)])
    threads = np.array([actor.threads for actor in program.actors])
    marks = np.zeros((len(program.actors), 1 + np.count_nonzero(ops[:, 0] == MARK)), np.int64)
    arrivals = np.array([m.arrivals for m in program.mbarriers], np.int64)
    bar_threads = np.array([b.threads for b in program.named_barriers], np.int64)
    end, busy, pc, marked = _run(ops, first, threads, *costs[:5], arrivals, bar_threads, marks)
    if (pc != first[1:]).any():
        ends = zip(pc.tolist(), first.tolist(), first.tolist()[1:], strict=False)
        stuck = [Blocked(i, at - start, True) for i, (at, start, stop) in enumerate(ends) if at != stop]
        raise DeadlockError(f"deadlock at cycle {end / TICKS:.0f}: {waits_in_words(program, stuck)}")
    return Timing(
        int(end),
        dict(zip(RESOURCES, busy.tolist(), strict=True)),
        [marks[i, : marked[i]].tolist() for i in range(len(program.actors))],
    )
