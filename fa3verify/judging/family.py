"""The record of a judged case, :class:`CaseResult`, and the pooled figures of a family of inputs, :class:`FamilyRow`.

:mod:`fa3verify.campaign.plan` makes the first in workers, :mod:`fa3verify.campaign.summary` pools them, and
:mod:`fa3verify.judging.gate` compares the pooled figures with limits. The figures of one case come from
:mod:`fa3verify.judging.metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from fa3verify.cases.case import Case
from fa3verify.cases.coverage import COVER
from fa3verify.cases.space import Point
from fa3verify.files import Json
from fa3verify.judging import bits_lost
from fa3verify.judging.sketch import Sketch
from fa3verify.operations import FORWARD, Operation
from fa3verify.records import FLAT, OLDER, OMITTED, PRIVATE
from fa3verify.text import Failure


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One judged case: its figures, or how the kernel failed.

    Parameters
    ----------
    family : str
    case : Case
    measures : dict
        Figures by name; for a kernel that states no order those under the hypothesis with the smallest error / bound.
        Empty where the kernel failed.
    quantisation : dict, optional
        What quantising the inputs did (:attr:`fa3verify.judging.judgement.Judgement.quantisation`); None where nothing
        was quantised.
    kernel, describe : str
        Name of the kernel, and the case in one line; a worker leaves both empty, and a run fills them.
    hypotheses : dict
        The largest error / bound under each hypothesis about a kernel that states no order; empty for others.
    under : dict
        The measures under each hypothesis, with the order of operations that it assumes.
    order : dict, optional
        Fields of the order of operations that the bound assumed; None where it assumes none, and where ``under`` has
        it.
    sketch : Sketch, optional
        Where the errors of a forward lie; None for other operations.
    point : dict
        The class of the case in each dimension of :mod:`fa3verify.cases.space`.
    error : Failure, optional
        How the kernel failed; None if it returned what it declares.
    """

    family: str
    case: Case
    measures: dict[str, float]
    quantisation: dict[str, float] | None = None
    _: KW_ONLY
    kernel: str = ""
    describe: str = field(default="", metadata=OLDER)
    hypotheses: dict[str, float] = field(default_factory=dict, metadata=OMITTED)
    under: dict[str, tuple[dict[str, float], Json | None]] = field(default_factory=dict, metadata=PRIVATE)
    order: Json | None = field(default=None, metadata=PRIVATE)
    sketch: Sketch | None = field(default=None, metadata=PRIVATE)
    point: Point = field(default_factory=dict, metadata=PRIVATE)
    error: Failure | None = field(default=None, metadata=PRIVATE)

    @property
    def is_compared(self) -> bool:
        """Tell whether some output was compared with a bound."""
        return self.measures["outputs"] > self.measures["unbounded"]

    @property
    def figures(self) -> dict[str, float]:
        """Its measures, and the error / bound of quantising its inputs, 0 where nothing was quantised."""
        quantisation = self.quantisation or {"bound_ratio": 0.0}
        return self.measures | {"quantisation_bound_ratio": quantisation["bound_ratio"]}


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """The pooled figures of one family of inputs.

    ``figures`` are those of :func:`pooled` by name, the number of ``cases`` among them; a figure that nothing had is
    None. ``replay`` is the file that gives them again, None until it is written. Only an atlas, which has no cases, has
    the ``seeds`` that inputs were drawn from and, in ``largest``, the case of the largest error / bound in one line.
    """

    family: str
    figures: dict[str, float | None] = field(metadata=FLAT)
    replay: str | None = None
    seeds: tuple[int, ...] = field(default=(), metadata=OMITTED)
    largest: str = field(default="", metadata=OMITTED)

    def number(self, name: str) -> float:
        """Return a figure that is never None, such as ``outputs``."""
        value = self.figures[name]
        assert value is not None
        return value

    @property
    def is_compared(self) -> bool:
        """Tell whether some output was compared with a bound."""
        return self.number("outputs") > self.number("unbounded")


