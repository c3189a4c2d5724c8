"""The pages of ``fa3verify report --history``: bits lost of each kernel over the runs below a folder, oldest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fa3_reference.rules import require
from fa3verify.campaign.run import Run
from fa3verify.files import Json
from fa3verify.report import dataset
from fa3verify.report.build import write_both
from fa3verify.report.svg import colour, new_figure, render, styled
from fa3verify.report.tables import DASH, PageColumn, PageTable, written
from fa3verify.text import plural


def runs_below(folder: Path) -> dict[str, Run]:
    """Read every ``run.nc`` below a folder, oldest first, by the folder that it is in.

    ValueError where there is none, or for a damaged one.
    """
    runs = {
        path.parent.relative_to(folder).as_posix(): dataset.from_tree(dataset.load(path))
        for path in sorted(folder.rglob("run.nc"))
    }
    require(runs, f"{folder} has no run.nc below it: keep the OUT of every verify in a folder of its own there")
    return dict(sorted(runs.items(), key=lambda named: (named[1].started, named[0])))


def write_pages(out: Path, folder: Path) -> Path:
    """Write ``history.html`` and ``history.md`` of the runs below ``folder`` into ``out``; return the page's path.

    ValueError as :func:`runs_below`.
    """
    runs = runs_below(folder)
    lost = {name: run.bits_lost for name, run in runs.items()}
    kernels = sorted({kernel for each in lost.values() for kernel in each})
    rows: list[Json] = [
        {"run": name, "started": run.started, "version": run.version}
        | {kernel: f"{lost[name][kernel]:.3f}" if kernel in lost[name] else DASH for kernel in kernels}
        for name, run in runs.items()
    ]
    heads = (PageColumn("run", "run"), PageColumn("began (UTC)", "started"), PageColumn("fa3verify", "version"))
    columns = (*heads, *(PageColumn(name, name, written) for name in kernels))
    context = {
        "table": PageTable("history", "Bits lost, run by run", columns, rows),
        "kernels": len(kernels),
        "of": plural(len(kernels), "kernel"),
    }
    return write_both(out, "history", context, chart=_chart(lost, kernels))


def _chart(lost: Mapping[str, Mapping[str, float]], kernels: Sequence[str]) -> str:
    """Return a line for each kernel over the runs as SVG; empty where no run has bits lost."""
    if not kernels:
        return ""
    with styled():
        figure = new_figure()
        ax = figure.subplots()
        for name in kernels:
            at = {i: each[name] for i, each in enumerate(lost.values()) if name in each}
            ax.plot([*at], [*at.values()], "o-", color=colour(name), label=name)
        ax.set_xticks(range(len(lost)), [*lost])
        ax.set_ylim(bottom=0)
        ax.set_ylabel("bits lost over the ideal kernel")
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return render(figure, "history", f"Bits that {len(kernels)} kernels lose, over {len(lost)} runs")
