"""The verb hunt: rounds over all grounds in several processes, then one table and a replay file of each find.

In every round each ground is searched from the best inputs of the rounds before (:mod:`fa3verify.search.grounds`). The
results of a round are kept in a journal, so that the same command can go on from there.
"""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fa3verify.campaign import replay_files
from fa3verify.campaign.introduction import found as introduced
from fa3verify.campaign.pool import AN_HOUR_S, processes
from fa3verify.campaign.tasks import CallTask, Outcome, execute, journal_stamp
from fa3verify.files import Json, json_text, markdown_table, write_text
from fa3verify.judging.verdict import Part, What
from fa3verify.kernels.calls import KernelError
from fa3verify.kernels.record import Identity, Kernel
from fa3verify.known.libraries import Unavailable
from fa3verify.records import plain, read
from fa3verify.search.climb import Find, Findings
from fa3verify.search.grounds import Ground, ground_of, grounds_of, search, value_of
from fa3verify.search.objectives import Objective, objective_from
from fa3verify.text import one_line
from fa3verify.version import __version__

SCHEMA = "fa3verify.hunt/1"
FILE = "hunt.json"
PAGE = "hunt.md"
PARTIAL = ".partial"
ROUNDS = 4  # into which a budget of problems is cut
CHUNK = 2_000  # problems of one task at most; a quarter of it on each ground in a round where the budget is of time


