"""The search on one island: breed a colony, judge it, keep the worst inputs and select, generation after generation.

Mutations that lately made a child better than its parent come more often, and a colony that has stopped climbing starts
again. A :class:`Judge` says which figure climbs. :class:`Search` is subclassed for each kind of colony, such as by
:class:`fa3verify.search.forward.search.ForwardSearch`: the subclass says which genes a child gets from its two parents,
what all individuals share, and which of them stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from fa3verify.files import Json
from fa3verify.search.colony import Colony, Place


@dataclass(frozen=True, slots=True)
class Find:
    """Holds an input as JSON, its figure when judged alone, and the count of problems at which it was met."""

    value: float
    problems: int
    content: Json


@dataclass(slots=True)
class Findings:
    """Holds what a search has met.

    ``best`` has the largest figure of everything that is recorded, ``curve`` every rise of one as (problems, CPU
    seconds, name, figure). A problem is one query with keys of its own, or a whole case where cases are drawn.
    ``cpu_s`` is 0 where nobody takes the time.
    """

    problems: int = 0
    generations: int = 0
    restarts: int = 0
    cpu_s: float = 0.0
    best: dict[str, Find] = field(default_factory=dict)
    curve: list[tuple[int, float, str, float]] = field(default_factory=list)

    def height(self, name: str) -> float:
        """Return the largest figure that is recorded under a name, 0 where there is none."""
        return self.best[name].value if name in self.best else 0.0

    def meet(self, name: str, value: float, content: Callable[[], Json]) -> None:
        """Keep an input if it is the first under a name, or better than all before."""
        if name not in self.best or value > self.best[name].value:
            self.best[name] = Find(value, self.problems, content())
            self.curve.append((self.problems, round(self.cpu_s, 3), name, value))

    def add(self, other: Findings, *, is_later: bool = True) -> None:
        """Add what another search met: a later one, which went on, or one that began anew beside it."""
        began, began_s = (self.problems, self.cpu_s) if is_later else (0, 0.0)
        for problems, at_s, name, value in other.curve:
            if name not in self.best or value > self.best[name].value:
                self.curve.append((began + problems, round(began_s + at_s, 3), name, value))
        for name, find in other.best.items():
            if name not in self.best or find.value > self.best[name].value:
                self.best[name] = replace(find, problems=began + find.problems)
        for name in ("problems", "generations", "restarts", "cpu_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def largest(self) -> Find | None:
        """Return the best input of all; None where nothing was met."""
        return max(self.best.values(), key=lambda find: find.value, default=None)


Ratios = Mapping[str, np.ndarray]  # figures of every individual by name, (individuals of the first axis, others)
Tried = tuple[int, int, list[int]]  # a child, its parent, and the mutations between them
PATIENCE = 24  # generations without a gain of 0.2 %, after which a colony starts again


@dataclass(frozen=True, slots=True)
class Judge:
    """Says what makes one individual better than another.

    Parameters
    ----------
    ratios : callable
        Judges all individuals of a colony; its second argument is the colony's guide, where it is known.
    objectives : tuple of (str, bool)
        The figures that climb, one after the other with each restart, and whether extremes are tried then.
    records : tuple of str
        The figures of which the largest is kept.
    limit : float
        The largest figure of a sound kernel.
    """

    ratios: Callable[..., Ratios]
    objectives: tuple[tuple[str, bool], ...]
    records: tuple[str, ...]
    limit: float = 1.0

    def published(self, colony: Any, name: str) -> np.ndarray:
        """Return one of ``records`` as it is reported, of an individual that is alone in its colony."""
        return self.ratios(colony)[name]

    def told(self, colony: Any, place: Place, name: str) -> float:
        """Return one of ``records`` of an individual that is alone in its colony."""
        figures = self.published(colony, name)
        return float(figures[place[: figures.ndim]])

    def again(self, colony: Any, place: Place) -> dict[str, float]:
        """Return all ``records`` of an individual that is alone in its colony."""
        return {name: self.told(colony, place, name) for name in self.records}


class Chances:
    """Chooses mutations: those that lately made a child better than its parent come more often."""

    def __init__(self, mutations: Sequence[Callable], rng: np.random.Generator) -> None:
        self.mutations = mutations
        self.rng = rng
        self.credit = np.ones(len(mutations))

    def draw(self) -> int:
        if self.rng.random() < 0.4:  # any mutation, whatever its credit
            return int(self.rng.integers(len(self.credit)))
        total = self.credit.cumsum()
        return int(np.searchsorted(total, self.rng.random() * total[-1]))

    def learn(self, tried: list[int], is_better: bool) -> None:
        for index in tried:
            # Credit fades; at least 0.2 is left, so that no mutation dies out.
            self.credit[index] = max(0.97 * self.credit[index] + is_better, 0.2)


class Search(ABC):
    """One colony's way up; :meth:`generation` advances it.

    Parameters
    ----------
    island
        The shape of the colony; its class belongs to the kind of search.
    seed : int or list of int
        Decides what is tried.
    judge : Judge, optional
        Says what climbs; error over bound of our own twins by default.
    start : (Colony, Place), optional
        A colony and the place of an individual in it that joins the first generation, which is else of normal inputs.
    """

    individual: ClassVar[Callable[[Json], tuple[Any, Place]]]  # reads what a colony wrote of one
    MUTATIONS: ClassVar[Sequence[Sequence[Callable]]]  # of the genes of each axis
    AGAIN: ClassVar[float]  # how often a child has two mutations

    def __init__(
        self,
        island: Any,
        seed: int | list[int],
        judge: Judge,
        start: tuple[Colony, Place] | None = None,
    ) -> None:
        self.island = island
        self.judge = judge
        self.rng = np.random.default_rng(seed)
        self.chances = [Chances(kind, self.rng) for kind in self.MUTATIONS]
        self.found = Findings()
        self.archive: dict[tuple[str, int], tuple[float, Any]] = {}  # the best individual of an objective and a niche
        colony = self.normal()
        if start:
            colony.adopt(*start)
        self.begin(colony)

    @abstractmethod
    def normal(self) -> Any:
        """Return a colony of normal inputs."""

    @abstractmethod
    def conceive(self, colony: Any, axis: int, child: int, parents: tuple[int, int]) -> Callable[[], Any]:
        """Give a child the genes of its parents, mainly the first; return a function that makes its mutant."""

    @abstractmethod
    def move(self, colony: Any) -> bool:
        """Change by chance what the individuals of a colony share; return whether it was changed."""

    def judged(self, colony: Any) -> Ratios:
        return self.judge.ratios(colony)

    def figures(self, ratios: Ratios, name: str) -> np.ndarray:
        """Return the figure of each individual."""
        return ratios[name]

    @abstractmethod
    def fitness(self, colony: Any, ratios: Ratios) -> np.ndarray:
        """Return the heights that climb, with one axis for each kind of genes, and put the best into the archive.

        The height is 0 where an output is lost, such as NaN: to breed from it leads nowhere.
        """

    @abstractmethod
    def selected(self, colony: Any, fitness: np.ndarray) -> Any:
        """Return the parents of the next generation, the best ones foremost."""

    @abstractmethod
    def restart(self) -> None:
        """Begin with another colony: of normal inputs, or with the best of the archive among them."""

    def begin(self, parents: Any) -> None:
        """Start with a colony and with the next objective, at height 0."""
        self.objective, self.wild = self.next_objective()
        self.parents = parents
        self.height = 0.0
        self.stalled = 0
        self.step = 0.5
        self.is_new = True

    def generation(self) -> Ratios:
        """Breed, judge and select once; returns the ratios."""
        colony = self.parents
        tried: list[list[Tried]] = []
        moved = False
        with np.errstate(all="ignore"):
            if not self.is_new:
                colony, tried = self.offspring()
                moved = self.move(colony)
        self.is_new = False
        ratios = self.judged(colony)
        self.found.problems += self.island.problems
        self.found.generations += 1
        self.record(colony, ratios)
        fitness = self.fitness(colony, ratios)
        top = float(fitness.max())
        if not self.is_lost(top, moved):
            self.learn(tried, fitness)
            self.parents = self.selected(colony, fitness)
        if self.climbed(top, moved):
            self.found.restarts += 1
            self.restart()
        return ratios

    def until(self, problems: int) -> Findings:
        """Search until so many problems were judged."""
        while self.found.problems < problems:
            self.generation()
        return self.found

    def offspring(self) -> tuple[Any, list[list[Tried]]]:
        """Return a colony with parents in the first half of each axis and their children in the second half, and for
        each axis the mutations that were tried.
        """
        colony = self.parents.copied()
        tried: list[list[Tried]] = []
        for axis, chances in enumerate(self.chances):
            size = colony.size(axis)
            tried.append([])
            for child in range(size // 2, size):
                parent, other = self.rng.integers(size // 2, size=2)
                mutant = self.conceive(colony, axis, child, (parent, other))
                drawn = [chances.draw() for _ in range(1 + int(self.rng.random() < self.AGAIN))]
                for index in drawn:
                    chances.mutations[index](mutant(), self.rng)
                tried[axis].append((child, int(parent), drawn))
        return colony, tried

    def record(self, colony: Any, ratios: Ratios) -> None:
        """Keep the largest figures, which may be infinite; each is judged alone before it counts."""
        for name in self.judge.records:
            ratio = self.figures(ratios, name)
            ratio = np.where(np.isnan(ratio), 0.0, ratio)
            place = place_of_largest(ratio)
            if ratio[place[: ratio.ndim]] > self.found.height(name):
                lone, there = colony.alone(place)
                alone = self.judge.told(lone, there, name)
                if alone > 0:
                    self.found.meet(name, alone, lambda lone=lone, there=there: lone.to_json(there))

    def next_objective(self) -> tuple[str, bool]:
        return self.judge.objectives[self.found.restarts % len(self.judge.objectives)]

    def draw_step(self) -> float:
        """Return the size of one mutation, log2 units."""
        return self.step * float(np.exp2(self.rng.uniform(-4, 2)))

    def learn(self, tried: list[list[Tried]], fitness: np.ndarray) -> None:
        """Credit mutations of children that beat their parents, and fit the step to how many did: larger steps while
        many do, smaller ones otherwise.
        """
        better = 0
        for axis, (chances, children) in enumerate(zip(self.chances, tried)):
            heights = fitness.max(tuple(other for other in range(fitness.ndim) if other != axis))
            if len(heights) < 2:
                continue
            for child, parent, drawn in children:
                is_better = bool(heights[child] > heights[parent])
                chances.learn(drawn, is_better)
                better += is_better
        if children := sum(map(len, tried)):
            self.step = float(np.clip(self.step * (1.15 if better > 0.15 * children else 0.93), 2.0**-14, 2.0))

    def is_lost(self, top: float, moved: bool) -> bool:
        """Tell whether a generation of changed surroundings came so much lower that its parents are kept."""
        return moved and top < 0.98 * self.height

    def climbed(self, top: float, moved: bool) -> bool:
        """Note how high a generation came; return whether the colony has stood still for too long."""
        if self.is_lost(top, moved):
            self.stalled += 1
        else:
            self.stalled = 0 if top > 1.002 * self.height else self.stalled + 1
            self.height = top if moved else max(top, self.height)
        return self.stalled > PATIENCE


def place_of_largest(ratio: np.ndarray) -> Place:
    """Return the place of the largest figure; 0 on an axis that it does not have."""
    where = np.unravel_index(int(ratio.argmax()), ratio.shape)
    return int(where[0]), int(where[1]) if len(where) == 2 else 0
