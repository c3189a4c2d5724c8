"""The model of :mod:`fa3_simulator.engine` in plain Python, against which its compiled loops are tested tick for tick.

The two share no code. Events are ordered by (time, priority, actor, sequence), all integers.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field, replace

from fa3_simulator.costs import ALONE, HOLD, PIECE_BYTES, PIPES, RESOURCES, SMEM, TAKEN, TICKS, Costs
from fa3_simulator.deadlock import waits_in_words
from fa3_simulator.engine import Burst, DeadlockError, Span, Trace
from fa3_simulator.program import Op, Program

TMA = -1  # stands for the copy engine where an actor is expected


@dataclass(slots=True)
class _Actor:
    pc: int = 0
    part: int = 0  # chunks or instructions of the current operation that are done
    began: int = 0  # tick at which the current operation began
    groups: list[int] = field(default_factory=list)  # completion of each wgmma group, less Engine.taken
    in_flight: deque[int] = field(default_factory=deque)  # completion of each admitted instruction, less Engine.taken
    stored: list[int] = field(default_factory=list)  # when each store has read its slot
    until: int = 0  # end of the chunk of vector work under way
    wants: list[int] = field(default_factory=lambda: [0] * len(PIPES))  # what it needs of each pipe alone, in 1/64
    slowed: list[int] = field(default_factory=lambda: [64] * len(PIPES))  # its time by those that share it, in 1/64
    holds: int = 64  # how long others take beside it at least, in 1/64 of their time
    done: bool = False


@dataclass(slots=True)
class _Mbarrier:
    pending: int
    bytes: int = 0
    phase: int = 0  # completed phases
    waiters: list[tuple[int, int]] = field(default_factory=list)  # actor, parity


class Engine:
    """State of one run; use :func:`simulate`."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program = program
        self.costs = costs
        (
            self.window,
            self.hop,
            self.poll,
            self.bar_hop,
            self.tma_issue,
            self.box,
            self.latency,
            self.l2_latency,
            self.store_queue,
            self.piece,
            self.piece_far,
            self.piece_port,
            self.piece_store,
            self.piece_thread_store,
            self.piece_reduce,
            self.piece_lone,
        ) = (int(v) for v in costs.scalars)
        self.gemm, self.work, self.slow = costs.gemm.tolist(), costs.work.tolist(), costs.work_slow.tolist()
        self.ops = [actor.ops.tolist() for actor in program.actors]
        self.actors = [_Actor() for _ in program.actors]
        self.mbarriers = [_Mbarrier(m.arrivals) for m in program.mbarriers]
        self.arrived = [0] * len(program.named_barriers)
        self.sleeping: list[list[int]] = [[] for _ in program.named_barriers]
        self.events: list[tuple[int, int, int, int, int, int]] = []  # time, priority, actor, sequence, load
        self.sequence = 0
        self.tensor = self.port = self.egress = 0
        self.ingress = [0, 0]  # from L2 and from HBM
        self.taken = self.seen = 0  # ticks that vector work took from the tensor core: so far, and by the last wgmma
        self.loss = 0  # share of them that the last wgmma loses, in 1/64
        self.end = 0
        self.trace = Trace(busy=dict.fromkeys(RESOURCES, 0), marks=[[] for _ in program.actors])

    def push(self, tick: int, actor: int, priority: int = 1, barrier: int = 0, pieces: int = 0) -> None:
        heapq.heappush(self.events, (tick, priority, actor, self.sequence, barrier, pieces))
        self.sequence += 1

    def run(self) -> Trace:
        for actor in range(len(self.actors)):
            self.push(0, actor)
        while self.events:
            tick, _, actor, _, barrier, last = heapq.heappop(self.events)
            self.end = max(self.end, tick)
            if actor == TMA:
                self.piece_written(tick, barrier, last)
            else:
                self.advance(actor, tick)
        if stuck := {i: actor.pc for i, actor in enumerate(self.actors) if not actor.done}:
            waits = waits_in_words(self.program, stuck)
            raise DeadlockError(f"deadlock at cycle {self.end / TICKS:.0f}: {waits}")
        return replace(self.trace, end=self.end)

    def finish(self, actor: int, tick: int) -> None:
        """End an actor's current operation at a tick: record its span if it took time, and move on to the next."""
        state = self.actors[actor]
        if tick > state.began:
            self.trace.spans.append(Span(actor, state.pc, state.began, tick))
        state.pc = state.pc + 1
        state.part = 0
        state.began = tick

    def advance(self, actor: int, tick: int) -> None:
        """Run an actor until one of its operations takes time. ``part`` 0 means that the operation has not begun."""
        state = self.actors[actor]
        ops = self.ops[actor]
        while state.pc < len(ops):
            kind, x, y, z, _ = ops[state.pc]
            if kind in _ONCE and state.part:
                self.finish(actor, tick)
                continue
            state.part += kind in _ONCE
            resume = getattr(self, _METHODS[kind])(actor, tick, x, y, z)
            if resume is None:  # asleep: someone else wakes it
                return
            if resume > tick:
                self.push(resume, actor)
                return
            self.finish(actor, tick)
        state.done = True

    # One method for each operation: x, y and z are its first operands. It returns the tick at which the actor goes on,
    # or None to sleep. Operations outside _ONCE are called again, at later ticks, until they return the current one.

    def vector(self, actor: int, tick: int, x: int, _y: int, _z: int) -> int | None:
        state = self.actors[actor]
        row = (self.slow if tick < self.tensor + self.taken else self.work)[x]
        if state.part == row[0]:
            return tick
        state.part += 1
        self.taken += row[TAKEN] * self.loss // 64
        others = [other for other in self.actors if other is not state and other.until > tick]
        held = 64 if row[HOLD] > 64 else max((other.holds for other in others), default=64)
        for pipe, name in enumerate(PIPES):
            state.wants[pipe] = wanted = min(64, 64 * row[1 + pipe] // max(1, row[ALONE]))
            if wanted:
                self.trace.busy[name] += row[1 + pipe]
                wanted += sum(64 * other.wants[pipe] // other.slowed[1 - pipe] for other in others)
            state.slowed[pipe] = max(64, wanted)
        state.slowed[0] = max(state.slowed[0], held)
        state.holds = row[HOLD]
        end = tick + row[ALONE] * max(state.slowed) // 64
        if row[SMEM]:
            self.port = max(tick, self.port) + row[SMEM]
            self.trace.busy["smem"] += row[SMEM]
            end = max(end, self.port)
        state.until = end
        return end if end > tick else self.vector(actor, tick, x, _y, _z)

    def wgmma(self, actor: int, tick: int, x: int, _y: int, _z: int) -> int | None:
        state = self.actors[actor]
        count, ticks, fetch, loss, issue, commits, tail = self.gemm[x]
        if state.part == count:
            return tick
        while state.in_flight and state.in_flight[0] + self.taken <= tick:
            state.in_flight.popleft()
        if len(state.in_flight) >= self.window:
            return state.in_flight[0] + self.taken
        self.port = max(tick, self.port) + fetch
        stop = max(max(tick, self.tensor + self.taken) + ticks, self.port)
        self.tensor = stop - self.taken
        self.loss = loss
        state.in_flight.append(self.tensor)
        self.trace.bursts.append(Burst(actor, state.pc, stop - ticks, stop, self.taken - self.seen))
        self.seen = self.taken
        self.trace.busy["tensor"] += ticks
        self.trace.busy["smem"] += fetch
        state.part += 1
        if state.part == count and commits:
            state.groups.append(self.tensor + tail)
        return tick + issue

    def wgmma_wait(self, actor: int, tick: int, x: int, _y: int, _z: int) -> int | None:
        groups = self.actors[actor].groups
        return max(tick, groups[-1 - x] + self.taken) if len(groups) > x else tick

    def load(self, actor: int, tick: int, x: int, y: int, _z: int) -> int | None:
        pieces = -(-y // PIECE_BYTES)
        how = self.ops[actor][self.actors[actor].pc][4]
        far, by_threads, hot, others = how & 1, how >> 1 & 1, how >> 2 & 1, how >> 3
        latency = self.l2_latency if hot else self.latency
        begin = max(tick + latency, self.ingress[far])
        piece = self.piece_far if far else self.piece
        if others and not far:
            piece = max(self.piece // (1 + others), self.piece_lone)
        if by_threads and y < PIECE_BYTES:
            piece = piece * y // PIECE_BYTES
        self.ingress[far] = begin + pieces * piece
        if not far:
            self.trace.busy["l2"] += pieces * piece
        for i in range(1, pieces + 1):
            self.push(begin + i * piece, TMA, 0, x, y if i == pieces else 0)
        return tick if by_threads else tick + -(-y // self.box) * self.tma_issue

    def piece_written(self, tick: int, barrier: int, last: int) -> None:
        """A piece of a load is in shared memory; ``last`` is the size of the load with its last piece, else 0."""
        self.port = max(tick, self.port) + self.piece_port
        self.trace.busy["smem"] += self.piece_port
        if last:
            self.mbarriers[barrier].bytes -= last
            self.complete_if_done(barrier, tick)

    def store(self, actor: int, tick: int, x: int, _y: int, z: int) -> int | None:
        pieces = -(-x // PIECE_BYTES)
        self.port = max(tick + self.tma_issue, self.port) + pieces * self.piece_port
        self.trace.busy["smem"] += pieces * self.piece_port
        self.leave(tick + self.tma_issue, pieces, self.piece_reduce if z else self.piece_store, adds=z)
        self.actors[actor].stored.append(max(self.port, self.egress))
        return tick + self.tma_issue

    def store_wait(self, actor: int, tick: int, x: int, _y: int, _z: int) -> int | None:
        stored = self.actors[actor].stored
        return max(tick, stored[-1 - x]) if len(stored) > x else tick

    def reduce(self, _actor: int, tick: int, x: int, y: int, z: int) -> int | None:
        self.leave(tick, -(-x // PIECE_BYTES), self.piece_thread_store if y else self.piece_reduce, adds=not y)
        return max(tick, self.egress - self.store_queue * z // 16) if y else self.egress

    def leave(self, tick: int, pieces: int, each: int, *, adds: int) -> None:
        """Send pieces to global memory, one behind the other; with ``adds`` they are added to what is there."""
        self.egress = max(tick, self.egress) + pieces * each
        self.trace.busy["reduce"] += pieces * each if adds else 0

    def arrive(self, _actor: int, tick: int, x: int, y: int, _z: int) -> int | None:
        """Arrive at mbarrier x, which then expects y bytes more."""
        self.mbarriers[x].bytes += y
        self.mbarriers[x].pending -= 1
        self.complete_if_done(x, tick)
        return tick

    def complete_if_done(self, barrier: int, tick: int) -> None:
        state = self.mbarriers[barrier]
        if state.pending > 0 or state.bytes > 0:
            return
        state.phase += 1
        state.pending += self.program.mbarriers[barrier].arrivals
        still = []
        for actor, parity in state.waiters:
            if state.phase & 1 != parity:
                self.push(tick + self.hop, actor)
            else:
                still.append((actor, parity))
        state.waiters = still

    def wait(self, actor: int, tick: int, x: int, y: int, _z: int) -> int | None:
        barrier = self.mbarriers[x]
        if barrier.phase & 1 != y:
            return tick + self.poll
        barrier.waiters.append((actor, y))
        return None

    def bar_arrive(self, actor: int, tick: int, x: int, _y: int, _z: int) -> int | None:
        self.arrived[x] += self.program.actors[actor].threads
        if self.arrived[x] >= self.program.named_barriers[x].threads:
            self.arrived[x] = 0
            for sleeper in self.sleeping[x]:
                self.push(tick + self.bar_hop, sleeper)
            self.sleeping[x] = []
        return tick

    def bar_sync(self, actor: int, tick: int, x: int, _y: int, _z: int) -> int | None:
        self.sleeping[x].append(actor)
        self.bar_arrive(actor, tick, x, 0, 0)
        return None

    def delay(self, _actor: int, tick: int, x: int, _y: int, _z: int) -> int | None:
        return tick + int(self.costs.delay[x])

    def nothing(self, _actor: int, tick: int, _x: int, _y: int, _z: int) -> int | None:
        return tick

    def mark(self, actor: int, tick: int, _x: int, _y: int, _z: int) -> int | None:
        self.trace.marks[actor].append(tick)
        return tick


# Operations that are called once: they are over at the tick that the call returns, or when their actor is woken.
_ONCE = (Op.LOAD, Op.STORE, Op.REDUCE, Op.WAIT, Op.BAR_SYNC, Op.DELAY)
_METHODS = {int(op): op.name.lower() for op in Op}
_METHODS |= dict.fromkeys((Op.READ, Op.WRITE, Op.FENCE, Op.OPERAND, Op.MEET), "nothing") | {Op.EXPECT: "arrive"}


def simulate(program: Program, costs: Costs) -> Trace:
    """Run a program from start to end; the trace has spans, bursts, marks and busy ticks.

    Raises
    ------
    DeadlockError
        If some actors cannot go on; the message names the cycle, and each of them with the barrier it waits for.
    """
    return Engine(program, costs).run()


def in_order(trace: Trace) -> Trace:
    """Return a trace whose spans are in one order: operations that end at one tick may be recorded in any."""
    return replace(trace, spans=sorted(trace.spans))
