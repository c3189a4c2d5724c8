"""Ball arithmetic proves the error statement of the float64 gradients, on easy and on hostile inputs."""

from __future__ import annotations

import numpy as np
import pytest

from fa3_reference.attention import Attention, attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.problem import AttentionProblem
from tests.reference.exact_bwd import exact_gradients

U, UNDERFLOW = 2.0**-53, 1e-300  # a gradient of weights below float64's normal numbers has no relative error
# Every option at least once, with rows that see all, some and no keys.
PROBLEMS = {
    "dense": AttentionProblem(1, 1, 1, 20, 33, 16),
    "causal": AttentionProblem(2, 1, 1, 20, 13, 8, causal=True),
    "window": AttentionProblem(1, 1, 1, 21, 25, 8, window=(4, 2)),
    "gqa": AttentionProblem(1, 4, 2, 9, 17, 8, head_dim_v=5),
    "scale": AttentionProblem(1, 1, 1, 12, 20, 16, softmax_scale=1.7),
    "softcap": AttentionProblem(1, 2, 1, 12, 20, 8, softcap=3.0),
    "low softcap": AttentionProblem(1, 1, 1, 12, 20, 8, softcap=0.5, causal=True),
    "varlen": AttentionProblem.varlen((5, 0, 9), (7, 3, 2), nheads=2, nheads_kv=1, head_dim=8),
}
INPUTS = ("normal", "large_logits", "cancelling_values", "outliers", "far_lse")


@pytest.fixture(autouse=True)
def _needs_flint():
    pytest.importorskip("flint", reason="python-flint is in the extra 'test'")


def drawn(problem: AttentionProblem, kind: str) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(7)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape)
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    if kind == "large_logits":
        q, k = 10 * q, 10 * k
    elif kind == "cancelling_values":
        v = 1e8 * np.sign(v) + v
    elif kind == "outliers":
        q[..., 0], k[..., 0] = 100.0, 100.0 + rng.standard_normal(k.shape[:-1])
    elif kind == "far_lse":
        q[..., 0], k[..., 0] = 30.0, -60.0
    return q, k, v, dout


def given(problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Attention:
    """What a forward in binary32 returns, which fits no softmax exactly."""
    out, lse = attention(problem, q, k, v)
    return Attention(out.astype(np.float32).astype(np.float64), lse.astype(np.float32).astype(np.float64))


def stated_error(
    problem: AttentionProblem, arrays: tuple[np.ndarray, ...], forward: Attention, dlse: np.ndarray | None = None
) -> list[np.ndarray]:
    """The statement of fa3_reference.attention_bwd: units times the gradients' own expression in absolute values."""
    q, k, v, dout = arrays
    limits = [np.zeros(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape)]
    for seq in problem.sequences():
        first, stop = problem.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)
        visible = (np.arange(seq.seqlen_k) >= first[:, None]) & (np.arange(seq.seqlen_k) < stop[:, None])
        for head in range(problem.nheads):
            kv = head // problem.group
            q_h, dout_h, out_h = (problem.rows_q(x, seq)[:, head] for x in (q, dout, forward.out))
            k_h, v_h = (problem.rows_k(x, seq)[:, kv] for x in (k, v))
            lse = problem.rows_lse(forward.lse, seq)[head]
            sizes = problem.softmax_scale * np.abs(q_h) @ np.abs(k_h).T
            spread = np.where(visible, sizes, 0).max(initial=0) + np.abs(lse[np.isfinite(lse)]).max(initial=0)
            lengths = seq.seqlen_q * problem.group + seq.seqlen_k + 2 * problem.head_dim_v
            units = 2 * (problem.head_dim + 8) * spread + lengths
            scores, slope, steeper = problem.softmax_scale * q_h @ k_h.T, 1.0, 0.0
            with np.errstate(invalid="ignore", over="ignore"):
                if cap := problem.softcap:
                    scores, slope = cap * np.tanh(scores / cap), np.cosh(scores / cap) ** -2.0
                    steeper = 2 * (problem.head_dim + 8) * sizes.max() / cap + 8
                p = np.where(visible, np.exp(scores - lse[:, None]), 0)
            of_lse = 0 if dlse is None else np.abs(problem.rows_lse(dlse, seq)[head])[:, None]
            ds = p * (np.abs(dout_h) @ np.abs(v_h).T + np.sum(np.abs(dout_h * out_h), 1)[:, None] + of_lse)
            ds *= slope * (1 + steeper / units)
            problem.rows_q(limits[0], seq)[:, head] = U * units * problem.softmax_scale * ds @ np.abs(k_h)
            problem.rows_k(limits[1], seq)[:, kv] += U * units * problem.softmax_scale * ds.T @ np.abs(q_h)
            problem.rows_k(limits[2], seq)[:, kv] += U * units * p.T @ np.abs(dout_h)
    return limits


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_float64_gradients_are_within_their_stated_error(name, kind):
    problem, arrays = PROBLEMS[name], drawn(PROBLEMS[name], kind)
    for returned in (given(problem, *arrays[:3]), None):
        forward = returned or attention(problem, *arrays[:3])
        found, exact = attention_bwd(problem, *arrays, forward), exact_gradients(problem, *arrays, returned)
        times = 1 if returned else 3  # out and lse of the float64 forward err by as much again, each
        limits = stated_error(problem, arrays, forward)
        for gradient, midpoint, radius, limit in zip(found, exact[:3], exact[3:], limits, strict=True):
            assert (np.abs(gradient - midpoint) + radius <= times * limit + UNDERFLOW).all()


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", ["causal", "gqa", "varlen"])
def test_gradients_of_the_lse_are_within_the_stated_error(name, kind):
    problem, arrays = PROBLEMS[name], drawn(PROBLEMS[name], kind)
    dlse = 10 * np.random.default_rng(3).standard_normal(problem.lse_shape)
    forward = given(problem, *arrays[:3])
    found, exact = (f(problem, *arrays, forward, dlse) for f in (attention_bwd, exact_gradients))
    without = attention_bwd(problem, *arrays, forward)
    limits = stated_error(problem, arrays, forward, dlse)
    for gradient, midpoint, radius, limit in zip(found, exact[:3], exact[3:], limits, strict=True):
        assert (np.abs(gradient - midpoint) + radius <= limit + UNDERFLOW).all()
    assert (np.abs(found.dq - without.dq) > limits[0]).any()