def hunt(
    kernel: Kernel,
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
    kernel : Kernel
        The kernel; it need not be one that can be found by name.
    objective : Objective
        :class:`Ratio`, :class:`OverBaseline`, :class:`Difference`, or another subclass of :class:`Objective`.
    budget : int
        Problems to judge, which the grounds share: queries with keys of their own, or cases.
    seed : int
        Decides what is tried.
    grounds : iterable of str
        Names of :func:`fa3verify.search.grounds.grounds_of`; all by default.
    seconds : float
        CPU seconds, which the grounds share as well.
    at_random : bool
        Draw inputs as the suite draws them instead of searching, for comparison.

    Returns
    -------
    fa3verify.search.climb.Findings
        ``found.largest`` is the best input of all, with its figure; None where the kernel took none. A figure is
        infinite where one kernel returns NaN and should not.

    Raises
    ------
    ValueError
        For an unknown ground.
    fa3verify.kernels.calls.KernelError
        If a kernel raises, or returns what it does not declare.
    """
    chosen = _chosen(kernel, objective, grounds)
    share = -(-budget // len(chosen))
    time_s = seconds / len(chosen)
    whole = Findings()
    for index, ground in enumerate(chosen):
        whole.add(search(kernel, objective, ground, [seed, index], share, at_random=at_random, seconds=time_s))
    return whole


def _chosen(kernel: Kernel, objective: Objective, names: Iterable[str]) -> list[Ground]:
    """Return the grounds of these names, all by default; ValueError for an unknown one."""
    named = [ground_of(kernel, name, objective.others) for name in names]
    return named or list(grounds_of(kernel, objective.others))


@dataclass(frozen=True, slots=True)
class Hunt:
    """Holds the arguments of the verb hunt and its results; :meth:`run` fills the results in.

    Either ``problems`` or ``seconds`` is the budget. ``found`` has the findings by ground, ``failures`` the ground, the
    message and, where it is known, the case of every failure of the kernel.
    """

    kernel: str
    objective: Objective
    out: Path
    problems: int | None = None
    seconds: float | None = None
    seed: int = 0
    workers: int = 0
    grounds: tuple[str, ...] = ()
    at_random: bool = False
    resume: bool = False
    found: dict[str, Findings] = field(default_factory=dict)
    failures: list[tuple[str, str, Json | None]] = field(default_factory=list)

    def run(self, progress: Callable[[str], None] = lambda label: None) -> None:
        """Hunt, and write ``hunt.json``, ``hunt.md`` and a replay file of every find below ``out``.

        Raises
        ------
        ValueError
            For an unknown kernel or ground.
        fa3verify.known.libraries.Unavailable
            If the kernel cannot run here.
        """
        kernel = introduced(self.kernel)
        if kernel.unavailable:
            raise Unavailable(f"kernel {self.kernel} is unavailable: {kernel.unavailable}")
        self.found.update({ground.name: Findings() for ground in _chosen(kernel, self.objective, self.grounds)})
        journal = self.out / PARTIAL
        stamp = journal_stamp(kernel)
        if not self.resume:
            shutil.rmtree(journal, ignore_errors=True)
        deadline = time.monotonic() + (self.seconds or float("inf"))

        def tell(outcome: Outcome) -> None:
            progress(outcome.task.label)

        with processes(self.workers, AN_HOUR_S) as executor:
            for number, problems in enumerate(self._rounds()):
                tasks = self._tasks(number, problems)
                self._gather(execute(tasks, executor, journal=journal, stamp=stamp, progress=tell))
                if self.failures or time.monotonic() > deadline:
                    break
        self._write(Identity(**kernel.code.identity()))

    def _rounds(self) -> Iterable[int]:
        """Yield how many problems each ground gets in every round; without end where the budget is of time."""
        if self.problems is None:
            yield from itertools.repeat(CHUNK // 4)
            return
        share = -(-self.problems // len(self.found))
        cuts = [share * number // ROUNDS for number in range(ROUNDS + 1)]
        yield from filter(None, (stop - start for start, stop in itertools.pairwise(cuts)))

    def _tasks(self, number: int, problems: int) -> list[CallTask]:
        """Return the tasks of a round: every ground in parts of at most :data:`CHUNK` problems, of which every second
        one starts from the ground's best input so far.
        """
        parts = -(-problems // CHUNK)
        tasks = []
        for part, (index, (ground, met)) in itertools.product(range(parts), enumerate(self.found.items())):
            best = met.largest
            is_bred = best is not None and "island" in best.content and not self.at_random
            arguments = {"kernel": self.kernel, "objective": self.objective.to_json(), "ground": ground}
            arguments |= {"seed": [self.seed, index, number, part], "problems": -(-problems // parts)}
            # Every second part starts from normal inputs, so that one find does not end the search for others.
            arguments |= {"start": best.content if best and is_bred and (part + number) % 2 else None}
            arguments |= {"at_random": self.at_random}
            tasks.append(CallTask(f"{ground}, round {number + 1}", search_ground, arguments, kernel=self.kernel))
        return tasks

    def _gather(self, outcomes: list[Outcome]) -> None:
        """Add what a round found, and what failed."""
        for outcome in outcomes:
            ground = outcome.arguments["ground"]
            error = outcome.error or (outcome.value or {"failed": "it was skipped"}).get("failed")
            if error:
                self.failures.append((ground, one_line(error), outcome.at))
            else:
                self.found[ground].add(read(Findings, outcome.value, outcome.task.label))

    @property
    def finds(self) -> Iterator[tuple[str, Findings, str, Find, str]]:
        """Yield for each find: ground, findings of the ground, output, the find, path of its replay file in ``out``."""
        for ground, found in self.found.items():
            for output, best in found.best.items():
                file = re.sub(r"[^A-Za-z0-9]", "_", f"{ground}-{output}")
                yield ground, found, output, best, f"largest/{file}.json"

    @property
    def is_finding(self) -> bool:
        """Tell whether the kernel failed, or a find is above the objective's limit."""
        return bool(self.failures) or any(best.value > self.objective.limit for _, _, _, best, _ in self.finds)

    def page(self) -> str:
        """Return the table of largest known errors in Markdown; each is a lower bound of the true one."""
        rows = [
            (
                ground,
                output,
                f"{best.value:.6g}",
                f"{best.problems:,}",
                f"{met.problems:,}",
                f"{round(met.cpu_s, 1):g}",
                file,
            )
            for ground, met, output, best, file in self.finds
        ]
        searched = "drawn at random" if self.at_random else "searched"
        title = f"# Largest known errors of {self.kernel}: {self.objective.words}"
        effort = f"Seed {self.seed}, {searched}; version {__version__}."
        table = markdown_table(("ground", "output", "largest", "met at", "problems", "CPU s", "replay"), rows)
        return "\n".join([title, "", effort, "", *table])

    def _body(self, identity: Identity) -> Json:
        """Return the content of ``hunt.json``: for each ground the effort, the curve, and by output the largest figure
        and its replay file.
        """
        objective = self.objective
        grounds: Json = {
            ground: {"problems": met.problems, "cpu_s": round(met.cpu_s, 1), "curve": met.curve, "best": {}}
            for ground, met in self.found.items()
        }
        for ground, _, output, best, file in self.finds:
            grounds[ground]["best"][output] = {"value": best.value, "problems": best.problems, "replay": file}
        return {
            **{"schema": SCHEMA, "version": __version__, "kernel": self.kernel, "identity": plain(identity)},
            **{"words": objective.words, "limit": objective.limit, "seed": self.seed, "at_random": self.at_random},
            "objective": {key: x for key, x in objective.to_json().items() if key != "baseline"},
            "failures": [{"ground": ground, "message": words, "at": at} for ground, words, at in self.failures],
            "grounds": grounds,
        }

    def _write(self, identity: Identity) -> None:
        """Write a replay file of every find, the table and the figures."""
        for _, _, output, best, file in self.finds:
            content = {"schema": replay_files.HUNTED_SCHEMA, "objective": self.objective.to_json()}
            content |= {"output": output, "value": best.value} | best.content
            what = What(Part.HUNT, self.objective.words)
            replay_files.write(self.out / file, replay_files.ReplayFile(self.kernel, what, content))
        write_text(self.out / PAGE, self.page())
        write_text(self.out / FILE, json_text(self._body(identity)))


def search_ground(
    kernel: str,
    objective: Json,
    ground: str,
    seed: list[int],
    problems: int,
    start: Json | None,
    at_random: bool,
) -> Json:
    """Search one ground as a task of a pool; return the findings as JSON, or ``{"failed": message}``."""
    searched = introduced(kernel)
    goal = objective_from(objective)
    where = ground_of(searched, ground, goal.others)
    try:
        return plain(search(searched, goal, where, seed, problems, start=start, at_random=at_random))
    except KernelError as error:
        return {"failed": str(error)}


def replay_content(kernel: Kernel, content: Json) -> tuple[bool, str, dict[str, float]]:
    """Judge a find again: return whether it is within the objective's limit, a line of words, and figures by output.

    Raises ValueError for damaged content, or if the kernel does not take it.
    """
    try:
        objective = objective_from(content["objective"])
        output = str(content["output"])
        stored = content["value"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the replay file is damaged: {error}") from None
    values = value_of(kernel, objective, content)
    value = values.get(output, 0.0)  # another kernel may lack the output
    return value <= objective.limit, f"{objective.words}, {output}: {value:.6g}, stored {float(stored):.6g}", values
