"""The parameters of the SM clock under load, fitted to counted clocks, and how far off they are on other rows.

``python -m fa3_reports.measured.clock_fit FITTED.jsonl OTHER.jsonl ...`` prints the parameters that a machine file's
table [clock] has, fitted to the rows of the first file alone, and for every file the errors of three figures: of the
clock, of the time at that clock, and of the time at the machine's maximum clock. Shares of busy time come from the
simulator, at the maximum clock and without a measured figure, as ``fa3verify simulate`` has them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from fa3_reports.measured.printed import parser_of, printed
from fa3_reports.measured.timings import MeasuredRow, read
from fa3_reports.measured.validation import accuracy
from fa3_simulator.clock import busy_shares, clock_under_load, config_under_load
from fa3_simulator.machine import Machine
from fa3_simulator.run import estimate
from fa3verify.files import markdown_table

DTYPES = ("fp16", "bf16", "e4m3")
FITTED = ("base", *(f"tensor_{dtype}" for dtype in DTYPES), "smem", "exponent")
START = (0.5, 0.5, 0.5, 0.5, 0.5, 0.4)
OUTLIER = 0.02  # relative errors above this one count with their size, not with its square


def fit(rows: Sequence[MeasuredRow], machine: Machine) -> dict[str, float]:
    """Return the parameters :data:`FITTED` for which the clocks of the rows are predicted best.

    The largest clock is the machine file's. Errors are relative; the loss is that of ``soft_l1``.
    """
    largest = machine.clock["largest_mhz"].value
    measured = np.array([row.clock_mhz for row in rows])
    shares = np.array([busy_shares(estimate(row.problem, row.config, machine)) for row in rows])
    of_dtype = np.array([[row.problem.dtype == dtype for dtype in DTYPES] for row in rows])
    terms = np.column_stack([np.ones(len(rows)), of_dtype * shares[:, :1], shares[:, 1]])

    def errors(parameters: np.ndarray) -> np.ndarray:
        activity = np.maximum(1, terms @ parameters[:-1])
        return largest * activity ** -parameters[-1] / measured - 1

    found = least_squares(errors, START, bounds=(0, np.inf), loss="soft_l1", f_scale=OUTLIER, xtol=1e-12, ftol=1e-12)
    return dict(zip(FITTED, map(float, found.x), strict=True))


def with_clock(machine: Machine, fitted: dict[str, float]) -> Machine:
    """Return the machine with other parameters of its clock."""
    changed = {name: replace(machine.clock[name], value=value) for name, value in fitted.items()}
    return replace(machine, clock={**machine.clock, **changed})


def clock_errors(rows: Sequence[MeasuredRow], machine: Machine) -> np.ndarray:
    """Return predicted over measured clock, less one, of every row."""
    shares = [busy_shares(estimate(row.problem, row.config, machine)) for row in rows]
    predicted = [clock_under_load(machine, row.problem.dtype, *each) for row, each in zip(rows, shares, strict=True)]
    return np.array(predicted, float) / [row.clock_mhz for row in rows] - 1


def time_errors(rows: Sequence[MeasuredRow], machine: Machine) -> np.ndarray:
    """Return predicted over measured time, less one: (rows, 2) at the predicted and at the maximum clock."""
    found = []
    for row in rows:
        launch = estimate(row.problem, row.config, machine)
        loaded = config_under_load(row.problem, row.config, machine, launch)["milliseconds_under_load"]
        measured = row.cycles / row.clock_mhz / 1e3
        found.append((loaded / measured - 1, launch.seconds * 1e3 / measured - 1))
    return np.array(found)


def page(chosen: Namespace, machine: Machine) -> str:
    """Return the parameters and the errors."""
    files = {path: read(path)[0] for path in chosen.bench}
    fitted = fit(files[chosen.bench[0]], machine)
    machine = with_clock(machine, fitted)
    lines = [f"{name} = {value:.3f}" for name, value in fitted.items()]
    table = []
    for path, rows in files.items():
        each = [clock_errors(rows, machine), *time_errors(rows, machine).T]
        said = [f"{e['mape']:.2%}, largest {e['max']:.1%}, bias {e['bias']:+.1%}" for e in map(accuracy, each)]
        table.append((path.parent.name, len(rows), *said))
    head = ("rows of", "rows", "clock", "time at it", f"time at {machine['max_clock_mhz']:.0f} MHz")
    return "\n".join([*lines, "", *markdown_table(head, table)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page; 2 and one line for a file that cannot be used."""
    parser = parser_of("clock_fit", __doc__)
    parser.add_argument("bench", type=Path, nargs="+", metavar="BENCH.jsonl", help="the first is fitted to")
    return printed(parser, page, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
