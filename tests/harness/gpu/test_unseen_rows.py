"""Rows of grid ``unseen``, timed after the model of decision 0017 was frozen, and seen when that of 0018 was chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fa3_simulator.machine import load
from fa3verify.gpu.bench.cells import select
from fa3verify.gpu.timings import read
from fa3verify.gpu.validation import validate

REPORTS = Path(__file__).parents[3] / "reports"
# Machine, rows, mean error, largest, bands of 0.1 points.
SETS = (("h100", 15, 0.081, 0.200), ("h200", 91, 0.058, 0.162))


@pytest.mark.parametrize(("machine", "rows", "error", "largest"), SETS, ids=[one[0] for one in SETS])
def test_unseen_rows_are_as_far_off_as_the_note_says(machine: str, rows: int, error: float, largest: float) -> None:
    found = validate(REPORTS / machine / "simulator" / "unseen" / "bench.csv", load(machine))
    every = found["groups"][-1]
    assert (every["group"], every["rows"]) == ("all", rows)
    assert every["models"]["simulated"]["mape"] == pytest.approx(error, abs=0.001)
    assert every["models"]["simulated"]["max"] == pytest.approx(largest, abs=0.001)
    assert every["models"]["simulated"]["mape"] < 0.4 * every["models"]["closed form"]["mape"]
    assert np.median([r["regret"][0] for r in found["rankings"]]) < 0.01


@pytest.mark.parametrize("machine", [one[0] for one in SETS])
def test_unseen_rows_are_of_the_committed_shapes(machine: str) -> None:
    committed = {cell.problem for cell in select("unseen", ["fp16", "bf16", "e4m3"])}
    rows, _ = read(REPORTS / machine / "simulator" / "unseen" / "bench.csv")
    assert {row.problem for row in rows} <= committed
