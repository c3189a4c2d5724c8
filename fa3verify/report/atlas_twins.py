"""A twin beside its kernel: whether both have the same verdict and the same bits, and why they may not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fa3verify.campaign.findings import symptoms, why
from fa3verify.report.atlas_tables import Judged, bits, differing

NO_REASON = "no reason known: both declare, claim and were judged alike"


@dataclass(frozen=True, slots=True)
class Pair:
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
        """Return what became of both, and of two that differ why, from what their rows say."""
        found = [row.entry.verdict for row in (self.kernel, self.twin)]
        told = f"kernel {found[0]}, twin {found[1]}; bits unlike the twin's: {bits(self.kernel.entry)}"
        return f"{told}; {'; '.join(_reasons(self.kernel, self.twin)) or NO_REASON}"


def twin_of(kernel: str) -> str:
    """Return the name that the twin of a kernel has.

    >>> twin_of("gluon.fp16"), twin_of("flash3.e4m3")
    ('twin.fp16', 'twin.flash3.e4m3')
    """
    return f"twin.{kernel.removeprefix('gluon.')}"


def pairs(rows: Sequence[Judged]) -> list[Pair]:
    """Return every kernel that has its twin among some rows; of a twin judged on several machines the first."""
    twins = {row.entry.kernel: row for row in reversed(rows)}
    return [Pair(row, twins[name]) for row in rows if (name := twin_of(row.entry.kernel)) in twins]


def _reasons(kernel: Judged, twin: Judged) -> Iterator[str]:
    """What the rows of a kernel and its twin do not have in common, what explains most first."""
    given = [{why(s) for s in symptoms(row.entry.listed) if s.severity == "no result"} for row in (kernel, twin)]
    for who, mine, other in _sides(*given):
        yield f"{who} {', '.join(sorted(mine - other))}"
    for who, mine, other in _sides(set(kernel.entry.policy), set(twin.entry.policy)):
        yield f"{who} declares {', '.join(sorted(mine - other)).replace('_', ' ')}"
    unclaimed = [set(row.entry.coverage.not_claimed if row.entry.coverage else ()) for row in (kernel, twin)]
    for who, mine, other in _sides(*unclaimed):
        yield f"{who} does not claim {', '.join(sorted(mine - other)).replace('_', ' ')}"
    if kernel.version != twin.version:
        yield f"fa3verify {kernel.version} judged the kernel and {twin.version} the twin"
    of_library = [set(re.findall(r"\d+(?:\.\d+)+", row.entry.identity.version or "")) for row in (kernel, twin)]
    if all(of_library) and not of_library[0] & of_library[1]:
        yield f"the kernel is of {kernel.entry.identity.version}, the twin a {twin.entry.identity.version}"


def _sides(kernel: set[str], twin: set[str]) -> Iterator[tuple[str, set[str], set[str]]]:
    """Each side that has what the other has not."""
    for who, mine, other in (("only the kernel", kernel, twin), ("only the twin", twin, kernel)):
        if mine - other:
            yield who, mine, other
