"""Covering arrays: few small cases of a kernel in which every pair, or every triple, of classes meets.

Classes and their cases are those of :mod:`fa3verify.cases.space`. Pairs that a kernel does not take are constraints of
the array; they are found by asking the kernel. :class:`fa3verify.campaign.plan.JudgeCover` judges the cases.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations
from typing import Any, cast

from fa3verify.cases import space
from fa3verify.cases.case import Case
from fa3verify.cases.dimensions import TILES_OF_KEYS, TURNS, Point
from fa3verify.kernels.record import Kernel

Classes = tuple[tuple[str, tuple[str, ...]], ...]  # each dimension with its classes
Cell = tuple[str, str]  # a dimension and a class of it
# About how many times as long a case takes that has such a class; 1 for all others.
_COSTS: Mapping[Cell, float] = {
    ("queries", "a tile"): 4,
    ("queries", "several tiles"): 4,
    ("keys", "long"): 5,
    **{("keys", c): 3 for c in TILES_OF_KEYS},
    ("group", "2 to 4"): 2,
    ("group", "5 or more"): 5,
    ("kv_heads", "2 or 3"): 2,
    ("kv_heads", "4 or more"): 4,
    ("batch", "2"): 2,
    ("batch", "3 or more"): 3,
}
_TOO_MUCH = 10  # two classes whose costs multiply to more meet in a case that is plain otherwise


def cover(kernel: Kernel, strength: int, seed: int) -> list[tuple[Point, Case | None]]:
    """Return points in which every choice of ``strength`` classes that can meet does, each point with its case.

    Parameters
    ----------
    kernel : Kernel
    strength : int
        2 for pairs, 3 for triples.
    seed : int
        The same seed gives the same cases.

    Returns
    -------
    list of (point, Case)
        Empty for a kernel that takes no problem. The case is None where the kernel takes each pair of a point's classes
        but not all of them together; what meets in such a point alone meets again in points at the end of the list,
        which differ from it in one class.
    """
    plain = _plain(kernel)
    if plain is None:
        return []
    classes = tuple(space.claimed(kernel).items())
    forbidden = _forbidden(kernel, classes, plain)
    alone = {cell for pair in forbidden for cell in pair if pair[0] == pair[1]}
    taken = tuple((name, tuple(c for c in of if (name, c) not in alone)) for name, of in classes)
    points: list[Point] = [dict(row) for row in _array(taken, forbidden, strength, seed)]
    rows: list[tuple[Point, Case | None]] = [
        (point, _taken(kernel, point, range(seed + i, seed + i + TURNS))) for i, point in enumerate(points)
    ]
    return [*rows, *_mended(kernel, rows, taken, strength)]


def _mended(
    kernel: Kernel, rows: list[tuple[Point, Case | None]], classes: Classes, strength: int
) -> Iterator[tuple[Point, Case]]:
    """Yield points, with cases, for choices of classes that otherwise meet only in points without a case.

    Each differs from such a point in one class.
    """
    met = {cells for point, case in rows if case for cells in _met(point, strength)}
    for i, point in enumerate(point for point, case in rows if case is None):
        lost = set(_met(point, strength)) - met
        for name, c in ((name, c) for name, of in classes for c in of):
            near = {**point, name: c}
            regained = lost.intersection(_met(near, strength)) if c != point[name] else set()
            if regained and (case := _taken(kernel, near, range(i, i + TURNS))):
                yield near, case
                lost -= regained
                met |= regained


def _met(point: Point, strength: int) -> Iterable[tuple[Cell, ...]]:
    """Return every choice of ``strength`` classes of a point."""
    return combinations(sorted(point.items()), strength)


def _taken(kernel: Kernel, chosen: Point, seeds: Iterable[int]) -> Case | None:
    """Return the first case of the chosen classes, over some seeds, that the kernel takes; None if it takes none."""
    for seed in seeds:
        with contextlib.suppress(ValueError):
            case = space.case_of(kernel, chosen, seed)
            kernel.config_for(case.problem, case.changes)
            if kernel.supports(case.problem):
                return case
    return None


def _takes(kernel: Kernel, chosen: Point) -> bool:
    """Tell whether there is a case of these classes that the kernel takes."""
    return _taken(kernel, chosen, range(TURNS)) is not None


def _plain(kernel: Kernel) -> Point | None:
    """Return a head_dim and a mask, the plainest, that a kernel takes; None for a kernel that takes no problem."""
    claimed = space.claimed(kernel)
    dims = claimed.get("head_dim", ())[:1]
    masks = claimed.get("mask", ())
    return next((p for d in dims for m in masks if _takes(kernel, p := {"head_dim": d, "mask": m})), None)


def _forbidden(kernel: Kernel, classes: Classes, plain: Point) -> frozenset[tuple[Cell, Cell]]:
    """Return the pairs of classes that a kernel does not take in a case that is plain otherwise.

    A class that it does not take at all is paired with itself.
    """
    cells = [(name, c) for name, of in classes for c in of]
    alone = {cell for cell in cells if not _takes(kernel, {**plain, **dict([cell])})}
    met = [pair for pair in combinations(cells, 2) if pair[0][0] != pair[1][0] and alone.isdisjoint(pair)]
    refused = {pair for pair in met if not _takes(kernel, {**plain, **dict(pair)})}
    return frozenset(refused | {(cell, cell) for cell in alone})


@cache
def _array(
    classes: Classes, forbidden: frozenset[tuple[Cell, Cell]], strength: int, seed: int
) -> tuple[tuple[Cell, ...], ...]:
    """Return the rows of the covering array, with costly classes replaced where that loses nothing.

    ``forbidden`` pairs meet in no row. Equal arguments give equal rows.
    """
    from covertable import criteria, sorters
    from covertable.main import Controller

    class Pairwise(Controller):
        """Looks ahead by pairs alone, since covertable's own way evaluates each constraint thousands of times."""

        def _forward_check(self, snapshot: Mapping[int, int]) -> bool:
            cells = {x: (names[i], factors[names[i]][k]) for i, of in self.serials.items() for k, x in enumerate(of)}
            return _can_be_filled(factors, dict(cells[x] for x in snapshot.values()), apart)

    factors = {name: list(of) for name, of in classes if of}
    plain = {name: of[0] for name, of in factors.items()}
    costly = _costly(factors, forbidden) if strength == 2 else frozenset()
    names = list(factors)
    apart = _by_dimensions(forbidden | costly)
    constraints = [_apart(names.index(a), names.index(b), frozenset(met)) for (a, b), met in apart.items()]
    controller = Pairwise(
        dict(enumerate(factors.values())),
        strength=strength,
        sorter=sorters.hash,
        criterion=criteria.simple,
        salt=str(seed),
        constraints=constraints,
    )
    made = cast(list[dict[int, str]], controller.make())
    rows = [{name: row[i] for i, name in enumerate(names)} for row in made]
    _cheapen(rows, plain, forbidden, strength)
    rows += [{**plain, **dict(pair)} for pair in sorted(costly)]
    return tuple(tuple(row.items()) for row in rows)


