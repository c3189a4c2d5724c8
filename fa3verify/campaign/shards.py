"""Shards: parts of one campaign that run anywhere, each on its own, and become one campaign again.

Which tasks a shard has follows from the plan and its number, so that shards need not know of each other. A shard is a
file; what it holds of a task is the whole outcome, so that nothing is judged twice or otherwise than in one process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fa3verify import records
from fa3verify.campaign.profiles import ProfileName
from fa3verify.campaign.run import Introduction, Provenance, Question
from fa3verify.campaign.tasks import Outcome, Task
from fa3verify.files import Json, write_text
from fa3verify.inputs.captures import Capture
from fa3verify.records import NOT_WRITTEN

SCHEMA = "fa3verify.shard/2"
FILES = "shard-*-of-*.json"
_NOT_COMPARED = ("cpu_count", "git")  # a clone without tags has another name for the same sources, which are compared


@dataclass(frozen=True, slots=True)
class Number:
    """The place of a shard, from 1, among how many."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Number:
        """Read ``k/n``; ValueError unless 1 <= k <= n.

        >>> str(Number.parse("2/3"))
        'shard 2 of 3'
        """
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ValueError(f"a shard is K/N with 1 <= K <= N, such as 2/3, got {text!r}")
        return cls(int(number), int(count))

    def __str__(self) -> str:
        return f"shard {self.number} of {self.count}"

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"shard-{self.number}-of-{self.count}.json"


@dataclass(frozen=True, slots=True)
class Asked:
    """Holds what a campaign was asked for, and the hash of the sources that ran it."""

    kernels: tuple[str, ...]
    profile: ProfileName
    seed: int
    sources: str


@dataclass(frozen=True, slots=True)
class Part:
    """Holds what one shard of a campaign ran, or all of it, and what shards must share.

    Parameters
    ----------
    number, count : int
        1 of 1 is a whole campaign.
    asked : Asked
    kernels : tuple of Introduction
    captures : tuple of Capture
        The user's own activations.
    outcomes : dict
        By identity of the task; their values are JSON where they come from a file.
    started : str
        UTC, ISO 8601.
    wall_s : float
    provenance : Provenance
    interrupted_by : int, optional
        Number of a signal; no file has it.
    questions : tuple of Question
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
    questions: tuple[Question, ...] = field(default=(), metadata=NOT_WRITTEN)

    @property
    def shard(self) -> Number:
        return Number(self.number, self.count)

    def shared(self) -> Json:
        """Return all that the shards of a campaign have in common, by what a reader calls it."""
        facts = {key: value for key, value in records.plain(self.provenance).items() if key not in _NOT_COMPARED}
        of_kernels = {
            f"{key} of {k.name}": value for k in self.kernels for key, value in records.plain(k, private=True).items()
        }
        return {**records.plain(self.asked), "activations": records.plain(self.captures), **facts, **of_kernels}


def dealt(tasks: Sequence[Task], shard: Number) -> list[Task]:
    """Return the tasks of one shard in their order: each task, the longest first, goes to who has least to do."""
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
    """Read a shard; ValueError, with the path, for one that is damaged or foreign to this program."""
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
        For a folder without a shard, a damaged one, two of one number, one of another campaign, or a missing one.
    """
    found: dict[int, tuple[Path, Part]] = {}
    for folder in folders:
        paths = sorted(folder.glob(FILES))
        if not paths:
            raise ValueError(f"{folder} holds no shard, a file called {FILES}")
        for path in paths:
            part = read(path)
            first_path, first = next(iter(found.values()), (path, part))
            if reason := _difference(part, first):
                raise ValueError(f"{path} belongs to another campaign than {first_path}: {reason}")
            if part.number in found:
                raise ValueError(f"{part.shard} is there twice: {found[part.number][0]} and {path}")
            found[part.number] = path, part
    count = next(iter(found.values()))[1].count
    if missing := [str(number) for number in range(1, count + 1) if number not in found]:
        raise ValueError(f"of {count} shards are missing: {', '.join(missing)}")
    return [found[number][1] for number in sorted(found)]


def _difference(part: Part, first: Part) -> str | None:
    """Return the first thing that two shards do not share, in words."""
    mine, theirs = ({"count of shards": p.count} | p.shared() for p in (part, first))
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            return f"{name} is {mine.get(name)!r} here and {theirs.get(name)!r} there"
    return None


def outcomes_of(parts: Sequence[Part], tasks: Sequence[Task]) -> list[Outcome]:
    """Return the outcomes of a plan from all its shards, in the order of its tasks.

    Raises
    ------
    ValueError
        If a shard does not hold just its part of the plan.
    """
    stamp = parts[0].asked.sources
    for part in parts:
        if part.outcomes.keys() != {task.identity(stamp) for task in dealt(tasks, part.shard)}:
            raise ValueError(f"{part.shard} does not hold its part of the plan: it is damaged or of other sources")
    known = {identity: outcome for part in parts for identity, outcome in part.outcomes.items()}
    kept = [(task, known[task.identity(stamp)]) for task in tasks]
    try:
        return [replace(outcome, task=task, value=task.read(outcome.value)) for task, outcome in kept]
    except ValueError as error:
        raise ValueError(f"a shard is damaged: {error}") from None
