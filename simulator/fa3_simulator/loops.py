"""The compiled loops of :mod:`fa3_simulator.engine`, which run a program's tables.

The model is described there. Everything that changes during a run is in the arrays of a
:class:`~fa3_simulator.engine.State`, which every function gets as ``s``. Besides, ``a`` is the index of an actor,
``now`` the current tick, and ``x`` the first operand of an operation.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fa3_simulator.costs import ALONE, HOLD, PIECE_BYTES, PIPES, RESOURCES, SMEM as SMEM_COLUMN, TAKEN
from fa3_simulator.program import (
    BY_THREADS as OF_THREADS,
    FAR as FROM_HBM,
    HOT as IN_L2,
    MOST_IN_FLIGHT,
    OTHERS as SHARED,
    Op,
)

# Numba's cache on disk is renewed when this file changes, not when another file does. So the numbers that the loops are
# compiled with are written here, and compared with their origin at import. Names of fields are part of a compiled
# function's signature.
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
    OPERAND,
    MEET,
) = range(19)
_BUSY = ("tensor", "smem", "port", "mufu", "l2", "reduce")  # the RESOURCES whose busy ticks are counted
TENSOR, SMEM, PORT, MUFU, L2, REDUCTIONS = range(len(_BUSY))
PIPE_COUNT = 2
CHUNKS, FIRST_PIPE, WORK_SMEM, WORK_ALONE, WORK_TAKEN, WORK_HOLD = (0, 1, 3, 4, 5, 6)  # columns of Costs.work
PIECE_SIZE = 4096
FAR, BY_THREADS, HOT, OTHERS = 1, 2, 4, 8  # in the last operand of a load
IN_FLIGHT = 8  # one more than the wgmma groups, or stores, of an actor that a wait may leave in flight
MOST_LOADS = 256  # loads under way at a time from each origin
NEVER = np.iinfo(np.int64).max
DONE = -1  # returned by an operation that is over; otherwise it returns the tick at which its actor goes on
_OWN = (
    *(_BUSY, PIPE_COUNT, PIECE_SIZE, WORK_SMEM, WORK_ALONE, WORK_TAKEN, WORK_HOLD),
    *(FAR, BY_THREADS, HOT, OTHERS, IN_FLIGHT),
)
_ORIGIN_OF_THEM = (
    *(RESOURCES, len(PIPES), PIECE_BYTES, SMEM_COLUMN, ALONE, TAKEN, HOLD),
    *(FROM_HBM, OF_THREADS, IN_L2, SHARED, MOST_IN_FLIGHT + 1),
)
if _OWN != _ORIGIN_OF_THEM or any(globals().get(op.name) != op for op in Op):
    raise ImportError("the constants of the loops differ from those of program and costs")


# Without reference counts, and with each function inlined into its caller, handing on a state of 19 arrays costs
# nothing; with reference counts the loop takes 70 times as long. So nothing here allocates memory or returns an array.
_inlined = njit(_nrt=False, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]


@_inlined
def _complete(s, b, now):
    """End the phase of mbarrier ``b`` if all arrivals and bytes are there, and wake the actors that wait for it."""
    barrier = s.mbarriers[b]
    if barrier.pending > 0 or barrier.bytes > 0:
        return
    barrier.phase += 1
    barrier.pending += barrier.arrivals
    for a in range(s.actors.size):
        actor = s.actors[a]
        if actor.sleeps_on == b and (barrier.phase & 1) != actor.parity:
            actor.sleeps_on = -1
            actor.wake = now + s.scalars[0].mbarrier_hop


@_inlined
def _push(newest, value):
    """Put a value in front of the array ``newest``; its last value drops out."""
    for i in range(newest.size - 1, 0, -1):
        newest[i] = newest[i - 1]
    newest[0] = value


@_inlined
def _vector(s, a, now, x):
    """Run one chunk of vector work: it takes its time alone, or longer where others share its pipes."""
    me = s.actors[a]
    if me.part == s.work[x, CHUNKS]:
        return DONE
    me.part += 1
    core = s.core[0]
    row = s.work_slow[x] if now < core.tensor + core.taken else s.work[x]
    core.taken += row[WORK_TAKEN] * core.loss // 64
    me.holds = row[WORK_HOLD]
    held = _held(s, a, now) if me.holds == 64 else np.int64(64)
    slowest = held
    for p in range(PIPE_COUNT):
        cost = row[FIRST_PIPE + p]
        wanted = s.wants[a, p] = min(64, 64 * cost // max(1, row[WORK_ALONE]))
        if cost > 0:
            for other in range(s.actors.size):
                if other != a and s.actors[other].until > now:
                    wanted += 64 * s.wants[other, p] // s.slowed[other, 1 - p]
            s.busy[PORT + p] += cost
        s.slowed[a, p] = max(64, wanted)
        slowest = max(slowest, wanted)
    s.slowed[a, 0] = max(s.slowed[a, 0], held)
    end = now + row[WORK_ALONE] * slowest // 64
    if row[WORK_SMEM] > 0:
        core.port = max(now, core.port) + row[WORK_SMEM]
        s.busy[SMEM] += row[WORK_SMEM]
        end = max(end, core.port)
    me.until = end
    return end


@_inlined
def _held(s, a, now):
    """Return how long a chunk takes at least beside the vector work of others, in 1/64 of its time alone."""
    held = np.int64(64)
    for other in range(s.actors.size):
        if other != a and s.actors[other].until > now:
            held = max(held, s.actors[other].holds)
    return held


@_inlined
def _record_burst(s, a, start, stop):
    """Record an instruction of the tensor core."""
    core = s.core[0]
    burst = s.bursts[core.bursts]
    burst[0] = a
    burst[1] = s.actors[a].pc
    burst[2] = start
    burst[3] = stop
    burst[4] = core.taken - core.seen
    core.seen = core.taken
    core.bursts += 1


@_inlined
def _wgmma(s, a, now, x):
    """Issue one instruction, or wait until the window of admitted instructions has room for it."""
    me = s.actors[a]
    core = s.core[0]
    instructions = s.gemm[x, 0]
    if me.part == instructions:
        return DONE
    window = s.flight.shape[1]
    oldest = s.flight[a, me.issued % window] + core.taken
    if me.issued >= window and oldest > now:
        return oldest
    ticks = s.gemm[x, 1]
    fetch = s.gemm[x, 2]
    core.port = max(now, core.port) + fetch
    stop = max(max(now, core.tensor + core.taken) + ticks, core.port)
    core.tensor = stop - core.taken
    core.loss = s.gemm[x, 3]
    if s.bursts.shape[0] > 0:
        _record_burst(s, a, stop - ticks, stop)
    s.flight[a, me.issued % window] = core.tensor
    me.issued += 1
    s.busy[TENSOR] += ticks
    s.busy[SMEM] += fetch
    me.part += 1
    if me.part == instructions and s.gemm[x, 5]:
        _push(s.groups[a], core.tensor + s.gemm[x, 6])
        me.counted += 1
    return now + s.gemm[x, 4]


@_inlined
def _load(s, a, now, pc):
    """Queue a copy behind the other copies from its origin, L2 or HBM; its pieces land one by one."""
    scalars = s.scalars[0]
    size = s.ops[pc, 2]
    how = s.ops[pc, 4]
    far = how & FAR
    origin = s.origins[far]
    pieces = -(-size // PIECE_SIZE)
    piece = scalars.piece_far if far else scalars.piece
    if how >= OTHERS and not far:
        piece = max(piece // (1 + how // OTHERS), scalars.piece_lone)
    if how & BY_THREADS:
        piece = piece * min(size, PIECE_SIZE) // PIECE_SIZE
    latency = scalars.l2_latency if how & HOT else scalars.memory_latency
    begin = max(now + latency, origin.ingress)
    origin.ingress = begin + pieces * piece
    if not far:
        s.busy[L2] += pieces * piece
    entry = s.loads[far, origin.tail % MOST_LOADS]
    entry[0] = begin + piece
    entry[1] = pieces
    entry[2] = s.ops[pc, 1]
    entry[3] = size
    entry[4] = piece
    origin.tail += 1
    return now if how & BY_THREADS else now + -(-size // scalars.tma_box_bytes) * scalars.tma_issue


@_inlined
def _leave(s, now, size, adds, piece):
    """Send ``size`` bytes to global memory behind those that leave before, a ``piece`` in so much time unless it
    ``adds`` to what is there."""
    ticks = -(-size // PIECE_SIZE) * (s.scalars[0].piece_reduce if adds else piece)
    s.core[0].egress = max(now, s.core[0].egress) + ticks
    s.busy[REDUCTIONS] += ticks if adds else 0


@_inlined
def _store(s, a, now, size, adds):
    """Start a store by TMA, which reads its slot through the port of shared memory."""
    scalars = s.scalars[0]
    core = s.core[0]
    begin = now + scalars.tma_issue
    port = -(-size // PIECE_SIZE) * scalars.piece_port
    core.port = max(begin, core.port) + port
    s.busy[SMEM] += port
    _leave(s, begin, size, adds, scalars.piece_store)
    _push(s.stored[a], max(core.port, core.egress))
    return begin


@_inlined
def _wait(s, a, now, x, parity):
    """Poll an mbarrier, and fall asleep if its phase is not over."""
    if (s.mbarriers[x].phase & 1) != parity:
        return now + s.scalars[0].mbarrier_poll
    s.actors[a].sleeps_on = x
    s.actors[a].parity = parity
    return NEVER


@_inlined
def _join(s, a, now, x, sleeps):
    """Arrive at a named barrier, and sleep there if ``sleeps``; the last to arrive wakes all sleepers."""
    place = s.mbarriers.size + x
    if sleeps:
        s.actors[a].sleeps_on = place
    barrier = s.named[x]
    barrier.arrived += s.actors[a].threads
    if barrier.arrived < barrier.threads:
        return NEVER if sleeps else DONE
    barrier.arrived = 0
    resume = now + s.scalars[0].named_barrier
    for other in range(s.actors.size):
        if s.actors[other].sleeps_on == place:
            s.actors[other].sleeps_on = -1
            s.actors[other].wake = resume
    return resume if sleeps else DONE


@_inlined
def _begin(s, a, now, kind, pc):
    """Start an operation that has one duration, not parts; return the tick at which its actor goes on."""
    x = s.ops[pc, 1]
    if kind == LOAD:
        return _load(s, a, now, pc)
    if kind == STORE:
        return _store(s, a, now, x, s.ops[pc, 3])
    if kind == REDUCE:
        adds = s.ops[pc, 2] == 0
        _leave(s, now, x, adds, s.scalars[0].piece_thread_store)
        return s.core[0].egress if adds else max(now, s.core[0].egress - s.scalars[0].store_queue * s.ops[pc, 3] // 16)
    if kind == WAIT:
        return _wait(s, a, now, x, s.ops[pc, 2])
    if kind == BAR_SYNC:
        return _join(s, a, now, x, True)
    return now + s.delay[x]


@_inlined
def _step(s, a, now):
    """Do the current operation or its next part; return the tick at which the actor goes on, or DONE."""
    me = s.actors[a]
    kind = s.ops[me.pc, 0]
    x = s.ops[me.pc, 1]
    if kind == VECTOR:
        return _vector(s, a, now, x)
    if kind == WGMMA:
        return _wgmma(s, a, now, x)
    if kind in (LOAD, STORE, REDUCE, WAIT, BAR_SYNC, DELAY):
        if me.part:  # it was started before, and its time is over now
            return DONE
        me.part = 1
        return _begin(s, a, now, kind, me.pc)
    if kind == WGMMA_WAIT and me.counted > x and s.groups[a, x] + s.core[0].taken > now:
        return s.groups[a, x] + s.core[0].taken
    if kind == STORE_WAIT and s.stored[a, x] > now:
        return s.stored[a, x]
    if kind in (EXPECT, ARRIVE):
        if kind == EXPECT:
            s.mbarriers[x].bytes += s.ops[me.pc, 2]
        s.mbarriers[x].pending -= 1
        _complete(s, x, now)
    elif kind == BAR_ARRIVE:
        _join(s, a, now, x, False)
    elif kind == MARK:
        s.marks[a, me.marked] = now
        me.marked += 1
    return DONE


@_inlined
def _advance(s, a, now):
    """Run an actor until one of its operations takes time, or all are done."""
    me = s.actors[a]
    s.core[0].end = max(s.core[0].end, now)
    resume = now
    while resume == now and me.pc < me.last:
        after = _step(s, a, now)
        if after == DONE:
            if s.spans.shape[0] > 0:
                s.spans[me.pc, 0] = me.began
                s.spans[me.pc, 1] = now
            me.began = now
            me.pc += 1
            me.part = 0
        else:
            resume = after
    me.wake = resume if me.pc < me.last else NEVER


@_inlined
def _land(s, far):
    """Write the next piece of the oldest load from an origin, L2 or HBM, to shared memory."""
    scalars = s.scalars[0]
    core = s.core[0]
    entry = s.loads[far, s.origins[far].head % MOST_LOADS]
    now = entry[0]
    core.end = max(core.end, now)
    core.port = max(now, core.port) + scalars.piece_port
    s.busy[SMEM] += scalars.piece_port
    entry[1] -= 1
    entry[0] += entry[4]
    if entry[1] == 0:
        s.origins[far].head += 1
        s.mbarriers[entry[2]].bytes -= entry[3]
        _complete(s, entry[2], now)


@njit(cache=True, _nrt=False)  # type: ignore[call-overload]
def run(s):
    """Run a state to the end, or until no actor can go on.

    What comes first in time goes first. At one tick pieces of loads go before actors, and lower indices before higher.
    """
    # numba takes plain numbers for literals at first, and would compile every function called with them once more
    nobody = np.int64(-1)
    never = np.int64(NEVER)
    while True:
        actor = nobody
        now = never
        for a in range(s.actors.size):
            if s.actors[a].wake < now:
                actor = a
                now = s.actors[a].wake
        landing = nobody
        when = now
        for far in range(2):
            origin = s.origins[far]
            if origin.head != origin.tail:
                piece = s.loads[far, origin.head % MOST_LOADS, 0]
                if piece < when or (piece == when and landing < 0):
                    landing = far
                    when = piece
        if landing >= 0:
            _land(s, landing)
        elif actor >= 0:
            _advance(s, actor, now)
        else:
            return
