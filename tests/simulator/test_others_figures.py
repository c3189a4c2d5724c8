"""Kernels of others as docs/schedules describes them, beside figures that were measured or published.

No constant is fitted to them. Times are at the clock that a launch is predicted to run at under load. Figures of
fast.cu are those of its author's worklog (H100 SXM, 4096 cubed), and the cycles that its kernel 3 counts; that of
FlashMLA is from its README (H800). All others were measured on an H200.
"""

from __future__ import annotations

import statistics
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fa3_simulator import engine
from fa3_simulator.costs import TICKS, costs
from fa3_simulator.described import TimedLaunch, timed
from fa3_simulator.description import Description, Schedule, described, tiles_of
from fa3_simulator.footprint import misfits
from fa3_simulator.machine import load
from fa3_simulator.schedules import TileBlocks

PAGES = Path(__file__).parents[2] / "docs/schedules"
LARGEST_MHZ = 1800.0
TENSOR = {"fp16": 0.42, "bf16": 0.34}


class Cell(NamedTuple):
    """A measured figure: TFLOP/s, or microseconds where ``unit`` says so."""

    name: str
    measured: float
    page: str
    kernel: str
    values: dict[str, Any] = {}  # noqa: RUF012, nobody changes it
    dtype: str = "bf16"
    machine: str = "h200"
    unit: str = "TFLOP/s"


def _ladder(number: str, measured: float, kernel: str, **values: Any) -> Cell:
    return Cell(f"fast.cu {number}", measured, "fast_cu", kernel, values, machine="h100")


LADDER = (
    _ladder("2", 317, "one_warpgroup", bm=64, bn=64, registers=64),
    _ladder("3", 423, "one_warpgroup"),
    _ladder("4", 498, "queue", bn=128, stages=5, consumers=1, persistent=False, registers=192, addresses=26),
    _ladder("5", 631, "queue", persistent=False),
    _ladder("6", 660, "queue"),
    _ladder("7", 704, "fast_queue"),
    _ladder("8", 734, "fast_queue", cluster=2),
    _ladder("9", 747, "fast_queue", cluster=2, clears=False, addresses=27),
    _ladder("10", 758, "stored_by_tma", mended=False),
    _ladder("11", 764, "stored_by_tma", mended=False),
)


