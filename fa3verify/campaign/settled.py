"""This module says which hypotheses about a kernel hold in all that was judged of it.

One case or one trial of a property that speaks against a hypothesis refutes it for the whole kernel. A kernel of which
no hypothesis holds is wrong, even where every case fits one: a kernel sums P before or after it is rounded, not now so
and now otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fa3verify.campaign.introduction import Introduction
from fa3verify.campaign.results import CaseResult
from fa3verify.campaign.run import Assumed, HypothesisRow, RefutedBy
from fa3verify.files import Json
from fa3verify.judging.gate import GateRow
from fa3verify.judging.hypotheses import strain
from fa3verify.judging.verdict import ratio_text, told
from fa3verify.operations import Operation

if TYPE_CHECKING:
    from fa3verify.properties.runner import LawOutcome

SCHEMA = "fa3verify.refutations/1"
RULE = "error / bound of the whole kernel"


@dataclass(frozen=True, slots=True)
class Refutation:
    """Holds what speaks most against a hypothesis: where it was found, the case or trial in JSON and on one line."""

    ratio: float
    what: str
    content: Json
    case: str

    @property
    def words(self) -> str:
        return f"{told(self.what)}, {ratio_text(self.ratio)}"


@dataclass(frozen=True, slots=True)
class Settled:
    """Hypotheses about one kernel, by name.

    Parameters
    ----------
    worst : mapping
        Largest error / bound of every case under each; infinite for an output that is not finite.
    refuted : mapping
        Those that do not hold.
    chosen : str
        The one whose figures are told: the first that holds, and where none does the one with the least largest error.
    is_at_once : bool
        Whether one case or one property refutes all of them.
    """

    worst: Mapping[str, float]
    refuted: Mapping[str, Refutation]
    chosen: str
    is_at_once: bool

    @property
    def holds(self) -> bool:
        return self.chosen not in self.refuted

    @property
    def content(self) -> Json:
        """Return what a replay judges again: everything that refutes a hypothesis, each once."""
        return refutations([refutation.content for refutation in self.refuted.values()])

    @property
    def words(self) -> str:
        """Say which case refutes which hypothesis."""
        each = (f"{name!r} is refuted by {found.words} on {found.case}" for name, found in self.refuted.items())
        return f"no hypothesis about the whole kernel holds: {'; '.join(each)}"

    def assumed(self, kernel: Introduction) -> Assumed:
        """Return what a run says of it."""
        rows = []
        for name, ratio in self.worst.items():
            found = self.refuted.get(name)
            by = found and RefutedBy(found.what, found.ratio, found.case, content=found.content)
            rows.append(HypothesisRow(name, ratio, by))
        return Assumed(kernel.sums, kernel.accumulator, self.chosen, tuple(rows))


def settle(operation: Operation, records: Sequence[CaseResult], laws: Iterable[LawOutcome] = ()) -> Settled | None:
    """Settle which hypotheses hold in judged cases, of which those that raised say nothing, and in properties; None for
    a kernel that states its order.
    """
    worst: dict[str, float] = {}
    refuted: dict[str, Refutation] = {}
    at_once = False

    def count(name: str, against: Refutation) -> None:
        worst[name] = max(worst.get(name, 0.0), against.ratio)
        if against.ratio > 1 and (name not in refuted or against.ratio > refuted[name].ratio):
            refuted[name] = against

    for record in records:
        ratios = {name: strain(operation, under.measures) for name, under in record.hypotheses.items()}
        at_once |= bool(ratios) and min(ratios.values()) > 1
        for name, ratio in ratios.items():
            what = f"family {record.family}"
            count(name, Refutation(ratio, what, record.case.to_json(), record.case.describe()))
    for law in laws:
        trials = [found[0] for found in law.hypotheses.values() if found]
        at_once |= len(trials) == len(law.hypotheses) > 0 and all(trial == trials[0] for trial in trials)
        for name, found in law.hypotheses.items():
            worst.setdefault(name, 0.0)
            if found:
                trial, violation = found
                count(name, Refutation(violation.ratio, f"law {law.law}", trial.to_json(), trial.describe()))
    if not worst:
        return None
    kept = (name for name in worst if name not in refuted)
    chosen = next(kept, None) or min(worst, key=lambda name: worst[name])
    return Settled(worst, refuted, chosen, at_once)


def refutations(contents: Sequence[Json]) -> Json:
    """Return what a replay file has of cases and trials that are judged together, each once."""
    return {"schema": SCHEMA, "contents": [x for i, x in enumerate(contents) if x not in contents[:i]]}


def judged_under(record: CaseResult, name: str) -> CaseResult:
    """Return a judged case with the figures and the order of one hypothesis."""
    under = record.hypotheses.get(name)
    return replace(record, measures=under.measures, order=under.order) if under else record


def of_one_hypothesis(operation: Operation, records: Sequence[CaseResult]) -> list[CaseResult]:
    """Return judged cases with the figures of the hypothesis that they speak least against, if there are several."""
    found = settle(operation, records)
    return [judged_under(record, found.chosen) for record in records] if found else list(records)


def whole_row(kernel: str, ratio: float, holds: bool) -> GateRow:
    """Return the gate's row about a whole kernel: the largest error / bound under one hypothesis, of properties too."""
    return GateRow("L1", RULE, kernel, "all", ratio, 1.0, None, "pass" if holds else "fail")
