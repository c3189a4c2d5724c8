"""How far off the simulator is on problems that a seed drew from the heads of public models, none of them in a list.

    python -m fa3_reports.measured.drawn_cells --draw              prints the problems
    python -m fa3_reports.measured.drawn_cells --predict FILE.csv  simulates them at the maximum clock
    python -m fa3_reports.measured.drawn_cells BENCH.jsonl ...     the errors of every class, each row at its clock

The problems of ``reports/h200/speed/drawn/problems.txt`` and what was predicted of them were committed before ``bench
--grid drawn`` and ``--grid backward_drawn`` timed them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.choose import H200_SMS
from fa3_kernels.plan.plan import plan_of
from fa3_kernels.plan.request import Choices, request_for
from fa3_reports.bench import results
from fa3_reports.bench.cells import Cell, select
from fa3_simulator import backward_choice, forward_choice
from fa3_simulator.cta import AnyConfig
from fa3_simulator.machine import load
from fa3_simulator.run import estimate
from fa3verify import files
from fa3verify.cases.practice import models

SEED = 20261130
COUNTS = {"forward": 40, "decode": 24, "backward": 16}
TOKENS = 16384  # at most, of a forward and of a backward
FORWARDS = ("bf16", "e4m3", "fp16", "e4m3")  # in turn
CHUNKED = 4  # of every five
# Families of whose kernels the simulator knows the schedule, by the names that bench has for them.
FAMILIES = {"flash3": "flash3", "flash3.dew": "flash3"}
TURNS = "gluon.deterministic"
# Gradients of ours whose last heads have been handed out together since they were timed.
MOVED = tuple(
    f"backward_drawn {name} causal" for name in ("bf16 b6 h32/2 2554x2554 d128", "fp16 b2 h8/4 5877x5877 d256")
)


def drawn() -> list[str]:
    """Draw the problems: heads and head dims of public models, lengths that nothing chose, a line each.

    Lengths of forwards and gradients are drawn evenly in their logarithm; a fifth of the forwards are chunks, whose
    queries are the last of more keys.
    """
    rng = np.random.default_rng(SEED)
    heads = ((x.nheads, x.nheads_kv, x.head_dim, x.head_dim_v or x.head_dim) for x in (m.share for m in models()))
    layers = sorted(set(heads))
    lines = []

    def length(low: int, high: int) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high))))

    def layer(dtype: str, is_wide: bool = False) -> str:
        """Return heads and head dims; V of another head_dim only where that is served, e4m3 of rows that TMA takes."""
        nheads, nheads_kv, head_dim, head_dim_v = layers[rng.integers(len(layers))]
        if (head_dim != head_dim_v and not is_wide) or (dtype == "e4m3" and head_dim % 16):
            return layer(dtype, is_wide)
        return f"{nheads}/{nheads_kv} d{head_dim}/{head_dim_v} {dtype}"

    def mask() -> str:
        return " causal" if rng.random() < 0.5 else ""

    for i in range(COUNTS["forward"]):
        keys = length(400, 14000)
        queries = length(200, keys) if i % 5 == CHUNKED else keys
        batch = max(1, min(16, TOKENS // queries))
        lines.append(f"{layer(FORWARDS[i % 4], True)} {batch} x {queries} x {keys}{mask()}")
    for i in range(COUNTS["decode"]):
        batch, page = (1, 8, 64)[i % 3], (1, 16, 64)[i // 3 % 3]
        keys = length(1000, 65000 // max(1, batch // 8))
        lines.append(f"{layer(('bf16', 'e4m3')[i % 2])} {batch} x 1 x {keys} page {page}")
    for i in range(COUNTS["backward"]):
        keys = length(500, 9000)
        lines.append(f"{layer(('bf16', 'fp16')[i % 2])} {max(1, TOKENS // keys)} x {keys}{mask()} backward")
    return lines


class Launched(NamedTuple):
    """A launch of a cell: the kernel's name in bench's tables, and its configuration."""

    cell: Cell
    kernel: str
    config: AnyConfig

    @property
    def kind(self) -> str:
        """Return the class that errors are given for."""
        p = self.cell.problem
        who = "ours" if self.kernel.startswith("gluon") else "FlashAttention-3"
        if self.cell.operation == "backward":
            return f"gradients, {who}{', fixed order' if self.kernel == TURNS else ''}"
        if p.cache:
            return f"decode over pages, {who}"
        return f"forward, {who}, {'e4m3' if p.dtype == 'e4m3' else '16 bits'}"

    @property
    def has_moved(self) -> bool:
        """Tell whether it hands out its tiles otherwise than when it was timed."""
        return self.cell.key in MOVED and self.kernel == "gluon"

    def cycles(self, clock_mhz: float | None = None) -> float:
        """Return simulated cycles at a clock, the maximum one by default."""
        return estimate(self.cell.problem, self.config, load("h200"), clock_mhz).cycles


def launched(cell: Cell) -> Iterator[Launched]:
    """Yield the launches of a cell whose schedule is known: ours, and official FlashAttention-3's."""
    problem = cell.problem
    if cell.operation == "backward":
        yield Launched(cell, "gluon", backward_choice.schedule_for(problem))
        turns = "ascending" if problem.causal else "shift"  # the nearest to ours, whose tiles turn back
        with suppress(ValueError):
            yield Launched(cell, TURNS, backward_choice.schedule_for(problem, turns=turns))
        with suppress(ValueError):
            yield Launched(cell, "flash3.dew", backward_choice.schedule_for(problem, "flash3"))
        return
    parts = 0 if cell.line else 1
    yield Launched(cell, "gluon", plan_of(request_for(problem, Choices(num_splits=parts)), H200_SMS).config)
    if not cell.line:
        for kernel, family in FAMILIES.items():
            with suppress(ValueError):
                yield Launched(cell, kernel, forward_choice.schedule_for(problem, family))


