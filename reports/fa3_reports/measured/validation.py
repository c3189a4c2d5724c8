"""How far off the simulator is: predicted beside measured cycles of attention kernels, and what its ranking costs.

``python -m fa3_reports.measured.validation BENCH.csv`` prints the errors of the simulation, of the roofline and of the
closed form over the rows of :mod:`fa3_reports.measured.timings`, and per problem Kendall's tau and the regret of
choosing by simulated time. ``--markdown FILE`` writes that, and beside it a table of all rows with the suffix .csv.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.config import Config
from fa3_reports.measured.printed import parser_of, printed
from fa3_reports.measured.timings import MeasuredRow, read
from fa3_simulator.machine import Machine
from fa3_simulator.roofline import closed_form, roofline
from fa3_simulator.run import estimate
from fa3_simulator.tune import TOP, agreement
from fa3verify import files
from fa3verify.files import Json

MODELS = ("simulated", "roofline", "closed form")
RESAMPLES = 4000
SEED = 0
SMALLEST_RANKING = 3  # schedules of one problem


class Ranking(NamedTuple):
    """Schedules of one problem by simulated cycles: agreement with the measured order, and regret of the top few."""

    problem: str
    schedules: int
    tau: float
    regret: tuple[float, ...]


def compare(rows: Sequence[MeasuredRow], machine: Machine) -> list[MeasuredRow]:
    """Return every row with what :data:`MODELS` predict at the clock it was measured at."""
    found = []
    for row in rows:
        problem = (row.problem, row.config, machine)
        simulated = estimate(*problem, row.clock_mhz).cycles
        bound = roofline(*problem, row.clock_mhz).cycles + machine["launch_cycles"]
        found.append(row._replace(predicted=(simulated, bound, closed_form(*problem))))
    return found


def accuracy(errors: np.ndarray) -> dict[str, float]:
    """Mean absolute error with its 95 % bootstrap interval, largest and mean error.

    Parameters
    ----------
    errors : ndarray
        (rows,) predicted / measured - 1.

    Returns
    -------
    dict
        ``mape``, ``low``, ``high``, ``max`` (of the absolute values) and ``bias`` (signed).
    """
    size = np.abs(errors)
    resampled = np.random.default_rng(SEED).integers(0, size.size, (RESAMPLES, size.size))
    low, high = np.quantile(size[resampled].mean(1), (0.025, 0.975))
    values = (size.mean(), low, high, size.max(), errors.mean())
    return dict(zip(("mape", "low", "high", "max", "bias"), map(float, values)))


def rankings(compared: Sequence[MeasuredRow]) -> list[Ranking]:
    """Rank the schedules of every problem that has at least three; a schedule measured twice counts with its median."""
    problems: dict[str, dict[Config, list[MeasuredRow]]] = {}
    for row in compared:
        problems.setdefault(row.title, {}).setdefault(row.config, []).append(row)
    found = []
    for problem, schedules in problems.items():
        if len(schedules) < SMALLEST_RANKING:
            continue
        pairs = np.array(
            [
                (np.median([x.predicted[0] for x in items]), np.median([x.cycles for x in items]))
                for items in schedules.values()
            ]
        )
        found.append(Ranking(problem, len(pairs), *agreement(pairs[:, 0], pairs[:, 1])))
    return found


def compare_file(path: Path, machine: Machine, seqlens: Sequence[int] = ()) -> tuple[list[MeasuredRow], Counter[str]]:
    """Predict the rows of a file, of these numbers of keys if any are named; also those left out, by reason.

    Raises
    ------
    ValueError
        As :func:`fa3_reports.measured.timings.read`, and when no row is left.
    """
    rows, left_out = read(path)
    if seqlens:
        rows = [row for row in rows if row.problem.seqlen_k in seqlens]
    if not rows:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in left_out.items()) or "it has no rows"
        raise ValueError(f"{path.name} has no row to compare: {reasons}")
    return compare(rows, machine), left_out


def figures_of(file: str, machine: Machine, compared: Sequence[MeasuredRow], left_out: Counter[str]) -> Json:
    """Return what is written of compared rows.

    Returns
    -------
    dict
        ``rows``, ``left_out`` by reason, ``groups`` (the last one is all), ``rankings`` and the machine's
        assumed constants.
    """
    errors = np.array([np.array(x.predicted) / x.cycles - 1 for x in compared])
    names = np.array([x.group for x in compared])
    groups = []
    for name in (*sorted(set(names)), "all"):
        chosen = errors[names == name] if name != "all" else errors
        by_model = {model: accuracy(chosen[:, i]) for i, model in enumerate(MODELS)}
        groups.append({"group": str(name), "rows": len(chosen), "models": by_model})
    return {
        "file": file,
        "machine": machine.name,
        "rows": len(compared),
        "left_out": dict(left_out),
        "groups": groups,
        "rankings": [r._asdict() for r in rankings(compared)],
        "assumed_constants": machine.assumed(),
    }


PROBLEM = ("batch", "nheads", "nheads_kv", "seqlen_q", "seqlen_k", "head_dim", "dtype", "causal")
CYCLES = ("measured_cycles", "simulated_cycles", "roofline_cycles", "closed_form_cycles")


def csv_text(compared: Sequence[MeasuredRow]) -> str:
    """One line per row: its line in the file of measurements, kernel, problem, tile, clock and cycles."""
    rows = []
    for line, kernel, problem, config, cycles, clock, predicted in compared:
        sizes = [getattr(problem, name) for name in PROBLEM]
        figures = [f"{x:.6g}" for x in (clock, cycles, *predicted)]
        rows.append((line, kernel, *sizes, config.tile_m, config.tile_n, *figures))
    return files.csv_text(("line", "kernel", *PROBLEM, "tile_m", "tile_n", "clock_mhz", *CYCLES), rows)


def markdown(figures: Json) -> str:
    """Tables of the figures."""
    lines = [
        f"Simulated {figures['machine']} beside {figures['rows']} measured rows of {figures['file']}, "
        "in cycles at each row's clock.",
        "Mean absolute error [95 % bootstrap interval] and bias of predicted / measured - 1.",
        "The closed form's two constants were fitted to published H100 timings; "
        "nothing in the other two is fitted to a kernel.",
        "",
    ]
    groups = []
    for group in figures["groups"]:
        cells = [
            f"{e['mape']:.1%} [{e['low']:.1%}, {e['high']:.1%}], largest {e['max']:.1%}, bias {e['bias']:+.1%}"
            for e in group["models"].values()
        ]
        groups.append((group["group"], group["rows"], *cells))
    lines += files.markdown_table(("group", "rows", *MODELS), groups)
    lines += _ranking_lines(figures["rankings"])
    left = [f"{count} x {reason}" for reason, count in sorted(figures["left_out"].items())]
    lines.append(f"Left out: {'; '.join(left) or 'nothing'}.")
    lines.append(f"Assumed, not measured: {', '.join(figures['assumed_constants']) or 'nothing'}.")
    return "\n".join(lines)


def _ranking_lines(ranked: list[Json]) -> list[str]:
    if not ranked:
        return [f"No problem has {SMALLEST_RANKING} schedules: nothing to rank.", ""]
    rows = [(r["problem"], r["schedules"], f"{r['tau']:.2f}", *map(_percent, r["regret"])) for r in ranked]
    taus = np.array([r["tau"] for r in ranked])
    regrets = np.array([r["regret"] for r in ranked])
    for name, tau, regret in (
        ("median", np.median(taus), np.median(regrets, 0)),
        ("worst", taus.min(), regrets.max(0)),
    ):
        rows.append((name, "", f"{tau:.2f}", *map(_percent, regret)))
    return files.markdown_table(("problem", "schedules", "Kendall tau", *(f"top-{k} regret" for k in TOP)), rows)


def _percent(share: float) -> str:
    return f"{share:.1%}"


def page(chosen: Namespace, machine: Machine) -> str:
    """Return the tables, and write all rows beside a page that is written."""
    compared, left_out = compare_file(chosen.bench, machine, chosen.seqlen)
    if chosen.markdown:
        files.write_text(chosen.markdown.with_suffix(".csv"), csv_text(compared))
    return markdown(figures_of(chosen.bench.name, machine, compared, left_out))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; 2 and one line for a file that cannot be used."""
    parser = parser_of("validation", __doc__)
    parser.add_argument("bench", type=Path, metavar="BENCH.csv")
    parser.add_argument(
        "--seqlen", type=int, nargs="+", default=(), metavar="N", help="rows with these numbers of keys alone"
    )
    return printed(parser, page, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
