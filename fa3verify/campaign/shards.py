"""Shards: parts of one campaign that run on separate machines, as files that ``fa3verify merge`` reads.

The tasks of a shard follow from the plan and the shard's number (:func:`dealt`), so that shards need not know of each
other. A file holds the whole outcome of each task, so that merging judges nothing again and gives the same result as
one process. :mod:`fa3verify.commands.verify` runs and merges shards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fa3_reference.rules import require
from fa3verify import records
from fa3verify.campaign.findings import ContractQuestion
from fa3verify.campaign.profiles import ProfileName
from fa3verify.campaign.run import Introduction, Provenance
from fa3verify.campaign.tasks import Outcome, Task
from fa3verify.files import Json, write_text
from fa3verify.inputs.captures import Capture
from fa3verify.records import NOT_WRITTEN

SCHEMA = "fa3verify.shard/2"
FILES = "shard-*-of-*.json"
# Facts of provenance in which shards may differ: machines do, and a clone without tags names the same commit otherwise
# (the sources themselves are compared by their hash).
_NOT_COMPARED = ("cpu_count", "git")


@dataclass(frozen=True, slots=True)
class Number:
    """Which shard of how many; the first has number 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Number:
        """Read ``k/n``; ValueError unless 1 <= k <= n.

        >>> str(Number.parse("2/3"))
        'shard 2 of 3'
        """
        number, slash, count = text.partition("/")
        require(
            slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count),
            f"a shard is K/N with 1 <= K <= N, such as 2/3, got {text!r}",
        )
        return cls(int(number), int(count))

    def __str__(self) -> str:
        return f"shard {self.number} of {self.count}"

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"shard-{self.number}-of-{self.count}.json"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asked a campaign for, and the hash of the sources that ran it."""

    kernels: tuple[str, ...]
    profile: ProfileName
    seed: int
    sources: str


@dataclass(frozen=True, slots=True)
class Part:
    """One shard of a campaign, or a whole campaign: what was asked, what ran, and the outcomes.

    Parameters
    ----------
    number, count : int
        1 of 1 is a whole campaign.
    asked : Asked
    kernels : tuple of Introduction
    captures : tuple of Capture
        The user's own activations.
    outcomes : dict
        Outcomes by the identity of their task; values that were read from a file are still JSON. Empty before a shard
        is written.
    started : str
        UTC, ISO 8601.
    wall_s : float
    provenance : Provenance
    interrupted_by : int, optional
        Number of the signal that interrupted it, else None; never in a file, as an interrupted shard is not written.
    questions : tuple of ContractQuestion
        Of a whole campaign; shards ask none, and no file has them.
    """

    number: int
    count: int
    asked: Asked
    kernels: tuple[Introduction, ...]
    captures: tuple[Capture, ...]
    outcomes: dict[str, Outcome]
    started: str
    wall_s: float
    provenance: Provenance
    interrupted_by: int | None = field(default=None, metadata=NOT_WRITTEN)
    questions: tuple[ContractQuestion, ...] = field(default=(), metadata=NOT_WRITTEN)

    @property
    def shard(self) -> Number:
        return Number(self.number, self.count)

    def shared(self) -> Json:
        """Return all facts in which the shards of one campaign must agree, by names that a reader understands."""
        facts = {key: value for key, value in records.plain(self.provenance).items() if key not in _NOT_COMPARED}
        of_kernels = {
            f"{key} of {k.name}": value for k in self.kernels for key, value in records.plain(k, private=True).items()
        }
        return {**records.plain(self.asked), "activations": records.plain(self.captures), **facts, **of_kernels}


def dealt(tasks: Sequence[Task], shard: Number) -> list[Task]:
    """Return the tasks of one shard, in the order of ``tasks``.

    The tasks are dealt by their estimated time, the longest first, each to the shard that has least to do.
    """
    loads = [0.0] * shard.count
    mine = []
    for place in sorted(range(len(tasks)), key=lambda place: -tasks[place].estimated_s):
        least = loads.index(min(loads))
        loads[least] += tasks[place].estimated_s
        if least == shard.number - 1:
            mine.append(place)
    return [tasks[place] for place in sorted(mine)]


def write(part: Part, out: Path) -> Path:
    """Write a shard below a folder, whole or not at all, and return its path."""
    path = out / part.shard.file
    write_text(path, json.dumps({"schema": SCHEMA, **records.plain(part, private=True)}) + "\n")
    return path


def read(path: Path) -> Part:
    """Read a shard; ValueError, with the path, for a file that cannot be read, is damaged, or is no shard."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a shard: {error}") from None
    if not isinstance(body, dict) or body.pop("schema", None) != SCHEMA:
        raise ValueError(f"{path} is not a shard of schema {SCHEMA!r}")
    try:
        return records.read(Part, body, "shard", private=True)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is a damaged shard: {error}") from None


def read_all(folders: Sequence[Path]) -> list[Part]:
    """Read every shard of a campaign, in order of their numbers.

    Raises
    ------
    ValueError
        For a folder without a shard, a damaged shard, two of one number, shards of different campaigns, or a missing
        shard.
    """
    by_number: dict[int, tuple[Path, Part]] = {}
    for folder in folders:
        paths = sorted(folder.glob(FILES))
        require(paths, f"{folder} holds no shard, a file called {FILES}")
        for path in paths:
            part = read(path)
            first_path, first = next(iter(by_number.values()), (path, part))
            if reason := _difference(part, first):
                raise ValueError(f"{path} belongs to another campaign than {first_path}: {reason}")
            if part.number in by_number:
                raise ValueError(f"{part.shard} is there twice: {by_number[part.number][0]} and {path}")
            by_number[part.number] = path, part
    count = next(iter(by_number.values()))[1].count
    if missing := [str(number) for number in range(1, count + 1) if number not in by_number]:
        raise ValueError(f"of {count} shards are missing: {', '.join(missing)}")
    return [by_number[number][1] for number in sorted(by_number)]


def _difference(part: Part, first: Part) -> str | None:
    """Return in words the first fact in which two shards differ; None if they are of one campaign."""
    mine, theirs = ({"count of shards": p.count} | p.shared() for p in (part, first))
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            return f"{name} is {mine.get(name)!r} here and {theirs.get(name)!r} there"
    return None


def outcomes_of(parts: Sequence[Part], tasks: Sequence[Task]) -> list[Outcome]:
    """Return the outcomes of a plan's tasks from all its shards, in the order of the tasks, with values as objects.

    Raises
    ------
    ValueError
        If a shard does not hold exactly its part of the plan, or a value is damaged.
    """
    stamp = parts[0].asked.sources
    for part in parts:
        require(
            part.outcomes.keys() == {task.identity(stamp) for task in dealt(tasks, part.shard)},
            f"{part.shard} does not hold its part of the plan: it is damaged or of other sources",
        )
    known = {identity: outcome for part in parts for identity, outcome in part.outcomes.items()}
    planned = [(task, known[task.identity(stamp)]) for task in tasks]
    try:
        return [replace(outcome, task=task, value=task.read(outcome.value)) for task, outcome in planned]
    except ValueError as error:
        raise ValueError(f"a shard is damaged: {error}") from None
