"""Records of measurements, in ``bench.jsonl``: a line per run and per complete cell, so that a run can go on later.

:mod:`fa3_reports.bench.run` appends them; :mod:`fa3_reports.bench.tables` makes tables of them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from fa3_reports import stored
from fa3_reports.bench.cells import Cell
from fa3_reports.bench.sustained import Times
from fa3verify import files, records
from fa3verify.files import Json
from fa3verify.judging.verdict import ratio_text
from fa3verify.records import OLDER
from fa3verify.timed.timing import cycles, median

SCHEMA = "fa3verify.bench/2"
MEASURED = "ok"


class SampleFigures(NamedTuple):
    """Figures of a kernel's outputs in some rows, which are checked before it is timed.

    ``bits_differing`` is -1 without a twin, or if nothing was compared; figures that were not computed are NaN.
    """

    outputs: int
    bits_differing: int
    rel_rmse: float  # against float64 attention of the dequantised operands
    gain: float  # regression of the output on the truth, less 1: negative is shrunk towards zero
    ratio_max: float = math.nan  # largest error over its bound, of a kernel without a twin

    @property
    def trouble(self) -> str | None:
        """Return why the kernel's time must not count, as it computes something else; None where that is not known."""
        if self.bits_differing > 0:
            return f"bits differ from the twin: {self.bits_differing} of {self.outputs} and their lse"
        if self.ratio_max > 1:
            return f"computes something else: error / bound {ratio_text(self.ratio_max)} in the sampled rows"
        return None


