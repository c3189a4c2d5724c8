"""What tasks give, as a worker returns it and a journal or a shard keeps it, and what it refutes.

One case or one trial of a property that speaks against a hypothesis refutes it for the whole kernel. A kernel of which
no hypothesis holds is wrong, even where every case fits one: a kernel sums P before or after it is rounded, not now so
and now otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fa3verify.campaign.run import Assumed, HypothesisRow, RefutedBy
from fa3verify.cases.space import Point
from fa3verify.files import Json
from fa3verify.judging.family import CaseFigures
from fa3verify.judging.hypotheses import strain
from fa3verify.judging.sketch import Sketch
from fa3verify.operations import Operation

if TYPE_CHECKING:
    from fa3verify.properties.runner import LawOutcome

REFUTATIONS = "fa3verify.refutations/1"  # schema of what is judged together again


@dataclass(frozen=True, slots=True)
class UnderHypothesis:
    """Measures of a case under one hypothesis about a kernel that states no order, and the order that it says."""

    measures: dict[str, float]
    order: Json | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult(CaseFigures):
    """Holds what judging one case gave.

    Parameters
    ----------
    order : dict, optional
        Fields of the order of operations that the bound assumed; None where it assumes none.
    sketch : Sketch, optional
        Where the errors of a forward lie.
    hypotheses : dict
        Of a kernel that states no order, whose ``measures`` are those under the hypothesis that the case speaks least
        against.
    point : dict
        Classes of the case by dimension.
    error : str, optional
        What the kernel raised instead, so that there are no measures, with its ``traceback``.
    """

    order: Json | None = None
    sketch: Sketch | None = None
    hypotheses: dict[str, UnderHypothesis] = field(default_factory=dict)
    point: Point = field(default_factory=dict)
    error: str | None = None
    traceback: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class JudgedCases:
    """Holds what judging cases gave; ``feasible`` are the points of all rows of a covering array."""

    records: tuple[CaseResult, ...]
    feasible: tuple[Point, ...] = ()


def settle(operation: Operation, records: Sequence[CaseResult], laws: Iterable[LawOutcome] = ()) -> Assumed | None:
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
        ratios = {name: strain(operation, under.measures) for name, under in record.hypotheses.items()}
        at_once |= bool(ratios) and min(ratios.values()) > 1
        for name, ratio in ratios.items():
            what = f"family {record.family}"
            count(name, RefutedBy(what, ratio, record.case.describe(), content=record.case.to_json()))
    for law in laws:
        trials = [found[0] for found in law.hypotheses.values() if found]
        at_once |= len(trials) == len(law.hypotheses) > 0 and all(trial == trials[0] for trial in trials)
        for name, found in law.hypotheses.items():
            worst.setdefault(name, 0.0)
            if found:
                trial, violation = found
                count(name, RefutedBy(f"law {law.law}", violation.ratio, trial.describe(), content=trial.to_json()))
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
    under = record.hypotheses.get(name)
    return replace(record, measures=under.measures, order=under.order) if under else record


def of_one_hypothesis(operation: Operation, records: Sequence[CaseResult]) -> list[CaseResult]:
    """Return judged cases with the figures of the hypothesis that they speak least against, if there are several."""
    found = settle(operation, records)
    return [judged_under(record, found.chosen) for record in records] if found else list(records)
