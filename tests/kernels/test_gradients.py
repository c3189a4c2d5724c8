"""Gradients through the library's functions, with the float64 reference in place of the kernels. Needs torch, no GPU.

What is tried is what lies between autograd and the kernels: which tensors and options arrive where.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
pytest.importorskip("triton", reason="needs triton: pip install triton==3.6.0")

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from fa3_kernels import operators
from fa3_kernels.api import flash_attn_func, flash_attn_varlen_func
from fa3_kernels.gluon.arguments import Packed
from fa3_kernels.plan.request import Semantics
from fa3_reference.attention import Attention, attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.problem import AttentionProblem
from tests.kernels.test_api import fake

pytestmark = pytest.mark.optional

LENGTHS_Q, LENGTHS_K = (3, 0, 8), (5, 2, 9)
PROBLEMS = {
    "dense": AttentionProblem(2, 2, 2, 5, 7, 8),
    "causal": AttentionProblem(1, 2, 2, 6, 6, 8, causal=True),
    "grouped": AttentionProblem(2, 4, 2, 5, 9, 8, head_dim_v=16, causal=True),
    "window": AttentionProblem(1, 2, 1, 9, 9, 8, window=(2, 1)),
    "scaled": AttentionProblem(1, 2, 2, 4, 5, 8, softmax_scale=0.2, softcap=2.0),
    "rows without keys": AttentionProblem(1, 2, 2, 7, 4, 8, causal=True),
    "packed": AttentionProblem.varlen(LENGTHS_Q, LENGTHS_K, nheads=4, nheads_kv=2, head_dim=8, causal=True),
}


def values(x: Any) -> np.ndarray:
    return x.detach().to(torch.float64).numpy()


def problem_of(q: Any, k: Any, v: Any, semantics: Semantics, packed: Packed | None) -> AttentionProblem:
    """The problem that a launch's arguments state."""
    rest: dict[str, Any] = {"head_dim_v": v.shape[-1], **semantics._asdict()}
    if packed:
        q_lengths, k_lengths = (tuple(map(int, np.diff(x.numpy()))) for x in packed[:2])
        assert packed[2:] == (max(q_lengths), max(k_lengths))
        heads = {"nheads": q.shape[1], "nheads_kv": k.shape[1], "head_dim": q.shape[2]}
        return AttentionProblem.varlen(q_lengths, k_lengths, **heads, **rest)
    return AttentionProblem(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], **rest)


class StandIn:
    """The launches, for CPU tensors of any format; how those of the backward add dQ is kept."""

    def __init__(self) -> None:
        self.deterministic: list[bool] = []

    def forward(self, q: Any, k: Any, v: Any, semantics: Any, choices: Any, *, packed: Any = None, **_: Any) -> Any:
        found = attention(problem_of(q, k, v, semantics, packed), *map(values, (q, k, v)))
        return torch.from_numpy(found.out).to(q.dtype), torch.from_numpy(found.lse).to(torch.float32)

    def backward(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        *rest: Any,
        dlse: Any,
        packed: Any,
        is_deterministic: bool,
        sm_margin: int,
    ) -> Any:
        out, lse, semantics = rest
        assert sm_margin == 0
        self.deterministic.append(is_deterministic)
        forward = Attention(values(out), values(lse))
        problem = problem_of(q, k, v, semantics, packed)
        dlse = None if dlse is None else values(dlse)
        found = attention_bwd(problem, *map(values, (q, k, v, dout)), forward, dlse)
        return tuple(torch.from_numpy(x).to(q.dtype) for x in found)


@pytest.fixture
def stand_in(monkeypatch) -> StandIn:
    found, seen = StandIn(), operators.operand
    monkeypatch.setattr(operators, "forward", found.forward)
    monkeypatch.setattr(operators, "backward", found.backward)
    # Fake implementations take CPU tensors as a Hopper GPU's.
    monkeypatch.setattr(operators, "operand", lambda x: seen(x)._replace(device="cuda:0"))
    return found


