"""What the GPU's own counters say of one launch of each kernel, as Nsight Compute reads them, and their table.

The launches run in a process of their own, :mod:`fa3_reports.measured.counted`, each behind a small kernel that marks
it: what the profiler lists between two marks belongs to one launch. It runs a kernel once for every few counters, with
the caches emptied before, so that what comes from HBM is what a launch moves that finds nothing in L2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fa3_reports.bench.cells import CELL_FIELDS, SIZES, Cell
from fa3_reports.bench.tables import SWITCHES
from fa3_reports.stored import csv_rows, read_csv
from fa3_simulator.roofline import SUB_CORES
from fa3verify.files import csv_text

MARK = "spin_kernel"  # of torch.cuda._sleep
# Cycles are those of an SM: its own clock ticks from first to last, those with a warp on it, and those in which each of
# its four tensor cores worked, added up. Instructions are warp instructions of a scheduler, of which there are four:
# all, and those of two pipes.
METRICS = {
    "cycles": "sm__cycles_elapsed.max",
    "time_ns": "gpu__time_duration.sum",
    "active_cycles": "sm__cycles_active.avg",
    "tensor_cycles": "sm__pipe_tensor_cycles_active.avg",
    "instructions": "smsp__inst_executed.avg",
    "mufu_instructions": "smsp__inst_executed_pipe_xu.avg",
    "alu_instructions": "smsp__inst_executed_pipe_alu.avg",
    "hbm_read_bytes": "dram__bytes_read.sum",
    "hbm_write_bytes": "dram__bytes_write.sum",
    "l2_bytes": "lts__t_bytes.sum",
}
# As bench.csv has them where it has them, so that its readers take this table too.
COLUMNS = (
    *CELL_FIELDS,
    "kernel",
    "status",
    *(name for name in SWITCHES if name != "holds_queries"),  # which no counted size has
    "burst_ms",
    "burst_sm_mhz",
    "burst_cycles",
    *(name for name in METRICS if name not in ("cycles", "time_ns")),
    "gpu_kernels",
    "peak_bytes",
)


class Launched(NamedTuple):
    """One launch as the process that made it tells: fields of its cell, schedule or None, or why there was none.

    ``peak_bytes`` of GPU memory beyond the operands: the output, the lse, and what else was allocated.
    """

    cell: Mapping[str, Any]
    kernel: str
    status: str
    schedule: Mapping[str, Any] | None = None
    peak_bytes: int = 0


def command(profiler: str, log: Path) -> list[str]:
    """How a program is started under the profiler, which leaves the clocks alone and writes ``log``."""
    settings = ["--clock-control", "none", "--profile-from-start", "off", "--target-processes", "application-only"]
    printed = ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
    return [profiler, *settings, *printed, "--metrics", ",".join(METRICS.values())]


def parse(text: str) -> list[dict[str, float]]:
    """Counters of every launch: the sums over the kernels behind each mark, and their number.

    Parameters
    ----------
    text : str
        What the profiler wrote: a line of names, one of units and one per kernel, beside lines of its own.

    Raises
    ------
    ValueError
        Without a table, for one that misses a counter, and for a kernel that no mark is before.
    """
    quoted = "\n".join(line for line in text.splitlines() if line.startswith('"'))
    rows = csv_rows(quoted, "the profiler")[1:]  # behind the units
    if not rows:
        raise ValueError(f"the profiler counted nothing: {' '.join(text.split())[-300:]}")
    if missing := [name for name in METRICS.values() if name not in rows[0]]:
        raise ValueError(f"the profiler does not count {', '.join(missing)} on this GPU")
    found: list[dict[str, float]] = []
    for row in rows:
        if MARK in row["Kernel Name"]:
            found.append(dict.fromkeys((*METRICS, "gpu_kernels"), 0.0))
            continue
        if not found:
            raise ValueError(f"{row['Kernel Name']} runs before the first mark")
        for name, metric in METRICS.items():
            found[-1][name] += float(row[metric].replace(",", ""))
        found[-1]["gpu_kernels"] += 1
    return found


def table(launches: Sequence[Launched], counted: Sequence[Mapping[str, float]]) -> str:
    """The CSV of :data:`COLUMNS`; launches that failed have no counters."""
    left = iter(counted)
    rows = []
    for launch in launches:
        row: dict[str, Any] = {**launch.cell, "kernel": launch.kernel, "status": launch.status}
        row |= launch.schedule or {}
        if launch.status == "ok":
            found = dict(next(left))
            cycles = found.pop("cycles")
            time_ns = found.pop("time_ns")
            row |= {"burst_ms": time_ns / 1e6, "burst_sm_mhz": cycles / time_ns * 1e3, "burst_cycles": cycles}
            row |= found | {"peak_bytes": launch.peak_bytes}
        rows.append([_text(row.get(name, "")) for name in COLUMNS])
    return csv_text(COLUMNS, rows)


def _text(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def read(path: Path) -> dict[int, dict[str, str]]:
    """Rows of a table by their line, but for those that failed.

    Raises
    ------
    ValueError
        For a file without one of :data:`COLUMNS`.
    """
    return {line: row for line, row in enumerate(read_csv(path, COLUMNS), 2) if row["status"] == "ok"}


def cell_of(row: Mapping[str, str]) -> Cell:
    """The cell that a row was counted in."""
    sizes = {name: int(row[name]) for name in SIZES}
    return Cell(row["grid"], row["dtype"], **sizes, causal=row["causal"] == "True")  # type: ignore[arg-type]


def tensor_cycles(row: Mapping[str, str]) -> float:
    """Cycles in which a tensor core worked, the mean over the four of an SM and over all SMs."""
    return float(row["tensor_cycles"]) / SUB_CORES
