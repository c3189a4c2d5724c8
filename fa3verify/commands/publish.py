"""The atlas of many kernels: a campaign for each, what a forward loses over long rows, and the pages of it.

A kernel costs its own entry only: atlas and pages are written again after each, and one that fails has its reason in
them. Several kernels are judged side by side, each by a few processes of its own: what one of them does to its process
or to its GPU context harms no other, and where one waits for its last task the others go on. ``OUT/worst`` gets a
replay file a kernel, of the largest case of every family, and one a cause of its findings.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from fa3verify.campaign import accumulator_loss, atlas, replay_files, summary
from fa3verify.campaign.atlas import Atlas, Entry, EntryFinding, Loss
from fa3verify.campaign.executors import fair_share, make_executor
from fa3verify.campaign.pool import TaskError, default_workers
from fa3verify.campaign.run import CaseRow, Run
from fa3verify.cases.case import Case
from fa3verify.commands import verify
from fa3verify.files import write_text
from fa3verify.kernels.record import Candidate
from fa3verify.operations import FORWARD
from fa3verify.text import of_error, one_line
from fa3verify.timed.timing import query

CAMPAIGNS = "campaigns"
PROCESSES = 4  # of one kernel: each imports and compiles for itself, for ten seconds and more where it needs a GPU
CROWDING = 1.5  # processes a core: those of a kernel wait for its first call and its last task, a third of their time
WORST = "worst"
LOSS_V_MEAN = 1.0
LOSS_ROWS = {8192: 128, 131072: 128, 1 << 20: 16}  # query rows by keys: the longest takes as long as the one before it


def run(
    settings: verify.Settings, known: dict[str, Candidate], tell: Callable[[str], None], *, resume: bool = False
) -> Atlas:
    """Judge the kernels of ``settings``, some side by side, and write ``atlas.json``, its pages and replays.

    Parameters
    ----------
    settings : Settings
        ``out`` takes the atlas, and ``out/campaigns`` the report of each kernel.
    known : dict
        What is known by name of the kernels; those that are unavailable are entries that say why.
    tell : callable
        Gets one line per kernel.
    resume : bool
        Keep the judged entries of an atlas of the same profile and seed that is there already.

    Returns
    -------
    Atlas

    Raises
    ------
    KeyboardInterrupt
        At an interruption, after all processes have ended; kernels that were judged stay in the atlas.
    """
    made = _empty(settings)
    kept = _stored(settings, made) if resume else ()
    missing = [_missing(known[name]) for name in settings.kernels if name in known and known[name].unavailable]
    there = {entry.kernel: entry for entry in (*kept, *missing)}
    made = _write(settings.out, replace(made, entries=tuple(there.values())))
    todo = [name for name in settings.kernels if name not in there or _may_lose(there[name])]
    workers = settings.workers or int(CROWDING * default_workers())
    lanes = max(1, workers // PROCESSES)
    own = replace(settings, workers=workers // lanes, memory_bytes=settings.memory_bytes or fair_share(workers))
    pools = _Pools()

    with ThreadPoolExecutor(lanes) as pool:
        futures = [pool.submit(_entry, own, name, pools, there.get(name)) for name in todo]
        try:
            for future in as_completed(futures):
                entry = future.result()
                others = tuple(each for each in made.entries if each.kernel != entry.kernel)
                made = _write(settings.out, replace(made, entries=(*others, entry)))
                tell(_told(entry))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            pools.end()
            raise
    return made


class _Pools:
    """The processes of all kernels that are judged now, which an interruption ends at once."""

    def __init__(self) -> None:
        self._made: set[Executor] = set()
        self._lock = threading.Lock()
        self._has_ended = False

    def check(self) -> None:
        """Raise KeyboardInterrupt after the end."""
        if self._has_ended:
            raise KeyboardInterrupt(signal.SIGINT)

    @contextlib.contextmanager
    def pool(self, settings: verify.Settings) -> Iterator[Executor]:
        """Processes for one kernel, which end with the context."""
        with self._lock:
            self.check()
            made = make_executor(settings)
            self._made.add(made)
        try:
            with made:
                yield made
        finally:
            with self._lock:
                self._made.discard(made)

    def end(self) -> None:
        """End all processes, and let no others begin."""
        with self._lock:
            self._has_ended = True
            running = tuple(self._made)
        for each in running:
            each.shutdown(wait=False, cancel_futures=True)


def _told(entry: Entry) -> str:
    """Return in one line what became of a kernel."""
    losses = ", ".join(each.missing or f"{each.rel_rmse:.2e}" for each in entry.loss)
    return f"{entry.kernel} {entry.verdict}" + (f", over long rows {losses}" if losses else "")


def _may_lose(entry: Entry) -> bool:
    """Tell whether it is a forward that was judged, and whose loss over long rows is not known yet."""
    return entry.operation == FORWARD and entry.verdict != "not run" and not entry.loss


def _empty(settings: verify.Settings) -> Atlas:
    facts = summary.provenance(settings.seed)
    packages = {name: version for name, version in facts.packages.items() if version != "absent"}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        packages["NVIDIA driver"] = query("driver_version")
    started = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    given = settings.profile, settings.seed, started, facts.platform, packages
    return Atlas(facts.version, facts.git, *given, entries=())


def _stored(settings: verify.Settings, made: Atlas) -> tuple[Entry, ...]:
    """Judged entries of the atlas that is there; ValueError if it is of another profile, seed or version."""
    path = settings.out / atlas.FILE
    if not path.is_file():
        return ()
    there = atlas.read(path)
    for name in ("profile", "seed", "version"):
        if getattr(there, name) != getattr(made, name):
            raise ValueError(f"{path} has {name} {getattr(there, name)}, not {getattr(made, name)}")
    return tuple(entry for entry in there.entries if entry.verdict != "not run")


def _missing(candidate: Candidate) -> Entry:
    facts = {"description": one_line(candidate.description), "policy": candidate.declared}
    facts |= {"operation": candidate.operation, "dtype": candidate.dtype}
    return atlas.not_run(candidate.name, one_line(candidate.unavailable or ""), **facts)


def _write(out: Path, made: Atlas) -> Atlas:
    from fa3verify.report import atlas_page

    made = replace(made, entries=tuple(sorted(made.entries, key=lambda entry: entry.kernel)))
    atlas.write(out / atlas.FILE, made)
    atlas_page.write_pages(out, [out / atlas.FILE])
    return made


def _entry(settings: verify.Settings, name: str, pools: _Pools, judged: Entry | None = None) -> Entry:
    """Judge one kernel and measure its losses, or only these where it was judged already.

    Whatever the kernel does to the campaign is the reason that its entry has no verdict. The losses are asked first:
    the processes that measure them would otherwise wait until the kernel has introduced itself.
    """
    losses: dict[int, Future] = {}
    try:
        with pools.pool(settings) as executor:
            for keys, rows in LOSS_ROWS.items():
                asked = accumulator_loss.measure, name, LOSS_V_MEAN, keys, rows, settings.seed
                losses[keys] = executor.submit(*asked)
            entry = judged or _judged(settings, name, executor, pools.check)
    except Exception as error:
        entry = judged or atlas.not_run(name, of_error(error))
    pools.check()  # what was ended is no loss
    if not _may_lose(entry):
        return entry
    return replace(entry, loss=tuple(_loss(keys, future) for keys, future in losses.items()))


def _judged(settings: verify.Settings, name: str, executor: Executor, check: Callable[[], None]) -> Entry:
    """Judge one kernel, and shut the executor down."""
    campaign = settings.out / CAMPAIGNS / _stem(name)
    own = replace(settings, kernels=(name,), out=campaign)
    found = verify.run(own, lambda total, outcome: check(), executor)
    (entry,) = atlas.of(found).entries
    return _published(entry, found, campaign, settings.out)


def _stem(kernel: str) -> str:
    """What files of a kernel are called."""
    return re.sub(r"[^A-Za-z0-9._+-]", "_", kernel)


def _loss(seqlen_k: int, future: Future) -> Loss:
    """What became of one measurement."""
    rows = LOSS_ROWS[seqlen_k]
    try:
        found: accumulator_loss.Lost | None = future.result()
    except (TaskError, CancelledError) as error:
        return Loss(seqlen_k, rows, None, None, one_line(str(error)))
    if found is None:
        return Loss(seqlen_k, rows, None, None, "it does not take this length")
    return Loss(seqlen_k, rows, found.rel_rmse, found.bias, None)


def _published(entry: Entry, found: Run, campaign: Path, out: Path) -> Entry:
    """An entry as it is published: its replay files below ``out``, of every family the largest case."""
    path = out / WORST / f"{_stem(entry.kernel)}.json"
    largest = _largest([case for case in found.cases if case.kernel == entry.kernel])
    (kernel,) = (kernel for kernel in found.kernels if kernel.name == entry.kernel)
    replay_files.write_largest(path, entry.kernel, largest, kernel.hypothesis)
    kept, findings = _findings(entry.findings, campaign, path)
    coverage = entry.coverage
    if coverage and coverage.pairs:
        coverage = replace(coverage, pairs=replace(coverage.pairs, by_dimensions=None))
    return replace(
        entry,
        coverage=coverage,
        families=tuple(replace(row, replay=f"{WORST}/{path.name}") for row in entry.families),
        properties=tuple(replace(law, replay=kept.get(str(law.replay))) for law in entry.properties),
        findings=findings,
    )


def _largest(cases: Sequence[CaseRow]) -> dict[str, Case]:
    """The case of the largest error / bound of every family."""
    found: dict[str, Case] = {}
    for case in sorted(cases, key=lambda case: case.measures["ratio_max"], reverse=True):
        found.setdefault(case.family, case.case)
    return found


def _findings(
    findings: Sequence[EntryFinding], campaign: Path, beside: Path
) -> tuple[dict[str, str], tuple[EntryFinding, ...]]:
    """Copy the replay file of the first finding of each cause: new names by old, and the findings with them."""
    kept: dict[str, str] = {}
    for _, same in groupby(findings, lambda finding: finding.cause):
        first = next(same).replay
        if first and first not in kept:
            path = beside.with_name(f"{beside.stem}.finding-{len(kept)}.json")
            write_text(path, json.dumps(json.loads((campaign / first).read_text("utf-8")), sort_keys=True) + "\n")
            kept[first] = f"{WORST}/{path.name}"
    return kept, tuple(replace(finding, replay=kept.get(str(finding.replay))) for finding in findings)
