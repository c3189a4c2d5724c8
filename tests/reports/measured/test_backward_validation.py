"""Backward times of any kernel by name: errors are those put in, and the committed table is what is simulated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem
from fa3_reports.bench_rows import read_rows
from fa3_reports.measured import backward_validation as validation
from fa3_simulator.backward_choice import schedule_for
from fa3_simulator.clock import busy_shares, clock_under_load
from fa3_simulator.machine import load
from fa3_simulator.run import estimate

H200 = load("h200")
REPORTS = Path(__file__).parents[3] / "reports" / "h200" / "simulator" / "backward"
ROW = dict.fromkeys(validation.COLUMNS, "") | {
    "source": "here",
    "kernel": "gluon",
    "part": "all",
    "batch": "1",
    "seqlen": "1024",
    "nheads": "16",
    "nheads_kv": "16",
    "head_dim": "128",
    "causal": "True",
    "turns": "free",
    "milliseconds": "1",
    "sm_mhz": "1600",
    "clock": "counted",
}


def write(path: Path, *rows: dict[str, str]) -> Path:
    lines = [",".join(validation.COLUMNS), *(",".join(row[name] for name in validation.COLUMNS) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_error_is_what_was_put_in() -> None:
    predicted = validation.compare(ROW, H200).predicted
    found = validation.compare(ROW | {"milliseconds": str(predicted / 1.25)}, H200)
    assert found.error == pytest.approx(0.25)
    assert found.tflops == pytest.approx(5 * 16 * 1024**2 * 128 / (predicted / 1.25) / 1e9)


def test_part_tile_heads_turns_and_clock_of_a_row_are_simulated() -> None:
    predicted = validation.compare(ROW, H200).predicted
    slower = (
        {"clock": "assumed", "sm_mhz": "1200"},
        {"nheads_kv": "4"},
        {"turns": "ascending"},
    )
    for changes in slower:
        assert validation.compare(ROW | changes, H200).predicted > predicted, changes
    assert validation.compare(ROW | {"part": "main"}, H200).predicted < predicted
    upstream = ROW | {"kernel": "flash3"}
    shipped, lower = (validation.compare(upstream | {"tile": tile}, H200).predicted for tile in ("", "48x128"))
    assert lower > shipped


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"part": "half"}, "line 2: part must be main or all, got 'half'"),
        ({"clock": "guessed"}, "line 2: clock must be counted or assumed, got 'guessed'"),
        ({"causal": "1"}, "line 2: causal must be True or False, got '1'"),
        ({"kernel": "cudnn"}, "a backward schedule is known of flash3, gluon, got cudnn"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(changes: dict, message: str, tmp_path: Path, capsys) -> None:
    path = write(tmp_path / "measured.csv", ROW | changes)
    assert validation.main([str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_without_a_column_or_a_row_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "other.csv").write_text("kernel,ms\ngluon,1\n")
    assert validation.main([str(tmp_path / "other.csv")]) == 2
    assert validation.main([str(write(tmp_path / "empty.csv"))]) == 2
    err = capsys.readouterr().err
    assert "column source is missing" in err
    assert "has no row to compare" in err


@pytest.mark.nightly
def test_the_committed_table_is_what_is_simulated_now() -> None:
    """Of the rows in any order; those in turns take seconds each."""
    table = (REPORTS / "validation.md").read_text()
    rows = [row for row in validation.read(REPORTS / "measured.csv") if row["turns"] == "free"]
    assert len(rows) > 70
    for row in rows:
        found = validation.compare(row, H200)
        assert f"| {found.shape} | {found.clock} |" in table
        assert f"| {found.predicted:.4g} | {found.error:+.1%} |" in table, found


def test_the_tables_are_written_and_printed(tmp_path: Path, capsys) -> None:
    path, out = write(tmp_path / "measured.csv", ROW, ROW | {"source": "there"}), tmp_path / "table.md"
    assert validation.main([str(path), "--markdown", str(out)]) == 0
    printed = capsys.readouterr().out
    assert out.read_text() == printed
    assert printed.count("| here | gluon |") == 2
    assert "2 measured backward passes" in printed


# Kernel in the bench, family, head dims: the mean error of cycles that docs/simulate.md states, in percent.
AT_OTHER_HEAD_DIMS = [
    *(("gluon", "gluon", d, d, error) for d, error in ((80, 3.1), (96, 2.7), (160, 1.4), (192, 1.8))),
    ("gluon", "gluon", 192, 128, 7.5),
    *(("flash3.dew", "flash3", d, d, error) for d, error in ((80, 18.4), (96, 18.4), (160, 12.8), (192, 13.5))),
]


@pytest.mark.parametrize(("kernel", "family", "head_dim", "head_dim_v", "error"), AT_OTHER_HEAD_DIMS)
def test_at_other_head_dims_cycles_and_clocks_are_as_far_off_as_the_page_says(
    kernel: str, family: str, head_dim: int, head_dim_v: int, error: float
) -> None:
    cycles, clocks = [], []
    for row in read_rows(REPORTS.parents[1] / "speed" / "backward_widths" / "bench.jsonl"):
        width = int(row["head_dim_v"] or row["head_dim"])
        if (row["kernel"], int(row["head_dim"]), width, row["status"]) != (kernel, head_dim, head_dim_v, "ok"):
            continue
        sizes = [int(row[name]) for name in ("batch", "nheads", "nheads_kv", "seqlen_q", "seqlen_k", "head_dim")]
        causal = row["causal"] == "True"
        problem = AttentionProblem(*sizes, head_dim_v=head_dim_v, dtype=row["dtype"], causal=causal)
        schedule = schedule_for(problem, family)
        counted = float(row["burst_sm_mhz"])
        cycles.append(estimate(problem, schedule, H200, counted).cycles / float(row["burst_cycles"]) - 1)
        shares = busy_shares(estimate(problem, schedule, H200))
        clocks.append(clock_under_load(H200, row["dtype"], *shares) / counted - 1)
    assert len(cycles) == 6
    assert 100 * np.abs(cycles).mean() == pytest.approx(error, abs=0.1)
    assert -0.1 < min(clocks) <= max(clocks) < 0
