"""The pages of ``fa3verify report --history``: bits lost of each kernel over the runs below a folder, oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fa3verify.files import Json, write_text
from fa3verify.report import dataset
from fa3verify.report.build import both_pages
from fa3verify.report.svg import colour, new_figure, render, styled
from fa3verify.report.tables import DASH, PageColumn, PageTable, written
from fa3verify.text import plural

PAGE = "history.html"


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a history: its folder, when it began, its version, and the bits that each of its kernels loses."""

    name: str
    started: str
    version: str
    lost: dict[str, float]


def points(folder: Path) -> list[Point]:
    """Read every ``run.nc`` below a folder, oldest first; ValueError where there is none, or for a damaged one."""
    runs = []
    for path in sorted(folder.rglob("run.nc")):
        run = dataset.from_tree(dataset.load(path))
        runs.append(Point(path.parent.relative_to(folder).as_posix(), run.started, run.version, run.bits_lost))
    if not runs:
        raise ValueError(f"{folder} has no run.nc below it: keep the OUT of every verify in a folder of its own there")
    return sorted(runs, key=lambda point: (point.started, point.name))


def write_pages(out: Path, folder: Path) -> Path:
    """Write ``history.html`` and ``history.md`` of the runs below ``folder`` into ``out``; return the page's path.

    ValueError as :func:`points`.
    """
    runs = points(folder)
    kernels = sorted({name for point in runs for name in point.lost})
    rows: list[Json] = [
        {"run": point.name, "started": point.started, "version": point.version}
        | {name: f"{point.lost[name]:.3f}" if name in point.lost else DASH for name in kernels}
        for point in runs
    ]
    heads = (PageColumn("run", "run"), PageColumn("began (UTC)", "started"), PageColumn("fa3verify", "version"))
    columns = (*heads, *(PageColumn(name, name, written) for name in kernels))
    context = {
        "table": PageTable("history", "Bits lost, run by run", columns, rows),
        "kernels": len(kernels),
        "of": plural(len(kernels), "kernel"),
    }
    for name, text in both_pages("history", context, chart=_chart(runs, kernels)).items():
        write_text(out / name, text)
    return out / PAGE


def _chart(found: Sequence[Point], kernels: Sequence[str]) -> str:
    """Return a line for each kernel over the runs as SVG; empty where no run has bits lost."""
    if not kernels:
        return ""
    with styled():
        figure = new_figure()
        ax = figure.subplots()
        for name in kernels:
            at = [i for i, point in enumerate(found) if name in point.lost]
            ax.plot(at, [found[i].lost[name] for i in at], "o-", color=colour(name), label=name)
        ax.set_xticks(range(len(found)), [point.name for point in found])
        ax.set_ylim(bottom=0)
        ax.set_ylabel("bits lost over the ideal kernel")
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return render(figure, "history", f"Bits that {len(kernels)} kernels lose, over {len(found)} runs")
