"""Rules of the checker for what only described kernels do: cp.async, several operands, and open commit groups.

A program of one fault gets the message of its rule, and the nearest correct one gets none."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from fa3_simulator.footprint import NOT_PROVEN
from fa3_simulator.hazards import Checker, check
from fa3_simulator.machine import load
from fa3_simulator.program import Builder, Gemm, Mbarrier, NamedBarrier, Program, Slot, Stream
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.unbounded import prove
from tests.simulator.explore import explore

H200 = load("h200")
S, K, ACC = Slot("s", 64), Slot("k", 64), Slot("acc", 0)
FULL, EMPTY = Mbarrier("full", 1), Mbarrier("empty", 1)
GEMM = Gemm("g", 1, 64, 16, False)
OPEN = GEMM._replace(is_open=True)


def product_of_a(stream: Stream) -> None:
    stream.issue(GEMM, S, K, ACC)


def product_of_b(stream: Stream) -> None:
    stream.issue(GEMM, None, S, ACC)


def product_of_another(stream: Stream) -> None:
    stream.operand(S)
    stream.issue(GEMM, None, K, ACC)


def store(stream: Stream) -> None:
    stream.tma_store(S, 64)
    stream.store_wait()


def read(stream: Stream) -> None:
    stream.read(S)


ALL = NamedBarrier("all", 1, 128)
USES = {
    read: "read s",
    product_of_a: "issue g",
    product_of_b: "issue g",
    product_of_another: "operand s",
    store: "store",
}
each_use = pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)


def copied(use: Callable[[Stream], None], *between: str, threads: int = 128, where: str = "behind") -> Program:
    """Threads copy a slot by cp.async, wait for it, and use it behind a fence, a barrier or both."""
    builder = Builder("copied")
    stream = builder.actor("A", threads, 24)
    stream.load(FULL, [S], by_threads=True)
    if where == "in front":
        stream.bar_sync(ALL)
    stream.wait(FULL, 0)
    if "fence" in between:
        stream.fence()
    if "barrier" in between and where == "behind":
        stream.bar_sync(ALL)
    use(stream)
    stream.wgmma_wait(0)
    return builder.build()


def texts(program: Program) -> list[str]:
    return [hazard.text for hazard in Checker(program).run()]


def nth(use: Callable, rows: int) -> str:
    return f"slot s: A ({USES[use]}, row {rows}) is not ordered after A (load full, row 1)"


@each_use
def test_what_threads_copied_is_clean_behind_fence_and_barrier(use: Callable) -> None:
    assert check(copied(use, "fence", "barrier"), H200, orders=20) == []


@each_use
def test_what_threads_copied_needs_a_barrier_before_they_use_it(use: Callable) -> None:
    why = ": no barrier between cp.async.wait_group and the read"
    assert texts(copied(use, "fence")) == [nth(use, 4) + why]


@each_use
def test_a_barrier_in_front_of_the_wait_for_a_copy_does_not_count(use: Callable) -> None:
    why = ": no barrier between cp.async.wait_group and the read"
    assert texts(copied(use, "fence", "barrier", where="in front")) == [nth(use, 5) + why]


@pytest.mark.parametrize("use", [use for use in USES if use is not read], ids=lambda use: use.__name__)
def test_what_threads_copied_is_not_proven_without_a_proxy_fence_before_wgmma_and_tma_read_it(use: Callable) -> None:
    (found,) = check(copied(use, "barrier"))
    assert found.kind == NOT_PROVEN  # PTX asks for one; compilers leave it out
    assert found.text == nth(use, 4) + ": no proxy fence between them"


def test_threads_read_what_they_copied_without_a_proxy_fence() -> None:
    assert check(copied(read, "barrier"), orders=20) == []


@each_use
def test_a_single_warp_needs_no_barrier_for_what_it_copied(use: Callable) -> None:
    assert check(copied(use, "fence", threads=32), orders=20) == []


def test_a_copy_is_not_there_before_it_was_waited_for() -> None:
    builder = Builder("early")
    stream = builder.actor("A", 128, 24)
    stream.load(FULL, [S], by_threads=True)
    stream.read(S)
    assert texts(builder.build()) == ["slot s: A (read s, row 2) is not ordered after A (load full, row 1)"]


def passed_on(*, is_published: bool) -> Program:
    """Warpgroups copy a half each and read the other's, behind a barrier over both or over each alone."""
    builder = Builder("halves")
    halves = [Slot(f"half {i}", 64) for i in range(2)]
    for i in range(2):
        stream, full = builder.actor(f"warpgroup {i}", 128, 24), Mbarrier(f"full {i}", 1)
        stream.load(full, [halves[i]], by_threads=True)
        stream.wait(full, 0)
        stream.bar_sync(NamedBarrier("both", 1, 256) if is_published else NamedBarrier(f"own {i}", 1 + i, 128))
        for half in halves:
            stream.read(half)
    return builder.build()


