"""What ``tune`` chooses for ten problems, timed: its first choice beside the next ones and beside what ships.

    python -m fa3_reports.measured.choices reports/h200/simulator/tune

times them on a GPU and writes ``choices.csv`` and the page made of it; with ``--page`` only the page. Candidates are
what our kernels can be launched with, a tile once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.config import Config
from fa3_reference.problem import AttentionProblem
from fa3_reports import stored
from fa3_simulator.machine import load
from fa3_simulator.run import in_words
from fa3_simulator.schedules import switches
from fa3_simulator.tune import tune
from fa3verify import files
from fa3verify.campaign.pool import processes

TOP = 5
TEN = (
    AttentionProblem(2, 16, 16, 8192, 8192, 128),
    AttentionProblem(2, 16, 16, 8192, 8192, 128, causal=True),
    AttentionProblem(4, 32, 32, 4096, 4096, 64, dtype="bf16", causal=True),
    AttentionProblem(4, 8, 8, 4096, 4096, 256, dtype="bf16"),
    AttentionProblem(2, 16, 16, 8192, 8192, 128, dtype="e4m3"),
    AttentionProblem(4, 32, 32, 4096, 4096, 64, dtype="e4m3", causal=True),
    AttentionProblem(2, 8, 8, 8192, 8192, 256, dtype="e4m3", causal=True),
    AttentionProblem(4, 32, 8, 2048, 2048, 128, causal=True),
    AttentionProblem(5, 21, 21, 2048, 2048, 96, dtype="bf16", causal=True),
    AttentionProblem(32, 32, 8, 1, 8192, 128),
)


class Choice(NamedTuple):
    """One schedule of one of :data:`TEN`, by its number; ``place`` by simulated time, 0 for what ships, if not among
    the first; ``measured`` cycles of a launch, median of bursts.
    """

    problem: int
    place: int
    tile: str
    schedule: str
    heads: str
    parts: int
    simulated: int
    measured: float


def chosen(problem: AttentionProblem, machine: str) -> list[tuple[int, Config, float]]:
    """Place, configuration and simulated cycles of the first :data:`TOP` tiles, and of what ships (place 0)."""
    found = tune(problem, load(machine), family="gluon")
    ranked = [(r.config, r.estimate.cycles) for r in found if isinstance(r.config, Config) and r.is_launchable]
    tiles: dict[tuple, tuple[Config, float]] = {}
    for c, cycles in ranked:
        tiles.setdefault((c.tile_m, c.tile_n, c.num_splits, c.pack_gqa), (c, cycles))
    first = [(place, *value) for place, value in enumerate(list(tiles.values())[:TOP], 1)]
    ships = _launch(config_of(problem, num_splits=0))
    if ships in [_launch(c) for _, c, _ in first]:
        return first
    return first + [(0, c, cycles) for c, cycles in ranked if _launch(c) == ships][:1]


def all_chosen(machine: str) -> list[list[tuple[int, Config, float]]]:
    """Of every problem of :data:`TEN`, simulated in a process for each core."""
    with processes() as pool:
        return list(pool.map(partial(chosen, machine=machine), TEN))


def _launch(c: Config) -> tuple:
    return (c.tile_m, c.tile_n, c.pingpong, c.intra_wg_overlap, c.promotion_interval, c.num_splits, c.pack_gqa)


def record(path: Path, machine: str) -> None:
    """Time all on this machine's GPU; every problem is written when it is done."""
    found: list[Choice] = []
    for number, (problem, candidates) in enumerate(zip(TEN, all_chosen(machine), strict=True)):
        cycles = _cycles(problem, [config for _, config, _ in candidates])
        for (place, c, simulated), measured in zip(candidates, cycles, strict=True):
            heads = "packed" if c.pack_gqa else ""
            row = (number, place, f"{c.tile_m}x{c.tile_n}", switches(c), heads, c.num_splits, round(simulated))
            found.append(Choice(*row, measured))
        files.write_text(path, csv_text(found))
        print(in_words(problem), [f"{x:.0f}" for x in cycles], flush=True)


def _cycles(problem: AttentionProblem, configs: Sequence[Config]) -> list[float]:
    """Median cycles of a launch; NaN for what is refused, or has other bits than its twin."""
    from fa3verify.bench.tuning import measure_cycles, options_of

    found = measure_cycles(problem, [options_of(config, problem) for config in configs])
    for config, cycles in zip(configs, found, strict=True):
        if isinstance(cycles, str):
            print(config.tile_m, config.tile_n, cycles, flush=True)
    return [float("nan") if isinstance(cycles, str) else cycles for cycles in found]


def csv_text(rows: Sequence[Choice]) -> str:
    return files.csv_text(Choice._fields, [(*row[:-1], f"{row.measured:.0f}") for row in rows])


def read(path: Path) -> list[Choice]:
    """Rows of ``choices.csv``."""
    kinds: tuple[Any, ...] = (int, int, str, str, str, int, int, float)
    rows = stored.read_csv(path, Choice._fields)
    return [Choice(*(kind(row[name]) for kind, name in zip(kinds, Choice._fields, strict=True))) for row in rows]


def regret(rows: Sequence[Choice]) -> tuple[float, float]:
    """What the first choice, and what ships, take longer than the fastest of one problem; NaN if it was not timed."""
    timed = [row.measured for row in rows if row.measured == row.measured]
    first = next((row.measured for row in rows if row.place == 1), float("nan"))
    ships = next((row.measured for row in rows if row.place == 0), float("nan"))
    return first / min(timed) - 1, ships / min(timed) - 1


def page(rows: Sequence[Choice]) -> str:
    """The page of the rows."""
    lines = [
        "# What tune chooses, timed",
        "",
        f"Of each problem the first {TOP} tiles that our kernels can be launched with, by simulated time, and what",
        "ships where it is not among them: cycles of a launch in cool bursts, by the counters. Regret: the time of the",
        "first choice over the fastest of those timed, less 1.",
        "",
    ]
    header = "problem", "first choice", "kilocycles", "simulated", "fastest timed", "regret", "regret of what ships"
    told = []
    regrets = []
    for number in sorted({row.problem for row in rows}):
        mine = [row for row in rows if row.problem == number]
        first = next(row for row in mine if row.place == 1)
        best = min((row for row in mine if row.measured == row.measured), key=lambda row: row.measured)
        lost, shipped = regret(mine)
        regrets.append(lost)
        kilocycles = f"{first.measured / 1e3:.1f}", f"{first.simulated / 1e3:.1f}"
        ships = "first five" if shipped != shipped else f"{shipped:.1%}"
        told.append((in_words(TEN[number]), _named(first), *kilocycles, _named(best), f"{lost:.1%}", ships))
    median = statistics.median(regrets)
    worst = max(regrets)
    whole = f"Regret of {len(regrets)} problems of {len(TEN)}: median {median:.1%}, worst {worst:.1%}."
    return "\n".join([*lines, *files.markdown_table(header, told), whole, ""])


def _named(row: Choice) -> str:
    parts = f", {row.parts} parts" if row.parts > 1 else ""
    return f"{row.tile} {row.schedule}{parts}{f', {row.heads}' if row.heads else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Time and write, or only write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m fa3_reports.measured.choices", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--page", action="store_true", help="write the page of choices.csv again")
    asked = parser.parse_args(arguments)
    if not asked.page:
        record(asked.folder / "choices.csv", asked.machine)
    files.write_text(asked.folder / "choices.md", page(read(asked.folder / "choices.csv")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
