"""Record what released kernels return: cases in processes that share a GPU, digests of all, small outputs whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fa3_reports.bits import recorded_cases, serving_cases
from fa3_reports.bits.corner_cases import corners
from fa3_reports.bits.gap_cases import gaps
from fa3_reports.recordings import KEPT_OUTPUTS, Recorded, Recording, digest_of_operands, digests_of, write
from fa3verify.campaign.pool import processes
from fa3verify.campaign.tasks import CallTask, run
from fa3verify.cases.case import Case
from fa3verify.known import launches
from fa3verify.known.peers import PEERS
from fa3verify.timed.timing import query

Which = Literal["broad", "corners", "gaps"]
LONG_OUTPUTS = 2_000_000  # of a case, from which on it waits for all others


class Kept(NamedTuple):
    """Outputs of one case by name, their bits as integers."""

    out: np.ndarray
    lse: np.ndarray


def record_case(library: str, case: Case) -> tuple[Recorded, Kept | None]:
    """Launch one case; whatever the library raises is kept as its answer."""
    operands = case.operands()
    recorded = Recorded(case, digest_of_operands(operands))
    try:
        out, lse = launches.run(library, case.problem, operands, dict(case.changes))
    except Exception as error:  # a third party's library may raise anything
        return replace(recorded, error=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"), None
    assert lse is not None, "those with a twin return one"
    recorded = replace(recorded, digests=digests_of(case.problem, out, lse))
    bits = Kept(out.view(np.uint16), lse.view(np.uint32))
    return recorded, bits if out.size <= KEPT_OUTPUTS else None


def facts_of(library: str) -> dict[str, Any]:
    """Provenance: the library's binary, the machine and its versions."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "numpy": np.__version__}
    machine = {"gpu": query("name"), "driver": query("driver_version")}
    return launches.identity(library) | machine | versions


def chosen(library: str, which: Which, *, rounds: int, every: int) -> list[Case]:
    """Every so manieth case of a library, of those that are drawn broadly, of the corners or of the gaps."""
    dtypes = PEERS[library].dtypes
    if which != "broad":
        return {"corners": corners, "gaps": gaps}[which](library, dtypes)[::every]
    drawn = serving_cases if PEERS[library].serves else recorded_cases
    return drawn.cases(library, dtypes, rounds)[::every]


def record(
    given: Mapping[str, Sequence[Case]],
    out: Path,
    *,
    suffix: str,
    workers: int,
    seconds: float,
    tell: Callable[[str], None],
) -> list[Recording]:
    """Record cases by library, into ``OUT/LIBRARY`` with the suffix, .xz and .npz, as far as a time goes."""
    deadline = time.monotonic() + seconds
    facts = {library: facts_of(library) for library in given}
    tasks = {
        library: [CallTask(library, record_case, {"library": library, "case": case}) for case in asked]
        for library, asked in given.items()
    }
    todo = [task for of_library in tasks.values() for task in of_library]
    todo.sort(key=lambda task: Recorded(task.arguments["case"], "").outputs > LONG_OUTPUTS)
    with processes(workers) as pool:
        ended = run(todo, pool, until=deadline)
        found = {id(outcome.task): outcome.result() for outcome in ended if not outcome.lost_worker}
    recordings = []
    for library, asked in given.items():
        launches = [found[id(task)] for task in tasks[library] if id(task) in found]
        recordings.append(_written(Recording(library, facts[library]), launches, out / f"{library}{suffix}"))
        refused = [x for x in recordings[-1].launches if x.error]
        outputs = sum(x.outputs for x in recordings[-1].launches if not x.error)
        tell(f"{library}: {len(launches)} of {len(asked)} cases, {len(refused)} refused, {outputs:,} outputs")
    return recordings


def _written(empty: Recording, launches: Sequence[tuple[Recorded, Kept | None]], stem: Path) -> Recording:
    """Write what was recorded of a library."""
    recording = replace(empty, launches=tuple(launch for launch, _ in launches))
    kept = {f"{name}{i}": x for i, (_, bits) in enumerate(launches) if bits for name, x in bits._asdict().items()}
    write(stem.with_name(f"{stem.name}.xz"), recording)
    if kept:
        np.savez_compressed(stem.with_name(f"{stem.name}.npz"), **kept)
    return recording
