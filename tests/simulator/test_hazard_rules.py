"""Every rule of the checker: a program with that fault alone gets that rule's message, and its neighbour gets none."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fa3_simulator import footprint as fits
from fa3_simulator.hazards import Checker, check
from fa3_simulator.machine import load
from fa3_simulator.program import Builder, Gemm, Mbarrier, NamedBarrier, Program, Slot, Stream
from fa3_simulator.shared_memory import regions

H200 = load("h200")
S = Slot("s", 64)
ACC = Slot("acc", 0)
FULL = Mbarrier("full", 1)
EMPTY = Mbarrier("empty", 1)
GEMM = Gemm("g", 1, 64, 16, True)


def warps(*names: str) -> tuple[Builder, list[Stream]]:
    builder = Builder("small")
    return builder, [builder.actor(name, 32, 24) for name in names]


def lost_store(*, faulty: bool) -> Program:
    builder, (a,) = warps("A")
    a.tma_store(S, 64)
    if not faulty:
        a.store_wait()
    return builder.build()


def _loaded_twice(readers_of_the_second: str, slot: Slot = S) -> Program:
    builder, (a, b, producer) = warps("A", "B", "P")
    empty = Mbarrier("empty", 2)
    producer.load(FULL, [slot])
    producer.wait(empty, 0)
    producer.load(FULL, [slot])
    for each in (a, b):
        each.wait(FULL, 0)
        each.read(slot)
        each.arrive(empty)
        if each.name in readers_of_the_second:
            each.wait(FULL, 1)
            each.read(slot)
    return builder.build()


def one_reader_misses_a_load(*, faulty: bool) -> Program:
    return _loaded_twice("A" if faulty else "AB")


def one_reader_instead_of_two(*, faulty: bool) -> Program:
    """Whoever it is: each content has as many readers as its slot says."""
    return _loaded_twice("B", Slot("s", 64, readers=2 if faulty else 1))


def nobody_reads_a_load(*, faulty: bool) -> Program:
    builder, (a,) = warps("A")
    a.load(FULL, [S])
    a.wait(FULL, 0)
    if not faulty:
        a.read(S)
    return builder.build()


def _read_by_wgmma(overwrite: Callable[[Stream], None], *, faulty: bool) -> Builder:
    """A's wgmma reads a slot that B overwrites when A says so; a faulty A does not wait for its wgmma before."""
    builder, (a, b) = warps("A", "B")
    a.issue(GEMM, None, S, ACC)
    if not faulty:
        a.wgmma_wait(0)
    a.arrive(EMPTY)
    b.wait(EMPTY, 0)
    overwrite(b)
    return builder


def write_under_wgmma(*, faulty: bool) -> Program:
    return _read_by_wgmma(lambda b: b.write(S), faulty=faulty).build()


def load_under_wgmma(*, faulty: bool) -> Program:
    def overwrite(b: Stream) -> None:
        b.load(FULL, [S])
        b.wait(FULL, 0)
        b.read(S)

    return _read_by_wgmma(overwrite, faulty=faulty).build()


def write_under_store(*, faulty: bool) -> Program:
    """That two wgmma are known to be done says nothing of the store behind them."""
    builder, (a,) = warps("A")
    for _ in range(2):
        a.issue(GEMM, None, Slot("k", 64), ACC)
    a.wgmma_wait(0)
    a.tma_store(S, 64)
    a.store_wait(1 if faulty else 0)
    a.write(S)
    a.store_wait()
    return builder.build()


def write_beside_a_reader(*, faulty: bool) -> Program:
    builder, (a, b) = warps("A", "B")
    a.read(S)
    a.arrive(EMPTY)
    if not faulty:
        b.wait(EMPTY, 0)
    b.write(S)
    return builder.build()


def accumulator_read_early(*, faulty: bool) -> Program:
    builder, (a,) = warps("A")
    a.issue(GEMM, None, S, ACC)
    a.wgmma_wait(1 if faulty else 0)
    a.read(ACC)
    return builder.build()


