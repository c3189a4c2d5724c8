"""A campaign on a part of what there is to run, to look into something. It has findings and no verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from fa3verify.campaign.introduction import Introduction
from fa3verify.cases.coverage import COVER


@dataclass(frozen=True, slots=True)
class Only:
    """Holds what is run: of families and properties those that match a pattern, of each at most ``limit`` cases or
    trials.

    Patterns are those of file names (``*``, ``?``, ``[abc]``). With patterns of one kind alone nothing of the other is
    run; the cases that cover all pairs are the family ``cover``.
    """

    families: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()
    limit: int | None = None

    def __bool__(self) -> bool:
        return self != Only()

    @property
    def has_patterns(self) -> bool:
        """Tell whether families or properties are left out."""
        return bool(self.families or self.properties)

    def of(self, kernel: Introduction) -> Introduction:
        """Return a kernel with what is left to run on it, and why that gives no verdict.

        Raises
        ------
        ValueError
            If nothing is left.
        """
        if not self or not kernel.families:
            return kernel
        known = (*kernel.families, COVER)
        families = _matching(known, self.families) if self.has_patterns else known
        laws = _matching(kernel.laws, self.properties) if self.has_patterns else kernel.laws
        if not (families or laws):
            names = ", ".join((*known, *kernel.laws))
            raise ValueError(f"no family and no property of {kernel.name} matches; there are {names}")
        covers = COVER in families
        families = tuple(name for name in families if name != COVER)
        return replace(kernel, families=families, laws=laws, covers=covers, narrowed=self.told())

    def told(self) -> str:
        """Return what was asked for, in words."""
        asked = {"families": self.families, "properties": self.properties}
        parts = [f"{name} {', '.join(patterns)}" for name, patterns in asked.items() if patterns]
        if self.limit is not None:
            parts.append(f"{self.limit} cases or trials of each")
        return f"only {' and '.join(parts)}: a part has no verdict"


def _matching(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
