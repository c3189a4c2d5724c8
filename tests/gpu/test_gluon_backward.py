"""Gradients of the library's functions on a Hopper GPU: within the bound, the twin's bits, and torch's checks."""

from __future__ import annotations

import numpy as np
import pytest

from fa3_reference.attention import Attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.bounds.backward import backward_bound
from fa3_reference.problem import AttentionProblem, BackwardOperands

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

PACKED = AttentionProblem.varlen((100, 1, 0, 200), (130, 70, 50, 0), nheads=4, nheads_kv=2, head_dim=64, causal=True)
PROBLEMS = {
    "dense": AttentionProblem(2, 2, 2, 200, 300, 128),
    "causal": AttentionProblem(1, 4, 2, 260, 260, 64, causal=True, dtype="bf16"),
    "window": AttentionProblem(1, 2, 1, 129, 400, 256, window=(60, 20)),
    "packed": PACKED,
    "boxes": AttentionProblem(1, 4, 2, 260, 300, 96, causal=True),
    "padded boxes": AttentionProblem(2, 2, 2, 200, 300, 80, head_dim_v=72),
    "packed boxes": AttentionProblem.varlen((100, 1, 0, 200), (130, 70, 50, 0), nheads=4, nheads_kv=2, head_dim=96),
    "wide boxes": AttentionProblem(1, 2, 1, 129, 400, 192, window=(60, 20), dtype="bf16"),
    "narrow values": AttentionProblem(1, 4, 2, 200, 300, 192, head_dim_v=128, causal=True),
    "wide values": AttentionProblem(1, 2, 2, 200, 300, 64, head_dim_v=192),
}


def differentiated(
    problem: AttentionProblem, *, deterministic: bool, of_lse: bool = False
) -> tuple[BackwardOperands, list[np.ndarray]]:
    """What a backward read, and what autograd gives for it; of the lse as well where asked."""
    import torch

    from fa3_kernels.api import flash_attn_func, flash_attn_varlen_func
    from fa3verify.tensors.convert import TORCH_DTYPES, to_numpy

    torch.manual_seed(0)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape)
    q, k, v, dout = (torch.randn(x, device="cuda").to(TORCH_DTYPES[problem.dtype]) for x in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"causal": problem.causal, "window_size": problem.window, "deterministic": deterministic}
    if problem.is_varlen:
        starts = [torch.from_numpy(x).cuda() for x in (problem.cu_seqlens_q, problem.cu_seqlens_k)]
        longest = (problem.seqlen_q, problem.seqlen_k)
        out, lse = flash_attn_varlen_func(*leaves, *starts, *longest, return_attn_probs=True, **options)
    else:
        out, lse = flash_attn_func(*leaves, return_attn_probs=True, **options)
    dlse = torch.randn_like(lse) if of_lse else None
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse)) if of_lse else torch.autograd.grad(out, leaves, dout)
    of_q, of_k, of_v, of_dout, of_out, of_lse = (to_numpy(x.detach()) for x in (q, k, v, dout, out, lse))
    of_dlse = None if dlse is None else to_numpy(dlse)
    operands = BackwardOperands(of_q, of_k, of_v, dout=of_dout, out=of_out, lse=of_lse, dlse=of_dlse)
    return operands, [to_numpy(x) for x in found]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("of_lse", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_autograd_gives_gradients_within_the_bound(name: str, of_lse: bool, deterministic: bool) -> None:
    from fa3_kernels.plan.backward import backward_config

    problem = PROBLEMS[name]
    operands, found = differentiated(problem, deterministic=deterministic, of_lse=of_lse)
    q, k, v, dout, out, lse, *dlse = operands.dequantized(problem)
    truth = attention_bwd(problem, q, k, v, dout, Attention(out, lse), *dlse)
    bound = backward_bound(problem, operands, backward_config(problem, family="gluon").model)
    for got, want, most in zip(found, truth, bound, strict=True):
        assert np.isfinite(got.astype(np.float64)).all()
        assert (np.abs(got.astype(np.float64) - want) <= most).all()


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("of_lse", [False, True])
def test_deterministic_gradients_repeat_and_have_the_bits_of_the_twin(name: str, of_lse: bool) -> None:
    from fa3_kernels.plan.backward import backward_config
    from fa3_kernels.twin.backward import backward

    problem = PROBLEMS[name]
    operands, found = differentiated(problem, deterministic=True, of_lse=of_lse)
    again = differentiated(problem, deterministic=True, of_lse=of_lse)[1]
    want = backward(problem, operands, backward_config(problem, family="gluon"))
    for got, other, expected in zip(found, again, want, strict=True):
        assert np.array_equal(got.view(np.int16), other.view(np.int16))
        assert np.array_equal(got.view(np.int16), expected.view(np.int16))


def test_differentiable_operators_pass_opcheck() -> None:
    import torch

    from fa3_kernels.operators import forward_op

    q, k, v = (torch.randn(1, 70, heads, 64, device="cuda", dtype=torch.float16) for heads in (4, 2, 2))
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    options = (None, None, None, None, True, -1, -1, 0.0, 1, None, [0, 0, 0], 128, True, 0, 0)
    torch.library.opcheck(forward_op, (*inputs, *options))


def test_a_compiled_function_has_the_same_gradients() -> None:
    import torch

    from fa3_kernels.api import flash_attn_func

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(q, k, v, causal=True, deterministic=True)
        return (out.float() ** 2).sum()  # type: ignore[union-attr]

    leaves = [torch.randn(1, 150, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    plain = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(*leaves), leaves)
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))
