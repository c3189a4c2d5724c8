"""A whole hunt: rounds over all grounds on some processes, restartable, to one table and a replay file of each find.

In every round each ground is searched from the best inputs of the rounds before. What a round found is kept in a
journal, so that the same command goes on from there.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fa3verify import __version__
from fa3verify.campaign import replay_files
from fa3verify.campaign.introduction import Unavailable, found
from fa3verify.campaign.tasks import Outcome, Task, execute, journal_stamp
from fa3verify.files import json_text, write_text
from fa3verify.kernels.calls import CandidateError
from fa3verify.kernels.record import Candidate, Identity
from fa3verify.search.adversary import isolating_pool
from fa3verify.search.climb import Find, Findings
from fa3verify.search.ground import search, value_of
from fa3verify.search.grounds import Ground, ground_of, grounds_of
from fa3verify.search.objectives import Objective, objective_from
from fa3verify.text import one_line

SCHEMA = "fa3verify.hunt/1"
FILE = "hunt.json"
PAGE = "hunt.md"
PARTIAL = ".partial"
ROUNDS = 4  # of a budget of problems
CHUNK = 2_000  # problems of one search where a round has more, and of a round where the budget is of time


@dataclass(frozen=True, slots=True)
class HuntSettings:
    """Holds what the verb hunt says; ``problems`` or ``seconds`` is the budget."""

    kernel: str
    objective: dict[str, Any]
    out: Path
    problems: int | None = None
    seconds: float | None = None
    seed: int = 0
    workers: int = 0
    grounds: tuple[str, ...] = ()
    at_random: bool = False
    resume: bool = False


def hunt(
    candidate: Candidate,
    objective: Objective,
    budget: int,
    seed: int = 0,
    *,
    grounds: Iterable[str] = (),
    seconds: float = float("inf"),
    at_random: bool = False,
) -> Findings:
    """Search for the input that maximises an objective, in this process.

    Parameters
    ----------
    candidate : Candidate
        The kernel; it need not be one that can be found by name.
    objective : Objective
        :class:`Ratio`, :class:`OverBaseline`, :class:`Difference`, or another that has their methods.
    budget : int
        Problems to judge, which the grounds share: queries with keys of their own, or cases.
    seed : int
        Decides what is tried.
    grounds : iterable of str
        Names of :func:`fa3verify.search.grounds.grounds_of`; all by default.
    seconds : float
        CPU seconds, which the grounds share as well.
    at_random : bool
        Draw as the suite draws, instead of searching: what the search is compared with.

    Returns
    -------
    fa3verify.search.climb.Findings
        ``found.largest`` is the best input of all, with its figure; None where the kernel took none. A figure is
        infinite where one kernel returns NaN and should not.

    Raises
    ------
    ValueError
        For an unknown ground.
    fa3verify.kernels.calls.CandidateError
        If a kernel raises, or returns what it does not declare.
    """
    chosen = _chosen(candidate, objective, grounds)
    share = -(-budget // len(chosen))
    time_s = seconds / len(chosen)
    whole = Findings()
    for index, ground in enumerate(chosen):
        whole.add(search(candidate, objective, ground, [seed, index], share, at_random=at_random, seconds=time_s))
    return whole


def search_ground(
    kernel: str,
    objective: dict[str, Any],
    ground: str,
    seed: list[int],
    problems: int,
    start: dict[str, Any] | None,
    at_random: bool,
) -> dict[str, Any]:
    """Search one ground as a task of a pool; a kernel that fails is told under ``failed``."""
    candidate = found(kernel)
    goal = objective_from(objective)
    where = ground_of(candidate, ground, goal.others)
    try:
        return search(candidate, goal, where, seed, problems, start=start, at_random=at_random).to_json()
    except CandidateError as error:
        return {"failed": str(error)}


def run(settings: HuntSettings, progress: Callable[[str], None] = lambda label: None) -> dict[str, Any]:
    """Hunt as the verb does, and write ``hunt.json``, ``hunt.md`` and a replay file of every find below ``out``.

    Returns
    -------
    dict
        As in ``hunt.json``: per ground the effort, and by output the largest figure, its replay file and the curve.

    Raises
    ------
    ValueError
        For an unknown kernel or ground.
    fa3verify.campaign.introduction.Unavailable
        If the kernel cannot run here.
    """
    candidate = found(settings.kernel)
    if candidate.unavailable:
        raise Unavailable(f"kernel {settings.kernel} is unavailable: {candidate.unavailable}")
    grounds = _chosen(candidate, objective_from(settings.objective), settings.grounds)
    journal = settings.out / PARTIAL
    stamp = journal_stamp(candidate)
    if not settings.resume:
        shutil.rmtree(journal, ignore_errors=True)
    sums = {ground.name: Findings() for ground in grounds}
    failures = []
    deadline = time.monotonic() + (settings.seconds or float("inf"))
    with isolating_pool(settings.workers) as executor:
        for number, problems in enumerate(_rounds(settings, len(grounds))):
            tasks = _tasks(settings, grounds, sums, number, problems)
            outcomes = execute(tasks, executor, journal=journal, stamp=stamp, progress=_teller(progress))
            failures += _gathered(sums, outcomes)
            if failures or time.monotonic() > deadline:
                break
    body = _body(settings, candidate, grounds, sums, failures)
    _write(settings.out, body)
    return body


def _chosen(candidate: Candidate, objective: Objective, names: Iterable[str]) -> list[Ground]:
    """Grounds of these names, all by default; ValueError for an unknown one."""
    named = [ground_of(candidate, name, objective.others) for name in names]
    return named or list(grounds_of(candidate, objective.others))


def _rounds(settings: HuntSettings, grounds: int) -> Iterable[int]:
    """Problems of each ground in every round; without end where the budget is of time."""
    if settings.problems is None:
        while True:
            yield CHUNK // 4
    share = -(-settings.problems // grounds)
    for number in range(ROUNDS):
        left = share * (number + 1) // ROUNDS - share * number // ROUNDS
        if left:
            yield left


def _tasks(
    settings: HuntSettings, grounds: list[Ground], sums: Mapping[str, Findings], number: int, problems: int
) -> list[Task]:
    """A round: every ground, in parts of at most :data:`CHUNK` problems, each from its best input so far."""
    parts = -(-problems // CHUNK)
    tasks = []
    for part in range(parts):
        for index, ground in enumerate(grounds):
            best = sums[ground.name].largest
            is_bred = best is not None and "island" in best.content and not settings.at_random
            arguments = {"kernel": settings.kernel, "objective": settings.objective, "ground": ground.name}
            arguments |= {"seed": [settings.seed, index, number, part], "problems": -(-problems // parts)}
            # Every second part starts from normal inputs, so that one find does not end the search for others.
            arguments |= {"start": best.content if best and is_bred and (part + number) % 2 else None}
            arguments |= {"at_random": settings.at_random}
            tasks.append(Task("hunt", f"{ground.name}, round {number + 1}", search_ground, arguments))
    return tasks


def _teller(progress: Callable[[str], None]) -> Callable[[Outcome], None]:
    return lambda outcome: progress(outcome.task.label)


def _gathered(sums: dict[str, Findings], outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Add what a round found; returns what failed."""
    failures = []
    for outcome in outcomes:
        ground = outcome.task.arguments["ground"]
        error = outcome.error or (outcome.value or {"failed": "it was skipped"}).get("failed")
        if error:
            failures.append({"ground": ground, "message": one_line(error), "at": outcome.at})
        else:
            sums[ground].add(Findings.from_json(outcome.value))
    return failures


