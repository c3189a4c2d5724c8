"""Run laws: search trials with Hypothesis, shrink the first failure, repeat a stored trial.

Campaigns call :func:`run_law`; replays call :func:`replay_trial`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky, Unsatisfiable

from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.rules import require
from fa3verify import operations
from fa3verify.cases.coverage import classes_of
from fa3verify.cases.tried import SizesTried, Tried
from fa3verify.files import Json
from fa3verify.judging import hypotheses
from fa3verify.kernels import watch
from fa3verify.kernels.record import Kernel, Unfilled
from fa3verify.properties.draws import independent
from fa3verify.properties.law import KernelError, Law, Trial, Untaken, Violation, Walk
from fa3verify.properties.table import LAWS
from fa3verify.records import PRIVATE

MAX_SHRINK_TRIALS = 300  # trials that are spent on making a failure smaller, at most


@dataclass(frozen=True, slots=True)
class LawOutcome:
    """Holds the result of a search for violations of one law.

    ``status`` is ``not_tried`` if the kernel took no trial, ``not_applicable`` if by its declared sizes there is
    none. ``statement`` and ``kind`` are the law's, empty if the
    worker process was lost. ``examples`` counts the trials up to and including the first failure, ``outputs`` the
    output values that the kernel returned for them; ``classes`` are their classes (:mod:`fa3verify.cases.coverage`),
    ``tried`` the sizes of their calls. ``trial`` and ``violation`` are the smallest failure, None unless ``status`` is
    ``fail``; ``message`` is its message and ``replay`` the file of its trial. ``hypotheses`` are those about the sums
    of a kernel that states no order, each with the trial and violation that refute it, or None; it is empty if the law
    needs no bound. ``optional`` has for outputs that a kernel may leave out: name, whether it was returned, and the
    first such trial.
    """

    law: str
    status: Literal["pass", "fail", "not_applicable", "not_claimed", "not_tried"]
    _: KW_ONLY
    statement: str = ""
    kind: str = ""
    examples: int = 0
    outputs: int = 0
    message: str | None = None
    replay: str | None = None
    trial: Trial | None = field(default=None, metadata=PRIVATE)
    violation: Violation | None = field(default=None, metadata=PRIVATE)
    classes: frozenset[str] = field(default=frozenset(), metadata=PRIVATE)
    hypotheses: Mapping[str, tuple[Trial, Violation] | None] = field(default_factory=dict, metadata=PRIVATE)
    tried: SizesTried | None = field(default=None, metadata=PRIVATE)
    optional: tuple[tuple[str, bool, str], ...] = field(default=(), metadata=PRIVATE)

    @property
    def content(self) -> Json | None:
        """Return the content of its replay file, None if no trial failed."""
        return self.trial.to_json() if self.trial else None


class _Broken(Exception):
    """Tells Hypothesis that a law is broken. Another type than _Crash, so that shrinking never mixes the two."""


class _Crash(Exception):
    """Tells Hypothesis that the kernel failed."""


class _Enough(BaseException):
    """Ends a search whose shrinking has had its share; not an Exception, so that Hypothesis lets it through."""


class _Search:
    """The state of one search: counts trials and outputs, and keeps the smallest failure of the first failure's kind.

    Once there is a failure, :attr:`best`, further trials only shrink it and are not counted.
    """

    def __init__(self, law: Law, kernel: Kernel, shrink_seconds: float) -> None:
        self.law = law
        self.shrink_seconds = shrink_seconds
        self.kernel = kernel.altered(run=self._counted(kernel))
        self.examples = self.outputs = self.shrinks = 0
        self.first_failure = (0.0, 0.0)
        self.classes: set[str] = set()
        self.tried = Tried()
        self.called = Tried()  # the sizes of calls in the trial that is under way
        self.best: tuple[Trial, Violation] | None = None
        self.trial: Trial | None = None
        self.passed: list[Trial] = []
        self.optional: dict[tuple[str, bool], Trial] = {}
        self.against: dict[str, tuple[Trial, Violation] | None] = dict.fromkeys(hypotheses.under(kernel))
        self.failed: Mapping[str, Violation | None] = {}  # the best failure, under each hypothesis that was alive then
        self.asks_bound = False

    @property
    def settled(self) -> dict[str, tuple[Trial, Violation] | None]:
        """Return what refutes each hypothesis, or None; empty if no trial asked for a bound."""
        last = {name: (self.best[0], v) for name, v in self.failed.items() if v} if self.best else {}
        return self.against | last if self.asks_bound else {}

    @property
    def alive(self) -> tuple[str, ...]:
        """Return the names of the hypotheses that no trial has refuted yet."""
        return tuple(name for name, against in self.against.items() if against is None)

    def _counted(self, kernel: Kernel):
        """Return a function that runs the kernel and counts what it returns, until there is a failure."""
        operation = operations.find(kernel.operation)

        def run(problem: AttentionProblem, operands: Operands, config: Any) -> Any:
            returned = kernel.code.run(problem, operands, config)
            named = operation.named(returned, problem, config)
            if self.best is None:
                self.outputs += sum(x.size for x in named.values())
                self.called.add(problem)
            for output in operation.sides:
                if output.optional and output.is_due(problem) and self.trial:
                    self.optional.setdefault((output.name, output.name in named), self.trial)
            return returned

        return run

    def check(self, trial: Trial) -> None:
        """Check one trial; raises one of the exceptions above for a failure, or if shrinking has taken too long."""
        self.trial = trial
        if self.best is None:
            self.examples += 1
        else:
            self.shrinks += 1
            own, all_of_it = (now - then for now, then in zip(_clocks(), self.first_failure, strict=True))
            # Four times as long on the clock: other processes may take the thread's time.
            late = own > self.shrink_seconds or all_of_it > 4 * self.shrink_seconds
            if late or self.shrinks > MAX_SHRINK_TRIALS:
                raise _Enough
        watch.trying(f"law {self.law.name}", trial.to_json)
        outputs = self.outputs
        self.called = Tried()
        try:
            violation, under = verdicts(self.law, self.kernel, trial, self.alive)
        except (Untaken, Unfilled):
            self.examples -= self.best is None  # a trial that says nothing is not counted
            return
        self.asks_bound |= bool(under)
        if self.outputs > outputs:
            self.classes |= classes_of(self.kernel, trial.case)
            self.tried.update(self.called.noted())
        if violation is None:
            if self.law.asked:
                self.passed.append(trial)
            if self.best is None:
                self.against |= {name: (trial, v) for name, v in under.items() if v}
            return
        if self.best is None:
            self.first_failure = _clocks()
        fails = violation.failure is not None
        best = self.best
        if best is None or (fails == (best[1].failure is not None) and size_of(trial) < size_of(best[0])):
            self.best = (trial, violation)
            self.failed = under
        if self.shrink_seconds <= 0:
            raise _Enough
        raise _Crash if fails else _Broken


def _clocks() -> tuple[float, float]:
    """Return the seconds of this thread's own work, and those on the clock."""
    return time.thread_time(), time.monotonic()


