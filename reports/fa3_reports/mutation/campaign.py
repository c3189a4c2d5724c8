"""The verb ``mutants``: run what was asked for, write csv and Markdown, count what was missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fa3_reports.mutation import automatic, grid, museum, sound, tables, uncommon
from fa3_reports.mutation.examine import Examination, warm_up
from fa3_reports.mutation.museum import Exhibit
from fa3verify.campaign.pool import processes
from fa3verify.campaign.profiles import ProfileName
from fa3verify.campaign.tasks import Task
from fa3verify.campaign.tasks import run as run_tasks
from fa3verify.files import csv_text, write_text

Tell = Callable[[str], None]


def run(kinds: Sequence[str], progress: Tell, **options: Any) -> tuple[int, str]:
    """Run a campaign of each kind; return how many mistakes our own rules missed, and the pages as one text.

    Raises
    ------
    ValueError
        For an unknown module or kernel, or a folder with results of other code.
    """
    parts = [RUN[kind](progress, options) for kind in kinds]
    return sum(missed for missed, _ in parts), "\n".join(text for _, text in parts)


def _write(options: Mapping[str, Any], stem: str, head: Sequence[str], rows: list[list[object]], page: str) -> None:
    write_text(Path(options["out"]) / f"{stem}.csv", csv_text(head, rows))
    write_text(Path(options["out"]) / f"{stem}.md", page)


def _automatic(progress: Tell, options: Mapping[str, Any]) -> tuple[int, str]:
    names = ("out", "count", "profile", "modules", "bits", "seed", "seconds")
    given = {name: options[name] for name in names}
    if options["kernels"]:
        given["kernels"] = options["kernels"]
    settings = automatic.Settings(**given)
    with processes(options["workers"]) as pool:
        fates = automatic.run(settings, pool, progress)
    page = tables.automatic(fates)
    write_text(settings.out / "automatic.md", page)
    return sum(fate.status == "missed" for fate in fates), page


PLANTED: Mapping[str, Callable[[], tuple[Exhibit, ...]]] = {
    "museum": museum.exhibits,
    "uncommon": lambda: uncommon.EXHIBITS,
}


def _shown(kind: str, index: int, profile: ProfileName, bits: bool) -> Examination:
    """A worker's task: one exhibit."""
    exhibit = PLANTED[kind]()[index]
    if exhibit.kernel != museum.SIMULATOR:
        warm_up([(exhibit.kernel, "")])
    return museum.show(exhibit, profile, bits=bits)


def _examined(kind: str, progress: Tell, options: Mapping[str, Any]) -> list[tuple[Exhibit, Examination]]:
    """Every exhibit of a kind with what became of it."""
    exhibits = PLANTED[kind]()
    given = {"kind": kind, "profile": options["profile"], "bits": options["bits"]}
    tasks = [Task(kind, exhibit.what, _shown, given | {"index": i}) for i, exhibit in enumerate(exhibits)]
    found: dict[int, Examination] = {}
    with processes(options["workers"]) as pool:
        for outcome in run_tasks(tasks, pool):
            found[outcome.task.arguments["index"]] = outcome.result()
            progress(outcome.task.label)
    return [(exhibit, found[i]) for i, exhibit in enumerate(exhibits)]


def _museum(progress: Tell, options: Mapping[str, Any]) -> tuple[int, str]:
    results = _examined("museum", progress, options)
    page = tables.museum(results, museum.OUTSIDE, museum.REPORTS)
    head, rows = tables.museum_rows(results, museum.OUTSIDE)
    _write(options, "museum", head, rows, page)
    return sum(not examination.found_by for _, examination in results), page


def _uncommon(progress: Tell, options: Mapping[str, Any]) -> tuple[int, str]:
    results = _examined("uncommon", progress, options)
    page = tables.uncommon(results)
    _write(options, "uncommon", *tables.exhibit_rows(results), page)
    return sum(not examination.found_by for _, examination in results), page


def _grid(progress: Tell, options: Mapping[str, Any]) -> tuple[int, str]:
    with processes(options["workers"]) as pool:
        verdicts = grid.run(pool, progress, options["rules"])
    head, rows = tables.grid_rows(verdicts)
    page = tables.grid(verdicts)
    _write(options, "grid", head, rows, page)
    ours = [verdict for verdict in verdicts if not verdict.is_correct]
    return sum(not verdict.rejected["bound and baseline"] for verdict in ours), page


def _sound(progress: Tell, options: Mapping[str, Any]) -> tuple[int, str]:
    with processes(options["workers"]) as pool:
        found = sound.run(options["trials"], options["seed"], pool, progress, seconds=options["seconds"])
    page = tables.sound(found)
    _write(options, "sound", sound.COLUMNS, sound.rows(found), page)
    return sum(len(tally.alarms) for tally in found), page


RUN: Mapping[str, Callable[[Tell, Mapping[str, Any]], tuple[int, str]]] = {
    "museum": _museum,
    "uncommon": _uncommon,
    "grid": _grid,
    "automatic": _automatic,
    "sound": _sound,
}
