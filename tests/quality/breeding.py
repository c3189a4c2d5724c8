"""The search of the adversaries: the worst problem of each order, bred from the worst that is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np


class Ranked(Protocol):
    @property
    def ratio(self) -> float: ...


Individual = TypeVar("Individual", bound=Ranked)
Rng = np.random.Generator


def worst_of_each(
    names: Sequence[str],
    problems: int,
    rng: Rng,
    *,
    born: Callable[[Rng, str], Individual],
    bred: Callable[[Individual, Rng], Individual],
    measured: Callable[[Individual], Individual],
    favour: int = 2,
) -> list[Individual]:
    """Breed problems, most for the orders that come nearest; return the worst of each order, the worst first.

    The larger ``favour``, the more of them are of the orders that are ahead.
    """
    best: dict[str, Individual] = {}
    for i in range(problems):
        ahead = sorted(names, key=lambda name: -best[name].ratio if name in best else -np.inf)
        name = ahead[int(len(names) * rng.random() ** favour)]
        is_new = name not in best or rng.random() < max(0.1, 1 - 4 * i / problems)
        one = measured(born(rng, name) if is_new else bred(best[name], rng))
        if name not in best or one.ratio >= best[name].ratio:
            best[name] = one
    return sorted(best.values(), key=lambda one: -one.ratio)
