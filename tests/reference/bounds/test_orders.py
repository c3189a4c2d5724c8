"""The bound holds for kernels of other orders: float64 attention in which little but the order rounds, library
kernels, and an order that nobody states.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.bounds.enclosure import forward_enclosure
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.order import SoftmaxOrder
from fa3_reference.bounds.steps import rounded
from fa3_reference.formats import FORMATS
from fa3_reference.problem import DTYPES, AttentionProblem, Descale, Operands
from fa3_reference.quantize import QuantScheme, prepare
from tests.quality.weighed_bound import SOURCES, weighed_bound

TILE = 64
ORDERS = {
    "right to left": SoftmaxOrder(),
    "left to right": SoftmaxOrder(keys="left_to_right"),
    "left to right, unscaled maxima": SoftmaxOrder(keys="left_to_right", maxima="unscaled"),
    "normalised": SoftmaxOrder(weights="normalised"),
}


def ideal(problem: AttentionProblem, x: Operands, order: SoftmaxOrder, scores: str = "fp32") -> np.ndarray:
    """Attention of one head in float64, in which S and P alone are rounded: the output before its own rounding."""
    q, k, v = (a[0, :, 0] for a in x.dequantized(problem))
    s = q @ k.T
    if scores != "fp32":
        s = rounded(s * problem.softmax_scale, FORMATS[scores]) / problem.softmax_scale
    s = s * problem.softmax_scale / np.log(2)
    rows = np.arange(problem.seqlen_q)
    first, stop = problem.visible_keys(rows, problem.seqlen_q, problem.seqlen_k)
    keys = np.arange(problem.seqlen_k)
    s = np.where((keys < first[:, None]) | (keys >= stop[:, None]), -np.inf, s)
    fmt = FORMATS[problem.dtype]
    if order.weights == "normalised":
        p = np.exp2(s - s.max(1, keepdims=True))
        return rounded(p / p.sum(1, keepdims=True), fmt) @ v
    top, total, out = np.full(rows.size, -np.inf), np.zeros(rows.size), np.zeros((rows.size, v.shape[1]))
    starts = range(0, problem.seqlen_k, TILE)
    for start in reversed(starts) if order.keys == "right_to_left" else starts:
        block = s[:, start : start + TILE]
        new = np.maximum(top, block.max(1))
        base = np.where(np.isneginf(new), 0.0, new)
        alpha, p = np.exp2(top - base), np.exp2(block - base[:, None])
        total, out = total * alpha + p.sum(1), out * alpha[:, None] + rounded(p, fmt) @ v[start : start + TILE]
        top = new
    return out / total[:, None]


def problems(dtype: str, seeds: range):
    for seed in seeds:
        rng = np.random.default_rng(seed)
        problem = AttentionProblem(1, 1, 1, 48, 200, 32, dtype=dtype, causal=bool(seed % 2))
        q, k, v = (rng.standard_normal(s) for s in (problem.q_shape, problem.k_shape, problem.v_shape))
        gain = [1.0, 3.0, 6.0, 0.1][seed % 4]
        if seed % 3 == 0:
            q[..., :2] *= 4
            k[..., :2] *= 4
        yield problem, prepare(problem, gain * q, gain * k, v + seed % 5, None).operands


def model_of(dtype: str, order: SoftmaxOrder, **rest) -> KernelModel:
    return KernelModel(dtype, "fp32", 0 if order.weights == "normalised" else TILE, TILE, order=order, **rest)


def worst(dtype: str, models, runs, seeds: range = range(12)) -> float:
    ratios = []
    for problem, x in problems(dtype, seeds):
        truth = attention(problem, *x.dequantized(problem)).out[0, :, 0]
        bound = forward_bound(problem, x, models).out[0, :, 0]
        assert np.isfinite(bound).all()
        error = np.abs(runs(problem, x) - truth)
        ratios.append(float(np.max(error / np.where(bound > 0, bound, 1.0))))
        assert (error <= bound).all()
    return max(ratios)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ORDERS)
def test_the_ideal_of_an_order_is_inside_its_bound_and_comes_near_it(dtype, name):
    order = ORDERS[name]
    assert worst(dtype, model_of(dtype, order), lambda problem, x: ideal(problem, x, order)) >= 0.3


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["right to left", "normalised"])
def test_scores_kept_in_16_bits_are_inside_their_bound_and_come_near_it(dtype, name):
    order = ORDERS[name]
    model = model_of(dtype, order, scores=dtype)
    assert worst(dtype, model, lambda problem, x: ideal(problem, x, order, dtype)) >= 0.1


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_order_is_inside_the_bound_of_one_that_nobody_states(dtype):
    model = KernelModel.any_order(dtype, "fp32")
    assert (
        max(worst(dtype, model, lambda problem, x, o=o: ideal(problem, x, o), range(4)) for o in ORDERS.values()) >= 0.1
    )


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_tensor_cores_sums_of_all_keys_are_counted_whatever_the_tile(dtype):
    problem, x = next(problems(dtype, range(1, 2)))
    without = dict.fromkeys(SOURCES, 0.0)
    shares = []
    for tile in (problem.seqlen_k + 56, 0):  # all keys in one tile of known size, and a tile that is not known
        model = KernelModel(dtype, "fp32", tile, tile, order=SoftmaxOrder(weights="normalised"))
        least, most = (weighed_bound(**{**without, "sums": w})(problem, x, model).out for w in (0.0, 1.0))
        shares.append(most - least)
    assert (shares[1] > 0).all()
    assert (shares[1] >= 0.7 * shares[0]).all()  # 200 keys of 256


def test_the_bound_of_one_order_is_not_that_of_another():
    """What a judge of another kernel must not do: the ideal of one order leaves the bound of another by much."""
    problem, x = next(problems("bf16", range(1, 2)))
    truth = attention(problem, *x.dequantized(problem)).out[0, :, 0]
    bound = forward_bound(problem, x, model_of("bf16", ORDERS["right to left"])).out[0, :, 0]
    other = [
        np.max(np.abs(ideal(problem, x, ORDERS[name]) - truth) / bound) for name in ("left to right", "normalised")
    ]
    assert max(other) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("softcap", "scale"), [(1.0, 0.125), (20.0, 0.125), (50.0, 1.0), (1e-3, 1.0)])
def test_a_tanh_of_its_own_keeps_its_bound_and_its_enclosure(dtype, softcap, scale):
    """FlashAttention-3's, whose error of 2^-16 drowns all others where the softcap is large."""
    problem = AttentionProblem(1, 2, 1, 64, 200, 64, dtype=dtype, softcap=softcap, softmax_scale=scale)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    x = prepare(problem, q, k, v, QuantScheme("head") if dtype == "e4m3" else None).operands
    config = default_config(problem, family="flash3")
    model = replace(config.kernel_model(), out_dtype="fp32")
    got, truth = forward(problem, x, config, ideal=frozenset({"output"})), attention(problem, *x.dequantized(problem))
    bound, enclosure = forward_bound(problem, x, model), forward_enclosure(problem, x, model)
    errors = np.abs(got.lse - truth.lse)
    assert (np.abs(got.out - truth.out) <= bound.out).all()
    assert (errors <= bound.lse).all()
    for values, ends in zip(got, enclosure, strict=True):
        assert ((ends.low <= values) & (values <= ends.high)).all()
    if softcap == 50.0 and dtype != "e4m3":
        halved = forward_bound(problem, x, replace(model, tanh_error=model.tanh_error / 2))
        assert (errors > halved.lse).any()


