"""How far off the simulator is where a server calls: pages, chunks, packed sequences and windows.

``python -m fa3_reports.measured.served_cells`` prints the mean error of every class over the launches of our kernels in
``reports/h200/serving/serving.json`` and ``reports/h200/speed``, in ``unlisted``, ``practice`` and ``drawn``. Problems
are given to the simulator as a call has them: heads, parts and the tile are those that the call chooses. A clock that
was not recorded is predicted. The graphs of serving.json launch on the same keys again and again: where all K and V fit
L2 they are read from there, and the simulator, which has L2 cold, is compared in a class of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fa3verify
from fa3_kernels.plan.call import Pages
from fa3_kernels.plan.request import DTYPES
from fa3_kernels.plan.tiles import power_of_two
from fa3_reference.layout import Cache
from fa3_reference.problem import AttentionProblem
from fa3_reports.bench import results
from fa3_reports.stored import read_csv
from fa3_simulator import forward_choice
from fa3_simulator.clock import busy_shares, clock_under_load
from fa3_simulator.machine import load

H200 = Path(__file__).parents[2] / "h200"
SHORT_US = 25.0
L2_BYTES = 50 * 2**20


class ServedCell(NamedTuple):
    """A timed launch of ours: its problem, the parts that were asked for (None: as the call has them), microseconds,
    the SM clock in MHz, 0 where it was not recorded, which is where every launch had the same operands, and where it
    was timed.
    """

    problem: AttentionProblem
    num_splits: int | None
    us: float
    sm_mhz: float = 0.0
    campaign: str = "serving"

    @property
    def is_gathered(self) -> bool:
        """Tell whether a warpgroup copies keys row by row."""
        p = self.problem
        if not (p.cache and p.cache.page_size):
            return False
        config = forward_choice.schedule_for(p, num_splits=self.num_splits)
        return not Pages(p.cache.page_size, 0, (), ()).are_boxes(config.tile_n, config.bits)

    @property
    def kind(self) -> str:
        """Return the class that errors are given for."""
        p = self.problem
        if p.window != (-1, -1):
            return "windows"
        where = "over pages" if p.cache else "packed"
        if p.seqlen_q > 16:
            return f"{'prompts' if p.seqlen_q == p.seqlen_k else 'chunks'} {where}"
        if not self.sm_mhz and 2 * prod(p.k_shape) * (1 if p.dtype == "e4m3" else 2) < L2_BYTES:
            return f"decode {where}, K and V in L2"
        return f"decode {where}"

    @property
    def error(self) -> float:
        """Return simulated over measured time, minus 1."""
        choices: dict[str, Any] = {} if self.num_splits is None else {"num_splits": self.num_splits}
        found = fa3verify.simulate(self.problem, **choices, clock_mhz=self.sm_mhz or None)
        if not self.sm_mhz:
            mhz = clock_under_load(load("h200"), self.problem.dtype, *busy_shares(found))
            found = fa3verify.simulate(self.problem, **choices, clock_mhz=mhz)
        return found.seconds * 1e6 / self.us - 1


def cells() -> Iterator[ServedCell]:
    """Yield every timed launch of our kernels whose lengths are on record and that is launched today as it was then.

    Since then groups that are no power of two are packed, and small pages of e4m3 and at head_dim 64 are copied
    otherwise.
    """
    yield from _benched()
    for cell in _timed():
        p = cell.problem
        is_small = p.cache is not None and p.cache.page_size == 16 and (p.dtype == "e4m3" or p.head_dim <= 64)
        if not is_small and (p.cache is None or p.group == power_of_two(p.group)):
            yield cell


def _benched() -> Iterator[ServedCell]:
    """Yield what bench timed over pages; it chooses the parts as a call does."""
    for grid in ("practice", "drawn"):
        for record in results.read(H200 / "speed" / grid / "bench.jsonl").cells.values():
            row = record.of("gluon")
            if record.cell.line and row.status == results.MEASURED:
                yield ServedCell(record.cell.problem, None, 1e3 * row.burst_ms, row.burst_sm_mhz, grid)


def _timed() -> Iterator[ServedCell]:
    for row in json.loads((H200 / "serving" / "serving.json").read_text(encoding="utf-8"))["rows"]:
        if row["is_ragged"]:
            continue
        lengths = [(row[name],) * row["batch"] for name in ("queries", "keys")]
        sizes = {"nheads": 32, "nheads_kv": row["heads_kv"], "head_dim": 128, "dtype": DTYPES[row["dtype"]]}
        problem = AttentionProblem.varlen(*lengths, **sizes, causal=row["queries"] > 1)
        yield ServedCell(_in_pages(problem, row["page_size"]), None, row["us"]["ours"])
        if row["page_size"] == 16:
            yield ServedCell(problem, 0, row["us"]["packed"])
    for row in read_csv(H200 / "speed" / "unlisted" / "unlisted.csv"):
        is_ours = row["pass"] in ("forward", "pages") and row["kernel"] in ("gluon", "gluon.one")
        if not is_ours or not (row["window"] or row["page_size"]):
            continue
        batch, queries, keys, nheads, nheads_kv, head_dim = (
            int(row[name]) for name in ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_kv", "head_dim")
        )
        left, right = map(int, (row["window"] or "-1:-1").split(":"))
        sizes = {"nheads": nheads, "nheads_kv": nheads_kv, "head_dim": head_dim, "dtype": row["dtype"]}
        sizes |= {"causal": row["causal"] == "True", "window": (left, right)}
        problem = AttentionProblem(batch, seqlen_q=queries, seqlen_k=keys, **sizes)
        if row["page_size"]:
            packed = AttentionProblem.varlen((queries,) * batch, (keys,) * batch, **sizes)
            problem = _in_pages(packed, int(row["page_size"]))
        parts = 1 if row["kernel"] == "gluon.one" else None
        yield ServedCell(problem, parts, 1e3 * float(row["ms"]), float(row["sm_mhz"]), "unlisted")


def _in_pages(problem: AttentionProblem, page_size: int) -> AttentionProblem:
    return replace(problem, cache=Cache(page_size=page_size))


def errors() -> dict[str, np.ndarray]:
    """Return the errors of every class, and of short launches over pages."""
    found: dict[str, list[float]] = {}
    for cell in cells():
        error = cell.error
        found.setdefault(cell.kind, []).append(error)
        if cell.us <= SHORT_US and cell.problem.cache and "L2" not in cell.kind:
            found.setdefault(f"over pages, up to {SHORT_US:.0f} us", []).append(error)
    return {kind: np.array(each) for kind, each in found.items()}


def main() -> None:
    """Print rows, mean, bias and largest error of every class."""
    for kind, each in errors().items():
        mean, bias, largest = np.abs(each).mean(), each.mean(), np.abs(each).max()
        print(f"{kind}: {len(each)} rows, mean {mean:.1%}, bias {bias:+.1%}, largest {largest:.0%}")


if __name__ == "__main__":
    main()
