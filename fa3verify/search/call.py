"""A kernel's call for a case, with what it is judged by, and its outputs before their last rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fa3_reference.formats import FORMATS, ulp
from fa3_reference.problem import AttentionProblem, Operands
from fa3verify import operations
from fa3verify.cases.case import Case
from fa3verify.judging import hypotheses
from fa3verify.kernels import calls
from fa3verify.kernels.policy import freed
from fa3verify.kernels.record import Candidate
from fa3verify.operations import Outputs


@dataclass(frozen=True, slots=True)
class HuntedCall:
    """A kernel's call for a case, and what it is judged by."""

    candidate: Candidate
    problem: AttentionProblem
    operands: Operands
    config: Any
    operation: Any = field(repr=False)

    @classmethod
    def of(cls, candidate: Candidate, case: Case) -> HuntedCall:
        """ValueError if the kernel does not take the case."""
        candidate.check_descales(case)
        if words := candidate.misfit(case.problem):
            raise ValueError(f"{candidate.name} does not take {case.describe()}: {words}")
        config = candidate.config_for(case.problem, case.changes)
        return cls(candidate, case.problem, case.operands(), config, operations.find(candidate.operation))

    @property
    def assumed(self) -> Any:
        return hypotheses.assumed(self.candidate, self.config)

    def run(self) -> dict[str, np.ndarray]:
        return calls.run(self.candidate, self.problem, self.operands, self.config)

    def truth(self) -> Outputs:
        return self.operation.truth(self.problem, self.operands.dequantized(self.problem), self.config, {})

    def bound(self, assumed: Any) -> Outputs:
        bound = self.operation.bound(self.problem, self.operands, assumed, {})
        return freed(self.candidate.policy, self.problem, bound, math.inf)


def unrounded(call: HuntedCall, truth: np.ndarray) -> dict[str, np.ndarray]:
    """Return a forward's outputs with out before its last rounding.

    Twins tell it; of any other kernel it is the number nearest the truth, float64 like out, among those that round to
    what was returned.
    """
    tell = getattr(getattr(call.candidate.run, "__self__", None), "unrounded", None)
    if tell is not None:
        return tell(call.problem, call.operands, call.config)._asdict()
    got = call.run()
    out = got["out"].astype(np.float64)
    with np.errstate(invalid="ignore"):
        half = ulp(out, FORMATS[call.config.out_dtype]) / 2
        got["out"] = np.where(np.isfinite(out), np.clip(truth, out - half, out + half), out)
    return got
