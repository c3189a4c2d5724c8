"""Counters of launches: rows of the profiler become launches, failures keep their place, and the page is of both."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fa3_kernels.plan.config import default_config
from fa3_reports.bench.cells import Cell
from fa3_reports.measured import counters, overlap, timings
from fa3_reports.measured.counters import METRICS, Launched
from fa3_reports.stored import read_csv
from fa3_simulator.cta import kernel_of
from fa3_simulator.machine import load
from fa3_simulator.roofline import tensor_cycles_per_block
from tests.sampling import sampled

CELL = Cell("paper", "fp16", 1, 1024, 1024, 4, 4, 128, False)
SCHEDULE = {
    "tile_m": 128,
    "tile_n": 128,
    "pingpong": True,
    "overlap": True,
    "warp_specialized": True,
    "promotion_interval": 0,
    "holds_turn": False,
}
OURS = Launched(asdict(CELL), "gluon", "ok", SCHEDULE, 4096)
FAILED = Launched(asdict(CELL), "flash3", "failed: no such file")
THEIRS = Launched(asdict(CELL), "cudnn", "ok")


def printed(*kernels: tuple[str, dict[str, Any]]) -> str:
    """What the profiler writes of kernels, by name and the counters that are not 1."""
    names = ["ID", "Kernel Name", *METRICS.values()]
    rows = [names, [""] * len(names)]
    for i, (kernel, counted) in enumerate(kernels):
        rows.append([str(i), kernel, *(str(counted.get(name, 1)) for name in METRICS)])
    lines = [",".join(f'"{x}"' for x in row) for row in rows]
    return "\n".join(["==PROF== Connected to process 1", *lines, "==PROF== Disconnected"])


def test_what_runs_between_two_marks_is_one_launch() -> None:
    mark = (counters.MARK, {})
    text = printed(
        mark, ("prepare", {"cycles": "1,000"}), ("forward", {"cycles": 2000}), mark, ("other", {"cycles": 5})
    )
    first, second = counters.parse(text)
    assert (first["cycles"], first["gpu_kernels"], second["cycles"], second["gpu_kernels"]) == (3000, 2, 5, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("==ERROR== no permission", "counted nothing: ==ERROR== no permission"),
        (printed(("forward", {})), "forward runs before the first mark"),
        (printed((counters.MARK, {})).replace("dram__bytes_read.sum", "x"), "does not count dram__bytes_read.sum"),
    ],
)
def test_what_is_no_table_of_launches_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        counters.parse(text)


def counted(**changes: float) -> dict[str, float]:
    return dict.fromkeys((*METRICS, "gpu_kernels"), 1.0) | {"cycles": 64000.0, "time_ns": 40000.0} | changes


def write(folder: Path, launches: list[Launched], found: list[dict[str, float]]) -> Path:
    path = folder / "counters.csv"
    path.write_text(counters.table(launches, found))
    return path


def test_a_launch_that_failed_takes_nobody_elses_counters(tmp_path: Path) -> None:
    path = write(tmp_path, [OURS, FAILED, THEIRS], [counted(), counted(tensor_cycles=7.0)])
    found = counters.read(path)
    assert [(line, row["kernel"]) for line, row in found.items()] == [(2, "gluon"), (4, "cudnn")]
    assert (found[2]["tensor_cycles"], found[4]["tensor_cycles"]) == ("1", "7")
    assert (found[2]["burst_ms"], found[2]["burst_sm_mhz"]) == ("0.04", "1600")
    assert counters.cell_of(found[2]) == CELL
    assert read_csv(path)[1]["status"] == "failed: no such file"


def test_a_row_is_simulated_with_the_schedule_that_ran(tmp_path: Path) -> None:
    (row,) = timings.read(write(tmp_path, [OURS, THEIRS], [counted(), counted()]))[0]
    assert (row.cycles, row.clock_mhz, row.config) == (64000, 1600, default_config(CELL.problem))


def test_exposed_and_hidden_are_as_the_simulator_has_them() -> None:
    config = default_config(CELL.problem)
    cta = overlap.cta_of(config, load("h200"), 1600.0)
    program_cycles = cta.tensor_cycles * 2 * overlap.BLOCKS / cta.overlap.tensor_efficiency
    found = overlap.Shares.of(
        *(x / (2 * overlap.BLOCKS) for x in (program_cycles,)), cta.tensor_cycles, cta.softmax_cycles
    )
    assert found.tensor == pytest.approx(cta.overlap.tensor_efficiency)
    assert found.hidden == pytest.approx(cta.overlap.hidden_softmax)
    assert found.exposed == pytest.approx(found.cycles - cta.tensor_cycles)


def test_the_page_has_every_launch_and_simulates_what_has_a_program(tmp_path: Path) -> None:
    path = write(tmp_path, [OURS, FAILED, THEIRS], [counted(tensor_cycles=4 * 32000.0, alu_instructions=20000.0)] * 2)
    text = overlap.page([path], [], load("h200"))
    (ours,) = [line for line in text.splitlines() if line.startswith("| fp16 d128 dense 1024 | gluon | 64 /")]
    assert "| 0.50 / " in ours
    assert "| 0.62 alu / " in ours, "20,000 instructions of 2 cycles"
    assert [line.split(" | ")[1] for line in text.splitlines() if "dense 1024" in line] == ["gluon", "gluon", "cudnn"]
    assert "flash3" not in text


def test_a_file_without_a_column_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "counters.csv"
    path.write_text("kernel\ngluon\n")
    assert overlap.main([str(path)]) == 2
    assert "column grid is missing" in capsys.readouterr().err


REPORTS = Path(__file__).parents[3] / "reports"
COUNTED = sorted(REPORTS.glob("h*/simulator/overlap/counters.csv"))


@pytest.mark.parametrize("path", sampled(COUNTED, COUNTED[:1]), ids=lambda path: path.relative_to(REPORTS).parts[0])
def test_tensor_cores_work_as_long_as_the_gemms_take_at_the_documented_rate(path: Path) -> None:
    """The tiles are those of the plan, ours and upstream's: what is computed beside the last key counts."""
    machine = load(path.relative_to(REPORTS).parts[0])
    found = list(overlap.launches(path, machine))
    assert len(found) > 3
    for x in found:
        blocks = kernel_of(x.config).launch(x.problem, machine, machine["max_clock_mhz"]).blocks
        expected = blocks * tensor_cycles_per_block(x.config, machine) / machine["sms"]
        assert counters.tensor_cycles(x.row) == pytest.approx(expected, rel=2e-3), x.row["kernel"]


@pytest.mark.parametrize("path", COUNTED, ids=lambda path: path.relative_to(REPORTS).parts[0])
def test_every_tensor_is_read_from_hbm_once_and_hardly_more(path: Path) -> None:
    """Of 16 bits at head_dim 256 up to a quarter more, K and V of the heads under way do not stay in L2; of
    FlashAttention-3's e4m3 at 64, a seventh more."""
    rows = counters.read(path)
    assert len(rows) > 3
    for row in rows.values():
        cell = counters.cell_of(row)
        is_read_again = (cell.dtype, cell.head_dim) in (("fp16", 256), ("bf16", 256)) or (
            (cell.dtype, cell.head_dim, row["kernel"]) == ("e4m3", 64, "flash3")
        )
        read = cell.io_bytes - 2 * cell.batch * cell.seqlen_q * cell.nheads * cell.head_dim
        assert 0.99 * read < float(row["hbm_read_bytes"]) < (1.25 if is_read_again else 1.05) * read
