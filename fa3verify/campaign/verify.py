"""The main job: plan, run, judge, write the report; whole, or in shards that are merged."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fa3verify import gate
from fa3verify.campaign import adversary, atlas, replay, shards
from fa3verify.campaign import tasks as campaign
from fa3verify.campaign.executors import make_executor
from fa3verify.campaign.findings import finding
from fa3verify.campaign.introduction import Introduction, introduce_all
from fa3verify.campaign.narrowing import Only
from fa3verify.campaign.profiles import ProfileName
from fa3verify.campaign.summary import provenance, summarize, verdict_of
from fa3verify.campaign.tasks import Outcome, Task
from fa3verify.files import write_text
from fa3verify.inputs.captures import Capture, list_captures
from fa3verify.operations import FORWARD
from fa3verify.text import one_line

PARTIAL = ".partial"


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
    shard: shards.Number | None = None  # which part to run; all by default
    only: Only = Only()  # noqa: RUF009 (immutable)
    is_fail_fast: bool = False  # whether nothing more is begun after the first finding

    @property
    def journal(self) -> Path:
        """Where results wait for the end; shards that write into one folder have each their own."""
        return self.out / (PARTIAL if self.shard is None else f"{PARTIAL}-{self.shard.number}-of-{self.shard.count}")


class Baselines(NamedTuple):
    """What a campaign is compared with, and what the file to be updated holds; None for what there is not."""

    compared: gate.Baseline | None
    updated: gate.Baseline | None


@dataclass(frozen=True, slots=True)
class Ran:
    """What a campaign or a shard of it ran: on which kernels and activations, with what outcomes, when and where."""

    kernels: list[Introduction]
    captures: tuple[Capture, ...]
    outcomes: list[Outcome]
    started: str
    wall_s: float
    provenance: dict[str, Any]


def prepare_output(out: Path) -> None:
    """Create the output directory; ValueError if nothing can be written there."""
    try:
        write_text(out / ".writable", "")
        (out / ".writable").unlink()
    except OSError as error:
        raise ValueError(f"output directory {out} cannot be written: {error.strerror}") from None


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
    """Return the studies' datasets by name, those that ``--fail-fast`` left unfinished apart, and a failure for every
    lost unit."""
    from fa3verify.studies import STUDIES

    datasets, failures = {}, []
    for study in STUDIES:
        mine = [o for o in outcomes if o.task.kind == f"study {study.name}"]
        lost = [o for o in mine if o.error]
        failures += [finding("-", f"study {study.name}", o.error or "", crashed=True) for o in lost]
        if len(lost) < len(mine) and not any(o.skipped for o in mine):
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
    baselines = _baselines(settings)
    return conclude(carry_out(settings, progress), settings, baselines)


def run_shard(settings: Settings, progress: Callable[[int, Outcome | None], None]) -> dict[str, Any]:
    """Run one shard and write it below ``settings.out``.

    Returns
    -------
    dict
        ``shard`` in words, ``file``, number of ``tasks``, ``failures`` as in a summary, and ``exit_code``:
        1 with a failure, 0 without, which is no pass. What depends on other shards is not judged here: the baseline,
        whether enough was tried, and what the adversary found.

    Raises
    ------
    ValueError, KeyboardInterrupt
        As for :func:`run`.
    """
    assert settings.shard is not None
    ran, stamp, shard = carry_out(settings, progress), campaign.source_stamp(), settings.shard
    asked = {"kernels": list(settings.kernels), "profile": settings.profile, "seed": settings.seed}
    asked |= {"studies": settings.studies, "sources": stamp}
    captures, outcomes = tuple(capture.to_json() for capture in ran.captures), shards.kept(ran.outcomes, stamp)
    facts = (asked, tuple(ran.kernels), captures, outcomes, ran.started, ran.wall_s, ran.provenance)
    path = shards.write(shards.Part(shard.number, shard.count, *facts), settings.out)
    _remove_journal(settings)
    failures = summarize(ran.kernels, ran.outcomes, None, profile=settings.profile, seed=settings.seed)["failures"]
    failures += [
        finding("-", outcome.task.label, outcome.error, crashed=True)
        for outcome in ran.outcomes
        if outcome.error and outcome.task.kind not in ("law", "family")
    ]
    found = {"shard": str(shard), "file": path.name, "tasks": len(ran.outcomes)}
    return found | {"failures": failures, "exit_code": 1 if failures else 0}


def merge(folders: Sequence[Path], settings: Settings) -> dict[str, Any]:
    """Conclude from the shards of a campaign as :func:`run` does; nothing is run.

    Parameters
    ----------
    settings : Settings
        ``out`` and the baselines; what the campaign was asked for is what the shards say.

    Returns
    -------
    dict
        The summary. Its data are those of one process, but for a kernel that lost so many workers that it got no more.

    Raises
    ------
    ValueError
        As :func:`fa3verify.campaign.shards.read_all`, for shards that other sources ran, a bad baseline, or an
        unwritable output directory.
    """
    parts = shards.read_all(folders)
    asked, stamp = dict(parts[0].asked), campaign.source_stamp()
    if asked.pop("sources", None) != stamp:
        version = parts[0].provenance.get("version")
        raise ValueError(f"these sources of fa3verify did not run the shards: merge with those that did, of {version}")
    try:
        settings = replace(settings, **asked | {"kernels": tuple(asked["kernels"])})
        captures = tuple(Capture.from_json(capture) for capture in parts[0].captures)
        tasks = _tasks(list(parts[0].kernels), captures, settings)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a shard is damaged: {type(error).__name__}: {error}") from None
    baselines = _baselines(settings)
    outcomes = shards.outcomes_of(parts, tasks, stamp)
    prepare_output(settings.out)
    began, longest_s = min(part.started for part in parts), max(part.wall_s for part in parts)
    ran = Ran(list(parts[0].kernels), captures, outcomes, began, longest_s, parts[0].provenance)
    return conclude(ran, settings, baselines)


def carry_out(settings: Settings, progress: Callable[[int, Outcome | None], None]) -> Ran:
    """Run the tasks of a campaign, or of one shard of it, as :func:`run` says."""
    started, clock = datetime.now(UTC), time.monotonic()
    captures = list_captures(settings.activations) if settings.activations else ()
    executor = make_executor(settings)
    try:
        introduced = introduce_all(settings.kernels, settings.profile, executor, captures)
        kernels = [settings.only.of(kernel) for kernel in introduced]
        prepare_output(settings.out)
        tasks = _tasks(kernels, captures, settings)
        outcomes = _execute(
            shards.dealt(tasks, settings.shard) if settings.shard else tasks, settings, executor, progress
        )
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()
    began, wall_s = started.isoformat(timespec="seconds"), time.monotonic() - clock
    return Ran(kernels, captures, outcomes, began, wall_s, provenance(settings.seed))


def conclude(ran: Ran, settings: Settings, baselines: Baselines) -> dict[str, Any]:
    """Judge what ran and write everything below ``settings.out``; returns the summary."""
    clock = time.monotonic()
    summary = summarize(ran.kernels, ran.outcomes, baselines.compared, profile=settings.profile, seed=settings.seed)
    studies, lost = assemble_studies(ran.outcomes) if settings.studies else ({}, [])
    if lost := [*lost, *adversary.write(ran.outcomes, settings.out)]:
        summary |= verdict_of(summary["kernels"], [*summary["failures"], *lost])
    replay.write_all(summary, settings.out)
    command = settings.command or shlex.join(["fa3verify", *sys.argv[1:]])
    summary |= {"command": one_line(command, 10**4), "started": ran.started, "provenance": ran.provenance}
    summary |= {"wall_s": round(ran.wall_s + time.monotonic() - clock, 1)}
    summary |= {"cpu_s": campaign.cpu_seconds(ran.outcomes)}
    if settings.update_baseline:
        body = gate.Baseline.of(settings.profile, settings.seed, summary["kernels"])
        write_text(settings.update_baseline, body.with_kernels_of(baselines.updated).text())
    _write_report(settings.out, summary, studies)
    atlas.write(settings.out / atlas.FILE, atlas.of(summary))
    _remove_journal(settings)
    return summary


def _baselines(settings: Settings) -> Baselines:
    """Read the baselines of a campaign before it runs; ValueError for one of another profile or seed."""
    if settings.only.limit is not None:  # figures of fewer cases are others
        return Baselines(None, None)
    compared = _stored(settings, settings.baseline)
    if settings.baseline is None:
        compared = gate.shipped_baseline(settings.profile, settings.seed)
    return Baselines(compared, _stored(settings, settings.update_baseline, may_be_new=True))


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
    tasks = campaign.plan(kernels, settings.profile, settings.seed, captures, settings.only.limit)
    if settings.only:
        return tasks
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
        journal=settings.journal,
        stamp=campaign.source_stamp(),
        progress=lambda outcome: progress(len(tasks), outcome),
        stops=lambda outcome: settings.is_fail_fast and campaign.is_finding(outcome),
    )


def _remove_journal(settings: Settings) -> None:
    """Remove what could be resumed: the report, or the shard, exists."""
    with contextlib.suppress(OSError):
        shutil.rmtree(settings.journal)


def _write_report(out: Path, summary: dict[str, Any], studies: dict[str, Any]) -> None:
    from fa3verify.report.build import write_report

    write_report(out, summary, studies)
