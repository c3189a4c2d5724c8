"""Searches of all islands of some dtypes of an operation, on some processes, whose finds are one file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa3_reports.adversary.forward import TwinSearch
from fa3_reports.adversary.gradients.search import GradientSearch
from fa3_reports.adversary.violations import Violations
from fa3verify import __version__
from fa3verify.campaign.pool import AN_HOUR_S, processes
from fa3verify.campaign.tasks import CallTask, Outcome, execute
from fa3verify.files import Json
from fa3verify.operations import FORWARD
from fa3verify.records import plain, read

SCHEMA = "fa3verify.adversary/2"
CHUNK = 20_000  # problems of one process's task: islands are searched by several seeds where more are wanted
SEARCHES: dict[str, type[TwinSearch | GradientSearch]] = {FORWARD: TwinSearch, "backward": GradientSearch}


@dataclass(frozen=True, slots=True)
class Adversary:
    """Holds what searches of an operation's islands have met, by dtype and name of the island."""

    operation: str
    found: dict[str, dict[str, Violations]]

    @property
    def search(self) -> type[TwinSearch | GradientSearch]:
        return SEARCHES[self.operation]

    def total(self, dtype: str) -> Violations:
        """Return what all islands of a dtype have met together."""
        total = Violations()
        for found in self.found[dtype].values():
            total.add(found, is_later=False)
        return total

    @property
    def above_1(self) -> int:
        return sum(self.total(dtype).above_1 for dtype in self.found)

    def to_json(self) -> Json:
        """Return what is written to a file: counts, and of every island the largest error / bound with its individual.

        The counts of problems at a find are those of its own seed.
        """
        named = {"schema": SCHEMA, "version": __version__, "operation": self.operation, "above_1": self.above_1}
        return named | {"dtypes": {dtype: self._part(dtype) for dtype in self.found}}

    def _part(self, dtype: str) -> Json:
        total = self.total(dtype)
        records = self.search.JUDGE.records
        none = {"value": 0.0, "problems": 0, "content": None}
        islands = {
            name: _counts(found)
            | {"best": dict.fromkeys(records, none) | plain(found.best), "violations": plain(found.violations)}
            for name, found in self.found[dtype].items()
        }
        return _counts(total) | {"ratio": {name: total.height(name) for name in records}, "islands": islands}


def _counts(found: Violations) -> Json:
    return {name: getattr(found, name) for name in ("problems", "generations", "restarts", "above_1")}


def islands_of(dtype: str, operation: str = FORWARD) -> list[Any]:
    """Return the islands of an operation and a dtype."""
    return [island for island in SEARCHES[operation].ISLANDS if island.dtype == dtype]


def island_of(dtype: str, name: str, operation: str = FORWARD) -> Any:
    """Return the island of that name; ValueError where there is none."""
    for island in islands_of(dtype, operation):
        if island.name == name:
            return island
    raise ValueError(f"there is no island {name!r} for {dtype!r}")


def dtypes_of(operation: str) -> tuple[str, ...]:
    """Return the dtypes of which an operation has islands."""
    return tuple(dtype for dtype in ("fp16", "bf16", "e4m3") if islands_of(dtype, operation))


def search_island(dtype: str, name: str, seed: list[int], problems: int, operation: str = FORWARD) -> Json:
    """Search one island and return its findings as JSON values."""
    return plain(SEARCHES[operation](island_of(dtype, name, operation), seed).until(problems))


def plan(dtypes: Sequence[str], problems: int, seed: int, operation: str = FORWARD) -> list[CallTask]:
    """Return the searches that together judge so many problems for every dtype."""
    planned = []
    for dtype in dtypes:
        own = islands_of(dtype, operation)
        share = -(-problems // len(own))
        parts = -(-share // CHUNK)
        for part in range(parts):
            for index, island in enumerate(own):
                arguments = {"dtype": dtype, "name": island.name, "seed": [seed, index, part]}
                arguments |= {"problems": -(-share // parts), "operation": operation}
                planned.append(CallTask(f"adversary: {dtype} {island.name}", search_island, arguments))
    return planned


def assembled(outcomes: Sequence[Outcome]) -> Adversary:
    """Put the findings of searches, all of one operation, together by dtype and island."""
    found: dict[str, dict[str, Violations]] = {}
    for outcome in outcomes:
        arguments = outcome.arguments
        island = found.setdefault(arguments["dtype"], {}).setdefault(arguments["name"], Violations())
        island.add(read(Violations, outcome.value, outcome.task.label), is_later=False)
    return Adversary(outcomes[0].arguments["operation"] if outcomes else FORWARD, found)


def run(
    dtypes: Sequence[str],
    problems: int,
    seed: int,
    jobs: int = 0,
    progress: Callable[[str], None] = lambda label: None,
    operation: str = FORWARD,
) -> Adversary:
    """Search all islands of some dtypes of an operation.

    Parameters
    ----------
    dtypes : sequence of str
    problems : int
        For every dtype, shared by its islands.
    seed : int
        Decides the result; the number of processes does not.
    jobs : int
        Processes; 0 is one per core.
    progress : callable
        Called with the name of each part that is done.
    operation : str
        A key of :data:`SEARCHES`.

    Raises
    ------
    fa3verify.campaign.TaskError
        If a process was lost.
    """

    def tell(outcome: Outcome) -> None:
        outcome.result()
        arguments = outcome.arguments
        progress(f"{arguments['dtype']} {arguments['name']}, part {arguments['seed'][-1] + 1}")

    for dtype in dtypes:  # compiles the twin's loops once, before the processes would do so all together
        SEARCHES[operation](islands_of(dtype, operation)[0], 0).until(1)
    with processes(jobs, AN_HOUR_S) as executor:
        return assembled(execute(plan(dtypes, problems, seed, operation), executor, progress=tell))


def replay_file(path: Path) -> list[tuple[str, str, dict[str, float]]]:
    """Judge the finds of a result file again: what each is, what the file says of it, and its ratios now.

    Raises
    ------
    ValueError
        If the file is damaged or foreign; the message names it.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["schema"] != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA!r}, got {body['schema']!r}")
        search = SEARCHES[body.get("operation", FORWARD)]  # older files are of the forward
        islands = [(dtype, *i) for dtype, part in body["dtypes"].items() for i in part["islands"].items()]
        finds = [
            (f"{dtype} {name} {what}", str(find["value"]), find["content"])
            for dtype, name, island in islands
            for what, find in (*island["best"].items(), *island["violations"].items())
            if find["content"] is not None
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of the adversary: {error}") from None
    return [(what, stored, search.JUDGE.again(*search.individual(values))) for what, stored, values in finds]
