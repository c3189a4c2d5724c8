"""The main job: plan, run, judge, write the report, print the verdict."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fa3verify import gate
from fa3verify.campaign import adversary, atlas, replay
from fa3verify.campaign import tasks as campaign
from fa3verify.campaign.findings import finding
from fa3verify.campaign.introduction import Introduction, introduce_all
from fa3verify.campaign.profiles import PROFILES, ProfileName
from fa3verify.campaign.summary import summarize, verdict_of
from fa3verify.campaign.tasks import Outcome, Task
from fa3verify.files import write_text
from fa3verify.inputs.captures import Capture, list_captures
from fa3verify.operations import FORWARD
from fa3verify.text import one_line

PARTIAL = ".partial"
LEAST_MEMORY_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for."""

    kernels: tuple[str, ...]
    profile: ProfileName
    seed: int
    out: Path
    baseline: Path | None = None
    update_baseline: Path | None = None
    workers: int = 0
    scheduler: str | None = None
    studies: bool = True
    command: str | None = None  # as the summary names it; this process's command line by default
    task_limit_s: float | None = None  # the profile's by default
    activations: Path | None = None  # npz files of the user's own model, or one of them
    memory_bytes: int | None = None  # of each worker; by default an equal share of the machine's, at least 8 GiB


def prepare_output(out: Path) -> None:
    """Create the output directory; ValueError if nothing can be written there."""
    try:
        write_text(out / ".writable", "")
        (out / ".writable").unlink()
    except OSError as error:
        raise ValueError(f"output directory {out} cannot be written: {error.strerror}") from None


def make_executor(settings: Settings) -> Executor:
    """Return local isolated processes, or a Dask cluster's executor.

    Raises
    ------
    ModuleNotFoundError
        If a scheduler is named and ``distributed`` is not installed.
    """
    if settings.scheduler:
        from distributed import Client  # pyright: ignore[reportMissingImports]  # extra: distributed

        return Client(settings.scheduler).get_executor()
    from fa3verify.campaign.pool import IsolatingPool

    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # one core per worker process
    workers = settings.workers or os.cpu_count() or 1
    limit_s = settings.task_limit_s or PROFILES[settings.profile].task_limit_s
    memory_bytes = _fair_share(workers) if settings.memory_bytes is None else settings.memory_bytes
    return IsolatingPool(workers, limit_s, memory_bytes=memory_bytes)


