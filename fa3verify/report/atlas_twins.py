"""Kernels beside their twins in an atlas: whether both have the same verdict and bits, and if not, possible reasons.

:mod:`fa3verify.report.atlas_page` prints the pairs, and :mod:`fa3verify.report.atlas_chart` their signs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fa3verify.campaign.findings import symptoms, why
from fa3verify.report.atlas_tables import Judged, bits, differing


@dataclass(frozen=True, slots=True)
class Twinned:
    """A kernel that was judged, and the row of its twin."""

    kernel: Judged
    twin: Judged

    @property
    def mark(self) -> str:
        """Return ≠ where verdicts or bits differ, = where neither does, and ~ where no bits were compared."""
        different = differing(self.kernel.entry)
        if different or self.kernel.entry.verdict != self.twin.entry.verdict:
            return "≠"
        return "~" if different is None else "="

    @property
    def words(self) -> str:
        """Return the verdicts of both and their different bits in words, then in what the two rows differ."""
        verdicts = [row.entry.verdict for row in (self.kernel, self.twin)]
        both = f"kernel {verdicts[0]}, twin {verdicts[1]}; bits unlike the twin's: {bits(self.kernel.entry)}"
        return f"{both}; {'; '.join(_reasons(self.kernel, self.twin)) or 'no reason known'}"


def twin_of(kernel: str) -> str:
    """Return the name that the twin of a kernel has.

    >>> twin_of("gluon.fp16"), twin_of("flash3.e4m3")
    ('twin.fp16', 'twin.flash3.e4m3')
    """
    return f"twin.{kernel.removeprefix('gluon.')}"


def pairs(rows: Sequence[Judged]) -> list[Twinned]:
    """Return every kernel whose twin is among the rows; a twin judged on several machines is the first of them."""
    twins = {row.entry.name: row for row in reversed(rows)}
    return [Twinned(row, twins[name]) for row in rows if (name := twin_of(row.entry.name)) in twins]


def _reasons(kernel: Judged, twin: Judged) -> Iterator[str]:
    """Yield in words what only the kernel or only its twin has, the most telling first."""
    for (fact, mine), other in zip(_facts(kernel).items(), _facts(twin).values(), strict=True):
        for who, alone in (("kernel", mine - other), ("twin", other - mine)):
            if alone:
                yield f"only the {who} {fact}{', '.join(sorted(alone)).replace('_', ' ')}"
    if kernel.version != twin.version:
        yield f"fa3verify {kernel.version} judged the kernel and {twin.version} the twin"
    # Numbers of a library's version that a kernel and the text of its twin's version should share.
    libraries = [row.entry.introduction.identity.version or "" for row in (kernel, twin)]
    numbers = [set(re.findall(r"\d+(?:\.\d+)+", library)) for library in libraries]
    if all(numbers) and not numbers[0] & numbers[1]:
        yield f"the kernel is of {libraries[0]}, the twin a {libraries[1]}"


def _facts(row: Judged) -> dict[str, set[str]]:
    """Return what a kernel raises, declares and does not claim, by the words that a sentence puts before it."""
    entry = row.entry
    return {
        "": {why(symptom) for symptom in symptoms(row.findings) if symptom.severity == "no result"},
        "declares ": set(entry.introduction.policy),
        "does not claim ": set(entry.coverage.not_claimed if entry.coverage else ()),
    }
