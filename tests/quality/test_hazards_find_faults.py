"""Barrier bugs that real kernels had (facts: timing rows of the bug museum), planted one by one: each must be found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fa3_reports.mutation.schedule_faults import PLANTED, dropped, gluon, mailbox, one_arrival_more
from fa3_simulator.hazards import check
from fa3_simulator.machine import load
from fa3_simulator.program import Builder, NamedBarrier, Program

H200 = load("h200")
ORDERS = 1  # shows what all do


@pytest.mark.parametrize(
    ("row", "what", "plant"), PLANTED, ids=[f"{row}-{what.replace(' ', '_')}" for row, what, _ in PLANTED]
)
def test_planted_hazard_is_found(row: int, what: str, plant: Callable[[], Program]) -> None:
    found = check(plant(), H200, orders=ORDERS)
    assert found, f"museum row {row}, {what}: nothing found in {ORDERS} orders"


def test_the_mailbox_with_its_empty_barrier_is_clean() -> None:
    assert check(mailbox(waits=True), H200, orders=ORDERS) == []


def test_a_race_names_slot_writer_and_reader() -> None:
    found = check(dropped(gluon(), "producer", "wait k_empty", 0), orders=ORDERS)
    text = " ".join(f.text for f in found)
    assert "slot k[" in text
    assert "producer" in text
    assert "consumer" in text


def test_a_deadlock_names_barrier_and_actors() -> None:
    found = [f for f in check(one_arrival_more(), orders=1) if f.kind == "deadlock"]
    assert "producer at wait k_empty[0]" in found[0].text


def test_named_barriers_beyond_the_sixteenth_are_refused() -> None:
    builder = Builder("many")
    stream = builder.actor("alone", 32, 24)
    for identity in range(17):
        stream.bar_sync(NamedBarrier(f"b{identity}", identity, 32))
    assert [f.text for f in check(builder.build(), H200)] == ["named barrier b16 has id 16, legal are 0 to 15"]
