"""Reads a program for safety: races, deadlocks, barrier misuse, and footprints that do not fit the SM.

:func:`check` executes a program without time, in an order drawn at random, and orders every access to a slot by vector
clocks. An access is safe only if barriers put it after the access that it depends on. TMA loads, wgmma groups and TMA
stores are agents of their own, whose work is known to be done only through an mbarrier, a wgmma wait or a store wait. A
slot written by threads may be read by wgmma and TMA only after a proxy fence, which covers all writes that the fencing
thread knows of: its own and those that a barrier has shown it. TMA may read it only after a barrier over the warpgroup.

The findings of one order hold for all orders. Every arrival must be ordered after the end of the round before its own,
and every wait at an mbarrier after the end of the phase before the one it waits for and before the end of the next. If
so, no arrival and no wait can meet another round in another order, the same events are ordered in every execution, and
either all executions stop at the same place or none does. A barrier that breaks this rule is a finding itself.

A program is about one list of tiles: :mod:`fa3_simulator.unbounded` proves the same for any list. How long a program
takes is the matter of :mod:`fa3_simulator.engine`. ``tests/simulator/explore.py`` visits every interleaving of short
programs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from fa3_simulator.deadlock import waits_in_words
from fa3_simulator.footprint import Hazard, footprint
from fa3_simulator.machine import Machine
from fa3_simulator.program import NONE, Op, Program, regions

LOCAL = (Op.VECTOR, Op.DELAY, Op.MARK, Op.REDUCE)  # touch nothing shared
_METHODS = {int(op): op.name.lower() for op in Op if op not in LOCAL}  # of Checker, one for each other operation


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


class Checker:
    """One execution of a program: in a random order, or without a seed always the first actor that can go on."""

    def __init__(self, program: Program, seed: int | None = None) -> None:
        self.program, self.rng = program, None if seed is None else random.Random(seed)
        self.ops = [actor.ops.tolist() for actor in program.actors]
        self.stops = [len(ops) for ops in self.ops]
        self.holders = list(regions(program.slots))  # slots of each region
        self.parts = [[r for r, some in enumerate(self.holders) if x in some] for x in range(len(program.slots))]
        self.actors, self.regions = len(program.actors), len(self.holders)
        # Components of a vector clock: for each actor its own events, its wgmma groups, its stores; for each region the
        # writes seen by threads, and those seen by TMA and wgmma; for each barrier the rounds known to have ended.
        self.size = 3 * self.actors + 2 * self.regions + len(program.mbarriers) + len(program.named_barriers)
        self.clock = [[0] * self.size for _ in program.actors]
        for actor in range(self.actors):
            self.clock[actor][actor] = 1
        self.pc = [0] * self.actors
        self.joined: list[int | None] = [None] * self.actors  # the round of a named barrier it waits to end
        self.groups = [0] * self.actors
        self.stores = [0] * self.actors
        self.scattered: list[set[int]] = [set() for _ in program.actors]  # regions all threads wrote, no barrier since
        self.access = [Access() for _ in self.holders]
        zero = [0] * self.size
        self.mbarriers = [Phase(m.arrivals, gathered=zero[:], released=zero[:]) for m in program.mbarriers]
        self.named = [Phase(b.threads, gathered=zero[:], released=zero[:]) for b in program.named_barriers]
        self.loads: list[tuple[int, int, list[int]]] = []  # barrier, bytes, clock
        self.found: dict[Hazard, None] = {}

    def by_threads(self, region: int) -> int:
        return 3 * self.actors + region

    def by_proxy(self, region: int) -> int:
        return 3 * self.actors + self.regions + region

    def of_mbarrier(self, barrier: int) -> int:
        return 3 * self.actors + 2 * self.regions + barrier

    def of_named(self, barrier: int) -> int:
        return self.of_mbarrier(len(self.program.mbarriers)) + barrier

    def run(self) -> list[Hazard]:
        """Execute the program to its end, or until no actor can go on, and return the findings."""
        self.advance()
        stuck = {a: self.pc[a] for a, ops in enumerate(self.ops) if self.pc[a] < len(ops)}
        if stuck:
            self.report("deadlock", waits_in_words(self.program, stuck))
        for a, actor in enumerate(self.program.actors):
            if not stuck and self.stores[a] > self.clock[a][2 * self.actors + a]:
                self.report("race", f"{actor.name} ends while its last store may still read shared memory")
        for access in self.access:
            access.keep_readers()
            for (slot, readers), number in access.loads.items():
                name = self.program.slots[slot].name
                everyone = frozenset().union(*(some for into, some in access.loads if into == slot))
                for missing in sorted(everyone - readers) or ([] if everyone else ["anyone"]):
                    self.report("race", f"slot {name}: content number {number} is not read by {missing}")
        return list(self.found)

    def advance(self) -> None:
        """Execute until no actor can go on, or all have reached their stops, and no load is under way."""
        while True:
            ready = [a for a in range(self.actors) if self.can_run(a)]
            choices = len(ready) + len(self.loads)
            if not choices:
                return
            choice = self.rng.randrange(choices) if self.rng else 0
            if choice < len(ready):
                self.step(ready[choice])
            else:
                self.land(self.loads.pop(choice - len(ready)))

    def report(self, kind: str, text: str) -> None:
        self.found.setdefault(Hazard(kind, text))

    def can_run(self, actor: int) -> bool:
        # only waits can hold an actor up; a bar_sync that was entered goes on when its round has ended
        if self.pc[actor] >= self.stops[actor]:
            return False
        kind, x, y, _, _ = self.ops[actor][self.pc[actor]]
        if kind == Op.WAIT:
            return self.mbarriers[x].done & 1 != y
        if kind == Op.BAR_SYNC and self.joined[actor] is not None:
            return self.named[x].done > self.joined[actor]
        return True

    def name(self, actor: int) -> str:
        return (
            f"{self.program.actors[actor].name} ({self.program.describe(actor, self.pc[actor])}, row {self.pc[actor]})"
        )

    def race(self, slot: int, first: str, second: str, why: str = "") -> None:
        slots = self.program.slots
        others = dict.fromkeys(slots[x].name for r in self.parts[slot] for x in self.holders[r] if x != slot)
        shared = f" (shares bytes with {', '.join(others)})" if others else ""
        self.report("race", f"slot {slots[slot].name}{shared}: {second} is not ordered after {first}{why}")

    def step(self, actor: int) -> None:
        """Do an actor's next operation; at a named barrier, enter the round first and go on when it has ended."""
        kind, *operands = self.ops[actor][self.pc[actor]]
        if kind in _METHODS:
            getattr(self, _METHODS[kind])(actor, *operands)
        if self.joined[actor] is None:
            self.pc[actor] += 1

    # Accesses. A method of an operation's name gets the actor and the operands of the operation.

    def sees(self, actor: int, component: int, value: int) -> bool:
        return self.clock[actor][component] >= value

    def after_reads(self, actor: int, slot: int, access: Access) -> None:
        for component, (value, reader) in access.reads.items():
            if not self.sees(actor, component, value):
                self.race(slot, reader, self.name(actor))
        access.reads.clear()

    def read(self, actor: int, slot: int, *_: int) -> None:
        # by the actor's own threads
        for region in self.parts[slot]:
            access = self.access[region]
            if access.issue:  # an accumulator, which only its own warpgroup overwrites: reads need not be kept
                if not self.sees(actor, *access.issue):
                    self.race(slot, access.writer, self.name(actor), ", which may still run")
                continue
            if not self.sees(actor, self.by_threads(region), access.written):
                self.race(slot, access.writer, self.name(actor))
            access.reads[actor] = (self.clock[actor][actor], self.name(actor))
            access.readers.add(self.program.actors[actor].name)

    def write(self, actor: int, slot: int, *_: int) -> None:
        for region in self.parts[slot]:
            access = self.access[region]
            if not self.sees(actor, self.by_threads(region), access.written):
                self.race(slot, access.writer, self.name(actor))
            self.after_reads(actor, slot, access)
            access.replaced(self.name(actor))
            self.clock[actor][self.by_threads(region)] = access.written
            self.scattered[actor].add(region)

    def proxy_read(self, actor: int, slot: int, component: int, value: int) -> None:
        # by wgmma or TMA: the read is done at the epoch (component, value)
        for region in self.parts[slot]:
            access = self.access[region]
            if not self.sees(actor, self.by_proxy(region), access.written):
                seen = self.sees(actor, self.by_threads(region), access.written)
                self.race(slot, access.writer, self.name(actor), ": no proxy fence between them" if seen else "")
            access.reads[component] = (value, self.name(actor))
            access.readers.add(self.program.actors[actor].name)

    def wgmma(self, actor: int, _gemm: int, a: int, b: int, accumulator: int) -> None:
        self.groups[actor] += 1
        component = self.actors + actor
        group = self.groups[actor]
        for slot in (a, b):
            if slot != NONE:
                self.proxy_read(actor, slot, component, group)
        for region in self.parts[accumulator]:
            access = self.access[region]
            access.issue, access.writer = (component, group), self.name(actor)

    def operand(self, actor: int, slot: int, *_: int) -> None:
        self.proxy_read(actor, slot, self.actors + actor, self.groups[actor] + 1)

    def wgmma_wait(self, actor: int, in_flight: int, *_: int) -> None:
        self.know(actor, self.actors + actor, self.groups[actor] - in_flight)

    def store_wait(self, actor: int, in_flight: int, *_: int) -> None:
        self.know(actor, 2 * self.actors + actor, self.stores[actor] - in_flight)

    def know(self, actor: int, component: int, value: int) -> None:
        self.clock[actor][component] = max(self.clock[actor][component], value)

    def fence(self, actor: int, *_: int) -> None:
        # what the actor has seen threads write can now be seen by TMA and wgmma
        clock = self.clock[actor]
        first = self.by_threads(0)
        proxy = slice(self.by_proxy(0), self.by_proxy(self.regions))
        clock[proxy] = map(max, clock[proxy], clock[first : first + self.regions])

    def load(self, actor: int, barrier: int, size: int, slot: int, _is_far: int) -> None:
        # the slot counts as written from here on; who waits at the barrier acquires the clock when the load has landed
        clock = self.clock[actor][:]
        for region in self.parts[slot]:
            access = self.access[region]
            if not self.sees(actor, self.by_proxy(region), access.written):
                self.race(slot, access.writer, self.name(actor))
            self.after_reads(actor, slot, access)
            access.replaced(self.name(actor), slot)
            clock[self.by_threads(region)] = clock[self.by_proxy(region)] = access.written
        self.loads.append((barrier, size, clock))

    def land(self, load: tuple[int, int, list[int]]) -> None:
        barrier, size, clock = load
        state = self.mbarriers[barrier]
        state.bytes -= size
        self.merge(state.gathered, clock)
        self.complete(barrier)

    def store(self, actor: int, _size: int, slot: int, *_: int) -> None:
        # one thread starts the store: a barrier must have shown it the writes of the warpgroup's other threads
        for region in self.scattered[actor].intersection(self.parts[slot]):
            self.race(
                slot, self.access[region].writer, self.name(actor), ": no barrier over the warpgroup between them"
            )
        self.stores[actor] += 1
        self.proxy_read(actor, slot, 2 * self.actors + actor, self.stores[actor])

    # synchronisation

    @staticmethod
    def merge(into: list[int], clock: list[int]) -> None:
        into[:] = map(max, into, clock)

    def wait(self, actor: int, barrier: int, *_: int) -> None:
        state = self.mbarriers[barrier]
        if not self.sees(actor, self.of_mbarrier(barrier), state.done - 1):
            name = self.program.mbarriers[barrier].name
            self.report("barrier", f"mbarrier {name}: {self.name(actor)} may pass at an earlier phase of that parity")
        state.waited[actor] = (self.clock[actor][actor], self.name(actor))
        self.merge(self.clock[actor], state.released)

    def is_known(self, actor: int, component: int, state: Phase, name: str) -> None:
        """Report an arrival that another interleaving could count in the previous round of the barrier.

        ``component`` holds the rounds of this barrier that the actor knows to have ended.
        """
        if not self.sees(actor, component, state.done):
            self.report("barrier", f"{name}: {self.name(actor)} is not ordered after the end of the round before")

    def publish(self, actor: int, state: Phase) -> None:
        self.merge(state.gathered, self.clock[actor])
        self.clock[actor][actor] += 1

    def expect(self, actor: int, barrier: int, size: int, *_: int) -> None:
        self.mbarriers[barrier].bytes += size
        self.arrive(actor, barrier)

    def arrive(self, actor: int, barrier: int, *_: int) -> None:
        state = self.mbarriers[barrier]
        name = f"mbarrier {self.program.mbarriers[barrier].name}"
        self.is_known(actor, self.of_mbarrier(barrier), state, name)
        state.pending -= 1
        if state.pending < 0:
            self.report("barrier", f"{name}: {self.name(actor)} arrives once too often")
        self.publish(actor, state)
        self.complete(barrier)

    def complete(self, barrier: int) -> None:
        state = self.mbarriers[barrier]
        if state.pending > 0 or state.bytes > 0:
            return
        for actor, (value, waiter) in state.waited.items():
            if state.gathered[actor] < value:
                name = self.program.mbarriers[barrier].name
                self.report("barrier", f"mbarrier {name}: its next phase may end before {waiter} has seen this one")
        state.waited.clear()
        self.end_round(state, self.of_mbarrier(barrier), state.pending + self.program.mbarriers[barrier].arrivals)

    @staticmethod
    def end_round(state: Phase, component: int, pending: int) -> None:
        state.done += 1
        state.pending = pending
        state.gathered[component] = state.done
        state.released = state.gathered[:]

    def bar_sync(self, actor: int, barrier: int, *_: int) -> None:
        """Enter a round the first time, and leave it when it has ended."""
        state = self.named[barrier]
        if self.joined[actor] is None:
            self.joined[actor] = state.done
            self.bar_arrive(actor, barrier)
            return
        self.joined[actor] = None
        self.merge(self.clock[actor], state.released)
        self.scattered[actor].clear()

    def bar_arrive(self, actor: int, barrier: int, *_: int) -> None:
        state = self.named[barrier]
        threads = self.program.actors[actor].threads
        name = f"named barrier {self.program.named_barriers[barrier].name}"
        self.is_known(actor, self.of_named(barrier), state, name)
        if actor in state.members:
            self.report("barrier", f"{name}: {self.name(actor)} enters it twice in a round")
        state.members.append(actor)
        state.pending -= threads
        self.publish(actor, state)
        if state.pending <= 0:
            if state.pending < 0:
                self.report("barrier", f"{name}: more threads than it counts")
            state.members.clear()
            self.end_round(state, self.of_named(barrier), self.program.named_barriers[barrier].threads)


def check(program: Program, machine: Machine | None = None, *, orders: int = 1, seed: int = 0) -> list[Hazard]:
    """Look for hazards in ``orders`` random executions, and with a machine in the footprint too.

    Returns
    -------
    list of Hazard
        Empty for a program that is clean in every order; one execution shows that, as the module explains. In a program
        with hazards more orders may find more of them.
    """
    hazards = dict.fromkeys(footprint(program, machine) if machine else ())
    for number in range(orders):
        hazards.update(dict.fromkeys(Checker(program, seed + number).run()))
    return list(hazards)