def _can_be_filled(
    factors: Mapping[str, list[str]],
    row: Mapping[str, str],
    apart: Mapping[tuple[str, str], set[tuple[str, str]]],
) -> bool:
    """Tell whether every dimension that a row lacks has a class, each with one to meet in every other (AC-3)."""
    left = {name: set(of) if name not in row else {row[name]} for name, of in factors.items()}
    is_changed = True
    while is_changed:
        is_changed = False
        for (a, b), met in apart.items():
            for name, pairs in (
                (a, [(x, [y for y in left[b] if (x, y) not in met]) for x in left[a]]),
                (b, [(y, [x for x in left[a] if (x, y) not in met]) for y in left[b]]),
            ):
                kept = {c for c, others in pairs if others}
                is_changed |= len(kept) < len(left[name])
                left[name] = kept
    return all(left.values())


def _by_dimensions(forbidden: Iterable[tuple[Cell, Cell]]) -> dict[tuple[str, str], set[tuple[str, str]]]:
    """Return the pairs of classes that must not meet, by their dimensions: one constraint for two is fast to check."""
    apart: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for (a, x), (b, y) in sorted(forbidden):
        if (a, x) != (b, y):
            apart.setdefault((a, b), set()).add((x, y))
    return apart


def _apart(a: int, b: int, met: frozenset[tuple[str, str]]) -> dict[str, Any]:
    """Return a constraint of covertable on two dimensions, named by number: it splits names at their dots each time."""
    return {"operator": "fn", "requires": [a, b], "evaluate": lambda row: (row[a], row[b]) not in met}


def _costly(factors: Mapping[str, list[str]], forbidden: frozenset[tuple[Cell, Cell]]) -> frozenset[tuple[Cell, Cell]]:
    """Return the pairs of costly classes that are left to a row of their own, which is plain otherwise.

    The cost of a class is relative to the cheapest that the kernel has in its dimension, as a kernel that takes whole
    tiles only has no shorter case.
    """
    costs = {name: [_COSTS.get((name, c), 1.0) for c in of] for name, of in factors.items()}
    cells = [((name, c), x / min(costs[name])) for name, of in factors.items() for c, x in zip(of, costs[name])]
    met = {(a, b) for (a, x), (b, y) in combinations(cells, 2) if a[0] != b[0] and x * y > _TOO_MUCH}
    return frozenset(met - forbidden)


def _cheapen(
    rows: list[dict[str, str]], plain: Mapping[str, str], forbidden: frozenset[tuple[Cell, Cell]], strength: int
) -> None:
    """Replace in ``rows`` each costly class by the plainest, if all that it meets there meet in other rows as well."""

    def met(row: dict[str, str], name: str) -> list[tuple[Cell, ...]]:
        # The choices of classes in a row that have the class of this dimension.
        others = [cell for cell in row.items() if cell[0] != name]
        return [tuple(sorted([*rest, (name, row[name])])) for rest in combinations(others, strength - 1)]

    counts = Counter(cells for row in rows for cells in _met(row, strength))
    for row in rows:
        for name, _ in sorted(_COSTS.keys() & row.items(), key=_COSTS.__getitem__, reverse=True):
            cheap = {**row, name: plain[name]}
            if any(counts[cells] == 1 for cells in met(row, name)):
                continue
            if forbidden.isdisjoint(p for pair in combinations(cheap.items(), 2) for p in (pair, pair[::-1])):
                counts.subtract(met(row, name))
                row[name] = plain[name]
                counts.update(met(row, name))
