"""The job of ``fa3verify atlas``: judge each kernel by a campaign of its own, and publish all of them as one atlas.

The atlas is written again after each kernel; a kernel whose campaign fails is in it with the reason. Several
kernels are judged side by side, each by a few processes of its own: a kernel that harms its process or its GPU context
harms no other, and while one waits for its last task the others go on. For each kernel ``OUT/worst`` gets a replay file
with the largest case of every family, and one for each cause of its findings. A single campaign is
:mod:`fa3verify.commands.verify`; the stored form is :mod:`fa3verify.campaign.atlas`.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from fa3verify.campaign import accumulator_loss, atlas, replay_files, summary
from fa3verify.campaign.executors import fair_share
from fa3verify.campaign.findings import Finding
from fa3verify.campaign.pool import TaskError, default_workers
from fa3verify.campaign.results import Assumed
from fa3verify.campaign.run import Introduction, KernelRun, Loss, Run
from fa3verify.cases.case import Case
from fa3verify.commands import verify
from fa3verify.commands.verify import make_executor
from fa3verify.judging.family import CaseResult
from fa3verify.judging.verdict import EXIT_CODES
from fa3verify.kernels.record import Kernel
from fa3verify.operations import FORWARD
from fa3verify.text import of_error, one_line
from fa3verify.timed.timing import query

CAMPAIGNS = "campaigns"  # folder below OUT with the report of each kernel
# Processes of one kernel: few, as each imports and compiles for itself, for ten seconds and more where it needs a GPU.
PROCESSES = 4
# Processes per core: those of a kernel wait for its first call and its last task for a third of their time.
CROWDING = 1.5
WORST = "worst"  # folder below OUT with the published replay files
LOSS_V_MEAN = 1.0  # mean of V for the accumulator loss: with mean 0 nothing shows
LOSS_ROWS = {8192: 128, 131072: 128, 1 << 20: 16}  # query rows by keys: the longest takes as long as the one before it


def run(
    settings: verify.Settings, known: dict[str, Kernel], tell: Callable[[str], None], *, resume: bool = False
) -> Run:
    """Judge the kernels of ``settings``, some side by side, and write ``atlas.json`` and its replays.

    Parameters
    ----------
    settings : Settings
        ``out`` takes the atlas, and ``out/campaigns`` the report of each kernel.
    known : dict
        The kernels by name; those that are unavailable are in the atlas as not run, with the reason.
    tell : callable
        Called with one line for each kernel.
    resume : bool
        Keep the judged kernels of an atlas of the same profile and seed that is there already.

    Returns
    -------
    Run
        The atlas.

    Raises
    ------
    ValueError
        If ``resume`` finds an atlas of another profile, seed or version, or a damaged one.
    KeyboardInterrupt
        At an interruption, after all processes have ended; kernels that were judged stay in the atlas.
    """
    made = _empty(settings)
    stored = _stored(settings, made) if resume else made
    absent = (known[name] for name in settings.kernels if name in known and known[name].unavailable)
    made = atlas.joined(stored, [replace(made, kernels=tuple(map(_missing, absent)))])
    atlas.write(settings.out / atlas.FILE, made)
    there = {kernel.name: atlas.alone(made, kernel.name) for kernel in made.kernels}
    # A kernel that was judged comes again if its losses are not measured yet.
    todo = [name for name in settings.kernels if name not in there or _may_lose(there[name].kernels[0])]
    workers = settings.workers or int(CROWDING * default_workers())
    lanes = max(1, workers // PROCESSES)
    own = replace(settings, workers=workers // lanes, memory_bytes=settings.memory_bytes or fair_share(workers))
    pools = _Pools()

    with ThreadPoolExecutor(lanes) as pool:
        futures = [pool.submit(_row, own, name, pools, there.get(name)) for name in todo]
        try:
            for future in as_completed(futures):
                row = future.result()
                made = atlas.joined(made, [row])
                atlas.write(settings.out / atlas.FILE, made)
                tell(_told(row.kernels[0]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            pools.end()
            raise
    return made


class _Pools:
    """The process pools of all kernels that were judged, so that an interruption can end them together."""

    def __init__(self) -> None:
        self._made: list[Executor] = []
        self._has_ended = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if the pools were ended."""
        if self._has_ended:
            raise KeyboardInterrupt(signal.SIGINT)

    @contextlib.contextmanager
    def pool(self, settings: verify.Settings) -> Iterator[Executor]:
        """Give a context a pool of processes for one kernel, which end with it; KeyboardInterrupt after :meth:`end`."""
        self.check()
        with make_executor(settings) as made:
            self._made.append(made)
            self.check()  # the end may have come before the pool was known
            yield made

    def end(self) -> None:
        """End all processes, and let no others begin."""
        self._has_ended = True
        for each in self._made:
            each.shutdown(wait=False, cancel_futures=True)


