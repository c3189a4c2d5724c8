"""Any kernel as what is searched: its call for a case, or for a forward's colony, and what it is judged by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa3_reference.attention import Attention
from fa3_reference.bounds import KernelModel
from fa3_reference.formats import FORMATS, ulp
from fa3_reference.problem import AttentionProblem, Operands
from fa3verify import operations
from fa3verify.cases.case import Case
from fa3verify.judging import hypotheses
from fa3verify.kernels import calls
from fa3verify.kernels.policy import freed
from fa3verify.kernels.record import Candidate
from fa3verify.operations import Operation, Outputs
from fa3verify.search.forward.colony import ForwardColony
from fa3verify.search.forward.judge import Pair, Twin


@dataclass(frozen=True, slots=True)
class HuntedCall:
    """A kernel's call for a case, and what it is judged by."""

    candidate: Candidate
    problem: AttentionProblem
    operands: Operands
    config: Any

    @classmethod
    def of(cls, candidate: Candidate, case: Case) -> HuntedCall:
        """ValueError if the kernel does not take the case."""
        candidate.check_descales(case)
        if words := candidate.misfit(case.problem):
            raise ValueError(f"{candidate.name} does not take {case.describe()}: {words}")
        return cls(candidate, case.problem, case.operands(), candidate.config_for(case.problem, case.changes))

    @property
    def operation(self) -> Operation:
        return operations.find(self.candidate.operation)

    @property
    def assumed(self) -> Any:
        return hypotheses.assumed(self.candidate, self.config)

    def run(self) -> dict[str, np.ndarray]:
        return calls.run(self.candidate, self.problem, self.operands, self.config)

    def unrounded(self, truth: np.ndarray) -> dict[str, np.ndarray]:
        """Return a forward's outputs with out before its last rounding.

        Twins tell it; of any other kernel it is the number nearest the truth, float64 like out, among those that round
        to what was returned.
        """
        tell = getattr(getattr(self.candidate.run, "__self__", None), "unrounded", None)
        if tell is not None:
            return tell(self.problem, self.operands, self.config)._asdict()
        got = self.run()
        out = got["out"].astype(np.float64)
        with np.errstate(invalid="ignore"):
            half = ulp(out, FORMATS[self.config.out_dtype]) / 2
            got["out"] = np.where(np.isfinite(out), np.clip(truth, out - half, out + half), out)
        return got

    def truth(self) -> Outputs:
        return self.operation.truth(self.problem, self.operands.dequantized(self.problem), self.config, {})

    def bound(self, assumed: Any) -> Outputs:
        bound = self.operation.bound(self.problem, self.operands, assumed, {})
        return freed(self.candidate.policy, self.problem, bound, math.inf)


@dataclass(frozen=True, slots=True)
class Hunted(Twin):
    """A candidate as what a colony is run on, in its own configuration for the colony's problem.

    The changes of that are those of an island whose splits a caller chooses.
    """

    candidate: Candidate

    def config(self, colony: ForwardColony) -> Any:
        splits = "num_splits" in self.candidate.changeable
        changes = (("num_splits", colony.island.num_splits),) if splits else ()
        return self.candidate.config_for(colony.problem, changes)

    def model(self, config: Any) -> KernelModel:
        return hypotheses.assumed(self.candidate, config)

    def run(self, colony: ForwardColony, config: Any, truth: Attention, *, rounded: bool) -> Pair:
        call = HuntedCall(self.candidate, colony.problem, colony.operands, config)
        got = call.run() if rounded else call.unrounded(truth.out)
        return got["out"], got.get("lse", truth.lse)
