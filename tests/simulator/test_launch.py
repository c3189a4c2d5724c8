"""How tiles of a launch are handed out, and what its CTAs wait for each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa3_kernels.plan.config import Config
from fa3_simulator.cta import TimedCta, kernel_of
from fa3_simulator.launch import Launch
from fa3_simulator.machine import load
from fa3_simulator.run import timed
from fa3_simulator.schedules import TileBlocks

H200 = load("h200")
CTA = TimedCta(kernel_of(Config()), H200, 1980.0)


@pytest.mark.parametrize(
    ("order", "tile_cost", "longest"),
    [
        ("in turn", 0.6, [5, 1]),  # every second tile
        ("free first", 0.6, [5]),  # the other CTA has three tiles of 1.6
        ("free first", 10.0, [5, 1]),  # 15 and 11, so that the third tile and not the fourth goes to the other CTA
        ("static", 10.0, [1, 1, 1]),  # handed out as at 0.6, and then 33 is more than 15
    ],
)
def test_tiles_go_in_turn_or_to_the_cta_that_is_free_first(order, tile_cost, longest) -> None:
    assert Launch([5, 1, 1, 1], order=order).longest(2, tile_cost) == tuple(map(TileBlocks, longest))


def test_a_launch_takes_its_longest_cta_and_what_that_waits_for_others() -> None:
    launch = Launch([4, 4, 2])
    found = timed(launch, CTA, 2)
    assert found.tiles == (TileBlocks(4), TileBlocks(2))
    assert found.cta_cycles == CTA.run(found.tiles).cta
    assert found.cycles == found.cta_cycles + H200["launch_cycles"] + H200["drain_cycles"]
    block, start = CTA.tile_times(CTA.alone)
    given = []
    waiting = replace(launch, waits=lambda *arguments: (given.append(arguments), (arguments[-1] + 5.0, 100.0))[1])
    later = timed(waiting, CTA, 2)
    assert given == [(block, start, found.tiles, found.cta_cycles)]
    assert (later.cta_cycles, later.cycles) == (found.cta_cycles + 5, found.cycles + 105)
    bare = timed(replace(launch, drains=False, around_cycles=7.0), CTA, 2)
    assert (bare.cycles, bare.around_cycles) == (found.cycles - H200["drain_cycles"] + 7, 7)


def test_a_launch_ends_when_hbm_has_moved_its_bytes() -> None:
    found = timed(Launch([1], hbm_bytes=1e9), CTA, 132)
    assert found.hbm_cycles == pytest.approx(1e9 / (H200["hbm_bytes_per_ns"] * H200["sms"]) * 1.98)
    assert found.main_cycles == found.hbm_cycles + H200["launch_cycles"] + H200["drain_cycles"]


def test_a_launch_without_tiles_takes_no_cta() -> None:
    assert timed(Launch([]), CTA, 132).cta_cycles == 0
