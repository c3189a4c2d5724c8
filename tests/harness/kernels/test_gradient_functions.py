"""A user's gradients: a function of arrays is given what it needs, and judged by the forward that it says."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from fa3_reference.attention import Attention, attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.problem import AttentionProblem
from fa3verify.cases import space
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import judge, passes
from fa3verify.kernels.functions import array_kernel, torch_kernel
from fa3verify.kernels.names import declaring
from fa3verify.kernels.policy import Policy
from fa3verify.properties import LAWS, run_law
from tests.harness.kernels import sinks_gradients

PROBLEM = AttentionProblem(2, 4, 2, 9, 33, 64, causal=True)


def gradients(*given_arrays, softmax_scale, causal, layout="bhsd", own=False):
    """Float64 gradients of arrays, rounded once, of the out and lse that are given or of exact ones."""
    *given_arrays, lse = given_arrays
    arrays = [(x.swapaxes(1, 2) if layout == "bhsd" else x).astype(np.float64) for x in given_arrays]
    batch, rows, heads, width = arrays[0].shape
    problem = AttentionProblem(
        batch, heads, arrays[1].shape[2], rows, arrays[1].shape[1], width, causal=causal, softmax_scale=softmax_scale
    )
    given = attention(problem, *arrays[:3]) if own else Attention(arrays[4], lse)
    found = (x.astype(given_arrays[0].dtype) for x in attention_bwd(problem, *arrays[:4], given))
    return tuple(x.swapaxes(1, 2) if layout == "bhsd" else x for x in found)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kind", ["given", "own"])
def test_gradients_of_arrays_are_judged_in_their_own_layout(kind, layout):
    def mine(*arrays, **options):
        return gradients(*arrays, **options, layout=layout, own=kind == "own")

    (kernel,) = array_kernel(mine, gradients=kind, layout=layout)
    assert kernel.name == "mine.backward.fp16"
    measures = judge(kernel, Case(kernel.name, PROBLEM, Recipe("normal"), operation="backward")).measures
    assert passes(kernel, measures)
    assert measures["bit_equal"] == 1


def averaging(*arrays, softmax_scale, causal):
    """Gradients of attention whose rows without a key average V, as a mask of finite minima has them."""
    _, k, _, dout, *_ = arrays
    dq, dk, dv = gradients(*arrays, softmax_scale=softmax_scale, causal=causal, own=True)
    without_keys = dout[:, :, : max(0, dout.shape[2] - k.shape[2])].astype(np.float64)
    due = without_keys.reshape(k.shape[0], k.shape[1], -1, dv.shape[-1]).sum(2, keepdims=True) / k.shape[2]
    return dq, dk, (dv + due).astype(dv.dtype)


@pytest.mark.parametrize("empty_out", ["mean", "undefined"])
def test_gradients_are_not_asked_of_rows_whose_output_is_declared_other_than_zero(empty_out):
    """Such a row gives all keys a gradient of V, which the reference's rows of zeros do not."""
    problem = replace(PROBLEM, seqlen_q=40)
    (plain,) = array_kernel(averaging, gradients="own")
    case = Case(plain.name, problem, Recipe("normal"), operation="backward")
    assert not passes(plain, judge(plain, case).measures)
    (in_code,) = array_kernel(averaging, gradients="own", policy=Policy(empty_out=empty_out))
    for declared in (in_code, declaring(plain, {"empty_out": empty_out})):
        assert "no more queries than keys" in declared.misfit(problem)
        assert passes(declared, judge(declared, replace(case, problem=declared.fitted(problem))).measures)


def test_what_is_not_there_is_not_found_by_the_truth_of_a_given_forward():
    """Each truth is its own: exact gradients of the other forward are not the correctly rounded ones."""
    for kind, own in (("given", True), ("own", False)):
        (kernel,) = array_kernel(lambda *a, own=own, **o: gradients(*a, **o, own=own), gradients=kind)
        case = Case(kernel.name, PROBLEM, Recipe("normal"), operation="backward")
        assert judge(kernel, case).measures["bit_equal"] < 0.99


@pytest.mark.usefixtures("short_walks")
def test_exact_gradients_obey_every_property_that_is_claimed_of_them():
    (kernel,) = array_kernel(gradients, gradients="given", bitwise=("negated_dout_negates_gradients",))
    claimed = [law for law in LAWS if law.applies(kernel) and law.is_claimed(kernel)]
    assert {law.name for law in claimed} > {"gradients_within_bound", "grouped_heads_add_up"}
    for law in claimed:
        assert run_law(law, kernel, max_examples=2, seed=0).status == "pass", law.name


