"""Gradients of the library's functions on a Hopper GPU: derivatives, repeats, operators, captured graphs, streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem

pytestmark = pytest.mark.gpu

PROBLEMS = {
    "dense": AttentionProblem(2, 4, 2, 300, 500, 64),
    "causal": AttentionProblem(2, 4, 2, 500, 500, 128, causal=True),
    "window": AttentionProblem(1, 4, 4, 500, 500, 64, window=(200, 30)),
    "wide": AttentionProblem(1, 2, 2, 300, 300, 256, causal=True),
    "packed": AttentionProblem.varlen((300, 0, 70), (400, 20, 200), nheads=4, nheads_kv=2, head_dim=128, causal=True),
}


def tensors(problem: AttentionProblem) -> list[Any]:
    """q, k, v and the gradient of the output, float16."""
    import torch

    rng = np.random.default_rng(0)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape)
    q, k, v, dout = (torch.from_numpy(rng.standard_normal(x).astype(np.float16)).cuda() for x in shapes)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def attend(problem: AttentionProblem, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """The library's function for a problem."""
    from fa3_kernels.api import flash_attn_func, flash_attn_varlen_func
    from fa3_kernels.gluon.arguments import packed_of

    options |= {"causal": problem.causal, "window_size": problem.window, "return_attn_probs": True}
    packed = packed_of(problem)
    return flash_attn_varlen_func(q, k, v, *packed, **options) if packed else flash_attn_func(q, k, v, **options)


def gradients(problem: AttentionProblem, *, deterministic: bool = True) -> tuple[Any, ...]:
    import torch

    q, k, v, dout = tensors(problem)
    out, _ = attend(problem, q, k, v, deterministic=deterministic)
    return torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_step_along_the_gradient_changes_the_output_as_float64_does(name: str, deterministic: bool) -> None:
    """The directional derivative of sum(out * dout), by central differences of the float64 reference."""
    from fa3_reference.attention import attention

    problem = PROBLEMS[name]
    operands = [x.detach().cpu().numpy().astype(np.float64) for x in tensors(problem)]
    *at, dout = operands
    rng, step = np.random.default_rng(1), 1e-5
    found = gradients(problem, deterministic=deterministic)
    for i, gradient in enumerate(found):
        direction = rng.standard_normal(at[i].shape)
        ends = []
        for sign in (1, -1):
            moved = [x + sign * step * direction if j == i else x for j, x in enumerate(at)]
            ends.append(float(np.sum(attention(problem, *moved).out * dout)))
        want = (ends[0] - ends[1]) / (2 * step)
        of_step = gradient.double().cpu().numpy()
        size = float(np.sqrt(np.sum(of_step**2)))  # what the sum over random directions varies by
        assert abs(np.sum(of_step * direction) - want) <= 8 * 2.0**-11 * size, "qkv"[i]


