"""Operations of a description, and what is found there, are named by file and line."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from fa3_simulator.costs import costs
from fa3_simulator.engine import DeadlockError, simulate
from fa3_simulator.footprint import footprint
from fa3_simulator.hazards import Checker
from fa3_simulator.machine import load
from fa3_simulator.program import Builder, Mbarrier, Slot, Stream
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.unbounded import prove

S, FULL = Slot("s", 64), Mbarrier("full", 1)
FILE = "test_places.py"


def described(describe: Callable[[Stream, Stream], None]) -> Builder:
    builder = Builder("described", __file__)
    describe(builder.actor("A", 32, 24), builder.actor("B", 32, 24))
    return builder


def helper(stream: Stream) -> None:
    stream.read(S)


def line_of(function: Callable, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


SOURCE = """
def read(stream, slot):
    stream.load(full, [slot])

def each(streams, slot):
    [read(stream, slot) for stream in streams]

def build(a, b, slot):
    a.read(slot)
    each([b], slot)
"""


def test_an_operation_stands_where_the_description_adds_it_and_where_its_outermost_function_called_for_it() -> None:
    names: dict = {"full": FULL}
    exec(compile(SOURCE, "/home/somebody/gemm.py", "exec"), names)
    builder = Builder("described", "/home/somebody/gemm.py")
    streams = [builder.actor(name, 32, 24) for name in "AB"]
    names["build"](*streams, S)
    a, b = builder.build().actors
    assert a.lines == ("gemm.py:9",)
    assert b.lines == ("gemm.py:3, called at 10",) * 2


def test_a_call_in_the_outermost_function_of_the_file_has_one_line() -> None:
    builder = Builder("described", __file__)
    builder.actor("A", 32, 24).read(S)
    here = line_of(test_a_call_in_the_outermost_function_of_the_file_has_one_line, ".read(S)")
    assert builder.build().actors[0].lines == (f"{FILE}:{here}",)


def test_programs_that_no_description_wrote_name_rows() -> None:
    builder = Builder("shipped")
    builder.actor("A", 32, 24).read(S)
    (actor,) = builder.build().actors
    assert (actor.lines, actor.place(0)) == ((), "row 0")


def race(a: Stream, b: Stream) -> None:
    a.write(S)
    a.delay("cold_code_cycles")
    b.delay("cold_code_cycles")
    helper(b)


def test_a_race_names_both_lines() -> None:
    program = described(race).build()
    (found,) = Checker(program).run()
    write, read = program.actors[0].lines[0], program.actors[1].lines[1]
    assert found.text == f"slot s: B (read s, {read}) is not ordered after A (write s, {write})"


def test_a_proof_names_the_lines_too() -> None:
    """Though it leaves out what touches nothing shared."""
    program = described(race).build()
    assert prove(lambda _: program, is_persistent=False).findings == Checker(program).run()


def stuck(a: Stream, b: Stream) -> None:
    a.wait(FULL, 0)
    b.read(S)


def test_a_deadlock_names_the_line_of_each_wait() -> None:
    program = described(stuck).build()
    words = f"A at wait full ({program.actors[0].lines[0]}), where nobody will arrive"
    assert [x.text for x in Checker(program).run()] == [words]
    with pytest.raises(DeadlockError, match=f"test_places.py:{line_of(stuck, 'wait')}"):
        simulate(program, costs(program, load("h200")))


def too_large(a: Stream, _: Stream) -> None:
    a.tma_store(S, 65)
    a.store_wait()


def test_a_copy_larger_than_its_slot_names_its_line() -> None:
    program = described(too_large).build()
    text = f"65 bytes copied to or from slot s of 64, {program.actors[0].lines[0]}"
    assert footprint(program, load("h200")) == [("footprint", text)]


def test_a_list_of_tiles_of_a_proof_has_the_lines_of_its_own_program() -> None:
    def make(tiles: list[TileBlocks]) -> Builder:
        builder = Builder("ring", __file__)
        producer, consumer = builder.actor("P", 32, 24), builder.actor("C", 128, 240)
        empty = Mbarrier("empty", 1)
        for step in range(sum(tile.blocks for tile in tiles)):
            if step > 2:
                producer.wait(empty, step)
            producer.load(FULL, [S])
            consumer.wait(FULL, step)
            consumer.read(S)
            consumer.arrive(empty)
        return builder

    proof = prove(lambda tiles: make(tiles).build(), is_persistent=False)
    line = line_of(test_a_list_of_tiles_of_a_proof_has_the_lines_of_its_own_program, "producer.load")
    assert any(f"P (load full, {FILE}:{line}" in x.text for x in proof.findings)
