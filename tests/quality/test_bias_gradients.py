"""The gradient of a bias: right kernels of several orders keep the bound and the laws, and wrong ones break them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify import Case, Kernel, Recipe
from fa3verify.cases.space import terms
from fa3verify.judging.judgement import judge, passes
from fa3verify.properties import find_law, run_law
from tests.quality.bias_gradient_kernels import RIGHT, WRONG, by_torch, made

LAW = find_law("gradients_with_a_bias")
SHAPE = AttentionProblem(2, 4, 2, 17, 40, 64)


def failures(kernel: Kernel) -> Iterator[str]:
    """The terms with which a case fails, each under a mask in turn."""
    for i, term in enumerate(terms(kernel)):
        softcap = 2.0 if i % 3 == 2 and "softcap" in kernel.features else 0.0
        problem = replace(SHAPE, dtype=kernel.dtype, term=term, causal=i % 2 == 1, softcap=softcap)
        case = Case(kernel.name, problem, Recipe("normal", seed=i), operation="backward")
        judgement = judge(kernel, case, unrounded=False)
        if not passes(kernel, judgement.measures):
            yield term.describe()


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_gradient_of_a_bias_keeps_its_bound_and_its_laws(name):
    assert list(failures(RIGHT[name])) == []
    outcome = run_law(LAW, RIGHT[name], max_examples=12, seed=0, shrink_seconds=0)
    assert (outcome.status, outcome.violation) == ("pass", None)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gradient_of_a_bias_is_found_by_the_bound(name):
    assert next(failures(WRONG[name]))


@pytest.mark.parametrize("name", [name for name in WRONG if name != "in_16_bits"])
def test_a_wrong_gradient_of_a_bias_is_found_by_its_property(name):
    assert run_law(LAW, WRONG[name], max_examples=12, seed=0, shrink_seconds=0).status == "fail"


@pytest.mark.optional
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_gradient_of_a_bias_by_torch_keeps_its_bound_and_its_laws(dtype):
    pytest.importorskip("torch")
    kernel = made(by_torch, dtype, gradients="autograd", library="torch")
    assert list(failures(kernel)) == []
    assert run_law(LAW, kernel, max_examples=12, seed=0, shrink_seconds=0).status == "pass"


@pytest.mark.optional
def test_a_bias_without_a_gradient_is_told_and_not_held_against_a_kernel():
    pytest.importorskip("torch")

    def cut(q, k, v, *, softmax_scale, causal, bias):
        return by_torch(
            q, k, v, softmax_scale=softmax_scale, causal=causal, bias=None if bias is None else bias.detach()
        )

    kernel = made(cut, "fp32", gradients="autograd", library="torch")
    assert list(failures(kernel)) == []
    case = Case(
        kernel.name, replace(SHAPE, dtype="fp32", term=terms(kernel)[0]), Recipe("normal"), operation="backward"
    )
    assert "dbias" not in judge(kernel, case, unrounded=False).outputs
