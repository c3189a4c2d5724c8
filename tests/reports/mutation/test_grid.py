"""Rules of other projects say what they are said to say, and the grid counts faults and false alarms apart."""

from __future__ import annotations

import numpy as np
import pytest

from fa3_reports.mutation import grid, tables
from fa3_reports.mutation.rules import RULES, Compared

EXACT = np.linspace(-0.5, 0.5, 64).reshape(8, 8)


def seen(error: float, *, is_fp8: bool = False, eager_error: float = 0.0) -> Compared:
    """One element off by ``error``, of an eager kernel by ``eager_error``."""
    got, eager = EXACT.copy(), EXACT.copy()
    got[3, 3] += error
    eager[5, 5] += eager_error
    return Compared(got, EXACT, EXACT, eager, is_fp8)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_accepts_the_truth_and_rejects_nan(rule):
    assert RULES[rule](seen(0.0))
    assert RULES[rule](seen(np.nan)) == (rule == "FlashInfer-Bench, 95 %")  # which lets 5 % be anything


# rule -> (largest error of an element near -0.07 that passes, smallest that does not), from its own tolerances
LIMITS = {
    "KernelBench": (0.0105, 0.0110),
    "FlashInfer-Bench": (0.0099, 0.0101),
    "TransformerEngine": (0.00105, 0.0011),
    "PyTorch assert_close": (7e-5, 9e-5),
    "flash-linear-attention": (0.011, 0.012),
}


@pytest.mark.parametrize("rule", LIMITS)
def test_a_rule_has_the_tolerance_that_its_project_states(rule):
    passes, fails = LIMITS[rule]
    assert RULES[rule](seen(passes))
    assert not RULES[rule](seen(fails))


def test_the_2x_rule_goes_blind_as_the_eager_kernel_errs():
    rule = RULES["flash-attention, 2x"]
    assert not rule(seen(0.1))
    assert rule(seen(0.1, eager_error=0.06))


def test_transformer_engine_accepts_half_a_unit_in_fp8():
    assert RULES["TransformerEngine"](seen(0.49, is_fp8=True))


def test_the_grid_has_234_and_72_faults():
    counted = {
        dtype: sum(cell.dtype == dtype for cell in grid.cells()) * len(grid.FAULTS[dtype]) for dtype in grid.FAULTS
    }
    assert counted == {"fp16": 234, "e4m3": 72}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_cell_of_the_grid_is_caught_and_correct_orders_are_not(monkeypatch):
    monkeypatch.setattr(grid, "QUERIES", 16)
    faults = {name: grid.FAULTS["fp16"][name] for name in ("zeros", "two columns of V exchanged", "P in e4m3")}
    monkeypatch.setattr(grid, "FAULTS", {"fp16": faults})
    verdicts = grid.examine_cell(grid.Cell("fp16", 384, "peaky", 0))
    for verdict in verdicts:
        ours = {
            rule: verdict.rejected[rule] for rule in ("bound", "bound and baseline", "bits") if rule in verdict.rejected
        }
        assert set(ours.values()) == {not verdict.is_correct}, verdict
    page = tables.grid(verdicts)
    assert "| bound | 3 | 3 | 0 |" in page
    assert "| bits | 3 | 3 | - |" in page
