"""Covering arrays: few small cases of a kernel in which every pair, or every triple, of classes meets.

What a kernel does not take are constraints of the array, asked from the kernel itself.
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
from fa3verify.cases.space import Point
from fa3verify.kernels.record import Kernel

Classes = tuple[tuple[str, tuple[str, ...]], ...]
Cell = tuple[str, str]  # a dimension and a class of it
# About how much longer a case takes that has such a class.
_COSTS: Mapping[Cell, float] = {
    ("queries", "a tile"): 4,
    ("queries", "several tiles"): 4,
    ("keys", "long"): 5,
    **{("keys", c): 3 for c in space.TILES_OF_KEYS},
    ("group", "2 to 4"): 2,
    ("group", "5 or more"): 5,
    ("kv_heads", "2 or 3"): 2,
    ("kv_heads", "4 or more"): 4,
    ("batch", "2"): 2,
    ("batch", "3 or more"): 3,
}
_TOO_MUCH = 10


def cover(kernel: Kernel, strength: int, seed: int) -> list[tuple[Point, Case | None]]:
    """Return points in which every ``strength`` classes meet that can, each with its case.

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
        Empty for a kernel that takes no problem. The case is None where the kernel takes every pair of the classes and
        not all of them; what only such a point meets then meets in points behind, which differ from it in one class.
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
        (point, _taken(kernel, point, range(seed + i, seed + i + space.TURNS))) for i, point in enumerate(points)
    ]
    return [*rows, *_mended(kernel, rows, taken, strength)]


def _mended(
    kernel: Kernel, rows: list[tuple[Point, Case | None]], classes: Classes, strength: int
) -> Iterator[tuple[Point, Case]]:
    """Points for what is met in points without a case alone: each is one of these, but for one class."""
    met = {cells for point, case in rows if case for cells in _met(point, strength)}
    for i, point in enumerate(point for point, case in rows if case is None):
        lost = set(_met(point, strength)) - met
        for name, c in ((name, c) for name, of in classes for c in of):
            near = {**point, name: c}
            kept = lost.intersection(_met(near, strength)) if c != point[name] else set()
            if kept and (case := _taken(kernel, near, range(i, i + space.TURNS))):
                yield near, case
                lost -= kept
                met |= kept


def _met(point: Point, strength: int) -> Iterable[tuple[Cell, ...]]:
    """Every ``strength`` classes of a point."""
    return combinations(sorted(point.items()), strength)


def _taken(kernel: Kernel, chosen: Point, seeds: Iterable[int]) -> Case | None:
    """The first case of these classes that the kernel takes, None if it takes none."""
    for seed in seeds:
        with contextlib.suppress(ValueError):
            case = space.case_of(kernel, chosen, seed)
            kernel.config_for(case.problem, case.changes)
            if kernel.supports(case.problem):
                return case
    return None


def _takes(kernel: Kernel, chosen: Point) -> bool:
    """Tell whether there is a case of these classes that the kernel takes."""
    return _taken(kernel, chosen, range(space.TURNS)) is not None


def _plain(kernel: Kernel) -> Point | None:
    """The plainest classes that a kernel takes: a mask, where it takes nothing without one."""
    claimed = space.claimed(kernel)
    dims = claimed.get("head_dim", ())[:1]
    masks = claimed.get("mask", ())
    return next((p for d in dims for m in masks if _takes(kernel, p := {"head_dim": d, "mask": m})), None)


def _forbidden(kernel: Kernel, classes: Classes, plain: Point) -> frozenset[tuple[Cell, Cell]]:
    """Pairs of classes of which the kernel takes no case that is plain otherwise; a class twice where it takes none."""
    cells = [(name, c) for name, of in classes for c in of]
    alone = {cell for cell in cells if not _takes(kernel, {**plain, **dict([cell])})}
    met = [pair for pair in combinations(cells, 2) if pair[0][0] != pair[1][0] and alone.isdisjoint(pair)]
    refused = {pair for pair in met if not _takes(kernel, {**plain, **dict(pair)})}
    return frozenset(refused | {(cell, cell) for cell in alone})


@cache
def _array(
    classes: Classes, forbidden: frozenset[tuple[Cell, Cell]], strength: int, seed: int
) -> tuple[tuple[Cell, ...], ...]:
    """Rows of the covering array, made cheap."""
    from covertable import criteria, sorters
    from covertable.main import Controller

    factors = {name: list(of) for name, of in classes if of}
    plain = {name: of[0] for name, of in factors.items()}
    costly = _costly(factors, forbidden) if strength == 2 else frozenset()
    names = list(factors)
    apart = _by_dimensions(forbidden | costly).items()
    constraints = [_apart(names.index(a), names.index(b), frozenset(met)) for (a, b), met in apart]
    controller = Controller(
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


def _by_dimensions(forbidden: Iterable[tuple[Cell, Cell]]) -> dict[tuple[str, str], set[tuple[str, str]]]:
    """The pairs of classes that must not meet, by their dimensions: one constraint each is fast to check."""
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for (a, x), (b, y) in sorted(forbidden):
        if (a, x) != (b, y):
            found.setdefault((a, b), set()).add((x, y))
    return found


def _apart(a: int, b: int, met: frozenset[tuple[str, str]]) -> dict[str, Any]:
    """A constraint on two dimensions by their numbers: covertable splits a name at its dots each time it reads one."""
    return {"operator": "fn", "requires": [a, b], "evaluate": lambda row: (row[a], row[b]) not in met}


def _costly(factors: Mapping[str, list[str]], forbidden: frozenset[tuple[Cell, Cell]]) -> frozenset[tuple[Cell, Cell]]:
    """Pairs of costly classes: they meet in a case of their own that is plain otherwise.

    A class costs what it takes beyond the cheapest of its dimension: a kernel of whole tiles has no shorter case.
    """
    costs = {name: [_COSTS.get((name, c), 1.0) for c in of] for name, of in factors.items()}
    cells = [((name, c), x / min(costs[name])) for name, of in factors.items() for c, x in zip(of, costs[name])]
    met = {(a, b) for (a, x), (b, y) in combinations(cells, 2) if a[0] != b[0] and x * y > _TOO_MUCH}
    return frozenset(met - forbidden)


def _cheapen(
    rows: list[dict[str, str]], plain: Mapping[str, str], forbidden: frozenset[tuple[Cell, Cell]], strength: int
) -> None:
    """Replace, in place, every costly class by the plainest where all that it meets meet elsewhere as well."""

    def met(row: dict[str, str], name: str) -> list[tuple[Cell, ...]]:
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
