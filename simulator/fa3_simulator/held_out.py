"""How far off the simulator is for a kind of kernel: its errors on timings that no constant was fitted to.

Verbs print them beside a simulated time. They are mean absolute errors of simulated over measured cycles on an H200,
over every row that has a program: forward reports/h200/simulator/schedules_2k_8k_* and unseen,
reports/h200/speed/paper_grid (512, 2048 and 8192 keys), flash4 and decode; backward reports/h200/simulator/backward. A
test computes them again from these files.

Constants are frozen by hash, and what was read when is in reports/decisions: all of these rows had been read when the
model became what it is (decision 0021). Rows that it had not seen are those of grid unseen3 alone.
"""

from __future__ import annotations

from typing import NamedTuple

from fa3_simulator.cta import AnyConfig, kernel_of


class HeldOut(NamedTuple):
    """The number of timed rows of a group, and their mean absolute error relative to the measured time."""

    group: str
    rows: int
    error: float


TIMED = {
    "flash3 bf16": (61, 0.027),
    "flash3 fp16": (51, 0.025),
    "flash3 e4m3": (44, 0.023),
    "flash4 bf16": (12, 0.025),
    "flash4 fp16": (12, 0.020),
    "gluon bf16": (41, 0.035),
    "gluon fp16": (155, 0.042),
    "gluon e4m3": (163, 0.047),
    "flash3 backward": (63, 0.054),
    "gluon backward": (40, 0.053),
}


def held_out(config: AnyConfig) -> HeldOut | None:
    """Return the group of a configuration: its family and dtype, or for a backward its family.

    None where nothing was timed.

    >>> from fa3_kernels.plan.config import Config
    >>> held_out(Config("e4m3")).rows
    163
    """
    group = f"{config.family} {kernel_of(config).kind}"
    figures = TIMED.get(group)
    return figures and HeldOut(group, *figures)


def places(cycles: list[float], error: float) -> list[int]:
    """Return the place of each of ``cycles``, which rise, from 1.

    Cycles within a relative ``error`` of the first of a place share that place.

    >>> places([100, 102, 104, 106], 0.03)
    [1, 1, 3, 3]
    """
    numbers: list[int] = []
    first = 0
    for index, value in enumerate(cycles):
        if value > cycles[first] * (1 + error):
            first = index
        numbers.append(first + 1)
    return numbers
