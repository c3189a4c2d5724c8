"""Wrong kernels, called once: `check` with all rows finds those, and only those, that the bound of any order finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa3_kernels.faults.table import BackwardFault, Fault, faulty
from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.backward import backward
from fa3_kernels.twin.forward import forward
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme
from fa3verify import check
from fa3verify.inputs.recipe import Recipe
from fa3verify.operations.backward import Backward, GradientConfig
from fa3verify.operations.forward import Forward, ForwardConfig
from fa3verify.operations.operation import error_over_bound
from tests.harness.checking.test_check import said_of

PROBLEMS = (
    AttentionProblem(1, 4, 2, 30, 140, 64, causal=True),
    AttentionProblem(1, 2, 1, 30, 150, 64, window=(64, 7), softcap=8.0),
    AttentionProblem.varlen((1, 0, 20), (17, 5, 140), nheads=4, nheads_kv=2, head_dim=64, causal=True),
)
VALUES = Recipe("peaky", {"gain": 4.0}, 11)


def called(problem: AttentionProblem) -> Any:
    scheme = QuantScheme("head") if problem.dtype == "e4m3" else None
    return Forward().prepare(problem, Forward().draw(problem, VALUES), scheme, {}).operands


def ratio_of(operation: Any, config: Any, problem: AttentionProblem, operands: Any, got: dict[str, Any]) -> float:
    """Return the largest error over the bound of the hypothesis that fits best, as a campaign computes it."""
    arrays = operands.dequantized(problem)
    truth = operation.truth(problem, arrays, config, got)
    ratios = []
    for model in operation.hypotheses(config, "either").values():
        bound = operation.bound(problem, operands, model, got)
        ratios.append(max(np.max(error_over_bound(x, truth[name], bound[name]), initial=0) for name, x in got.items()))
    return float(min(ratios))


@pytest.mark.parametrize(
    "problem",
    [PROBLEMS[0], *(pytest.param(x, marks=pytest.mark.nightly) for x in PROBLEMS[1:])],
    ids=["causal", "window", "packed"],
)
@pytest.mark.parametrize("dtype", ["fp16", pytest.param("e4m3", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("fault", [None, *Fault], ids=lambda fault: fault.value if fault else "sound")
def test_what_the_bound_finds_in_outputs_check_finds_and_nothing_else(
    fault: Fault | None, problem: AttentionProblem, dtype: Any
) -> None:
    problem = replace(problem, dtype=dtype)
    operands = called(problem)
    config = default_config(problem)
    got = (faulty(fault) if fault else forward)(problem, operands, config)
    named = {"out": got.out, "lse": got.lse}
    is_wrong = ratio_of(Forward(), ForwardConfig(problem.dtype, config.out_dtype), problem, operands, named) > 1
    found = check(q=operands.q, k=operands.k, v=operands.v, **named, **said_of(problem, operands), rows="all")
    assert (found.verdict != "pass") == is_wrong, f"{problem}\n{found}"
    assert fault is not None or not is_wrong


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [None, *BackwardFault], ids=lambda fault: fault.value if fault else "sound")
def test_what_the_bound_finds_in_gradients_check_finds_and_nothing_else(fault: BackwardFault | None) -> None:
    for problem in PROBLEMS:
        arrays = Backward().draw(problem, VALUES)
        operands: Any = Backward().prepare(problem, arrays, None, {}).operands
        got = (faulty(fault) if fault else backward)(problem, operands, Backward().configure(problem, family="gluon"))
        named = {name: getattr(got, name) for name in ("dq", "dk", "dv")}
        ratios = [ratio_of(Backward(), GradientConfig("fp16", of), problem, operands, named) for of in ("given", "own")]
        found = check(
            *(operands.out, operands.q, operands.k, operands.v),
            **{"lse": operands.lse, "dout": operands.dout},
            **named,
            **said_of(problem, operands),
            rows="all",
        )
        assert (found.verdict != "pass") == (min(ratios) > 1), f"{problem}\n{found}"
        assert fault is not None or min(ratios) <= 1
