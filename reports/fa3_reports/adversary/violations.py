"""What a search of our own twins keeps besides the largest figures: one violation of the bound for every cause."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fa3verify.search.climb import Find, Findings, Judge, Ratios, Search
from fa3verify.search.colony import Colony, Place


@dataclass
class Violations(Findings):
    """Holds what a search has met: ``violations`` has the first input beyond the limit of every cause, ``above_1``
    counts outputs beyond it.
    """

    above_1: int = 0
    violations: dict[str, Find] = field(default_factory=dict)

    def add(self, other: Findings, *, is_later: bool = True) -> None:
        """Add what another search met: a later one, which went on, or one that began anew beside it."""
        super().add(other, is_later=is_later)
        if isinstance(other, Violations):
            self.violations = other.violations | self.violations
            self.above_1 += other.above_1


class ViolationSearch(Search):
    """A search that keeps violations; it stands in front of the class of the colony's search."""

    VIOLATED: ClassVar[tuple[str, ...]]  # the figures that say whether a limit is exceeded
    found: Violations

    def __init__(
        self, island: Any, seed: int | list[int], judge: Judge, start: tuple[Colony, Place] | None = None
    ) -> None:
        super().__init__(island, seed, judge, start)
        self.found = Violations()

    @abstractmethod
    def suspects(self, beyond: np.ndarray) -> np.ndarray:
        """Return the places, among those beyond the limit, whose individuals are judged alone."""

    @abstractmethod
    def cause(self, colony: Any, name: str, place: Place) -> tuple[str, tuple[str, ...]]:
        """Return the name of a violation's cause, and the names of figures of which the largest is its size."""

    def record(self, colony: Any, ratios: Ratios) -> None:
        """Keep the largest figures, and one violation of every cause; each is judged alone before it counts."""
        super().record(colony, ratios)
        for name in self.VIOLATED:
            beyond = np.argwhere(~(ratios[name] <= self.judge.limit))
            self.found.above_1 += len(beyond)
            for index in self.suspects(beyond):
                self._violation(colony, name, (int(index[0]), int(index[-1]) if len(index) == 2 else 0))

    def _violation(self, colony: Any, name: str, place: Place) -> None:
        cause, names = self.cause(colony, name, place)
        if cause in self.found.violations:
            return
        lone, there = colony.alone(place)
        ratio = max(self.judge.told(lone, there, each) for each in names)
        if ratio > self.judge.limit:
            self.found.violations[cause] = Find(ratio, self.found.problems, lone.to_json(there))

    def until(self, problems: int) -> Violations:
        """Search until so many problems were judged."""
        super().until(problems)
        return self.found
