"""Replay files: a found case or a failed law as JSON that anyone can run again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fa3verify import records
from fa3verify.campaign.results import RefutedBy
from fa3verify.campaign.run import KernelRun, MovedFigure, Run, WorstCase
from fa3verify.cases.case import Case
from fa3verify.files import Json, of_schema, read_text, write_text
from fa3verify.judging.family import CaseResult
from fa3verify.judging.verdict import Part, What
from fa3verify.properties import LawOutcome
from fa3verify.records import OMITTED, plain
from fa3verify.version import __version__

SCHEMA = "fa3verify.replay/1"
FAMILY_SCHEMA = "fa3verify.family/1"
LARGEST_SCHEMA = "fa3verify.largest/1"
HUNTED_SCHEMA = "fa3verify.hunted/1"
LARGEST = What(Part.LARGEST, "error / bound")
Found = TypeVar("Found", LawOutcome, RefutedBy, WorstCase)


@dataclass(frozen=True, slots=True)
class ReplayFile:
    """Holds what a replay file says: the kernel, what it broke, on what content, which stored figure moved, which sums
    the bound of a kernel without an order assumed, the traceback of what it raised, and whether that is a finding.
    """

    kernel: str
    what: What
    content: Json
    baseline: MovedFigure | None = field(default=None, metadata=OMITTED)
    sums: str | None = field(default=None, metadata=OMITTED)
    traceback: dict[str, str] | None = field(default=None, metadata=OMITTED)
    is_finding: bool = field(default=False, metadata=OMITTED)

    def is_finding_of(self, kernel: str | None) -> bool:
        """Tell whether it is of a finding of a kernel, by default of its own, and not of what was largest."""
        return self.is_finding and kernel in (None, self.kernel)


def write(path: Path, file: ReplayFile) -> None:
    """Write one replay file."""
    body = {"schema": SCHEMA, "version": __version__, **plain(file)}
    write_text(path, json.dumps(body, indent=1) + "\n")


def of_family(cases: Iterable[CaseResult], hypothesis: str = "") -> Json:
    """Return the content that judges all cases of a family again; the largest error comes first.

    The figures of a kernel that states no order are those under the hypothesis that its campaign chose.
    """
    judged = sorted(cases, key=lambda case: case.measures["ratio_max"], reverse=True)
    chosen = {"hypothesis": hypothesis} if hypothesis else {}
    return {"schema": FAMILY_SCHEMA, **chosen, "cases": [case.case.to_json() for case in judged]}


def write_largest(path: Path, kernel: str, cases: Mapping[str, Case], hypothesis: str = "") -> None:
    """Write the largest case of every family of a kernel, by family, as one replay file on one line a family."""
    chosen = {"hypothesis": hypothesis} if hypothesis else {}
    content = {"schema": LARGEST_SCHEMA, **chosen, "cases": {}}
    named = {"schema": SCHEMA, "version": __version__, "kernel": kernel, "what": str(LARGEST)}
    empty = json.dumps(named | {"content": content})
    rows = ",\n".join(f"{json.dumps(name)}: {case.key()}" for name, case in cases.items())
    write_text(path, empty[: empty.rindex("{") + 1] + f"\n{rows}\n}}}}}}\n")


class _Worst:
    """A writer of replay files below OUT/worst: one file per case, however many rules it breaks."""

    def __init__(self, out: Path, sums: Mapping[str, str | None]) -> None:
        self.folder = out / "worst"
        self.sums = sums
        self.stored: dict[str, str] = {}  # path by content
        for old in self.folder.glob("*.json"):
            old.unlink()

    def path(self, stem: str, kernel: str, what: What, content: Json | None, **rest: Any) -> str | None:
        """Write a file unless one of this content is there, and return its path below OUT; None without content.

        ``rest`` are other fields of the file.
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

    def kept(self, found: Found, stem: str, kernel: str, what: What) -> Found:
        """Write the file of what was found, and return that with its path."""
        return replace(found, replay=self.path(stem, kernel, what, found.content))


def write_all(run: Run, out: Path) -> Run:
    """Write what a run found as replay files below OUT/worst, and return the run with their paths."""
    worst = _Worst(out, {kernel.name: kernel.assumed.sums for kernel in run.kernels if kernel.assumed})
    failures = []
    for number, found in enumerate(run.failures):
        stem = f"fail-{number:03d}-{found.kernel}-{found.what.part}"
        rest = {"baseline": found.baseline, "traceback": found.traceback, "is_finding": True}
        path = worst.path(stem, found.kernel, found.what, found.content, **rest)
        failures.append(replace(found, replay=path))
    questions = []
    for number, asked in enumerate(run.questions):
        seen = asked.seen
        path = worst.path(f"question-{number:03d}-{seen.kernel}", seen.kernel, seen.what, seen.content, is_finding=True)
        questions.append(replace(asked, seen=replace(seen, replay=path)))
    judged: dict[tuple[str, str], list[CaseResult]] = {}
    for case in run.cases:
        judged.setdefault((case.kernel, case.family), []).append(case)
    kernels = tuple(_with_paths(kernel, judged, worst) for kernel in run.kernels)
    return replace(run, failures=tuple(failures), kernels=kernels, questions=tuple(questions))


def _with_paths(kernel: KernelRun, judged: Mapping[tuple[str, str], list[CaseResult]], worst: _Worst) -> KernelRun:
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
        body = json.loads(read_text(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a replay file: {error}") from None
    body = of_schema(body, SCHEMA, f"{path} is not a replay file")
    known = {each.name: body[each.name] for each in fields(ReplayFile) if each.name in body}
    try:
        return records.read(ReplayFile, known, "file")
    except ValueError as error:
        raise ValueError(f"{path} is a damaged replay file: {error}") from None
