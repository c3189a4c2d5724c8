"""The table of :mod:`fa3_simulator.held_out`, and how it fares on campaigns of timings that it is not made from.

``python -m fa3_reports.measured.intervals`` simulates 1,900 published timings of an H200, which takes a minute, and
prints the table. ``--campaigns`` leaves one campaign out after the other, makes the table from the others, and prints
how many of those that were left out it covers. ``--judge`` prints what the published table covers of
reports/h200/speed/unlisted, from which no class is made.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import floor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.config import default_config
from fa3_reference.problem import AttentionProblem
from fa3_reports.bench_rows import read_rows
from fa3_reports.measured import described_cells, drawn_cells, served_cells
from fa3_reports.measured.timings import read
from fa3_reports.stored import read_csv
from fa3_simulator import backward_choice, forward_choice
from fa3_simulator.cta import AnyConfig
from fa3_simulator.held_out import DESCRIBED, TIMED, HeldOut, groups_of
from fa3_simulator.machine import load
from fa3_simulator.run import estimate

H200 = Path(__file__).parents[2] / "h200"
FORWARD = (
    *(f"simulator/schedules_{name}" for name in ("1k_4k_16k", "2k_8k_fp16", "2k_8k_e4m3_d256", "chained")),
    *(f"simulator/{name}" for name in ("unseen", "unseen2", "unseen3")),
    *(f"speed/{name}" for name in ("paper_grid", "flash4", "decode", "fresh", "ragged", "widths")),
    *(f"speed/{name}" for name in ("accumulator_loss", "sustained")),
)
BACKWARD = ("speed/backward/bench.jsonl", "speed/backward_widths/bench.jsonl")
FAMILIES = {"gluon": "gluon", "flash3.dew": "flash3"}  # of which backward passes are read
FITTED = (41000, 65000)  # keys of the launches over pages, in one part, from which the cost of a page is
LEAST = 20  # rows of a class
COVERED = 0.9


class Launched(NamedTuple):
    """A timed launch: where it was timed, what it is, measured cycles, and the SM clock in MHz."""

    campaign: str
    problem: AttentionProblem
    config: AnyConfig
    cycles: float
    sm_mhz: float


class Ratio(NamedTuple):
    """Simulated over measured time of a launch of some campaign, and its classes, the finest first."""

    campaign: str
    groups: list[str]
    ratio: float


def launches() -> Iterator[Launched]:
    """Yield the timed launches whose schedule is known and has not changed; of equal ones in a campaign the first."""
    found = {(each.campaign, each.problem, each.config, kernel): each for kernel, each in reversed([*_timed()])}
    yield from reversed(found.values())


def _timed() -> Iterator[tuple[str, Launched]]:
    for folder in FORWARD:
        for row in read(H200 / folder / "bench.jsonl")[0]:
            yield row.kernel, Launched(folder, row.problem, row.config, row.cycles, row.clock_mhz)
    for path in BACKWARD:
        for row in read_rows(H200 / path):
            family = FAMILIES.get(row["kernel"])
            if not (family and row["burst_cycles"] and "backward" in row["grid"]):
                continue
            sizes = [int(row[name]) for name in ("batch", "nheads", "nheads_kv", "seqlen_q", "seqlen_k", "head_dim")]
            own: dict[str, Any] = {"dtype": row["dtype"], "causal": row["causal"] == "True"}
            problem = AttentionProblem(*sizes, head_dim_v=int(row.get("head_dim_v") or row["head_dim"]), **own)
            schedule = backward_choice.schedule_for(problem, family)
            counted = float(row["burst_cycles"]), float(row["burst_sm_mhz"])
            yield row["kernel"], Launched(path, problem, schedule, *counted)


def ratios() -> Iterator[Ratio]:
    """Simulate every launch, and those of servers whose clock is predicted, and described kernels."""
    machine = load("h200")
    for each in launches():
        simulated = estimate(each.problem, each.config, machine, each.sm_mhz).cycles
        groups = groups_of(each.problem, each.config, simulated)
        yield Ratio(each.campaign, groups, simulated / each.cycles)
    for cell in served_cells.cells():
        is_fitted = cell.campaign == "practice" and cell.is_gathered and cell.problem.seqlen_q == 1
        if cell.campaign != "unlisted" and "L2" not in cell.kind and not is_fitted:
            yield Ratio(cell.campaign, _groups(cell), 1 + cell.error)
    for folder in (described_cells.UNSEEN, described_cells.SECOND):
        for cell in described_cells.cells(folder):
            yield Ratio(folder.name, [DESCRIBED.group], 1 + cell.error)


def _groups(cell: served_cells.ServedCell) -> list[str]:
    config = forward_choice.schedule_for(cell.problem, num_splits=cell.num_splits)
    cycles = estimate(cell.problem, config, load("h200"), cell.sm_mhz or None).cycles
    return groups_of(cell.problem, config, cycles)


def bounds(ratios: Sequence[float], covered: float = COVERED) -> tuple[float, float]:
    """Return between which two of n ratios a further one lies with a probability of at least ``covered``, if all come
    in any order alike: the k-th from either end, with k = floor((n + 1)(1 - covered) / 2).

    >>> bounds([0.9, *[1.0] * 18, 1.2])
    (0.9, 1.2)
    """
    beyond = floor((len(ratios) + 1) * (1 - covered) / 2 + 1e-9)
    ordered = sorted(ratios)
    return ordered[beyond - 1], ordered[-beyond]


def table(rows: Iterable[Ratio]) -> list[HeldOut]:
    """Return every class that is the finest with enough rows for one of them, by name."""
    rows = [*rows]
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for group in row.groups:
            found[group].append(row.ratio)
    enough = {group: each for group, each in found.items() if len(each) >= LEAST}
    used = {next((group for group in row.groups if group in enough), "") for row in rows}
    made = []
    for group in sorted(used & set(enough)):
        low, high = bounds(enough[group])
        made.append(HeldOut(group, len(enough[group]), round(low, 3), round(high, 3)))
    return made


class Fared(NamedTuple):
    """A launch that a table was not made from: its class, whether it was covered, and half the interval's width."""

    campaign: str
    group: str
    is_covered: bool
    half_width: float


