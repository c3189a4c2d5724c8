"""The job of ``fa3verify verify`` and ``merge``: run a campaign, or one shard of it, and write its report.

:func:`run` is called by the verb, by ``atlas`` for each kernel (:mod:`fa3verify.commands.publish`) and by
:func:`fa3verify.verify`. The tasks are made in :mod:`fa3verify.campaign.plan`, the verdict is drawn in
:mod:`fa3verify.campaign.summary`, and the pages are made in :mod:`fa3verify.report.build`.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path

from fa3verify.campaign import atlas, plan, questions, replay_files, shards, tasks as campaign
from fa3verify.campaign.executors import Cluster, fair_share
from fa3verify.campaign.findings import ContractQuestion, Finding
from fa3verify.campaign.introduction import FIRST_WORD_S, Only, introduce_all, paced
from fa3verify.campaign.pool import default_workers, processes
from fa3verify.campaign.profiles import PROFILES, ProfileName
from fa3verify.campaign.run import Introduction, Run
from fa3verify.campaign.summary import of_kernel, provenance, summarize
from fa3verify.campaign.tasks import Interrupted, Outcome, Task
from fa3verify.files import write_text
from fa3verify.inputs.captures import Capture, list_captures
from fa3verify.judging import gate
from fa3verify.kernels import twins
from fa3verify.known import registry
from fa3verify.text import one_line, plural

PARTIAL = ".partial"  # the journal's folder below OUT
Progress = Callable[[int, Outcome | None], None]  # gets the number of tasks with None at the start, then each outcome


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
    command: str | None = None  # as the summary names it; this process's command line by default
    task_limit_s: float | None = None  # the profile's by default
    activations: Path | None = None  # npz files of the user's own model, or one of them
    memory_bytes: int | None = None  # of each worker; by default an equal share of the machine's, at least 8 GiB
    shard: shards.Number | None = None  # which part to run; all by default
    only: Only = Only()  # noqa: RUF009 (immutable)
    is_fail_fast: bool = False  # whether the first finding ends the campaign
    answer: questions.Answer = "ask"  # what a question does to the verdict
    began_s: float | None = None  # when the command began, by the monotonic clock; by default when tasks are planned

    @property
    def journal(self) -> Path:
        """Return the folder of finished results, from which a campaign resumes; each shard has a folder of its own."""
        return self.out / (PARTIAL if self.shard is None else f"{PARTIAL}-{self.shard.number}-of-{self.shard.count}")


@dataclass(frozen=True, slots=True)
class ShardRun:
    """The result of one shard: its name in words, its file, the number of its tasks and what failed.

    An exit code of 0 means that nothing failed, and is no pass. Baseline and coverage depend on other shards and are
    not judged here.
    """

    shard: str
    file: str
    tasks: int
    failures: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """1 with a failure, 0 without."""
        return 1 if self.failures else 0


def make_executor(settings: Settings) -> Executor:
    """Return local isolated processes, or the executor of the cluster that the settings name.

    Raises
    ------
    ModuleNotFoundError
        If a scheduler is named and ``distributed`` is not installed.
    OSError
        If no scheduler answers.
    """
    limit_s = settings.task_limit_s or PROFILES[settings.profile].task_limit_s
    if settings.scheduler:
        return Cluster(settings.scheduler, limit_s, memory_bytes=settings.memory_bytes)
    share = (
        fair_share(settings.workers or default_workers()) if settings.memory_bytes is None else settings.memory_bytes
    )
    return processes(settings.workers, limit_s, memory_bytes=share)


def prepare_output(out: Path) -> None:
    """Create the output directory; ValueError if nothing can be written there."""
    try:
        write_text(out / ".writable", "")
        (out / ".writable").unlink()
    except OSError as error:
        raise ValueError(f"output directory {out} cannot be written: {error.strerror}") from None


def run(settings: Settings, progress: Progress, executor: Executor | None = None) -> Run:
    """Run a campaign and write everything below ``settings.out``.

    Parameters
    ----------
    progress : callable
        Called with (number of tasks, None) at the start and (number of tasks, outcome) after each task.
    executor : Executor, optional
        Runs the tasks and is then shut down; by default :func:`make_executor` makes it.

    Returns
    -------
    Run
        The run that ``summary.json`` holds.

    Raises
    ------
    ValueError
        For an unknown kernel, or one that cannot run here (:class:`fa3verify.known.libraries.Unavailable`), a bad
        baseline, a damaged or foreign file of activations, or an unwritable output directory.
    Interrupted
        A KeyboardInterrupt, after the workers have ended and the report of what was found is written; finished tasks of
        the twins stay in the journal and are not run again next time.
    """
    compared, updated = _baselines(settings)
    part, outcomes = carry_out(settings, progress, executor)
    if part.interrupted_by is None:
        try:
            return conclude(part, outcomes, settings, compared, updated)
        except KeyboardInterrupt as stop:
            number = stop.args[0] if stop.args else signal.SIGINT
            raise Interrupted(number, None, f"its report is not whole; {_told_kept(settings)}") from None
    result = conclude(part, outcomes, replace(settings, update_baseline=None), compared, None)
    report = f"{settings.out / 'report.html'} has what was found so far"
    raise Interrupted(part.interrupted_by, result, f"{report}; {_told_kept(settings)}")


def run_shard(settings: Settings, progress: Progress) -> ShardRun:
    """Run one shard and write it below ``settings.out``.

    Raises
    ------
    ValueError
        As for :func:`run`.
    Interrupted
        At an interruption; no file is then written, as a shard is whole or not there.
    """
    part, outcomes = carry_out(settings, progress)
    if part.interrupted_by is not None:
        raise Interrupted(part.interrupted_by, None, f"{part.shard} is not written; {_told_kept(settings)}")
    part = replace(part, outcomes={outcome.task.identity(part.asked.sources): outcome for outcome in outcomes})
    path = shards.write(part, settings.out)
    _remove_journal(settings)
    result = summarize(list(part.kernels), outcomes, None, profile=settings.profile, seed=settings.seed)
    return ShardRun(str(part.shard), path.name, len(outcomes), result.failures)


def merge(folders: Sequence[Path], settings: Settings) -> Run:
    """Conclude from the shards of a campaign as :func:`run` does; nothing is run.

    Parameters
    ----------
    settings : Settings
        Only ``out`` and the baselines are read; kernels, profile and seed are those of the shards.

    Returns
    -------
    Run
        The same data as from one process, unless a kernel lost so many workers that its other tasks were skipped.

    Raises
    ------
    ValueError
        As :func:`fa3verify.campaign.shards.read_all`, and for shards that other sources of fa3verify ran, a bad
        baseline, or an unwritable output directory.
    """
    parts = shards.read_all(folders)
    first = parts[0]
    asked = first.asked
    if asked.sources != campaign.source_stamp():
        version = first.provenance.version
        raise ValueError(f"these sources of fa3verify did not run the shards: merge with those that did, of {version}")
    settings = replace(settings, kernels=asked.kernels, profile=asked.profile, seed=asked.seed)
    compared, updated = _baselines(settings)
    tasks = plan.plan(first.kernels, asked.profile, asked.seed, first.captures, settings.only.limit)
    outcomes = shards.outcomes_of(parts, tasks)
    prepare_output(settings.out)
    whole = replace(first, started=min(part.started for part in parts), wall_s=max(part.wall_s for part in parts))
    return conclude(whole, outcomes, settings, compared, updated)


def carry_out(
    settings: Settings, progress: Progress, executor: Executor | None = None
) -> tuple[shards.Part, list[Outcome]]:
    """Run the tasks of a campaign, or of one shard of it; return what ran, without outcomes, and the outcomes.

    It raises what :func:`run` raises but for an interruption of tasks, which the part records in ``interrupted_by``.
    """
    started = datetime.now(UTC)
    clock = settings.began_s or time.monotonic()
    captures = list_captures(settings.activations) if settings.activations else ()
    executor = executor or make_executor(settings)
    try:
        kernels, outcomes, asked, interrupted_by = _judged(settings, executor, captures, progress)
    except BaseException:
        executor.shutdown(cancel_futures=True)
        raise
    # Nothing that a kernel has begun is left when the reports are written.
    executor.shutdown(cancel_futures=any(outcome.skipped for outcome in outcomes))
    shard = settings.shard or shards.Number(1, 1)
    part = shards.Part(
        number=shard.number,
        count=shard.count,
        asked=shards.Asked(settings.kernels, settings.profile, settings.seed, campaign.source_stamp()),
        kernels=kernels,
        captures=captures,
        outcomes={},
        started=started.isoformat(timespec="seconds"),
        wall_s=time.monotonic() - clock,
        provenance=provenance(settings.seed),
        interrupted_by=interrupted_by,
        questions=asked,
    )
    return part, outcomes


def _judged(
    settings: Settings, executor: Executor, captures: tuple[Capture, ...], progress: Progress
) -> tuple[tuple[Introduction, ...], list[Outcome], tuple[ContractQuestion, ...], int | None]:
    """Run the tasks of a campaign, or those of a shard, and ask about what failed.

    It returns the kernels as judged last, the outcomes, the questions, and the signal that interrupted it or None.
    """
    # Whoever asks for a part, or compares figures, decides by himself how long it takes.
    is_asked = settings.profile != "quick" or settings.only != Only() or settings.baseline or settings.update_baseline
    workers = math.inf if is_asked else settings.workers or default_workers()
    # All shards judge alike, so that none is timed or asks.
    is_own = registry.is_own if settings.shard is None else lambda name: False

    def planned(names: tuple[str, ...]) -> tuple[tuple[Introduction, ...], Sequence[Task]]:
        kernels = tuple(
            paced(settings.only.of(each), executor, workers) if is_own(each.name) else settings.only.of(each)
            for each in introduce_all(names, settings.profile, executor, captures)
        )
        return kernels, plan.plan(
            kernels, settings.profile, settings.seed, captures, settings.only.limit, settings.is_fail_fast
        )

    def execute(tasks: Sequence[Task], until: float = math.inf) -> list[Outcome]:
        progress(len(tasks), None)
        return campaign.execute(
            tasks,
            executor,
            journal=settings.journal,
            stamp=campaign.journal_stamp(),
            progress=partial(progress, len(tasks)),
            stops=lambda outcome: settings.is_fail_fast and campaign.is_finding(outcome),
            until=min(until, time.monotonic() + FIRST_WORD_S) if any(kernel.limit for kernel in kernels) else until,
        )

    kernels, tasks = planned(settings.kernels)
    prepare_output(settings.out)
    threading.Thread(target=_import_report, daemon=True).start()  # ready when the tasks have ended
    tasks = shards.dealt(tasks, settings.shard or shards.Number(1, 1))
    ask = partial(
        questions.ask_all,
        is_own=is_own,
        executor=executor,
        execute=execute,
        planned=planned,
        of_kernel=partial(of_kernel, baseline=None, profile=settings.profile, seed=settings.seed),
        part=f" (seen in a part: {settings.only})" if settings.only != Only() else "",
    )
    outcomes: list[Outcome] = []
    try:
        outcomes = execute(tasks)
        return *ask(kernels, outcomes), None
    except Interrupted as stop:
        outcomes = outcomes or stop.found
        words = f"interrupted when {sum(not x.skipped for x in outcomes)} of {len(outcomes)} tasks had ended"
        kernels, outcomes, asked = ask(kernels, outcomes, stop.found)
        return tuple(replace(kernel, narrowed=words) for kernel in kernels), outcomes, asked, stop.number


def _told_kept(settings: Settings) -> str:
    """Return in words from which finished tasks the same command would resume."""
    count = len(list(settings.journal.glob("*.json")))
    if not count:
        return "no finished task is kept, and the same command begins anew"
    rest = "" if all(map(twins.is_twin, settings.kernels)) else "; kernels other than the twins begin anew"
    return f"the same command goes on from {plural(count, 'finished task')} of twins{rest}"


def conclude(
    part: shards.Part,
    outcomes: list[Outcome],
    settings: Settings,
    compared: gate.Baseline | None,
    updated: gate.Baseline | None,
) -> Run:
    """Draw the verdict from the outcomes and write everything below ``settings.out``.

    ``compared`` is the baseline to compare with, ``updated`` what the file of ``update_baseline`` holds already; both
    may be None.
    """
    from fa3verify.report.build import write_report

    clock = time.monotonic() - part.wall_s
    if settings.is_fail_fast and any(map(campaign.is_finding, outcomes)):
        compared = None  # a family that ended early has the figures of fewer cases
    result = summarize(list(part.kernels), outcomes, compared, profile=settings.profile, seed=settings.seed)
    result = questions.with_questions(result, part.questions, settings.answer)
    result = replace(
        replay_files.write_all(result, settings.out),
        exit_code=result.exit_code if part.interrupted_by is None else 128 + part.interrupted_by,
        command=one_line(settings.command or shlex.join(["fa3verify", *sys.argv[1:]]), 10**4),
        started=part.started,
        provenance=part.provenance,
        wall_s=round(time.monotonic() - clock, 1),
        cpu_s=campaign.cpu_seconds(outcomes),
    )
    if settings.update_baseline:
        body = gate.Baseline.of(settings.profile, settings.seed, [kernel.figured for kernel in result.kernels])
        write_text(settings.update_baseline, body.with_kernels_of(updated).text())
    atlas.write(settings.out / atlas.FILE, atlas.of(result))
    write_report(settings.out, result)
    if part.interrupted_by is None:
        _remove_journal(settings)
    return result


def _baselines(settings: Settings) -> tuple[gate.Baseline | None, gate.Baseline | None]:
    """Return the baseline to compare with and the content of the one to update, each None where there is none.

    They are read before anything runs, so that a bad file is a ValueError at once, as is another profile or seed.
    """
    if settings.only.limit is not None:  # figures of fewer cases cannot be compared
        return None, None
    path = settings.update_baseline
    updated = _stored(settings, path) if path and path.is_file() else None
    if settings.baseline is None:
        return gate.shipped_baseline(settings.profile, settings.seed), updated
    return _stored(settings, settings.baseline), updated


def _stored(settings: Settings, path: Path) -> gate.Baseline:
    """Read a baseline; ValueError if it is of another profile or seed."""
    baseline = gate.read_baseline(path)
    if (baseline.profile, baseline.seed) != (settings.profile, settings.seed):
        raise ValueError(
            f"baseline {baseline.name} is for profile {baseline.profile} and seed {baseline.seed}, "
            f"not {settings.profile} and {settings.seed}"
        )
    return baseline


def _remove_journal(settings: Settings) -> None:
    """Remove the journal, once the report or the shard is written."""
    with contextlib.suppress(OSError):
        shutil.rmtree(settings.journal)


def _import_report() -> None:
    """Import what the report needs while the workers run: it takes seconds."""
    import_module("fa3verify.report.build")
    import_module("h5netcdf")
