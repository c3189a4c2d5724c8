"""Legal orders of a backward in plain numpy, against the bounds of a kernel that states none, and of one that does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from fa3_reference.attention import Attention, attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.bounds.backward import BackwardBound, backward_bound
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, BackwardOperands
from tests.quality.legal_orders import added, rounded

F = np.float32


@dataclass(frozen=True)
class Order:
    """How products add, what D and dS are of, where softmax_scale meets dS, and whether heads are one chain."""

    how: str = "serial"
    dots: str = "out"
    ds_of: str = "weights"
    is_scaled_early: bool = False
    is_chained: bool = False


ORDERS = {
    "plain": Order(),
    "from the last to the first": Order("reverse"),
    "toward zero": Order("toward zero"),
    "tensor core": Order("chained"),
    "tensor core, promoted": Order("promoted"),
    "tensor core, halves of steps": Order("halves"),
    "scale in dS": Order(is_scaled_early=True),
    "heads in one chain": Order("toward zero", is_chained=True),
    "heads in one chain of the tensor core": Order("chained", is_chained=True),
    "D of P dP": Order(dots="weights"),
    "D of rounded P dP": Order(dots="rounded"),
}


def gradients(order: Order, problem: AttentionProblem, x: BackwardOperands) -> list[np.ndarray]:
    """dQ, dK and dV in binary32 of one dense sequence without a mask."""
    scale, dtype = F(problem.softmax_scale), problem.dtype
    early, late = (scale, F(1)) if order.is_scaled_early else (F(1), scale)
    dq, dk, dv = (np.zeros(shape, F) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    for head in range(problem.nheads):
        kv = head // problem.group
        q, out, dout = (a[0, :, head].astype(F) for a in (x.q, x.out, x.dout))
        k, v = (a[0, :, kv].astype(F) for a in (x.k, x.v))
        s = added(order.how, q, k.T, dtype) * scale
        p = np.exp((s - x.lse[0, head][:, None]).astype(float)).astype(F)
        stored = rounded(p, dtype)
        dp = added(order.how, dout, v.T, dtype)
        terms = dout * out if order.dots == "out" else (stored if order.dots == "rounded" else p) * dp
        dots = np.zeros(len(q), F)
        for term in terms.T:
            dots = dots + term
        ds = (stored if order.ds_of == "rounded" else p) * (dp - dots[:, None])
        ds = rounded(ds * early, dtype)
        dq[0, :, head] = added(order.how, ds, k, dtype) * late
        for total, weights, rows in ((dk, ds, q), (dv, stored, dout)):
            before = total[0, :, kv]
            part = added(order.how, weights.T.copy(), rows, dtype, before if order.is_chained else None)
            total[0, :, kv] = part if order.is_chained else before + part
    return [dq, dk * late, dv]


@cache
def drawn(dtype: str, seed: int) -> tuple[AttentionProblem, BackwardOperands]:
    keys, gain = ((40, 1.0), (8, 3.0), (96, 0.01), (16, 1.0))[seed]
    scale = 0.25 if seed % 2 else 1.0
    problem = AttentionProblem(1, 2, 1, 16, keys, 16, dtype=dtype, softmax_scale=scale)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    q, k, v, dout = (
        rng.standard_normal(s) for s in (problem.q_shape, problem.k_shape, problem.v_shape, problem.q_shape)
    )
    if seed == 3:  # subnormal in fp16, which the tensor core aligns as normal numbers
        q[..., ::4] *= 2.0**-20
        k[..., ::4] *= 2.0**6
    q, k, v, dout = (a.astype(FORMATS[dtype].dtype) for a in (gain * q, gain * k, v, dout))
    truth = attention(problem, *(a.astype(float) for a in (q, k, v)))
    return problem, BackwardOperands(q, k, v, dout=dout, out=truth.out.astype(q.dtype), lse=truth.lse.astype(F))


@cache
def bound(dtype: str, seed: int, model: BackwardModel) -> BackwardBound:
    return backward_bound(*drawn(dtype, seed), model)


def largest(order: Order, dtype: str, model: BackwardModel) -> float:
    """Largest error / bound over all problems, before the last rounding."""
    ratios = []
    for seed in range(4):
        problem, x = drawn(dtype, seed)
        truth = attention_bwd(problem, *x.dequantized(problem)[:4], Attention(x.out, x.lse))
        limits = bound(dtype, seed, replace(model, out_dtype="fp32"))
        for got, want, limit in zip(gradients(order, problem, x), truth, limits, strict=True):
            ratios.append(float(np.max(np.abs(got - want) / limit)))
    return max(ratios)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ORDERS)
def test_every_legal_order_keeps_one_hypothesis_about_its_gradients(dtype, name):
    order = ORDERS[name]
    accumulator = "either" if order.how in ("chained", "promoted", "halves") else "fp32"
    models = BackwardModel.hypotheses(dtype, accumulator=accumulator)
    assert min(largest(order, dtype, model) for model in models.values()) <= 1


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_d_of_p_and_dp_leaves_the_bound_of_a_d_of_o(dtype):
    of_out, of_weights = BackwardModel.hypotheses(dtype).values()
    assert largest(ORDERS["D of P dP"], dtype, of_out) > 10
    assert largest(ORDERS["D of P dP"], dtype, of_weights) <= 1


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_ds_of_the_rounded_p_can_be_stated_and_is_outside_any_order(dtype):
    order = Order(ds_of="rounded")
    stated = BackwardModel.any_order(dtype)
    assert largest(order, dtype, stated) > 3
    assert min(largest(order, dtype, model) for model in BackwardModel.hypotheses(dtype).values()) > 1
    assert 0.5 < largest(order, dtype, replace(stated, ds_of="rounded")) <= 1


def test_a_forward_of_its_own_is_one_hypothesis():
    (model,) = BackwardModel.hypotheses("bf16", "own", "either").values()
    assert model == BackwardModel.any_order("bf16", "own", "either")
