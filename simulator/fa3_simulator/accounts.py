"""Where the cycles of a launch go, by cause, and how two launches differ: the differences add up exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fa3_simulator.costs import TICKS, Costs, costs
from fa3_simulator.cta import EXACT_BLOCKS, SimulatedKernel
from fa3_simulator.engine import Trace, simulate
from fa3_simulator.machine import Machine
from fa3_simulator.overlap import ledger
from fa3_simulator.program import Program
from fa3_simulator.run import Estimate
from fa3_simulator.schedules import TileBlocks

TENSOR = "the tensor core works"
BESIDE = "launch, and waits for HBM and other CTAs"
AROUND = "kernels in front and behind"


class Traced(NamedTuple):
    """A launch: its name, its estimate, and the CTA that ends last, run with a record of its first tiles."""

    name: str
    estimate: Estimate
    program: Program
    tables: Costs
    trace: Trace


def first_blocks(tiles: tuple[TileBlocks, ...], most: int = EXACT_BLOCKS) -> list[TileBlocks]:
    """Return the first tiles, of together at most ``most`` blocks; the last of them may be cut.

    >>> first_blocks((TileBlocks(5), TileBlocks(5, 5)), 7)
    [TileBlocks(blocks=5, masked=0), TileBlocks(blocks=2, masked=2)]
    """
    kept = []
    for tile in tiles:
        blocks = min(tile.blocks, most)
        if blocks:
            kept.append(TileBlocks(blocks, min(tile.masked, blocks)))
        most -= blocks
    return kept


def trace_cta(
    kernel: SimulatedKernel, machine: Machine, clock: float | None, tiles: Sequence[TileBlocks]
) -> tuple[Program, Costs, Trace]:
    """Return the program, costs and trace of one CTA; ``clock`` is in MHz, None for the machine's maximum."""
    program = kernel.program(tiles)
    tables = costs(program, kernel.on(machine, clock or machine["max_clock_mhz"]), clock)
    return program, tables, simulate(program, tables, records=True)


def account(found: Traced) -> dict[str, int]:
    """Return the cycles of a launch by cause, which add up to its cycles, rounded.

    The causes of the longest CTA are those of its first :data:`~fa3_simulator.cta.EXACT_BLOCKS` blocks, scaled to its
    time.
    """
    estimate = found.estimate
    idle = ledger(found.program, found.trace)
    scale = estimate.cta_cycles / found.trace.cycles
    causes = {TENSOR: found.trace.busy["tensor"], **idle}
    cycles = {cause: ticks / TICKS * scale for cause, ticks in causes.items()}
    cycles |= {BESIDE: estimate.main_cycles - estimate.cta_cycles, AROUND: estimate.around_cycles}
    told: dict[str, int] = {}
    sum_so_far = 0.0
    for cause, each in cycles.items():  # each is the growth of the rounded sum, so that their sum is rounded once
        told[cause] = round(sum_so_far + each) - round(sum_so_far)
        sum_so_far += each
    return {cause: each for cause, each in told.items() if each}


def differences(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    """Return how many cycles more the second launch takes by each cause, the largest difference first."""
    causes = dict.fromkeys((*first, *second))
    more = {cause: second.get(cause, 0) - first.get(cause, 0) for cause in causes}
    return {cause: more[cause] for cause in sorted(causes, key=lambda cause: -abs(more[cause])) if more[cause]}
