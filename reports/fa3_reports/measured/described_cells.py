"""Described kernels of others beside their measured times: ``python -m fa3_reports.measured.described_cells``.

``cells.toml`` in a folder of descriptions names for each timed size its description and its settings;
reports/h200/schedules/clocked.csv has the times, with the SM clock that was sampled meanwhile. A launch is simulated at
that clock. What a table of descriptions and the times are bound to is :mod:`fa3_reports.device.keys`.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fa3_simulator.described import timed
from fa3_simulator.description import described
from fa3_simulator.machine import load

ROOT = Path(__file__).parents[3]
MEASURED = ROOT / "reports/h200/schedules/clocked.csv"
UNSEEN = ROOT / "docs/schedules/unseen"  # described before anybody here had timed them
SECOND = ROOT / "docs/schedules/unseen2"  # likewise, six more, when the errors of the first were known


class Cell(NamedTuple):
    """A timed size of a kernel: milliseconds measured with operands in L2, and simulated at the same SM clock."""

    kernel: str
    case: str
    mhz: float
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def cells(folder: Path = UNSEEN) -> Iterator[Cell]:
    """Yield the cells of a folder of descriptions, in the order of its ``cells.toml``."""
    machine = load("h200")
    with MEASURED.open(encoding="utf-8") as file:
        rows = {(row["kernel"], row["shape"]): row for row in csv.DictReader(file)}
    for cell in tomllib.loads((folder / "cells.toml").read_text(encoding="utf-8"))["cell"]:
        row = rows[cell["kernel"], cell["case"]]
        schedule = described(folder / cell["file"])[cell["entry"]](**cell["set"])
        mhz = float(row["sm_mhz"])
        seconds = timed(schedule, machine, mhz).estimate.seconds
        yield Cell(cell["kernel"], cell["case"], mhz, float(row["hot_ms"]), seconds * 1e3)


def main() -> None:
    for folder in (UNSEEN, SECOND):
        found = list(cells(folder))
        for cell in found:
            print(
                f"{cell.kernel:28} {cell.case:58} {cell.measured:8.4f} ms, simulated {cell.simulated:8.4f} at "
                f"{cell.mhz:.0f} MHz: {cell.error:+.1%}"
            )
        errors = np.abs([cell.error for cell in found])
        print(f"{len(found)} cells: median {np.median(errors):.1%}, largest {errors.max():.1%}")


if __name__ == "__main__":
    main()