def _body(
    settings: HuntSettings, candidate: Candidate, grounds: list[Ground], sums: dict[str, Findings], failures: list[Any]
) -> dict[str, Any]:
    objective = objective_from(settings.objective)
    identity = Identity(**candidate.identity()) if candidate.identity else Identity()
    told = {key: x for key, x in objective.to_json().items() if key != "baseline"}
    return {
        **{"schema": SCHEMA, "version": __version__, "kernel": settings.kernel, "identity": asdict(identity)},
        **{"objective": told, "words": objective.words, "limit": objective.limit, "at_random": settings.at_random},
        **{"seed": settings.seed, "failures": failures},
        "grounds": {
            ground.name: {
                "problems": sums[ground.name].problems,
                "cpu_s": round(sums[ground.name].cpu_s, 1),
                "curve": sums[ground.name].curve,
                "best": {
                    name: {"value": best.value, "problems": best.problems, "content": _content(settings, name, best)}
                    for name, best in sums[ground.name].best.items()
                },
            }
            for ground in grounds
        },
    }


def _content(settings: HuntSettings, output: str, best: Find) -> dict[str, Any]:
    named = {
        "schema": replay_files.HUNTED_SCHEMA,
        "objective": settings.objective,
        "output": output,
        "value": best.value,
    }
    return named | best.content


def _write(out: Path, body: dict[str, Any]) -> None:
    """Write the replay files, whose contents leave the body for their paths, then the table and the body."""
    for name, ground in body["grounds"].items():
        for output, best in ground["best"].items():
            path = out / "largest" / f"{re.sub(r'[^A-Za-z0-9]', '_', f'{name}-{output}')}.json"
            replay_files.write(path, body["kernel"], f"hunt {body['words']}", best.pop("content"))
            best["replay"] = path.relative_to(out).as_posix()
    write_text(out / PAGE, page(body))
    write_text(out / FILE, json_text(body))


def page(body: Mapping[str, Any]) -> str:
    """Return the table of largest known errors in Markdown; each is a lower bound of the true one."""
    title = f"# Largest known errors of {body['kernel']}: {body['words']}\n\n"
    effort = f"Seed {body['seed']}, {'drawn at random' if body['at_random'] else 'searched'}; version {body['version']}"
    head = "| ground | output | largest | met at | problems | CPU s | replay |\n|---|---|---|---|---|---|---|\n"
    rows = "".join(
        f"| {name} | {output} | {best['value']:.6g} | {best['problems']:,} | {ground['problems']:,} "
        f"| {ground['cpu_s']:g} | {best['replay']} |\n"
        for name, ground in body["grounds"].items()
        for output, best in ground["best"].items()
    )
    return f"{title}{effort}.\n\n{head}{rows}"


def is_finding(body: Mapping[str, Any]) -> bool:
    """Tell whether a kernel failed, or exceeds what a sound one does not."""
    values = [best["value"] for ground in body["grounds"].values() for best in ground["best"].values()]
    return bool(body["failures"]) or any(value > body["limit"] for value in values)


def replay_content(candidate: Candidate, content: Mapping[str, Any]) -> tuple[bool, str, dict[str, float]]:
    """Judge a find again: whether it is within what a sound kernel does not exceed, in words, and the figures."""
    try:
        objective = objective_from(content["objective"])
        output = str(content["output"])
        stored = content["value"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the replay file is damaged: {error}") from None
    values = value_of(candidate, objective, content)
    value = values.get(output, 0.0)
    return value <= objective.limit, f"{objective.words}, {output}: {value:.6g}, stored {float(stored):.6g}", values
