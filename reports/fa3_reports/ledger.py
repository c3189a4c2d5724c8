"""The ledger of comparisons: which recorded launches were held against a twin, of which keys, and what differed.

A line is written when a launch is done, so that work that is cut off counts and the next run goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fa3_reports.recordings import Recorded, Recording, check, cost, keys_of, refusal
from fa3_reports.stored import read_csv
from fa3verify.campaign.pool import processes
from fa3verify.campaign.tasks import CallTask, run
from fa3verify.files import csv_lines

# a tenth of the outputs is to have that many keys
LONG_KEYS = 4096
LONG_SHARE = 0.1


class Entry(NamedTuple):
    """One launch: file and place of its recording, elements of O, most keys, its keys, and what differs.

    ``twin`` and ``plan`` are :func:`fa3_reports.recordings.keys_of` it; ``differing`` counts digests of O and of LSE,
    each of a sequence and head.
    """

    recording: str
    launch: int
    outputs: int
    keys: int
    twin: str
    plan: str
    differing: int


def read(path: Path) -> list[Entry]:
    """Read a ledger, empty where there is no file; ValueError for a damaged one."""
    if not path.exists():
        return []
    counts = ("launch", "outputs", "keys", "differing")
    try:
        rows = read_csv(path, Entry._fields)
        return [Entry(**row | {name: int(row[name]) for name in counts}) for row in rows]  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name} is not a ledger: {error}") from error


def of_today(entries: Iterable[Entry], given: Mapping[str, Recording]) -> list[Entry]:
    """Return the launches, of the recordings that are given, whose keys are those that they have today."""
    return [entry for entry in entries if entry.recording in given and _is_of_today(entry, given[entry.recording])]


def _is_of_today(entry: Entry, recording: Recording) -> bool:
    return (entry.twin, entry.plan) == keys_of(recording.library, recording.launches[entry.launch])


def _append(path: Path, entry: Entry) -> None:
    rows = [entry] if path.exists() else [Entry._fields, entry]
    with path.open("a", newline="") as file:
        file.write(csv_lines(rows))


class Todo(NamedTuple):
    """A launch that is to be compared: name of its recording and its place there, the launch and its library."""

    name: str
    place: int
    launch: Recorded
    library: str

    @property
    def keys(self) -> int:
        return self.launch.case.problem.seqlen_k


def least_work(given: Mapping[str, Recording], outputs: int, done: Sequence[Entry] = ()) -> list[Todo]:
    """Launches that reach a number of outputs, a tenth of them with 4096 keys or more, for the fewest products.

    What stands in ``done`` with its keys of today counts and is not compared again. Those with many keys come first.
    """
    known = {(entry.recording, entry.launch): entry for entry in of_today(done, given)}
    launches = [Todo(name, i, x, found.library) for name, found in given.items() for i, x in enumerate(found.launches)]
    left = [x for x in launches if (x.name, x.place) not in known and not refusal(x.library, x.launch)]
    left.sort(key=lambda todo: cost(todo.launch) / todo.launch.outputs)
    wanted = outputs * LONG_SHARE - sum(entry.outputs for entry in known.values() if entry.keys >= LONG_KEYS)
    long = _until(wanted, (todo for todo in left if todo.keys >= LONG_KEYS))
    taken = {(todo.name, todo.place) for todo in long}
    wanted = outputs - sum(entry.outputs for entry in known.values()) - sum(todo.launch.outputs for todo in long)
    return long + _until(wanted, (todo for todo in left if (todo.name, todo.place) not in taken))


def _until(outputs: float, todos: Iterable[Todo]) -> list[Todo]:
    found = []
    for todo in todos:
        if outputs <= 0:
            break
        found.append(todo)
        outputs -= todo.launch.outputs
    return found


def extend(
    path: Path,
    given: Mapping[str, Recording],
    *,
    outputs: int,
    seconds: float,
    workers: int = 0,
    tell: Callable[[str], None] = print,
) -> list[Entry]:
    """Compare launches until so many outputs stand in the ledger, or a time is over; returns those :func:`of_today`.

    ``tell`` hears of launches that differ.
    """
    deadline = time.monotonic() + seconds
    todos = least_work(given, outputs, read(path))
    for todo in {todo.launch.case.kernel: todo for todo in sorted(todos, key=lambda x: -cost(x.launch))}.values():
        _compared(todo)  # compiles the loops, which all processes then load
    tasks = (CallTask(todo.launch.case.describe(), _compared, {"todo": todo}) for todo in todos)
    with processes(workers) as pool:
        for outcome in run(tasks, pool, until=deadline):
            if outcome.error:
                raise ValueError(f"{outcome.task.label}: {outcome.error}")
            entry: Entry = outcome.value
            _append(path, entry)
            if entry.differing:
                tell(f"DIFFERS {outcome.task.label}")
    return of_today(read(path), given)


def _compared(todo: Todo) -> Entry:
    """Run a launch again."""
    checked = check(todo.library, todo.launch)
    differing = len(checked.out_differing) + len(checked.lse_differing)
    keys = keys_of(todo.library, todo.launch)
    return Entry(todo.name, todo.place, todo.launch.outputs, todo.keys, *keys, differing)


class Sum(NamedTuple):
    """Launches, elements of O, those of launches with 4096 keys or more, and digests that differ."""

    launches: int
    outputs: int
    long_outputs: int
    differing: int


def sums(entries: Iterable[Entry]) -> dict[str, Sum]:
    """Add entries up by recording."""
    found: dict[str, Sum] = {}
    for x in entries:
        one = (1, x.outputs, x.outputs if x.keys >= LONG_KEYS else 0, x.differing)
        found[x.recording] = Sum(*(a + b for a, b in zip(found.get(x.recording, Sum(0, 0, 0, 0)), one, strict=True)))
    return found
