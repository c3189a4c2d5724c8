"""What a function of arrays is handed is as before after its call: the very arrays, whoever made copies before."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify.cases import space
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import judge, passes
from fa3verify.kernels import calls
from fa3verify.kernels.calls import KernelError
from fa3verify.kernels.functions import array_kernel, torch_kernel
from fa3verify.kernels.handed import MOST_BYTES, arranged, unchanged
from fa3verify.operations import WrongOutput
from fa3verify.properties.views import PROJECTION, joined
from tests.harness.kernels import serving_kernels as kernels, sinks_gradients
from tests.harness.kernels.test_functions import exact

PROBLEM = AttentionProblem(2, 4, 2, 9, 33, 64, causal=True)
PLACES = {"q": 0, "k": 1, "v": 2, "dout": 3, "out": 4, "lse": 5}


def _zeroing(function, name, *arrays, **given):
    """Call a function, and leave zeros in one of the arrays that it was called with."""
    found = function(*arrays, **given)
    x = given[name] if name in given else arrays[PLACES[name]]
    x[...] = 0
    return found


def _judged(kernel, problem=PROBLEM):
    case = Case(kernel.name, problem, Recipe("normal"), operation=kernel.operation)
    return passes(kernel, judge(kernel, case).measures)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_operand_of_numpy_that_is_overwritten_is_found_though_it_was_copied_for_its_layout(name):
    (kernel,) = array_kernel(functools.partial(_zeroing, exact, name), name="wrong")
    with pytest.raises(KernelError, match=f"^changed its operand {name}$"):
        _judged(kernel)


@pytest.mark.parametrize("name", ["dout", "out"])
def test_what_a_backward_is_given_and_overwrites_is_found(name):
    wrong = functools.partial(_zeroing, sinks_gradients.gradients, name)
    (kernel,) = array_kernel(wrong, name="wrong", gradients="given", head_dims=(64,))
    with pytest.raises(KernelError, match=f"^changed its operand {name}$"):
        _judged(kernel)


@pytest.mark.parametrize("name", ["cache_seqlens", "page_table", "k_new", "rotary_sin"])
def test_what_lies_beside_a_cache_may_not_be_written_to(name):
    wrong = functools.partial(_zeroing, kernels.cached, name)
    features = ("causal", "gqa", "paged", "append", "rotary")
    (kernel,) = array_kernel(wrong, name="wrong", dtypes=("bf16",), layout="bshd", features=features)
    with pytest.raises(KernelError, match=f"changed its operand {name}"):
        judge(kernel, space.case_of(kernel, {"rotary": "part", "batch": "2"}))


def test_a_change_of_bits_that_is_none_of_value_is_found_in_a_strided_array():
    given = {"q": np.zeros((3, 5), np.float16)[:, 1:2], "causal": True, "window": (-1, -1)}
    with pytest.raises(WrongOutput, match="changed its operand q"), unchanged(given):
        given["q"][-1] = -0.0


def test_a_cache_is_left_to_whoever_knows_what_is_appended():
    given = {name: np.zeros((2, 2), np.float16) for name in ("k_cache", "v_cache")}
    with unchanged(given):
        given["k_cache"][0] = 1


def test_a_nan_that_stays_is_no_change():
    x = np.full((2, 2), np.nan, np.float32)
    with unchanged({"q": x}):
        x[0, 0] = np.nan


@pytest.mark.optional
def test_tensors_that_are_overwritten_are_found_of_forwards_and_backwards():
    torch = pytest.importorskip("torch", reason="needs torch")
    from fa3verify.known.cpu import torch_flash_gradients, torch_math

    class Zeroing(torch.autograd.Function):
        """Attention whose backward leaves zeros in the gradient that it is given."""

        @staticmethod
        def forward(q, k, v, scale, causal):
            return torch_math(q, k, v, softmax_scale=scale, causal=causal)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs[:3])
            ctx.options = inputs[3:]

        @staticmethod
        def backward(ctx, dout):
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                out = Zeroing.forward(*leaves, *ctx.options)
            found = torch.autograd.grad(out, leaves, dout)
            dout.zero_()
            return *found, None, None

    def by_autograd(q, k, v, *, softmax_scale, causal):
        return Zeroing.apply(q, k, v, softmax_scale, causal)

    for function, name, gradients in (
        (torch_math, "k", ""),
        (torch_math, "q", ""),
        (torch_flash_gradients, "dout", "given"),
        (torch_flash_gradients, "lse", "given"),
        (by_autograd, "dout", "autograd"),
    ):
        wrong = by_autograd if gradients == "autograd" else functools.partial(_zeroing, function, name)
        facts = {"library": "torch", "gradients": gradients, "dtypes": ("bf16",)}
        (kernel,) = array_kernel(wrong, name="wrong", **facts)
        with pytest.raises(KernelError, match=f"changed its operand {name}"):
            _judged(kernel, AttentionProblem(1, 4, 2, 40, 40, 64, dtype="bf16", causal=True))


@pytest.mark.optional
def test_a_function_of_tensors_that_writes_between_strided_ones_is_found():
    torch = pytest.importorskip("torch", reason="needs torch")
    from fa3verify.known.cpu import torch_math

    def wide(q, k, v, **given):
        """Writes behind the last head of the first key, where a packed tensor has the heads of V."""
        found = torch_math(q, k, v, **given)
        heads = k.shape[1] * k.shape[3]
        if k.stride()[1:] == (k.shape[3], k.stride(2), 1) and k.stride(2) > heads and k.shape[2] > 1:
            torch.as_strided(k, (1,), (1,), k.storage_offset() + heads).fill_(3)
        return found

    problem = AttentionProblem(1, 4, 2, 9, 9, 64)
    operands = Case("k", problem, Recipe("normal")).operands()
    for function in (torch_math, wide):
        (kernel,) = torch_kernel(function)
        is_wrong = function is wide
        raises = pytest.raises(KernelError, match="changed its operand q and k and v") if is_wrong else nullcontext()
        with raises, arranged(lambda given: given | joined(given, PROJECTION)):
            calls.run(kernel, problem, operands, kernel.config_for(problem))


@pytest.mark.optional
@pytest.mark.parametrize("is_far", [False, True])
def test_a_tensor_that_is_spread_far_is_compared_by_its_elements_alone(is_far):
    torch = pytest.importorskip("torch", reason="needs torch")
    whole = torch.zeros((2, MOST_BYTES // (2 if is_far else 2**20)), dtype=torch.float16)
    with nullcontext() if is_far else pytest.raises(WrongOutput, match="operand q"), unchanged({"q": whole[:, :4]}):
        whole[0, 5] = 1
    with pytest.raises(WrongOutput, match="operand q"), unchanged({"q": whole[:, :4]}):
        whole[1, 3] = 1
