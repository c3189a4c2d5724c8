"""The campaign over automatic mutants: which there are, who examines them, and what is written as they end."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fa3_reports.mutation import edits, examine, provenance, reach
from fa3_reports.mutation.edits import Mutant
from fa3_reports.mutation.equivalence import EQUIVALENT
from fa3_reports.stored import csv_rows, unpack
from fa3verify.campaign.profiles import ProfileName
from fa3verify.campaign.tasks import CallTask, Outcome, run as run_tasks
from fa3verify.files import csv_lines, read_text, stored, write_text
from fa3verify.known import registry

# Ours in fp16 and e4m3, the quantiser, both backwards, and the family whose softmax differs most from ours.
KERNELS = (
    "twin.fp16",
    "twin.e4m3",
    "twin.quantize",
    "twin.flash3.dew.backward.fp16",
    "twin.backward.fp16",
    "twin.flash3.dew.fp16",
)
Status = Literal["caught", "equivalent", "missed", "not finished"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for; ``seconds`` is the time after which no task begins, 0 without an end.

    ``seed`` chooses the mutants; their inputs are those of seed 0, for which there is a baseline. ``rules`` are those
    that judge the grid, ``trials`` at least those of sound kernels; ``workers`` are processes, 0 is one per core.
    """

    out: Path
    count: int = 300
    profile: ProfileName = "quick"
    kernels: tuple[str, ...] = KERNELS
    modules: tuple[str, ...] = ()
    bits: bool = True
    seed: int = 0
    seconds: float = 0.0
    workers: int = 0
    rules: str = "all"
    trials: int = 20_000


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the results: a mutant under some tasks; ``plan`` is "all", or the only one."""

    mutant: str
    operator: str
    profile: str
    plan: str
    found_by: str
    kernel: str
    task: str
    bits: str
    tasks: int
    seconds: float
    words: str


@dataclass(slots=True)
class Fate:
    """What is known of one mutant: its rows, and how many tasks of release are still to come."""

    mutant: Mutant
    rows: list[Row] = field(default_factory=list)
    missing: int = 0

    @property
    def status(self) -> Status:
        if any(row.found_by for row in self.rows):
            return "caught"
        if self.mutant.identity in EQUIVALENT and not self.bits:
            return "equivalent"
        return "missed" if self.rows and not self.missing else "not finished"

    @property
    def found_by(self) -> str:
        return next((row.found_by for row in self.rows if row.found_by), "")

    @property
    def bits(self) -> str:
        return next((row.bits for row in self.rows if row.bits), "")


def chosen(settings: Settings, lines: dict[str, dict[str, list[int]]]) -> list[Mutant]:
    """Return the mutants of a campaign: all that a kernel runs, or so many of them; the same for the same seed."""
    population = [
        mutant
        for module in settings.modules or edits.modules()
        for mutant in edits.mutants(module)
        if any(reach.is_run(mutant, lines[kernel]) for kernel in settings.kernels)
    ]
    random.Random(settings.seed).shuffle(population)
    return population[: settings.count]


def plan_of(
    mutant: Mutant, settings: Settings, lines: dict[str, dict[str, list[int]]], profile: ProfileName
) -> list[tuple[str, str]]:
    """Return kernels and tasks for a mutant, the first tasks of all kernels that run it before the rest of any, and
    last, where bits are compared, a search for any difference from the sound twin.
    """
    kernels = [kernel for kernel in settings.kernels if reach.is_run(mutant, lines[kernel])]
    ranked = [(i, kernel, task) for kernel in kernels for i, task in enumerate(examine.tasks_of(kernel, profile))]
    search = [(kernel, examine.SEARCH) for kernel in kernels if settings.bits]
    return [(kernel, task) for _, kernel, task in sorted(ranked, key=lambda place: place[0])] + search


def run(settings: Settings, pool: Executor, progress: Callable[[str], None]) -> list[Fate]:
    """Run a campaign, resuming what ``settings.out`` has; a line of ``automatic.csv`` a result, as it comes.

    ``progress`` is told the mutant of each result.

    Raises
    ------
    ValueError
        If the folder holds results of other code or other settings, or a module or a kernel is unknown.
    """
    until = time.time() + settings.seconds if settings.seconds else float("inf")
    for module in settings.modules:
        edits.mutants(module)
    for kernel in settings.kernels:
        registry.find(kernel)
    settings.out.mkdir(parents=True, exist_ok=True)
    lines = _lines(settings, pool)
    fates = {mutant.identity: Fate(mutant) for mutant in chosen(settings, lines)}
    for row in _stored(settings.out / "automatic.csv"):
        if row.mutant in fates:
            fates[row.mutant].rows.append(row)
    _run(settings, pool, fates, lines, until, progress)
    return list(fates.values())


def _lines(settings: Settings, pool: Executor) -> dict[str, dict[str, list[int]]]:
    """Lines that each kernel runs, kept beside the results with the keys of the code that they are for."""
    path = settings.out / "lines.json"
    keys = provenance.keys("automatic")
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"keys": keys}
    asked = {"bits": settings.bits}
    if stored["keys"] != keys or stored.get("asked", asked) != asked:
        raise ValueError(f"{settings.out} holds results of other code or settings; name another folder")
    lines = stored.get("lines", {})
    missing = [kernel for kernel in settings.kernels if kernel not in lines]
    lines |= dict(zip(missing, pool.map(reach.lines_of, missing)))
    write_text(path, json.dumps({"keys": keys, "asked": asked, "lines": lines}))
    return lines


def _begin(path: Path) -> None:
    """Make a table that lines can be added to: a new one has its head alone, an old one its whole lines."""
    known = read_text(path) if stored(path).exists() else csv_lines([[f.name for f in fields(Row)]])
    unpack(path)
    write_text(path, known[: known.rfind("\n") + 1])


def _stored(path: Path) -> Iterator[Row]:
    if not stored(path).exists():
        return
    whole_lines = read_text(path).rpartition("\n")[0]  # a line that was cut short is done again
    for row in csv_rows(whole_lines, path.name):
        values: dict[str, Any] = {**row}
        yield Row(**values | {"tasks": int(values["tasks"]), "seconds": float(values["seconds"])})


def _unit(
    mutant: str, plan: list[tuple[str, str]], profile: ProfileName, bits: bool, until: float
) -> examine.Examination | None:
    """A worker's task; None if the time is over."""
    if time.time() > until:
        return None
    examine.warm_up(plan)
    return examine.examine_mutant(mutant, plan, profile, bits=bits, until=until)


