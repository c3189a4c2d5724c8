"""Replay files: a case, a family of cases or a trial of a law as JSON, which anyone can run again.

:func:`write_all` writes those of a run. ``fa3verify replay`` reads one by :func:`read`, and
:mod:`fa3verify.commands.replay` runs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fa3verify import records
from fa3verify.campaign.findings import Finding, MovedFigure
from fa3verify.campaign.results import RefutedBy
from fa3verify.campaign.run import KernelRun, Run, WorstCase
from fa3verify.cases.case import Case
from fa3verify.files import Json, parsed, read_bytes, write_text
from fa3verify.judging.family import CaseResult
from fa3verify.judging.verdict import Part, What
from fa3verify.properties import LawOutcome
from fa3verify.records import OMITTED, plain
from fa3verify.version import __version__

# Schemas of the file, and of contents that are no single case or trial: all cases of a family, the largest case of each
# family, and what a hunt found.
SCHEMA = "fa3verify.replay/1"
FAMILY_SCHEMA = "fa3verify.family/1"
LARGEST_SCHEMA = "fa3verify.largest/1"
HUNTED_SCHEMA = "fa3verify.hunted/1"
LARGEST = What(Part.LARGEST, "error / bound")
Found = TypeVar("Found", LawOutcome, RefutedBy, WorstCase, Finding)


@dataclass(frozen=True, slots=True)
class ReplayFile:
    """The fields of a replay file.

    Parameters
    ----------
    kernel : str
    what : What
        What the kernel broke, or why else the case is worth running again.
    content : dict
        The case, trial or cases to run, in JSON.
    baseline : MovedFigure, optional
        The stored figure that got worse, for a finding of the part baseline.
    sums : str, optional
        For a kernel that states no order, the sums that its bound assumed.
    traceback : dict, optional
        Where the kernel raised, if it did.
    is_finding : bool
        Whether the file was written for a finding, and not for the largest error of a kernel that passed.
    """

    kernel: str
    what: What
    content: Json
    baseline: MovedFigure | None = field(default=None, metadata=OMITTED)
    sums: str | None = field(default=None, metadata=OMITTED)
    traceback: dict[str, str] | None = field(default=None, metadata=OMITTED)
    is_finding: bool = field(default=False, metadata=OMITTED)

    def is_finding_of(self, kernel: str | None) -> bool:
        """Tell whether it was written for a finding about this kernel; None stands for the kernel that it names."""
        return self.is_finding and kernel in (None, self.kernel)


def write(path: Path, file: ReplayFile) -> None:
    """Write one replay file."""
    body = {"schema": SCHEMA, "version": __version__, **plain(file)}
    write_text(path, json.dumps(body, indent=1) + "\n")


def of_family(cases: Iterable[CaseResult], hypothesis: str = "") -> Json:
    """Return the content of a file that judges all cases of a family again, the largest error first.

    ``hypothesis`` is the one that the campaign chose for a kernel that states no order; empty for others.
    """
    judged = sorted(cases, key=lambda case: case.measures["ratio_max"], reverse=True)
    chosen = {"hypothesis": hypothesis} if hypothesis else {}
    return {"schema": FAMILY_SCHEMA, **chosen, "cases": [case.case.to_json() for case in judged]}


def write_largest(path: Path, kernel: str, cases: Mapping[str, Case], hypothesis: str = "") -> None:
    """Write the case of the largest error of every family of a kernel as one replay file, with a line for each family.

    ``cases`` are by family, ``hypothesis`` is as for :func:`of_family`.
    """
    chosen = {"hypothesis": hypothesis} if hypothesis else {}
    content = {"schema": LARGEST_SCHEMA, **chosen, "cases": {}}
    named = {"schema": SCHEMA, "version": __version__, "kernel": kernel, "what": str(LARGEST)}
    # The text of a file without cases ends in three braces; the rows are put inside the innermost pair.
    empty = json.dumps(named | {"content": content})
    rows = ",\n".join(f"{json.dumps(name)}: {case.key()}" for name, case in cases.items())
    write_text(path, empty[: empty.rindex("{") + 1] + f"\n{rows}\n}}}}}}\n")


class _Worst:
    """A writer of replay files below OUT/worst: one file per content, however many rules that breaks.

    ``sums`` are those that the bound of each kernel assumed, by kernel. Files of an earlier run are removed.
    """

    def __init__(self, out: Path, sums: Mapping[str, str | None]) -> None:
        self.folder = out / "worst"
        self.sums = sums
        self.stored: dict[str, str] = {}  # path by content
        for old in self.folder.glob("*.json"):
            old.unlink()

    def path(self, stem: str, kernel: str, what: What, content: Json | None, **rest: Any) -> str | None:
        """Write a file unless one of this content is there, and return its path below OUT; None without content.

        ``stem`` is the name of a new file, ``rest`` are other fields of it.
        """
        if content is None:
            return None
        file = ReplayFile(kernel, what, content, sums=self.sums.get(kernel), **rest)
        key = json.dumps([content, plain(file.baseline)], sort_keys=True)
        if key not in self.stored:
            name = re.sub(r"[^A-Za-z0-9._+-]", "_", stem)[:100]
            while f"worst/{name}.json" in self.stored.values():
                name += "_"
            write(self.folder / f"{name}.json", file)
            self.stored[key] = f"worst/{name}.json"
        return self.stored[key]

    def kept(self, found: Found, stem: str, kernel: str, what: What, **rest: Any) -> Found:
        """Write the replay file of a record, and return the record with its path; ``rest`` are fields of the file."""
        return replace(found, replay=self.path(stem, kernel, what, found.content, **rest))


def write_all(run: Run, out: Path) -> Run:
    """Write what a run found as replay files below OUT/worst, and return the run with their paths."""
    worst = _Worst(out, {kernel.name: kernel.assumed.sums for kernel in run.kernels if kernel.assumed})
    failures = []
    for number, finding in enumerate(run.failures):
        stem = f"fail-{number:03d}-{finding.kernel}-{finding.what.part}"
        rest = {"baseline": finding.baseline, "traceback": finding.traceback, "is_finding": True}
        failures.append(worst.kept(finding, stem, finding.kernel, finding.what, **rest))
    questions = []
    for number, asked in enumerate(run.questions):
        stem, seen = f"question-{number:03d}-{asked.seen.kernel}", asked.seen
        questions.append(replace(asked, seen=worst.kept(seen, stem, seen.kernel, seen.what, is_finding=True)))
    judged: dict[tuple[str, str], list[CaseResult]] = {}
    for case in run.cases:
        judged.setdefault((case.kernel, case.family), []).append(case)
    kernels = tuple(_with_paths(kernel, judged, worst) for kernel in run.kernels)
    return replace(run, failures=tuple(failures), kernels=kernels, questions=tuple(questions))


def _with_paths(kernel: KernelRun, judged: Mapping[tuple[str, str], list[CaseResult]], worst: _Worst) -> KernelRun:
    """Write the files of a kernel that are no findings: families, largest case, refuted hypotheses and laws.

    ``judged`` are the cases by kernel and family; the kernel is returned with the paths of its files.
    """
    name = kernel.name
    families = []
    for row in kernel.families:
        content = of_family(judged[name, row.family], kernel.hypothesis)
        path = worst.path(f"family-{name}-{row.family}", name, What(Part.FAMILY, row.family), content)
        families.append(replace(row, replay=path))
    largest = kernel.worst and worst.kept(kernel.worst, f"worst-{name}", name, LARGEST)
    assumed = kernel.assumed
    if assumed:
        rows = [
            replace(row, refuted_by=by and worst.kept(by, f"refutes-{name}-{row.name}", name, by.what))
            for row in assumed.hypotheses
            for by in [row.refuted_by]
        ]
        assumed = replace(assumed, hypotheses=tuple(rows))
    laws = [worst.kept(law, f"law-{name}-{law.law}", name, What(Part.LAW, law.law)) for law in kernel.laws]
    return replace(kernel, families=tuple(families), worst=largest, assumed=assumed, laws=tuple(laws))


def read(path: Path) -> ReplayFile:
    """Read a replay file; ValueError names what is wrong with a damaged or foreign one."""
    try:
        body = parsed(read_bytes(path), SCHEMA, f"{path} is not a replay file")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    known = {each.name: body[each.name] for each in fields(ReplayFile) if each.name in body}
    try:
        return records.read(ReplayFile, known, "file")
    except ValueError as error:
        raise ValueError(f"{path} is a damaged replay file: {error}") from None