def read_before_the_load_is_there(*, faulty: bool) -> Program:
    builder, (a,) = warps("A")
    a.load(FULL, [S])
    if not faulty:
        a.wait(FULL, 0)
    a.read(S)
    return builder.build()


def two_writers(*, faulty: bool) -> Program:
    builder, (a, b) = warps("A", "B")
    a.write(S)
    a.arrive(FULL)
    if not faulty:
        b.wait(FULL, 0)
    b.write(S)
    return builder.build()


def wgmma_before_the_load_is_there(*, faulty: bool) -> Program:
    builder, (a,) = warps("A")
    a.load(FULL, [S])
    if not faulty:
        a.wait(FULL, 0)
    a.issue(GEMM, None, S, ACC)
    return builder.build()


def wgmma_of_unfenced_writes(*, faulty: bool) -> Program:
    builder, (a,) = warps("A")
    a.write(S)
    if not faulty:
        a.fence()
    a.issue(GEMM, None, S, ACC)
    return builder.build()


def wgmma_with_unfenced_a(*, faulty: bool) -> Program:
    builder, (a,) = warps("A")
    a.write(S)
    if not faulty:
        a.fence()
    a.issue(GEMM, S, Slot("k", 64), ACC)
    return builder.build()


def store_of_unfenced_writes(*, faulty: bool) -> Program:
    builder, (a,) = warps("A")
    a.write(S)
    if not faulty:
        a.fence()
    a.bar_sync(NamedBarrier("all", 1, 32))
    a.tma_store(S, 64)
    a.store_wait()
    return builder.build()


def store_of_scattered_writes(*, faulty: bool) -> Program:
    builder, (a,) = warps("A")
    a.write(S)
    a.fence()
    if not faulty:
        a.bar_sync(NamedBarrier("all", 1, 32))
    a.tma_store(S, 64)
    a.store_wait()
    return builder.build()


def alone(threads: int = 128) -> tuple[Builder, Stream]:
    builder = Builder("small")
    return builder, builder.actor("A", threads, 24)


def read_of_writes_of_other_warps(*, faulty: bool) -> Program:
    builder, a = alone()
    a.write(S)
    if not faulty:
        a.bar_sync(NamedBarrier("all", 1, 128))
    a.read(S)
    return builder.build()


def read_of_copies_of_other_warps(*, faulty: bool) -> Program:
    """A wait for copies, and an arrival of one thread, are no barrier; a phase that every thread ends is one."""
    builder, a = alone()
    a.load(FULL, [S], by_threads=True)
    a.wait(FULL, 0)
    a.arrive(EMPTY)
    a.wait(EMPTY, 0)
    if not faulty:
        a.meet()
    a.read(S)
    return builder.build()


def _written_over(overwrite: Callable[[Stream], None], *, faulty: bool, own: bool = False) -> Program:
    """A reads a slot by ldmatrix and writes it again."""
    builder, a = alone()
    a.read(S, own=own)
    if not faulty:
        a.bar_sync(NamedBarrier("all", 1, 128))
    overwrite(a)
    return builder.build()


def write_over_reads_of_other_warps(*, faulty: bool) -> Program:
    return _written_over(lambda a: a.write(S), faulty=faulty)


def write_over_reads_of_no_other_warp(*, faulty: bool) -> Program:
    """Whoever reads must be the only one that writes."""
    return _written_over(lambda a: a.write(S), faulty=True, own=not faulty)


def copy_over_reads_of_other_warps(*, faulty: bool) -> Program:
    def overwrite(a: Stream) -> None:
        a.load(FULL, [S], by_threads=True)
        a.wait(FULL, 0)
        a.bar_sync(NamedBarrier("loaded", 2, 128))
        a.read(S)

    return _written_over(overwrite, faulty=faulty)


def write_after_one_thread_has_waited_for_the_store(*, faulty: bool) -> Program:
    builder, a = alone()
    met = NamedBarrier("all", 1, 128)
    a.tma_store(S, 64)
    if faulty:
        a.bar_sync(met)  # too early: the store reads on
    a.store_wait()
    if not faulty:
        a.bar_sync(met)
    a.write(S)
    return builder.build()


