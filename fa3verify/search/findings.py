"""Findings of searches: the worst inputs, how the largest figure rose, and what is beyond a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fa3verify.files import Json


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
        self.violations = other.violations | self.violations
        for name in ("problems", "generations", "restarts", "above_1", "cpu_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def largest(self) -> Find | None:
        """Return the best input of all; None where nothing was met."""
        return max(self.best.values(), key=lambda find: find.value, default=None)
