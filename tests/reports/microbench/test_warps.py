"""Arrivals at mbarriers and ``mma.sync``: as many as stated, each phase completes, and figures are read off them."""

from __future__ import annotations

import re

import pytest

from fa3_reports.microbench.arrivals import ROUNDS, arrivals, arrive
from fa3_reports.microbench.constants import Stretches
from fa3_reports.microbench.read_off import cycles_per_arrival, figures, share_of_wgmma
from fa3_reports.microbench.warp_mma import COUNT, FLOPS, PEAK, TILES, tile_steps, warp_mma

ROUND_TRIPS = [each for each in arrivals() if each.name == "mbarrier_arrivals"]


def _threads(text: str, barrier: int) -> int:
    """Count the threads of a warpgroup that arrive at a barrier in one round, from the code."""
    found = 0
    for mask, below, place in re.findall(
        r"and\.b32 %rank, %id, (\d+);\nsetp\.lt\.u32 %mine, %rank, (\d+);.*?bars\+(\d+)", text, re.S
    ):
        if int(place) == 8 * barrier:
            found += sum(lane & int(mask) < int(below) for lane in range(128))
    return found + text.count(f"@%first mbarrier.arrive.shared::cta.b64 _, [%bars+{8 * barrier}]")


@pytest.mark.parametrize("experiment", ROUND_TRIPS, ids=lambda each: "-".join(map(str, each.parameters.values())))
def test_each_phase_of_a_round_trip_completes_with_the_arrivals_of_one_round(experiment) -> None:
    for barrier, count in enumerate(experiment.mbarrier_arrivals):
        assert sum(_threads(body.text, barrier) for body in experiment.bodies) == count


def test_the_threads_that_arrive_are_the_stated_ones() -> None:
    assert [_threads(arrive(0, count).text, 0) for count in (1, 4, 32, 64, 128)] == [1, 4, 32, 64, 128]


@pytest.mark.parametrize(("rows", "columns", "has_rows"), TILES)
def test_a_step_multiplies_the_whole_tile_and_loads_each_fragment_once(rows, columns, has_rows) -> None:
    text = tile_steps(rows, columns, has_rows=has_rows).text
    assert text.count("mma.sync") * FLOPS == 2 * 2 * rows * columns * 16
    assert text.count("ldmatrix") * 16 * 16 == 2 * (columns + (0 if has_rows else rows)) * 16


def test_no_fragment_is_loaded_in_the_step_that_uses_it() -> None:
    for step in tile_steps(64, 64, has_rows=False).text.split("xor.b32 %mine")[1:]:
        loaded = set(re.findall(r"ldmatrix\S+ {(%\w+?_\d+_)0", step))
        lines = [line for line in step.splitlines() if line.startswith("mma")]
        used = {name for line in lines for name in re.findall(r"%[ab]\d_\d+_", line)}
        assert loaded
        assert not loaded & used


def test_every_accumulator_of_a_tile_is_summed_once_a_step() -> None:
    text = tile_steps(32, 64, has_rows=True).text
    sums = re.findall(r"f32 {(%acc\d+),", text)
    assert sorted(sums) == sorted(2 * [f"%acc{4 * i}" for i in range(32 * 64 // 128)])


def _table(name: str, cycles: float, **parameters: object) -> Stretches:
    return {(name, frozenset(parameters.items())): [[cycles]]}


def test_an_arrival_costs_the_slope_of_the_round_trip() -> None:
    few = _table("mbarrier_arrivals", ROUNDS * 130.0, kind="empty", arrivals=2, warpgroups=2)
    most = _table("mbarrier_arrivals", ROUNDS * (130.0 + 254 * 0.6), kind="empty", arrivals=256, warpgroups=2)
    assert cycles_per_arrival("empty", 2)({**few, **most}) == pytest.approx(0.6)


def test_a_share_of_one_is_the_peak_of_four_tensor_cores() -> None:
    table = _table("mma_sync", COUNT * 4 * 2 * FLOPS / PEAK, chains=8, count=COUNT, warpgroups=2)
    assert share_of_wgmma("mma_sync", 2, chains=8)(table) == pytest.approx(1.0)


def test_every_figure_has_its_experiment() -> None:
    table: dict = {}
    for experiment in (*arrivals(), *warp_mma()):
        table[experiment.name, frozenset(experiment.parameters.items())] = [[1000.0]] * len(experiment.bodies)
    assert all(statistic(table) >= 0 for statistic in figures().values())
