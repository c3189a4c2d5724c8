"""Inputs that a user may have: attention sinks beside small values, outlier channels, our own quantisers; none is
refused.

``python -m tests.reference.bounds.test_plausible 10000`` judges so many problems of each format and prints the
largest ratios.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.bounds.enclosure import forward_enclosure
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.problem import DTYPES, AttentionProblem, Dtype
from fa3_reference.quantize import QuantScheme, prepare
from tests.sampling import sampled

BATCH = 20  # problems of one call: a sequence each


def plausible(dtype: Dtype, seed: int) -> tuple[AttentionProblem, object]:
    """Problems with a sink of 2 to 14 nats at one key, values from 2^-20 to 1 of an outlier channel, and a
    quantiser."""
    rng = np.random.default_rng(seed)
    keys = int(rng.choice([32, 100, 160, 300]))
    problem = AttentionProblem(BATCH, 1, 1, 4, keys, 64, dtype=dtype, causal=bool(rng.random() < 0.3))
    u = np.where(rng.random((BATCH, 1, 1, 64)) < 0.5, -1.0, 1.0)
    q = u + 0.25 * rng.standard_normal(problem.q_shape)
    k = rng.uniform(0.1, 1.0, (BATCH, 1, 1, 1)) * rng.standard_normal(problem.k_shape)
    sink = rng.integers(0, keys, BATCH)
    strength = rng.uniform(2, 14, (BATCH, 1, 1))
    k[np.arange(BATCH), sink] = u[:, 0] * strength / 8
    v = rng.uniform(0.2, 1.5, problem.v_shape) * np.where(rng.random((BATCH, 1, 1, 1)) < 0.5, 1.0, -1.0)
    v[..., 0] *= 2.0 ** rng.uniform(0, 20, (BATCH, 1, 1))
    v *= 2.0 ** rng.uniform(-14, 0) if dtype == "fp16" else 1.0
    v[np.arange(BATCH), sink] *= rng.choice([0.0, 1e-3, 1.0], (BATCH, 1, 1))  # a sink carries little
    schemes = [QuantScheme("head"), QuantScheme("block"), QuantScheme("head", hadamard_seed=seed)]
    scheme = schemes[seed % 3] if dtype == "e4m3" else None
    if dtype == "fp16":
        v = np.clip(v, -6e4, 6e4)
    return problem, prepare(problem, q, k, v, scheme).operands


def judged(dtype: Dtype, seed: int) -> tuple[float, float, int, int]:
    """Largest error / bound of O and LSE, values without a bound, values outside the enclosure."""
    problem, x = plausible(dtype, seed)
    changes = ({}, {"num_splits": 2})[seed % 2]
    if dtype == "e4m3":
        changes |= {"promotion_interval": (128, 64, 0)[seed // 3 % 3]}
    config = default_config(problem, **changes)
    model = config.kernel_model()
    got, truth = forward(problem, x, config), attention(problem, *x.dequantized(problem))
    bound, (out, lse) = forward_bound(problem, x, model), forward_enclosure(problem, x, model)
    value = got.out.astype(float)
    errors = np.abs(value - truth.out), np.abs(got.lse - truth.lse)
    ratios = (np.max(e / np.where(b > 0, b, 1.0)) for e, b in zip(errors, bound, strict=True))
    refused = sum(int(np.isinf(b).sum()) for b in bound)
    outside = sum(int((~((r.low <= y) & (y <= r.high))).sum()) for y, r in ((value, out), (got.lse, lse)))
    return *(float(ratio) for ratio in ratios), refused, outside


@pytest.mark.parametrize("dtype", sampled(DTYPES, ["e4m3"]))
def test_no_plausible_problem_leaves_its_bound_or_has_none(dtype):
    results = [judged(dtype, seed) for seed in range(12)]
    out, lse, refused, outside = (max(column) for column in zip(*results, strict=True))
    assert 0.3 < out <= 1
    assert 0.1 < lse <= 1
    assert refused == outside == 0


def main(problems: int) -> None:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for dtype in DTYPES:
            seeds = range(-(-problems // BATCH))
            results = list(pool.map(judged, [dtype] * len(seeds), seeds))
            out, lse, refused, outside = zip(*results, strict=True)
            print(f"{dtype}: {len(seeds) * BATCH} problems, error / bound {max(out):.4f} (O), {max(lse):.4f} (LSE),")
            print(f"  {sum(refused)} values without a bound, {sum(outside)} outside the enclosure")


if __name__ == "__main__":
    main(int(sys.argv[1]))