def fared(rows: Iterable[Ratio], known: Sequence[HeldOut]) -> Iterator[Fared]:
    """Yield how a table fares on rows of which it says something."""
    classes = {each.group: each for each in known}
    for row in rows:
        if found := next((classes[group] for group in row.groups if group in classes), None):
            yield Fared(row.campaign, found.group, found.low <= row.ratio <= found.high, found.half_width)


def left_out(rows: Sequence[Ratio]) -> Iterator[Fared]:
    """Yield how each campaign fares by the table of the others."""
    for campaign in dict.fromkeys(row.campaign for row in rows):
        known = table(row for row in rows if row.campaign != campaign)
        yield from fared((row for row in rows if row.campaign == campaign), known)


def judged() -> Iterator[Ratio]:
    """Simulate the launches of reports/h200/speed/unlisted that have not changed, of ours and of FlashAttention-3, and
    the forwards and gradients that a seed drew, but for gradients whose tiles are handed out in another order now.

    Those over pages that the cost of a page was fitted to are left out.
    """
    drawn = (H200 / "speed" / name / "bench.jsonl" for name in ("drawn", "backward_drawn"))
    for each, simulated, measured in drawn_cells.compared(*drawn):
        if not each.cell.line and each.kernel != drawn_cells.TURNS:
            groups = groups_of(each.cell.problem, each.config, simulated)
            yield Ratio(each.cell.grid, groups, simulated / measured)
    for cell in served_cells.cells():
        if cell.campaign == "unlisted" and not (cell.num_splits == 1 and cell.problem.seqlen_k in FITTED):
            yield Ratio("unlisted", _groups(cell), 1 + cell.error)
    for row in read_csv(H200 / "speed" / "unlisted" / "unlisted.csv"):
        family, _, variant = row["kernel"].partition(".")
        is_plain = row["pass"] != "pages" and row["is_packed"] != "True" and not row["window"]
        if is_plain and row["cycles"] and family in ("gluon", "flash3"):
            with suppress(ValueError):  # orders that have no class, and tiles that are not known
                yield _judged(row, family, variant)


def _judged(row: Mapping[str, str], family: str, variant: str) -> Ratio:
    """Simulate a launch of a plain batch; ValueError for one whose schedule is not known."""
    sizes = [int(row[name]) for name in ("batch", "nheads", "nheads_kv", "seqlen_q", "seqlen_k", "head_dim")]
    own: dict[str, Any] = {"dtype": row["dtype"], "causal": row["causal"] == "True"}
    problem = AttentionProblem(*sizes, head_dim_v=int(row["head_dim_v"]), **own)
    is_step = problem.seqlen_q == 1
    config: AnyConfig
    if variant == "deterministic" or (is_step and variant == "dew"):
        raise ValueError("neither its order nor its parts of the keys have a class")
    if row["pass"] == "backward":
        config = backward_choice.schedule_for(problem, family)
    elif family == "gluon":
        changes: dict[str, Any] = {"promotion_interval": 0} if variant == "chained" else {}
        config = config_of(problem, num_splits=0 if is_step else 1, **changes)
    elif problem.head_dim_v != problem.head_dim:
        raise ValueError("FlashAttention-3 with V of another width is not known")
    else:
        config = default_config(problem, family=family, num_splits=0 if is_step else 1)
    simulated = estimate(problem, config, load("h200"), float(row["sm_mhz"])).cycles
    return Ratio("unlisted", groups_of(problem, config, simulated), simulated / float(row["cycles"]))


def lines(found: Sequence[Fared]) -> Iterator[str]:
    """Yield what was covered of every campaign and class, and of all."""
    for one in ("campaign", "group"):
        parts: dict[str, list[Fared]] = defaultdict(list)
        for each in found:
            parts[getattr(each, one)].append(each)
        for name, each in sorted(parts.items()):
            yield f"{name}: {len(each)} rows, {np.mean([x.is_covered for x in each]):.1%} covered"
    halves = [each.half_width for each in found]
    covered = np.mean([each.is_covered for each in found])
    yield f"all: {len(found)} rows, {covered:.1%} covered, median half-width {np.median(halves):.1%}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or how it fares."""
    parser = argparse.ArgumentParser(prog="python -m fa3_reports.measured.intervals")
    parser.add_argument("--campaigns", action="store_true", help="leave one campaign out after the other")
    parser.add_argument("--judge", action="store_true", help="the published table on rows that it is not made from")
    chosen = parser.parse_args(arguments)
    if chosen.judge:
        print(*lines([*fared(judged(), TIMED)]), sep="\n")
    elif chosen.campaigns:
        print(*lines([*left_out([*ratios()])]), sep="\n")
    else:
        print(*table(ratios()), sep="\n")


if __name__ == "__main__":
    main()
