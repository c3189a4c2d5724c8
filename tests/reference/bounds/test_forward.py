"""Error bounds: the bound holds, and it is tight where it should be.

The twin is the only thing here that computes; the bound never looks at it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fa3_kernels.faults.table import Fault, faulty
from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.forward import forward
from fa3_kernels.twin.wgmma import TENSOR_FORMATS, operand, operand_b, wgmma
from fa3_reference.attention import attention
from fa3_reference.bounds import device as device_errors
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.steps import rounding_error, score_error
from fa3_reference.formats import FORMATS, encode, round_to
from fa3_reference.problem import DTYPES, AttentionProblem, Operands
from fa3_reference.quantize import QuantScheme, prepare


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_core_constants_are_those_of_the_bit_exact_model(dtype):
    core, fmt = device_errors.TENSOR_CORE[dtype], TENSOR_FORMATS[dtype]
    assert (core.k_step, core.align_bits, core.out_bits) == (fmt.k_step, fmt.align_bits, fmt.out_bits)
    assert (core.operand.fraction_bits, core.operand.min_exponent) == (fmt.fraction_bits, 1 - fmt.bias)


def spread_values(dtype: str, shape: tuple[int, ...], seed: int, decades: float) -> np.ndarray:
    """Values of a format over many binades, a quarter of them zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10 ** rng.uniform(-decades, decades, shape) * (rng.random(shape) > 0.25)
    return encode(x, FORMATS[dtype], "saturate")


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 10**6), decades=st.sampled_from([0.0, 0.5, 1.5]), cancel=st.booleans())
@settings(max_examples=20)
def test_scores_err_by_no_more_than_the_score_bound(dtype, seed, decades, cancel):
    q = spread_values(dtype, (16, 128), seed, decades)
    k = spread_values(dtype, (24, 128), seed + 1, decades)
    if cancel:
        q[:, 64:], k[:, 64:] = q[:, :64], -k[:, :64]
    s, ds = score_error(q.astype(float), k.astype(float), device_errors.TENSOR_CORE[dtype])
    got = wgmma(operand(q, dtype), operand_b(k, dtype))
    assert (np.abs(got - s) <= ds).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_score_bound_is_within_a_factor_of_four_of_the_worst_score(dtype):
    q, k = spread_values(dtype, (64, 128), 1, 0.0), spread_values(dtype, (256, 128), 2, 0.0)
    s, ds = score_error(q.astype(float), k.astype(float), device_errors.TENSOR_CORE[dtype])
    error, counts = np.abs(wgmma(operand(q, dtype), operand_b(k, dtype)) - s), ds > 0  # where anything is cut
    assert (error[counts] / ds[counts]).max() > 0.25


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.floats(1e-9, 400.0), st.floats(0.0, 1e-2), st.floats(0.0, 1.0))
def test_no_number_of_an_interval_rounds_worse_than_promised(dtype, low, width, inside):
    fmt, high = FORMATS[dtype], low * (1 + width)
    x = min(high, low + inside * (high - low))
    allowed = rounding_error(np.array([low]), np.array([high]), fmt)[0]
    assert abs(float(round_to(np.array([x]), fmt, "saturate")[0]) - x) <= allowed * (1 + 2.0**-30)


def ratios(problem: AttentionProblem, x: Operands, **changes) -> tuple[np.ndarray, np.ndarray]:
    fault = changes.pop("fault", None)
    config = default_config(problem, **changes)
    got = (faulty(fault) if fault else forward)(problem, x, config)
    truth = attention(problem, *x.dequantized(problem))
    bound = forward_bound(problem, x, config.kernel_model())
    return np.abs(got.out.astype(float) - truth.out) / bound.out, np.abs(got.lse - truth.lse) / bound.lse


def normal(problem: AttentionProblem, seed: int, gain: float = 1.0, mean: float = 0.0) -> Operands:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(s) for s in (problem.q_shape, problem.k_shape, problem.v_shape))
    scheme = QuantScheme("block") if problem.dtype == "e4m3" else None
    return prepare(problem, gain * q, gain * k, v + mean, scheme).operands


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gain", "mean"), [(1.0, 0.0), (3.0, 0.0), (8.0, 1.0), (0.1, 1.0), (30.0, 0.0)])
@pytest.mark.parametrize("changes", [{}, {"num_splits": 3, "pack_gqa": True}], ids=["whole", "split"])
def test_twins_stay_inside_the_bound(dtype, gain, mean, changes):
    problem = AttentionProblem(1, 2, 1, 70, 500, 64, dtype=dtype)
    out, lse = ratios(problem, normal(problem, 5, gain, mean), **changes)
    assert out.max() <= 1
    assert lse.max() <= 1


@pytest.mark.parametrize(("dtype", "least"), [("fp16", 0.6), ("bf16", 0.8), ("e4m3", 0.3)])
def test_the_bound_is_tight_on_peaky_inputs(dtype, least):
    problem = AttentionProblem(1, 1, 1, 128, 512, 64, dtype=dtype)
    assert max(ratios(problem, normal(problem, seed, 3.0))[0].max() for seed in range(3)) >= least


@pytest.mark.parametrize("fault", [Fault.DROPPED_LAST_TILE, Fault.STALE_V, Fault.COARSE_EXP2, Fault.MISSED_RESCALE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_kernel_leaves_the_bound(dtype, fault):
    problem = AttentionProblem(1, 1, 1, 128, 512, 64, dtype=dtype)
    gain = 3.0 if fault is Fault.MISSED_RESCALE else 1.0
    out, lse = ratios(problem, normal(problem, 1, gain), fault=fault)
    assert max(out.max(), lse.max()) > 1


def test_without_promotion_the_bound_grows_with_the_keys_and_the_loss_is_inside():
    worst = {}
    for keys in (1024, 4096):
        problem = AttentionProblem(1, 1, 1, 8, keys, 64, dtype="e4m3")
        x = normal(problem, 2, mean=1.0)
        for interval in (0, 128):
            config = default_config(problem, promotion_interval=interval)
            worst[keys, interval] = np.median(forward_bound(problem, x, config.kernel_model()).out)
            assert ratios(problem, x, promotion_interval=interval)[0].max() <= 1
    assert worst[4096, 0] > 3 * worst[1024, 0]
    assert worst[4096, 128] < 1.5 * worst[1024, 128]


def test_empty_rows_must_be_exact_and_overflow_is_not_promised():
    problem = AttentionProblem(1, 1, 1, 4, 2, 64, causal=True)
    x = normal(problem, 0)
    bound = forward_bound(problem, x, default_config(problem).kernel_model())
    assert not bound.out[0, :2].any()
    assert not bound.lse[0, 0, :2].any()
    nan = replace(x, v=np.full_like(x.v, np.nan))
    assert np.isinf(forward_bound(problem, nan, default_config(problem).kernel_model()).out).all()


def test_an_output_that_may_round_to_infinity_has_no_bound():
    problem = AttentionProblem(1, 1, 1, 1, 128, 64, softmax_scale=float(1 / np.log2(np.e)))
    q, k = np.zeros(problem.q_shape, np.float16), np.zeros(problem.k_shape, np.float16)
    q[..., 0], k[:, 1:, :, 0] = 1, -1 + 2.0**-10  # 127 weights that round up by a third of 2^-10
    x = Operands(q, k, np.full(problem.v_shape, 65504, np.float16))
    config = default_config(problem)
    with np.errstate(over="ignore"):
        assert np.isinf(forward(problem, x, config).out).all()
    assert np.isinf(forward_bound(problem, x, config.kernel_model()).out).all()