def _told(kernel: KernelRun) -> str:
    """Return in one line what became of a kernel."""
    losses = ", ".join(each.missing or f"{each.rel_rmse:.2e}" for each in kernel.loss or ())
    return f"{kernel.name} {kernel.verdict}" + (f", over long rows {losses}" if losses else "")


def _may_lose(kernel: KernelRun) -> bool:
    """Tell whether a kernel is a forward that was judged and whose accumulator loss was not measured yet."""
    return kernel.operation == FORWARD and kernel.verdict != "not run" and not kernel.loss


def _empty(settings: verify.Settings) -> Run:
    """Return an atlas without kernels, with the provenance of this machine."""
    facts = summary.provenance(settings.seed)
    packages = {name: version for name, version in facts.packages.items() if version != "absent"}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        packages["NVIDIA driver"] = query("driver_version")
    started = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    return Run(
        profile=settings.profile,
        seed=settings.seed,
        verdict="inconclusive",
        exit_code=EXIT_CODES["inconclusive"],
        layers={},
        kernels=(),
        gate=(),
        baseline=None,
        failures=(),
        cases=(),
        provenance=replace(facts, packages=packages),
        version=facts.version,
        started=started,
        schema=atlas.SCHEMA,
    )


def _stored(settings: verify.Settings, made: Run) -> Run:
    """Return the stored atlas without kernels that were not run, or ``made`` where none is stored.

    ValueError if it is damaged, or of another profile, seed or version.
    """
    path = settings.out / atlas.FILE
    if not path.is_file():
        return made
    there = atlas.read(path)
    for name in ("profile", "seed", "version"):
        if getattr(there, name) != getattr(made, name):
            raise ValueError(f"{path} has {name} {getattr(there, name)}, not {getattr(made, name)}")
    judged = tuple(kernel for kernel in there.kernels if kernel.verdict != "not run")
    return atlas.joined(made, [replace(there, kernels=judged)])


def _missing(kernel: Kernel) -> KernelRun:
    """Return the entry of a kernel that cannot run here."""
    introduction = Introduction(
        kernel.name,
        one_line(kernel.description),
        kernel.operation,
        dtype=kernel.dtype,
        policy=kernel.declared,
    )
    return KernelRun(
        introduction=introduction, verdict="not run", inconclusive=one_line(kernel.unavailable or ""), loss=()
    )


def _row(settings: verify.Settings, name: str, pools: _Pools, judged: Run | None = None) -> Run:
    """Return an atlas of one kernel: judge it and measure its losses, or only the losses if it was ``judged`` before.

    An exception of its campaign becomes the reason why it was not run. The losses are submitted first: the processes
    that measure them would otherwise wait until the kernel has introduced itself.
    """
    losses: dict[int, Future] = {}
    try:
        with pools.pool(settings) as executor:
            for keys, rows in LOSS_ROWS.items():
                call = accumulator_loss.measure, name, LOSS_V_MEAN, keys, rows, settings.seed
                losses[keys] = executor.submit(*call)
            row = judged or _judged(settings, name, executor, pools.check)
    except Exception as error:
        failed = KernelRun(introduction=Introduction(name), verdict="not run", inconclusive=of_error(error), loss=())
        row = judged or replace(_empty(settings), kernels=(failed,))
    pools.check()  # after an interruption the measurements are cancelled, and no result
    (kernel,) = row.kernels
    if not _may_lose(kernel):
        return row
    loss = tuple(_loss(keys, future) for keys, future in losses.items())
    return replace(row, kernels=(replace(kernel, loss=loss),))