def test_the_stated_error_is_within_reach():
    """Of normal inputs a tenth of a per cent of it is met, so that it is no empty statement."""
    problem, arrays = PROBLEMS["dense"], drawn(PROBLEMS["dense"], "normal")
    forward = given(problem, *arrays[:3])
    found, exact = attention_bwd(problem, *arrays, forward), exact_gradients(problem, *arrays, forward)
    for gradient, midpoint, limit in zip(found, exact[:3], stated_error(problem, arrays, forward), strict=True):
        assert (np.abs(gradient - midpoint) / limit).max() > 1e-3


def test_two_keys_give_the_logistic_derivative():
    """With v = (1, 0) and dO = 1 the gradient of the score difference x is p (1 - p)."""
    problem = AttentionProblem(1, 1, 1, 1, 2, 1, softmax_scale=1.0)
    q, k, v = np.array([[[[1.0]]]]), np.array([[[[0.7]], [[0.2]]]]), np.array([[[[1.0]], [[0.0]]]])
    exact = exact_gradients(problem, q, k, v, np.ones((1, 1, 1, 1)))
    p = 1 / (1 + np.exp(-0.5))
    assert exact.dk.ravel() == pytest.approx([p * (1 - p), -p * (1 - p)], rel=1e-15)
    assert exact.dq.ravel() == pytest.approx([0.5 * p * (1 - p)], rel=1e-15)
    assert exact.dv.ravel() == pytest.approx([p, 1 - p], rel=1e-15)
    assert 0 < exact.dk_radius.max() < 2e-17


def test_two_keys_under_a_softcap_give_its_slope():
    """With v = (1, 0) and dO = 1 the gradient of score x_1 is p (1 - p) / cosh(x_1 / c)^2."""
    problem = AttentionProblem(1, 1, 1, 1, 2, 1, softmax_scale=1.0, softcap=2.0)
    q, k, v = np.array([[[[1.0]]]]), np.array([[[[3.0]], [[-1.0]]]]), np.array([[[[1.0]], [[0.0]]]])
    exact = exact_gradients(problem, q, k, v, np.ones((1, 1, 1, 1)))
    p = 1 / (1 + np.exp(2 * np.tanh(-0.5) - 2 * np.tanh(1.5)))
    assert exact.dk.ravel() == pytest.approx(
        [p * (1 - p) / np.cosh(1.5) ** 2, -p * (1 - p) / np.cosh(0.5) ** 2], rel=1e-15
    )