@dataclass(frozen=True, slots=True)
class Figured:
    """What the rules of the gate need of a kernel: its name, operation and pooled figures by family."""

    name: str
    families: tuple[FamilyRow, ...]
    operation: str = field(default=FORWARD, metadata=OLDER)


def pooled(cases: Sequence[CaseResult], operation: Operation) -> dict[str, float | None]:
    """Pool the measures of cases of one family; a figure that no case has is None.

    Counts are added, root mean squares are over all outputs, maxima are the largest, and other figures are means. Means
    are weighted by each case's number of finite, bounded main output values, for side outputs too.
    """
    measures = [case.measures for case in cases]
    weights = [max(m["outputs"] - m["unbounded"] - m["nonfinite"], 0) for m in measures]
    total = sum(weights) or 1  # without such an output all means are 0

    def mean(key: str) -> float:
        return math.fsum(w * m[key] for w, m in zip(weights, measures, strict=True)) / total

    def root_mean(key: str) -> float:
        return math.sqrt(math.fsum(w * m[key] ** 2 for w, m in zip(weights, measures, strict=True)) / total)

    figures: dict[str, float | None] = {"cases": len(cases)}
    figures |= {key: sum(m[key] for m in measures) for key in ("outputs", "nonfinite", "unbounded")}
    of_errors = ("rms", "rmse_seen", "rmse_unrounded", "rel_rmse_seen", "rel_rmse_unrounded", "rel_rmse_ideal")
    figures |= {key: root_mean(key) for key in of_errors}
    figures["bits_lost"] = _bits_lost(case for case in cases if case.family != COVER)
    for key in ("max_error", "ulp_p99", "ulp_p999", "ulp_max", "ratio_max"):
        figures[key] = max(m[key] for m in measures)
    for side in operation.sides:
        for key in (side.figure("ratio"), side.figure("max")):
            figures[key] = max((m[key] for m in measures if key in m), default=None)
        key = side.figure("rms")
        having = [(w, m[key]) for w, m in zip(weights, measures, strict=True) if key in m]
        power = math.fsum(w * x**2 for w, x in having)
        figures[key] = math.sqrt(power / (sum(w for w, _ in having) or 1)) if having else None
    compared = [m["bits_differing"] for m in measures if "bits_differing" in m]
    figures["bits_differing"] = sum(compared) if compared else None
    if all("outside" in m for m in measures):  # only a kernel that states its order has an enclosure
        figures["outside"] = sum(m["outside"] for m in measures)
        figures |= {key: mean(key) for key in ("enclosed_median", "determined")}
    figures |= {key: mean(key) for key in ("ulp_p50", "ratio_median", "bias", "bit_equal")}
    pairs = [case.quantisation for case in cases if case.quantisation]
    predicted = math.fsum(p["predicted"] for p in pairs)
    figures["quantisation_ratio"] = (
        math.sqrt(math.fsum(p["measured"] for p in pairs) / predicted) if predicted > 0 else None
    )
    figures["quantisation_bound_ratio"] = max((p["bound_ratio"] for p in pairs), default=None)
    return figures


def family_row(cases: Sequence[CaseResult], operation: Operation) -> FamilyRow:
    """Return the row of a family from its cases, of which there is at least one and none that failed."""
    return FamilyRow(cases[0].family, pooled(cases, operation))


def _bits_lost(cases: Iterable[CaseResult]) -> float | None:
    """Return the bits that a family loses: the mean over the bounded outputs of the cases that count.

    Infinite where an output is not finite; None where no case counts or the operation does not have the figure.
    """
    measures = [case.measures for case in cases if "bits_lost" in case.measures and _counts(case.case)]
    weights = [m["outputs"] - m["unbounded"] for m in measures]
    if not sum(weights):
        return None
    return math.fsum(w * m["bits_lost"] for w, m in zip(weights, measures, strict=True) if w) / sum(weights)


def _counts(case: Case) -> bool:
    """Tell whether a case counts for bits lost: drawn with the ranking's seed, in the kernel's own output format."""
    return case.recipe.seed == bits_lost.SEED and "out_dtype" not in dict(case.changes)
