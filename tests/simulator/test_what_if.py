"""What would be faster if something were free: that thing alone, and the more so the longer it takes."""

from __future__ import annotations

import pytest

from fa3_kernels.plan.config import Config
from fa3_simulator.costs import SCALARS, costs
from fa3_simulator.cta import kernel_of
from fa3_simulator.engine import simulate
from fa3_simulator.machine import CONSTANTS, Machine, load
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.what_if import FREE, costs_without, speedups

CONFIGS = (Config(), Config(head_dim=64, tile_m=192), Config("e4m3", promotion_interval=128))
H200 = load("h200")


def faster(config: Config, machine: Machine) -> dict[str, float]:
    program = kernel_of(config).program([TileBlocks(6)])
    return speedups(program, machine, None, simulate(program, costs(program, machine)))


def scaled(machine: Machine, names: tuple[str, ...], factor: float) -> Machine:
    return machine.with_values({name: machine[name] * factor for name in names})


def test_everything_that_can_be_free_is_a_constant_or_a_cost_and_only_one_thing() -> None:
    known = set(CONSTANTS) | set(SCALARS)
    named = [name for names in FREE.values() for name in names]
    assert set(named) <= known
    assert len(named) == len(set(named))


@pytest.mark.parametrize("thing", ["exponentials", "synchronisation"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.dtype}_d{c.head_dim}")
def test_what_is_free_already_makes_nothing_faster(config: Config, thing: str) -> None:
    assert faster(config, scaled(H200, FREE[thing], 0.0))[thing] == 1.0


@pytest.mark.parametrize(
    ("thing", "names"),
    [
        ("exponentials", FREE["exponentials"]),
        ("copies", ("memory_latency_ns",)),
        ("synchronisation", FREE["synchronisation"]),
    ],
)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.dtype}_d{c.head_dim}")
def test_the_longer_a_thing_takes_the_more_it_is_worth(config: Config, thing: str, names: tuple[str, ...]) -> None:
    assert faster(config, scaled(H200, names, 4.0))[thing] > 1.05 * faster(config, H200)[thing]


def test_free_exponentials_leave_the_cost_of_copies_and_free_copies_that_of_exponentials() -> None:
    program = kernel_of(CONFIGS[0]).program([TileBlocks(6)])
    plain, no_exp, no_copy = (
        costs(program, H200),
        *(costs_without(x, program, H200, None) for x in ("exponentials", "copies")),
    )
    assert (no_exp.scalars == plain.scalars).all()
    assert not (no_exp.work == plain.work).all()
    assert (no_copy.work == plain.work).all()
    changed = {name for name, a, b in zip(SCALARS, plain.scalars, no_copy.scalars) if a != b}
    assert changed == set(FREE["copies"]) - {"trip_cycles"}