def drawn(problem: AttentionProblem, dtype: Any = torch.float64) -> list[Any]:
    """q, k, v and the gradient of the output."""
    rng = np.random.default_rng(0)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape)
    q, k, v, dout = (torch.from_numpy(rng.standard_normal(shape)).to(dtype) for shape in shapes)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def attend(problem: AttentionProblem, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """The library's function for a problem."""
    options |= {"softmax_scale": problem.softmax_scale, "causal": problem.causal, "window_size": problem.window}
    options |= {"softcap": problem.softcap}
    if not problem.is_varlen:
        return flash_attn_func(q, k, v, **options)
    starts = (torch.from_numpy(x) for x in (problem.cu_seqlens_q, problem.cu_seqlens_k))
    return flash_attn_varlen_func(q, k, v, *starts, problem.seqlen_q, problem.seqlen_k, **options)


def plain(problem: AttentionProblem, q: Any, k: Any, v: Any) -> Any:
    """Attention by torch's own operations, which autograd differentiates; one sequence and head after another.

    Returns out, and the lse of rows that see a key, 0 of others.
    """
    out, lse = [], []
    for seq in problem.sequences():
        rows = np.arange(seq.seqlen_q)
        first, stop = (torch.from_numpy(x)[:, None] for x in problem.visible_keys(rows, seq.seqlen_q, seq.seqlen_k))
        key = torch.arange(seq.seqlen_k)
        visible = (first <= key) & (key < stop)
        of_heads, lse_of_heads = [], []
        for head in range(problem.nheads):
            of_q, of_k, of_v = (
                problem.rows_q(q, seq)[:, head],
                *(problem.rows_k(x, seq)[:, head // problem.group] for x in (k, v)),
            )
            s = of_q @ of_k.T * problem.softmax_scale
            s = problem.softcap * torch.tanh(s / problem.softcap) if problem.softcap else s
            p = torch.where(visible, torch.exp(s), 0.0)
            row_sum = p.sum(1)
            of_heads.append(p @ of_v / row_sum.clamp_min(1e-300)[:, None])
            lse_of_heads.append(torch.where(row_sum > 0, row_sum, 1.0).log())
        out.append(torch.stack(of_heads, dim=1))
        lse.append(torch.stack(lse_of_heads))
    return (torch.cat(out), torch.cat(lse, 1)) if problem.is_varlen else (torch.stack(out), torch.stack(lse))


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_gradients_are_those_of_attention_by_torchs_own_operations(stand_in, problem):
    q, k, v, dout = drawn(problem)
    got = torch.autograd.grad(attend(problem, q, k, v), (q, k, v), dout)
    want = torch.autograd.grad(plain(problem, q, k, v)[0], (q, k, v), dout)
    for name, a, b in zip("qkv", got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5), name  # the lse is float32
        assert float(b.abs().max()) > 0.01, name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("problem", [PROBLEMS["dense"], PROBLEMS["packed"]], ids=["dense", "packed"])
def test_deterministic_says_how_the_backward_adds(stand_in, problem, deterministic):
    q, k, v, dout = drawn(problem)
    attend(problem, q, k, v, deterministic=deterministic).backward(dout)
    assert stand_in.deterministic == [deterministic]


@pytest.mark.parametrize("of", ["lse", "both"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_gradients_of_the_lse_are_those_of_torchs_own_operations(stand_in, problem, of):
    q, k, v, dout = drawn(problem)
    dlse = torch.from_numpy(np.random.default_rng(1).standard_normal(problem.lse_shape))
    (out, lse), (true_out, true_lse) = attend(problem, q, k, v, return_attn_probs=True), plain(problem, q, k, v)
    loss, want = (lse * dlse)[torch.isfinite(lse)].sum(), (true_lse * dlse).sum()
    if of == "both":
        loss, want = loss + (out * dout).sum(), want + (true_out * dout).sum()
    got = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    for name, a, b in zip("qkv", got, torch.autograd.grad(want, (q, k, v), allow_unused=True), strict=True):
        b = torch.zeros_like(a) if b is None else b
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5), name
        assert (float(b.abs().max()) > 0.01) == ((name, of) != ("v", "lse"))


def test_an_lse_that_is_returned_and_not_used_changes_no_gradient(stand_in):
    problem = PROBLEMS["grouped"]
    q, k, v, dout = drawn(problem)
    out, lse = attend(problem, q, k, v, return_attn_probs=True)
    assert lse.requires_grad
    (out * dout).sum().backward()
    assert torch.equal(q.grad, torch.autograd.grad(attend(problem, q, k, v), q, dout)[0])


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_operands_that_want_no_gradient_get_none(stand_in, wanted):
    problem = PROBLEMS["dense"]
    *operands, dout = drawn(problem)
    every = torch.autograd.grad(attend(problem, *operands), operands, dout)
    some = [x if i in wanted else x.detach() for i, x in enumerate(operands)]
    attend(problem, *some).backward(dout)
    assert [i for i, x in enumerate(some) if x.grad is not None] == list(wanted)
    assert all(torch.equal(some[i].grad, every[i]) for i in wanted)


def test_second_derivatives_are_refused(stand_in):
    problem = PROBLEMS["dense"]
    q, k, v, dout = drawn(problem)
    with pytest.raises(RuntimeError, match="attention is not differentiable twice: create_graph must be False"):
        torch.autograd.grad(attend(problem, q, k, v), q, dout, create_graph=True)


def arguments(problem: AttentionProblem, *, has_dlse: bool = False) -> tuple[tuple, tuple]:
    """Of the forward's and the backward's operator."""
    q, k, v, dout = drawn(problem, torch.float16)
    packed: tuple = ()
    if problem.is_varlen:
        starts = (torch.from_numpy(x) for x in (problem.cu_seqlens_q, problem.cu_seqlens_k))
        packed = (*starts, problem.seqlen_q, problem.seqlen_k)
    semantics = (problem.softmax_scale, problem.causal, *problem.window, problem.softcap)
    forward = (q, k, v, *packed, None, None, None, *semantics, 1, None, [0, 0, 0], 128, True, 0, 0)
    given = [x.detach() for x in (dout, q, k, v)]
    out, lse = torch.zeros(problem.out_shape, dtype=q.dtype), torch.zeros(problem.lse_shape)
    return forward, (*given, out, lse, torch.ones_like(lse) if has_dlse else None, *packed, *semantics, True, 0)


def test_a_gradient_of_chunks_raises_in_the_backward(stand_in):
    q, k, v, _ = drawn(PROBLEMS["grouped"], torch.float16)
    out = flash_attn_func(q, k, v, causal=True, attention_chunk=5)
    with pytest.raises(ValueError, match="attention_chunk has no gradient"):
        out.sum().backward()


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("name", ["grouped", "packed"])
def test_operators_pass_opcheck(stand_in, name, has_dlse):
    forward, backward = arguments(PROBLEMS[name], has_dlse=has_dlse)
    kind = "_varlen" if name == "packed" else ""
    torch.library.opcheck(getattr(torch.ops.fa3verify, f"forward{kind}").default, forward)
    without = [x.detach() if isinstance(x, torch.Tensor) else x for x in forward]
    torch.library.opcheck(getattr(torch.ops.fa3verify, f"inference{kind}").default, without)
    torch.library.opcheck(getattr(torch.ops.fa3verify, f"backward{kind}").default, backward)


@pytest.mark.parametrize("name", ["grouped", "packed"])
def test_compiled_code_has_the_same_gradients(stand_in, name):
    problem = PROBLEMS[name]
    q, k, v, dout = drawn(problem, torch.float16)
    starts = [torch.from_numpy(x) for x in (problem.cu_seqlens_q, problem.cu_seqlens_k)]

    def attended(q: Any, k: Any, v: Any) -> Any:
        if problem.is_varlen:
            out, lse = flash_attn_varlen_func(
                2 * q, k, v, *starts, problem.seqlen_q, problem.seqlen_k, causal=True, return_attn_probs=True
            )
        else:
            out, lse = flash_attn_func(2 * q, k, v, causal=True, return_attn_probs=True)
        return out + lse.nan_to_num(neginf=0).mean().to(out.dtype)

    compiled = torch.compile(attended, fullgraph=True, backend="aot_eager")
    want, got = (torch.autograd.grad(f(q, k, v), (q, k, v), dout) for f in (attended, compiled))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("wants_gradient", [False, True])
def test_compiled_code_that_wants_no_gradient_sees_the_operator_without_one(stand_in, wants_gradient):
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(x.target) for x in graph.graph.nodes if "fa3verify" in str(x.target))
        return graph

    q, k, v, _ = (x.detach() for x in drawn(PROBLEMS["grouped"], torch.float16))
    compiled = torch.compile(flash_attn_func, backend=backend)
    out = compiled(q.requires_grad_(wants_gradient), k, v)
    assert seen == [f"fa3verify.{'forward' if wants_gradient else 'inference'}.default"]
    assert out.requires_grad == wants_gradient
    compiled(q.detach(), k, v.requires_grad_())
    assert seen[-1] == "fa3verify.forward.default"


@pytest.mark.parametrize("name", ["grouped", "packed"])
def test_compiled_training_runs_operators_that_have_no_autograd_of_their_own(stand_in, name):
    forward, _ = arguments(PROBLEMS[name])
    operator = operators.forward_varlen_op if name == "packed" else operators.forward_op
    seen = []

    def kept(graph: Any, inputs: Any) -> Any:
        seen.extend(str(x.target).split(".")[1] for x in graph.graph.nodes if "fa3verify" in str(x.target))
        return make_boxed_func(graph.forward)

    rest = forward[3:]
    compiled = torch.compile(lambda q, k, v: operator(q, k, v, *rest)[0], backend=aot_autograd(fw_compiler=kept))
    compiled(*forward[:3]).sum().backward()
    kind = "_varlen" if name == "packed" else ""
    assert seen == [f"inference{kind}", f"backward{kind}"]


def fake_backward(problem: AttentionProblem, **changes: Any) -> Any:
    """The backward's operator on fake CUDA tensors."""
    _, given = arguments(problem)
    names = ("dout", "q", "k", "v", "out", "lse", "dlse")
    tensors = (changes.get(name, x) for name, x in zip(names, given))
    return fake(operators.backward_varlen_op if problem.is_varlen else operators.backward_op, *tensors, *given[7:])


@pytest.mark.parametrize("name", ["grouped", "packed"])
def test_fake_gradients_have_the_shapes_and_dtypes_of_the_operands(name):
    problem = PROBLEMS[name]
    dq, dk, dv = fake_backward(problem)
    assert (dq.shape, dk.shape, dv.shape) == (problem.q_shape, problem.k_shape, problem.v_shape)
    assert {x.dtype for x in (dq, dk, dv)} == {torch.float16}
    assert all(x.is_contiguous() for x in (dq, dk, dv))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("dout", torch.zeros(2, 5, 4, 8, dtype=torch.float16)),
        ("out", torch.zeros(2, 5, 4, 16, dtype=torch.bfloat16)),
        ("lse", torch.zeros(2, 5, 4)),
        ("lse", torch.zeros(2, 4, 5, dtype=torch.float16)),
        ("dlse", torch.zeros(2, 5, 4)),
        ("dlse", torch.zeros(2, 4, 5, dtype=torch.float64)),
    ],
)
def test_what_is_not_of_the_forward_is_refused_in_one_line(name, wrong):
    with pytest.raises(ValueError, match=f"{name} must be float") as caught:
        fake_backward(PROBLEMS["grouped"], **{name: wrong})
    assert "\n" not in str(caught.value)
