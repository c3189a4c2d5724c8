"""What the gate sees of graded changes: nothing of none, and what hid from it before; the published figures hold."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.quality.smallest_change import (
    CHANGES,
    DTYPES,
    failing,
    lse_error,
    smallest,
    truncating_quantiser,
)
from tests.sampling import sampled

QUICK = [("fp16", "normal"), ("bf16", "offset_v"), ("bf16", "all_ties")]
NOTE = Path(__file__).parents[2] / "reports" / "notes" / "smallest-change-seen.md"


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_change_fails_nothing(change):
    assert failing(change, "e4m3", "peaky", 0.0) == frozenset()


@pytest.mark.parametrize(("dtype", "family"), sampled(product(DTYPES, ("normal", "offset_v", "all_ties")), QUICK))
def test_twice_the_lse_error_fails(dtype, family):
    assert "lse_rms_error" in failing(lse_error, dtype, family, 1.0)


@pytest.mark.parametrize(("dtype", "family"), sampled(product(DTYPES, ("normal", "offset_v")), QUICK[:2]))
def test_a_truncating_quantiser_fails(dtype, family):
    assert "rel_rmse_unrounded" in failing(truncating_quantiser, dtype, family, 1.0)


@pytest.mark.nightly
def test_the_published_figures_are_what_the_program_finds():
    found = smallest(lse_error, "bf16", "peaky")
    section = NOTE.read_text().partition(f"## {lse_error.__name__}\n")[2].partition("\n## ")[0].splitlines()
    cells = {line.split("|")[1].strip(): line for line in section if line.startswith("| kernel")}
    rules = [cell.strip(" `") for cell in cells["kernel"].split("|")[3:-1]]
    row = next(line for line in section if line.startswith("| twin.bf16 | peaky |"))
    figures = [cell.strip() for cell in row.split("|")[3:-1]]
    assert {r: float(x) for r, x in zip(rules, figures, strict=True) if x} == pytest.approx(found, rel=0.05)
