"""The corners of finding 0001: in each a correct kernel left the bound of 0.1.0, or lost the output that it
promised."""

from __future__ import annotations

import numpy as np
import pytest

from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.bounds.enclosure import forward_enclosure
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3_reference.quantize import QuantScheme, prepare
from fa3verify.operations.operation import error_ratio

PER_LOG2 = float(1 / np.log2(np.e))  # softmax_scale with which a raw score is in log2 units


def one_query(dtype, keys, softmax_scale=PER_LOG2, **rest):
    """A problem of one query and its operands: zeros, but V ones."""
    problem = AttentionProblem(1, 1, 1, 1, keys, 64, dtype=dtype, softmax_scale=softmax_scale, **rest)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    return problem, *(
        np.full(shape, value, FORMATS[dtype].dtype) for shape, value in zip(shapes, (0, 0, 1), strict=True)
    )


def judged(problem, *arrays, **changes):
    """What the twin returns, and error / bound of every output; the enclosure holds the output."""
    operands = Operands(*arrays)
    config = default_config(problem, **changes)
    model = config.kernel_model()
    with np.errstate(all="ignore"):
        got = forward(problem, operands, config)
        truth = attention(problem, *operands.dequantized(problem))
        bound = forward_bound(problem, operands, model)
        low, high = forward_enclosure(problem, operands, model).out
        out = got.out.astype(float)
        assert (np.isnan(out) | ((low <= out) & (out <= high))).all()
        ratios = error_ratio(out - truth.out, bound.out), error_ratio(got.lse - truth.lse, bound.lse)
    return out, bound, max(float(np.max(ratio)) for ratio in ratios)


def one(*values, rows=0):
    return Descale(np.array([[values]], np.float32), rows)


def test_subnormal_v_is_aligned_by_the_exponent_that_the_tensor_core_reads():
    problem, q, k, v = one_query("e4m3", 32, float(-np.log2(0.234375 / 256) / 10 * PER_LOG2))
    q[..., 0], k[:, 1:, :, 0], v[...] = 1, -10, 2.0**-9
    _, bound, ratio = judged(problem, q, k, v)
    assert 0.3 < ratio <= 1
    assert bound.out.max() < 1e-4


def test_subnormal_p_is_aligned_by_the_exponent_that_the_tensor_core_reads():
    problem, q, k, v = one_query("fp16", 129)
    q[..., 0], k[:, :16, :, 0], k[:, 16:128, :, 0] = 1, -24, -200
    v[...] = 0
    v[:, 0], v[:, 1], v[:, 2:16] = 32768, 15.5, 0.99951
    _, bound, ratio = judged(problem, q, k, v)
    assert 0.1 < ratio <= 1
    assert bound.out.max() < 1e-4


@pytest.mark.parametrize("seed", range(20))
def test_an_attention_sink_beside_small_values_of_an_outlier_channel(seed):
    rng = np.random.default_rng(seed)
    problem = AttentionProblem(1, 1, 1, 16, 32, 64, dtype="e4m3")
    u = np.where(rng.random(64) < 0.5, -1.0, 1.0)
    q = u + 0.25 * rng.standard_normal(problem.q_shape)
    k = 0.25 * rng.standard_normal(problem.k_shape)
    k[:, 0] = u * rng.uniform(6.5, 8) / 8  # the sink's score: 6.5 to 8 nats
    v = rng.uniform(0.5, 1.5, problem.v_shape)
    v[..., 0] = 2.0**17
    x = prepare(problem, q, k, v, QuantScheme("head")).operands
    _, bound, ratio = judged(problem, x.q, x.k, x.v, x.q_descale, x.k_descale, x.v_descale)
    assert 0.1 < ratio <= 1
    assert np.isfinite(bound.out).all()


@pytest.mark.parametrize(("apart", "value", "lost"), [(126.5, 64.0, 5.4e-37), (127.0, 2.0**100, 7.5e-9)])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_factor_between_far_maxima_may_vanish(apart, value, lost, num_splits):
    problem, q, k, v = one_query("bf16", 256)
    q[..., :2], k[:, 128:, :, 0], k[:, 128:, :, 1] = 1, -112, 112 - apart
    v[:, :128], v[:, 128:] = 0, value
    out, bound, ratio = judged(problem, q, k, v, num_splits=num_splits)
    assert not out.any()
    assert 0.9 < ratio <= 1
    assert bound.out.max() <= 1.1 * lost


def overflowing_sum():
    problem, q, k, v = one_query("bf16", 8)
    return problem, q, k, v * v.dtype.type(2.0**126)


def overflowing_score():
    problem, q, k, v = one_query("bf16", 8, 2.0**-125 * PER_LOG2)
    q[..., 0], k[:, 0, :, 0], v[:, 1:] = 2.0**64, 2.0**64, 2
    return problem, q, k, v


def overflowing_product_of_scales():
    problem, q, k, v = one_query("e4m3", 8, 1.0)
    q[...], k[..., ::2, :, ::2] = 0.5, 0.25
    return problem, q, k, v, one(3e38), one(1e-37), one(1)


def overflowing_ratio_of_scales():
    return *one_query("e4m3", 256), one(1), one(1), one(1e-20, 1e20, rows=128)


