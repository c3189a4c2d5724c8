"""A whole search: every island of every dtype on some processes, and what it found as one JSON value."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fa3_reference.bounds.forward import forward_bound
from fa3verify import __version__
from fa3verify.adversary.colony import Colony, individual
from fa3verify.adversary.evolve import search
from fa3verify.adversary.islands import island_of, islands_of
from fa3verify.adversary.judge import Bound, judge, judge_rounded

SCHEMA = "fa3verify.adversary/1"
CHUNK = 20_000  # problems of one process's task: islands are searched by several seeds where more are wanted
RATIOS = ("out", "rounded", "lse")  # before and after the output's last rounding, and of LSE


def search_island(dtype: str, name: str, seed: list[int], problems: int) -> dict[str, Any]:
    """Search one island and return its findings as JSON values."""
    return asdict(search(island_of(dtype, name), seed, problems))


def plan(dtypes: tuple[str, ...], problems: int, seed: int) -> list[dict[str, Any]]:
    """Return the arguments of :func:`search_island` that together judge so many problems for every dtype."""
    tasks = []
    for dtype in dtypes:
        islands = islands_of(dtype)
        share = -(-problems // len(islands))
        parts = -(-share // CHUNK)
        for part in range(parts):
            for index, island in enumerate(islands):
                arguments = {"dtype": dtype, "name": island.name, "seed": [seed, index, part]}
                tasks.append(arguments | {"problems": -(-share // parts)})
    return tasks


def _warm_up(dtypes: tuple[str, ...]) -> None:
    """Compile the twin's loops once, before the processes would do so all together."""
    for dtype in dtypes:
        judge(Colony.normal(islands_of(dtype)[0], np.random.default_rng(0)))


def run(
    dtypes: tuple[str, ...],
    problems: int,
    seed: int,
    jobs: int = 0,
    progress: Callable[[str], None] = lambda label: None,
) -> dict[str, Any]:
    """Search all islands of some dtypes.

    Parameters
    ----------
    dtypes : tuple of str
    problems : int
        For every dtype, shared by its islands.
    seed : int
        Decides the result; the number of processes does not.
    jobs : int
        Processes; 0 is one per core.
    progress : callable
        Called with the name of each part that is done.

    Returns
    -------
    dict
        As it is written to a file: counts, and of every island the largest error / bound with its individual.

    Raises
    ------
    fa3verify.campaign.pool.TaskError
        If a process was lost.
    """
    tasks = plan(dtypes, problems, seed)
    _warm_up(dtypes)
    with _executor(jobs or os.cpu_count() or 1) as executor:
        futures = [executor.submit(search_island, **arguments) for arguments in tasks]
        results = []
        for arguments, future in zip(tasks, futures, strict=True):
            results.append(future.result())
            progress(f"{arguments['dtype']} {arguments['name']}, part {arguments['seed'][-1] + 1}")
    return {"seed": seed, "problems": problems} | assembled(tasks, results)


def assembled(tasks: list[dict[str, Any]], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the findings of :func:`search_island` together by dtype and island."""
    dtypes = dict.fromkeys(task["dtype"] for task in tasks)
    pairs = list(zip(tasks, results, strict=True))
    parts = {dtype: _merged_dtype([(t, r) for t, r in pairs if t["dtype"] == dtype]) for dtype in dtypes}
    above_1 = sum(part["above_1"] for part in parts.values())
    return {"schema": SCHEMA, "version": __version__, "above_1": above_1, "dtypes": parts}


def _executor(jobs: int) -> Executor:
    from fa3verify.campaign.pool import IsolatingPool

    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # one core per worker process
    return IsolatingPool(jobs, limit_s=3600.0)


def _merged_dtype(results: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    names = dict.fromkeys(task["name"] for task, _ in results)
    islands = {name: _merged([r for task, r in results if task["name"] == name]) for name in names}
    totals = {key: sum(island[key] for island in islands.values()) for key in ("problems", "generations", "restarts")}
    ratios = {ratio: max(island["best"][ratio]["ratio"] for island in islands.values()) for ratio in RATIOS}
    return totals | {
        "above_1": sum(island["above_1"] for island in islands.values()),
        "ratio": ratios,
        "islands": islands,
    }


def _merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Findings of one island under several seeds; counts of problems at a find are of its own seed."""
    totals = {key: sum(r[key] for r in results) for key in ("problems", "generations", "restarts", "above_1")}
    none = {"ratio": 0.0, "problems": 0, "individual": None}
    best = {name: max((r["best"].get(name, none) for r in results), key=lambda find: find["ratio"]) for name in RATIOS}
    violations: dict[str, Any] = {}
    for result in results:
        violations = result["violations"] | violations
    return totals | {"best": best, "violations": violations}


def replay(values: dict[str, Any], bound: Bound = forward_bound) -> dict[str, float]:
    """Judge a stored individual again: error / bound by name of :data:`RATIOS`."""
    colony, row, column = individual(values)
    verdict = judge(colony, bound)
    ratios = float(verdict.out[row, column]), float(judge_rounded(colony, bound)[row, column]), float(verdict.lse[row])
    return dict(zip(RATIOS, ratios, strict=True))


def replay_file(path: Path, bound: Bound = forward_bound) -> list[tuple[str, str, dict[str, float]]]:
    """Judge the finds of a result file again: what each is, what the file says of it, and its ratios now.

    Raises
    ------
    ValueError
        If the file is damaged or foreign; the message names it.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["schema"] != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA!r}, got {body['schema']!r}")
        islands = [(dtype, *i) for dtype, part in body["dtypes"].items() for i in part["islands"].items()]
        finds = [
            (f"{dtype} {name} {what}", str(find["ratio"]), find["individual"])
            for dtype, name, island in islands
            for what, find in (*island["best"].items(), *island["violations"].items())
            if find["individual"] is not None
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of fa3verify adversary: {error}") from None
    return [(what, stored, replay(values, bound)) for what, stored, values in finds]
