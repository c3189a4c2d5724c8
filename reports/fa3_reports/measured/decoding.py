"""Who decodes how fast: ours over pages beside vLLM's build of FlashAttention-3, with the heads of public models.

    python -m fa3_reports.measured.decoding > reports/h200/serving/decoding.md

Rows are the cells over pages of ``bench --grid practice`` and ``--grid drawn``; both sides get their schedule before
the timed region, as servers make it once for all layers of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fa3_reports.bench import results
from fa3_reports.bench.cells import Cell
from fa3_reports.bench.results import MEASURED
from fa3verify.files import markdown_table

SPEED = Path(__file__).parents[2] / "h200" / "speed"
GRIDS = ("practice", "drawn")
LARGEST_PACKED = 64  # heads of a group that one tile holds; those of larger groups read the keys for themselves
PEER = "vllm"
KINDS = {"decode": "a step of decoding", "chunk": "a chunk of a prompt"}

TEXT = """# Who decodes how fast

Time of vLLM's build of FlashAttention-3 (wheel `vllm` 0.33.0) over ours, so that above 1 ours is faster, on an NVIDIA
H200, 2026-11-30. Heads and head dims are those of public models, keys lie in pages in random order, and both get their
schedule before the timed region, as servers make it once a step. Cool bursts of CUDA graphs, in turns; bits of ours are
those of the twin in the rows that were compared. Data: [practice](../speed/practice/bench.jsonl.xz), lengths of a list,
of e4m3 22 of 42 cells, and [drawn](../speed/drawn/bench.jsonl.xz), which a seed chose. Three cells of e4m3 at head
dims 80 and 96, where ours were 1.44, 0.95 and, over pages of one key, 0.76 times as fast, have gone since, as their
kernels have changed. Made by `python -m fa3_reports.measured.decoding`.

Groups of more than {most} query heads (Falcon-7B's 71 on 1) are not packed by ours: each head reads the keys for
itself. They stand below and are in no mean.
"""


class Beside(NamedTuple):
    """A problem over pages that both were timed on; microseconds of a launch."""

    cell: Cell
    ours_us: float
    theirs_us: float

    @property
    def kind(self) -> str:
        return "decode" if self.cell.seqlen_q == 1 else "chunk"

    @property
    def page(self) -> int:
        cache = self.cell.problem.cache
        return cache.page_size if cache else 0

    @property
    def is_packed(self) -> bool:
        """Tell whether the heads of a group share the rows of a tile."""
        return self.cell.problem.group <= LARGEST_PACKED

    @property
    def ratio(self) -> float:
        """Return their time over ours."""
        return self.theirs_us / self.ours_us


def rows(folder: Path = SPEED) -> Iterator[Beside]:
    """Yield the cells over pages in which both have a time, of both grids."""
    for grid in GRIDS:
        for record in results.read(folder / grid / "bench.jsonl").cells.values():
            ours, theirs = record.of("gluon"), record.of(PEER)
            if record.cell.line and ours.status == theirs.status == MEASURED:
                yield Beside(record.cell, 1e3 * ours.burst_ms, 1e3 * theirs.burst_ms)


def mean(found: Sequence[Beside]) -> float:
    """Return the geometric mean of ratios; NaN without one."""
    return float(np.exp(np.mean(np.log([row.ratio for row in found])))) if found else float("nan")


def page() -> str:
    """Return the page in Markdown."""
    every = [*rows()]
    packed = [row for row in every if row.is_packed]
    lines = [TEXT.format(most=LARGEST_PACKED)]
    summary = []
    for kind, words in KINDS.items():
        for dtype in ("bf16", "e4m3"):
            some = [row for row in packed if (row.kind, row.cell.dtype) == (kind, dtype)]
            by_page = [f"{mean([row for row in some if row.page == size]):.2f}" for size in (1, 16, 64)]
            slow = sum(row.ratio < 0.95 for row in some)
            extremes = f"{min(row.ratio for row in some):.2f}", f"{max(row.ratio for row in some):.2f}"
            summary.append((words, dtype, len(some), f"{mean(some):.2f}", *by_page, *extremes, slow))
    titles = ("", "dtype", "cells", "mean", "pages of 1", "of 16", "of 64", "slowest", "fastest", "below 0.95")
    lines += markdown_table(titles, summary)
    for kind, words in KINDS.items():
        lines += [f"## {words[0].upper()}{words[1:]}", ""]
        some = sorted((row for row in every if row.kind == kind), key=lambda row: row.ratio)
        body = []
        for row in some:
            rate = row.cell.kv_bytes / row.ours_us / 1e3 if kind == "decode" else row.cell.flops / row.ours_us / 1e6
            what = row.cell.line.replace(f" {row.cell.dtype}", "").replace(f"/{row.cell.head_dim} ", " ")
            figures = (f"{row.ours_us:.1f}", f"{row.theirs_us:.1f}", f"{row.ratio:.2f}", f"{rate:.0f}")
            body.append((what, row.cell.dtype, row.cell.grid, *figures))
        unit = "GB/s of K and V" if kind == "decode" else "TFLOP/s"
        lines += markdown_table(("problem", "dtype", "grid", "ours, us", "theirs, us", "ratio", unit), body)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
