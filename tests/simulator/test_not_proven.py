"""Between a hazard and none: an arrival that clocks cannot keep in its round, where nothing goes wrong in any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fa3_simulator.footprint import Hazard
from fa3_simulator.hazards import ORDERS, Checker, check, judged
from fa3_simulator.program import Builder, Gemm, Mbarrier, Program, Slot
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.unbounded import Proof, prove
from tests.simulator.explore import explore

Make = Callable[[list[TileBlocks]], Program]
RANKS = (0, 1)
GEMM = Gemm("A B", 1, 64, 16, False)


def cluster(stages: int, consumers: int, *, halves: bool = False, short: bool = False, own_only: bool = False) -> Make:
    """A GEMM of two CTAs that share B by multicast: rank 0 loads it for both (the eighth kernel of fast.cu), or each
    loads one of its ``halves`` (CUTLASS).

    A stage goes back to the producers of both CTAs, or to the ``own_only``; ``short`` expects too few bytes in one.
    """

    def make(tiles: list[TileBlocks]) -> Program:
        builder = Builder("cluster")
        names = [[f"CTA {rank} {{}}[{i}]".format for i in range(stages)] for rank in RANKS]
        full = [[Mbarrier(name("full"), 1) for name in some] for some in names]
        empty = [[Mbarrier(name("empty"), consumers * (1 if own_only else 2)) for name in some] for some in names]
        parts = {
            x: [[Slot(name(x), 64, readers=consumers) for name in some] for some in names] for x in ("A", "B0", "B1")
        }
        uses = [(use, use % stages) for use in range(sum(tile.blocks for tile in tiles))]
        for rank in RANKS:
            for number in range(consumers):
                consumer = builder.actor(f"CTA {rank} consumer {number}", 128, 240)
                for use, i in uses:
                    consumer.wait(full[rank][i], use // stages)
                    consumer.operand(parts["B1"][rank][i])
                    consumer.issue(GEMM, parts["A"][rank][i], parts["B0"][rank][i], Slot(f"C {rank} {number}", 0))
                    consumer.wgmma_wait(0)
                    for other in (rank,) if own_only else RANKS:
                        consumer.arrive(empty[other][i])
            producer = builder.actor(f"CTA {rank} producer", 32, 24)
            mine = (f"B{rank}",) if halves else ("B0", "B1")[: 2 * (1 - rank)]
            for use, i in uses:
                if use >= stages:
                    producer.wait(empty[rank][i], use // stages - 1)
                producer.expect(full[rank][i], 64 if short and rank else 3 * 64)
                producer.load_only(full[rank][i], [parts["A"][rank][i]])
                for part in mine:
                    for other in RANKS:
                        producer.load_only(full[other][i], [parts[part][other][i]], multicast=2)
        return builder.build()

    return make


def test_a_multicast_by_one_rank_alone_is_neither_a_race_nor_proved() -> None:
    """A consumer may arrive a round early at the empty barrier of rank 1: then all have read already, as rank 0 has
    loaded again. Clocks do not count, so they cannot know that it does no harm."""
    proof = prove(cluster(1, 1))
    text = "CTA 0 consumer 0 (arrive CTA 1 empty[0], row 11) is not ordered after the end of the round before"
    assert proof.findings == [("not proven", f"mbarrier CTA 1 empty[0]: {text}")]
    assert proof.is_undecided
    assert not proof.is_complete


@pytest.mark.parametrize(("stages", "consumers", "blocks"), [(1, 1, 4), (1, 2, 2)])
def test_no_interleaving_of_such_a_multicast_conflicts(stages: int, consumers: int, blocks: int) -> None:
    """Which is why it is not called a race."""
    found = explore(cluster(stages, consumers)([TileBlocks(blocks)]))
    assert (found.findings, found.is_complete) == ([], True)


def test_a_multicast_in_halves_is_proved() -> None:
    proof = prove(cluster(3, 2, halves=True))
    assert (proof.findings, proof.is_complete, proof.is_undecided) == ([], True, False)


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("fault", ["short", "own_only"])
def test_mistakes_of_a_cluster_are_races_whether_or_not_the_rest_is_proved(fault: str, *, halves: bool) -> None:
    make = cluster(1, 1, halves=halves, **{fault: True})
    proof = prove(make)
    assert {hazard.kind for hazard in proof.findings} & {"race", "deadlock"}
    assert not proof.is_undecided
    assert "not proven" not in {hazard.kind for hazard in proof.findings}
    assert explore(make([TileBlocks(2)])).findings


def early(*, reads: bool = True, late: int = 0) -> Program:
    """B may arrive twice in one round, so that C goes on before A arrives; it matters if C reads what A writes.

    B begins as many steps ``late``, so that it must run far ahead.
    """
    builder, slot, both, seen = Builder("early"), Slot("s", 64), Mbarrier("both", 2), Mbarrier("seen", 1)
    a, b, c = (builder.actor(name, 32, 24) for name in "ABC")
    a.write(slot)
    a.arrive(both)
    a.wait(seen, 0)
    a.arrive(both)
    for _ in range(late):
        b.mark("late")
    b.arrive(both)
    b.arrive(both)
    c.wait(both, 0)
    if reads:
        c.read(slot)
    c.arrive(seen)
    return builder.build()


def test_what_goes_wrong_in_another_order_than_the_first_is_found_and_reported_as_such() -> None:
    """Where the first actor that can goes on always, C reads late enough."""
    program = early()
    first = Checker(program).run()
    assert {hazard.kind for hazard in first} == {"not proven"}
    found = judged(first, [program])
    race = "slot s: C (read s, row 1) is not ordered after A (write s, row 0)"
    assert Hazard("race", race) in found
    assert {hazard.kind for hazard in found} == {"race", "barrier"}
    assert {hazard.text for hazard in first} <= {hazard.text for hazard in found}
    assert any("in another order" in hazard.text for hazard in explore(program).findings)


def test_the_same_arrivals_are_not_proven_where_nothing_depends_on_them() -> None:
    program = early(reads=False)
    assert {hazard.kind for hazard in check(program)} == {"not proven"}
    assert explore(program).findings == []


def test_orders_in_which_an_actor_runs_far_ahead_are_tried() -> None:
    """Where each step is drawn alone, nobody does forty steps while another does none."""
    program = early(late=40)
    drawn = [Checker(program, seed).run() for seed in range(ORDERS)]
    assert {hazard.kind for found in drawn for hazard in found} == {"not proven"}
    assert "race" in {hazard.kind for hazard in check(program)}


def test_other_findings_are_not_tried_again() -> None:
    race = Hazard("race", "a race")
    assert judged([race], iter(())) == [race]
    assert judged([], iter(())) == []
    assert judged([Hazard("not proven", "x")], iter(())) == [("not proven", "x")]
    assert judged([Hazard("not proven", "x"), race], iter(())) == [("barrier", "x"), race]


@pytest.mark.parametrize(
    ("kinds", "is_undecided"), [((), False), (("race",), False), (("not proven",), True), (("barrier", "race"), False)]
)
def test_a_proof_is_undecided_if_all_that_it_found_is_not_proven(kinds: tuple[str, ...], *, is_undecided: bool) -> None:
    proof = Proof([Hazard(kind, "x") for kind in kinds], 1, 1, not kinds)
    assert proof.is_undecided == is_undecided