def size_of(trial: Trial) -> tuple[int, int]:
    """Return what trials are ordered by: the cost of the problem, then the length of the text."""
    problem = trial.case.problem
    work = sum((seq.seqlen_q + 1) * (seq.seqlen_k + 1) for seq in problem.sequences())
    return work * problem.nheads * problem.head_dim, len(repr(trial.to_json()))


def checked(law: Law, kernel: Kernel, trial: Trial) -> Violation | None:
    """Check one trial; a kernel that fails is a violation."""
    try:
        return law.check(kernel, trial)
    except KernelError as error:
        return Violation(f"{kernel.name} failed: {error}", failure=error.failure)


def verdicts(
    law: Law, kernel: Kernel, trial: Trial, names: Collection[str] | None = None
) -> tuple[Violation | None, Mapping[str, Violation | None]]:
    """Check one trial under each hypothesis about the order of a kernel that states none.

    ``names`` are the hypotheses to check, by default all. The kernel runs once: all see the same outputs.

    Returns
    -------
    violation : Violation, optional
        None if the law holds. A kernel that states no order breaks a law only if it does under every hypothesis that
        was checked.
    under : mapping of str to Violation or None
        The result under each hypothesis; empty if the law asked for no bound, so that hypotheses do not matter.
    """
    if law.walk:  # such a law takes the widest bound where it needs one, and may run a kernel in several threads
        return checked(law, kernel, trial), {}
    sides = hypotheses.under(kernel)
    run = _Recorded(kernel)
    results = {}
    for name in sides if names is None else names:
        run.rewind()
        order = _Noting(sides[name].order)
        results[name] = violation = checked(law, replace(sides[name].altered(run=run), order=order), trial)
        if not order.is_asked or (violation and violation.failure):
            return violation, {}
    if not results:  # the kernel states its order
        return checked(law, kernel, trial), {}
    broken = {name: violation for name, violation in results.items() if violation}
    if len(broken) < len(results):
        return None, results
    least = min(broken, key=lambda name: broken[name].ratio)
    words = f"{broken[least].message}; {hypotheses.assumption(hypotheses.sums_of(kernel), least)}"
    return replace(broken[least], message=words), results


class _Noting:
    """An order of operations that notes whether it was asked for."""

    def __init__(self, order: Callable[[Any], Any] | None) -> None:
        assert order is not None
        self.order = order
        self.is_asked = False

    def __call__(self, config: Any) -> Any:
        self.is_asked = True
        return self.order(config)


