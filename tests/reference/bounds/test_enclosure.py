"""The enclosure holds what the twin computes, whatever the configuration, and is narrow enough to see small faults."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from fa3_kernels.faults.table import Fault, faulty
from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.bounds import enclosure
from fa3_reference.bounds.enclosure import forward_enclosure
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.order import SoftmaxOrder
from fa3_reference.problem import DTYPES, AttentionProblem, Operands
from fa3_reference.quantize import QuantScheme, prepare
from tests.reference.bounds.executions import forward_execution
from tests.sampling import sampled

PACKED = AttentionProblem.varlen((40, 3, 0, 70), (200, 0, 9, 333), nheads=2, nheads_kv=1, head_dim=64, causal=True)
PLAIN = AttentionProblem(1, 2, 1, 50, 400, 64)
PROBLEMS = {
    "plain": PLAIN,
    "causal": replace(PLAIN, causal=True),
    "window": replace(PLAIN, window=(90, 20)),
    "softcap": replace(PLAIN, softcap=15.0),
    "head_dim 80, V 24": replace(PLAIN, head_dim=80, head_dim_v=24, softmax_scale=0.4),
    "head_dim 128": replace(PLAIN, head_dim=128, head_dim_v=128),
    "packed": PACKED,
}
CHANGES = ({}, {"num_splits": 3}, {"pack_gqa": True, "num_splits": 2})


def operands(problem: AttentionProblem, seed: int, gain: float = 1.0, mean: float = 0.0) -> Operands:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(s) for s in (problem.q_shape, problem.k_shape, problem.v_shape))
    scheme = QuantScheme(("block", "head")[seed % 2]) if problem.dtype == "e4m3" else None
    return prepare(problem, gain * q, gain * k, v + mean, scheme).operands


def outside(problem, x, fault=None, **changes) -> tuple[int, float]:
    """How many values of the twin lie outside, and the share of outputs of which one code is possible."""
    config = default_config(problem, **changes)
    got = (faulty(fault) if fault else forward)(problem, x, config)
    out, lse = forward_enclosure(problem, x, config.kernel_model())
    values = ((got.out.astype(float), out), (got.lse.astype(float), lse))
    return sum(int((~((r.low <= y) & (y <= r.high))).sum()) for y, r in values), float((out.low == out.high).mean())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_twin_is_inside_and_nearly_every_output_is_known(dtype, name, changes):
    problem = replace(PROBLEMS[name], dtype=dtype)
    if dtype == "e4m3":
        changes = changes | {"promotion_interval": (64, 128, 0)[len(changes)]}
    for seed, gain, mean in ((0, 1.0, 0.0), (1, 4.0, 1.0)):
        count, known = outside(problem, operands(problem, seed, gain, mean), **changes)
        assert count == 0
        assert known > (0.55 if problem.softcap else 0.85)


SMALL_FAULTS = (Fault.TRUNCATED_P, Fault.TRUNCATED_OUTPUT, Fault.FP16_ROW_SUM)


@pytest.mark.parametrize(
    ("dtype", "fault"), [*product(DTYPES, SMALL_FAULTS), ("e4m3", Fault.NO_P_OFFSET)]
)  # P of 16 bits has no offset
def test_a_small_fault_leaves_it(dtype, fault):
    problem = AttentionProblem(1, 1, 1, 32, 200, 64, dtype=dtype)
    assert outside(problem, operands(problem, 3), fault)[0] > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_orders_are_told_apart(dtype):
    """A kernel is enclosed by its own order alone."""
    problem = AttentionProblem(1, 1, 1, 32, 500, 64, dtype=dtype)
    x = operands(problem, 0, 3.0)
    config = default_config(problem)
    model = config.kernel_model()
    got = forward(problem, x, config).out.astype(float)
    for order in (SoftmaxOrder(keys="left_to_right"), replace(model.order, maxima="unscaled")):
        out = forward_enclosure(problem, x, replace(model, order=order)).out
        is_inside = ((out.low <= got) & (got <= out.high)).all()
        assert is_inside == (order.keys == "right_to_left")  # unscaled maxima leave more room, and are no other order
    assert not enclosure.can_enclose(KernelModel.any_order(dtype, config.out_dtype))
    with pytest.raises(ValueError, match="stated order"):
        forward_enclosure(problem, x, KernelModel.any_order(dtype, config.out_dtype))


def test_the_fault_of_an_fp8_kernel_that_the_a_priori_bound_lets_pass():
    problem = AttentionProblem(1, 1, 1, 32, 200, 64, dtype="e4m3")
    x = operands(problem, 2)
    config = default_config(problem)
    truth = attention(problem, *x.dequantized(problem)).out
    out = forward_enclosure(problem, x, config.kernel_model()).out
    allowed = np.maximum(np.abs(out.low - truth), np.abs(out.high - truth))
    right = np.abs(forward(problem, x, config).out.astype(float) - truth)
    assert np.median(right / allowed) > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gain", "mean"), sampled([(1.0, 0.0), (4.0, 1.0), (30.0, 0.0)], [(4.0, 1.0)]))
def test_it_holds_every_execution_and_64_of_them_nearly_fill_it(dtype, gain, mean):
    problem = AttentionProblem(1, 1, 1, 16, 300, 64, dtype=dtype)
    x = operands(problem, 0, gain, mean)
    config = default_config(problem)
    model = config.kernel_model()
    truth = attention(problem, *x.dequantized(problem)).out
    out, lse = forward_enclosure(problem, x, model)
    rng, reached = np.random.default_rng(0), np.zeros(truth.shape)
    for _ in range(64):
        once = forward_execution(problem, x, model, rng)
        assert (once.out.low == once.out.high).all()
        assert ((out.low <= once.out.low) & (once.out.low <= out.high)).all()
        assert ((lse.low <= once.lse.low) & (once.lse.high <= lse.high)).all()
        reached = np.maximum(reached, np.abs(once.out.low - truth))
    allowed = np.maximum(np.abs(out.low - truth), np.abs(out.high - truth))
    loose = allowed / np.where(reached > 0, reached, np.where(allowed > 0, allowed / 1e3, 1.0))
    assert np.mean(loose > 100) <= 0.01
    assert np.mean(loose > 2) <= 0.05


def test_nan_and_inf_widen_only_what_sees_them():
    problem = AttentionProblem(1, 1, 1, 8, 300, 64, dtype="bf16", window=(100, 0))
    x = operands(problem, 0)
    k, v, q = x.k.copy(), x.v.copy(), x.q.copy()
    k[0, 205], v[0, 299, 0, 3], q[0, 7] = np.nan, np.inf, np.inf
    config = default_config(problem)
    out, lse = forward_enclosure(problem, Operands(q, k, v), config.kernel_model())
    unknown = np.isinf(out.low[0, :, 0])
    first, stop = problem.visible_keys(np.arange(8), 8, 300)
    rows = ((first <= 205) & (stop > 205)) | (np.arange(8) == 7)
    assert unknown[rows].all()
    assert unknown[~rows][:, 3].all()
    assert not np.delete(unknown[~rows], 3, axis=1).any()
    assert np.array_equal(np.isinf(lse.low[0, 0]), rows)


def test_rounding_once_is_exact():
    rng = np.random.default_rng(0)
    a, b, c = (
        np.float32(rng.standard_normal(20000) * 2.0 ** rng.integers(-20, 20, 20000)).astype(float) for _ in "abc"
    )
    c[:5000] = -np.float32(a[:5000] * b[:5000])  # cancels
    got = enclosure._fma(a, b, c)
    exact = [float(np.float32(_nearest(x, y, z))) for x, y, z in zip(a[::50], b[::50], c[::50], strict=True)]
    assert np.array_equal(got[::50], exact)


def _nearest(a: float, b: float, c: float) -> float:
    """a b + c to nearest even in binary32, by exact rationals."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    near = np.float32(float(exact))
    below, above = np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))
    return float(min((below, near, above), key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1)))
