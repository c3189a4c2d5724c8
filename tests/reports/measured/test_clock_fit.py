"""The clock's parameters that ship are those of a fit to the paper's grid alone; other rows say how far off it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fa3_reports.measured import clock_fit
from fa3_reports.measured.timings import MeasuredRow, read
from fa3_simulator.machine import load
from tests.sampling import sampled

REPORTS = Path(__file__).parents[3] / "reports"
H200 = load("h200")
STATED = H200.clock["mean_error"]


def rows_of(folder: str) -> list[MeasuredRow]:
    return read(REPORTS / "h200" / folder / "bench.jsonl")[0]


def test_the_parameters_that_ship_are_those_of_the_fit() -> None:
    rows = rows_of("speed/paper_grid")
    found = clock_fit.fit(rows, H200)
    assert {name: round(value, 3) for name, value in found.items()} == pytest.approx(
        {name: H200.clock[name].value for name in clock_fit.FITTED}, abs=0.002
    )
    assert f"burst_sm_mhz of {len(rows)} rows" in H200.clock["base"].source


def test_clocks_of_shapes_that_nothing_was_fitted_to_are_predicted_as_the_machine_file_states() -> None:
    rows = rows_of("simulator/unseen3")
    sizes = np.abs(clock_fit.clock_errors(rows, H200))
    assert sizes.mean() < 0.013
    assert sizes.max() < 0.06
    assert sizes.mean() == pytest.approx(STATED.value, abs=1e-4)
    assert STATED.source.endswith(f"{len(rows)} rows that nothing was fitted to; the largest is {sizes.max():.3f}")
    constant = np.median([row.clock_mhz for row in rows_of("speed/paper_grid")])
    assert sizes.mean() < 0.5 * np.mean([abs(constant / row.clock_mhz - 1) for row in rows])


OTHERS = {
    **{f"simulator/{name}": rows for name, rows in (("unseen", 112), ("unseen2", 81))},
    **{f"simulator/schedules_{name}": rows for name, rows in (("2k_8k_fp16", 63), ("1k_4k_16k", 270))},
    **{f"simulator/schedules_{name}": rows for name, rows in (("chained", 54), ("2k_8k_e4m3_d256", 96))},
    **{f"speed/{name}": rows for name, rows in (("flash4", 72), ("widths", 174), ("ragged", 48), ("fresh", 144))},
    "speed/sustained": 13,
}


@pytest.mark.parametrize("folder", sampled(OTHERS, ["simulator/unseen", "speed/flash4", "speed/sustained"]))
def test_clocks_of_other_tables_are_as_far_off_as_the_page_says(folder: str) -> None:
    rows = rows_of(folder)
    sizes = np.abs(clock_fit.clock_errors(rows, H200))
    assert len(rows) == OTHERS[folder]
    assert 0.007 <= round(sizes.mean(), 3) <= 0.018
    assert round(sizes.max(), 3) <= 0.083


def test_the_time_at_the_predicted_clock_is_nearer_than_at_the_largest() -> None:
    predicted, largest = np.abs(clock_fit.time_errors(rows_of("simulator/unseen3"), H200)).mean(axis=0)
    assert predicted < 0.05
    assert largest > 0.1


def test_a_fit_finds_the_parameters_that_made_its_clocks() -> None:
    planted = {"base": 0.8, "tensor_fp16": 0.5, "tensor_bf16": 0.3, "tensor_e4m3": 0.2, "smem": 0.25, "exponent": 0.5}
    machine = clock_fit.with_clock(H200, planted)
    rows = rows_of("simulator/unseen3")
    off = clock_fit.clock_errors(rows, machine)
    made = [row._replace(clock_mhz=row.clock_mhz * (1 + error)) for row, error in zip(rows, off, strict=True)]
    again = clock_fit.with_clock(H200, clock_fit.fit(made, H200))
    assert np.abs(clock_fit.clock_errors(made, again)).max() < 1e-4


def test_the_page_has_the_parameters_and_a_line_for_each_file(capsys, tmp_path) -> None:
    path = REPORTS / "h200" / "simulator" / "unseen3" / "bench.jsonl"
    assert clock_fit.main([str(path), str(REPORTS / "h200" / "speed" / "sustained" / "bench.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "exponent = " in out
    assert "| sustained | 13 |" in out
    assert clock_fit.main([str(tmp_path / "none.jsonl")]) == 2
