"""The law that every index is read where it lies, at every size: calls whose outputs name addresses, up the ladders."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from itertools import zip_longest

from fa3_reference.problem import AttentionProblem
from fa3verify.cases.case import Case
from fa3verify.cases.tried import spans
from fa3verify.files import Json
from fa3verify.kernels.record import Kernel
from fa3verify.properties.addressed_calls import Stopwatch, call_of, is_addressable, is_asked
from fa3verify.properties.ladder import LADDERS, coarse, ladders, problem_of, work
from fa3verify.properties.law import KernelError, Law, Refused, Trial, Untaken, Violation, Walk

SECONDS, SECONDS_OF_TWINS = 1.5, 0.4  # of a walk for each example of a campaign
MOST = max(ladder.top for ladder in LADDERS.values())
_SHARE = 0.15  # of the time that is left, which one call may be expected to take: large ones take longer than that
_SMALL, _MIDDLE = 65, 513  # sizes that are asked before the ends of ladders: up to the one, and the other
NAME = "every_index_is_read_where_it_lies"


def _check(kernel: Kernel, trial: Trial) -> Violation | None:
    size, n = trial.choice("of", tuple(LADDERS)), trial.integer("n", 1, MOST)
    setup, due = call_of(kernel, trial.case.problem, seed=trial.integer("seed", 0, 99))
    try:
        got = setup.run()
    except KernelError as error:
        if isinstance(error, Refused) or isinstance(error.__cause__, MemoryError) or "OutOfMemory" in str(error):
            raise Untaken(f"{size} {n:,}: {error}") from None
        raise
    return due.violation(f"{size} {n:,}", got)


class _Climb:
    """The climb of a kernel's ladders: which sizes were asked, how long they took, and which ladders have ended."""

    def __init__(self, kernel: Kernel, seconds: float) -> None:
        self.kernel = kernel
        self.watch = Stopwatch()
        self.limit_s = seconds
        self.asked: dict[str, set[int]] = {name: set() for name in ladders(kernel)}
        self.failed = 0  # the last size that failed
        self.pace_s: dict[str, float] = {}  # of a unit of work, by ladder
        self.over: set[str] = set()
        self.problems: set[AttentionProblem] = set()

    @property
    def left_s(self) -> float:
        return max(0.0, self.limit_s - self.watch.seconds)

    def step(self, name: str, n: int, share: float = math.inf) -> Generator[Trial, bool, bool | None]:
        """Yield the trial of a size and return whether it failed; None without one.

        If it would take more than a share of the time that is left, the ladder ends, with the largest size that does
        not.
        """
        problem = problem_of(self.kernel, LADDERS[name], n)
        if (
            n in self.asked[name]
            or problem is None
            or problem in self.problems
            or not is_addressable(self.kernel, problem)
        ):
            return None
        expected_s = self.pace_s.get(name, 0.0) * work(problem)
        if expected_s > share * self.left_s:
            self.over.add(name)
            n = int(n * share * self.left_s / expected_s)
            smaller = n > 2 * max(self.asked[name])
            return ((yield from self.step(name, n)) or (yield from self.step(name, n - 1))) if smaller else None
        self.asked[name].add(n)
        self.problems.add(problem)
        watch = Stopwatch()
        failed = yield Trial(NAME, Case.plain(self.kernel, problem), {"of": name, "n": n, "seed": n % 7})
        self.pace_s[name] = watch.seconds / work(problem)
        self.failed = n if failed else self.failed
        return failed


def walk(kernel: Kernel, examples: int) -> Walk:
    """Yield trials from coarse to fine; what is sent says whether the last one failed, and ends the walk.

    A failure is followed by smaller sizes, down to the smallest that fails, if all above it do.
    """
    climb = _Climb(kernel, (SECONDS if kernel.is_handed else SECONDS_OF_TWINS) * examples)
    for name, n in _order(climb):
        if not climb.left_s:
            return
        if name not in climb.over and (yield from climb.step(name, n, _SHARE)):
            bad = climb.failed
            good = max((m for m in climb.asked[name] if m < bad), default=0)
            while bad - good > 1:
                middle = (good + bad) // 2
                if (yield from climb.step(name, middle)):
                    bad = middle
                else:
                    good = middle
            return


def _order(climb: _Climb) -> Iterator[tuple[str, int]]:
    """Yield sizes of all ladders in turn: a few small ones, the ends, others in between, then each from 1 on."""
    tops = {name: LADDERS[name].top for name in climb.asked}
    rungs = {name: list(coarse(top)) for name, top in tops.items()}
    first = {
        name: [n for n in of if n <= _SMALL or n in (_MIDDLE, tops[name] - 1, tops[name])] for name, of in rungs.items()
    }
    for sizes in (first, rungs):
        for row in zip_longest(*sizes.values()):
            yield from ((name, n) for name, n in zip(sizes, row, strict=True) if n)
    for n in range(1, max(tops.values(), default=0)):
        yield from ((name, n) for name, top in tops.items() if n < top)


def _asked(trials: list[Trial]) -> Json:
    sizes: dict[str, set[int]] = {}
    for trial in trials:
        sizes.setdefault(str(trial.parameters["of"]), set()).add(trial.integer("n", 1, MOST))
    return {"asked": tuple((name, spans(of)) for name, of in sizes.items())}


INDEX_LAWS = (
    Law(
        name=NAME,
        statement="every element of the outputs comes from the sequence, head, row and key that it should, at every "
        "size up to the largest of practice, one at a time; within the roundings of whole numbers",
        kind="bounded",
        needs=lambda kernel: kernel.mods is None and is_asked(kernel),
        draw=None,
        check=_check,
        asked=_asked,
        operations=("forward", "backward"),
        walk=walk,
    ),
)
