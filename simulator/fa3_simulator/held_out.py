"""How far off the simulator is: 90 % intervals of measured times, by class of launch, beside which verbs print theirs.

A class is of launches alike: kernel, operands and head_dim as launched or with other schedules, decoding, or the length
of a short launch. Its bounds are split-conformal: of n timings, simulated over measured, the k-th smallest and largest
with k = floor((n + 1) / 20), so that a further one lies between them in nine of ten cases. A class has at least 20
timings; where a finer one has fewer, the coarser one counts, and where no class has them, nothing is said.

``python -m fa3_reports.measured.intervals`` makes the table from timings of an H200 that no constant was fitted to, and
a test makes it again. The same timings decided which of several models this is (decision 0021).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.families import OURS
from fa3_reference.problem import AttentionProblem
from fa3_simulator.cta import AnyConfig, kernel_of
from fa3_simulator.machine import Machine

LENGTHS = {45_000: "up to 25 us", 105_000: "25 to 60 us", 350_000: "60 to 200 us"}  # SM clocks, of launches in a burst
DECODED = 16  # queries of a sequence in a step of decoding, at most
WIDE = (96, 160, 192)  # in several boxes; others are powers of two


class HeldOut(NamedTuple):
    """Timings of launches alike: their class, how many they are, and bounds of simulated over measured time between
    which 90 % of further ones are."""

    group: str
    rows: int
    low: float
    high: float

    def interval(self, simulated: float) -> tuple[float, float]:
        """Return the ends of the 90 % interval of a measured time, in the unit of the ``simulated`` one."""
        return simulated / self.high, simulated / self.low

    @property
    def half_width(self) -> float:
        """Half the width of the interval over the simulated time."""
        return (1 / self.low - 1 / self.high) / 2


TIMED = (
    HeldOut("16 bits, 25 to 60 us", 26, 0.902, 1.058),
    HeldOut("decode over pages, 16 bits", 29, 0.923, 1.019),
    HeldOut("decode, 16 bits", 52, 0.941, 1.038),
    HeldOut("e4m3, 25 to 60 us", 35, 0.831, 1.057),
    HeldOut("flash3 16 bits d128", 92, 1.003, 1.082),
    HeldOut("flash3 16 bits d192", 22, 0.955, 1.042),
    HeldOut("flash3 16 bits d256", 62, 0.987, 1.017),
    HeldOut("flash3 16 bits d64", 74, 0.969, 1.044),
    HeldOut("flash3 16 bits d96", 22, 0.774, 1.097),
    HeldOut("flash3 16 bits, 60 to 200 us", 47, 0.964, 1.079),
    HeldOut("flash3 backward d128", 30, 0.927, 1.063),
    HeldOut("flash3 backward d256", 30, 1.006, 1.15),
    HeldOut("flash3 backward d64", 30, 0.919, 1.039),
    HeldOut("flash3 backward d96, d192", 24, 0.785, 1.161),
    HeldOut("flash3 e4m3 d128", 44, 0.954, 1.025),
    HeldOut("flash3 e4m3 d256", 32, 0.953, 0.999),
    HeldOut("flash3 e4m3 d64", 42, 0.973, 1.006),
    HeldOut("flash3 e4m3 d96, d192", 22, 0.929, 0.995),
    HeldOut("flash3 e4m3, 60 to 200 us", 42, 0.938, 1.047),
    HeldOut("flash4 16 bits d64, d128, d256", 24, 0.98, 1.072),
    HeldOut("gluon 16 bits d128", 70, 1.042, 1.079),
    HeldOut("gluon 16 bits d128, other schedules", 89, 0.934, 1.097),
    HeldOut("gluon 16 bits d256", 49, 0.97, 1.044),
    HeldOut("gluon 16 bits d256, other schedules", 35, 0.908, 1.133),
    HeldOut("gluon 16 bits d64", 55, 0.942, 1.032),
    HeldOut("gluon 16 bits d64, other schedules", 90, 0.901, 1.082),
    HeldOut("gluon 16 bits d96, d192", 23, 1.004, 1.093),
    HeldOut("gluon 16 bits, 60 to 200 us", 78, 0.896, 1.052),
    HeldOut("gluon backward d128", 30, 0.965, 1.065),
    HeldOut("gluon backward d256", 30, 0.92, 0.981),
    HeldOut("gluon backward d64", 30, 0.967, 0.995),
    HeldOut("gluon backward d96, d192", 30, 0.95, 1.093),
    HeldOut("gluon e4m3 d128", 90, 0.955, 1.002),
    HeldOut("gluon e4m3 d128, other schedules", 75, 0.889, 1.085),
    HeldOut("gluon e4m3 d192", 24, 0.845, 0.994),
    HeldOut("gluon e4m3 d256", 64, 0.957, 1.146),
    HeldOut("gluon e4m3 d256, other schedules", 31, 0.93, 1.091),
    HeldOut("gluon e4m3 d64", 82, 0.885, 1.085),
    HeldOut("gluon e4m3 d64, other schedules", 63, 0.925, 1.117),
    HeldOut("gluon e4m3 d96", 20, 0.877, 1.015),
    HeldOut("gluon e4m3, 60 to 200 us", 152, 0.888, 1.032),
)
DESCRIBED = HeldOut("kernels of others, described before they were timed", 36, 0.55, 1.144)


def groups_of(problem: AttentionProblem, config: AnyConfig, cycles: float) -> list[str]:
    """Return the classes of a launch that is simulated to take ``cycles``, the finest first.

    Too few were timed, so that there is none, of windows; of decoding with heads apart; and else of packed sequences,
    caches and keys in parts, and of schedules that other families do not launch.
    """
    kernel = kernel_of(config)
    parts, is_packed, *_ = kernel.row
    decodes = isinstance(config, Config) and problem.seqlen_q <= DECODED
    is_shipped = kernel.is_shipped(problem)
    is_plain = parts == 1 and not problem.is_varlen and (is_shipped or config.family == OURS)
    if problem.is_windowed or problem.attention_chunk or not (is_packed if decodes else is_plain):
        return []
    length = next((name for most, name in LENGTHS.items() if cycles <= most), "")
    if cycles <= sorted(LENGTHS)[1]:
        return [f"{kernel.kind}, {length}"]
    if decodes:
        where = "over pages" if problem.cache else "packed" if problem.is_varlen else "in a batch"
        return [f"decode {where}, {kernel.kind}", f"decode, {kernel.kind}"]
    if length:
        return [f"{config.family} {kernel.kind}, {length}", f"{kernel.kind}, {length}"]
    widths = (f"d{config.head_dim}", "d96, d192" if config.head_dim in WIDE else "d64, d128, d256")
    return [f"{config.family} {kernel.kind} {width}{', other schedules' * (not is_shipped)}" for width in widths]


def is_measured(machine: Machine) -> bool:
    """Tell whether timings were taken on a machine: with ``--what-if`` on none."""
    return machine.name == "H200" and not machine.assumed()


def held_out(problem: AttentionProblem, config: AnyConfig, machine: Machine, cycles: float) -> HeldOut | None:
    """Return what timings say of a launch that is simulated to take ``cycles``; None where too few are of its class,
    and on another machine, or one with an assumed constant.

    >>> from fa3_kernels.plan.config import Config
    >>> from fa3_simulator.machine import load
    >>> held_out(AttentionProblem(1, 16, 16, 8192, 8192, 128), Config(), load("h200"), 1_302_302).group
    'gluon 16 bits d128'
    """
    groups = groups_of(problem, config, cycles) if is_measured(machine) else []
    return next((known for group in groups for known in TIMED if known.group == group), None)


def places(timed: Sequence[tuple[float, HeldOut | None]]) -> list[int]:
    """Return the place of each of some times in cycles, which rise, from 1; with each stands what timings say of it.

    A time shares a place with the first of the place if it exceeds that by at most half of the wider interval of both.

    >>> places([(100, HeldOut("", 20, 0.97, 1.02)), (102, None), (104, None), (106, None)])
    [1, 1, 3, 4]
    """
    numbers: list[int] = []
    first = 0
    for index, (cycles, known) in enumerate(timed):
        shortest, of_first = timed[first]
        if cycles > shortest * (1 + max(each.half_width if each else 0.0 for each in (known, of_first))):
            first = index
        numbers.append(first + 1)
    return numbers
