"""Findings of an atlas as cards: what one page explains is one card, and all else one by kernel and symptom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fa3verify.campaign.findings import SEVERITIES, clusters, severity, symptoms, why
from fa3verify.campaign.run import Finding
from fa3verify.judging.verdict import told
from fa3verify.report.atlas_tables import Judged


@dataclass(frozen=True, slots=True)
class Known:
    """A finding that has a page: which findings of which kernels it explains, and in what words.

    ``findings`` are shell patterns of ``WHAT: MESSAGE | CASE``, so that a pattern may ask for the inputs it is about.
    """

    page: str
    kernels: tuple[str, ...]
    findings: tuple[str, ...]
    because: str

    def explains(self, kernel: str, words: str) -> bool:
        """Tell whether it explains what was found, in words, of a kernel."""
        named = any(fnmatchcase(kernel, pattern) for pattern in self.kernels)
        return named and any(fnmatchcase(words, pattern) for pattern in self.findings)


@dataclass(frozen=True, slots=True)
class Shown:
    """The first finding of one cause of a kernel, and how many others the cause has."""

    row: Judged
    first: Finding
    others: int

    @property
    def words(self) -> str:
        """Return what failed and how."""
        return f"{told(self.first.what)}: {self.first.message}"

    @property
    def replay(self) -> str | None:
        """Return its replay file, from the page."""
        return self.first.replay and self.row.path(self.first.replay)


@dataclass(frozen=True, slots=True)
class Card:
    """What happens, to whom and on what input; ``known`` is the page that explains it, None where none does."""

    anchor: str
    title: str
    known: Known | None
    found: tuple[Shown, ...]

    @property
    def lead(self) -> Shown:
        """Return the finding that is shown in full: one that can be replayed, rather a kernel's than its twin's."""
        return min(self.found, key=lambda x: (x.replay is None, x.row.entry.kernel.startswith("twin.")))

    @property
    def severity(self) -> str:
        """Return which of :data:`SEVERITIES` it is."""
        return severity(self.lead.first)


def cards(rows: Sequence[Judged], known: Iterable[Known]) -> list[Card]:
    """Return every cause of every kernel on a card: those without an explanation first, and the gravest of them."""
    grouped: dict[tuple[Known | None, str], list[Shown]] = {}
    explanations = list(known)
    for row in rows:
        for first, others in clusters(row.entry.listed):
            shown = Shown(row, first, others)
            whole = f"{shown.words} | {first.case or ''}"
            found = next((each for each in explanations if each.explains(row.entry.kernel, whole)), None)
            title = found.because if found else f"{row.label}: {why(symptoms([first])[0])}"
            grouped.setdefault((found, title), []).append(shown)
    gravest = list(SEVERITIES)
    made = [Card("", title, found, tuple(shown)) for (found, title), shown in grouped.items()]
    made.sort(key=lambda card: (card.known is not None, gravest.index(card.severity)))
    return [Card(f"finding-{number}", card.title, card.known, card.found) for number, card in enumerate(made, 1)]
