"""The same program read for safety: races, deadlocks, barrier misuse, and footprints that do not fit the SM.

:func:`check` executes a program without time, in an order drawn at random, and orders every access to a slot by vector
clocks: an access is safe only when barriers put it after the one it depends on, whatever the clock said. TMA loads,
wgmma groups and TMA stores are agents of their own, whose work is known to be done only through an mbarrier, a wgmma
wait or a store wait. A slot written by threads reaches wgmma and TMA only after a proxy fence, and TMA only after a
barrier over the warpgroup. :func:`explore` visits every interleaving of a short program.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from fa3_simulator.footprint import Finding, footprint
from fa3_simulator.machine import Machine
from fa3_simulator.program import NONE, Op, Program


@dataclass(slots=True)
class _Access:
    """Last write of a slot and the reads since; an epoch is (component of the vector clock, value)."""

    written: int = 0  # number of writes so far
    writer: str = "nobody"
    loads: list[int] = field(default_factory=list)  # those of them that TMA loaded
    readers: list[set[str]] = field(default_factory=lambda: [set()])  # actors that read each content, from none at all
    issue: tuple[int, int] | None = None  # accumulators: the wgmma group that writes
    reads: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Phase:
    """An mbarrier or a named barrier: what has arrived, and the clock that waiting acquires."""

    pending: int
    bytes: int = 0
    done: int = 0  # completed phases
    members: list[int] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)


class _Checker:
    """One execution in a random order."""

    def __init__(self, program: Program, seed: int | None) -> None:
        self.program, self.rng = program, random.Random(seed)
        self.actors, self.slots = len(program.actors), len(program.slots)
        # components: own clock, wgmma groups and stores of each actor; writes seen by threads and by TMA / wgmma of
        # each slot
        self.size = 3 * self.actors + 2 * self.slots
        self.clock = [[0] * self.size for _ in program.actors]
        for actor in range(self.actors):
            self.clock[actor][actor] = 1
        self.pc = [0] * self.actors
        self.joined: list[int | None] = [None] * self.actors  # the round of a named barrier it waits to end
        self.groups, self.stores = [0] * self.actors, [0] * self.actors
        self.unfenced: list[set[int]] = [set() for _ in program.actors]
        self.scattered: list[set[int]] = [set() for _ in program.actors]  # written by all threads, no barrier since
        self.access = [_Access() for _ in program.slots]
        zero = [0] * self.size
        self.mbarriers = [_Phase(m.arrivals, gathered=zero[:], released=zero[:]) for m in program.mbarriers]
        self.named = [_Phase(b.threads, gathered=zero[:], released=zero[:]) for b in program.named_barriers]
        self.loads: list[tuple[int, int, list[int]]] = []  # barrier, bytes, clock
        self.found: dict[Finding, None] = {}

    def by_threads(self, slot: int) -> int:
        return 3 * self.actors + slot

    def by_proxy(self, slot: int) -> int:
        return 3 * self.actors + self.slots + slot

    def run(self) -> list[Finding]:
        while True:
            ready = [a for a in range(self.actors) if self.can_run(a)]
            choices = len(ready) + len(self.loads)
            if not choices:
                break
            choice = self.rng.randrange(choices)
            if choice < len(ready):
                self.step(ready[choice])
            else:
                self.land(self.loads.pop(choice - len(ready)))
        stuck = [a for a in range(self.actors) if self.pc[a] < len(self.program.actors[a].ops)]
        if stuck:
            where = "; ".join(f"{self.program.actors[a].name} at {self.program.describe(a, self.pc[a])}" for a in stuck)
            self.found[Finding("deadlock", where)] = None
        for a, actor in enumerate(self.program.actors):
            if not stuck and self.stores[a] > self.clock[a][2 * self.actors + a]:
                self.found[Finding("race", f"{actor.name} ends while its last store may still read shared memory")] = (
                    None
                )
        for slot, access in zip(self.program.slots, self.access, strict=True):
            loaded = [access.readers[n] for n in access.loads]
            everyone = set().union(*loaded)
            for number, readers in enumerate(loaded):
                for missing in sorted(everyone - readers) or ([] if everyone else ["anyone"]):
                    text = f"slot {slot.name}: load number {number} is not read by {missing}"
                    self.found[Finding("race", text)] = None
        return list(self.found)

    def can_run(self, actor: int) -> bool:
        if self.pc[actor] >= len(self.program.actors[actor].ops):
            return False
        kind, x, y, _, _ = self.program.actors[actor].ops[self.pc[actor]]
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
        text = f"slot {self.program.slots[slot].name}: {second} is not ordered after {first}{why}"
        self.found.setdefault(Finding("race", text))

    def step(self, actor: int) -> None:
        kind, x, y, z, w = (int(v) for v in self.program.actors[actor].ops[self.pc[actor]])
        done = True
        if kind == Op.WGMMA:
            self.wgmma(actor, y, z, w)
        elif kind == Op.WGMMA_WAIT:
            self.clock[actor][self.actors + actor] = max(self.clock[actor][self.actors + actor], self.groups[actor] - x)
        elif kind == Op.EXPECT:
            self.mbarriers[x].bytes += y
            self.arrive(actor, x)
        elif kind == Op.LOAD:
            self.load(actor, x, y, z)
        elif kind == Op.STORE:
            self.store(actor, y)
        elif kind == Op.STORE_WAIT:
            read = self.clock[actor][2 * self.actors + actor]
            self.clock[actor][2 * self.actors + actor] = max(read, self.stores[actor] - x)
        elif kind == Op.ARRIVE:
            self.arrive(actor, x)
        elif kind == Op.WAIT:
            self.acquire(actor, self.mbarriers[x].released)
        elif kind == Op.BAR_ARRIVE:
            self.join(actor, x)
        elif kind == Op.BAR_SYNC:
            done = self.joined[actor] is not None
            if done:
                self.acquire(actor, self.named[x].released)
                self.scattered[actor].clear()
                self.joined[actor] = None
            else:
                self.joined[actor] = self.named[x].done
                self.join(actor, x)
        elif kind == Op.READ:
            self.read(actor, x)
        elif kind == Op.WRITE:
            self.write(actor, x)
        elif kind == Op.FENCE:
            for slot in self.unfenced[actor]:
                self.clock[actor][self.by_proxy(slot)] = self.clock[actor][self.by_threads(slot)]
            self.unfenced[actor].clear()
        if done:
            self.pc[actor] += 1

    # accesses

    def sees(self, actor: int, component: int, value: int) -> bool:
        return self.clock[actor][component] >= value

    def after_reads(self, actor: int, slot: int) -> None:
        access = self.access[slot]
        for component, value, reader in access.reads:
            if not self.sees(actor, component, value):
                self.race(slot, reader, self.name(actor))
        access.reads.clear()

    def read(self, actor: int, slot: int) -> None:
        access = self.access[slot]
        if access.issue and not self.sees(actor, *access.issue):
            self.race(slot, access.writer, self.name(actor), ", which may still run")
        if not access.issue and not self.sees(actor, self.by_threads(slot), access.written):
            self.race(slot, access.writer, self.name(actor))
        access.reads.append((actor, self.clock[actor][actor], self.name(actor)))
        access.readers[-1].add(self.program.actors[actor].name)

    def write(self, actor: int, slot: int) -> None:
        access = self.access[slot]
        if not self.sees(actor, self.by_threads(slot), access.written):
            self.race(slot, access.writer, self.name(actor))
        self.after_reads(actor, slot)
        access.written, access.writer = access.written + 1, self.name(actor)
        access.readers.append(set())
        self.clock[actor][self.by_threads(slot)] = access.written
        self.unfenced[actor].add(slot)
        self.scattered[actor].add(slot)

    def proxy_read(self, actor: int, slot: int, component: int, value: int) -> None:
        access = self.access[slot]
        if not self.sees(actor, self.by_proxy(slot), access.written):
            seen = self.sees(actor, self.by_threads(slot), access.written)
            self.race(slot, access.writer, self.name(actor), ": no proxy fence between them" if seen else "")
        access.reads.append((component, value, self.name(actor)))
        access.readers[-1].add(self.program.actors[actor].name)

    def wgmma(self, actor: int, a: int, b: int, accumulator: int) -> None:
        self.groups[actor] += 1
        component, group = self.actors + actor, self.groups[actor]
        for slot in (a, b):
            if slot != NONE:
                self.proxy_read(actor, slot, component, group)
        access = self.access[accumulator]
        access.issue, access.writer = (component, group), self.name(actor)

    def load(self, actor: int, barrier: int, size: int, slot: int) -> None:
        access = self.access[slot]
        if not self.sees(actor, self.by_proxy(slot), access.written):
            self.race(slot, access.writer, self.name(actor))
        self.after_reads(actor, slot)
        access.written, access.writer = access.written + 1, self.name(actor)
        access.loads.append(access.written)
        access.readers.append(set())
        clock = self.clock[actor][:]
        clock[self.by_threads(slot)] = clock[self.by_proxy(slot)] = access.written
        self.loads.append((barrier, size, clock))

    def land(self, load: tuple[int, int, list[int]]) -> None:
        barrier, size, clock = load
        state = self.mbarriers[barrier]
        state.bytes -= size
        self.merge(state.gathered, clock)
        self.complete(barrier)

    def store(self, actor: int, slot: int) -> None:
        if slot in self.scattered[actor]:
            self.race(slot, self.access[slot].writer, self.name(actor), ": no barrier over the warpgroup between them")
        self.stores[actor] += 1
        self.proxy_read(actor, slot, 2 * self.actors + actor, self.stores[actor])

    # synchronisation

    @staticmethod
    def merge(into: list[int], clock: list[int]) -> None:
        into[:] = map(max, into, clock)

    def acquire(self, actor: int, clock: list[int]) -> None:
        self.merge(self.clock[actor], clock)

    def publish(self, actor: int, state: _Phase) -> None:
        self.merge(state.gathered, self.clock[actor])
        self.clock[actor][actor] += 1

    def arrive(self, actor: int, barrier: int) -> None:
        state = self.mbarriers[barrier]
        state.pending -= 1
        if state.pending < 0:
            name = self.program.mbarriers[barrier].name
            self.found.setdefault(Finding("barrier", f"mbarrier {name}: {self.name(actor)} arrives once too often"))
        self.publish(actor, state)
        self.complete(barrier)

    def complete(self, barrier: int) -> None:
        state = self.mbarriers[barrier]
        if state.pending <= 0 and state.bytes <= 0:
            state.done += 1
            state.pending += self.program.mbarriers[barrier].arrivals
            state.released = state.gathered[:]

    def join(self, actor: int, barrier: int) -> None:
        state = self.named[barrier]
        threads = self.program.actors[actor].threads
        if actor in state.members:
            name = self.program.named_barriers[barrier].name
            self.found.setdefault(
                Finding("barrier", f"named barrier {name}: {self.name(actor)} enters it twice in a round")
            )
        state.members.append(actor)
        state.pending -= threads
        self.publish(actor, state)
        if state.pending <= 0:
            if state.pending < 0:
                name = self.program.named_barriers[barrier].name
                self.found.setdefault(Finding("barrier", f"named barrier {name}: more threads than it counts"))
            state.pending = self.program.named_barriers[barrier].threads
            state.done += 1
            state.members.clear()
            state.released = state.gathered[:]


def check(program: Program, machine: Machine | None = None, *, orders: int = 1, seed: int = 0) -> list[Finding]:
    """Look for hazards in ``orders`` random executions; with a machine also at the footprint.

    Returns
    -------
    list of Finding
        Empty for a clean program. Races do not depend on the order as long as barriers pair up in one way; deadlocks
        may.
    """
    found = dict.fromkeys(footprint(program, machine) if machine else ())
    for number in range(orders):
        found.update(dict.fromkeys(_Checker(program, seed + number).run()))
    return list(found)
