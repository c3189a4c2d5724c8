"""Any forward kernel as what a colony is run on, and the difference of two kernels as what climbs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fa3_reference.attention import attention
from fa3_reference.bounds import KernelModel
from fa3_reference.bounds.forward import ErrorBound, forward_bound
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, Operands
from fa3verify import operations
from fa3verify.judging import hypotheses
from fa3verify.kernels.policy import freed
from fa3verify.kernels.record import Candidate
from fa3verify.search.call import HuntedCall, unrounded
from fa3verify.search.forward.colony import Colony
from fa3verify.search.forward.guide import Guide
from fa3verify.search.forward.judge import Bound, ColonyRatios, ErrorOverBound, Judge, Objectives, truth_error

if TYPE_CHECKING:
    from fa3verify.search.objectives import Difference


@dataclass(frozen=True, slots=True)
class Hunted:
    """A candidate as a colony's kernel, in its own configuration for the colony's problem.

    ``changes`` of it are those of an island whose splits a caller chooses.
    """

    candidate: Candidate

    def config(self, colony: Colony) -> Any:
        island = colony.island
        splits = "num_splits" in self.candidate.changeable
        return self.candidate.config_for(colony.problem, (("num_splits", island.num_splits),) if splits else ())

    def model(self, config: Any) -> KernelModel:
        return hypotheses.assumed(self.candidate, config)

    def run(self, colony: Colony, config: Any, *, rounded: bool) -> tuple[np.ndarray, np.ndarray]:
        problem = colony.problem
        operands = colony.operands
        call = HuntedCall(self.candidate, problem, operands, config, operations.find(self.candidate.operation))
        truth = attention(problem, *operands.dequantized(problem))
        got = call.run() if rounded else unrounded(call, truth.out)
        return got["out"], got.get("lse", truth.lse)


def over_bound(candidate: Candidate) -> Judge:
    """Return error over bound of a forward kernel, where its policy promises anything."""

    def bound(problem: AttentionProblem, operands: Operands, model: KernelModel) -> ErrorBound:
        limit = forward_bound(problem, operands, model)
        return ErrorBound(**freed(candidate.policy, problem, limit._asdict(), math.inf))

    objectives = ("out", True), ("lse", False), ("lse", True), ("out", False), ("lse", True), ("lse", False)
    return ErrorOverBound(bound, Hunted(candidate), objectives, ("out", "lse"))


@dataclass(frozen=True, slots=True)
class DifferenceOfColonies:
    """Says how far two forward kernels are apart on every individual.

    What climbs, ``rest``, is the difference before the last rounding, which has a slope where stored outputs agree;
    what is kept and told, ``out``, is that of stored outputs.
    """

    kernel: Hunted
    other: Hunted
    objective: Difference
    bound: Bound = forward_bound
    objectives: Objectives = (("rest", True), ("lse", True), ("rest", False), ("lse", False))
    records: tuple[str, ...] = ("out", "lse")
    limit: ClassVar[float] = math.inf

    def __call__(self, colony: Colony, guide: Guide | None = None) -> ColonyRatios:
        config = self.kernel.config(colony)
        with np.errstate(all="ignore"):
            a, b = (side.run(colony, side.config(colony), rounded=False) for side in (self.kernel, self.other))
            limit = self.bound(colony.problem, colony.operands, self.kernel.model(config))
            outputs = {o.name: o for o in operations.find(self.kernel.candidate.operation).outputs}
            fmt = FORMATS[config.out_dtype]
            stored = encode(a[0].astype(np.float64), fmt, "ieee"), encode(b[0].astype(np.float64), fmt, "ieee")
            slope = np.abs(a[0].astype(np.float64) - b[0].astype(np.float64)) / limit.out
            unit = self.objective.unit == "bound"
            told = self.objective.heights(outputs["out"], stored, limit.out if unit else None, config)
            lse = self.objective.heights(outputs["lse"], (a[1], b[1]), limit.lse if unit else None, config)
            rows = colony.island.problems
            size = truth_error(colony, lse.reshape(-1))[0]
            relative = np.log2(limit.out.reshape(rows, -1) / size)
            slope, told = (np.where(np.isnan(x), np.inf, x).reshape(rows, -1) for x in (slope, told))
            climbs = np.maximum(slope, told)
            lse_bound = np.log2(limit.lse).reshape(-1)
            return ColonyRatios(told, told, lse.reshape(-1), climbs, relative, relative, lse_bound)

    def published(self, colony: Colony, name: str) -> np.ndarray:
        return getattr(self(colony), name)


def difference(candidate: Candidate, objective: Difference) -> Judge:
    """Return what climbs the difference of two forward kernels."""
    return DifferenceOfColonies(Hunted(candidate), Hunted(objective.against), objective)
