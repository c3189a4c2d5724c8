"""The findings of an atlas's page as cards.

Findings that a page of ``reports/findings`` explains are one card for each page; other findings are one card for each
kernel and symptom. :mod:`fa3verify.report.atlas_page` reads the list of these pages and shows the cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fa3verify.campaign.findings import SEVERITIES, Finding, clusters, severity, symptoms, why
from fa3verify.report.atlas_tables import Judged


@dataclass(frozen=True, slots=True)
class Known:
    """A page that explains findings: which findings of which kernels, and ``because``, the title of their card.

    ``kernels`` are shell patterns of names, ``findings`` of ``WHAT: MESSAGE | CASE``, so that they can name inputs.
    """

    page: str
    kernels: tuple[str, ...]
    findings: tuple[str, ...]
    because: str

    def explains(self, kernel: str, words: str) -> bool:
        """Tell whether it explains a finding about a kernel, given as ``WHAT: MESSAGE | CASE``."""
        named = any(fnmatchcase(kernel, pattern) for pattern in self.kernels)
        return named and any(fnmatchcase(words, pattern) for pattern in self.findings)


@dataclass(frozen=True, slots=True)
class Shown:
    """The first finding of one cause of a kernel, and the number of ``others`` of the same cause.

    ``words`` are ``WHAT: MESSAGE``; ``replay`` is the path of its replay file relative to the page, None without one.
    """

    row: Judged
    first: Finding
    words: str
    replay: str | None
    others: int


@dataclass(frozen=True, slots=True)
class Card:
    """One card: a fault, and the findings that show it; ``known`` is the page that explains it, None if none does.

    ``lead`` is the finding that is shown in full: one that can be replayed if possible, and a kernel's before a twin's.
    """

    anchor: str
    title: str
    known: Known | None
    severity: str
    lead: Shown
    found: tuple[Shown, ...]


def cards(rows: Sequence[Judged], known: Sequence[Known]) -> list[Card]:
    """Return the cards of all findings: those without an explaining page first, and the gravest first among each."""
    grouped: dict[tuple[Known | None, str], list[Shown]] = {}
    for row in rows:
        for first, others in clusters(row.findings):
            shown = Shown(
                row, first, f"{first.what.told}: {first.message}", first.replay and row.path(first.replay), others
            )
            whole = f"{shown.words} | {first.case or ''}"
            page = next((each for each in known if each.explains(row.entry.name, whole)), None)
            title = page.because if page else f"{row.label}: {why(symptoms([first])[0])}"
            grouped.setdefault((page, title), []).append(shown)
    gravest = list(SEVERITIES)
    made = []
    for number, ((page, title), shown) in enumerate(grouped.items(), 1):
        lead = min(shown, key=lambda x: (x.replay is None, x.row.entry.name.startswith("twin.")))
        made.append(Card(f"finding-{number}", title, page, severity(lead.first), lead, tuple(shown)))
    return sorted(made, key=lambda card: (card.known is not None, gravest.index(card.severity)))