NOT_JUDGED = SampleFigures(0, -1, math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Switches:
    """Tile and switches that one of our kernels ran with; records have it under the key ``schedule``."""

    tile_m: int
    tile_n: int
    pingpong: bool
    overlap: bool
    warp_specialized: bool
    promotion_interval: int
    holds_turn: bool = field(default=False, metadata=OLDER)
    holds_queries: bool = field(default=False, metadata=OLDER)


@dataclass(frozen=True, slots=True)
class Measured:
    """One kernel in one cell; times are medians, NaN where there is none.

    ``status`` is ``ok``, or the reason why there is no time: wrong bits, or errors beyond the bound. ``*_sm_mhz`` is
    counted on the SMs during the run, ``*_driver_mhz`` is what the driver reports; ``burst_cycles`` are SM cycles per
    launch, ``sustained_w`` is the mean power under sustained load.
    """

    name: str
    status: str
    timed_by: str = ""
    burst_ms: float = math.nan
    burst_sm_mhz: float = math.nan
    burst_cycles: float = math.nan
    burst_driver_mhz: float = math.nan
    sustained_ms: float = math.nan
    sustained_sm_mhz: float = math.nan
    sustained_driver_mhz: float = math.nan
    sustained_w: float = field(default=math.nan, metadata=OLDER)
    rounds_ms: tuple[float, ...] = ()
    schedule: Switches | None = None
    outputs: int = 0
    bits_differing: int = -1
    rel_rmse: float = math.nan
    gain: float = math.nan


FIGURES = tuple(each.name for each in fields(Measured) if each.type == "float")


def measured(
    name: str, timed_by: str, times: Times, verdict: SampleFigures, schedule: Switches | None = None
) -> Measured:
    """Build the record of one kernel from its times and its verdict."""
    if verdict.trouble:
        times = Times()
    return Measured(
        name,
        verdict.trouble or MEASURED,
        timed_by,
        median(b.ms for b in times.bursts),
        median(b.sm_mhz for b in times.bursts),
        median(cycles(b) for b in times.bursts),
        median(times.burst_driver_mhz),
        median(b.ms for b in times.sustained),
        median(b.sm_mhz for b in times.sustained),
        median(times.sustained_driver_mhz),
        median(times.sustained_w),
        tuple(b.ms for b in times.bursts),
        schedule,
        verdict.outputs,
        verdict.bits_differing,
        verdict.rel_rmse,
        verdict.gain,
    )


@dataclass(frozen=True, slots=True)
class CellRecord:
    """One complete cell of one run."""

    run: str
    cell: Cell
    copies: int
    kernels: tuple[Measured, ...]

    def of(self, name: str) -> Measured:
        """Return the figures of a kernel here; all are NaN if it was not measured."""
        return next((m for m in self.kernels if m.name == name), Measured(name, "not measured"))

    def tflops(self, name: str, sustained: bool = False) -> float:
        """TFLOP/s of a kernel here; NaN without a time.

        >>> cell = Cell("paper", "fp16", 1, 1000, 1000, 1, 1, 250, False)
        >>> record = CellRecord("", cell, 1, (Measured("a", "ok", burst_ms=1.0),))
        >>> record.tflops("a")
        1.0
        """
        times = self.of(name)
        return self.cell.flops / 1e9 / (times.sustained_ms if sustained else times.burst_ms)

    def joules(self, name: str) -> float:
        """Energy of a launch under a kernel's own heat; NaN without one.

        >>> cell = Cell("paper", "fp16", 1, 1000, 1000, 1, 1, 250, False)
        >>> CellRecord("", cell, 1, (Measured("a", "ok", sustained_ms=2.0, sustained_w=700.0),)).joules("a")
        1.4
        """
        return self.of(name).sustained_w * self.of(name).sustained_ms / 1e3

    def ratio(self, name: str, peer: str) -> float:
        """Return how many times as fast as a peer a kernel is here; NaN if either has no time."""
        return self.tflops(name) / self.tflops(peer)

    def to_json(self) -> Json:
        """Return the record as a line of a file has it."""
        return {"kind": "cell", **records.plain(self)}


def launches_of(run: Json) -> str:
    """Return the hash of the launches that a run measured; "unknown" for older files, which do not have it."""
    return run.get("launches_sha256", "unknown")


@dataclass(slots=True)
class Results:
    """Everything in one ``bench.jsonl``: the latest record of every cell, and the provenance of every run."""

    cells: dict[str, CellRecord] = field(default_factory=dict)
    runs: dict[str, Json] = field(default_factory=dict)

    def is_done(self, cell: Cell, names: Iterable[str], kernel_hash: str) -> bool:
        """Tell whether a cell was measured with these kernels, launched as they are now."""
        record = self.cells.get(cell.key)
        if record is None or launches_of(self.runs[record.run]) != kernel_hash:
            return False
        return set(names) <= {m.name for m in record.kernels}

    def judged(self, cell: Cell, kernel_hash: str) -> set[tuple[str, Switches | None]]:
        """Return kernels, with their schedules, whose bits were found right in another cell with the same launches.

        Cells of grid ``schedules`` with the same dtype, head_dim and mask run the same compiled kernels. For any other
        grid it is empty.
        """
        right: set[tuple[str, Switches | None]] = set()
        kind = (cell.dtype, cell.head_dim, cell.causal)
        for record in self.cells.values():
            c = record.cell
            is_alike = c.grid == cell.grid == "schedules" and (c.dtype, c.head_dim, c.causal) == kind
            if is_alike and launches_of(self.runs[record.run]) == kernel_hash:
                right |= {(m.name, m.schedule) for m in record.kernels if m.status == MEASURED and m.outputs}
        return right

    def missing(self) -> dict[str, str]:
        """Peers that were wanted and did not load, with the reason."""
        return {name: reason for run in self.runs.values() for name, reason in run["missing"].items()}


def read(path: Path) -> Results:
    """Read a file of records, plain or packed; a last line without its end, cut short by a kill, is left out.

    Raises
    ------
    ValueError
        For anything else that is no record, naming the line.
    """
    results = Results()
    if not files.stored(path).exists():
        return results
    lines = files.read_bytes(path).split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            body = json.loads(line)
            if body["kind"] == "run":
                if body["schema"] != SCHEMA:
                    raise ValueError(f"schema must be {SCHEMA}, got {body['schema']}")
                results.runs[body["run"]] = body
            else:
                record = records.read(CellRecord, {key: x for key, x in body.items() if key != "kind"}, "cell")
                results.cells[record.cell.key] = record
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a record of fa3verify bench: {error}") from None
    return results


def append(path: Path, body: Json) -> None:
    """Append one record and flush it to the disk; a line cut short before it is ended first, a packed file unpacked."""
    stored.unpack(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(files.plain(body), ensure_ascii=False, sort_keys=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
