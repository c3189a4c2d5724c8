"""Forward and gradients against float64 automatic differentiation: an implementation by other people."""

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.problem import AttentionProblem

pytestmark = pytest.mark.optional

PROBLEMS = {
    "dense": AttentionProblem(2, 2, 2, 33, 47, 16),
    "gqa_causal": AttentionProblem(1, 6, 2, 20, 31, 8, head_dim_v=12, causal=True),
    "window": AttentionProblem(1, 2, 1, 29, 25, 8, window=(6, 2)),
    "softcap_scale": AttentionProblem(1, 2, 2, 17, 19, 8, softcap=3.0, softmax_scale=0.7, causal=True),
}


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("name", PROBLEMS)
def test_forward_and_gradients_agree_with_automatic_differentiation(torch, name):
    problem = PROBLEMS[name]
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal(s) for s in (problem.q_shape, problem.k_shape, problem.v_shape))
    dout = rng.standard_normal(problem.out_shape)
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    q_t, k_t, v_t = (x.transpose(1, 2) for x in leaves)  # (batch, heads, seqlen, dim)
    k_t, v_t = (x.repeat_interleave(problem.group, dim=1) for x in (k_t, v_t))
    s = problem.softmax_scale * q_t @ k_t.mT
    s = problem.softcap * torch.tanh(s / problem.softcap) if problem.softcap else s
    first, stop = (
        torch.tensor(x)[:, None]
        for x in problem.visible_keys(np.arange(problem.seqlen_q), problem.seqlen_q, problem.seqlen_k)
    )
    keys = torch.arange(problem.seqlen_k)
    hidden = ~((keys >= first) & (keys < stop))
    s = s.masked_fill(hidden, -torch.inf)
    empty = hidden.all(dim=1)[:, None]
    out = (s.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v_t).transpose(1, 2)
    out.backward(torch.tensor(dout))

    forward = attention(problem, q, k, v)
    gradients = attention_bwd(problem, q, k, v, dout, forward)
    np.testing.assert_allclose(forward.out, out.detach().numpy(), rtol=0, atol=1e-14)
    np.testing.assert_allclose(forward.lse, s.logsumexp(-1).detach().numpy(), rtol=1e-14, atol=1e-14)
    for got, leaf in zip(gradients, leaves, strict=True):
        np.testing.assert_allclose(got, leaf.grad.numpy(), rtol=0, atol=1e-13)
