"""Settle which hypothesis about a kernel that states no order holds, over all its judged cases and trials.

The hypotheses are those of :mod:`fa3verify.judging.hypotheses`; :mod:`fa3verify.campaign.summary` calls :func:`settle`.
One case or one trial whose error leaves the bound of a hypothesis refutes it for the whole kernel. A kernel whose
hypotheses are all refuted is wrong, even where every single case fits one of them: a kernel sums P either before or
after it is rounded, and does not change between calls.
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
    """The value of a task that judges cases; ``feasible`` are the points of the covering array, if it was that."""

    records: tuple[CaseResult, ...]
    feasible: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True)
class RefutedBy:
    """The case or trial that refutes a hypothesis most clearly: what found it, its error / bound, its line and file."""

    what: What
    ratio: float
    case: str
    replay: str | None = None
    content: Json | None = field(default=None, metadata=NOT_WRITTEN)

    @property
    def words(self) -> str:
        """Return in words what found it and how large its error / bound is."""
        return f"{self.what.told}, {ratio_text(self.ratio)}"


@dataclass(frozen=True, slots=True)
class HypothesisRow:
    """A hypothesis about a kernel, the largest error / bound under it, and what refutes it; None where it holds."""

    name: str
    worst_ratio: float
    refuted_by: RefutedBy | None


@dataclass(frozen=True, slots=True)
class Assumed:
    """What the bound assumed of a kernel that states no order.

    Parameters
    ----------
    sums, accumulator : str, optional
        How products are added, in words and as the bound's accumulator; None until the campaign adds them.
    chosen : str
        The hypothesis whose figures are reported: the first that holds or, where none does, the one whose largest
        error / bound is least.
    hypotheses : tuple of HypothesisRow
        Every hypothesis; an output that is not finite counts as an infinite error / bound.
    is_at_once : bool
        Whether one case or one property refutes all of them.
    refuted : dict
        What refutes each refuted hypothesis, by name, in the order in which they were refuted.
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
        surviving = [row.name for row in self.hypotheses if not row.refuted_by]
        words = f"bound of any order, {self.sums}; surviving: {', '.join(surviving) or 'no hypothesis'}"
        refuted = [f"{row.name} ({by.words})" for row in self.hypotheses if (by := row.refuted_by)]
        return f"{words}; refuted: {', '.join(refuted)}" if refuted else words


def settle(records: Sequence[CaseResult], laws: Iterable[LawOutcome] = ()) -> Assumed | None:
    """Settle which hypotheses hold in judged cases and in the outcomes of properties.

    None for a kernel that states its order, whose records name no hypothesis. Records of cases that raised say nothing
    about any. ``sums`` and ``accumulator`` of the result are None; the caller knows them.
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
        trials = [against[0] for against in law.hypotheses.values() if against]
        at_once |= len(trials) == len(law.hypotheses) > 0 and all(trial == trials[0] for trial in trials)
        for name, against in law.hypotheses.items():
            worst.setdefault(name, 0.0)
            if against:
                trial, violation = against
                what = What(Part.LAW, law.law)
                count(name, RefutedBy(what, violation.ratio, trial.describe(), content=trial.to_json()))
    if not worst:
        return None
    surviving = (name for name in worst if name not in refuted)
    chosen = next(surviving, None) or min(worst, key=lambda name: worst[name])
    rows = tuple(HypothesisRow(name, ratio, refuted.get(name)) for name, ratio in worst.items())
    return Assumed(None, None, chosen, rows, at_once, refuted)


def contradiction(settled: Assumed) -> str:
    """Say which case refutes which hypothesis, for a kernel whose hypotheses are all refuted."""
    each = (f"{name!r} is refuted by {by.words} on {by.case}" for name, by in settled.refuted.items())
    return f"no hypothesis about the whole kernel holds: {'; '.join(each)}"


def refutations(contents: Sequence[Json]) -> Json:
    """Return the content of a replay file of cases and trials that are judged together, each once."""
    return {"schema": REFUTATIONS, "contents": [x for i, x in enumerate(contents) if x not in contents[:i]]}


def judged_under(record: CaseResult, name: str) -> CaseResult:
    """Return a judged case with the figures and the order of one hypothesis; unchanged if it has none of that name."""
    measures, order = record.under.get(name, (record.measures, record.order))
    return replace(record, measures=measures, order=order)


def of_one_hypothesis(records: Sequence[CaseResult]) -> list[CaseResult]:
    """Return judged cases with the figures of the hypothesis that :func:`settle` chooses for them together.

    Those of a kernel that states its order are returned unchanged.
    """
    settled = settle(records)
    return [judged_under(record, settled.chosen) for record in records] if settled else list(records)
