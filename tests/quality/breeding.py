"""The search of the adversaries: the worst problem of each order, bred from the worst that is known."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from fa3_reference.problem import AttentionProblem


class Ranked(Protocol):
    @property
    def ratio(self) -> float: ...


@dataclass(frozen=True)
class Individual:
    """A problem that is bred: one order, operands before they are rounded, and how near its error is to the bound."""

    order: str
    problem: AttentionProblem
    arrays: tuple[np.ndarray, ...]
    ratio: float = 0.0


AnyIndividual = TypeVar("AnyIndividual", bound=Ranked)
Rng = np.random.Generator


def worst_of_each(
    names: Sequence[str],
    problems: int,
    rng: Rng,
    *,
    born: Callable[[Rng, str], AnyIndividual],
    bred: Callable[[AnyIndividual, Rng], AnyIndividual],
    measured: Callable[[AnyIndividual], AnyIndividual],
    favour: int = 2,
) -> list[AnyIndividual]:
    """Breed problems, most for the orders that come nearest; return the worst of each order, the worst first.

    The larger ``favour``, the more of them are of the orders that are ahead.
    """
    best: dict[str, AnyIndividual] = {}
    for i in range(problems):
        ahead = sorted(names, key=lambda name: -best[name].ratio if name in best else -np.inf)
        name = ahead[int(len(names) * rng.random() ** favour)]
        is_new = name not in best or rng.random() < max(0.1, 1 - 4 * i / problems)
        one = measured(born(rng, name) if is_new else bred(best[name], rng))
        if name not in best or one.ratio >= best[name].ratio:
            best[name] = one
    return sorted(best.values(), key=lambda one: -one.ratio)


def report(
    about: str | None,
    searched: Callable[..., Sequence[Any]],
    islands: Sequence[tuple[str, ...]] = ((),),
    *,
    problems: int = 10_000,
    most: int | None = None,
    told: Callable[[Any], object] = lambda one: one.problem.to_json(),
) -> None:
    """Run ``searched(*island, problems, seed)`` of each island as a program, and print the worst of each order.

    ``told`` says in what they were found, and ``most`` how many orders of an island are printed, all by default.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--problems", type=int, default=problems, help="of all islands together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=most, help="orders to print of each island")
    arguments = parser.parse_args()
    for island in islands:
        for one in searched(*island, -(-arguments.problems // len(islands)), arguments.seed)[: arguments.most]:
            print(f"{one.ratio:.6f} {' '.join((*island, one.order))}: {told(one)}", flush=True)
