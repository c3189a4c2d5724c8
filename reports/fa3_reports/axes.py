"""Logarithmic axes of the published figures, with the numbers at their ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter, NullFormatter

from fa3verify.report.tables import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def log_axis(ax: Axes, which: str, *, base: int = 10, ticks: Sequence[float] = ()) -> None:
    """Make the axis "x" or "y" logarithmic, labelled with powers, or with plain numbers at the given ticks."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    (ax.set_xscale if which == "x" else ax.set_yscale)("log", base=base)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if len(ticks) else _tick(value, base)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", size=0)
    if len(ticks):
        axis.set_ticks(ticks)


def _tick(value: float, base: int) -> str:
    if value <= 0:
        return "0"
    if base == 10 and abs(math.log10(value) - round(math.log10(value))) < 1e-9:
        return power_of_ten(round(math.log10(value)))
    if base == 2 and value >= 1024 and value % 1024 == 0:
        return f"{round(value / 1024)}k"
    return number(value) if value < 1 or value != round(value) else str(round(value))


def power_of_ten(exponent: int) -> str:
    """Write 10 to a power, for axes.

    >>> power_of_ten(-3), power_of_ten(0)
    ('10⁻³', '1')
    """
    return {0: "1", 1: "10"}.get(exponent, "10" + str(exponent).translate(_SUPERSCRIPT))
