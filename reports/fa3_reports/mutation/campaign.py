"""The verb ``mutants``: run what was asked for, write csv and Markdown, count what was missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fa3_reports.mutation import automatic, grid, museum, provenance, sound, tables, uncommon
from fa3_reports.mutation.automatic import Settings
from fa3_reports.mutation.examine import Examination, warm_up
from fa3_reports.mutation.museum import Exhibit
from fa3verify.campaign.pool import processes
from fa3verify.campaign.profiles import ProfileName
from fa3verify.campaign.tasks import CallTask, run as run_tasks
from fa3verify.files import csv_text, write_text

Tell = Callable[[str], None]


def run(kinds: Sequence[str], progress: Tell, settings: Settings) -> tuple[int, str]:
    """Run a campaign of each kind; return how many mistakes our own rules missed, and the pages as one text.

    Beside the tables of each its provenance is written, with the keys that the code had when the campaign began.

    Raises
    ------
    ValueError
        For an unknown module or kernel, or a folder with results of other code.
    """
    parts = []
    for kind in kinds:
        keys = provenance.keys(kind)
        parts.append(RUN[kind](progress, settings))
        provenance.write(settings.out, kind, keys, {name: getattr(settings, name) for name in ASKED[kind]})
    return sum(missed for missed, _ in parts), "\n".join(text for _, text in parts)


_EXAMINED = ("profile", "bits")
ASKED: Mapping[str, Sequence[str]] = {  # the settings that a kind depends on
    "museum": _EXAMINED,
    "uncommon": _EXAMINED,
    "grid": ("rules",),
    "automatic": (*_EXAMINED, "count", "kernels", "modules", "seed", "seconds"),
    "sound": ("trials", "seed", "seconds"),
}


def _write(out: Path, stem: str, head: Sequence[str], rows: list[list[object]], page: str) -> None:
    write_text(out / f"{stem}.csv", csv_text(head, rows))
    write_text(out / f"{stem}.md", page)


def _automatic(progress: Tell, settings: Settings) -> tuple[int, str]:
    with processes(settings.workers) as pool:
        fates = automatic.run(settings, pool, progress)
    page = tables.automatic(fates)
    write_text(settings.out / "automatic.md", page)
    return sum(fate.status == "missed" for fate in fates), page


PLANTED: Mapping[str, Callable[[], tuple[Exhibit, ...]]] = {
    "museum": museum.exhibits,
    "uncommon": lambda: uncommon.EXHIBITS,
}


def _shown(kind: str, index: int, profile: ProfileName, bits: bool) -> Examination:
    """Examine one exhibit, in a worker."""
    exhibit = PLANTED[kind]()[index]
    if exhibit.kernel != museum.SIMULATOR:
        warm_up([(exhibit.kernel, "")])
    return museum.show(exhibit, profile, bits=bits)


def _examined(kind: str, progress: Tell, settings: Settings) -> list[tuple[Exhibit, Examination]]:
    """Return every exhibit of a kind with what became of it."""
    exhibits = PLANTED[kind]()
    given = {"kind": kind, "profile": settings.profile, "bits": settings.bits}
    tasks = [CallTask(exhibit.what, _shown, given | {"index": i}) for i, exhibit in enumerate(exhibits)]
    found: dict[int, Examination] = {}
    with processes(settings.workers) as pool:
        for outcome in run_tasks(tasks, pool):
            found[outcome.arguments["index"]] = outcome.result()
            progress(outcome.task.label)
    return [(exhibit, found[i]) for i, exhibit in enumerate(exhibits)]


def _museum(progress: Tell, settings: Settings) -> tuple[int, str]:
    results = _examined("museum", progress, settings)
    page = tables.museum(results, museum.OUTSIDE, museum.REPORTS)
    _write(settings.out, "museum", *tables.museum_rows(results, museum.OUTSIDE), page)
    return sum(not examination.found_by for _, examination in results), page


def _uncommon(progress: Tell, settings: Settings) -> tuple[int, str]:
    results = _examined("uncommon", progress, settings)
    page = tables.uncommon(results)
    _write(settings.out, "uncommon", *tables.exhibit_rows(results), page)
    return sum(not examination.found_by for _, examination in results), page


def _grid(progress: Tell, settings: Settings) -> tuple[int, str]:
    with processes(settings.workers) as pool:
        verdicts = grid.run(pool, progress, settings.rules)
    page = tables.grid(verdicts)
    _write(settings.out, "grid", *tables.grid_rows(verdicts), page)
    ours = [verdict for verdict in verdicts if not verdict.is_correct]
    return sum(not verdict.rejected["bound and baseline"] for verdict in ours), page


def _sound(progress: Tell, settings: Settings) -> tuple[int, str]:
    with processes(settings.workers) as pool:
        found = sound.run(settings.trials, settings.seed, pool, progress, seconds=settings.seconds)
    page = tables.sound(found)
    _write(settings.out, "sound", sound.COLUMNS, sound.rows(found), page)
    return sum(len(tally.alarms) for tally in found), page


RUN: Mapping[str, Callable[[Tell, Settings], tuple[int, str]]] = {
    "museum": _museum,
    "uncommon": _uncommon,
    "grid": _grid,
    "automatic": _automatic,
    "sound": _sound,
}