def test_descales_whose_product_underflows_are_in_the_domain_and_a_kernel_that_returns_nan_is_found():
    problem = AttentionProblem(1, 1, 1, 4, 40, 64, dtype="e4m3", softmax_scale=2.0**60)
    ones = (np.ones(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    x = prepare(problem, *ones, QuantScheme("head")).operands
    model = default_config(problem, family="flash3").kernel_model()

    def judged(descale):
        given = Descale(np.full((1, 1, 1), descale, np.float32))
        operands = replace(x, q_descale=given, k_descale=given)
        bound = forward_bound(problem, operands, model)
        got = forward(problem, operands, default_config(problem, family="flash3"))
        return np.isfinite(bound.lse).all(), np.isfinite(got.lse).all()

    assert judged(2.0**-62) == (True, True)
    assert judged(2.0**-64) == (True, False)  # finding 0003
    assert not judged(2.0**64)[0]  # the product overflows: outside the domain


def test_bound_is_not_negative_where_errors_of_scores_take_more_than_the_row_sum():
    """Scores in bf16 of about 1e5 are known to hundreds of nats: no weight is known, and the row sum not from below."""
    rng, problem = np.random.default_rng(0), AttentionProblem(1, 1, 1, 64, 40, 64, dtype="bf16")
    model = KernelModel("bf16", "bf16", order=SoftmaxOrder("unscaled", "always", "any", "normalised"), scores="bf16")
    q, k, v = (rng.normal(size=(1, n, 1, 64)) * 40 for n in (64, 40, 40))
    operands = Operands(*(x.astype(FORMATS["bf16"].dtype) for x in (q, k, v / 40)))
    bound = forward_bound(problem, operands, model)
    widest = np.ptp(operands.v.astype(np.float64), axis=(0, 1, 2))
    assert (bound.out >= 0).all()
    assert (bound.lse > 100).all()
    assert bound.out.max() < 1.1 * widest.max()  # a mean of rows of V all the same


def test_bound_of_long_rows_covers_what_float64_sums_lose():
    """Where a kernel is exact, the truth and the bound are not: each adds as many numbers as there are keys."""
    keys = 4096
    problem = AttentionProblem(1, 1, 1, 1, keys, 64, dtype="bf16")
    q, k, v = (np.full(shape, x) for shape, x in zip((problem.q_shape, problem.k_shape, problem.v_shape), (0, 0, 1)))
    config = default_config(problem)
    bound = forward_bound(problem, prepare(problem, q, k, v).operands, config.kernel_model())
    assert (bound.out >= keys * 2.0**-52).all()
    assert (bound.out < 2.0**-24).all()
