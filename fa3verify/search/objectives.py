"""The figures that a hunt may maximise: error over bound, error over a stored baseline, the difference of two kernels.

Each is computed for a single case, and some for whole colonies of inputs, which are searched faster. Any kernel is
called for a case by :func:`call_of`, and for a colony of the forward by :class:`Hunted`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from fa3_reference.attention import Attention, attention
from fa3_reference.bounds import KernelModel
from fa3_reference.bounds.forward import ErrorBound, forward_bound
from fa3_reference.formats import FORMATS, encode, ulp
from fa3_reference.problem import DTYPES, AttentionProblem, Operands
from fa3_reference.rules import require
from fa3verify import operations
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.inputs.recipe import FAMILIES
from fa3verify.judging import gate, hypotheses
from fa3verify.judging.judgement import judge
from fa3verify.judging.metrics import other_bits
from fa3verify.kernels import calls, twins
from fa3verify.kernels.names import KernelName
from fa3verify.kernels.policy import freed
from fa3verify.kernels.record import Kernel
from fa3verify.known.registry import find
from fa3verify.operations import FORWARD, Output, Outputs
from fa3verify.operations.operation import error_over_bound
from fa3verify.properties.law import Setup
from fa3verify.search.climb import Judge, Ratios
from fa3verify.search.forward.colony import ForwardColony
from fa3verify.search.forward.guide import Guide
from fa3verify.search.forward.judge import Pair, judge as judge_colony, truth_error


def call_of(kernel: Kernel, case: Case) -> Setup:
    """Return the call that a case describes; ValueError if the kernel does not take it."""
    case.check_descales(kernel)
    if words := kernel.misfit(case.problem):
        raise ValueError(f"{kernel.name} does not take {case.describe()}: {words}")
    config = kernel.config_for(case.problem, case.changes)
    return Setup(kernel, case.problem, kernel.given(case.operands()), config)


def unrounded(kernel: Kernel, problem: AttentionProblem, operands: Operands, config: Any, truth: np.ndarray) -> Outputs:
    """Return a forward's outputs with out before its last rounding.

    A twin can run without that rounding. Any other kernel returned a rounded out; here it is replaced, in float64, by
    the number nearest the truth that rounds to it.
    """
    if isinstance(kernel.code, twins.Twin):
        return kernel.code.unrounded(problem, operands, config)._asdict()
    got = calls.run(kernel, problem, operands, config)
    out = got["out"].astype(np.float64)
    with np.errstate(invalid="ignore"):
        half = ulp(out, FORMATS[config.out_dtype]) / 2
        return got | {"out": np.where(np.isfinite(out), np.clip(truth, out - half, out + half), out)}


@dataclass(frozen=True, slots=True)
class Hunted:
    """Runs a colony on any kernel, in the configuration that the kernel chooses for the colony's problem.

    Only the number of splits is the island's, if a caller of the kernel may choose it.
    """

    kernel: Kernel

    def config(self, colony: ForwardColony) -> Any:
        splits = "num_splits" in self.kernel.changeable
        changes = (("num_splits", colony.island.num_splits),) if splits else ()
        return self.kernel.config_for(colony.problem, changes)

    def model(self, config: Any) -> KernelModel:
        return hypotheses.assumed(self.kernel, config)

    def run(self, colony: ForwardColony, config: Any, truth: Attention) -> Pair:
        got = unrounded(self.kernel, colony.problem, colony.operands, config, truth.out)
        return got["out"], got.get("lse", truth.lse)


Unit = Literal["bound", "ulp"]
LEAST_DIFFERENCE = 2.0**-10  # figure of bits that differ although their values do not, such as those of -0 and +0


class Objective(ABC):
    """Says what makes one input of a kernel better than another."""

    __slots__ = ()

    limit: ClassVar[float] = math.inf  # what a sound kernel does not exceed

    @property
    def others(self) -> tuple[Kernel, ...]:
        """Return the kernels beside the hunted one, which must take the same inputs."""
        return ()

    @property
    @abstractmethod
    def words(self) -> str:
        """Say what the figure is."""

    @abstractmethod
    def of_case(self, kernel: Kernel, case: Case) -> dict[str, float]:
        """Return the figure of each output, or of a case as a whole; ValueError where a kernel does not take it."""

    def of_colonies(self, kernel: Kernel) -> Judge | None:
        """Return what judges whole colonies of inputs, None where only cases are searched."""
        return None

    @abstractmethod
    def to_json(self) -> Json:
        """Return what :func:`objective_from` reads."""


@dataclass(frozen=True, slots=True)
class Ratio(Objective):
    """Maximises error over bound before the output is rounded for the last time; above 1 the kernel is wrong.

    If a kernel returns rounded outputs only, the error is the least that it can have had before it rounded.
    """

    limit: ClassVar[float] = 1.0

    @property
    def words(self) -> str:
        return "error / bound before the last rounding"

    def of_case(self, kernel: Kernel, case: Case) -> dict[str, float]:
        if kernel.operation != FORWARD:
            measures = judge(kernel, case, unrounded=False).measures
            names = ("ratio_max", *(n for n in measures if n.startswith("ratio_") and n.endswith("_max")))
            return {name.removesuffix("_max").removeprefix("ratio_") or "ratio": measures[name] for name in names}
        call = call_of(kernel, case)
        truth = call.truth({})
        got = unrounded(kernel, call.problem, call.operands, call.config, truth["out"])
        model = replace(hypotheses.assumed(kernel, call.config), out_dtype="fp32")
        limit = call.operation.bound(call.problem, call.operands, model, {})
        bound = freed(kernel.policy, call.problem, limit, math.inf)
        return {name: _largest(error_over_bound(x, truth[name], bound[name])) for name, x in got.items()}

    def of_colonies(self, kernel: Kernel) -> Judge | None:
        """Return error over bound of a forward kernel, where its policy promises anything."""

        def bound(problem: AttentionProblem, operands: Operands, model: KernelModel) -> ErrorBound:
            limit = forward_bound(problem, operands, model)
            return ErrorBound(**freed(kernel.policy, problem, limit._asdict(), math.inf))

        objectives = ("out", True), ("lse", False), ("lse", True), ("out", False), ("lse", True), ("lse", False)
        ratios = partial(judge_colony, bound=bound, kernel=Hunted(kernel))
        return Judge(ratios, objectives, ("out", "lse")) if kernel.operation == FORWARD else None

    def to_json(self) -> Json:
        return {"name": "ratio"}


@dataclass(frozen=True, slots=True)
class OverBaseline(Objective):
    """Maximises relative RMSE over the one that a stored baseline has for the same family of inputs.

    The error is against the operands as the kernel sees them. Only cases are searched, because each belongs to a family
    of inputs. A forward kernel that the baseline lacks is compared with our own twin of its dtype.
    """

    baseline: gate.Baseline

    @property
    def words(self) -> str:
        return f"relative RMSE / that of its family in the {self.baseline.profile} baseline"

    def of_case(self, kernel: Kernel, case: Case) -> dict[str, float]:
        distribution = case.recipe.distribution
        names = [family.name for family in FAMILIES if family.distribution == distribution]
        stored = self.baseline.figures(kernel.name, names[0]) if names else None
        if stored is None and names and kernel.operation == FORWARD:
            stored = self.baseline.figures(f"twin.{kernel.dtype}", names[0])
        if stored is None or not stored["rel_rmse_seen"] > 0:
            raise ValueError(f"the baseline has no figure of {kernel.name} for {distribution}")
        measures = judge(kernel, case, unrounded=False).measures
        lost = math.inf if measures["nonfinite"] else 0.0
        return {"rel_rmse": max(lost, measures["rel_rmse_seen"] / stored["rel_rmse_seen"])}

    def to_json(self) -> Json:
        return {"name": "baseline", "baseline": asdict(self.baseline)}


@dataclass(frozen=True, slots=True)
class Difference(Objective):
    """Maximises |a - b| of the outputs of two kernels, in ulp of the larger one or over the first one's error bound.

    Bits that differ count as :data:`LEAST_DIFFERENCE` at least; NaN differs from every number without limit.
    """

    against: Kernel
    unit: Unit = "bound"

    @property
    def words(self) -> str:
        return f"difference from {self.against.name} in {'ulp' if self.unit == 'ulp' else 'bounds'}"

    @property
    def others(self) -> tuple[Kernel, ...]:
        return (self.against,)

    def of_case(self, kernel: Kernel, case: Case) -> dict[str, float]:
        call = call_of(kernel, case)
        other = call_of(self.against, case)
        a = call.run()
        b = other.run()
        bound = call.bound() if self.unit == "bound" else None
        return {
            o.name: _largest(self.heights(o, (a[o.name], b[o.name]), bound and bound[o.name], call.config))
            for o in call.operation.outputs
            if o.name in a and o.name in b
        }

    def heights(self, output: Output, pair: tuple[np.ndarray, np.ndarray], bound: Any, config: Any) -> np.ndarray:
        """Return the difference of every element of a pair of outputs, float64: over ``bound``, in ulp where it is
        None.
        """
        a, b = pair
        if bound is not None:
            return error_over_bound(a, b.astype(np.float64), bound)
        fmt = FORMATS[output.format(config)]
        x = a.astype(np.float64)
        y = b.astype(np.float64)
        with np.errstate(all="ignore"):
            away = np.abs(x - y) / ulp(np.maximum(np.abs(x), np.abs(y)), fmt)
        figures = np.where(np.isfinite(away), np.maximum(away, LEAST_DIFFERENCE), np.inf)
        return np.where(other_bits(a, b), figures, 0.0)

    def of_colonies(self, kernel: Kernel) -> Judge | None:
        """Return what judges by the difference of two forward kernels.

        What climbs, ``rest``, is the difference before the last rounding, which has a slope where stored outputs agree;
        what is kept and told, ``out``, is that of stored outputs.
        """
        ratios = partial(self._of_colony, Hunted(kernel))
        objectives = ("rest", True), ("lse", True), ("rest", False), ("lse", False)
        return Judge(ratios, objectives, ("out", "lse"), math.inf) if kernel.operation == FORWARD else None

    @np.errstate(all="ignore")
    def _of_colony(self, kernel: Hunted, colony: ForwardColony, guide: Guide | None = None) -> Ratios:
        """Return how far the two kernels are apart on every individual."""
        config = kernel.config(colony)
        truth = attention(colony.problem, *colony.operands.dequantized(colony.problem))
        a, b = (side.run(colony, side.config(colony), truth) for side in (kernel, Hunted(self.against)))
        limit = forward_bound(colony.problem, colony.operands, kernel.model(config))
        outputs = {o.name: o for o in operations.find(FORWARD).outputs}
        fmt = FORMATS[config.out_dtype]
        stored = encode(a[0].astype(np.float64), fmt, "ieee"), encode(b[0].astype(np.float64), fmt, "ieee")
        slope = np.abs(a[0].astype(np.float64) - b[0].astype(np.float64)) / limit.out
        unit = self.unit == "bound"
        told = self.heights(outputs["out"], stored, limit.out if unit else None, config)
        lse = self.heights(outputs["lse"], (a[1], b[1]), limit.lse if unit else None, config)
        rows = colony.island.problems
        size = truth_error(colony, truth.lse.reshape(-1))[0]
        relative = np.log2(limit.out.reshape(rows, -1) / size)
        slope, told = (np.where(np.isnan(x), np.inf, x).reshape(rows, -1) for x in (slope, told))
        return {
            "out": told,
            "lse": lse.reshape(-1),
            "rest": np.maximum(slope, told),
            "rest_bound": relative,
            "lse_bound": np.log2(limit.lse).reshape(-1),
        }

    def to_json(self) -> Json:
        return {"name": "difference", "against": self.against.name, "unit": self.unit}


def objective_of(kernel: str, name: str, against: str | None, unit: Unit, baseline: Path | None) -> Objective:
    """Return what the options of hunt say is maximised; ValueError for options that do not go together."""
    require((name == "difference") == (against is not None), "--objective difference goes with --against KERNEL")
    require(baseline is None or name == "baseline", "--baseline goes with --objective baseline")
    if name == "baseline":
        stored = gate.read_baseline(baseline) if baseline else gate.shipped_baseline("quick", 0)
        if stored is None:
            raise ValueError("no baseline ships with this installation: name one by --baseline")
        # A kernel without figures of its own is compared with the twin of its dtype.
        own = {str(KernelName.parse(kernel).sound), *(f"twin.{dtype}" for dtype in DTYPES)}
        kernels = {name: figures for name, figures in stored.kernels.items() if name in own}
        return OverBaseline(replace(stored, kernels=kernels))
    return Ratio() if against is None else Difference(find(against), unit)


def objective_from(values: Json) -> Objective:
    """Read what ``to_json`` wrote; ValueError names what is wrong with a damaged or foreign one."""
    try:
        match values["name"]:
            case "ratio":
                return Ratio()
            case "baseline":
                return OverBaseline(gate.Baseline(**values["baseline"]))
            case "difference":
                return Difference(find(values["against"]), values["unit"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"an objective is incomplete or damaged: {error}") from None
    raise ValueError(f"objective must be ratio, baseline or difference, got {values['name']!r}")


def _largest(heights: np.ndarray) -> float:
    return float(np.max(heights, initial=0.0))
