"""One search on one ground, led or at random, and what it found: the best input of every output and the curve.

Islands are searched by the evolution of :mod:`fa3verify.adversary.evolve`, cases by Hypothesis, whose ``target`` climbs
what is drawn. A random search draws cases of the island's shape as the suite draws them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import DrawFn, SearchStrategy

from fa3verify import operations
from fa3verify.adversary.climb import Findings
from fa3verify.adversary.colony import individual
from fa3verify.adversary.evolve import Search
from fa3verify.adversary.islands import Island
from fa3verify.cases.case import Case
from fa3verify.hunt.grounds import Ground
from fa3verify.hunt.objectives import Objective
from fa3verify.inputs.strategies import recipes
from fa3verify.kernels import watch
from fa3verify.kernels.record import Candidate
from fa3verify.operations import FORWARD
from fa3verify.properties.trials import small_cases

# examples of one run of Hypothesis, which varies the earlier ones of the same run
LED_RUN = 200
RANDOM_RUN = 20


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
) -> Findings:
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
    judge = objective.of_colonies(candidate) if ground.islands and not at_random else None
    if judge is None:
        return _draw(candidate, objective, ground, seed, problems, not at_random, seconds)
    found = Findings()
    shares = len(ground.islands)
    for index, island in enumerate(ground.islands):
        first = individual(start) if start and start["island"] == asdict(island) else None
        run = Search(island, [*seed, index], judge, first)
        found.add(_evolve(run, -(-problems // shares), seconds / shares))
    return found


def _evolve(run: Search, problems: int, seconds: float) -> Findings:
    found = run.found
    began = time.process_time()
    while found.problems < problems and found.cpu_s < seconds:
        watch.trying("a generation", lambda: {"island": asdict(run.island), "generation": found.generations})
        run.generation()
        found.cpu_s = time.process_time() - began
        for find in found.violations.values():  # one without limit is not among the best
            found.meet("out", find.value, lambda find=find: find.content)
    return found


def _draw(
    candidate: Candidate,
    objective: Objective,
    ground: Ground,
    seed: list[int],
    problems: int,
    led: bool,
    seconds: float,
) -> Findings:
    """Short runs of Hypothesis with seeds of their own."""
    found = Findings()
    began = time.process_time()
    drawn = _cases(candidate, ground)
    weight = ground.islands[0].problems if ground.islands else 1

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
    return small_cases(candidate, ground.wanted) if not ground.islands else _alike(candidate, ground.islands[0])


@st.composite
def _alike(draw: DrawFn, candidate: Candidate, island: Island) -> Case:
    """Draw a case of an island's shape as the suite draws inputs."""
    problem = replace(island.problem(1.0, 30.0), softmax_scale=draw(st.sampled_from((None, 0.25, 0.05))))
    recipe = draw(recipes(problem=problem, max_edits=2))
    scheme, _ = operations.find(FORWARD).draw_choices(draw, candidate, problem, Ground("").wanted)
    changes = (("num_splits", island.num_splits),) if island.num_splits > 1 else ()
    return Case(candidate.name, problem, recipe, scheme, changes)


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
    colony, row, column = individual(content)
    values = {name: judge.published(colony, name)[row] for name in judge.records}
    return {name: float(x[column] if x.ndim else x) for name, x in values.items()}