def _tutorial(batch: int, seqlen: int, measured: float, d: int = 128) -> Cell:
    values = {"batch": batch, "heads": 2048 // d, "seqlen": seqlen, "d": d}
    return Cell(f"tutorial d{d} {batch} x {seqlen}", measured, "attention", "tutorial", values, "fp16")


def _attention(kernel: str, dtype: str, measured: float, **values: Any) -> Cell:
    name = " ".join((kernel, dtype, *(f"{key}={value}" for key, value in values.items())))
    return Cell(name, measured, "attention", kernel, values, dtype)


def _decode(batch: int, keys: int, parts: int, measured: float) -> Cell:
    values = {"batch": batch, "keys": keys, "parts": parts}
    return Cell(f"decode {batch} x {keys}", measured, "attention", "decode", values, unit="us")


ONE_16K = {"batch": 1, "seqlen": 16384}
CELLS = (
    *LADDER,
    _tutorial(32, 512, 392),
    _tutorial(16, 1024, 458),
    _tutorial(8, 2048, 495),
    _tutorial(4, 4096, 516),
    _tutorial(4, 8448, 540),
    _tutorial(1, 16384, 558),
    _tutorial(4, 4096, 440, d=64),
    _attention("flash2", "fp16", 372),
    _attention("flash2", "fp16", 362, **ONE_16K),
    _attention("flash2", "fp16", 326, **ONE_16K, causal=True),
    _attention("flash3", "fp16", 722),
    _attention("flash3", "fp16", 700, **ONE_16K),
    _attention("flash3", "bf16", 786),
    _attention("flash3", "bf16", 763, **ONE_16K),
    Cell("FlashMLA", 660, "flashmla", "flashmla", {"keys": 16384}, machine="h100"),
    _decode(32, 8192, 1, 258.5),
    _decode(4, 65536, 4, 258),
    _decode(1, 65536, 15, 80),
)
TUTORIALS = {  # its autotuner's grid
    "bm": (64, 128),
    "bn": (32, 64, 128),
    "stages": (2, 3, 4),
}


@cache
def page(name: str) -> dict[str, Description]:
    return described(PAGES / f"{name}.py")


@cache
def clock(schedule: Schedule, machine: str, dtype: str) -> float:
    """Return the predicted clock of a launch in MHz, from what its longest CTA keeps busy in steady state."""
    found = timed(schedule, load(machine), LARGEST_MHZ)
    tile = tiles_of(schedule.launch().tiles)[0]
    short = schedule.resident([TileBlocks(min(tile.blocks, 24))] * 2, found.cta.kernel.together).build()
    busy = engine.simulate(short, costs(short, load(machine), LARGEST_MHZ))
    tensor = found.estimate.tensor_cycles / max(found.estimate.cta_cycles, found.estimate.hbm_cycles)
    activity = 0.74 + TENSOR[dtype] * tensor + 0.16 * busy.busy["smem"] / busy.end
    return min(LARGEST_MHZ, LARGEST_MHZ * activity**-0.62)


def at_clock(schedule: Schedule, cell: Cell) -> TimedLaunch:
    return timed(schedule, load(cell.machine), clock(schedule, cell.machine, cell.dtype))


@cache
def simulated(index: int) -> tuple[TimedLaunch, float]:
    """Return what a cell's launch takes and the figure in the cell's unit; of a tutorial, that of its best tile."""
    cell = CELLS[index]
    chosen = product(*TUTORIALS.values()) if cell.kernel == "tutorial" else [()]
    found = []
    for some in chosen:
        values = cell.values | dict(zip(TUTORIALS, some, strict=False))
        if not some or values["bn"] <= values["d"]:
            schedule = page(cell.page)[cell.kernel](**values)
            if not some or not any("shared memory" in text for text in misfits(schedule.cta([1]), load(cell.machine))):
                found.append(at_clock(schedule, cell))
    best = min(found, key=lambda one: one.estimate.seconds)
    return best, best.tflops if cell.unit == "TFLOP/s" else best.estimate.seconds * 1e6


def error(index: int) -> float:
    """Return by how much a figure is simulated too fast, as a fraction."""
    cell = CELLS[index]
    ratio = simulated(index)[1] / cell.measured
    return (ratio if cell.unit == "TFLOP/s" else 1 / ratio) - 1


KNOWN = {  # farther off than LARGEST, and why
    "fast.cu 2": "L2 gives each SM 55 bytes a cycle here, where 42 are measured if all tiles are small",
    "fast.cu 4": "cuda::barrier: arrivals of many threads cost nothing, as measured; how it polls is not known",
}
LARGEST = 0.12
MEDIAN = 0.05
LEAST_TAU = 0.89  # kernels 7 to 9 are measured 2 and 4 % apart and simulated within 0.2 %
STORED = 0.15  # likewise, of a store of two bytes a thread, which nobody measured
STAMPS = (1415 + 703, 4572)  # cycles of a block and of the store, as kernel 3 counts them on an H100
STAMPED_MHZ = 1755.0


@pytest.mark.nightly
@pytest.mark.parametrize("index", range(len(CELLS)), ids=[cell.name for cell in CELLS])
def test_a_figure_is_near_what_was_measured(index: int) -> None:
    cell = CELLS[index]
    found, figure = simulated(index)
    said = f"{figure:.1f} {cell.unit} at {found.estimate.clock_mhz:.0f} MHz, measured {cell.measured}"
    assert (abs(error(index)) > LARGEST) == (cell.name in KNOWN), said


@pytest.mark.nightly
def test_half_of_the_figures_are_within_five_percent() -> None:
    assert statistics.median(abs(error(index)) for index in range(len(CELLS))) <= MEDIAN


@pytest.mark.nightly
def test_the_kernels_of_the_ladder_are_in_their_order() -> None:
    """By Kendall's tau-b, in which kernels that are simulated alike count half."""
    pairs = [(i, j) for j in range(len(LADDER)) for i in range(j)]
    gains = [simulated(j)[1] - simulated(i)[1] for i, j in pairs]  # measured, each is faster than the one before
    untied = sum(gain != 0 for gain in gains)
    tau = sum((gain > 0) - (gain < 0) for gain in gains) / (len(pairs) * untied) ** 0.5
    assert tau >= LEAST_TAU


def _stamped(together: int) -> tuple[float, float]:
    """Return the cycles of a block, and of the store, of kernel 3 with so many CTAs on an SM, which store at once."""
    program = page("fast_cu")["one_warpgroup"]().resident([64, 64, 64], together).build()
    spans = engine.simulate(program, costs(program, load("h100"), STAMPED_MHZ), records=True).spans
    cycles = {"block": 0.0, "store": 0.0}
    for span in spans:
        said = program.describe(span.actor, span.row)
        if said not in ("memset d", "start of a CTA") and "end of the CTA" not in said:
            cycles["store" if said in ("reduce", "rows of C") else "block"] += (span.stop - span.start) / TICKS
    return cycles["block"] / (3 * 64 * together), cycles["store"] / (3 * together)


@pytest.mark.nightly
def test_a_block_and_the_store_of_kernel_3_take_the_cycles_that_it_counts() -> None:
    """Of the two CTAs of an SM, which here store at the same time, the store is counted alone."""
    assert _stamped(2)[0] == pytest.approx(STAMPS[0], rel=LARGEST)
    assert _stamped(1)[1] == pytest.approx(STAMPS[1], rel=STORED)
