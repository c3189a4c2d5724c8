"""Pictures of simulated schedules: a ranking by ``tune``, and the timeline of a CTA by ``simulate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa3_simulator.timeline import Bar

MOST = 1.5  # times as long as the first: slower ones are not drawn
SHOWN_CYCLES = 20000  # the most of a timeline that is drawn
COLOURS = {"tensor": "#3b6ea5", "vector": "#d08c2f", "issue": "#7aa874", "wait": "#d9d9d9", "copy": "#8d6cab"}


def _drawn(width: float, height: float) -> tuple[Any, Any]:
    """Return an empty figure, in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _write(figure: Any, target: str | Path, title: str) -> None:
    """Write a figure with its title and legend as SVG; equal figures give equal bytes."""
    from matplotlib import rc_context

    figure.suptitle(title, x=0.01, ha="left", fontsize=9)
    figure.legend(fontsize=8, frameon=False, loc="outside right center")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(target, format="svg", metadata={"Date": None})


def draw_ranking(target: str, title: str, answer: str, times: Mapping[tuple[str, str], float]) -> None:
    """Write an SVG of times, given in cycles, by tile and schedule in words, in the order of their keys: the time of
    every tile, with a line for each schedule.

    The fastest has a ring, and the answer stands below the title. What takes longer than :data:`MOST` times as long is
    left out.
    """
    first = min(times, key=lambda key: times[key])
    drawn = {key: cycles / 1000 for key, cycles in times.items() if cycles <= MOST * times[first]}
    tiles = [*dict.fromkeys(tile for tile, _ in drawn)]
    figure, axes = _drawn(9, 4.5)
    for schedule in dict.fromkeys(schedule for _, schedule in drawn):
        axes.plot(tiles, [drawn.get((tile, schedule), nan) for tile in tiles], ".-", label=schedule or "time")
    axes.plot(first[0], drawn[first], "o", markersize=11, fillstyle="none", color="black")
    axes.set(ylabel=f"thousand cycles, up to {MOST} times the least")
    axes.tick_params("x", rotation=40)
    _write(figure, target, f"{title}\n{fill(answer, 130)}")


def draw_timeline(target: Path, title: str, bars: Sequence[Bar], cycles: float) -> None:
    """Write an SVG of the first :data:`SHOWN_CYCLES` of a timeline of ``cycles``: a line of bars for each row."""
    stop = min(cycles, SHOWN_CYCLES)
    rows = [*dict.fromkeys(bar.row for bar in bars)]
    figure, axes = _drawn(14, 1 + 0.27 * len(rows))
    for kind, colour in COLOURS.items():
        mine = [bar for bar in bars if bar.kind == kind and bar.start < stop]
        ends = [min(bar.stop, stop) for bar in mine]
        axes.hlines([rows.index(bar.row) for bar in mine], [bar.start for bar in mine], ends, colour, lw=12, label=kind)
    axes.set(xlim=(0, stop), ylim=(len(rows) - 0.5, -0.5), xlabel="cycles")
    axes.set_yticks(range(len(rows)), rows)
    _write(figure, target, f"{title}: first {stop:.0f} cycles of a CTA")
