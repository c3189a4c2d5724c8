"""Steps of an order that no shipped family takes: each is what its name says, or is said to have no proved bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.order import Order
from fa3_kernels.twin import float32, libdevice
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.bounds import forward_bound
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Operands

PROBLEM = AttentionProblem(1, 1, 1, 16, 300, 64)


def drawn(problem=PROBLEM, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    kind = FORMATS[problem.dtype].dtype
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    return Operands(*((spread * rng.standard_normal(shape)).astype(kind) for shape in shapes))


def run(order, operands, problem=PROBLEM):
    return forward(problem, operands, default_config(problem), order=order)


def test_a_product_in_binary32_is_fma_after_fma():
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 40), (40, 5), (3, 5)))
    expected = c.copy()
    for k in range(40):
        expected = float32.fma(a[:, k, None], b[None, k], expected)
    np.testing.assert_array_equal(float32.product(a, b, c), expected)


def test_q_that_takes_the_scale_is_rounded_as_the_operands_are():
    """With a scale that is a power of two nothing is rounded, and the orders agree."""
    problem = replace(PROBLEM, softmax_scale=0.25)
    operands = drawn()
    folded = run(Order(factor="folded"), operands, problem)
    in_turn = run(Order(factor="in_turn"), operands, problem)
    plain = run(Order(factor="float32"), operands, problem)
    for got in (folded, in_turn):
        np.testing.assert_array_equal(got.out, plain.out)
    other = replace(PROBLEM, softmax_scale=0.3)
    assert (run(Order(factor="folded"), operands, other).out != run(Order(factor="float32"), operands, other).out).any()


def test_maxima_that_stay_leave_large_weights_and_the_same_output_within_rounding():
    operands = drawn(spread=2.0)
    lazy, plain = (run(Order(rescale_threshold_log2=x), operands) for x in (8.0, 0.0))
    assert (lazy.out != plain.out).any()
    np.testing.assert_allclose(lazy.out.astype(float), plain.out.astype(float), atol=4e-3)
    np.testing.assert_allclose(lazy.lse, plain.lse, atol=1e-5)


def test_a_sum_of_rounded_weights_makes_the_mean_of_equal_values_exact():
    operands = drawn()
    operands = replace(operands, v=np.full_like(operands.v, 1.5))
    assert (run(Order(row_sum_of="rounded"), operands).out == 1.5).all()


def test_a_truncated_p_is_never_larger():
    operands = drawn()
    operands = replace(operands, v=np.abs(operands.v))
    truncated = run(Order(p_rounding="toward_zero"), operands).out.astype(float)
    nearest = run(Order(), operands).out.astype(float)
    assert (truncated <= nearest).mean() > 0.9
    assert truncated.mean() < nearest.mean()


def test_a_build_that_flushes_takes_a_subnormal_maximum_for_zero_of_its_sign():
    """cuDNN on an H100 returns +0 where the maximum is below 2^-126, and -0 where the lse alone is."""
    problem = AttentionProblem(1, 1, 1, 1, 1, 64, softmax_scale=2.0**-126)
    operands = Operands(*(np.zeros((1, 1, 1, 64), np.float16) for _ in range(3)))
    operands.q[..., 0] = -1
    for score, bits in ((0.5, 0), (0.9, 0x80000000)):
        operands.k[..., 0] = score
        order = Order(factor="float32", lse="natural", contracts_exponent=False, keeps_subnormals=False)
        assert run(order, operands, problem).lse.view(np.uint32).item() == bits


def test_the_polynomial_logarithm_hands_on_nan_and_infinity():
    x = np.array([np.nan, np.inf, 8], np.float32)
    np.testing.assert_array_equal(libdevice.log2(x), np.array([np.nan, np.inf, 3], np.float32))


@pytest.mark.parametrize(
    "order",
    [
        Order(p_rounding="toward_zero"),
        Order(probabilities="bf16"),
        Order(rescale_threshold_log2=9.0),
    ],
    ids=lambda order: order.unproved,
)
def test_a_step_without_a_proved_bound_is_named(order):
    assert order.unproved


@pytest.mark.parametrize(
    "fields", [{"probabilities": "fp32"}, {"p_rounding": "toward_zero", "probabilities": "bf16"}], ids=str
)
def test_steps_that_exclude_each_other_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Order(**fields)


@pytest.mark.parametrize(
    "order",
    [Order(lse="natural_by_scale", maxima="unscaled", softcap=of) for of in ("ex2", "tanh")],
    ids=lambda x: x.softcap,
)
def test_a_maximum_of_capped_scores_takes_the_softcap_to_the_units_of_lse(order):
    problem = replace(PROBLEM, softcap=3.0)
    operands = drawn()
    truth = attention(problem, *operands.dequantized(problem))
    np.testing.assert_allclose(run(order, operands, problem).lse, truth.lse, atol=1e-4)


def test_a_chain_that_begins_with_the_blocks_before_loses_of_them_at_every_key():
    """448 values of nearly half an ulp of what was summed before: the bound charges each of them."""
    problem = replace(PROBLEM, seqlen_q=1, seqlen_k=512, dtype="bf16")
    operands = drawn(problem)
    operands.k[...] = 0
    operands.v[...] = 0
    operands.v[:, 0] = 1
    operands.v[:, 64:] = 0.99 * 2.0**-24
    config = replace(default_config(problem), tile_n=64)
    order = Order(keys="left_to_right", accumulator="fp32", probabilities="fp32")
    model = replace(config.kernel_model(order), out_dtype="fp32")
    got = forward(problem, operands, config, order=order, ideal=frozenset({"output"}))
    error = np.abs(got.out - attention(problem, *operands.dequantized(problem)).out)
    assert (error <= forward_bound(problem, operands, model).out).all()
    assert (error > 440 * 2.0**-24 / 512).all()