def write_after_one_warpgroup_has_waited_for_its_wgmma(*, faulty: bool) -> Program:
    """One warpgroup waits for its products together, two do not."""
    builder, a = alone(256 if faulty else 128)
    a.issue(GEMM, None, S, ACC)
    a.wgmma_wait(0)
    a.write(S)
    return builder.build()


def load_over_unfenced_writes(*, faulty: bool) -> Program:
    builder, (a,) = warps("A")
    a.write(S)
    if not faulty:
        a.fence()
    a.load(FULL, [S])
    a.wait(FULL, 0)
    a.read(S)
    return builder.build()


def a_wait_that_skips_a_round(*, faulty: bool) -> Program:
    builder, (a, b) = warps("A", "B")
    seen = Mbarrier("seen", 1)
    a.arrive(FULL)
    a.wait(FULL, 0)
    if not faulty:
        a.wait(seen, 0)
    a.arrive(FULL)
    if not faulty:
        b.wait(FULL, 0)
        b.arrive(seen)
    b.wait(FULL, 1)
    return builder.build()


def a_round_that_overtakes_a_wait(*, faulty: bool) -> Program:
    builder, (a, b) = warps("A", "B")
    seen = Mbarrier("seen", 1)
    a.wait(FULL, 0)
    a.arrive(seen)
    b.arrive(FULL)
    b.wait(FULL, 0)
    if not faulty:
        b.wait(seen, 0)
    b.arrive(FULL)
    return builder.build()


def an_arrival_that_knows_of_no_round(*, faulty: bool) -> Program:
    builder, (a, b) = warps("A", "B")
    both = Mbarrier("both", 2)
    for each in (a, b):
        each.arrive(both)
        if each is a or not faulty:
            each.wait(both, 0)
        each.arrive(both)
    return builder.build()


def a_named_arrival_that_knows_of_no_round(*, faulty: bool) -> Program:
    builder, (a, b, c) = warps("A", "B", "C")
    turn, begin = NamedBarrier("turn", 1, 64), NamedBarrier("begin", 2, 96)
    for each in (a, b):
        each.bar_sync(turn)
    for each in (a, b, c):
        if not faulty:
            each.bar_sync(begin)
    a.bar_sync(turn)
    c.bar_arrive(turn)
    return builder.build()


def an_arrival_more_than_counted(*, faulty: bool) -> Program:
    builder, (a,) = warps("A")
    full = FULL if faulty else Mbarrier("full", 2)
    a.load(full, [S])
    a.arrive(full)
    a.wait(full, 0)
    a.read(S)
    return builder.build()


def one_that_enters_twice(*, faulty: bool) -> Program:
    builder, (a, b) = warps("A", "B")
    turn = NamedBarrier("turn", 1, 64)
    a.bar_arrive(turn)
    (a if faulty else b).bar_arrive(turn)
    return builder.build()


def more_threads_than_counted(*, faulty: bool) -> Program:
    builder = Builder("small")
    turn = NamedBarrier("turn", 1, 64 if faulty else 96)
    builder.actor("A", 32, 24).bar_arrive(turn)
    builder.actor("B", 64, 24).bar_sync(turn)
    return builder.build()


def a_wait_for_nobody(*, faulty: bool) -> Program:
    builder, (a, b) = warps("A", "B")
    a.wait(FULL, 0)
    (b.read(S) if faulty else b.arrive(FULL))
    return builder.build()


def a_sync_with_nobody(*, faulty: bool) -> Program:
    builder, (a,) = warps("A")
    turn = NamedBarrier("turn", 1, 64 if faulty else 32)
    a.bar_sync(turn)
    a.bar_sync(turn)
    return builder.build()


