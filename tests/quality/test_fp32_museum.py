"""Kernels of binary32 operands: right ones of every order pass, and each wrong one is found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")  # gradients, and the kernels that use it

from fa3_reference.bounds import BackwardModel, KernelModel
from fa3_reference.problem import AttentionProblem, Dtype
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import judge, passes
from fa3verify.kernels.functions import array_kernel, torch_kernel
from fa3verify.kernels.loading import load
from fa3verify.kernels.policy import Policy
from fa3verify.kernels.record import Kernel
from fa3verify.known import cpu
from fa3verify.operations.operation import Accumulator
from fa3verify.properties import find_law, run_law
from tests.quality.fp32_gradient_search import searched
from tests.quality.fp32_kernels import BF16, FP16, RIGHT, TF32, WRONG, as_it_is, attend, product, silent, tf32

PROBLEMS = (
    AttentionProblem(1, 4, 2, 33, 77, 64, causal=True, dtype="fp32"),
    AttentionProblem(2, 2, 2, 9, 130, 96, dtype="fp32"),  # a scale that is no power of two
    AttentionProblem(1, 1, 1, 40, 200, 128, softmax_scale=0.3, dtype="fp32"),
)
RECIPES = tuple(
    Recipe(name, settings, seed)
    for seed, (name, settings) in enumerate(
        (
            ("normal", {}),
            ("peaky", {}),
            ("cancelling_v", {}),
            ("huge", {}),
            ("tiny", {}),
            ("subnormals", {}),
            ("level", {"nats": -4e4}),
            ("outlier_channels", {"ratio": 1000.0}),
            ("ties", {"distinct": 1}),
        )
    )
)
LAWS = ("softmax_shift_invariance", "empty_rows_are_zero", "a_lone_key_returns_its_value", "constant_values_come_back")
GRADIENTS = AttentionProblem(1, 2, 1, 17, 70, 64, dtype="fp32")

pytestmark = [
    pytest.mark.usefixtures("shared_references"),  # the wrong kernel is given what the right one was
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def kernel_of(steps: dict[str, Any], **facts: Any) -> Kernel:
    (kernel,) = array_kernel(silent(attend, **steps), name="mine", dtypes=("fp32",), **facts)
    return kernel


def findings(kernel: Kernel, laws: tuple[str, ...] = LAWS) -> Iterator[str]:
    for problem in PROBLEMS:
        for recipe in RECIPES:
            if kernel.supports(problem):
                measures = judge(kernel, Case(kernel.name, problem, recipe), unrounded=False).measures
                if not passes(kernel, measures):
                    yield f"{recipe.describe()}: {measures['ratio_max']}, {measures.get('ratio_lse_max')}"
    for name in laws:
        outcome = run_law(find_law(name), kernel, max_examples=8, seed=0, shrink_seconds=0)
        if outcome.violation:
            yield f"{name}: {outcome.violation.message}"


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_order_in_binary32_passes(name: str) -> None:
    assert not list(findings(kernel_of(RIGHT[name])))


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_in_binary32_is_found(name: str) -> None:
    found = next(findings(kernel_of(WRONG[name])), "")
    assert found
    assert "Error" not in found


@pytest.mark.parametrize("name", TF32)
def test_tf32_is_wrong_where_it_is_not_declared_and_the_finding_names_the_declaration(name: str) -> None:
    found = list(findings(kernel_of(TF32[name]), ("error_within_bound",)))
    assert any(text.startswith("normal") for text in found)
    assert 'accumulator="tf32" is not declared' in found[-1]
    assert not list(findings(kernel_of(TF32[name], accumulator="tf32")))


@pytest.mark.parametrize("name", [name for name in WRONG if "fp16" not in name and name != "P in bf16"])
def test_tf32_excuses_no_other_mistake(name: str) -> None:
    assert list(findings(kernel_of({"operand": tf32} | WRONG[name], accumulator="tf32")))


def test_attention_of_torch_in_binary32_passes() -> None:
    top_left = {"policy": Policy(causal="top_left", special_values="visible"), "min_seqlen": 1}
    for function in (cpu.torch_math, cpu.torch_flash):
        (kernel,) = torch_kernel(function, dtypes=("fp32",), **top_left)
        assert not list(findings(kernel, LAWS[:2]))
    assert not list(findings(load("tests.quality.fp32_user:eager")))
    assert not list(findings(load("tests.quality.fp32_user:online")))


def gradients(q: Any, k: Any, v: Any, dout: Any, *_: Any, softmax_scale: float, causal: bool, **step: Any) -> Any:
    """Gradients in numpy, of a forward of their own; ``step`` is what is done to P and dS, or to products."""
    rounds, operand = step.get("rounds", as_it_is), step.get("operand", as_it_is)
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    s = product(q, k.swapaxes(2, 3), operand) * np.float32(softmax_scale)
    if causal:
        rows, keys = s.shape[2:]
        s = np.where(np.tri(rows, keys, keys - rows, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p = rounds(p / p.sum(-1, keepdims=True))
    dp = product(dout, v.swapaxes(2, 3), operand)
    ds = rounds(p * (dp - (p * dp).sum(-1, keepdims=True)))
    dq = product(ds, k, operand) * np.float32(softmax_scale)
    dk = product(ds.swapaxes(2, 3), q, operand) * np.float32(softmax_scale)
    dv = product(p.swapaxes(2, 3), dout, operand)
    batch, heads, rows, _ = k.shape
    return dq, *(x.reshape(batch, heads // group, group, rows, -1).sum(2) for x in (dk, dv))


def wrong_gradients(kernel: Kernel) -> list[str]:
    return [
        recipe.describe()
        for recipe in (*RECIPES[:4], *RECIPES[7:])
        for problem in (GRADIENTS, replace(GRADIENTS, seqlen_q=40, seqlen_k=40, causal=True))
        if not passes(kernel, judge(kernel, Case(kernel.name, problem, recipe, operation="backward")).measures)
    ]


def gradient_kernel(accumulator: Any = None, **step: Any) -> Kernel:
    function = partial(gradients, **step)
    (kernel,) = array_kernel(function, name="mine", dtypes=("fp32",), gradients="own", accumulator=accumulator)
    return kernel


def test_right_gradients_in_binary32_pass_and_mistakes_are_found() -> None:
    (math,) = torch_kernel(cpu.torch_math, dtypes=("fp32",), gradients="autograd", policy=Policy(causal="top_left"))
    assert not wrong_gradients(math)
    assert not wrong_gradients(gradient_kernel())
    assert not wrong_gradients(gradient_kernel("tf32", operand=tf32))
    assert wrong_gradients(gradient_kernel(operand=tf32))
    assert wrong_gradients(gradient_kernel(rounds=BF16))
    assert wrong_gradients(gradient_kernel(rounds=FP16))


def test_no_problem_that_is_bred_takes_legal_gradients_beyond_their_bound() -> None:
    """12,000 by python -m tests.quality.fp32_gradient_search."""
    worst = searched(120)[0]
    assert 0.1 < worst.ratio <= 1, f"{worst.order}: {worst.ratio:.3g} at {worst.problem}"


def test_an_accumulator_is_one_that_the_operands_have() -> None:
    pairs: tuple[tuple[Dtype, Accumulator], ...] = (("fp32", "wgmma"), ("fp32", "either"), ("bf16", "tf32"))
    for dtype, accumulator in pairs:
        with pytest.raises(ValueError, match=f"accumulator of {dtype} operands must be"):
            array_kernel(attend, dtypes=(dtype,), accumulator=accumulator)
        for model in (KernelModel(dtype, "fp32", accumulator="fp32"), BackwardModel(dtype, accumulator="fp32")):
            with pytest.raises(ValueError, match=f"accumulator of {dtype} operands must be"):
                replace(model, accumulator=accumulator)
