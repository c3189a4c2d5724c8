"""How a search calls any kernel: for a case, or for a whole colony of the forward.

Our own twins need none of this: :class:`fa3verify.search.forward.judge.Twin` calls them for a colony.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fa3_reference.attention import Attention
from fa3_reference.bounds import KernelModel
from fa3_reference.formats import FORMATS, ulp
from fa3_reference.problem import AttentionProblem, Operands
from fa3verify.cases.case import Case
from fa3verify.judging import hypotheses
from fa3verify.kernels import calls, twins
from fa3verify.kernels.record import Kernel
from fa3verify.operations import Outputs
from fa3verify.properties.law import Setup
from fa3verify.search.forward.colony import ForwardColony
from fa3verify.search.forward.judge import Pair, Twin


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
class Hunted(Twin):
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

    def run(self, colony: ForwardColony, config: Any, truth: Attention, *, rounded: bool) -> Pair:
        call = (self.kernel, colony.problem, colony.operands, config)
        got = calls.run(*call) if rounded else unrounded(*call, truth.out)
        return got["out"], got.get("lse", truth.lse)