def a_chain_of_waits(*, faulty: bool) -> Program:
    builder, (a, b, c, d) = warps("A", "B", "C", "D")
    both = Mbarrier("both", 2)
    a.wait(both, 0)
    for each in (b, c):
        each.wait(EMPTY, 0)
        each.arrive(both)
    (d.read(S) if faulty else d.arrive(EMPTY))
    return builder.build()


def a_circle_of_waits(*, faulty: bool) -> Program:
    builder, (a, b) = warps("A", "B")
    a.wait(EMPTY, 0)
    a.arrive(FULL)
    if not faulty:
        b.arrive(EMPTY)
    b.wait(FULL, 0)
    if faulty:
        b.arrive(EMPTY)
    return builder.build()


def a_circle_with_one_beside_it(*, faulty: bool) -> Program:
    builder, (a, b) = warps("A", "B")
    a.bar_sync(NamedBarrier("turn", 1, 64))
    if not faulty:
        b.arrive(EMPTY)
    b.wait(EMPTY, 0)
    if faulty:
        b.arrive(EMPTY)
    b.bar_arrive(NamedBarrier("turn", 1, 64))
    return builder.build()


class Rule(NamedTuple):
    """A program of that fault, and what is said of it where the actor named first always goes first."""

    program: Callable[..., Program]
    kind: str
    text: str


RULES = (
    Rule(lost_store, "race", "A ends while its last store may still read shared memory"),
    Rule(one_reader_misses_a_load, "race", "slot s: content number 2 is not read by B"),
    Rule(one_reader_instead_of_two, "race", "slot s: content number 2 is not read by 2 actors but by B alone"),
    Rule(nobody_reads_a_load, "race", "slot s: content number 1 is not read by anyone"),
    Rule(write_under_wgmma, "race", "slot s: B (write s, row 1) is not ordered after A (issue g, row 0)"),
    Rule(load_under_wgmma, "race", "slot s: B (load full, row 2) is not ordered after A (issue g, row 0)"),
    Rule(write_under_store, "race", "slot s: A (write s, row 5) is not ordered after A (store, row 3)"),
    Rule(write_beside_a_reader, "race", "slot s: B (write s, row 0) is not ordered after A (read s, row 0)"),
    Rule(
        accumulator_read_early,
        "race",
        "slot acc: A (read acc, row 2) is not ordered after A (issue g, row 0), which may still run",
    ),
    Rule(read_before_the_load_is_there, "race", "slot s: A (read s, row 2) is not ordered after A (load full, row 1)"),
    Rule(two_writers, "race", "slot s: B (write s, row 0) is not ordered after A (write s, row 0)"),
    Rule(
        wgmma_before_the_load_is_there, "race", "slot s: A (issue g, row 2) is not ordered after A (load full, row 1)"
    ),
    Rule(
        wgmma_of_unfenced_writes,
        "race",
        "slot s: A (issue g, row 1) is not ordered after A (write s, row 0): no proxy fence between them",
    ),
    Rule(
        wgmma_with_unfenced_a,
        "race",
        "slot s: A (issue g, row 1) is not ordered after A (write s, row 0): no proxy fence between them",
    ),
    Rule(
        store_of_unfenced_writes,
        "race",
        "slot s: A (store, row 2) is not ordered after A (write s, row 0): no proxy fence between them",
    ),
    Rule(
        store_of_scattered_writes,
        "race",
        "slot s: A (store, row 2) is not ordered after A (write s, row 0): no barrier over the warpgroup between them",
    ),
    Rule(
        read_of_writes_of_other_warps,
        "race",
        "slot s: A (read s, row 1) is not ordered after A (write s, row 0): no barrier over the warpgroup between them",
    ),
    Rule(
        read_of_copies_of_other_warps,
        "race",
        "slot s: A (read s, row 5) is not ordered after A (load full, row 1): "
        "no barrier between cp.async.wait_group and the read",
    ),
    Rule(
        write_over_reads_of_other_warps,
        "race",
        "slot s: A (write s, row 1) is not ordered after A (read s, row 0): no barrier over the warpgroup between them",
    ),
    Rule(
        write_over_reads_of_no_other_warp,
        "race",
        "slot s: A (write s, row 1) is not ordered after A (read s, row 0): no barrier over the warpgroup between them",
    ),
    Rule(
        copy_over_reads_of_other_warps,
        "race",
        "slot s: A (load full, row 2) is not ordered after A (read s, row 0): "
        "no barrier over the warpgroup between them",
    ),
    Rule(
        write_after_one_thread_has_waited_for_the_store,
        "race",
        "slot s: A (write s, row 3) is not ordered after A (store, row 0): no barrier over the warpgroup between them",
    ),
    Rule(
        write_after_one_warpgroup_has_waited_for_its_wgmma,
        "race",
        "slot s: A (write s, row 2) is not ordered after A (issue g, row 0): "
        "no barrier over the warpgroup between them",
    ),
    Rule(load_over_unfenced_writes, "race", "slot s: A (load full, row 2) is not ordered after A (write s, row 0)"),
    Rule(
        a_wait_that_skips_a_round,
        "not proven",
        "mbarrier full: B (wait full, row 0) may pass at an earlier phase of that parity",
    ),
    Rule(
        a_round_that_overtakes_a_wait,
        "not proven",
        "mbarrier full: its next phase may end before A (wait full, row 0) has seen this one",
    ),
    Rule(
        an_arrival_that_knows_of_no_round,
        "not proven",
        "mbarrier both: B (arrive both, row 1) is not ordered after the end of the round before",
    ),
    Rule(
        a_named_arrival_that_knows_of_no_round,
        "not proven",
        "named barrier turn: C (arrive turn, row 0) is not ordered after the end of the round before",
    ),
    Rule(an_arrival_more_than_counted, "barrier", "mbarrier full: A (arrive full, row 2) arrives once too often"),
    Rule(one_that_enters_twice, "barrier", "named barrier turn: A (arrive turn, row 1) enters it twice in a round"),
    Rule(more_threads_than_counted, "barrier", "named barrier turn: more threads than it counts"),
    Rule(a_wait_for_nobody, "deadlock", "A at wait full (row 0), where nobody will arrive"),
    Rule(a_sync_with_nobody, "deadlock", "A at wait turn (row 0), where nobody will arrive"),
    Rule(
        a_chain_of_waits,
        "deadlock",
        "A at wait both (row 0), where B and C would arrive; B at wait empty (row 0), where nobody will arrive; "
        "C at wait empty (row 0), where nobody will arrive",
    ),
    Rule(
        a_circle_of_waits,
        "deadlock",
        "circle of waits: A at wait empty (row 0), where B would arrive; B at wait full (row 0), where A would arrive",
    ),
    Rule(a_circle_with_one_beside_it, "deadlock", "circle of waits: B at wait empty (row 0), where B would arrive"),
)
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.program.__name__)


