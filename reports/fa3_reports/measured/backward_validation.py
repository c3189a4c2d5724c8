"""How far off is the simulated backward: predicted beside measured times of kernels by name.

``python -m fa3_reports.measured.backward_validation MEASURED.csv`` prints, of every row, predicted and measured
milliseconds at the row's clock, and the mean absolute error of each source. A row is a launch of any kernel whose
schedule is known: columns of :data:`COLUMNS`; ``part`` is main for the main kernel alone and all with those in front
and behind; ``tile`` (ROWSxKEYS) is the kernel's own where empty; ``clock`` is counted where the SMs' counters gave
``sm_mhz``, else assumed. ``simulated_ms`` is empty but for kernels whose schedule the simulator no longer has: it holds
what the simulator said of them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fa3_reference.problem import AttentionProblem
from fa3_reports.measured.printed import parser_of, printed
from fa3_reports.measured.validation import accuracy
from fa3_reports.stored import read_csv
from fa3_simulator.backward_choice import schedule_for
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.cta import operations
from fa3_simulator.machine import Machine
from fa3_simulator.run import estimate
from fa3verify.files import markdown_table

COLUMNS = (
    "source",
    "kernel",
    "part",
    "batch",
    "seqlen",
    "nheads",
    "nheads_kv",
    "head_dim",
    "causal",
    "turns",
    "tile",
    "milliseconds",
    "sm_mhz",
    "clock",
    "simulated_ms",
)
PARTS = ("main", "all")
CLOCKS = ("counted", "assumed")


class Compared(NamedTuple):
    """One row: milliseconds, and TFLOP/s that the measured ones are."""

    source: str
    kernel: str
    shape: str
    clock: str
    measured: float
    predicted: float
    tflops: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def read(path: Path) -> list[dict[str, str]]:
    """Read the rows; ValueError with file, line and column where one is missing or not among its values."""
    rows = read_csv(path, COLUMNS)
    for line, row in enumerate(rows, 2):
        for column, values in (("part", PARTS), ("clock", CLOCKS), ("causal", ("True", "False"))):
            if row[column] not in values:
                raise ValueError(
                    f"{path.name}, line {line}: {column} must be {' or '.join(values)}, got {row[column]!r}"
                )
    if not rows:
        raise ValueError(f"{path.name} has no row to compare")
    return rows


def compare(row: dict[str, str], machine: Machine) -> Compared:
    """Predict one row at its clock; ValueError for a kernel, tile or order that is not known."""
    batch, seqlen, nheads, nheads_kv, head_dim = (
        int(row[name]) for name in ("batch", "seqlen", "nheads", "nheads_kv", "head_dim")
    )
    causal = row["causal"] == "True"
    clock = float(row["sm_mhz"])
    problem = AttentionProblem(batch, nheads, nheads_kv, seqlen, seqlen, head_dim, causal=causal)
    tile: Any = tuple(map(int, row["tile"].split("x"))) if row["tile"] else None
    if row["simulated_ms"]:
        predicted = float(row["simulated_ms"])
    else:
        schedule = schedule_for(problem, row["kernel"], tile=tile, turns=row["turns"])
        found = estimate(problem, schedule, machine, clock)
        predicted = (found.main_cycles if row["part"] == "main" else found.cycles) / clock / 1e3
    measured = float(row["milliseconds"])
    heads = f"h{nheads}" + (f"/{nheads_kv}" if nheads_kv != nheads else "")
    shape = f"d{head_dim} {'causal' if causal else 'dense'} {batch}x{seqlen} {heads}, {row['part']}"
    if row["turns"] != "free":
        shape += f", {row['turns']}"
    stated = f"{clock:.0f} {row['clock']}"
    tflops = operations(problem, BackwardSchedule()) / measured / 1e9
    return Compared(row["source"], row["kernel"], shape, stated, measured, predicted, tflops)


def markdown(found: Sequence[Compared], machine: Machine) -> str:
    """Tables of errors by source, and of all rows."""
    lines = [
        f"Simulated {machine.name} beside {len(found)} measured backward passes, at each row's clock.",
        "",
    ]
    errors_by_source = []
    for source, kernel in dict.fromkeys((x.source, x.kernel) for x in found):
        errors = np.array([x.error for x in found if (x.source, x.kernel) == (source, kernel)])
        e = accuracy(errors)
        figures = (f"{e['mape']:.1%}", f"{e['max']:.1%}", f"{e['bias']:+.1%}")
        errors_by_source.append((source, kernel, errors.size, *figures))
    lines += markdown_table(("source", "kernel", "rows", "mean absolute error", "largest", "bias"), errors_by_source)
    rows = []
    for x in found:
        figures = (f"{x.measured:.4g}", f"{x.tflops:.0f}", f"{x.predicted:.4g}", f"{x.error:+.1%}")
        rows.append((x.source, x.kernel, x.shape, x.clock, *figures))
    head = ("source", "kernel", "launch", "MHz", "measured ms", "TFLOP/s", "predicted ms", "error")
    return "\n".join([*lines, *markdown_table(head, rows)]).rstrip("\n")


def page(chosen: Namespace, machine: Machine) -> str:
    """Return the tables."""
    return markdown([compare(row, machine) for row in read(chosen.measured)], machine)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; 2 and one line for a file that cannot be used."""
    parser = parser_of("backward_validation", __doc__)
    parser.add_argument("measured", type=Path, metavar="MEASURED.csv")
    return printed(parser, page, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
