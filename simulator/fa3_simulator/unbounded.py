"""Proves that a kernel has no hazards for any number of tiles of any number of blocks each.

:mod:`fa3_simulator.hazards` checks one list of tiles. Here such a list is a word; each of its letters is one more block
of the tile that the CTA works on, or the first block of another tile. The operations that a word fixes, whatever
follows it, are a prefix of every actor's stream. Executed until no actor can go on, they leave the same state in every
order, as :mod:`fa3_simulator.hazards` shows, and the execution of any longer word passes through this state.

Two words with equal states have equal futures. A state is everything that the rules of the checker read: the operations
left over, and those that each possible next letter and the end of the program add; barriers; who has read what; and
vector clocks. Only the order of the numbers in clocks matters, so each number is replaced by how many of the values
that it can be compared with it has reached. There are finitely many states, as rings have finitely many slots. So words
are tried shortest first, and a word is not continued if a shorter one has left the same state. When no word is left,
every word of any length has the hazards of a word that the checker has executed to its end.

Where the checker cannot prove that an arrival or a wait stays in its round, none of this holds: the search ends there,
and random orders of that word and of a long one are tried. If nothing goes wrong in them the kernel is not proven.

One step is assumed here and tested elsewhere: that a program's streams repeat themselves, so that what two letters add
behind equal next letters is equal as well. The programs are written by loops over tiles and blocks, in which only the
remainder of their numbers by the slots of a ring matters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from itertools import chain, compress, repeat
from typing import NamedTuple

import numpy as np

from fa3_simulator.executions import Access, Phase
from fa3_simulator.footprint import Hazard, is_undecided
from fa3_simulator.hazards import LOCAL, Checker, judged
from fa3_simulator.program import BY_THREADS, NONE, Actor, Builder, Op, Program
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.shared_memory import regions

Word = tuple[int, ...]  # blocks of each tile
Stream = list[tuple[int, ...]]  # operations of one actor
Streams = list[Stream]  # one for each actor
MOST_WORDS = 2000
# Of each operation what its four operands are: an index into a list, or which bits of a number matter.
_KEPT = -1
_OPERANDS: dict[int, tuple[str | int, ...]] = {
    Op.WGMMA: ("gemm", "slot", "slot", "slot"),
    Op.EXPECT: ("mbarrier", _KEPT, _KEPT, _KEPT),
    Op.LOAD: ("mbarrier", _KEPT, "slot", BY_THREADS),
    Op.ARRIVE: ("mbarrier", _KEPT, _KEPT, _KEPT),
    Op.STORE: (0, "slot", _KEPT, _KEPT),
    Op.WAIT: ("mbarrier", _KEPT, _KEPT, _KEPT),
    Op.BAR_ARRIVE: ("named", _KEPT, _KEPT, _KEPT),
    Op.BAR_SYNC: ("named", _KEPT, _KEPT, _KEPT),
    Op.READ: ("slot", _KEPT, _KEPT, _KEPT),
    Op.OPERAND: ("slot", _KEPT, _KEPT, _KEPT),
    Op.WRITE: ("slot", _KEPT, _KEPT, _KEPT),
}
IN_FLIGHT = 8  # wgmma groups or stores in flight that a wait can tell apart: more than any kernel has


class Proof(NamedTuple):
    """Says what the execution of many words found.

    ``findings`` are the hazards of the last word that was executed, and ``words`` is how many were. ``is_complete`` is
    False where the limit or a finding ended the search; where it is True the words stand for all. ``longest`` is the
    number of blocks of the longest word. A proof is undecided if its findings are merely not proven: something may go
    wrong, but nothing did in any of ``fa3_simulator.hazards.ORDERS`` random orders of the last word and of a long one.
    """

    findings: list[Hazard]
    words: int
    longest: int
    is_complete: bool

    @property
    def is_undecided(self) -> bool:
        return is_undecided(self.findings)


class _Family:
    """Programs of one kernel for many words, with common indices of slots and barriers.

    Operations that touch nothing shared are left out. ``make`` builds the program of a list of tiles.
    """

    def __init__(self, make: Callable[[list[TileBlocks]], Program]) -> None:
        self.make, self.names = make, Builder("any")
        self.known: dict[Word, Streams] = {}
        self.slots = 0  # how many of ``names`` have been prepared
        self.lines: dict[Word, list[tuple[str, ...]]] = {}  # of each actor, as the program of the word has them
        self.actors: tuple[Actor, ...] = ()
        self.waiting: list[frozenset[int]] = []  # actors at each mbarrier, then at each named barrier
        self.touching: list[frozenset[int]] = []  # actors that may overwrite or read each region of memory

    def prepare(self) -> None:
        """Learn which actors use slots and barriers from the words that are known, of which one is long."""

        def users(count: int, *fields: tuple[Op, int]) -> list[frozenset[int]]:
            streams = [chain(*ops) for ops in zip(*self.known.values(), strict=True)]
            uses = [{row[i] for row in ops for op, i in fields if row[0] == op} for ops in streams]
            return [frozenset(a for a, used in enumerate(uses) if x in used) for x in range(count)]

        n = self.names
        self.waiting = users(len(n.mbarriers), (Op.WAIT, 1)) + users(len(n.named_barriers), (Op.BAR_SYNC, 1))
        of_slots = users(len(n.slots), (Op.WRITE, 1), (Op.LOAD, 3), (Op.READ, 1))
        self.touching = [frozenset().union(*(of_slots[x] for x in some)) for some in regions(tuple(n.slots))]

    def streams(self, word: Word) -> Streams:
        if word not in self.known:
            program = self.make([TileBlocks(blocks) for blocks in word])
            self.actors = program.actors
            self.known[word] = [self._stream(program, actor) for actor in program.actors]
            self.lines[word] = [
                tuple(compress(actor.lines, ~np.isin(actor.ops[:, 0], LOCAL))) for actor in program.actors
            ]
        return self.known[word]

    def _stream(self, program: Program, actor: Actor) -> Stream:
        """Return operations with indices into the lists of all programs; sizes that do not matter are 0."""
        timeless = [x._replace(instructions=1, n=8, bits=16, rate=1.0, share=1.0) for x in program.gemms]
        lists = {
            "gemm": (self.names.gemms, timeless),
            "mbarrier": (self.names.mbarriers, program.mbarriers),
            "named": (self.names.named_barriers, program.named_barriers),
            "slot": (self.names.slots, program.slots),
        }

        def common(x: int, kind: str | int) -> int:
            if isinstance(kind, int):
                return x & kind
            numbers, items = lists[kind]
            return x if x < 0 else numbers[items[x]]

        rows = _counted_loads([row for row in actor.ops.tolist() if row[0] not in LOCAL])
        return [(op, *map(common, operands, _OPERANDS.get(op, (_KEPT,) * 4))) for op, *operands in rows]

    def program(self, word: Word) -> Program:
        """Return the program that executes a word from its start to its end."""
        n = self.names
        streams = self.streams(word)
        if len(n.slots) > self.slots:  # which registers a load has may depend on the loads before
            self.slots = len(n.slots)
            self.prepare()
        actors = tuple(
            Actor(a.name, a.threads, a.registers, np.array(ops, np.int64).reshape(-1, 5), lines)
            for ops, lines, a in zip(streams, self.lines[word], self.actors, strict=True)
        )
        lists = (n.gemms, n.works, n.mbarriers, n.named_barriers, n.slots, n.delays, n.labels)
        return Program("", actors, *map(tuple, lists))


def _counted_loads(rows: list[list[int]]) -> list[list[int]]:
    """Count the bytes that a barrier expects in loads, of 1 each, where exactly those loads follow the expectation.

    Then the sizes of loads do not matter.
    """
    counted = [row.copy() for row in rows]
    for i, (kind, barrier, size, _, _) in enumerate(rows):
        if kind != Op.EXPECT:
            continue
        stop = next((j for j in range(i + 1, len(rows)) if rows[j][:2] != [Op.LOAD, barrier]), len(rows))
        if sum(row[2] for row in rows[i + 1 : stop]) == size:
            counted[i][2] = stop - i - 1
            for row in counted[i + 1 : stop]:
                row[2] = 1
    return counted


def _following(word: Word, *, is_persistent: bool) -> list[Word]:
    return [(*word[:-1], word[-1] + 1), *([(*word, 1)] if is_persistent else [])]


def _common_length(streams: Sequence[Stream]) -> int:
    shortest = min(map(len, streams))
    first = streams[0][:shortest]
    return next((i for i in range(shortest) if any(s[i] != first[i] for s in streams[1:])), shortest)


def shape(make: Callable[[list[TileBlocks]], Program], *, is_persistent: bool = True) -> tuple:
    """Return everything that :func:`prove` reads of a kernel: two kernels of one shape have the same proof."""
    family = _Family(make)
    # one word in which every ring goes round several times, and a short one
    words = ((9, 9, 9), (1, 2, 1)) if is_persistent else ((27,), (1,))
    streams = tuple(tuple(map(tuple, family.streams(word))) for word in words)
    n = family.names
    return (
        streams,
        tuple((actor.name, actor.threads) for actor in family.actors),
        tuple(gemm.is_open for gemm in n.gemms),
        tuple(n.mbarriers),
        tuple(n.named_barriers),
        tuple((slot.name, slot.readers, slot.bytes > 0) for slot in n.slots),
        tuple(regions(tuple(n.slots))),
    )


def prove(make: Callable[[list[TileBlocks]], Program], *, is_persistent: bool = True, most: int = MOST_WORDS) -> Proof:
    """Look for hazards of a kernel whatever the tiles of a CTA.

    Parameters
    ----------
    make : callable
        Builds the program of a CTA from its list of tiles. Masks must change no operations but those that touch nothing
        shared, as all tiles are tried without them.
    is_persistent : bool
        Whether a CTA may have more than one tile.
    most : int
        How many words to try at most.

    Returns
    -------
    Proof
        If it has no findings and is complete, no list of tiles has a race, a deadlock or a misused barrier, in any
        order.
    """
    family = _Family(make)
    long = (9, 9, 9) if is_persistent else (27,)
    family.program(long)
    todo: list[Word] = [(1,)]
    seen: set[tuple] = set()
    longest = 0
    while todo and len(seen) < most:
        word = todo.pop(0)
        checker = Checker(family.program(word))
        state = _state(checker, family, word, is_persistent=is_persistent)
        if state in seen:
            continue
        seen.add(state)
        checker.stops = list(map(len, checker.ops))
        hazards = checker.run()
        longest = max(longest, sum(word))
        todo += _following(word, is_persistent=is_persistent)
        if hazards:
            return Proof(judged(hazards, map(family.program, (word, long))), len(seen), longest, False)
    return Proof([], len(seen), longest, not todo)


def _state(checker: Checker, family: _Family, word: Word, *, is_persistent: bool) -> tuple:
    """Run the prefix that a word fixes until no actor can go on; return the state there, and what may come next."""
    following = _following(word, is_persistent=is_persistent)
    ends = [family.streams(word), *(family.streams(x) for x in following)]
    after = [family.streams(y) for x in following for y in _following(x, is_persistent=is_persistent)]
    fixed = [_common_length([s[a] for s in (*ends, *after)]) for a in range(len(ends[0]))]
    checker.stops = fixed
    checker.advance()
    left = tuple(tuple(ends[0][a][pc:stop]) for a, (pc, stop) in enumerate(zip(checker.pc, fixed, strict=True)))
    next_ones = tuple(_next(family, x, fixed, is_persistent) for x in following)
    tails = tuple(tuple(s[stop:]) for s, stop in zip(ends[0], fixed, strict=True))
    return left, next_ones, tails, normal_form(checker, family)


def _next(family: _Family, word: Word, fixed: Sequence[int], is_persistent: bool) -> tuple:
    """Return the operations of each actor that the last letter of ``word`` fixes behind the first ``fixed`` ones."""
    streams = [family.streams(x) for x in (word, *_following(word, is_persistent=is_persistent))]
    stops = [_common_length([s[a] for s in streams]) for a in range(len(fixed))]
    return tuple(tuple(streams[0][a][fixed[a] : stop]) for a, stop in enumerate(stops))


def normal_form(checker: Checker, family: _Family) -> tuple:
    """Return everything that the future of an execution at rest depends on, with clocks by their order alone.

    Of a clock that is kept at a barrier only the part counts that some actor waiting there does not know yet. An access
    to a slot does not count once all actors that may touch the slot know of its end. The clock that a named barrier
    released does not count either, as its actors acquired it when the round ended, nor how many rounds it has had. Who
    has read the contents of a slot does not count once they are as many as the slot says.
    """
    c = checker
    live = [_unknown(c, x, who) for x, who in zip(c.access, family.touching, strict=True)]
    limits = _compared(c, live)

    def rank(component: int, value: int) -> int:
        return bisect_right(limits[component], value)

    def clock(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(rank, range(c.size), values))

    def epoch(component: int, value: int) -> tuple[int, int, int]:
        in_flight = _counted(c, component) - value if component >= c.actors else 0
        return component, rank(component, value), min(in_flight, IN_FLIGHT)

    def told(values: list[int], readers: frozenset[int]) -> tuple[int, ...]:
        return clock(np.maximum(values, np.min([c.clock[a] for a in readers], axis=0)).tolist() if readers else values)

    def phase(state: Phase, readers: frozenset[int], parity: int = 1) -> tuple:
        waited = {(a, rank(a, value), state.gathered[a] >= value) for a, (value, _) in state.waited.items()}
        heads = (state.pending, state.bytes, state.done & parity, tuple(sorted(state.members)), tuple(sorted(waited)))
        return (*heads, told(state.gathered, readers))

    of_mbarriers = family.waiting[: len(c.mbarriers)]
    of_named = family.waiting[len(c.mbarriers) :]
    barriers = (
        *map(phase, c.mbarriers, of_mbarriers),
        *map(phase, c.named, of_named, repeat(0)),
        *(told(state.released, readers) for state, readers in zip(c.mbarriers, of_mbarriers, strict=True)),
    )
    joined = tuple(
        None if j is None else c.named[c.ops[a][c.pc[a]][1]].done - j for a, j in enumerate(c.joined)
    )  # rounds since each entered the one it waits to end
    slots = tuple(
        (
            tuple(sorted(epoch(*e) for e in epochs)),
            x.loaded != NONE and _readers(c, x.loaded, x.readers),
            frozenset(_readers(c, *load) for load in x.loads),
        )
        for x, epochs in zip(c.access, live, strict=True)
    )
    return tuple(map(clock, c.clock)), barriers, joined, slots, tuple(frozenset(x.items()) for x in c.scattered)


def _readers(c: Checker, slot: int, readers: Collection[str]) -> tuple:
    """Return all that the rule for the readers of a slot's contents needs to know of those of one of them."""
    enough = c.program.slots[slot].readers
    return slot, enough if 0 < enough <= len(readers) else frozenset(readers)


