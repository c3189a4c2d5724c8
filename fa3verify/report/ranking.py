"""A picture of a ranking by ``tune``: the time of every tile, with a line for each schedule."""

from collections.abc import Mapping
from math import nan
from textwrap import fill

MOST = 1.5  # times as long as the first: slower ones are not drawn


def draw(target: str, title: str, answer: str, times: Mapping[tuple[str, str], float]) -> None:
    """Write an SVG of times, given in cycles, by tile and schedule in words, in the order of their keys.

    The fastest has a ring, and the answer stands below the title. What takes longer than :data:`MOST` times as long is
    left out.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    first = min(times, key=lambda key: times[key])
    drawn = {key: cycles / 1000 for key, cycles in times.items() if cycles <= MOST * times[first]}
    tiles = [*dict.fromkeys(tile for tile, _ in drawn)]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for schedule in dict.fromkeys(schedule for _, schedule in drawn):
        axes.plot(tiles, [drawn.get((tile, schedule), nan) for tile in tiles], ".-", label=schedule or "time")
    axes.plot(first[0], drawn[first], "o", markersize=11, fillstyle="none", color="black")
    figure.suptitle(f"{title}\n{fill(answer, 130)}", x=0.01, ha="left", fontsize=9)
    axes.set(ylabel=f"thousand cycles, up to {MOST} times the least")
    axes.tick_params("x", rotation=40)
    figure.legend(fontsize=8, frameon=False, loc="outside right center")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(target, format="svg", metadata={"Date": None})
