"""Problems drawn by a seed: the list is what the seed draws, and errors are told of what was timed."""

from __future__ import annotations

import json

import numpy as np

from fa3_reports.bench.cells import DRAWN
from fa3_reports.bench.results import SCHEMA
from fa3_reports.measured import drawn_cells
from fa3_reports.stored import read_csv


def test_the_list_of_problems_is_what_the_seed_draws():
    assert DRAWN.read_text().splitlines()[1:] == drawn_cells.drawn()


def test_every_launch_of_a_known_schedule_was_predicted():
    wanted = [(each.cell.key, each.kernel) for cell in drawn_cells.cells() for each in drawn_cells.launched(cell)]
    rows = read_csv(DRAWN.with_name("predicted.csv"), ("cell", "kernel", "cycles"))
    assert [(row["cell"], row["kernel"]) for row in rows] == wanted
    assert len({cell for cell, _ in wanted}) == sum(drawn_cells.COUNTS.values())


def test_a_kernel_that_took_twice_as_long_is_simulated_half_too_fast(tmp_path):
    cell = next(cell for cell in drawn_cells.cells() if cell.operation == "backward")
    ours = next(drawn_cells.launched(cell))
    row = drawn_cells.results.Measured(
        "gluon", "ok", burst_ms=1.0, burst_sm_mhz=1800.0, burst_cycles=2 * ours.cycles(1800.0)
    )
    record = drawn_cells.results.CellRecord("now", cell, 1, (row,))
    lines = [{"kind": "run", "schema": SCHEMA, "run": "now"}, record.to_json()]
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ((error, key),) = drawn_cells.errors(path)["gradients, ours"]
    assert key == cell.key
    assert np.isclose(error, -0.5)