class _Recorded:
    """Runs a kernel and keeps its outputs: after ``rewind`` the same calls return them in the same order."""

    def __init__(self, kernel: Kernel) -> None:
        self.run = kernel.code.run
        self.operation = operations.find(kernel.operation)
        self.calls: list[tuple[AttentionProblem, dict[str, np.ndarray]]] = []
        self.next = 0

    def rewind(self) -> None:
        self.next = 0

    def __call__(self, problem: AttentionProblem, operands: Operands, config: Any) -> dict[str, np.ndarray]:
        if self.next == len(self.calls):
            named = self.operation.named(self.run(problem, operands, config), problem, config)
            # Copies: the kernel may reuse its own.
            self.calls.append((problem, {name: np.array(x) for name, x in named.items()}))
        known, outputs = self.calls[self.next]
        assert known == problem, "the calls of a law do not depend on the hypothesis"
        self.next += 1
        return outputs


def run_law(law: Law, kernel: Kernel, *, max_examples: int, seed: int, shrink_seconds: float = 4.0) -> LawOutcome:
    """Search for a violation of a law.

    Parameters
    ----------
    law : Law
    kernel : Kernel
    max_examples : int
        Trials that must hold.
    seed : int
        The same seed draws the same trials, and fewer of them are the first of more.
    shrink_seconds : float
        Seconds of this thread's work that are spent on making a failure smaller, at most four times as many on the
        clock, and at most :data:`MAX_SHRINK_TRIALS` trials; 0 keeps the first failure.

    Returns
    -------
    LawOutcome
        A kernel that raises is a failure of the law, never an exception here.

    Raises
    ------
    ValueError
        If ``max_examples`` is below 1.
    """
    require(max_examples >= 1, f"max_examples must be at least 1, got {max_examples}")
    if not law.applies(kernel):
        return LawOutcome(law.name, "not_applicable", statement=law.statement, kind=law.kind)
    if not law.is_claimed(kernel):
        return LawOutcome(law.name, "not_claimed", statement=law.statement, kind=law.kind)
    search = _Search(law, kernel, shrink_seconds)
    untried = "not_applicable" if kernel.sizes.leaves_out else "not_tried"
    # Flaky: it broke the law, and not again on the same trial.
    with contextlib.suppress(_Broken, _Crash, _Enough, Flaky):
        if law.walk:
            _walked(law.walk(kernel, max_examples), search)
        else:
            each_trial(law, search.kernel, search.check, max_examples, seed)
    trial, violation = search.best or (None, None)
    optional = tuple((name, returned, trial.describe()) for (name, returned), trial in search.optional.items())
    return LawOutcome(
        law.name,
        "fail" if violation else "pass" if search.classes else untried,
        statement=law.statement,
        kind=law.kind,
        examples=search.examples,
        outputs=0 if law.walk else search.outputs,
        message=violation and violation.message,
        trial=trial,
        violation=violation,
        classes=frozenset(search.classes),
        hypotheses=search.settled,
        # How many calls of a walk there is time for differs from run to run: what it asked is said apart.
        tried=SizesTried(**law.asked(search.passed)) if law.asked else search.tried.noted(),
        optional=optional,
    )


def _walked(trials: Walk, search: _Search) -> None:
    """Check the trials that a law itself chooses."""
    trial = next(trials, None)
    while trial is not None:
        failed = False
        try:
            search.check(trial)
        except (_Broken, _Crash):
            failed = True
        with contextlib.suppress(StopIteration):
            trial = trials.send(failed)
            continue
        return


def each_trial(law: Law, kernel: Kernel, check: Callable[[Trial], object], max_examples: int, seed: int) -> None:
    """Have Hypothesis check the plainest trial, then independent ones, and shrink the first for which it raises."""
    assert law.draw is not None
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
        @given(law.draw(kernel))
        def holds(trial: Trial) -> None:
            check(trial)

        with contextlib.suppress(Unsatisfiable):  # the kernel takes no trial
            holds()


def find_law(name: str) -> Law:
    """Return a law by name; ValueError names what exists."""
    laws = {row.name: row for row in LAWS}
    if name not in laws:
        raise ValueError(f"unknown law {name!r}; known are {', '.join(laws)}")
    return laws[name]


def replay_trial(law_name: str, kernel: Kernel, trial: Trial) -> Violation | None:
    """Check a stored trial again; None if the law holds.

    Raises
    ------
    ValueError
        If the law is unknown, is not the trial's, does not apply to the kernel, or refuses the trial's parameters, and
        if the trial's operation or dtype is not the kernel's, or the kernel does not take the trial.
    """
    law = find_law(law_name)
    require(trial.law == law_name, f"the trial belongs to law {trial.law!r}, not to {law_name!r}")
    require(law.applies(kernel), f"law {law_name!r} does not apply to {kernel.name}")
    require(
        trial.case.operation == kernel.operation,
        f"the trial is for operation {trial.case.operation}, not {kernel.operation}",
    )
    require(
        trial.case.problem.dtype == kernel.dtype,
        f"the trial is for dtype {trial.case.problem.dtype}, {kernel.name} takes {kernel.dtype}",
    )
    try:
        return verdicts(law, kernel, trial)[0]
    except Untaken as error:
        raise ValueError(f"{kernel.name} does not take the trial: {error}") from None