def tiny_softcap():
    problem, q, k, v = one_query("bf16", 8, 1 / 8, softcap=1e-39)
    q[..., 0], k[:, 1:, :, 0], v[:, 1:] = 1, 4, 2
    return problem, q, k, v


def rounded_maximum():
    """A score of 2^36, whose rounding by 2^12 is an exponent: the exponential overflows."""
    problem, q, k, v = one_query("bf16", 64, PER_LOG2 * 1.2)
    q[..., 0], k[..., 0] = 2.0**18 * 1.5, 2.0**18 * 1.2578125
    k[:, ::2, :, 0] *= 1.0078125
    return problem, q, k, v


def overflowing_part():
    """The mean of one split, in the units of its descale, although that of all keys is finite."""
    problem, q, k, v = one_query("e4m3", 256)
    v[:, :128], v[:, 128:] = 0, 1.5
    return problem, q, k, v, one(1), one(1), one(3.4e38)


def nan_beside_an_empty_row():
    problem = AttentionProblem(1, 1, 1, 2, 1, 64, dtype="bf16", causal=True)  # row 0 sees no key
    _, q, k, v = one_query("bf16", 1)
    return problem, np.repeat(q, 2, axis=1), k, v * v.dtype.type(np.nan)


OUTSIDE = (
    overflowing_sum,
    overflowing_score,
    overflowing_product_of_scales,
    overflowing_ratio_of_scales,
    tiny_softcap,
    rounded_maximum,
    nan_beside_an_empty_row,
)


@pytest.mark.parametrize("case", OUTSIDE)
def test_outside_the_domain_nothing_is_promised(case):
    out, bound, _ = judged(*case())
    lost = ~np.isfinite(out)
    assert lost.any()
    assert np.isinf(bound.out[lost]).all()


def test_a_part_that_overflows_is_outside_the_domain():
    out, bound, _ = judged(*overflowing_part(), num_splits=2)
    assert not np.isfinite(out).any()
    assert np.isinf(bound.out).all()


def test_a_key_of_no_weight_whose_score_is_next_to_unknown_counts():
    """The tanh errs by 2^-22 of a softcap of 2^44: what is exactly 2^-6000 may be as heavy as the heaviest."""
    problem, q, k, v = one_query("bf16", 256, 4096.0, softcap=2.0**44)
    q[..., 0], k[:, 128:, :, 0], v[:, :128] = 1, 1, -3
    out, bound, ratio = judged(problem, q, k, v)
    assert abs(float(out.flat[0]) - 1) > 0.5  # the kernel cannot tell the keys apart
    assert ratio <= 1
    assert np.isfinite(bound.out).all()


def test_a_softcap_too_large_to_be_computed_has_a_bound_that_says_so():
    problem, q, k, v = one_query("bf16", 8, 1 / 8, softcap=1e37)
    q[..., 0], k[:, 1:, :, 0], v[:, 1:] = 1, 4, 2
    _, bound, ratio = judged(problem, q, k, v)
    assert ratio <= 1
    assert bound.out.max() >= 1


@pytest.mark.parametrize("num_splits", [1, 2])
def test_infinite_operands_with_a_softcap_have_no_bound_however_the_keys_are_split(num_splits):
    problem, q, k, v = one_query("fp16", 300, 1 / 8, softcap=20.0)
    q[..., 0], k[..., 0] = np.inf, np.where(np.arange(300) % 3, 1, -1)[:, None]
    v[:, ::2] = 0.3
    _, bound, _ = judged(problem, q, k, v, num_splits=num_splits)
    assert np.isinf(bound.out).all()


def test_an_ordinary_problem_has_a_finite_bound_for_every_element():
    """None of the corners' remedies refuses what is not in a corner."""
    rng = np.random.default_rng(0)
    for dtype in ("fp16", "bf16", "e4m3"):
        problem = AttentionProblem(1, 2, 1, 70, 300, 64, dtype=dtype, causal=True, softcap=30.0)
        q, k, v = (4 * rng.standard_normal(s) for s in (problem.q_shape, problem.k_shape, problem.v_shape))
        x = prepare(problem, q, k, v, QuantScheme("block") if dtype == "e4m3" else None).operands
        for changes in ({}, {"num_splits": 3}):
            config = default_config(problem, **changes)
            bound = forward_bound(problem, x, config.kernel_model())
            assert np.isfinite(bound.out).all()
            assert np.isfinite(bound.lse).all()


LENGTHS = [2**n for n in range(3, 14)] + [5, 300, 3 * 2**11]
LONG = [pytest.param([2**n for n in range(14, 18)] + [100_000], marks=pytest.mark.nightly)]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "e4m3"])
@pytest.mark.parametrize("lengths", [LENGTHS, *LONG], ids=["quick", "long"])
def test_an_lse_that_is_known_but_for_its_last_roundings_is_within_the_bound(dtype, lengths):
    ratios = {keys: judged(*one_query(dtype, keys))[2] for keys in lengths}
    assert not {keys: ratio for keys, ratio in ratios.items() if not ratio <= 1}, "error / bound by number of keys"
