"""A whole search: all islands of some dtypes of an operation on some processes, and what it found as one JSON value."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fa3verify import __version__
from fa3verify.operations import FORWARD
from fa3verify.search import gradients
from fa3verify.search.forward import search as evolve

SCHEMA = "fa3verify.adversary/2"
CHUNK = 20_000  # problems of one process's task: islands are searched by several seeds where more are wanted
# Searches by operation, each with the names of its ratios, its islands and how an individual is judged again.
BREEDS: dict[str, type[Any]] = {FORWARD: evolve.Search, "backward": gradients.Search}


def dtypes_of(operation: str) -> tuple[str, ...]:
    """Return the dtypes of which an operation has islands."""
    return tuple(dtype for dtype in ("fp16", "bf16", "e4m3") if BREEDS[operation].islands(dtype))


def search_island(dtype: str, name: str, seed: list[int], problems: int, operation: str = FORWARD) -> dict[str, Any]:
    """Search one island and return its findings as JSON values."""
    breed = BREEDS[operation]
    island = next(island for island in breed.islands(dtype) if island.name == name)
    return asdict(breed(island, seed).until(problems))


def plan(dtypes: tuple[str, ...], problems: int, seed: int, operation: str = FORWARD) -> list[dict[str, Any]]:
    """Return the arguments of :func:`search_island` that together judge so many problems for every dtype."""
    tasks = []
    for dtype in dtypes:
        own = BREEDS[operation].islands(dtype)
        share = -(-problems // len(own))
        parts = -(-share // CHUNK)
        for part in range(parts):
            for index, island in enumerate(own):
                arguments = {"dtype": dtype, "name": island.name, "seed": [seed, index, part]}
                tasks.append(arguments | {"problems": -(-share // parts), "operation": operation})
    return tasks


def _warm_up(dtypes: tuple[str, ...], operation: str) -> None:
    """Compile the twin's loops once, before the processes would do so all together."""
    for dtype in dtypes:
        BREEDS[operation](BREEDS[operation].islands(dtype)[0], 0).until(1)


def run(
    dtypes: tuple[str, ...],
    problems: int,
    seed: int,
    jobs: int = 0,
    progress: Callable[[str], None] = lambda label: None,
    operation: str = FORWARD,
) -> dict[str, Any]:
    """Search all islands of some dtypes of an operation.

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
    operation : str
        A key of :data:`BREEDS`.

    Returns
    -------
    dict
        As it is written to a file: counts, and of every island the largest error / bound with its individual.

    Raises
    ------
    fa3verify.campaign.pool.TaskError
        If a process was lost.
    """
    tasks = plan(dtypes, problems, seed, operation)
    _warm_up(dtypes, operation)
    with isolating_pool(jobs) as executor:
        futures = [executor.submit(search_island, **arguments) for arguments in tasks]
        results = []
        for arguments, future in zip(tasks, futures, strict=True):
            results.append(future.result())
            progress(f"{arguments['dtype']} {arguments['name']}, part {arguments['seed'][-1] + 1}")
    return {"seed": seed, "problems": problems} | assembled(tasks, results)


def assembled(tasks: list[dict[str, Any]], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the findings of :func:`search_island`, all of one operation, together by dtype and island."""
    dtypes = dict.fromkeys(task["dtype"] for task in tasks)
    operation = tasks[0]["operation"] if tasks else FORWARD
    pairs = list(zip(tasks, results, strict=True))
    ratios = BREEDS[operation].ratios
    parts = {dtype: _merged_dtype([(t, r) for t, r in pairs if t["dtype"] == dtype], ratios) for dtype in dtypes}
    above_1 = sum(part["above_1"] for part in parts.values())
    named = {"schema": SCHEMA, "version": __version__, "operation": operation}
    return named | {"above_1": above_1, "dtypes": parts}


def isolating_pool(jobs: int) -> Executor:
    """Return processes of one core each for long searches; 0 is one per core."""
    from fa3verify.campaign.pool import IsolatingPool

    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # one core per worker process
    return IsolatingPool(jobs or os.cpu_count() or 1, limit_s=3600.0)


def _merged_dtype(results: list[tuple[dict[str, Any], dict[str, Any]]], names: tuple[str, ...]) -> dict[str, Any]:
    islands = {
        island: _merged([r for task, r in results if task["name"] == island], names)
        for island in dict.fromkeys(task["name"] for task, _ in results)
    }
    totals = {key: sum(island[key] for island in islands.values()) for key in ("problems", "generations", "restarts")}
    ratios = {name: max(island["best"][name]["value"] for island in islands.values()) for name in names}
    return totals | {
        "above_1": sum(island["above_1"] for island in islands.values()),
        "ratio": ratios,
        "islands": islands,
    }


def _merged(results: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, Any]:
    """Findings of one island under several seeds; counts of problems at a find are of its own seed."""
    totals = {key: sum(r[key] for r in results) for key in ("problems", "generations", "restarts", "above_1")}
    none = {"value": 0.0, "problems": 0, "content": None}
    best = {name: max((r["best"].get(name, none) for r in results), key=lambda find: find["value"]) for name in names}
    violations: dict[str, Any] = {}
    for result in results:
        violations = result["violations"] | violations
    return totals | {"best": best, "violations": violations}


def replay_file(path: Path) -> list[tuple[str, str, dict[str, float]]]:
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
        breed = BREEDS[body.get("operation", FORWARD)]  # older files are of the forward
        islands = [(dtype, *i) for dtype, part in body["dtypes"].items() for i in part["islands"].items()]
        finds = [
            (f"{dtype} {name} {what}", str(find["value"]), find["content"])
            for dtype, name, island in islands
            for what, find in (*island["best"].items(), *island["violations"].items())
            if find["content"] is not None
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of fa3verify adversary: {error}") from None
    return [(what, stored, breed.replay(values)) for what, stored, values in finds]
