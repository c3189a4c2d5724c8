"""Published rows: what was measured, beside what the simulator said of it when their pages were made."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fa3_reports.measured.timings import MeasuredRow, read
from fa3_reports.measured.validation import CYCLES, compare, figures_of
from fa3_reports.stored import read_csv
from fa3_simulator.machine import load

REPORTS = Path(__file__).parents[3] / "reports"
EVERY = 8  # of the rows of a table this one is simulated again, and the first of each kind of kernel


@cache
def published(folder: str) -> tuple[MeasuredRow, ...]:
    """Every row of ``folder``/bench.jsonl with the predictions of validation.csv, which must be of the same rows."""
    validation = read_csv(REPORTS / folder / "validation.csv")
    predicted = {int(row["line"]): [float(row[name]) for name in CYCLES] for row in validation}
    rows, _ = read(REPORTS / folder / "bench.jsonl")
    assert [row.line for row in rows] == list(predicted)
    np.testing.assert_allclose([row.cycles for row in rows], [p[0] for p in predicted.values()], rtol=1e-5)
    return tuple(row._replace(predicted=(p[1], p[2], p[3])) for row, p in zip(rows, predicted.values(), strict=True))


def kind(row: MeasuredRow) -> tuple:
    """Rows of one kind run the same program, for other lengths and numbers of heads."""
    problem, config = row.problem, row.config
    return (config.family, config.dtype, problem.head_dim, problem.causal, config.tile_n, config.num_splits > 1)


def check_published(folder: str) -> None:
    """One row of each kind and one in :data:`EVERY` is simulated again: as published, to the table's six digits."""
    rows = published(folder)
    first = {kind(x): i for i, x in reversed([*enumerate(rows)])}
    chosen = [rows[i] for i in sorted({*range(0, len(rows), EVERY), *first.values()})]
    again = compare(chosen, load(folder.split("/")[0]))
    np.testing.assert_allclose([x.predicted for x in again], [x.predicted for x in chosen], rtol=1e-5)


def figures(folder: str, seqlens: tuple[int, ...] = ()) -> dict[str, Any]:
    """As :func:`fa3_reports.measured.validation.figures_of`, of the published predictions."""
    rows = [x for x in published(folder) if not seqlens or x.problem.seqlen_k in seqlens]
    return figures_of("bench.jsonl", load(folder.split("/")[0]), rows, Counter())
