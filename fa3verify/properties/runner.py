"""Run laws: search trials with Hypothesis, shrink what breaks a law, repeat a stored trial."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky, Unsatisfiable

from fa3_reference.problem import AttentionProblem, Operands
from fa3verify import operations, watch
from fa3verify.candidates import Candidate
from fa3verify.coverage import classes_of
from fa3verify.properties.draws import independent
from fa3verify.properties.law import CandidateError, Law, Trial, Untaken, Violation
from fa3verify.properties.table import LAWS

MAX_SHRINK_TRIALS = 300


@dataclass(frozen=True, slots=True)
class LawOutcome:
    """What a search for violations found.

    ``examples`` counts the trials up to and including the first failure, ``outputs`` the output values the candidate
    produced for them, ``classes`` are those of :mod:`fa3verify.coverage` that they had; ``trial`` and ``violation`` are
    the smallest failure seen, None unless ``status`` is ``fail``. ``not_tried``: there was no trial that the candidate
    takes.
    """

    law: str
    status: Literal["pass", "fail", "not_applicable", "not_claimed", "not_tried"]
    examples: int = 0
    outputs: int = 0
    trial: Trial | None = None
    violation: Violation | None = None
    classes: frozenset[str] = frozenset()


class _Broken(Exception):
    pass


class _Crash(Exception):
    pass


class _Enough(BaseException):
    """Ends a search whose shrinking has had its share; not an Exception, so that Hypothesis lets it through."""


class _Search:
    """One run of a law: counts trials and outputs, keeps the smallest failure of the first failure's kind."""

    def __init__(self, law: Law, candidate: Candidate, shrink_seconds: float) -> None:
        self.law, self.shrink_seconds = law, shrink_seconds
        self.candidate = replace(candidate, run=self._counted(candidate))
        self.examples = self.outputs = self.shrinks = 0
        self.first_failure = 0.0
        self.classes: set[str] = set()
        self.best: tuple[Trial, Violation] | None = None

    def _counted(self, candidate: Candidate):
        operation = operations.find(candidate.operation)

        def run(problem: AttentionProblem, operands: Operands, config: Any) -> Any:
            returned = candidate.run(problem, operands, config)
            if self.best is None:
                self.outputs += sum(x.size for x in operation.named(returned, problem, config).values())
            return returned

        return run

    def check(self, trial: Trial) -> None:
        if self.best is None:
            self.examples += 1
        else:
            self.shrinks += 1
            late = time.monotonic() - self.first_failure > self.shrink_seconds
            if late or self.shrinks > MAX_SHRINK_TRIALS:
                raise _Enough
        watch.trying(f"law {self.law.name}", trial.to_json)
        outputs = self.outputs
        try:
            violation = checked(self.law, self.candidate, trial)
        except Untaken:
            self.examples -= self.best is None
            return
        if self.outputs > outputs:
            self.classes |= classes_of(self.candidate, trial.case)
        if violation is None:
            return
        if self.best is None:
            self.first_failure, self.best = time.monotonic(), (trial, violation)
        elif violation.kind == self.best[1].kind and size_of(trial) < size_of(self.best[0]):
            self.best = trial, violation
        if self.shrink_seconds <= 0:
            raise _Enough
        if violation.kind == "crashed":
            raise _Crash
        raise _Broken


def size_of(trial: Trial) -> tuple[int, int]:
    """Order of trials: the cheaper problem first, then the shorter text."""
    problem = trial.case.problem
    work = sum((seq.seqlen_q + 1) * (seq.seqlen_k + 1) for seq in problem.sequences())
    return work * problem.nheads * problem.head_dim, len(repr(trial.to_json()))


def checked(law: Law, candidate: Candidate, trial: Trial) -> Violation | None:
    """Check one trial; a candidate that fails is a violation."""
    try:
        return law.check(candidate, trial)
    except CandidateError as error:
        return Violation(f"{candidate.name} failed: {error}", kind="crashed")


def run_law(law: Law, candidate: Candidate, *, max_examples: int, seed: int, shrink_seconds: float = 4.0) -> LawOutcome:
    """Search for a violation of a law.

    Parameters
    ----------
    law : Law
    candidate : Candidate
    max_examples : int
        Trials that must hold.
    seed : int
        The same seed draws the same trials, and fewer of them are the first of more.
    shrink_seconds : float
        Time spent on making a failure smaller; 0 keeps the first one. At most :data:`MAX_SHRINK_TRIALS` trials.

    Returns
    -------
    LawOutcome
        A candidate that raises is a failure of the law, never an exception here.

    Raises
    ------
    ValueError
        If ``max_examples`` is below 1.
    """
    if max_examples < 1:
        raise ValueError(f"max_examples must be at least 1, got {max_examples}")
    if not law.applies(candidate):
        return LawOutcome(law.name, "not_applicable")
    if not law.is_claimed(candidate):
        return LawOutcome(law.name, "not_claimed")
    search = _Search(law, candidate, shrink_seconds)
    # Unsatisfiable: the candidate takes no trial. Flaky: it broke the law, and not again on the same trial.
    with contextlib.suppress(_Broken, _Crash, _Enough, Unsatisfiable, Flaky):
        _search(search, max_examples, seed)
    classes = frozenset(search.classes)
    if search.best is None:
        status = "pass" if classes else "not_tried"
        return LawOutcome(law.name, status, search.examples, search.outputs, classes=classes)
    return LawOutcome(law.name, "fail", search.examples, search.outputs, *search.best, classes)


def _search(search: _Search, max_examples: int, seed: int) -> None:
    """Check the plainest trial and then independent ones; shrink the first failure."""
    law = search.law
    with independent(f"{law.name} {seed}") as backend:

        @hypothesis.seed(seed)
        @settings(
            backend=backend,
            max_examples=max_examples,
            deadline=None,
            database=None,
            derandomize=False,
            print_blob=False,
            report_multiple_bugs=False,
            verbosity=hypothesis.Verbosity.quiet,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
        )
        @given(law.draw(search.candidate))
        def holds(trial: Trial) -> None:
            search.check(trial)

        holds()


def find_law(name: str) -> Law:
    """Return a law by name; ValueError names what exists."""
    for row in LAWS:
        if row.name == name:
            return row
    raise ValueError(f"unknown law {name!r}; known are {', '.join(row.name for row in LAWS)}")


def replay_trial(law_name: str, candidate: Candidate, trial: Trial) -> Violation | None:
    """Check a stored trial again.

    Raises
    ------
    ValueError
        If the law is unknown, is not the trial's, does not apply to the candidate, or refuses the trial's parameters.
    """
    law = find_law(law_name)
    if trial.law != law_name:
        raise ValueError(f"the trial belongs to law {trial.law!r}, not to {law_name!r}")
    if not law.applies(candidate):
        raise ValueError(f"law {law_name!r} does not apply to {candidate.name}")
    if trial.case.operation != candidate.operation:
        raise ValueError(f"the trial is for operation {trial.case.operation}, not {candidate.operation}")
    if trial.case.problem.dtype != candidate.dtype:
        raise ValueError(f"the trial is for dtype {trial.case.problem.dtype}, {candidate.name} takes {candidate.dtype}")
    try:
        return checked(law, candidate, trial)
    except Untaken as error:
        raise ValueError(f"{candidate.name} does not take the trial: {error}") from None
