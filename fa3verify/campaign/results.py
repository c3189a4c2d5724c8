"""What tasks give, as a worker returns it and a journal or a shard keeps it, and what it refutes.

One case or one trial of a property that speaks against a hypothesis refutes it for the whole kernel. A kernel of which
no hypothesis holds is wrong, even where every case fits one: a kernel sums P before or after it is rounded, not now so
and now otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from fa3verify.cases.space import Point
from fa3verify.files import Json
from fa3verify.judging.family import CaseResult
from fa3verify.judging.verdict import Part, What, ratio_text
from fa3verify.properties import LawOutcome
from fa3verify.records import NOT_WRITTEN

REFUTATIONS = "fa3verify.refutations/1"  # schema of what is judged together again


@dataclass(frozen=True, slots=True)
class JudgedCases:
    """Holds what judging cases gave; ``feasible`` are the points of all rows of a covering array."""

    records: tuple[CaseResult, ...]
    feasible: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True)
class RefutedBy:
    """Holds what speaks most against a hypothesis: where it was found, error / bound, the case, its replay file."""

    what: What
    ratio: float
    case: str
    replay: str | None = None
    content: Json | None = field(default=None, metadata=NOT_WRITTEN)

    @property
    def words(self) -> str:
        """Say where it was found, and how large it is."""
        return f"{self.what.told}, {ratio_text(self.ratio)}"


@dataclass(frozen=True, slots=True)
class HypothesisRow:
    """A hypothesis about a kernel, its largest error / bound, and what refutes it, None where it holds."""

    name: str
    worst_ratio: float
    refuted_by: RefutedBy | None


@dataclass(frozen=True, slots=True)
class Assumed:
    """Holds what the bound of a kernel without an order assumed: its sums, in words, and one of several hypotheses.

    Parameters
    ----------
    chosen : str
        The hypothesis whose figures are told: the first that holds, and where none does the one with the least largest
        error.
    hypotheses : tuple of HypothesisRow
        Infinite is the error / bound of an output that is not finite.
    is_at_once : bool
        Whether one case or one property refutes all of them.
    refuted : dict
        What refutes hypotheses, by their names, in the order in which it was found.
    """

    sums: str | None
    accumulator: str | None
    chosen: str
    hypotheses: tuple[HypothesisRow, ...]
    is_at_once: bool = field(default=False, metadata=NOT_WRITTEN)
    refuted: dict[str, RefutedBy] = field(default_factory=dict, metadata=NOT_WRITTEN)

    @property
    def words(self) -> str:
        """Say which hypotheses hold, and what refutes the others."""
        kept = [row.name for row in self.hypotheses if not row.refuted_by]
        words = f"bound of any order, {self.sums}; surviving: {', '.join(kept) or 'no hypothesis'}"
        refuted = [f"{row.name} ({by.words})" for row in self.hypotheses if (by := row.refuted_by)]
        return f"{words}; refuted: {', '.join(refuted)}" if refuted else words


def settle(records: Sequence[CaseResult], laws: Iterable[LawOutcome] = ()) -> Assumed | None:
    """Settle which hypotheses hold in judged cases, of which those that raised say nothing, and in properties; None for
    a kernel that states its order. Nothing is said of the sums.
    """
    worst: dict[str, float] = {}
    refuted: dict[str, RefutedBy] = {}
    at_once = False

    def count(name: str, against: RefutedBy) -> None:
        worst[name] = max(worst.get(name, 0.0), against.ratio)
        if against.ratio > 1 and (name not in refuted or against.ratio > refuted[name].ratio):
            refuted[name] = against

    for record in records:
        at_once |= min(record.hypotheses.values(), default=0.0) > 1
        for name, ratio in record.hypotheses.items():
            what = What(Part.FAMILY, record.family)
            count(name, RefutedBy(what, ratio, record.case.describe(), content=record.case.to_json()))
    for law in laws:
        trials = [found[0] for found in law.hypotheses.values() if found]
        at_once |= len(trials) == len(law.hypotheses) > 0 and all(trial == trials[0] for trial in trials)
        for name, found in law.hypotheses.items():
            worst.setdefault(name, 0.0)
            if found:
                trial, violation = found
                what = What(Part.LAW, law.law)
                count(name, RefutedBy(what, violation.ratio, trial.describe(), content=trial.to_json()))
    if not worst:
        return None
    kept = (name for name in worst if name not in refuted)
    chosen = next(kept, None) or min(worst, key=lambda name: worst[name])
    rows = tuple(HypothesisRow(name, ratio, refuted.get(name)) for name, ratio in worst.items())
    return Assumed(None, None, chosen, rows, at_once, refuted)


def contradiction(settled: Assumed) -> str:
    """Say of a kernel of which no hypothesis holds which case refutes which."""
    each = (f"{name!r} is refuted by {by.words} on {by.case}" for name, by in settled.refuted.items())
    return f"no hypothesis about the whole kernel holds: {'; '.join(each)}"


def refutations(contents: Sequence[Json]) -> Json:
    """Return what a replay file has of cases and trials that are judged together, each once."""
    return {"schema": REFUTATIONS, "contents": [x for i, x in enumerate(contents) if x not in contents[:i]]}


def judged_under(record: CaseResult, name: str) -> CaseResult:
    """Return a judged case with the figures and the order of one hypothesis."""
    measures, order = record.under.get(name, (record.measures, record.order))
    return replace(record, measures=measures, order=order)


def of_one_hypothesis(records: Sequence[CaseResult]) -> list[CaseResult]:
    """Return judged cases with the figures of the hypothesis that they speak least against, if there are several."""
    found = settle(records)
    return [judged_under(record, found.chosen) for record in records] if found else list(records)