@each_rule
def test_a_fault_is_explained_by_its_rule_alone(rule: Rule) -> None:
    """In other orders another rule may be the first to see it, but none lets it pass."""
    program = rule.program(faulty=True)
    assert Checker(program).run() == [(rule.kind, rule.text)]
    assert all(check(program, seed=seed) for seed in range(20))


@each_rule
def test_the_nearest_correct_program_is_silent_in_every_order(rule: Rule) -> None:
    assert check(rule.program(faulty=False), H200, orders=20) == []


ALL = NamedBarrier("all", 1, 128)


def test_warps_that_have_met_need_not_meet_again() -> None:
    """A second wait for the same store says nothing new, and registers are of a thread alone."""
    builder, a = alone()
    a.tma_store(S, 64)
    a.store_wait()
    a.bar_sync(ALL)
    a.store_wait()
    a.write(S)
    for touch in (a.read, a.write, a.read):
        touch(Slot("registers", 0))
    assert check(builder.build()) == []


def test_a_barrier_in_front_of_the_wait_for_copies_is_too_early() -> None:
    builder, a = alone()
    a.load(FULL, [S], by_threads=True)
    a.bar_sync(ALL)
    a.wait(FULL, 0)
    a.read(S)
    (found,) = check(builder.build())
    assert found.text.endswith(": no barrier between cp.async.wait_group and the read")


