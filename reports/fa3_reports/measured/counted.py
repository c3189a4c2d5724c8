"""Count one launch of each kernel of each cell: the process that launches, and the one that starts it under a profiler.

``python -m fa3_reports.measured.counted JOB.json`` launches, and is of use to a profiler alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fa3_kernels.audit.evidence import evidence_facts
from fa3_reports.bench import run as bench
from fa3_reports.bench.cells import Cell
from fa3_reports.bench.kernels import TimedKernel, draw
from fa3_reports.measured import counters
from fa3_reports.measured.counters import Launched
from fa3verify.files import json_text, write_text
from fa3verify.text import one_line
from fa3verify.timed.timing import query

MARK_CYCLES = 1000
LONGEST_S = 3600.0  # of a profiled process
_FACTS = {"gpu": "name", "driver": "driver_version"}


def run(settings: bench.BenchSettings, profiler: str, tell: Callable[[str], None]) -> Path:
    """Count what :class:`fa3_reports.bench.run.BenchSettings` names, and write ``counters.csv`` with its provenance.

    Parameters
    ----------
    settings : Settings
        Of these ``cells``, ``out``, ``kernels``, ``seed`` and ``budget_s``, from when the profiled process is ready.
    profiler : str
        Nsight Compute's ``ncu``.
    tell : callable
        Gets one line per launch.

    Returns
    -------
    Path
        The table.

    Raises
    ------
    ValueError
        If the profiler counted nothing, with what it said.
    """
    with tempfile.TemporaryDirectory() as name:
        job, made, log = (Path(name) / file for file in ("job.json", "made.json", "log.csv"))
        cells = [asdict(cell) for cell in settings.cells]
        budget_s = min(settings.budget_s, LONGEST_S)
        body = {"cells": cells, "kernels": settings.kernels, "seed": settings.seed, "budget_s": budget_s}
        job.write_text(json.dumps(body))
        call = [
            *counters.command(profiler, log),
            sys.executable,
            "-m",
            "fa3_reports.measured.counted",
            str(job),
            str(made),
        ]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        if not (made.exists() and log.exists()):
            raise ValueError(f"the profiler counted nothing: {one_line(done.stdout[-300:] + done.stderr[-300:])}")
        launches = [Launched(*fields) for fields in json.loads(made.read_text())]
        counted = counters.parse(log.read_text())
    for launch in launches:
        tell(f"{Cell(**launch.cell).key}: {launch.kernel} {launch.status}")
    path = settings.out / "counters.csv"
    write_text(path, counters.table(launches, counted))
    version = subprocess.run([profiler, "--version"], capture_output=True, text=True, check=False).stdout
    facts = {name: query(field) for name, field in _FACTS.items()} | evidence_facts("forward")
    facts |= {"profiler": one_line(version.partition("Version")[2])}
    write_text(settings.out / "counters_provenance.json", json_text(facts))
    return path


def launch_all(
    cells: Sequence[Cell], kernels: Sequence[TimedKernel], seed: int, budget_s: float = LONGEST_S
) -> list[Launched]:
    """Launch every kernel of every cell once, warm, where a profiler that was told to wait listens.

    No cell is begun after ``budget_s``: what a profiler counted is written when this process ends.
    """
    found = []
    started = time.monotonic()
    for cell in cells:
        if time.monotonic() - started > budget_s:
            break
        inputs = draw(cell, 1, seed)
        for kernel in kernels:
            if not kernel.takes(cell) or kernel.missing:
                continue
            fields: dict[str, Any] = asdict(cell)
            try:
                launch = kernel.prepare(cell, inputs)
                peak = _peak_bytes(launch)
                schedule = bench.schedule_of(kernel, cell)
            except Exception as error:  # a kernel may raise anything
                found.append(Launched(fields, kernel.name, f"failed: {one_line(str(error))[:120]}"))
                continue
            _count(launch)
            found.append(Launched(fields, kernel.name, "ok", schedule and asdict(schedule), peak))
        torch.cuda.empty_cache()
    return found


def _peak_bytes(launch: Callable[[int], object]) -> int:
    """Most that one launch has allocated at a time, its results included."""
    launch(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    launch(0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _count(launch: Callable[[int], object]) -> None:
    """A mark and a launch behind it, for the profiler."""
    torch.cuda.profiler.start()
    torch.cuda._sleep(MARK_CYCLES)
    launch(0)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main(job: Path, made: Path) -> None:
    """Launch what ``job`` names and write what became of it to ``made``."""
    body = json.loads(job.read_text())
    settings = bench.BenchSettings([Cell(**fields) for fields in body["cells"]], made.parent, tuple(body["kernels"]))
    launches = launch_all(settings.cells, bench.wanted(settings), body["seed"], body["budget_s"])
    write_text(made, json.dumps(launches))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