def _with_sinks(mistake: str):
    given = functools.partial(sinks_gradients.gradients, mistake=mistake)
    features = ("causal", "gqa", "sinks", "lse_gradient")
    return array_kernel(given, name="given", gradients="given", head_dims=(64,), features=features)[0]


def _sunk_ratio(kernel) -> tuple[bool, float]:
    """Whether dsinks was returned, and the largest error / bound over gradients with sinks."""
    points = [{"sinks": "on", "mask": mask, "group": "2 to 4", "batch": "2"} for mask in ("causal", "none")]
    cases = [space.case_of(kernel, point, seed) for seed, point in enumerate(points)]
    found = [judge(kernel, case, unrounded=False).measures for case in cases]
    return "ratio_dsinks_max" in found[0], max(x.get("ratio_dsinks_max", x["ratio_max"]) for x in found)


def test_a_gradient_of_sinks_is_judged_where_it_is_returned():
    law = next(law for law in LAWS if law.name == "gradients_with_sinks")
    right, left_out = _with_sinks(""), _with_sinks("left out")
    for kernel, is_returned in ((right, True), (left_out, False)):
        returned, ratio = _sunk_ratio(kernel)
        assert returned == is_returned
        assert 0.001 < ratio <= 1
    assert [run_law(law, kernel, max_examples=6, seed=0).status for kernel in (right, left_out)] == ["pass"] * 2


@pytest.mark.parametrize("mistake", sinks_gradients.MISTAKES)
def test_a_wrong_gradient_of_sinks_is_found(mistake):
    law = next(law for law in LAWS if law.name == "gradients_with_sinks")
    wrong = _with_sinks(mistake)
    if mistake != "without dlse":  # which no case has
        assert _sunk_ratio(wrong)[1] > 1
    assert run_law(law, wrong, max_examples=6, seed=0, shrink_seconds=0).status == "fail"


def test_a_misspelt_kind_of_gradients_is_refused_with_the_list():
    for make, facts, match in (
        (array_kernel, {"gradients": "auto"}, "gradients must be among , autograd, given, own, got 'auto'"),
        (array_kernel, {"gradients": "autograd"}, "autograd is torch's: the library must be torch, got numpy"),
        (
            torch_kernel,
            {"gradients": "autograd", "features": ("block_descale",)},
            "feature must be among alibi, attn_mask",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            make(gradients, **facts)


@pytest.mark.optional
def test_a_differentiable_function_of_tensors_is_judged_by_autograd():
    pytest.importorskip("torch", reason="needs torch")
    from fa3verify.known.cpu import torch_math

    def returns_two(q, k, v, **options):
        return torch_math(q, k, v, **options), None

    def mistaken(q, k, v, **options):
        return torch_math(q.detach(), k, v, **options) + 0 * q.sum()

    for function, is_right in ((torch_math, True), (returns_two, True), (mistaken, False)):
        (kernel,) = torch_kernel(function, gradients="autograd", dtypes=("bf16",))
        problem = AttentionProblem(1, 4, 2, 40, 40, 64, dtype="bf16", causal=True)
        case = Case(kernel.name, problem, Recipe("normal"), operation="backward")
        assert passes(kernel, judge(kernel, case).measures) == is_right


@pytest.mark.optional
def test_autograd_takes_the_gradient_of_sinks_as_well():
    pytest.importorskip("torch", reason="needs torch")
    features = ("causal", "gqa", "sinks", "lse_gradient")

    def halved(q, k, v, *, sinks=None, **options):
        return sinks_gradients.sunk(q, k, v, sinks=None if sinks is None else (sinks + sinks.detach()) / 2, **options)

    for function, is_right in ((sinks_gradients.sunk, True), (halved, False)):
        (kernel,) = torch_kernel(function, gradients="autograd", head_dims=(64,), features=features)
        returned, ratio = _sunk_ratio(kernel)
        assert returned
        assert (ratio <= 1) == is_right
        law = next(law for law in LAWS if law.name == "gradients_with_sinks")
        status = run_law(law, kernel, max_examples=6, seed=0, shrink_seconds=0).status
        assert status == ("pass" if is_right else "fail")