def _counted(c: Checker, component: int) -> int:
    """Return the value of one of an actor's three components: its own clock, wgmma groups started, stores started."""
    kind, actor = divmod(component, c.actors)
    return (c.clock[actor][actor], c.groups[actor], c.stores[actor])[kind]


def _unknown(c: Checker, access: Access, touching: frozenset[int]) -> list[tuple[int, int]]:
    """Return the accesses to a slot that are not ordered before a later access of every actor that touches it."""
    epochs = [(component, value) for component, (value, _) in access.reads.items()]
    epochs += [access.issue] if access.issue else []
    return [e for e in epochs if not all(c.sees(a, *e) for a in touching)]


def _compared(c: Checker, live: Sequence[Sequence[tuple[int, int]]]) -> list[list[int]]:
    """Return for each component, ascending, the values that entries of clocks can still be compared with."""
    limits: list[set[int]] = [set() for _ in range(c.size)]
    for component in range(3 * c.actors):
        limits[component].add(_counted(c, component))
    for slot, (access, epochs) in enumerate(zip(c.access, live, strict=True)):
        limits[c.by_threads[slot]].add(access.written)
        limits[c.by_proxy[slot]].add(access.written)
        for component, value in epochs:
            limits[component].add(value)
    for component, state in enumerate((*c.mbarriers, *c.named), c.of_mbarrier.start):
        limits[component] |= {state.done - 1, state.done}
        for actor, (value, _) in state.waited.items():
            limits[actor].add(value)
    return [sorted(values) for values in limits]
