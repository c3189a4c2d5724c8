"""What the CTAs of a launch wait for each other at HBM: pinned by hand, and laws of whole launches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_kernels.plan.config import Config, default_config
from fa3_reference.problem import AttentionProblem
from fa3_simulator.contention import LaunchTiles, Steps, ends
from fa3_simulator.forward_launch import launched_tiles, moved_bytes, takes_from_counter
from fa3_simulator.machine import load
from fa3_simulator.run import estimate

H200 = load("h200")
STEPS = Steps(1000.0, 50.0, 10.0, 2, 2, 1000, 500, 400)


Tile = tuple[int, int, int]


def launch(tiles: list[Tile], assigned: list[list[int]], ctas: int = 0) -> LaunchTiles:
    """Tiles of every CTA, or taken from a counter by ``ctas``."""
    mine = np.array([i for each in assigned for i in each], np.int64)
    return LaunchTiles(np.array(tiles, np.int64), mine, np.cumsum([0, *map(len, assigned)]), ctas or len(assigned))


def test_one_cta_takes_its_first_loads_blocks_and_tile() -> None:
    # Q at 10 bytes a cycle 50, behind it K 100 more, and the latency; two blocks; a tile.
    assert ends(launch([(0, 0, 2)], [[0]]), STEPS, 100.0, 10.0) == 150 + 10 + 2 * 1000 + 50


def test_a_cta_alone_is_not_served_faster_than_it_can_load() -> None:
    # K is asked for with Q: 1000 bytes at 10 a cycle.
    assert ends(launch([(0, 0, 2)], [[0]]), STEPS, 10.0, np.inf) == 100 + 10 + 2 * 1000 + 50


def test_of_two_ctas_the_second_waits_for_what_the_first_loads() -> None:
    apart = launch([(0, 0, 2), (1, 0, 2)], [[0], [1]])
    # Q, O and both slots of K and V of the first CTA are 4900 bytes, Q and K of the second 1500: 640 cycles.
    assert ends(apart, STEPS, 100.0, 10.0) == 640 + 10 + 2 * 1000 + 50


def test_keys_that_another_cta_loads_come_from_l2() -> None:
    shared = launch([(0, 0, 2), (0, 0, 2)], [[0], [1]])
    # The second loads Q alone, behind the 4900 bytes of the first: 540 cycles.
    assert ends(shared, STEPS, 100.0, 10.0) == 540 + 10 + 2 * 1000 + 50


def test_tiles_from_a_counter_go_to_the_cta_that_is_free() -> None:
    tiles: list[Tile] = [(0, 0, 4), (0, 0, 1), (0, 0, 1), (0, 0, 1)]
    free = STEPS._replace(block=100.0, latency=0.0)
    assert ends(launch(tiles, [], ctas=2), free, np.inf, np.inf) == 3 * (100 + 50) == 4 * 100 + 50
    assert ends(launch(tiles, [[0, 2], [1, 3]]), free, np.inf, np.inf) == 4 * 100 + 50 + 100 + 50


def test_one_slot_for_q_loads_it_when_the_tile_before_has_ended() -> None:
    two = launch([(0, 0, 1), (0, 0, 1)], [[0, 1]])
    found = [ends(two, STEPS._replace(crosses_tiles=crosses), 10.0, np.inf) for crosses in (True, False)]
    assert found[1] - found[0] == 50 + 10  # Q at 10 bytes a cycle, and its latency


def problem(seqlen: int, **change: object) -> AttentionProblem:
    return replace(AttentionProblem(32, 16, 16, seqlen, seqlen, 128, causal=True), **change)


@pytest.mark.parametrize("family", ["gluon", "flash3"])
def test_a_short_launch_waits_more_where_hbm_is_slower_and_never_without_limit(family: str) -> None:
    shape = problem(512)
    config = default_config(shape, family=family)

    def cycles(bytes_per_ns: float) -> float:
        machine = H200.with_values({"hbm_bytes_per_ns": bytes_per_ns})
        return estimate(shape, config, machine).cycles

    slow, fast, unlimited = (cycles(rate) for rate in (23.2, 34.8, 1e9))
    assert slow > fast > unlimited
    assert slow - unlimited > 0.05 * unlimited
    alone = estimate(shape, config, H200).cta_cycles + H200["launch_cycles"] + H200["drain_cycles"]
    assert unlimited == pytest.approx(alone, rel=1e-6)


def test_a_long_dense_launch_hardly_waits() -> None:
    shape = problem(8192, batch=2, causal=False)
    found = estimate(shape, default_config(shape), H200)
    assert found.cycles - found.cta_cycles < 0.005 * found.cycles


@pytest.mark.parametrize("family", ["gluon", "flash3"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_launch_asks_hbm_for_every_tensor_once(family: str, causal: bool) -> None:
    shape = problem(512, batch=4, causal=causal, nheads=8, nheads_kv=4)
    config = default_config(shape, family=family, num_splits=1)
    tiles = launched_tiles(shape, config, 132)
    assert len(tiles.tiles) == 4 * 8 * -(-512 // config.tile_m)
    assert sorted(tiles.mine) == list(range(len(tiles.tiles) if family == "gluon" else 0))
    half, rows = config.tile_n * config.head_dim * 2, config.tile_m * config.head_dim * 2
    steps = Steps(0.0, 0.0, 0.0, 2, 2, half, rows, rows)
    keys = len({(head, block) for head, first, blocks in tiles.tiles for block in range(first, first + blocks)})
    asked = 2 * keys * half + 2 * len(tiles.tiles) * rows
    assert asked >= moved_bytes(shape, config)
    assert asked - len(tiles.tiles) * rows <= ends(tiles, steps, np.inf, 1.0) <= asked  # nobody waits for the last O
    assert keys == 4 * 4 * -(-512 // config.tile_n)


def test_parts_of_the_keys_are_loaded_where_they_begin() -> None:
    shape, config = AttentionProblem(1, 8, 8, 1, 2048, 128), Config(num_splits=3)
    tiles = launched_tiles(shape, config, 132)
    assert {tuple(tile.tolist()) for tile in tiles.tiles if tile[0] == 5} == {(5, 0, 6), (5, 6, 6), (5, 12, 4)}


@pytest.mark.parametrize(("family", "is_taken"), [("gluon", False), ("flash3", True), ("flash4", False)])
def test_causal_tiles_of_persistent_ctas_that_are_not_ours_come_from_a_counter(family: str, is_taken: bool) -> None:
    """Our order is decided before the launch, and a kernel with a CTA for each tile has no counter."""
    config = Config(family=family)
    assert takes_from_counter(problem(512), config) == is_taken
    assert not takes_from_counter(problem(512, causal=False), config)
    assert not takes_from_counter(problem(512), replace(config, num_splits=2))
