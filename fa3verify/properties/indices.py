"""The law that every index is read where it lies, at every size: calls whose outputs name addresses, up the ladders."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

from fa3verify.cases.tried import spans
from fa3verify.files import Json
from fa3verify.kernels.record import Kernel
from fa3verify.properties.addressed_calls import call_of, case_of, is_addressable, is_asked
from fa3verify.properties.ladder import LADDERS, coarse, ladders, problem_of, work
from fa3verify.properties.law import Law, Trial, Untaken, Violation, Walk

SECONDS = 1.0  # of a walk for each example of a campaign
MOST = max(ladder.top for ladder in LADDERS.values())
_SHARE = 0.2  # of the time that is left, which one call may take
NAME = "every_index_is_read_where_it_lies"


def _check(kernel: Kernel, trial: Trial) -> Violation | None:
    size, n = trial.choice("of", tuple(LADDERS)), trial.integer("n", 1, MOST)
    try:
        setup, due = call_of(kernel, trial.case.problem, seed=trial.integer("seed", 0, 99))
        got = setup.run()
    except MemoryError:
        raise Untaken(f"{size} {n:,} does not fit in memory") from None
    return due.violation(f"{size} {n:,}", got)


def walk(kernel: Kernel, examples: int) -> Walk:
    """Yield trials from coarse to fine; what is sent says whether the last one failed, and ends the walk.

    A failure is followed by smaller sizes, down to the smallest that fails, if all above it do.
    """
    until = time.monotonic() + SECONDS * examples
    pace: dict[str, float] = {}
    over: set[str] = set()
    asked: set[tuple[str, int]] = set()

    def trial(name: str, n: int) -> Generator[Trial, bool, bool | None]:
        """Yield the trial of a size unless it would take too long, and return whether it failed; None without one."""
        problem = problem_of(kernel, LADDERS[name], n)
        if problem is None or not is_addressable(problem):
            return None
        if pace.get(name, 0.0) * work(problem) > _SHARE * (until - time.monotonic()):
            over.add(name)
            return None
        asked.add((name, n))
        began = time.monotonic()
        failed = yield Trial(NAME, case_of(kernel, problem), {"of": name, "n": n, "seed": n % 7})
        pace[name] = (time.monotonic() - began) / work(problem)
        return failed

    for name, n in _order(kernel):
        if time.monotonic() > until:
            return
        if (name, n) in asked or name in over:
            continue
        if (yield from trial(name, n)):
            good, bad = max((m for of, m in asked if of == name and m < n), default=0), n
            while bad - good > 1:
                middle = (good + bad) // 2
                if (yield from trial(name, middle)):
                    bad = middle
                else:
                    good = middle
            return


def _order(kernel: Kernel) -> Iterator[tuple[str, int]]:
    """Yield sizes of all ladders in turn: the coarse ones, then each from 1 on."""
    tops = {name: ladder.top for name, ladder in ladders(kernel).items()}
    rungs = {name: list(coarse(top)) for name, top in tops.items()}
    for i in range(max(map(len, rungs.values()), default=0)):
        yield from ((name, of[i]) for name, of in rungs.items() if i < len(of))
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