def cells() -> list[Cell]:
    """Return all cells of both grids."""
    every = ("bf16", "fp16", "e4m3")
    return [*select("drawn", every), *select("backward_drawn", every)]


def compared(*paths: Path) -> Iterator[tuple[Launched, float, float]]:
    """Yield the launches that records of bench have cycles of, with simulated and measured cycles at the row's clock;
    those that hand out their tiles otherwise since are left out.
    """
    known = {key: record for path in paths for key, record in results.read(path).cells.items()}
    for cell in cells():
        for each in launched(cell):
            row = known[cell.key].of(each.kernel) if cell.key in known else None
            if row and row.status == results.MEASURED and row.burst_cycles > 0 and not each.has_moved:
                yield each, each.cycles(row.burst_sm_mhz), row.burst_cycles


def errors(*paths: Path) -> dict[str, list[tuple[float, str]]]:
    """Return simulated over measured cycles, less 1, of every class, each with its cell."""
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for each, simulated, measured in compared(*paths):
        found[each.kind].append((simulated / measured - 1, each.cell.key))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw, predict, or compare."""
    parser = argparse.ArgumentParser(prog="python -m fa3_reports.measured.drawn_cells", description=__doc__)
    parser.add_argument("bench", type=Path, nargs="*", metavar="BENCH.jsonl")
    parser.add_argument("--draw", action="store_true", help="print the problems")
    parser.add_argument("--predict", type=Path, metavar="FILE.csv", help="write simulated cycles")
    chosen = parser.parse_args(arguments)
    if chosen.draw:
        print("\n".join(drawn()))
    if chosen.predict:
        rows = [(each.cell.key, each.kernel, round(each.cycles())) for cell in cells() for each in launched(cell)]
        files.write_text(chosen.predict, files.csv_text(("cell", "kernel", "cycles"), rows))
    if chosen.bench:
        for kind, rows in errors(*chosen.bench).items():
            values = np.array([error for error, _ in rows])
            size = np.abs(values)
            worst, where = max(rows, key=lambda row: abs(row[0]))
            print(f"{kind}: {len(rows)} rows, mean {size.mean():.1%}, bias {values.mean():+.1%}, largest {worst:+.1%}")
            print(f"    {where}")


if __name__ == "__main__":
    main()