def test_readers_that_an_actor_knows_of_are_not_told_with_its_own() -> None:
    builder, a = alone()
    b = builder.actor("B", 32, 24)
    b.read(S)
    b.arrive(EMPTY)
    a.wait(EMPTY, 0)
    a.read(S)
    a.write(S)
    (found,) = check(builder.build())
    assert "after A (read s" in found.text


class Pair(NamedTuple):
    """Two slots of one memory, and whether they have a byte in common."""

    one: Slot
    other: Slot
    overlaps: bool


PAIRS = (
    Pair(Slot("one", 64, "m"), Slot("other", 64, "m", (63,)), True),
    Pair(Slot("one", 64, "m"), Slot("other", 64, "m", (64,)), False),
    Pair(Slot("one", 64, "m", (64,)), Slot("other", 64, "m"), False),
    Pair(Slot("one", 64, "m"), Slot("other", 8, "m", (16,)), True),
    Pair(Slot("one", 64, "m"), Slot("other", 64, "m"), True),
    Pair(Slot("one", 64, "m", (0, 64)), Slot("other", 64, "m", (32, 96)), False),
    Pair(Slot("one", 64, "m", (0, 64)), Slot("other", 64, "m", (32, 95)), True),
    Pair(Slot("one", 64, "m"), Slot("other", 64, "m", (-63,)), True),
    Pair(Slot("one", 64, "m"), Slot("other", 64, "m", (-64,)), False),
    Pair(Slot("one", 64, "m"), Slot("other", 64, "n"), False),
    Pair(Slot("one", 64), Slot("other", 64), False),
)
SIDES: dict[str, Callable[[Stream, Slot], None]] = {
    "write": lambda stream, slot: stream.write(slot),
    "load": lambda stream, slot: stream.load(Mbarrier(f"full of {slot.name}", 1), [slot]),
    "read": lambda stream, slot: stream.read(slot),
    "wgmma": lambda stream, slot: stream.issue(GEMM, None, slot, ACC),
    "store": lambda stream, slot: stream.tma_store(slot, slot.bytes),
}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.one.at}-{pair.other.memory}{pair.other.at}")
@pytest.mark.parametrize(("first", "second"), [(x, y) for x in SIDES for y in SIDES if {x, y} & {"write", "load"}])
def test_two_slots_are_one_memory_where_their_bytes_overlap(pair: Pair, first: str, second: str) -> None:
    builder, (a, b) = warps("A", "B")
    SIDES[first](a, pair.one)
    SIDES[second](b, pair.other)
    texts = [hazard.text for hazard in check(builder.build()) if "shares bytes" in hazard.text]
    assert bool(texts) == pair.overlaps
    assert all(text.startswith(("slot one (shares bytes with other): ", "slot other (")) for text in texts)


def test_a_fence_and_a_barrier_order_a_slot_and_what_shares_its_bytes() -> None:
    """What A writes into the half of a slot, B's store reads whole; each lack of the two is told."""
    half, whole = Slot("half", 32, "m", (32,)), Slot("whole", 64, "m")

    def program(*, fenced: bool, met: bool) -> Program:
        builder, (a, b) = warps("A", "B")
        a.write(half)
        if fenced:
            a.fence()
        if met:
            a.arrive(FULL)
            b.wait(FULL, 0)
        b.tma_store(whole, 64)
        b.store_wait()
        return builder.build()

    where = "slot whole (shares bytes with half): B (store, row "
    assert check(program(fenced=True, met=True), orders=20) == []
    (unfenced,) = Checker(program(fenced=False, met=True)).run()
    assert unfenced.text == f"{where}1) is not ordered after A (write half, row 0): no proxy fence between them"
    (unmet,) = Checker(program(fenced=True, met=False)).run()
    assert unmet.text == f"{where}0) is not ordered after A (write half, row 0)"