@pytest.mark.parametrize("name", PROBLEMS)
def test_deterministic_gradients_repeat_and_all_have_their_dk_and_dv(name: str) -> None:
    import torch

    first = gradients(PROBLEMS[name])
    for _ in range(10):
        assert all(torch.equal(x, y) for x, y in zip(first, gradients(PROBLEMS[name]), strict=True))
    of_any_order = gradients(PROBLEMS[name], deterministic=False)
    assert all(torch.equal(x, y) for x, y in zip(first[1:], of_any_order[1:], strict=True))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (30, 8)}, {"window_size": (-1, 8)}])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_without_a_key_are_zero(deterministic: bool, is_packed: bool, options: dict[str, Any]) -> None:
    import torch

    from fa3_kernels.api import flash_attn_func, flash_attn_varlen_func

    q = torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.float16).requires_grad_()
    none = torch.zeros(2, 0, 2, 64, device="cuda", dtype=torch.float16).requires_grad_()
    if is_packed:
        starts = torch.tensor([0, 100, 200], dtype=torch.int32, device="cuda")
        lengths = (starts, torch.zeros_like(starts), 100, 0)
        rows = [x.flatten(0, 1) for x in (q, none, none)]
        out = flash_attn_varlen_func(*rows, *lengths, deterministic=deterministic, **options)
    else:
        out = flash_attn_func(q, none, none, deterministic=deterministic, **options)
    assert not out.any()
    dq, dk = torch.autograd.grad(out, (q, none), torch.ones_like(out))
    assert (dq.shape, dk.shape) == (q.shape, none.shape)
    assert not dq.any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_longest_lengths_as_tensors_and_numpy_integers_give_the_gradients_of_integers(deterministic: bool) -> None:
    import torch

    from fa3_kernels.api import flash_attn_varlen_func

    q, k, v = (torch.randn(300, n, 64, device="cuda", dtype=torch.float16).requires_grad_() for n in (4, 2, 2))
    starts = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    found = []
    for longest in (200, np.int64(200), torch.tensor(200), starts.diff().max()):
        out = flash_attn_varlen_func(
            q, k, v, starts, starts, longest, longest, causal=True, deterministic=deterministic
        )
        found.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    for others in found[1:]:
        for i, (x, y) in enumerate(zip(found[0], others, strict=True)):
            assert torch.equal(x, y) or (i == 1 and not deterministic and torch.allclose(x, y, atol=2e-2))


@pytest.mark.parametrize("name", ["dense", "packed"])
def test_operators_with_gradients_pass_opcheck(name: str) -> None:
    import torch

    from fa3_kernels import operators
    from fa3_kernels.gluon.arguments import packed_of

    problem = PROBLEMS[name]
    q, k, v, dout = tensors(problem)
    packed = packed_of(problem) or ()
    semantics = (None, problem.causal, *problem.window, problem.softcap)
    forward = operators.forward_varlen_op if packed else operators.forward_op
    backward = operators.backward_varlen_op if packed else operators.backward_op
    torch.library.opcheck(
        forward, (q, k, v, *packed, None, None, None, *semantics, 1, None, [0, 0, 0], 128, True, 0, 0)
    )
    with torch.no_grad():
        out, lse = attend(problem, q, k, v)
    given = [x.detach() for x in (dout, q, k, v)]
    for dlse in (None, torch.ones_like(lse)):
        torch.library.opcheck(backward, (*given, out, lse, dlse, *packed, *semantics, True, 0))


@pytest.mark.parametrize("name", ["dense", "packed"])
def test_a_captured_backward_survives_the_plans_that_are_dropped(name: str) -> None:
    import torch

    from fa3_kernels.gluon import launch_backward
    from fa3_kernels.gluon.arguments import packed_of
    from fa3_kernels.plan.request import Semantics

    problem = PROBLEMS[name]
    q, k, v, dout = (x.detach() for x in tensors(problem))
    out, lse = attend(problem, q, k, v)
    packed = packed_of(problem)

    def run() -> tuple[Any, ...]:
        given = (dout, q, k, v, out, lse, Semantics.of(problem))
        return launch_backward.backward(*given, packed=packed, is_deterministic=True)

    want = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    launch_backward._launches.clear()
    filler = [torch.full((1 << 20,), -1, dtype=torch.int64, device="cuda") for _ in range(8)]
    for x in got:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert len(filler) == 8
    assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))


def test_calls_on_other_streams_and_in_batches_give_the_same_bits() -> None:
    import torch

    problem = PROBLEMS["causal"]
    want = gradients(problem)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = gradients(problem)
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))
    q, k, v, dout = (x.detach()[:1].requires_grad_() for x in tensors(problem))
    alone = torch.autograd.grad(attend(replace(problem, batch=1), q, k, v, deterministic=True)[0], (q, k, v), dout)
    assert all(torch.equal(x[:1], y) for x, y in zip(want, alone, strict=True))
