"""Speed of our kernels relative to their peers: ratios per cell, geometric means, and the worst cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fa3_reports.bench.results import CellRecord, Results

OURS = "gluon"


class Speedup(NamedTuple):
    """One kernel against one peer over the cells where both have a time."""

    name: str
    peer: str
    cells: int
    geometric_mean: float
    per_head_dim: dict[int, float]
    worst: float
    worst_cell: str


def is_ours(name: str) -> bool:
    return name.partition(".")[0] == OURS


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean; NaN of nothing.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def summarize(records: Sequence[CellRecord], name: str, peer: str) -> Speedup | None:
    """Compare a kernel with a peer over all cells; None where no cell has both."""
    ratios = {r.cell.key: (r.cell.head_dim, r.ratio(name, peer)) for r in records}
    ratios = {key: pair for key, pair in ratios.items() if not math.isnan(pair[1])}
    if not ratios:
        return None
    dims = sorted({d for d, _ in ratios.values()})
    worst = min(ratios, key=lambda key: ratios[key][1])
    return Speedup(
        name,
        peer,
        len(ratios),
        geometric_mean(r for _, r in ratios.values()),
        {d: geometric_mean(r for e, r in ratios.values() if e == d) for d in dims},
        ratios[worst][1],
        worst,
    )


def best_peer(record: CellRecord) -> str | None:
    """Name of the fastest kernel that is not ours; None without one."""
    timed = [m.name for m in record.kernels if not is_ours(m.name) and m.burst_ms > 0]
    return max(timed, key=record.tflops, default=None)


def worst_against_best(records: Sequence[CellRecord], name: str = OURS) -> tuple[float, str, str] | None:
    """Return the lowest ratio of a kernel to the best peer of the cell: (ratio, cell, peer); None without any."""
    ratios = []
    for record in records:
        peer = best_peer(record)
        ratio = record.ratio(name, peer) if peer else math.nan
        if peer and not math.isnan(ratio):
            ratios.append((ratio, record.cell.key, peer))
    return min(ratios, default=None)


def names_of(records: Sequence[CellRecord]) -> list[str]:
    """Kernels of some cells, in the order they were measured."""
    return list(dict.fromkeys(m.name for r in records for m in r.kernels))


def ratio_lines(results: Results, grid: str) -> list[str]:
    """One line per dtype and peer of a grid: geometric mean and worst cell."""
    lines = []
    cells = [r for r in results.cells.values() if r.cell.grid == grid != "accumulator_loss"]
    for dtype in sorted({r.cell.dtype for r in cells}):
        records = [r for r in cells if r.cell.dtype == dtype]
        names = names_of(records)
        for peer in (n for n in names if not is_ours(n)):
            if s := summarize(records, OURS, peer):
                lines.append(
                    f"{grid} {dtype}: {OURS} is {s.geometric_mean:.3f} times as fast as {peer} over {s.cells} cells, "
                    f"worst {s.worst:.3f} ({s.worst_cell})"
                )
    return lines
