"""Rows of shapes that no other table has: those of grid ``unseen3`` were read after decision 0021, others before."""

from __future__ import annotations

import numpy as np
import pytest

from fa3_reports.bench.cells import select
from tests.reports.measured.published import check_published, figures, published
from tests.sampling import sampled

# Machine, grid, rows, mean error, largest, bands of 0.1 points.
SETS = (
    ("h100", "unseen", 114, 0.043, 0.137),
    ("h100", "unseen2", 83, 0.041, 0.146),
    ("h100", "unseen3", 71, 0.043, 0.123),
    ("h200", "unseen", 112, 0.043, 0.133),
    ("h200", "unseen2", 81, 0.043, 0.116),
    ("h200", "unseen3", 69, 0.042, 0.128),
)


@pytest.mark.parametrize(("machine", "grid", "rows", "error", "largest"), SETS)
def test_unseen_rows_are_as_far_off_as_the_note_says(
    machine: str, grid: str, rows: int, error: float, largest: float
) -> None:
    found = figures(f"{machine}/simulator/{grid}")
    every = found["groups"][-1]
    assert (every["group"], every["rows"]) == ("all", rows)
    assert every["models"]["simulated"]["mape"] == pytest.approx(error, abs=0.001)
    assert every["models"]["simulated"]["max"] == pytest.approx(largest, abs=0.001)
    assert every["models"]["simulated"]["mape"] < 0.4 * every["models"]["closed form"]["mape"]
    assert np.median([r["regret"][0] for r in found["rankings"]]) < 0.01


@pytest.mark.parametrize(("machine", "grid"), [one[:2] for one in SETS])
def test_unseen_rows_are_of_the_committed_shapes(machine: str, grid: str) -> None:
    committed = {cell.problem for cell in select(grid, ["fp16", "bf16", "e4m3"])}
    assert {x.problem for x in published(f"{machine}/simulator/{grid}")} <= committed


@pytest.mark.parametrize(("machine", "grid"), sampled([one[:2] for one in SETS], [SETS[2][:2], SETS[4][:2]]))
def test_the_simulator_says_today_what_is_published(machine: str, grid: str) -> None:
    check_published(f"{machine}/simulator/{grid}")
