"""An output that an operation declares beside its others is judged, told and compared with no further edit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging import gate, metrics
from fa3verify.judging.judgement import judge, passes
from fa3verify.kernels.record import Kernel
from fa3verify.known import registry
from fa3verify.operations import OPERATIONS, Output
from fa3verify.operations.forward import Forward
from fa3verify.properties import LAWS, run_law

PROBLEM = AttentionProblem.varlen((40, 70, 1), (200, 33, 129), nheads=2, nheads_kv=1, head_dim=64, causal=True)
FURTHER = Output(
    "second_lse",
    lambda problem, config: problem.lse_shape,
    lambda config: "fp32",
    main=False,
    optional=True,
    unit="nat",
)


class WithOneMore(Forward):
    """The forward with its lse under a second name as well."""

    outputs = (*Forward.outputs, FURTHER)

    def truth(self, problem, arrays, config, got):
        return self._twice(super().truth(problem, arrays, config, got))

    def bound(self, problem, operands, assumed, got):
        return self._twice(super().bound(problem, operands, assumed, got))

    def _twice(self, outputs):
        return {**outputs, "second_lse": outputs["lse"]}


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    """A twin that returns the further output."""
    monkeypatch.setitem(OPERATIONS, "forward", WithOneMore())
    twin = registry.find("twin.fp16")

    def run(problem, operands, config):
        out, lse = twin.code.run(problem, operands, config)
        return {"out": out, "lse": lse, "second_lse": lse}

    return replace(twin.altered(run=run), name="kernel")


def test_a_further_output_is_judged_by_its_own_bound_and_has_its_own_figures(kernel):
    judged = judge(kernel, Case("kernel", PROBLEM, Recipe("normal")))
    assert judged.measures[FURTHER.figure("ratio")] == judged.measures["ratio_lse_max"] > 0
    assert {FURTHER.figure(of) for of in ("ratio", "max", "rms")} <= metrics.measures_of(WithOneMore()).keys()
    figures = dict(judged.measures)
    assert gate.gated_figures(WithOneMore(), figures)[FURTHER.figure("max")] == figures["lse_max_error"]


def test_a_wrong_further_output_fails(kernel):
    def run(problem, operands, config):
        found = kernel.code.run(problem, operands, config)
        return found | {"second_lse": found["second_lse"] + np.float32(1)}

    wrong = kernel.altered(run=run)
    case = Case("kernel", PROBLEM, Recipe("normal"))
    assert passes(kernel, judge(kernel, case).measures)
    assert not passes(wrong, judge(wrong, case).measures)


@pytest.mark.parametrize("law", [law for law in LAWS if "forward" in law.operations], ids=lambda law: law.name)
def test_every_property_of_the_forward_takes_a_further_output(kernel, law):
    if law.applies(kernel):
        assert run_law(law, kernel, max_examples=2, seed=0).status == "pass"
