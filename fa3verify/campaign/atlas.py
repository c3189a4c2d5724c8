"""The atlas: the results of campaigns as they are stored for publication, with kernels of several side by side.

An atlas is a :class:`fa3verify.campaign.run.Run` without its cases: each family keeps its pooled figures, its seeds and
its largest case, and forwards have their accumulator loss. ``verify`` writes ``OUT/atlas.json`` for its own kernels,
and the verb ``atlas`` one for many campaigns. The replay files that it names, by paths relative to its folder, are all
that it needs beside it. A new meaning, or a key more or less, needs a new number of the schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from fa3verify import records
from fa3verify.campaign.findings import Finding
from fa3verify.campaign.run import KernelRun, Run, verdict_of
from fa3verify.files import json_text, parsed, read_text, write_text
from fa3verify.judging.family import CaseResult, FamilyRow
from fa3verify.judging.verdict import EXIT_CODES

SCHEMA = "fa3verify.atlas/3"
FILE = "atlas.json"


def of(run: Run) -> Run:
    """Return the atlas of a run whose replay files have been written.

    Tracebacks are left out, as they name files on a user's machine.
    """
    return replace(
        run,
        kernels=tuple(_without_cases(kernel, run.cases) for kernel in run.kernels),
        failures=tuple(replace(finding, traceback=None) for finding in run.failures),
        cases=(),
        gate=(),
        command="",
        wall_s=0.0,
        cpu_s={},
        schema=SCHEMA,
    )


def _without_cases(kernel: KernelRun, cases: Iterable[CaseResult]) -> KernelRun:
    mine = [case for case in cases if case.kernel == kernel.name]
    return replace(kernel, sketch=None, loss=(), families=tuple(_family(row, mine) for row in kernel.families))


def _family(row: FamilyRow, cases: Iterable[CaseResult]) -> FamilyRow:
    mine = [case for case in cases if case.family == row.family]
    largest = max(mine, key=lambda case: case.measures["ratio_max"])
    seeds = {case.case.recipe.seed for case in mine}
    return replace(row, seeds=tuple(sorted(seeds)), largest=largest.describe)


def findings(made: Run, kernel: str) -> list[Finding]:
    """Return the findings of one kernel."""
    return [each for each in made.failures if each.kernel == kernel]


def alone(made: Run, kernel: str) -> Run:
    """Return an atlas with one of its kernels and the findings about that; with none where it has none of the name."""
    kernels = tuple(each for each in made.kernels if each.name == kernel)
    return replace(made, kernels=kernels, failures=tuple(findings(made, kernel)))


def joined(made: Run, others: Iterable[Run]) -> Run:
    """Return an atlas with the kernels of other ones added, sorted by name; of a kernel in several the last counts."""
    kernels: dict[str, tuple[KernelRun, list[Finding]]] = {}
    for each in (made, *others):
        kernels |= {kernel.name: (kernel, findings(each, kernel.name)) for kernel in each.kernels}
    known = [kernels[name] for name in sorted(kernels)]
    failures = tuple(finding for _, mine in known for finding in mine)
    verdict = verdict_of([kernel for kernel, _ in known], failures)
    return replace(
        made,
        kernels=tuple(kernel for kernel, _ in known),
        failures=failures,
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
    )


def text(made: Run) -> str:
    """Return the canonical JSON of an atlas."""
    return json_text(records.plain(made))


def parse(text: str, name: str) -> Run:
    """Read what :func:`text` gives; ValueError, with ``name`` and the place, for a damaged or foreign file.

    The ValueError of a damaged one is raised from a :class:`fa3verify.records.DamagedError`, which lists every fault.
    """
    body = parsed(text, SCHEMA, f"{name} is not an atlas")
    try:
        made = records.read(Run, body, "atlas", whole=True)
        if lines := list(_lacking(made)):
            raise records.DamagedError(lines)
        return made
    except ValueError as error:
        raise ValueError(f"{name} is a damaged atlas: {error}") from error


def _lacking(made: Run) -> Iterator[str]:
    """Yield a line for each key that an atlas must have, a run may lack, and this one lacks."""
    for number, finding in enumerate(made.failures):
        if finding.cause is None:
            yield f"'cause' is missing @ atlas.failures[{number}]"
    for number, kernel in enumerate(made.kernels):
        if kernel.loss is None:
            yield f"'loss' is missing @ atlas.kernels[{number}]"
        for place, row in enumerate(kernel.families):
            cases = row.figures.get("cases")
            known = {"seeds": row.seeds, "largest": row.largest, "replay": row.replay, "cases": cases is not None}
            for key in (key for key, x in known.items() if not x):
                yield f"{key!r} is missing @ atlas.kernels[{number}].families[{place}]"


def write(path: Path, made: Run) -> None:
    """Write an atlas, whole or not at all."""
    write_text(path, text(made))


def read(path: Path) -> Run:
    """Read an atlas; ValueError, with the path, for one that cannot be read, or is damaged or foreign."""
    try:
        return parse(read_text(path), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