def _judged(settings: verify.Settings, name: str, executor: Executor, check: Callable[[], None]) -> Run:
    """Judge one kernel on an executor, which is then shut down, and return its published atlas."""
    campaign = settings.out / CAMPAIGNS / _stem(name)
    own = replace(settings, kernels=(name,), out=campaign)
    judged = verify.run(own, lambda total, outcome: check(), executor)
    return _published(judged, campaign, settings.out)


def _stem(kernel: str) -> str:
    """Return the name that files of a kernel have, without an ending."""
    return re.sub(r"[^A-Za-z0-9._+-]", "_", kernel)


def _loss(seqlen_k: int, future: Future) -> Loss:
    """Return the loss that a future measured over ``seqlen_k`` keys, or why there is none."""
    rows = LOSS_ROWS[seqlen_k]
    try:
        lost: accumulator_loss.Lost | None = future.result()
    except (TaskError, CancelledError) as error:
        return Loss(seqlen_k, rows, None, None, one_line(str(error)))
    if lost is None:
        return Loss(seqlen_k, rows, None, None, "it does not take this length")
    return Loss(seqlen_k, rows, lost.rel_rmse, lost.bias, None)


def _published(found: Run, campaign: Path, out: Path) -> Run:
    """Return the atlas of one kernel as it is published, with replay files below ``out``.

    ``campaign`` is the folder of its own report, from which the files of findings are copied. The largest case of every
    family goes into one file, which families and worst case then name.
    """
    made = atlas.of(found)
    (kernel,) = made.kernels
    path = out / WORST / f"{_stem(kernel.name)}.json"
    replay_files.write_largest(path, kernel.name, _largest(found.cases), kernel.hypothesis)
    replay = f"{WORST}/{path.name}"
    copied, findings = _findings(made.failures, campaign, path)
    coverage = kernel.coverage
    if coverage and coverage.pairs:  # an atlas has the counts of all pairs, and none by two dimensions
        coverage = replace(coverage, pairs=replace(coverage.pairs, by_dimensions=None))
    kernel = replace(
        kernel,
        coverage=coverage,
        families=tuple(replace(row, replay=replay) for row in kernel.families),
        laws=tuple(replace(law, replay=copied.get(str(law.replay))) for law in kernel.laws),
        worst=kernel.worst and replace(kernel.worst, replay=replay),
        assumed=kernel.assumed and _without_files(kernel.assumed),
    )
    return replace(made, kernels=(kernel,), failures=findings)


def _without_files(assumed: Assumed) -> Assumed:
    """Return what a bound assumed without its replay files, which stay in the campaign's own folder."""
    rows = [
        replace(row, refuted_by=row.refuted_by and replace(row.refuted_by, replay=None)) for row in assumed.hypotheses
    ]
    return replace(assumed, hypotheses=tuple(rows))


def _largest(cases: Sequence[CaseResult]) -> dict[str, Case]:
    """Return the case of the largest error / bound of each family."""
    largest: dict[str, Case] = {}
    for case in sorted(cases, key=lambda case: case.measures["ratio_max"], reverse=True):
        largest.setdefault(case.family, case.case)
    return largest


def _findings(findings: Sequence[Finding], campaign: Path, beside: Path) -> tuple[dict[str, str], tuple[Finding, ...]]:
    """Copy the replay file of the first finding of each cause from ``campaign`` to files named after ``beside``.

    Tracebacks are left out, as in the atlas itself. Return the new paths by the old ones, and the findings with the
    new paths; a finding whose file was not copied has None.
    """
    copied: dict[str, str] = {}
    for _, same in groupby(findings, lambda finding: finding.cause):
        first = next(same).replay
        if first and first not in copied:
            path = beside.with_name(f"{beside.stem}.finding-{len(copied)}.json")
            replay_files.write(path, replace(replay_files.read(campaign / first), traceback=None))
            copied[first] = f"{WORST}/{path.name}"
    return copied, tuple(replace(finding, replay=copied.get(str(finding.replay))) for finding in findings)
