"""Record what released kernels return: cases in processes that share a GPU, digests of all, small outputs whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fa3verify.adapters import launches
from fa3verify.adapters.peers import PEERS
from fa3verify.cases import Case
from fa3verify.gpu.bench.timing import query
from fa3verify.gpu.bits.recorded_cases import cases
from fa3verify.recordings import Recorded, Recording, digest_of_operands, digests_of, write

KEPT_OUTPUTS = 24_000  # of a case, at most, to be kept whole
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


def _work(given: tuple[str, int, Case]) -> tuple[str, int, Recorded, Kept | None]:
    library, index, case = given
    return library, index, *record_case(library, case)


def facts_of(library: str) -> dict[str, Any]:
    """Provenance: the library's binary, the machine and its versions."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "numpy": np.__version__}
    machine = {"gpu": query("name"), "driver": query("driver_version")}
    return launches.identity(library) | machine | versions


def record(
    libraries: Sequence[str],
    out: Path,
    *,
    rounds: int,
    workers: int,
    seconds: float,
    tell: Callable[[str], None],
) -> list[Recording]:
    """Record libraries into ``OUT/LIBRARY.xz`` and ``OUT/LIBRARY.npz`` within a time, as far as it goes."""
    deadline = time.monotonic() + seconds
    facts = {library: facts_of(library) for library in libraries}
    chosen = {library: cases(library, PEERS[library].dtypes, rounds) for library in libraries}
    todo = [(library, i, case) for library in libraries for i, case in enumerate(chosen[library])]
    todo.sort(key=lambda work: Recorded(work[2], "").outputs > LONG_OUTPUTS)
    found: dict[str, dict[int, tuple[Recorded, Kept | None]]] = {library: {} for library in libraries}
    with get_context("spawn").Pool(workers) as pool:
        results = pool.imap_unordered(_work, todo)
        for _ in todo:
            try:
                library, index, recorded, bits = results.next(max(0.1, deadline - time.monotonic()))
            except TimeoutError:
                break
            found[library][index] = recorded, bits
        pool.terminate()
    return [_written(library, facts[library], found[library], len(chosen[library]), out, tell) for library in libraries]


def _written(
    library: str,
    facts: dict[str, Any],
    found: dict[int, tuple[Recorded, Kept | None]],
    total: int,
    out: Path,
    tell: Callable[[str], None],
) -> Recording:
    """Write what was recorded of a library."""
    launches = [found[i] for i in sorted(found)]
    recording = Recording(library, facts, tuple(launch for launch, _ in launches))
    kept = {f"{name}{i}": x for i, (_, bits) in enumerate(launches) if bits for name, x in bits._asdict().items()}
    write(out / f"{library}.xz", recording)
    np.savez_compressed(out / f"{library}.npz", **kept)
    refused = [x for x in recording.launches if x.error]
    outputs = sum(x.outputs for x in recording.launches if not x.error)
    tell(f"{library}: {len(found)} of {total} cases, {len(refused)} refused, {outputs:,} outputs")
    return recording
