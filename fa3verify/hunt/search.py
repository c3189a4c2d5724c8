"""One search on one ground, led or at random, and what it found: the best input of every output and the curve.

Islands are searched by the evolution of :mod:`fa3verify.adversary.evolve`, cases by Hypothesis, whose ``target`` climbs
what is drawn. A random search draws cases of the island's shape as the suite draws them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import DrawFn, SearchStrategy

from fa3verify import operations, watch
from fa3verify.adversary.colony import individual
from fa3verify.adversary.evolve import Search
from fa3verify.adversary.islands import Island
from fa3verify.candidates import Candidate
from fa3verify.cases import Case
from fa3verify.hunt.grounds import Ground
from fa3verify.hunt.objectives import Objective
from fa3verify.inputs.strategies import recipes
from fa3verify.operations import FORWARD
from fa3verify.properties.trials import small_cases

LED_RUN, RANDOM_RUN = 200, 20  # examples of one run of Hypothesis, which varies the earlier ones of the same run
_TOLD = {"rounded": "out"}  # what is recorded of stored outputs goes by the output's name


@dataclass(frozen=True, slots=True)
class Best:
    """An input: its figure, how many problems had been judged when it was met, and what replays it."""

    value: float
    problems: int
    content: dict[str, Any]


@dataclass(slots=True)
class Found:
    """What a search has met: by output the best input, and every rise as (problems, CPU seconds, output, figure).

    A problem is one query with its own keys on an island, and one case elsewhere; a case of an island's shape counts as
    many problems as it has queries.
    """

    problems: int = 0
    cpu_s: float = 0.0
    best: dict[str, Best] = field(default_factory=dict)
    curve: list[tuple[int, float, str, float]] = field(default_factory=list)

    def meet(self, name: str, value: float, content: Callable[[], dict[str, Any]]) -> None:
        """Keep an input if it is the best of an output."""
        if name not in self.best or value > self.best[name].value:
            self.best[name] = Best(value, self.problems, content())
            self.curve.append((self.problems, round(self.cpu_s, 3), name, value))

    def add(self, later: Found) -> None:
        """Go on with what another search of the same ground, or of another one, met."""
        before, cpu_s = self.problems, self.cpu_s
        for problems, at_s, name, value in later.curve:
            if name not in self.best or value > self.best[name].value:
                self.curve.append((before + problems, round(cpu_s + at_s, 3), name, value))
        for name, best in later.best.items():
            if name not in self.best or best.value > self.best[name].value:
                self.best[name] = replace(best, problems=before + best.problems)
        self.problems, self.cpu_s = before + later.problems, cpu_s + later.cpu_s

    @property
    def value(self) -> float:
        """The figure of the best input, 0 where nothing was above it."""
        return self.largest.value if self.largest else 0.0

    @property
    def largest(self) -> Best | None:
        """The best input of all outputs; on an island an output of which nothing was above 0 has none."""
        return max(self.best.values(), key=lambda best: best.value, default=None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Found:
        """Read what :meth:`to_json` wrote."""
        best = {name: Best(**each) for name, each in values["best"].items()}
        return cls(values["problems"], values["cpu_s"], best, [tuple(point) for point in values["curve"]])


def search(
    candidate: Candidate,
    objective: Objective,
    ground: Ground,
    seed: list[int],
    problems: int,
    *,
    start: Mapping[str, Any] | None = None,
    at_random: bool = False,
    seconds: float = float("inf"),
) -> Found:
    """Search one ground from normal inputs, or from a ``start`` that was found there.

    Parameters
    ----------
    seed : list of int
        Decides what is tried.
    problems : int
        How many are judged, and at most a generation or a run more.
    at_random : bool
        Draw as the suite draws, instead of searching.
    seconds : float
        CPU seconds after which no further generation or run begins.
    """
    judge = None if at_random or ground.island is None else objective.of_colonies(candidate)
    if ground.island is not None and judge is not None:
        return _evolve(Search(ground.island, seed, judge, _individual(start)), ground.island, problems, seconds)
    return _draw(candidate, objective, ground, seed, problems, not at_random, seconds)


def _individual(content: Mapping[str, Any] | None) -> Any:
    return individual(content["individual"], Island(**content["island"])) if content else None


def _evolve(run: Search, island: Island, problems: int, seconds: float) -> Found:
    found, began = Found(), time.process_time()
    while found.problems < problems and found.cpu_s < seconds:
        watch.trying("a generation", lambda: {"island": asdict(island), "generation": run.found.generations})
        run.generation()
        found.problems, found.cpu_s = run.found.problems, time.process_time() - began
        for name, find in [*run.found.best.items(), *(("out", find) for find in run.found.violations.values())]:
            if name == "rounded" and "out" in run.judge.records:
                continue
            content = {"island": asdict(island), "individual": find.individual}
            found.meet(_TOLD.get(name, name), find.ratio, lambda content=content: content)
    return found


def _draw(
    candidate: Candidate,
    objective: Objective,
    ground: Ground,
    seed: list[int],
    problems: int,
    led: bool,
    seconds: float,
) -> Found:
    """Short runs of Hypothesis with seeds of their own."""
    found, began, drawn = Found(), time.process_time(), _cases(candidate, ground)
    weight = ground.island.problems if ground.island else 1

    def examine(case: Case) -> None:
        watch.trying("a hunt", case.to_json)
        found.problems, found.cpu_s = found.problems + weight, time.process_time() - began
        try:
            values = objective.of_case(candidate, case)
        except ValueError:  # it does not take the case
            return
        for name, value in values.items():
            found.meet(name, value, lambda: {"case": case.to_json()})
            if led and abs(value) < float("inf"):
                hypothesis.target(value, label=name)

    run = 0
    while found.problems < problems and found.cpu_s < seconds:
        before = found.problems
        left = -(-(problems - found.problems) // weight)
        with contextlib.suppress(Unsatisfiable):
            _run(
                examine,
                drawn,
                int.from_bytes(repr([*seed, run]).encode()),
                min(LED_RUN if led else RANDOM_RUN, left),
                led,
            )
        run += 1
        if found.problems == before:
            break
    return found


def _run(examine: Callable[[Case], None], drawn: SearchStrategy[Case], seed: int, examples: int, led: bool) -> None:
    configured = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        phases=(Phase.generate, Phase.target) if led else (Phase.generate,),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
        verbosity=hypothesis.Verbosity.quiet,
    )
    hypothesis.seed(seed)(configured(given(drawn)(examine)))()


def _cases(candidate: Candidate, ground: Ground) -> SearchStrategy[Case]:
    return small_cases(candidate, ground.wanted) if ground.island is None else _alike(candidate, ground.island)


@st.composite
def _alike(draw: DrawFn, candidate: Candidate, island: Island) -> Case:
    """Draw a case of an island's shape as the suite draws inputs."""
    problem = replace(island.problem(1.0, 30.0), softmax_scale=draw(st.sampled_from((None, 0.25, 0.05))))
    recipe = draw(recipes(problem=problem, max_edits=2))
    choices = operations.find(FORWARD).draw_choices(draw, candidate, problem, Ground("").wanted)
    changes = (("num_splits", island.num_splits),) if island.num_splits > 1 else ()
    return Case(candidate.name, problem, recipe, changes=changes, **choices)


def value_of(candidate: Candidate, objective: Objective, content: Mapping[str, Any]) -> dict[str, float]:
    """Judge a stored input again: the figure of each output.

    Raises
    ------
    ValueError
        If the content is damaged, or the kernel does not take it.
    """
    if "case" in content:
        case = Case.from_json(content["case"])
        return objective.of_case(candidate, replace(case, kernel=candidate.name))
    judge = objective.of_colonies(candidate)
    if judge is None:
        raise ValueError(f"{candidate.name} is not judged on islands")
    colony, row, column = _individual(content)
    values = {name: judge.published(colony, name)[row] for name in judge.records}
    return {_TOLD.get(n, n): float(x[column] if x.ndim else x) for n, x in _distinct(values)}


def _distinct(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Records by name, without those of stored outputs where they stand beside those before the last rounding."""
    return ((name, x) for name, x in values.items() if not (name == "rounded" and "out" in values))
