"""Speed of the simulator: run with ``pytest --benchmark-only``; without it each runs once."""

from __future__ import annotations

from fa3_kernels.plan.config import Config
from fa3_reference.problem import AttentionProblem
from fa3_simulator import engine
from fa3_simulator.costs import costs
from fa3_simulator.machine import load
from fa3_simulator.run import estimate
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.tune import candidates, misfit
from tests.simulator.programs import forward

H200 = load("h200")


def test_one_tile_of_48_blocks(benchmark) -> None:
    program = forward(Config(), [TileBlocks(48)])
    tables = costs(program, H200)
    assert benchmark(engine.simulate, program, tables).end > 0


def test_a_hundred_schedules(benchmark) -> None:
    """A tenth of the thousand that must take less than 30 s on one core."""
    fitting = [s for s in candidates(AttentionProblem(1, 1, 1, 1, 1, 128)) if not misfit(s, H200)][:100]
    shapes = iter(range(10**6))

    def sweep() -> int:
        shape = AttentionProblem(1, 16, 16, 8192 + 128 * next(shapes), 8192, 128, causal=True)  # never simulated before
        return len([estimate(shape, s, H200) for s in fitting])

    assert benchmark.pedantic(sweep, rounds=2) == 100
