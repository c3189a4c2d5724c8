"""Reads a program for safety: races, deadlocks, barrier misuse, and footprints that do not fit the SM.

:func:`check` executes a program without time, in an order drawn at random, and orders every access to a slot by vector
clocks. An access is safe only if barriers put it after the access that it depends on. TMA loads, wgmma groups and TMA
stores are agents of their own, whose work is known to be done only through an mbarrier, a wgmma wait or a store wait. A
slot written by threads may be read by wgmma and TMA only after a proxy fence, which covers all writes that the fencing
thread knows of: its own and those that a barrier has shown it. TMA, and wgmma as operand B, may read it only after a
barrier over the actor, as they read what other threads of it wrote. What the threads of an actor loaded by ``cp.async``
was written by them when they have waited for it.

The warps of an actor do not wait for each other. In an actor of several warps there must be a named barrier of it
between what its threads write or load and a read of it by its threads, and between such a read, or the wait of one
thread for a TMA store, and the next write or load of the slot. Two cases need none: a read in which each warp reads
what no other writes, and the wait for wgmma, which a warpgroup does together; several warpgroups do not. An mbarrier
is such a barrier only where every thread arrives and waits, as one thread of an actor may be all that arrives.

The findings of one order hold for all orders. Every arrival must be ordered after the end of the round before its own,
and every wait at an mbarrier after the end of the phase before the one it waits for and before the end of the next. If
so, no arrival and no wait can meet another round in another order, the same events are ordered in every execution, and
either all executions stop at the same place or none does. A program that breaks this rule may be right all the same, as
where whoever arrives early knows that nobody needs the round any more. So :func:`judged` looks for a race, a deadlock
or an arrival too many in other orders, and a finding of which none is known remains not proven.

A program is about one list of tiles: :mod:`fa3_simulator.unbounded` proves the same for any list. How long a program
takes is the matter of :mod:`fa3_simulator.engine`. ``tests/simulator/explore.py`` visits every interleaving of short
programs.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain, pairwise, product

from fa3_kernels.plan.barriers import WARP_THREADS, WARPGROUP_THREADS
from fa3_simulator.deadlock import waits_in_words
from fa3_simulator.executions import Access, Order, Phase, missing
from fa3_simulator.footprint import NOT_PROVEN, Hazard, footprint, is_undecided
from fa3_simulator.machine import Machine
from fa3_simulator.program import BY_THREADS, NONE, Op, Program
from fa3_simulator.shared_memory import regions

LOCAL = (Op.VECTOR, Op.DELAY, Op.MARK, Op.REDUCE)  # touch nothing shared
_METHODS = {int(op): op.name.lower() for op in Op if op not in LOCAL}  # of Checker, one for each other operation
WROTE, COPIED, READ = -1, -2, -3
_BETWEEN: dict[int, str] = dict.fromkeys((WROTE, READ), "over the warpgroup between them")
_BETWEEN[COPIED] = "between cp.async.wait_group and the read"
ORDERS = 64  # random orders that are tried before a finding remains not proven


class Checker:
    """One execution of a program in an :class:`~fa3_simulator.executions.Order`."""

    def __init__(self, program: Program, seed: int | None = None, *, is_uneven: bool = False) -> None:
        self.program, self.order = program, Order(len(program.actors), seed, is_uneven=is_uneven)
        self.ops = [actor.ops.tolist() for actor in program.actors]
        self.stops = [len(ops) for ops in self.ops]
        self.holders = list(regions(program.slots))  # slots of each region
        self.parts = [[r for r, some in enumerate(self.holders) if x in some] for x in range(len(program.slots))]
        self.actors, self.regions = len(program.actors), len(self.holders)
        # Components of a vector clock: for each actor its own events, its wgmma groups, its stores; for each region the
        # writes seen by threads, and those seen by TMA and wgmma; for each barrier the rounds known to have ended.
        counts = (self.regions, self.regions, len(program.mbarriers), len(program.named_barriers))
        edges = pairwise(accumulate(counts, initial=3 * self.actors))
        self.by_threads, self.by_proxy, self.of_mbarrier, self.of_named = (range(*ends) for ends in edges)
        self.size = self.of_named.stop
        self.clock = [[0] * self.size for _ in program.actors]
        for actor in range(self.actors):
            self.clock[actor][actor] = 1
        self.pc = [0] * self.actors
        self.joined: list[int | None] = [None] * self.actors  # the round of a named barrier it waits to end
        self.groups = [0] * self.actors
        self.stores = [0] * self.actors
        # of each actor: regions that all its threads WROTE, COPIED or READ, with no barrier since, or load by cp.async,
        # with the mbarrier at which they wait for that
        self.scattered: list[dict[int, int]] = [{} for _ in program.actors]
        self.access = [Access() for _ in self.holders]
        zero = [0] * self.size
        self.mbarriers = [Phase(m.arrivals, gathered=zero[:], released=zero[:]) for m in program.mbarriers]
        self.named = [Phase(b.threads, gathered=zero[:], released=zero[:]) for b in program.named_barriers]
        self.loads: list[tuple[int, int, list[int]]] = []  # barrier, bytes, clock
        self.found: dict[Hazard, None] = {}

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
                everyone = frozenset().union(*(some for into, some in access.loads if into == slot))
                for who in missing(self.program.slots[slot].readers, readers, everyone):
                    name = self.program.slots[slot].name
                    self.report("race", f"slot {name}: content number {number} is not read by {who}")
        return list(self.found)

    def advance(self) -> None:
        """Execute until no actor can go on, or all have reached their stops, and no load is under way."""
        while True:
            ready = [a for a in range(self.actors) if self.can_run(a)]
            if not ready and not self.loads:
                return
            choice = self.order.choose(ready, len(self.loads))
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
        some, row = self.program.actors[actor], self.pc[actor]
        return f"{some.name} ({self.program.describe(actor, row)}, {some.place(row)})"

    def race(self, slot: int, first: str, second: str, why: str = "", kind: str = "race") -> None:
        slots = self.program.slots
        others = dict.fromkeys(slots[x].name for r in self.parts[slot] for x in self.holders[r] if x != slot)
        shared = f" (shares bytes with {', '.join(others)})" if others else ""
        self.report(kind, f"slot {slots[slot].name}{shared}: {second} is not ordered after {first}{why}")

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

    def replace(self, actor: int, slot: int, region: int, loaded: int = NONE) -> None:
        """Let an actor write a region of a slot, by a load of that slot unless ``loaded`` is NONE."""
        access = self.access[region]
        for component, (value, reader) in access.reads.items():
            if not self.sees(actor, component, value):
                self.race(slot, reader, self.name(actor))
            elif component % self.actors == actor and self.scattered[actor].get(region) == READ:
                self.race(slot, reader, self.name(actor), f": no barrier {_BETWEEN[READ]}")
        access.reads.clear()
        access.replaced(self.name(actor), loaded)
        for scattered in self.scattered:
            scattered.pop(region, None)

    def is_wide(self, actor: int, threads: int = WARP_THREADS) -> bool:
        return self.program.actors[actor].threads > threads

    def read(self, actor: int, slot: int, is_own: int = 0, *_: int) -> None:
        # by the actor's own threads
        if self.is_wide(actor) and not is_own and self.program.slots[slot].bytes:
            self.after_barrier(actor, slot, COPIED, WROTE)
            self.scattered[actor] |= dict.fromkeys(self.parts[slot], READ)
        for region in self.parts[slot]:
            access = self.access[region]
            if access.issue:  # an accumulator, which only its own warpgroup overwrites: reads need not be kept
                if not self.sees(actor, *access.issue):
                    self.race(slot, access.writer, self.name(actor), ", which may still run")
                continue
            if not self.sees(actor, self.by_threads[region], access.written):
                self.race(slot, access.writer, self.name(actor))
            access.reads[actor] = (self.clock[actor][actor], self.name(actor))
            access.readers.add(self.program.actors[actor].name)

    def write(self, actor: int, slot: int, *_: int) -> None:
        for region in self.parts[slot]:
            access = self.access[region]
            if not self.sees(actor, self.by_threads[region], access.written):
                self.race(slot, access.writer, self.name(actor))
            self.replace(actor, slot, region)
            self.clock[actor][self.by_threads[region]] = access.written
            self.scattered[actor][region] = WROTE

    def after_barrier(self, actor: int, slot: int, *kinds: int) -> None:
        """Report a read of what the actor's threads WROTE or COPIED, with no barrier over them since."""
        for region in self.parts[slot]:
            kind = self.scattered[actor].get(region)
            if kind in kinds:
                self.race(slot, self.access[region].writer, self.name(actor), f": no barrier {_BETWEEN[kind]}")

    def proxy_read(self, actor: int, slot: int, component: int, value: int) -> None:
        # by wgmma or TMA: the read is done at the epoch (component, value)
        for region in self.parts[slot]:
            access = self.access[region]
            if not self.sees(actor, self.by_proxy[region], access.written):
                seen = self.sees(actor, self.by_threads[region], access.written)
                kind = NOT_PROVEN if seen and access.loaded != NONE else "race"  # compilers leave cp.async unfenced
                self.race(slot, access.writer, self.name(actor), ": no proxy fence between them" if seen else "", kind)
            access.reads[component] = (value, self.name(actor))
            access.readers.add(self.program.actors[actor].name)

    def operand(self, actor: int, slot: int, *_: int) -> None:
        # done when the group of the next wgmma is
        self.after_barrier(actor, slot, COPIED)
        self.proxy_read(actor, slot, self.actors + actor, self.groups[actor] + 1)

    def wgmma(self, actor: int, gemm: int, a: int, b: int, accumulator: int) -> None:
        # each warp reads all of B, but of A only its own rows
        if a != NONE:
            self.operand(actor, a)
        self.operand(actor, b)
        if self.is_wide(actor):
            self.after_barrier(actor, b, WROTE)
        epoch = self.actors + actor, self.groups[actor] + 1
        self.groups[actor] += not self.program.gemms[gemm].is_open
        for access in (self.access[region] for region in self.parts[accumulator]):
            access.issue, access.writer = epoch, self.name(actor)

    def wgmma_wait(self, actor: int, in_flight: int, *_: int) -> None:
        self.know(actor, self.actors + actor, self.groups[actor] - in_flight, WARPGROUP_THREADS)

    def store_wait(self, actor: int, in_flight: int, *_: int) -> None:
        self.know(actor, 2 * self.actors + actor, self.stores[actor] - in_flight, WARP_THREADS)

    def know(self, actor: int, component: int, value: int, threads: int) -> None:
        """Let an actor acquire that its reads by wgmma or TMA are done; no more than so many threads wait together."""
        known = self.clock[actor][component]
        self.clock[actor][component] = max(known, value)
        if self.is_wide(actor, threads):
            reads = (x.reads.get(component, (0, ""))[0] for x in self.access)
            self.scattered[actor] |= {region: READ for region, read in enumerate(reads) if known < read}

    def fence(self, actor: int, *_: int) -> None:
        # what the actor has seen threads write can now be seen by TMA and wgmma
        clock = self.clock[actor]
        for shown, seen in zip(self.by_proxy, self.by_threads, strict=True):
            clock[shown] = max(clock[shown], clock[seen])

    def load(self, actor: int, barrier: int, size: int, slot: int, how: int) -> None:
        # the slot counts as written from here on; who waits at the barrier acquires the clock when the load has landed
        clock = self.clock[actor][:]
        seen_by = self.by_threads if how & BY_THREADS else self.by_proxy
        for region in self.parts[slot]:
            access = self.access[region]
            if not self.sees(actor, seen_by[region], access.written):
                self.race(slot, access.writer, self.name(actor))
            self.replace(actor, slot, region, loaded=slot)
            clock[self.by_threads[region]] = clock[seen_by[region]] = access.written
        if how & BY_THREADS and self.is_wide(actor) and self.program.slots[slot].bytes:
            self.scattered[actor] |= dict.fromkeys(self.parts[slot], barrier)
        self.loads.append((barrier, size, clock))

    def land(self, load: tuple[int, int, list[int]]) -> None:
        barrier, size, clock = load
        state = self.mbarriers[barrier]
        state.bytes -= size
        self.merge(state.gathered, clock)
        self.complete(barrier)

    def store(self, actor: int, _size: int, slot: int, *_: int) -> None:
        # one thread starts the store: a barrier must have shown it the writes of the warpgroup's other threads
        self.after_barrier(actor, slot, WROTE, COPIED)
        self.stores[actor] += 1
        self.proxy_read(actor, slot, 2 * self.actors + actor, self.stores[actor])

    # synchronisation

    @staticmethod
    def merge(into: list[int], clock: list[int]) -> None:
        into[:] = map(max, into, clock)

    def meet(self, actor: int, *_: int) -> None:
        """Let the warps of an actor wait for each other."""
        self.scattered[actor] = {region: kind for region, kind in self.scattered[actor].items() if kind >= 0}

    def wait(self, actor: int, barrier: int, *_: int) -> None:
        state = self.mbarriers[barrier]
        if not self.sees(actor, self.of_mbarrier[barrier], state.done - 1):
            name = self.program.mbarriers[barrier].name
            self.report(NOT_PROVEN, f"mbarrier {name}: {self.name(actor)} may pass at an earlier phase of that parity")
        state.waited[actor] = (self.clock[actor][actor], self.name(actor))
        self.merge(self.clock[actor], state.released)
        scattered = self.scattered[actor]
        scattered |= {region: COPIED for region, kind in scattered.items() if kind == barrier}

    def is_known(self, actor: int, component: int, state: Phase, name: str) -> None:
        """Report an arrival that another interleaving could count in the previous round of the barrier.

        ``component`` holds the rounds of this barrier that the actor knows to have ended.
        """
        if not self.sees(actor, component, state.done):
            self.report(NOT_PROVEN, f"{name}: {self.name(actor)} is not ordered after the end of the round before")

    def publish(self, actor: int, state: Phase) -> None:
        self.merge(state.gathered, self.clock[actor])
        self.clock[actor][actor] += 1

    def expect(self, actor: int, barrier: int, size: int, *_: int) -> None:
        self.mbarriers[barrier].bytes += size
        self.arrive(actor, barrier)

    def arrive(self, actor: int, barrier: int, *_: int) -> None:
        state = self.mbarriers[barrier]
        name = f"mbarrier {self.program.mbarriers[barrier].name}"
        self.is_known(actor, self.of_mbarrier[barrier], state, name)
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
                self.report(NOT_PROVEN, f"mbarrier {name}: its next phase may end before {waiter} has seen this one")
        state.waited.clear()
        state.end(self.of_mbarrier[barrier], state.pending + self.program.mbarriers[barrier].arrivals)

    def bar_sync(self, actor: int, barrier: int, *_: int) -> None:
        """Enter a round the first time, and leave it when it has ended."""
        state = self.named[barrier]
        if self.joined[actor] is None:
            self.joined[actor] = state.done
            self.bar_arrive(actor, barrier)
            return
        self.joined[actor] = None
        self.merge(self.clock[actor], state.released)
        self.meet(actor)

    def bar_arrive(self, actor: int, barrier: int, *_: int) -> None:
        state = self.named[barrier]
        threads = self.program.actors[actor].threads
        name = f"named barrier {self.program.named_barriers[barrier].name}"
        self.is_known(actor, self.of_named[barrier], state, name)
        if actor in state.members:
            self.report("barrier", f"{name}: {self.name(actor)} enters it twice in a round")
        state.members.append(actor)
        state.pending -= threads
        self.publish(actor, state)
        if state.pending <= 0:
            if state.pending < 0:
                self.report("barrier", f"{name}: more threads than it counts")
            state.members.clear()
            state.end(self.of_named[barrier], self.program.named_barriers[barrier].threads)


