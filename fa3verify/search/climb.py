"""This module says what every evolution shares: what it met, which mutations it takes, how far it climbed, when it
starts again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

Tried = tuple[int, int, list[int]]  # a child, its parent, and the mutations between them
PATIENCE = 24  # generations without a gain of 0.2 %, after which a colony starts again


@dataclass(frozen=True, slots=True)
class Find:
    """An input as JSON, its figure when judged alone, and the count of problems at which it was met."""

    value: float
    problems: int
    content: dict[str, Any]


@dataclass(slots=True)
class Findings:
    """Holds what a search has met.

    ``best`` has the largest figure of everything that is recorded, ``curve`` every rise of one as (problems, CPU
    seconds, name, figure), ``violations`` the first input beyond the limit of every cause; ``above_1`` counts outputs
    beyond it. A problem is one query with keys of its own, or a whole case where cases are drawn. ``cpu_s`` is 0 where
    nobody takes the time.
    """

    problems: int = 0
    generations: int = 0
    restarts: int = 0
    above_1: int = 0
    cpu_s: float = 0.0
    best: dict[str, Find] = field(default_factory=dict)
    violations: dict[str, Find] = field(default_factory=dict)
    curve: list[tuple[int, float, str, float]] = field(default_factory=list)

    def height(self, name: str) -> float:
        """The largest figure that is recorded under a name, 0 where there is none."""
        return self.best[name].value if name in self.best else 0.0

    def meet(self, name: str, value: float, content: Callable[[], dict[str, Any]]) -> None:
        """Keep an input if it is the first under a name, or better than all before."""
        if name not in self.best or value > self.best[name].value:
            self.best[name] = Find(value, self.problems, content())
            self.curve.append((self.problems, round(self.cpu_s, 3), name, value))

    def add(self, later: Findings) -> None:
        """Go on with what another search met."""
        for problems, at_s, name, value in later.curve:
            if name not in self.best or value > self.best[name].value:
                self.curve.append((self.problems + problems, round(self.cpu_s + at_s, 3), name, value))
        for name, find in later.best.items():
            if name not in self.best or find.value > self.best[name].value:
                self.best[name] = replace(find, problems=self.problems + find.problems)
        self.violations = later.violations | self.violations
        for name in ("problems", "generations", "restarts", "above_1", "cpu_s"):
            setattr(self, name, getattr(self, name) + getattr(later, name))

    @property
    def largest(self) -> Find | None:
        """The best input of all; None where nothing was met."""
        return max(self.best.values(), key=lambda find: find.value, default=None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Findings:
        """Read what :meth:`to_json` wrote."""
        found = cls(**values)
        found.best = {name: Find(**each) for name, each in values["best"].items()}
        found.violations = {name: Find(**each) for name, each in values["violations"].items()}
        found.curve = [tuple(point) for point in values["curve"]]
        return found


class Chances:
    """Chooses mutations: those that lately made a child better than its parent come more often."""

    def __init__(self, mutations: Sequence[Callable], rng: np.random.Generator) -> None:
        self.mutations, self.rng, self.credit = mutations, rng, np.ones(len(mutations))

    def draw(self) -> int:
        if self.rng.random() < 0.4:
            return int(self.rng.integers(len(self.credit)))
        total = self.credit.cumsum()
        return int(np.searchsorted(total, self.rng.random() * total[-1]))

    def learn(self, tried: list[int], is_better: bool) -> None:
        for index in tried:
            self.credit[index] = max(0.97 * self.credit[index] + is_better, 0.2)


class Climb(ABC):
    """One colony's way up: breed, judge and select, generation after generation, and start again where it stalls.

    A search says what its colonies are, how children are made of parents, and what of a colony climbs.

    Parameters
    ----------
    island
        The shape that the colony has.
    objectives : sequence of (str, bool)
        What climbs in turn, restart after restart, and whether extremes are tried.
    mutations : sequence of sequences of callables
        Those of each kind of genes.
    seed : int or list of int
    """

    def __init__(
        self,
        island: Any,
        objectives: Sequence[tuple[str, bool]],
        mutations: Sequence[Sequence[Callable]],
        seed: int | list[int],
    ) -> None:
        self.island = island
        self.objectives = objectives
        self.rng = np.random.default_rng(seed)
        self.chances = [Chances(kind, self.rng) for kind in mutations]
        self.found = Findings()
        self.archive: dict[tuple[str, int], tuple[float, Any]] = {}  # the best individual of an objective and a niche

    @abstractmethod
    def offspring(self) -> tuple[Any, list[list[Tried]]]:
        """Return a colony of parents and their children, and what was tried of each kind of genes."""

    @abstractmethod
    def move(self, colony: Any) -> bool:
        """Change what the individuals of a colony share, by chance; tell whether it was changed."""

    @abstractmethod
    def judged(self, colony: Any) -> Any:
        """Return the ratios of a colony."""

    @abstractmethod
    def record(self, colony: Any, ratios: Any) -> None:
        """Keep the largest ratios and the violations; each is judged alone before it counts."""

    @abstractmethod
    def fitness(self, colony: Any, ratios: Any) -> np.ndarray:
        """Return what climbs, one axis for each kind of genes; 0 where an output is lost, which leads nowhere."""

    @abstractmethod
    def selected(self, colony: Any, fitness: np.ndarray) -> Any:
        """Return the parents of the next generation, the best ones foremost."""

    @abstractmethod
    def restart(self) -> None:
        """Begin with another colony."""

    def begin(self, parents: Any) -> None:
        """Start with a colony, at the foot of what climbs after so many restarts."""
        self.objective, self.wild = self.next_objective()
        self.parents = parents
        self.height = 0.0
        self.stalled = 0
        self.step = 0.5
        self.is_new = True

    def generation(self) -> Any:
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

    def next_objective(self) -> tuple[str, bool]:
        return self.objectives[self.found.restarts % len(self.objectives)]

    def draw_step(self) -> float:
        """The size of one mutation, log2 units."""
        return self.step * float(np.exp2(self.rng.uniform(-4, 2)))

    def learn(self, tried: list[list[Tried]], fitness: np.ndarray) -> None:
        """Credit mutations of children that beat their parents, and fit the step to how many did."""
        better = 0
        for axis, (chances, children) in enumerate(zip(self.chances, tried)):
            heights = fitness.max(tuple(other for other in range(fitness.ndim) if other != axis))
            if len(heights) < 2:
                continue
            for child, parent, drawn in children:
                is_better = bool(heights[child] > heights[parent])
                chances.learn(drawn, is_better)
                better += is_better
        self.fit_step(better, sum(map(len, tried)))

    def fit_step(self, better: int, children: int) -> None:
        """Take larger steps while many children beat their parents, smaller ones otherwise."""
        if children:
            self.step = float(np.clip(self.step * (1.15 if better > 0.15 * children else 0.93), 2.0**-14, 2.0))

    def is_lost(self, top: float, moved: bool) -> bool:
        """Tell whether a generation of changed surroundings came so much lower that its parents are kept."""
        return moved and top < 0.98 * self.height

    def climbed(self, top: float, moved: bool) -> bool:
        """Note how high a generation came; True where the colony has stood still for too long."""
        if self.is_lost(top, moved):
            self.stalled += 1
        else:
            self.stalled = 0 if top > 1.002 * self.height else self.stalled + 1
            self.height = top if moved else max(top, self.height)
        return self.stalled > PATIENCE
