"""What tasks give: judged cases as a worker returns them and a journal or a shard keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fa3verify.cases.space import Point
from fa3verify.files import Json
from fa3verify.judging.family import CaseFigures
from fa3verify.judging.sketch import Sketch


@dataclass(frozen=True, slots=True)
class UnderHypothesis:
    """Measures of a case under one hypothesis about a kernel that states no order, and the order that it says."""

    measures: dict[str, float]
    order: Json | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult(CaseFigures):
    """What judging one case gave.

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
class CoverResult:
    """What judging a covering array gave; ``feasible`` are the points of all its rows."""

    feasible: tuple[Point, ...] = ()
    records: tuple[CaseResult, ...] = ()
