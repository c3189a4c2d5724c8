"""Every interleaving of a short program: no order of its operations deadlocks, or overwrites or changes what is read.

States are explored depth first and visited once. Operations that touch nothing shared are taken at once and alone (a
partial order reduction: no other order of them can be told apart); a TMA load may land at any time after its issue,
wgmma and TMA stores read until the actor has waited for them. Complements :func:`fa3_simulator.hazards.check`, whose
vector clocks reason about one order: here the conflict itself must occur.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from fa3_simulator.deadlock import waits_in_words
from fa3_simulator.footprint import Hazard
from fa3_simulator.program import NONE, Op, Program
from fa3_simulator.shared_memory import regions

_LOCAL = {Op.VECTOR, Op.DELAY, Op.MARK, Op.FENCE, Op.WGMMA_WAIT, Op.STORE_WAIT, Op.REDUCE, Op.MEET}


class Explored(NamedTuple):
    """``states`` visited; ``is_complete`` is False when the limit stopped the search."""

    findings: list[Hazard]
    states: int
    is_complete: bool


class _State(NamedTuple):
    """All that distinguishes two moments; hashable."""

    pc: tuple[int, ...]
    waits: tuple[bool, ...]  # inside a named barrier
    mbarriers: tuple[tuple[int, int, int], ...]  # pending arrivals, pending bytes, completed phases
    named: tuple[tuple[int, int], ...]  # threads arrived, completed rounds
    rounds: tuple[int, ...]  # of each actor: the round of the barrier it waits in
    loads: tuple[tuple[int, int, int], ...]  # in flight: mbarrier, bytes, slot
    reads: tuple[tuple[tuple[int, ...], ...], ...]  # of each actor: slots of each group in flight, oldest first
    open: tuple[tuple[int, ...], ...]  # of each actor: slots of the group that is not committed yet
    stores: tuple[tuple[int, ...], ...]  # of each actor: slots its stores may still read
    versions: tuple[int, ...]  # contents of each region so far


class _Explorer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.ops = [actor.ops.tolist() for actor in program.actors]
        self.own = self.barriers_of_one_actor()
        self.holders = list(regions(program.slots))
        self.findings: dict[Hazard, None] = {}
        self.seen_version: dict[tuple[int, int], tuple[int, ...]] = {}  # what an operation read the first time

    def barriers_of_one_actor(self) -> set[int]:
        """Named barriers that only the warps of one actor meet at, which is one operation here."""
        users: dict[int, set[int]] = {}
        for a, ops in enumerate(self.ops):
            for kind, x, *_ in ops:
                if kind in (Op.BAR_SYNC, Op.BAR_ARRIVE):
                    users.setdefault(x, set()).add(a)
        threads = [actor.threads for actor in self.program.actors]
        barriers = self.program.named_barriers
        return {x for x, who in users.items() if len(who) == 1 and threads[min(who)] == barriers[x].threads}

    def start(self) -> _State:
        n = len(self.ops)
        return _State(
            (0,) * n,
            (False,) * n,
            tuple((m.arrivals, 0, 0) for m in self.program.mbarriers),
            ((0, 0),) * len(self.program.named_barriers),
            (0,) * n,
            (),
            ((),) * n,
            ((),) * n,
            ((),) * n,
            (0,) * len(self.holders),
        )

    def run(self, limit: int) -> Explored:
        first = self.start()
        seen, todo = {first}, [first]
        while todo and len(seen) < limit:
            state = todo.pop()
            following = self.following(state)
            if not following and any(state.pc[a] < len(ops) for a, ops in enumerate(self.ops)):
                self.deadlock(state)
            for new in following:
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
        return Explored(list(self.findings), len(seen), not todo)

    def deadlock(self, state: _State) -> None:
        stuck = {a: state.pc[a] for a, ops in enumerate(self.ops) if state.pc[a] < len(ops)}
        self.findings.setdefault(Hazard("deadlock", waits_in_words(self.program, stuck)))

    def following(self, state: _State) -> list[_State]:
        """States one step away; a single one where a local operation is next."""
        ready = [a for a in range(len(self.ops)) if self.is_ready(state, a)]
        for actor in ready:
            kind, barrier, *_ = self.ops[actor][state.pc[actor]]
            if kind in _LOCAL or (kind == Op.BAR_SYNC and barrier in self.own):
                return [self.step(state, actor)]
        found = [self.step(state, actor) for actor in ready]
        for i, (barrier, size, _) in enumerate(state.loads):
            landed = state._replace(loads=state.loads[:i] + state.loads[i + 1 :])
            found.append(self.credit(landed, barrier, size=size))
        return found

    def is_ready(self, state: _State, actor: int) -> bool:
        if state.pc[actor] >= len(self.ops[actor]):
            return False
        kind, x, y, _, _ = self.ops[actor][state.pc[actor]]
        if kind == Op.WAIT:
            return state.mbarriers[x][2] & 1 != y
        if kind == Op.BAR_SYNC and state.waits[actor]:
            return state.named[x][1] > state.rounds[actor]
        return True

    def step(self, state: _State, actor: int) -> _State:
        kind, x, y, z, _ = self.ops[actor][state.pc[actor]]
        if kind == Op.BAR_SYNC and not state.waits[actor]:
            entered = state._replace(
                waits=_set(state.waits, actor, True), rounds=_set(state.rounds, actor, state.named[x][1])
            )
            return self.join(entered, actor, x)
        moved = state._replace(pc=_set(state.pc, actor, state.pc[actor] + 1), waits=_set(state.waits, actor, False))
        if kind == Op.WGMMA:
            return self.read_by_wgmma(moved, state, actor, (y, z), ends=not self.program.gemms[x].is_open)
        if kind == Op.OPERAND:
            return self.read_by_wgmma(moved, state, actor, (x,), ends=False)
        if kind == Op.WGMMA_WAIT:
            groups = moved.reads[actor]
            return moved._replace(reads=_set(moved.reads, actor, groups[max(0, len(groups) - x) :]))
        if kind == Op.LOAD:
            self.check_write(state, actor, z)
            counted = self.replaced(moved, z)
            return counted._replace(loads=tuple(sorted((*counted.loads, (x, y, z)))))
        if kind == Op.STORE:
            self.check_read(state, actor, (y,))
            return moved._replace(stores=_set(moved.stores, actor, (*moved.stores[actor], y)))
        if kind == Op.STORE_WAIT:
            stores = moved.stores[actor]
            return moved._replace(stores=_set(moved.stores, actor, stores[max(0, len(stores) - x) :]))
        if kind == Op.READ and self.program.slots[x].bytes:
            self.check_read(state, actor, (x,))
        if kind == Op.WRITE:
            self.check_write(state, actor, x)
            return self.replaced(moved, x)
        if kind in (Op.ARRIVE, Op.EXPECT):
            return self.credit(moved, x, arrivals=1, expected=y if kind == Op.EXPECT else 0)
        return self.join(moved, actor, x) if kind == Op.BAR_ARRIVE else moved

    def read_by_wgmma(
        self, moved: _State, state: _State, actor: int, operands: tuple[int, ...], *, ends: bool
    ) -> _State:
        """The next state, in which wgmma reads until the actor has waited for its group, which ``ends`` or goes on."""
        slots = tuple(slot for slot in operands if slot != NONE)
        self.check_read(state, actor, slots)
        group = (*moved.open[actor], *slots)
        if not ends:
            return moved._replace(open=_set(moved.open, actor, group))
        reads = _set(moved.reads, actor, (*moved.reads[actor], group))
        return moved._replace(reads=reads, open=_set(moved.open, actor, ()))

    def credit(self, state: _State, barrier: int, *, arrivals: int = 0, size: int = 0, expected: int = 0) -> _State:
        """An arrival, or bytes that are expected or have landed, at an mbarrier."""
        pending, tx, phase = state.mbarriers[barrier]
        pending, tx = pending - arrivals, tx + expected - size
        if pending <= 0 and tx <= 0:
            pending, phase = pending + self.program.mbarriers[barrier].arrivals, phase + 1
        return state._replace(mbarriers=_set(state.mbarriers, barrier, (pending, tx, phase)))

    def join(self, state: _State, actor: int, barrier: int) -> _State:
        arrived, rounds = state.named[barrier]
        arrived += self.program.actors[actor].threads
        if arrived >= self.program.named_barriers[barrier].threads:
            arrived, rounds = 0, rounds + 1
        return state._replace(named=_set(state.named, barrier, (arrived, rounds)))

    def replaced(self, state: _State, slot: int) -> _State:
        """Other contents of a slot, and of what shares bytes with it."""
        counts = zip(state.versions, self.holders, strict=True)
        return state._replace(versions=tuple(count + (slot in holders) for count, holders in counts))

    def overlap(self, one: int, other: int) -> bool:
        return any(one in holders and other in holders for holders in self.holders)

    def race(self, actor: int, state: _State, slot: int, why: str) -> None:
        row = state.pc[actor]
        where = f"{self.program.actors[actor].name} ({self.program.describe(actor, row)}, row {row})"
        self.findings.setdefault(Hazard("race", f"slot {self.program.slots[slot].name}: {where} {why}"))

    def check_read(self, state: _State, actor: int, slots: tuple[int, ...]) -> None:
        for slot in slots:
            if any(self.overlap(load[2], slot) for load in state.loads):
                self.race(actor, state, slot, "reads it while a load is under way")
        counts = zip(state.versions, self.holders, strict=True)
        versions = tuple(count for count, holders in counts if not set(holders).isdisjoint(slots))
        key = (actor, state.pc[actor])
        if self.seen_version.setdefault(key, versions) != versions:
            self.race(actor, state, slots[0], "reads other contents in another order")

    def check_write(self, state: _State, actor: int, slot: int) -> None:
        if any(self.overlap(load[2], slot) for load in state.loads):
            self.race(actor, state, slot, "overwrites it while a load is under way")
        for other in range(len(self.ops)):
            read = chain(*state.reads[other], state.open[other], state.stores[other])
            if any(self.overlap(slot, x) for x in read):
                self.race(actor, state, slot, f"overwrites it while {self.program.actors[other].name} reads it")


def _set(values: tuple, index: int, value) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def explore(program: Program, limit: int = 200_000) -> Explored:
    """Visit every state a program can reach, at most ``limit`` of them."""
    return _Explorer(program).run(limit)