def _fair_share(workers: int) -> int | None:
    """Bytes of memory for each worker, None where the machine does not say how much it has."""
    try:
        return max(LEAST_MEMORY_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // workers)
    except (AttributeError, ValueError, OSError):
        return None


def study_tasks(kernels: list[Introduction], settings: Settings) -> list[Task]:
    """Return the studies' units as tasks, with those about the kernels under judgement."""
    from fa3verify.studies import STUDIES

    asked = [k.name for k in kernels if k.operation == FORWARD and k.dtype == "e4m3" and not k.failed]
    tasks = []
    for study in STUDIES:
        units = [(unit, True) for unit in study.units(settings.profile, settings.seed)]
        for name in asked:
            own = study.of_kernel(name, settings.profile, settings.seed)
            units += [(unit, name.startswith("twin.")) for unit in own]
        for unit, durable in units:
            tasks.append(Task(f"study {study.name}", f"study: {study.name}", unit.run, dict(unit.kwargs), durable))
    return tasks


def assemble_studies(outcomes: list[Outcome]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the studies' datasets by name, and a failure for every lost unit."""
    from fa3verify.studies import STUDIES

    datasets, failures = {}, []
    for study in STUDIES:
        mine = [o for o in outcomes if o.task.kind == f"study {study.name}"]
        lost = [o for o in mine if o.error]
        failures += [finding("-", f"study {study.name}", o.error or "", crashed=True) for o in lost]
        if len(lost) < len(mine):
            datasets[study.name] = study.assemble([o.value for o in mine if not o.error])
    return datasets, failures


def run(settings: Settings, progress: Callable[[int, Outcome | None], None]) -> dict[str, Any]:
    """Run a campaign and write everything below ``settings.out``.

    Parameters
    ----------
    progress : callable
        Called with (number of tasks, None) at the start and (number of tasks, outcome) after each.

    Returns
    -------
    dict
        The summary, as written to ``summary.json``.

    Raises
    ------
    ValueError
        For an unknown kernel, a bad baseline, a damaged or foreign file of activations, or an unwritable output
        directory.
    KeyboardInterrupt
        After stopping the workers; finished tasks stay in the journal and are not run again next time.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    baseline = _stored(settings, settings.baseline)
    if settings.baseline is None:
        baseline = gate.shipped_baseline(settings.profile, settings.seed)
    before = _stored(settings, settings.update_baseline, may_be_new=True)
    captures = list_captures(settings.activations) if settings.activations else ()
    executor = make_executor(settings)
    try:
        kernels = introduce_all(settings.kernels, settings.profile, executor, captures)
        prepare_output(settings.out)
        outcomes = _execute(_tasks(kernels, captures, settings), settings, executor, progress)
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()
    summary = summarize(kernels, outcomes, baseline, profile=settings.profile, seed=settings.seed)
    studies, lost = assemble_studies(outcomes) if settings.studies else ({}, [])
    if lost := [*lost, *adversary.write(outcomes, settings.out)]:
        summary |= verdict_of(summary["kernels"], [*summary["failures"], *lost])
    _write_replays(summary, settings.out)
    command = settings.command or shlex.join(["fa3verify", *sys.argv[1:]])
    summary |= {"command": one_line(command, 10**4), "started": started.isoformat(timespec="seconds")}
    summary |= {"wall_s": round(time.monotonic() - clock, 1), "cpu_s": campaign.cpu_seconds(outcomes)}
    if settings.update_baseline:
        body = gate.Baseline.of(settings.profile, settings.seed, summary["kernels"])
        write_text(settings.update_baseline, body.with_kernels_of(before).text())
    _write_report(settings.out, summary, studies)
    atlas.write(settings.out / atlas.FILE, atlas.of(summary))
    _remove_journal(settings.out)
    return summary


def _stored(settings: Settings, path: Path | None, *, may_be_new: bool = False) -> gate.Baseline | None:
    """Read a baseline, None where none is asked for or a new one is written; ValueError if it is of another profile or
    seed."""
    if path is None or (may_be_new and not path.is_file()):
        return None
    baseline = gate.read_baseline(path)
    if (baseline.profile, baseline.seed) != (settings.profile, settings.seed):
        raise ValueError(
            f"baseline {baseline.name} is for profile {baseline.profile} and seed {baseline.seed}, "
            f"not {settings.profile} and {settings.seed}"
        )
    return baseline


def _tasks(kernels: list[Introduction], captures: tuple[Capture, ...], settings: Settings) -> list[Task]:
    """Everything there is to run; no studies where no kernel takes a case."""
    tasks = campaign.plan(kernels, settings.profile, settings.seed, captures)
    if settings.profile in adversary.PROBLEMS:
        tasks += adversary.tasks(settings.kernels, settings.profile, settings.seed)
    return tasks + study_tasks(kernels, settings) if tasks and settings.studies else tasks


def _execute(
    tasks: list[Task], settings: Settings, executor: Executor, progress: Callable[[int, Outcome | None], None]
) -> list[Outcome]:
    """Run the tasks with a journal that survives an interruption."""
    progress(len(tasks), None)
    return campaign.execute(
        tasks,
        executor,
        journal=settings.out / PARTIAL,
        stamp=campaign.source_stamp(),
        progress=lambda outcome: progress(len(tasks), outcome),
    )


def _remove_journal(out: Path) -> None:
    """Remove what could be resumed: the report exists."""
    with contextlib.suppress(OSError):
        shutil.rmtree(out / PARTIAL)


def _write_replays(summary: dict[str, Any], out: Path) -> None:
    """Turn replay contents into files below OUT/worst and leave their paths in the summary."""
    worst = out / "worst"
    for old in worst.glob("*.json"):
        old.unlink()

    stored: dict[str, str] = {}  # content -> path: one file per case, however many rules it breaks

    def store(
        stem: str, kernel: str, what: str, content: dict[str, Any] | None, baseline: dict[str, Any] | None = None
    ) -> str | None:
        if content is None:
            return None
        key = json.dumps([content, baseline], sort_keys=True)
        if key not in stored:
            name = re.sub(r"[^A-Za-z0-9._+-]", "_", stem)[:100]
            while f"worst/{name}.json" in stored.values():
                name += "_"
            path = worst / f"{name}.json"
            replay.write(path, kernel, what, content, baseline)
            stored[key] = f"worst/{path.name}"
        return stored[key]

    for number, failure in enumerate(summary["failures"]):
        stem = f"fail-{number:03d}-{failure['kernel']}-{failure['what'].split()[0]}"
        given = (failure["kernel"], failure["what"], failure["replay"], failure["baseline"])
        failure["replay"] = store(stem, *given)
    judged: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in summary["cases"]:
        judged.setdefault((case["kernel"], case["family"]), []).append(case)
    for kernel in summary["kernels"]:
        for family in kernel["families"]:
            name = family["family"]
            content = replay.of_family(judged[kernel["name"], name])
            family["replay"] = store(f"family-{kernel['name']}-{name}", kernel["name"], f"family {name}", content)
        if kernel["worst"]:
            name = kernel["name"]
            kernel["worst"]["replay"] = store(f"worst-{name}", name, "largest error / bound", kernel["worst"]["replay"])
        for law in kernel["laws"]:
            trial = law.pop("trial", None)
            law["replay"] = store(f"law-{kernel['name']}-{law['law']}", kernel["name"], f"law {law['law']}", trial)


def _write_report(out: Path, summary: dict[str, Any], studies: dict[str, Any]) -> None:
    from fa3verify.report.build import write_report

    write_report(out, summary, studies)


def junit(summary: dict[str, Any]) -> str:
    """Return the verdict as JUnit XML: one test case per kernel and law, per gate row, and per finding of neither.

    A kernel of which too little was tried is an error, as is one that could not be loaded.
    """
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    rows = []
    for kernel in summary["kernels"]:
        rows += [(kernel["name"], f"law {law['law']}", law["status"], law["message"] or "") for law in kernel["laws"]]
        if reason := kernel["inconclusive"]:
            rows.append((kernel["name"], "coverage", "inconclusive", reason))
    for row in summary["gate"]:
        words = f"observed {row['observed']}, limit {row['limit']}"
        rows.append((row["kernel"], f"{row['layer']} {row['rule']} {row['family']}", row["status"], words))
    others = [f for f in summary["failures"] if f["what"].split()[0] not in ("law", "L0", "L1", "L2")]
    rows += [(f["kernel"], f["what"], "fail", f["message"]) for f in others]
    results = {"fail": Failure, "inconclusive": Error, "not compared": Skipped, "not_tried": Skipped}
    suite = TestSuite("fa3verify")
    for kernel, name, status, message in rows:
        case = TestCase(one_line(name), one_line(kernel))
        if status in results:
            case.result = [results[status](one_line(message))]
        suite.append(case)  # add_testcase counts all of them again each time
    suite.update_statistics()
    suite.time = summary["wall_s"]
    xml = JUnitXml()
    xml.add_testsuite(suite)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{xml.tostring().decode()}\n'