def _tasks(
    fate: Fate, settings: Settings, lines: dict[str, dict[str, list[int]]], until: float = math.inf
) -> list[CallTask]:
    """Return what is still to do for a mutant, labelled by the name of the plan. Survivors of quick see release task by
    task, so that a campaign stops and goes on anywhere.
    """
    done = {(row.profile, row.plan) for row in fate.rows}
    profile: ProfileName = "quick" if ("quick", "all") not in done else settings.profile
    if fate.found_by or (profile, "all") in done:
        return []
    plan = plan_of(fate.mutant, settings, lines, profile)
    named = {"all": plan} if profile == "quick" else {f"{kernel} {task}": [(kernel, task)] for kernel, task in plan}
    given = {"mutant": fate.mutant.identity, "profile": profile, "bits": settings.bits, "until": until}
    return [
        CallTask(name, _unit, given | {"plan": part}) for name, part in named.items() if (profile, name) not in done
    ]


def _run(
    settings: Settings,
    pool: Executor,
    fates: dict[str, Fate],
    lines: dict[str, dict[str, list[int]]],
    until: float,
    progress: Callable[[str], None],
) -> None:
    """Run round after round until nothing is to do; of what an argument covers release comes after all others."""

    def is_found(outcome: Outcome, other: CallTask) -> bool:
        mutant = other.arguments["mutant"]
        return mutant == outcome.arguments["mutant"] and bool(fates[mutant].found_by)

    path = settings.out / "automatic.csv"
    _begin(path)
    with path.open("a", encoding="utf-8", newline="") as file:
        while time.time() <= until:
            todo: dict[bool, list[CallTask]] = {False: [], True: []}
            for fate in fates.values():
                is_argued = bool(fate.rows) and fate.status == "equivalent"
                todo[is_argued] += _tasks(fate, settings, lines, until)
            tasks = todo[False] or todo[True]
            if not tasks:
                break
            for outcome in run_tasks(tasks, pool, drops=is_found):
                result = None if outcome.skipped else outcome.result()
                if result is None:
                    continue
                fate = fates[outcome.arguments["mutant"]]
                fate.rows.append(_row(fate.mutant, outcome.arguments["profile"], outcome.task.label, result))
                file.write(csv_lines([astuple(fate.rows[-1])]))
                file.flush()
                progress(fate.mutant.identity)
    for fate in fates.values():
        fate.missing = len(_tasks(fate, settings, lines))


def _row(mutant: Mutant, profile: str, plan: str, result: examine.Examination) -> Row:
    return Row(
        mutant.identity,
        mutant.operator,
        profile,
        plan,
        " ".join(result.found_by),
        result.kernel,
        result.task,
        result.bits,
        result.tasks,
        result.seconds,
        result.words,
    )