def _halves(*, readers: int) -> Program:
    """One load of a slot, of which so many warps read a half each and write there."""
    builder, streams = warps("A", "B", "P")
    halves = [Slot(f"half {i}", 32, "m", (32 * i,)) for i in range(2)]
    streams[2].load(FULL, [Slot("whole", 64, "m")])
    for stream, half in zip(streams[:readers], halves, strict=False):
        stream.wait(FULL, 0)
        stream.read(half)
        stream.write(half)
        stream.read(half)
    return builder.build()


def test_a_slot_that_is_read_in_parts_is_read() -> None:
    assert check(_halves(readers=2), orders=20) == []
    assert [x.text for x in check(_halves(readers=1))] == ["slot whole: content number 1 is not read by anyone"]


def test_who_reads_what_is_loaded_into_one_slot_need_not_read_what_is_loaded_into_another_of_the_same_bytes() -> None:
    builder, (a, b) = warps("A", "B")
    seen = Mbarrier("seen", 1)
    a.load(FULL, [Slot("for both", 64, "m")])
    for each in (a, b):
        each.wait(FULL, 0)
        each.read(Slot("for both", 64, "m"))
    b.arrive(seen)
    a.wait(seen, 0)
    a.load(FULL, [Slot("for A", 32, "m", (16,))])
    a.wait(FULL, 1)
    a.read(Slot("for A", 32, "m", (16,)))
    assert check(builder.build(), orders=20) == []


@pytest.mark.parametrize("slot", [Slot("s", 0, "m"), Slot("s", 65, "m", (0, 64)), Slot("s", 64, "m", ())])
def test_a_slot_in_shared_memory_must_have_equal_parts(slot: Slot) -> None:
    with pytest.raises(ValueError, match="a slot in m must have equal parts of a byte or more, got Slot"):
        regions([slot])


def test_bytes_that_slots_share_are_counted_once() -> None:
    builder, (a,) = warps("A")
    for slot in (Slot("one", 64, "m"), Slot("other", 64, "m", (-16, 48)), Slot("own", 8), ACC):
        a.read(slot)
    assert builder.build().smem_bytes == 16 + 64 + 16 + 8


def _groups(threads: int, registers: int) -> Program:
    builder = Builder("small")
    builder.actor("A", threads, registers)
    return builder.build()


def _memory(size: int) -> Program:
    """One slot read by A behind a load, whose mbarrier takes eight bytes."""
    builder, (a,) = warps("A")
    a.load(FULL, [Slot("s", size - 8)])
    a.wait(FULL, 0)
    a.read(Slot("s", size - 8))
    return builder.build()


def _shared(identities: tuple[int, int]) -> Program:
    builder, (a,) = warps("A")
    for name, identity in zip(("one", "two"), identities, strict=True):
        a.bar_sync(NamedBarrier(name, identity, 32))
    return builder.build()


def _counted(threads: int) -> Program:
    builder, (a, b) = warps("A", "B")
    barrier = NamedBarrier("turn", 1, threads)
    a.bar_arrive(barrier)
    if threads > 32:
        b.bar_arrive(barrier)
    return builder.build()


def _stored(size: int) -> Program:
    builder, (a,) = warps("A")
    a.tma_store(S, size)
    a.store_wait()
    return builder.build()


def _reallocated(registers: int) -> Program:
    builder = Builder("small")
    builder.actor("A", 128, registers)
    builder.actor("B", 32, 24)
    return builder.build()


class Limit(NamedTuple):
    """A program beyond a limit, what is said of it, and one at the limit."""

    beyond: Program
    kind: str
    text: str
    within: Program


