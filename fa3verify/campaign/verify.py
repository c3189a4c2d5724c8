"""The main job: plan, run, judge, write the report, print the verdict."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fa3verify import gate
from fa3verify.campaign import adversary, replay
from fa3verify.campaign import tasks as campaign
from fa3verify.campaign.profiles import PROFILES, ProfileName
from fa3verify.campaign.summary import summarize
from fa3verify.campaign.tasks import Outcome, Task
from fa3verify.files import write_text

PARTIAL = ".partial"


class NothingSelected(Exception):
    """No kernel takes any case of the campaign."""


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
    return IsolatingPool(settings.workers or os.cpu_count() or 1, PROFILES[settings.profile].task_limit_s)


def study_tasks(settings: Settings) -> list[Task]:
    """Return the studies' units as tasks."""
    from fa3verify.studies import STUDIES

    return [
        Task(f"study {study.name}", f"study: {study.name}", unit.run, dict(unit.kwargs))
        for study in STUDIES
        for unit in study.units(settings.profile, settings.seed)
    ]


def assemble_studies(outcomes: list[Outcome]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the studies' datasets by name, and a failure for every lost unit."""
    from fa3verify.studies import STUDIES

    datasets, failures = {}, []
    for study in STUDIES:
        mine = [o for o in outcomes if o.task.kind == f"study {study.name}"]
        lost = [o for o in mine if o.error]
        failures += [{"kernel": "-", "what": f"study {study.name}", "message": o.error, "replay": None} for o in lost]
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
        For an unknown kernel, a bad baseline or an unwritable output directory.
    KeyboardInterrupt
        After stopping the workers; finished tasks stay in the journal and are not run again next time.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    prepare_output(settings.out)
    baseline = (
        gate.read_baseline(settings.baseline)
        if settings.baseline
        else gate.shipped_baseline(settings.profile, settings.seed)
    )
    if baseline and (baseline.profile, baseline.seed) != (settings.profile, settings.seed):
        raise ValueError(
            f"baseline {baseline.name} is for profile {baseline.profile} and seed {baseline.seed}, "
            f"not {settings.profile} and {settings.seed}"
        )
    tasks = campaign.plan(list(settings.kernels), settings.profile, settings.seed)
    if not tasks:
        raise NothingSelected(f"profile {settings.profile} has no case that {', '.join(settings.kernels)} supports")
    if settings.profile in adversary.PROBLEMS:
        tasks += adversary.tasks(settings.kernels, settings.profile, settings.seed)
    if settings.studies:
        tasks += study_tasks(settings)
    progress(len(tasks), None)
    outcomes = _execute(tasks, settings, lambda outcome: progress(len(tasks), outcome))
    summary = summarize(list(settings.kernels), outcomes, baseline, profile=settings.profile, seed=settings.seed)
    studies, lost = assemble_studies(outcomes) if settings.studies else ({}, [])
    if lost := [*lost, *adversary.write(outcomes, settings.out)]:
        summary["failures"] += lost
        summary |= {"verdict": "fail", "exit_code": 1}
    _write_replays(summary, settings.out)
    command = settings.command or shlex.join(["fa3verify", *sys.argv[1:]])
    summary |= {"command": command, "started": started.isoformat(timespec="seconds")}
    summary["wall_s"] = round(time.monotonic() - clock, 1)
    if settings.update_baseline:
        body = gate.Baseline.of(settings.profile, settings.seed, summary["kernels"])
        write_text(settings.update_baseline, body.text())
    _write_report(settings.out, summary, studies)
    return summary


def _execute(tasks: list[Task], settings: Settings, progress: Callable[[Outcome], None]) -> list[Outcome]:
    """Run the tasks with a journal that survives an interruption and is removed after a complete run."""
    journal = settings.out / PARTIAL
    executor = make_executor(settings)
    try:
        outcomes = campaign.execute(tasks, executor, journal=journal, stamp=campaign.source_stamp(), progress=progress)
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()
    for entry in journal.glob("*.json"):
        entry.unlink()
    if journal.exists():
        journal.rmdir()
    return outcomes


def _write_replays(summary: dict[str, Any], out: Path) -> None:
    """Turn replay contents into files below OUT/worst and leave their paths in the summary."""
    worst = out / "worst"
    for old in worst.glob("*.json"):
        old.unlink()

    stored: dict[str, str] = {}  # content -> path: one file per case, however many rules it breaks

    def store(stem: str, kernel: str, what: str, content: dict[str, Any] | None) -> str | None:
        if content is None:
            return None
        key = json.dumps(content, sort_keys=True)
        if key not in stored:
            path = worst / f"{stem.replace('/', '_').replace(':', '_')}.json"
            replay.write(path, kernel, what, content)
            stored[key] = f"worst/{path.name}"
        return stored[key]

    for number, failure in enumerate(summary["failures"]):
        stem = f"fail-{number:03d}-{failure['kernel']}-{failure['what'].split()[0]}"
        failure["replay"] = store(stem, failure["kernel"], failure["what"], failure["replay"])
    for kernel in summary["kernels"]:
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
    """Return the verdict as JUnit XML: one test case per kernel and law, and per gate row."""
    from xml.sax.saxutils import quoteattr

    rows = []
    for kernel in summary["kernels"]:
        rows += [(kernel["name"], f"law {law['law']}", law["status"], law["message"] or "") for law in kernel["laws"]]
    rows += [
        (
            row["kernel"],
            f"{row['layer']} {row['rule']} {row['family']}",
            row["status"],
            f"observed {row['observed']}, limit {row['limit']}",
        )
        for row in summary["gate"]
    ]
    lost = [
        (f["kernel"], f["what"], "fail", f["message"])
        for f in summary["failures"]
        if f["what"].startswith(("family", "study"))
    ]
    body = []
    for kernel, name, status, message in rows + lost:
        inner = {"fail": f"<failure message={quoteattr(message)}/>", "not compared": "<skipped/>"}.get(status, "")
        body.append(f"<testcase classname={quoteattr(kernel)} name={quoteattr(name)}>{inner}</testcase>")
    failures = sum(status == "fail" for _, _, status, _ in rows + lost)
    head = f'<testsuite name="fa3verify" tests="{len(body)}" failures="{failures}" time="{summary["wall_s"]}">'
    return '<?xml version="1.0" encoding="utf-8"?>\n' + "\n".join([head, *body, "</testsuite>"]) + "\n"