def judged(findings: Iterable[Hazard], programs: Iterable[Program]) -> list[Hazard]:
    """Say of findings that are not proven whether something goes wrong in other orders.

    Each program is executed in ``ORDERS`` random orders, every second of them uneven, until one has a race, a deadlock
    or an arrival too many.

    Returns
    -------
    list of Hazard
        If something goes wrong, that as well, and the findings that were not proven as those of a barrier; else the
        findings as they are.
    """
    found = list(dict.fromkeys(findings))
    if is_undecided(found):
        orders = product(programs, range(ORDERS))
        runs = (Checker(program, seed, is_uneven=seed % 2 > 0).run() for program, seed in orders)
        found += next((run for run in runs if run and not is_undecided(run)), [])
    if is_undecided(found):
        return found
    return list(dict.fromkeys(x._replace(kind="barrier") if x.kind == NOT_PROVEN else x for x in found))


def check(program: Program, machine: Machine | None = None, *, orders: int = 1, seed: int = 0) -> list[Hazard]:
    """Look for hazards in ``orders`` random executions, and with a machine in the footprint too.

    Returns
    -------
    list of Hazard
        Empty for a program that is clean in every order; one execution shows that, as the module explains. In a program
        with hazards more orders may find more of them. What remains of the kind "not proven" is neither.
    """
    misfits = footprint(program, machine) if machine else []
    return judged(chain(misfits, *(Checker(program, seed + number).run() for number in range(orders))), [program])
