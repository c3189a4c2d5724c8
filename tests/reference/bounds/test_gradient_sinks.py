"""The bound of the gradient of sinks holds for every order of sums in binary32, and is attained in part."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from fa3_reference.attention import Attention, attention
from fa3_reference.attention_bwd import sinks_gradient
from fa3_reference.bounds.gradient_further import sinks_gradient_bound
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, BackwardOperands

F = np.float32
MODEL = BackwardModel.any_order("bf16")


def _operands(problem: AttentionProblem, rng: np.random.Generator, has_dlse: bool) -> BackwardOperands:
    fmt = FORMATS[problem.dtype]
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape)
    q, k, v, dout = (encode(rng.standard_normal(s) * 2.0 ** rng.integers(-2, 4), fmt, "ieee") for s in shapes)
    sinks = (rng.standard_normal(problem.nheads) * rng.choice([1, 10, 60])).astype(F)
    sinks[rng.random(problem.nheads) < 0.2] = -np.inf
    out, lse = attention(problem, q, k, v, sinks)
    dlse = rng.standard_normal(problem.lse_shape).astype(F) if has_dlse else None
    rounded = encode(out, fmt, "ieee")
    return BackwardOperands(q, k, v, dout=dout, out=rounded, lse=lse.astype(F), dlse=dlse, sinks=sinks)


def _kernel(x: BackwardOperands, rng: np.random.Generator, way: str) -> np.ndarray:
    """One order: D serially or in pairs, the exponent in log2 units or not, rows in any order."""
    terms = x.out.astype(F) * x.dout.astype(F)
    if way == "serial":
        dots = np.zeros(terms.shape[:-1], F)
        for i in rng.permutation(terms.shape[-1]):
            dots = dots + terms[..., i]
    else:
        dots = terms.sum(-1, dtype=F)
    dots = dots.swapaxes(1, 2)
    if x.dlse is not None:
        dots = dots - x.dlse
    sinks = x.sinks[None, :, None]
    log2_e = F(1.4426950408889634)
    with np.errstate(invalid="ignore"):
        exponent = (sinks - x.lse) * log2_e if way == "pairs" else sinks * log2_e - x.lse * log2_e
    lift = 1 + rng.choice([-1, 1]) * MODEL.exp_error * 0.99
    with np.errstate(invalid="ignore"):
        p = np.where(np.isneginf(sinks), F(0), (np.exp2(exponent.astype(float)) * lift).astype(F))
    products = (p * dots).swapaxes(0, 1).reshape(len(x.sinks), -1)
    total = np.zeros(len(x.sinks), F)
    for i in rng.permutation(products.shape[1]):
        total = total - products[:, i]
    return total


def _attained(seed: int, has_dlse: bool, way: str) -> float:
    rng = np.random.default_rng(seed)
    problem = AttentionProblem(
        int(rng.integers(1, 3)), 4, 2, int(rng.integers(1, 40)), int(rng.integers(1, 30)), 16, dtype="bf16",
        causal=bool(rng.integers(2)), sinks=True,
    )  # fmt: skip
    x = _operands(problem, rng, has_dlse)
    truth = sinks_gradient(problem, x.sinks, x.dout, Attention(x.out, x.lse), x.dlse)
    error = np.abs(_kernel(x, rng, way) - truth)
    bound = sinks_gradient_bound(problem, x, MODEL)
    assert np.all(error <= bound), f"{np.max(error / bound):.3g} times the bound"
    assert not bound[np.isneginf(x.sinks)].any()
    return float(np.max(error / np.where(bound > 0, bound, 1.0)))


@given(st.integers(0, 2**32), st.booleans(), st.sampled_from(["serial", "pairs", "apart"]))
def test_no_order_leaves_the_bound(seed, has_dlse, way):
    _attained(seed, has_dlse, way)


def test_the_bound_is_within_reach():
    assert max(_attained(seed, seed % 2 == 0, "serial") for seed in range(60)) > 0.1


@given(
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from([{"forward": "own"}, {"dots": "weights"}]),
    st.sampled_from([0.0, 2.0]),
)
def test_a_forward_of_its_own_and_a_d_of_weights_keep_a_wider_bound(seed, has_dlse, free, softcap):
    """A softcap is of keys alone."""
    rng = np.random.default_rng(seed)
    semantics = {"causal": True, "sinks": True, "softcap": softcap}
    problem = AttentionProblem(1, 4, 2, 9, int(rng.integers(1, 30)), 16, dtype="bf16", **semantics)
    x = _operands(problem, rng, has_dlse)
    exact = attention(problem, x.q, x.k, x.v, x.sinks)
    forward = exact if "forward" in free else Attention(x.out, x.lse)
    q, k, v, dout = (a.astype(F)[0].swapaxes(0, 1) for a in (x.q, x.k, x.v, x.dout))
    k, v = (np.repeat(a, problem.group, axis=0) for a in (k, v))
    s = q @ k.swapaxes(1, 2) * F(problem.softmax_scale)
    s = F(softcap) * np.tanh(s / F(softcap)) if softcap else s
    s[:, np.arange(s.shape[2]) > np.arange(9)[:, None] + s.shape[2] - 9] = -np.inf
    with np.errstate(all="ignore"):
        of_all = np.concatenate([s, np.broadcast_to(x.sinks[:, None, None], (4, 9, 1))], axis=2)
        lse = np.log(np.exp(of_all - of_all.max(2, keepdims=True)).sum(2)) + of_all.max(2)
        lse = lse if "forward" in free else x.lse[0]
        p = np.nan_to_num(np.exp(of_all - lse[..., None])).astype(F)
        dots = (p[..., :-1] * (dout @ v.swapaxes(1, 2))).sum(2) - (0 if x.dlse is None else x.dlse[0])
        got = -(p[..., -1] * dots).sum(1)
    error = np.abs(got - sinks_gradient(problem, x.sinks, x.dout, forward, x.dlse))
    bound = sinks_gradient_bound(problem, x, BackwardModel.any_order("bf16", **free))
    assert np.all(error <= bound), f"{np.max(error / bound):.3g} times the bound"
    assert np.isfinite(bound).all()