def test_what_others_copied_needs_a_barrier_over_both() -> None:
    assert check(passed_on(is_published=True), orders=20) == []
    assert any("half 0: warpgroup 1 (read" in hazard.text for hazard in check(passed_on(is_published=False), orders=4))


def replaced(*, by_tma: bool) -> Program:
    """A warp reads what a warpgroup copied, and may load it anew: then the warpgroup reads that."""
    builder, slot = Builder("replaced"), Slot("s", 64, readers=1)
    a, producer = builder.actor("A", 128, 24), builder.actor("P", 32, 24)
    a.load(FULL, [slot], by_threads=True)
    a.wait(FULL, 0)
    a.arrive(EMPTY)
    producer.wait(EMPTY, 0)
    producer.read(slot)
    if by_tma:
        again = Mbarrier("again", 1)
        producer.fence()
        producer.load(again, [slot])
        a.wait(again, 0)
    a.read(slot)
    return builder.build()


def test_a_copy_that_was_replaced_asks_for_no_barrier() -> None:
    assert check(replaced(by_tma=True), orders=20) == []
    assert any("cp.async.wait_group" in hazard.text for hazard in check(replaced(by_tma=False)))


def ring_of_copies(*, has_barrier: bool) -> Callable[[list[TileBlocks]], Program]:
    """FlashAttention-2's loop: the next block is copied while the last is multiplied, between two barriers."""

    def make(tiles: list[TileBlocks]) -> Program:
        builder = Builder("copies")
        warps = builder.actor("warps", 128, 255)
        stages = [(Slot(f"k[{i}]", 64), Mbarrier(f"group {i}", 1)) for i in range(2)]
        blocks = sum(tile.blocks for tile in tiles)
        for step in range(blocks + 1):
            if step < blocks:
                slot, group = stages[step % 2]
                warps.load(group, [slot], by_threads=True)
            if step:
                slot, group = stages[(step - 1) % 2]
                warps.wait(group, (step - 1) // 2)
                if has_barrier or step != 4:
                    warps.bar_sync(ALL)
                warps.read(slot)
                warps.bar_sync(ALL)
        return builder.build()

    return make


def test_copies_of_any_number_of_blocks_are_proved() -> None:
    proof = prove(ring_of_copies(has_barrier=True))
    assert (proof.findings, proof.is_complete, proof.is_undecided) == ([], True, False)
    (found,) = prove(ring_of_copies(has_barrier=False)).findings
    assert "slot k[1]: warps (read k[1], row" in found.text
    assert "cp.async.wait_group" in found.text


def written(use: Callable[[Stream], None], threads: int, *, meets: bool) -> Program:
    builder = Builder("written")
    stream = builder.actor("A", threads, 24)
    stream.write(S)
    stream.fence()
    if meets:
        stream.bar_sync(ALL)
    use(stream)
    stream.wgmma_wait(0)
    return builder.build()


def test_every_warp_reads_all_of_b_so_that_what_the_warpgroup_wrote_needs_a_barrier() -> None:
    """Of A each warp reads its own rows, which it may have written."""
    why = "A (issue g, row 2) is not ordered after A (write s, row 0): no barrier over the warpgroup between them"
    assert texts(written(product_of_b, 128, meets=False)) == [f"slot s: {why}"]
    assert texts(written(product_of_b, 128, meets=True)) == []
    assert texts(written(product_of_b, 32, meets=False)) == []
    assert texts(written(product_of_a, 128, meets=False)) == []


def overwritten(products: list[tuple[Gemm, Slot]], in_flight: int, others: list[Slot] = []) -> Program:  # noqa: B006
    """Products read slots, and another warp loads S anew when a wait leaves so many groups in flight."""
    builder = Builder("overwritten")
    a, b = builder.actor("A", 128, 240), builder.actor("B", 32, 24)
    for slot in others:
        a.operand(slot)
    for gemm, slot in products:
        a.issue(gemm, None, slot, ACC)
    a.wgmma_wait(in_flight)
    a.arrive(EMPTY)
    b.wait(EMPTY, 0)
    b.write(S)
    return builder.build()


class Groups(NamedTuple):
    """Products in order, the groups that a wait may leave in flight, and whether S is read no more then."""

    products: list[tuple[Gemm, Slot]]
    in_flight: int
    is_safe: bool
    others: list[Slot] = []  # noqa: RUF012


GROUPS = (
    Groups([(GEMM, S)], 0, True),
    Groups([(GEMM, S)], 1, False),
    Groups([(GEMM, K)], 0, True, [S]),
    Groups([(GEMM, K)], 1, False, [S]),
    Groups([(GEMM, K), (GEMM, K)], 1, True, [S]),  # an operand is that of the next product
    Groups([(OPEN, S), (GEMM, K)], 0, True),
    Groups([(OPEN, S), (GEMM, K)], 1, False),  # both are one group
    Groups([(GEMM, S), (OPEN, K), (GEMM, K)], 1, True),
    Groups([(GEMM, S), (OPEN, K), (GEMM, K)], 2, False),
    Groups([(OPEN, S)], 0, False),  # never committed
    Groups([(OPEN, K), (GEMM, K), (GEMM, K)], 1, True, [S]),
    Groups([(GEMM, S)] + [(GEMM, K)] * 7, 7, True),
    Groups([(GEMM, S)] + [(GEMM, K)] * 6, 7, False),
)


@pytest.mark.parametrize("groups", GROUPS, ids=range(len(GROUPS)))
def test_a_slot_is_free_when_the_group_of_its_last_product_is_waited_for(groups: Groups) -> None:
    """By clocks, and in every interleaving."""
    program = overwritten(groups.products, groups.in_flight, groups.others)
    found = check(program, orders=8)
    assert all(hazard.kind == "race" and "slot s: B (write s" in hazard.text for hazard in found)
    assert (found == []) == groups.is_safe
    assert any("overwrites it" in x.text for x in explore(program).findings) == (not groups.is_safe)


def test_the_accumulator_of_an_open_product_is_not_read_before_its_group_is_waited_for() -> None:
    def program(in_flight: int) -> Program:
        builder, other = Builder("accumulators"), Slot("other", 0)
        stream = builder.actor("A", 128, 240)
        stream.issue(OPEN, None, S, ACC)
        stream.issue(GEMM, None, K, other)
        stream.wgmma_wait(in_flight)
        stream.read(ACC)
        return builder.build()

    assert check(program(0)) == []
    assert texts(program(1)) == [
        "slot acc: A (read acc, row 3) is not ordered after A (issue g, row 0), which may still run"
    ]


def test_an_operand_is_read_only_when_its_load_has_landed() -> None:
    def program(*, waits: bool) -> Program:
        builder = Builder("operand")
        stream = builder.actor("A", 128, 240)
        stream.load(FULL, [S])
        if waits:
            stream.wait(FULL, 0)
        product_of_another(stream)
        stream.wgmma_wait(0)
        return builder.build()

    assert check(program(waits=True)) == []
    assert texts(program(waits=False)) == ["slot s: A (operand s, row 2) is not ordered after A (load full, row 1)"]
    assert any("reads it while a load is under way" in x.text for x in explore(program(waits=False)).findings)


def stages_of_one_consumer(*, readers: int, skips: bool = False) -> Callable[[list[TileBlocks]], Program]:
    """CUTLASS's pingpong: two consumers take tiles in turn, so that a stage is read by whoever has the tile."""

    def make(tiles: list[TileBlocks]) -> Program:
        builder = Builder("pingpong")
        producer = builder.actor("producer", 32, 24)
        consumers = [builder.actor(f"consumer {i}", 128, 240) for i in range(2)]
        stages = [
            (Slot(f"k[{i}]", 64, readers=readers), Mbarrier(f"full {i}", 1), Mbarrier(f"empty {i}", 1))
            for i in range(2)
        ]
        turn = [Mbarrier(f"turn {i}", 1) for i in range(2)]
        step = 0
        for number, tile in enumerate(tiles):
            mine = consumers[number % 2]
            if number:
                mine.wait(turn[number % 2], (number - 1) // 2)
            for block in range(tile.blocks):
                slot, full, empty = stages[step % 2]
                if step >= 2:
                    producer.wait(empty, step // 2 - 1)
                producer.load(full, [slot])
                mine.wait(full, step // 2)
                if not (skips and number == 2 and block == 0):
                    mine.read(slot)
                mine.arrive(empty)
                step += 1
            mine.arrive(turn[(number + 1) % 2])
        return builder.build()

    return make


def test_a_stage_that_belongs_to_one_of_two_consumers_is_proved_by_the_number_of_its_readers() -> None:
    proof = prove(stages_of_one_consumer(readers=1))
    assert (proof.findings, proof.is_complete) == ([], True)
    told = check(stages_of_one_consumer(readers=0)([TileBlocks(2), TileBlocks(2)]))
    assert any("is not read by consumer" in x.text for x in told)
    missed = prove(stages_of_one_consumer(readers=1, skips=True))
    assert any("is not read by anyone" in x.text for x in missed.findings)
