"""The verb bench: measure cell after cell, so that the same command goes on where it stopped.

Cells and records stand in :mod:`fa3verify.timed`; kernels in :mod:`fa3_reports.bench.kernels` and
:mod:`fa3_reports.bench.peers`; how a launch is timed in :mod:`fa3verify.timed.timing`.
"""

from __future__ import annotations

import fnmatch
import math
import platform
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fa3_kernels.audit.evidence import Evidence, evidence_facts
from fa3_reports.bench import check, results, tables
from fa3_reports.bench.cells import Cell
from fa3_reports.bench.kernels import TimedKernel, draw, ours
from fa3_reports.bench.peers import peers
from fa3_reports.bench.results import CellRecord, Measured, Results, SampleFigures, Switches, measured
from fa3_reports.bench.sustained import BY_GRAPH, SUSTAINED_ROUNDS, Clock, Timed, burst, sustain
from fa3_reports.bench.warm import warm_up
from fa3verify.bench import graphs
from fa3verify.bench.graphs import HEAD_START_CYCLES, between_events
from fa3verify.bench.kernels import MAX_COPIES
from fa3verify.campaign.pool import processes
from fa3verify.files import Json
from fa3verify.known.libraries import Unsupported
from fa3verify.timed.timing import LAUNCHES, LaunchTime, Pace, query
from fa3verify.version import __version__

RECORDS = "bench.jsonl"


class GraphTimed(graphs.GraphTimed):
    """Launches captured in a CUDA graph."""

    timed_by = BY_GRAPH


class EventTimed:
    """Plain launches between two events, for what cannot be captured; of short kernels they time the host."""

    timed_by = "events, no graph"

    def __init__(self, launch: Callable[[int], object]) -> None:
        self.launch = launch

    def time(self, launches: int, probe: Callable[[], None] = lambda: None, repeats: int = 1) -> LaunchTime:
        self.launch(0)
        torch.cuda.synchronize()
        launches *= repeats
        return between_events(lambda: [self.launch(i) for i in range(launches)], launches, probe)


class ContextLost(Exception):
    """A kernel destroyed the CUDA context, so that nothing more can run in this process; ``record`` is its cell's."""

    def __init__(self, record: CellRecord, name: str) -> None:
        super().__init__(
            f"{name} took the CUDA context with it in {record.cell.key}; the same command goes on after this cell"
        )
        self.record = record


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """One call of ``python -m fa3_reports bench``."""

    cells: Sequence[Cell]
    out: Path
    kernels: tuple[str, ...] = ()  # names or patterns of names; empty for all
    pace: Pace = field(default_factory=Pace)
    budget_s: float = math.inf
    seed: int = 0
    sustained: bool = True  # whether load follows the bursts

    def wants(self, name: str) -> bool:
        return not self.kernels or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.kernels)


