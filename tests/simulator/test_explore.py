"""Every interleaving of short programs: shipped ones are clean; what occurs in some order, vector clocks saw in one."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from fa3_kernels.plan.config import Config
from fa3_simulator.hazards import check
from fa3_simulator.program import Actor, Builder, Gemm, Mbarrier, NamedBarrier, Op, Program, Slot
from fa3_simulator.schedules import TileBlocks
from tests.sampling import sampled
from tests.simulator.explore import explore
from tests.simulator.programs import forward

SHORT = ([TileBlocks(4)], [TileBlocks(2), TileBlocks(1)])
SHIPPED = (
    Config(),
    Config(pingpong=False),
    Config(intra_wg_overlap=False),
    Config(family="flash3"),
    Config(dtype="e4m3"),
    Config(pingpong=False, warp_specialized=False),
    Config(head_dim=256, tile_n=64),
    Config(dtype="e4m3", promotion_interval=128),
    Config(tile_n=96, softmax_stages=3),
    Config(family="flash3", tile_n=96, pingpong=False, softmax_stages=3),
)
SYNCHRONISING = {Op.ARRIVE, Op.WAIT, Op.BAR_ARRIVE, Op.BAR_SYNC, Op.WGMMA_WAIT, Op.FENCE, Op.STORE_WAIT}


def without(program: Program, actor: int, row: int) -> Program:
    """The program with one operation left out."""
    actors = list(program.actors)
    old = actors[actor]
    actors[actor] = Actor(old.name, old.threads, old.registers, np.delete(old.ops, row, 0))
    return replace(program, actors=tuple(actors))


QUICK = [(schedule, SHORT[1]) for schedule in (SHIPPED[0], SHIPPED[5])]


@pytest.mark.parametrize(("schedule", "tiles"), sampled(product(SHIPPED, SHORT), QUICK), ids=str)
def test_no_interleaving_of_a_shipped_program_conflicts(schedule: Config, tiles: list[TileBlocks]) -> None:
    found = explore(forward(schedule, tiles))
    assert found.is_complete
    assert found.findings == []
    assert found.states > 1000


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", [SHIPPED[1], SHIPPED[5]], ids=["gluon", "lockstep"])
def test_a_conflict_in_any_order_is_found_by_the_vector_clocks(schedule: Config) -> None:
    program = forward(schedule, [TileBlocks(3)])
    planted = conflicts = 0
    for index, actor in enumerate(program.actors):
        for row, (kind, *_) in enumerate(actor.ops.tolist()):
            if kind in SYNCHRONISING:
                broken = without(program, index, row)
                planted += 1
                if explore(broken, 30_000).findings:
                    conflicts += 1
                    assert check(broken, orders=4), f"{actor.name}: {program.describe(index, row)}"
    assert conflicts > planted / 3


def drawn(seed: int) -> Program:
    """Two warps that use three slots of one memory, which mostly overlap; of most the second waits for the first."""
    rng = random.Random(seed)
    builder, done = Builder("drawn"), Mbarrier("done", 1)
    slots = [Slot(f"s{i}", 32, "m", (rng.choice((0, 16, 32, 48, 64)),)) for i in range(3)]
    streams = [builder.actor(name, 32, 24) for name in rng.sample(("A", "B"), 2)]
    for index, stream in enumerate(streams):
        meets = rng.randrange(3)
        for number in range(3):
            slot, waits = rng.choice(slots), rng.random() < 0.7
            if number == meets and seed % 8:
                stream.wait(done, 0) if index else stream.arrive(done)
            match rng.choice(("write", "read", "wgmma", "store")):
                case "write":
                    stream.write(slot)
                    stream.fence()
                    stream.bar_sync(NamedBarrier(f"own {index}", 1 + index, 32))
                case "read":
                    stream.read(slot)
                case "wgmma":
                    stream.issue(Gemm("g", 1, 64, 16, True), None, slot, Slot(f"sum {index}", 0))
                    stream.wgmma_wait(0 if waits else 1)
                case "store":
                    stream.tma_store(slot, 32)
                    stream.store_wait(0 if waits else 1)
        stream.store_wait()
    return builder.build()


def test_a_conflict_over_bytes_that_slots_share_is_found_by_the_vector_clocks() -> None:
    conflicts = [seed for seed in range(200) if explore(drawn(seed)).findings]
    assert 100 < len(conflicts) < 180
    assert [seed for seed in conflicts if not check(drawn(seed))] == []


def test_a_deadlock_of_one_order_is_found() -> None:
    """Two actors meet at two barriers in opposite orders."""
    builder = Builder("crossed")
    first, second = NamedBarrier("a", 1, 256), NamedBarrier("b", 2, 256)
    for name, order in (("one", (first, second)), ("two", (second, first))):
        stream = builder.actor(name, 128, 100)
        for barrier in order:
            stream.bar_sync(barrier)
    found = explore(builder.build())
    waits = "one at wait a (row 0), where two would arrive; two at wait b (row 0), where one would arrive"
    assert [f.text for f in found.findings] == [f"circle of waits: {waits}"]


def test_the_search_says_when_it_stopped_early() -> None:
    found = explore(forward(Config(), [TileBlocks(4)]), limit=100)
    assert not found.is_complete
    assert found.states == pytest.approx(100, abs=5)
