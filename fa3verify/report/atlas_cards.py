"""Findings of an atlas as cards: what one page explains is one card, and all else one by kernel and symptom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fa3verify.campaign.findings import SEVERITIES, clusters, severity, symptoms, why
from fa3verify.campaign.run import Finding
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
    """The first finding of one cause of a kernel, in words, with its replay file from the page; and how many others."""

    row: Judged
    first: Finding
    words: str
    replay: str | None
    others: int


@dataclass(frozen=True, slots=True)
class Card:
    """What happens, to whom and on what input; ``known`` is the page that explains it, None where none does.

    ``lead`` is shown in full: a finding that can be replayed, and rather a kernel's than its twin's.
    """

    anchor: str
    title: str
    known: Known | None
    severity: str
    lead: Shown
    found: tuple[Shown, ...]


def cards(rows: Sequence[Judged], known: Sequence[Known]) -> list[Card]:
    """Return every cause of every kernel on a card: those without an explanation first, and the gravest of them."""
    grouped: dict[tuple[Known | None, str], list[Shown]] = {}
    for row in rows:
        for first, others in clusters(row.findings):
            shown = Shown(
                row, first, f"{first.what.told}: {first.message}", first.replay and row.path(first.replay), others
            )
            whole = f"{shown.words} | {first.case or ''}"
            found = next((each for each in known if each.explains(row.entry.name, whole)), None)
            title = found.because if found else f"{row.label}: {why(symptoms([first])[0])}"
            grouped.setdefault((found, title), []).append(shown)
    gravest = list(SEVERITIES)
    made = []
    for number, ((found, title), shown) in enumerate(grouped.items(), 1):
        lead = min(shown, key=lambda x: (x.replay is None, x.row.entry.name.startswith("twin.")))
        made.append(Card(f"finding-{number}", title, found, severity(lead.first), lead, tuple(shown)))
    return sorted(made, key=lambda card: (card.known is not None, gravest.index(card.severity)))