def provenance(kernels: Sequence[TimedKernel], missing: dict[str, str], of: Evidence = "forward") -> Json:
    """Return the facts of a run: machine, driver, versions, and the hash of our launches that it is evidence of."""
    packages = {}
    for name in ("triton", "numpy", "numba", "nvidia-cudnn-frontend"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = "absent"
    return {
        "kind": "run",
        "schema": results.SCHEMA,
        "run": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": __version__,
        "gpu": query("name"),
        "driver": query("driver_version"),
        "max_sm_mhz": query("clocks.max.sm"),
        "power_limit_w": query("power.limit"),
        "head_start_cycles": HEAD_START_CYCLES,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        **packages,
        **evidence_facts(of),
        "kernels": {k.name: k.about for k in kernels},
        "missing": missing,
    }


def copies_for(cell: Cell, cache_bytes: int) -> int:
    """Return how many sets of inputs are used in turn, so that no launch finds its operands in the L2 cache.

    >>> copies_for(Cell("gqa", "fp16", 1, 512, 512, 16, 16, 128, False), 60 << 20)
    3
    """
    return max(1, min(MAX_COPIES, math.ceil(2 * cache_bytes / cell.io_bytes)))


def run(settings: BenchSettings, tell: Callable[[str], None]) -> tuple[Results, int]:
    """Measure the cells that are not measured yet.

    Parameters
    ----------
    settings : BenchSettings
    tell : callable
        Is called with one line per cell, and per missing kernel.

    Returns
    -------
    results : Results
        Everything in the output folder, earlier runs included; also written as CSV, netCDF and Markdown.
    left : int
        Cells that were not measured because ``budget_s`` was spent.

    Raises
    ------
    ContextLost
        If a kernel destroyed the CUDA context; its cell is recorded first.
    """
    started = time.monotonic()
    path = settings.out / RECORDS
    known = results.read(path)
    kernels = wanted(settings)
    missing = {k.name: k.missing for k in kernels if k.missing}
    for name, reason in missing.items():
        tell(f"missing {name}: {reason}")
    of: Evidence = "backward" if all(cell.operation == "backward" for cell in settings.cells) else "forward"
    facts = provenance(kernels, missing, of)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    clock = Clock()
    left = 0
    chosen = {cell: [k for k in kernels if k.takes(cell) and not k.missing] for cell in settings.cells}
    names = {cell: [k.name for k in some] for cell, some in chosen.items()}
    todo = [c for c in settings.cells if not known.is_done(c, names[c], facts["launches_sha256"])]
    with processes() as pool:  # they compile before anything is timed, and judge outputs while kernels are timed
        warm_up(todo, kernels, pool)
        for cell in todo:
            if time.monotonic() - started > settings.budget_s:
                left += 1
                continue
            if facts["run"] not in known.runs:
                results.append(path, facts)
                known.runs[facts["run"]] = facts
            judged = known.judged(cell, facts["launches_sha256"])
            copies = copies_for(cell, cache)
            try:
                record = measure_cell(cell, chosen[cell], settings, clock, facts["run"], copies, pool, judged)
            except ContextLost as lost:
                _keep(path, lost.record, known, tell)
                tables.write(known, settings.out)
                raise
            _keep(path, record, known, tell)
    if known.cells:
        tables.write(known, settings.out)
    return known, left


def wanted(settings: BenchSettings) -> list[TimedKernel]:
    """Load the kernels that settings name: backwards if a cell times one, else forwards."""
    if any(cell.operation == "backward" for cell in settings.cells):
        return peers(settings.wants, "backward")
    return [k for k in ours() if settings.wants(k.name)] + peers(settings.wants)


def _keep(path: Path, record: CellRecord, known: Results, tell: Callable[[str], None]) -> None:
    results.append(path, record.to_json())
    known.cells[record.cell.key] = record
    tell(line(record))


def line(record: CellRecord) -> str:
    """Return one line: the cell, and for every kernel TFLOP/s, or its error if it has no time, or its trouble."""
    parts = []
    for m in record.kernels:
        if m.status != results.MEASURED:
            parts.append(f"{m.name} {m.status}")
        elif math.isnan(m.burst_ms):
            parts.append(f"{m.name} rel rmse {m.rel_rmse:.1e}")
        else:
            parts.append(f"{m.name} {record.tflops(m.name):.0f}")
    return f"{record.cell.key}: " + ", ".join(parts)


def schedule_of(kernel: TimedKernel, cell: Cell) -> Switches | None:
    """Return the tile and switches of one of our kernels in a cell; None for a peer and for a backward."""
    if kernel.configure is None or kernel.options is None:
        return None
    config = kernel.configure(cell)
    is_specialized = kernel.options(cell).get("warp_specialize", True)
    return Switches(
        config.tile_m,
        config.tile_n,
        config.pingpong and is_specialized,
        config.intra_wg_overlap,
        is_specialized,
        config.promotion_interval,
        config.holds_turn,
        config.keeps_queries(cell.causal),
    )


def measure_cell(
    cell: Cell,
    kernels: Sequence[TimedKernel],
    settings: BenchSettings,
    clock: Clock,
    run_id: str,
    copies: int,
    pool: Executor,
    judged: Collection[tuple[str, Switches | None]] = (),
) -> CellRecord:
    """Prepare, check and time all kernels of one cell; a kernel that fails gets a status, and the others go on.

    A pool checks their outputs while they are timed. Those in ``judged``, by name and schedule, were found right in
    another cell and are not checked again. A kernel with wrong outputs gets no time. Raises ContextLost.
    """
    inputs = draw(cell, copies, settings.seed)
    runs: dict[str, Timed] = {}
    schedules: dict[str, Switches | None] = {}
    verdicts: dict[str, Callable[[], SampleFigures]] = {}
    failed: dict[str, str] = {}
    for kernel in kernels:
        try:
            launch = kernel.prepare(cell, inputs)
            schedules[kernel.name] = schedule_of(kernel, cell)
            if (kernel.name, schedules[kernel.name]) in judged:
                verdicts[kernel.name] = lambda: results.NOT_JUDGED
            else:
                verdicts[kernel.name] = _verdict(cell, kernel, inputs[0], launch(0), pool)
            runs[kernel.name] = ready(launch)
        except Unsupported as error:
            failed[kernel.name] = f"unsupported: {error}"
        except Exception as error:  # a kernel may raise anything
            failed[kernel.name] = _failure(error)
            _check_context(cell, kernel.name, kernels, failed, run_id)
    # Accumulator loss is about errors: nothing is timed.
    pace = Pace(0, 0) if cell.grid == "accumulator_loss" else settings.pace
    times = burst(runs, pace, clock)
    if settings.sustained and pace.rounds:
        sustain(runs, times, min(pace.rounds, SUSTAINED_ROUNDS), clock)
    rows = []
    for name in (kernel.name for kernel in kernels):
        try:
            verdict = None if name in failed else verdicts[name]()
        except Exception as error:  # what it returned may be anything
            failed[name] = _failure(error)
            verdict = None
        if verdict is None:
            rows.append(Measured(name, failed[name]))
        else:
            rows.append(measured(name, runs[name].timed_by, times[name], verdict, schedules[name]))
    return CellRecord(run_id, cell, copies, tuple(rows))


def _failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _verdict(cell: Cell, kernel: TimedKernel, given: Any, output: Any, pool: Executor) -> Callable[[], SampleFigures]:
    """Have an output checked by the pool, or a backward's at once; return a function that waits for the figures."""
    if kernel.operation == "backward":
        verdict = check.judge_gradients(cell, given, output)
        return lambda: verdict
    config = kernel.configure(cell) if kernel.configure else None
    model = kernel.model(cell) if kernel.model else None
    return pool.submit(check.judge, check.gather(cell, given, output, config, model)).result


def _check_context(cell: Cell, name: str, kernels: Sequence[TimedKernel], failed: dict[str, str], run_id: str) -> None:
    """Raise :class:`ContextLost`, with a record of the cell, if the GPU does not answer any more."""
    try:
        synchronize()
    except RuntimeError as error:
        rest = f"not measured: {name} took the CUDA context with it"
        rows = tuple(Measured(k.name, failed.get(k.name, rest)) for k in kernels)
        raise ContextLost(CellRecord(run_id, cell, 1, rows), name) from error


def synchronize() -> None:
    """Wait for the GPU; RuntimeError if a kernel has failed on it."""
    torch.cuda.synchronize()


def ready(launch: Callable[[int], object]) -> Timed:
    """Return a kernel ready to be timed, captured in a CUDA graph; if that fails, by plain events."""
    timed = GraphTimed(launch)
    try:
        timed.time(LAUNCHES)
        return timed
    except RuntimeError:
        synchronize()
        plain = EventTimed(launch)
        plain.time(LAUNCHES)
        return plain


def failed(known: Results) -> list[str]:
    """Our kernels whose bits differ from the twin."""
    return [
        f"{r.cell.key}: {m.name}: {m.status}" for r in known.cells.values() for m in r.kernels if m.bits_differing > 0
    ]
