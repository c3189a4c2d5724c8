"""A burst has the clock that was sampled while it ran, and cycles are its time at that clock."""

from __future__ import annotations

import csv
import json
import math
from datetime import datetime

import pytest

from fa3_reports.measured.clock_samples import COLUMNS, from_line
from fa3_reports.measured.clocked import joined, main, read_rows

ROW = {
    "piece": "clock",
    "kernel": "matmul",
    "shape": "n=4096",
    "flops": 2e12,
    "hbm_bytes": 1e9,
    "hot_ms": [2.0, 2.1, 1.9],
    "cold_ms": [3.0],
    "begin_s": 100.0,
    "end_s": 101.0,
    "error": math.nan,
}


def _samples(clocks: dict[float, float]) -> list[dict[str, float]]:
    return [
        {"unix_s": at, "sm_mhz": clock, "power_w": 600.0, "energy_j": 650 * at, "reasons": 0.0}
        for at, clock in clocks.items()
    ]


def test_cycles_are_the_median_time_at_the_median_clock_of_the_burst() -> None:
    found = joined(ROW, _samples({99.9: 1980, 100.01: 1980, 100.2: 1500, 100.5: 1510, 100.9: 1490, 101.1: 345}))
    assert (found["sm_mhz"], found["samples"]) == ("1500", 3)
    assert found["cycles"] == "3000000"
    assert found["tflops"] == "1000.00"


def test_power_comes_from_the_energy_counter_where_there_is_one() -> None:
    with_counter = _samples({100.2: 1500, 100.5: 1510})
    assert joined(ROW, with_counter)["power_w"] == "650.0"
    without = [each | {"energy_j": math.nan} for each in with_counter]
    assert joined(ROW, without)["power_w"] == "600.0"


def test_a_burst_without_a_sample_has_no_cycles() -> None:
    found = joined(ROW, _samples({99.0: 1980}))
    assert (found["samples"], found["cycles"]) == (0, "nan")


@pytest.mark.parametrize(
    ("line", "clock", "power"),
    [
        ("2026/11/30 06:17:30.123, 1755, 612.34", 1755.0, 612.34),
        ("2026/11/30 06:17:30.123, 345 MHz, 74.10 W\n", 345.0, 74.1),
        ("2026/11/30 06:17:30.123, 1980, [N/A]", 1980.0, math.nan),
    ],
)
def test_a_line_of_nvidia_smi_is_a_sample(line: str, clock: float, power: float) -> None:
    sample = from_line(line)
    assert sample.unix_s == datetime(2026, 11, 30, 6, 17, 30, 123000).timestamp()
    assert sample.sm_mhz == clock
    assert sample.power_w == pytest.approx(power, nan_ok=True)


def test_what_is_no_sample_is_named() -> None:
    with pytest.raises(ValueError, match="Unable to determine"):
        from_line("Unable to determine the device handle for GPU0: Unknown Error")


def test_a_table_is_written_from_files_that_were_cut_off(tmp_path) -> None:
    rows, samples, target = (tmp_path / name for name in ("rows.jsonl", "samples.csv", "out.csv"))
    rows.write_text(f"a line of a log\n{json.dumps(ROW)}\n")
    samples.write_text(f"{','.join(COLUMNS)}\n100.5,1500,600,65000,0\n100.6,15")
    main(rows, samples, target)
    (row,) = csv.DictReader(target.read_text().splitlines())
    assert (row["kernel"], row["sm_mhz"], row["cycles"]) == ("matmul", "1500", "3000000")
    assert len(list(read_rows(rows))) == 1
