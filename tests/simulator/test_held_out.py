"""Intervals say nothing where nobody timed such a launch, and places follow them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fa3verify
from fa3_reference.problem import AttentionProblem
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.forward_choice import schedule_for
from fa3_simulator.held_out import TIMED, HeldOut, groups_of, held_out, places
from fa3_simulator.machine import load
from fa3_simulator.what_if import changed

LONG = AttentionProblem(1, 16, 16, 8192, 8192, 128)
STEP = AttentionProblem(32, 32, 8, 1, 8192, 128)
H200 = load("h200")


def group(problem: AttentionProblem, cycles: float = 1e6, **changes: object) -> str | None:
    found = held_out(problem, schedule_for(problem, **changes), H200, cycles)
    return found and found.group


def test_classes_follow_what_is_launched() -> None:
    assert group(LONG) == "gluon 16 bits d128"
    assert group(LONG, pingpong=False) == group(LONG, tile=(128, 96)) == "gluon 16 bits d128, other schedules"
    assert group(replace(LONG, dtype="bf16", causal=True)) == "gluon 16 bits d128"
    assert group(replace(LONG, dtype="e4m3"), family="flash3") == "flash3 e4m3 d128"
    assert group(AttentionProblem(1, 16, 16, 8192, 8192, 96)) == "gluon 16 bits d96, d192"
    assert group(LONG, 350_000) == "gluon 16 bits, 60 to 200 us"
    assert group(LONG, 105_000) == "16 bits, 25 to 60 us"
    assert group(STEP, pack_gqa=True) == "decode, 16 bits"


@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        (replace(LONG, window=(700, 0)), {}),
        (replace(LONG, seqlen_q=256), {"num_splits": 4}),
        (AttentionProblem.varlen((4096, 700), (4096, 700), nheads=8, nheads_kv=8, head_dim=128), {}),
        (STEP, {"pack_gqa": False}),
        (LONG, {"family": "flash3", "tile": (128, 112)}),
        (LONG, {"family": "flash3", "tile": (128, 112), "cycles": 300_000}),
    ],
    ids=["window", "parts", "packed", "heads apart", "another tile of flash3", "such a tile, and short"],
)
def test_what_nobody_timed_has_no_interval(problem: AttentionProblem, changes: dict) -> None:
    assert group(problem, **changes) is None


def test_gradients_in_turns_short_launches_and_other_machines_have_no_interval() -> None:
    assert fa3verify.simulate(LONG, backward=True).held_out
    turns = BackwardSchedule(turns="ascending")
    assert not {known.group for known in TIMED} & {*groups_of(LONG, turns, 1e6)}
    assert group(LONG, 45_000) is None
    for machine in (load("h100"), changed(H200, "mufu", 2), changed(H200, "smem", more=65536)):
        found = fa3verify.simulate(LONG, machine=machine)
        assert found.interval is None
        assert {*found.interval_figures().values()} == {None}


def test_an_interval_has_the_ends_that_its_bounds_say() -> None:
    found = fa3verify.simulate(LONG)
    known = found.held_out
    assert known
    assert found.interval == (found.cycles / known.high, found.cycles / known.low)
    figures = found.interval_figures()
    assert figures["milliseconds_high"] == pytest.approx(figures["cycles_high"] / found.clock_mhz / 1e3)
    assert (figures["interval_class"], figures["interval_rows"]) == (known.group, known.rows)


def test_every_class_has_twenty_rows_and_names_one_thing() -> None:
    assert len({known.group for known in TIMED}) == len(TIMED)
    assert all(known.rows >= 20 and known.low < known.high for known in TIMED)


def test_a_place_is_shared_by_half_of_the_wider_interval() -> None:
    narrow, wide = HeldOut("", 20, 0.99, 1.01), HeldOut("", 20, 0.95, 1.05)
    assert places([(100, narrow), (102, narrow), (106, wide), (112, None)]) == [1, 2, 2, 4]
    assert places([(100, wide), (105, narrow), (105.1, narrow)]) == [1, 1, 3]
    assert places([(100, None), (100, None), (100.1, None)]) == [1, 1, 3]