LIMITS = (
    Limit(_groups(256, 257), "footprint", "65792 registers, an SM has 65536", _groups(256, 256)),
    Limit(_memory(232449), "footprint", "232449 bytes of shared memory, a CTA has 232448", _memory(232448)),
    Limit(_groups(1056, 24), "footprint", "1056 threads, a CTA has at most 1024", _groups(1024, 24)),
    Limit(_shared((0, 16)), "barrier", "named barrier two has id 16, legal are 0 to 15", _shared((0, 15))),
    Limit(_shared((0, 17)), "barrier", "named barrier two has id 17, legal are 0 to 15", _shared((0, 15))),
    Limit(_shared((-1, 15)), "barrier", "named barrier one has id -1, legal are 0 to 15", _shared((0, 15))),
    Limit(_shared((3, 3)), "barrier", "named barriers one and two share id 3", _shared((3, 4))),
    Limit(_counted(48), "barrier", "named barrier turn counts 48 threads, not warps", _counted(64)),
    Limit(
        _reallocated(228),
        "footprint",
        "A has 228 registers, setmaxnreg takes multiples of 8 from 24 to 256",
        _reallocated(232),
    ),
    Limit(
        _reallocated(264),
        "footprint",
        "A has 264 registers, setmaxnreg takes multiples of 8 from 24 to 256",
        _reallocated(256),
    ),
    Limit(
        _reallocated(16),
        "footprint",
        "A has 16 registers, setmaxnreg takes multiples of 8 from 24 to 256",
        _reallocated(24),
    ),
    Limit(_stored(65), "footprint", "65 bytes copied to or from slot s of 64", _stored(64)),
)
each_limit = pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.text.replace(" ", "_"))


@each_limit
def test_what_does_not_fit_is_explained_by_its_rule_alone(limit: Limit) -> None:
    assert fits.footprint(limit.beyond, H200) == [(limit.kind, limit.text)]


@each_limit
def test_what_just_fits_is_silent(limit: Limit) -> None:
    assert check(limit.within, H200) == []


def test_single_warps_share_a_warpgroup_and_its_largest_registers() -> None:
    """Three warps of 24, 56 and 24 registers take 128 threads of 56."""
    builder = Builder("small")
    builder.actor("wide", 256, 232)
    for name, registers in (("A", 24), ("B", 56), ("C", 24)):
        builder.actor(name, 32, registers)
    found = fits.footprint(builder.build(), H200)
    assert found == [("footprint", f"{256 * 232 + 128 * 56} registers, an SM has 65536")]


def test_a_load_larger_than_its_slot_is_named() -> None:
    builder, (a,) = warps("A")
    a.load(FULL, [S])
    a.rows[-1] = (*a.rows[-1][:2], 65, *a.rows[-1][3:])
    assert fits.footprint(builder.build(), H200) == [("footprint", "65 bytes copied to or from slot s of 64")]


def _calls(tree: ast.AST, *names: str) -> set[int]:
    """Lines of the calls of methods of these names."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {x.lineno for x in calls if isinstance(x.func, ast.Attribute) and x.func.attr in names}


def test_every_place_that_reports_has_a_case() -> None:
    """A rule is a call of report or race in the checker; one that no program above reaches is not tested."""
    reached: set[int] = set()

    class Seen(Checker):
        def report(self, kind: str, text: str) -> None:
            reached.add(sys._getframe(1).f_lineno)
            super().report(kind, text)

        def race(self, slot: int, first: str, second: str, why: str = "", kind: str = "race") -> None:
            reached.add(sys._getframe(1).f_lineno)
            super().race(slot, first, second, why, kind)

    for rule in RULES:
        Seen(rule.program(faulty=True)).run()
    source = Path(inspect.getfile(Checker)).read_text(encoding="utf-8")
    rules = _calls(ast.parse(source), "report", "race")
    assert len(rules) >= 17
    assert rules <= reached


def test_every_limit_has_a_case() -> None:
    """A limit is a message in the module, and a message is a formatted string."""
    tree = ast.parse(inspect.getsource(fits))
    formats = [node.format_spec for node in ast.walk(tree) if isinstance(node, ast.FormattedValue)]
    messages = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) and node not in formats]
    assert len(messages) >= 7
    for message in messages:
        constant = [part.value for part in message.values if isinstance(part, ast.Constant)]
        assert any(all(part in limit.text for part in constant) for limit in LIMITS), constant
