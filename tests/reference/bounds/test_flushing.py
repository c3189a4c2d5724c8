"""Arithmetic in binary32 that flushes what lies below 2^-126 stays within the bound of any order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import AttentionProblem, Operands

LEAST = np.float32(2.0**-126)
BF16 = ml_dtypes.bfloat16


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < LEAST, np.float32(0), x)


def flushing(q: np.ndarray, k: np.ndarray, v: np.ndarray, softmax_scale: float) -> np.ndarray:
    """Attention of one head, (rows, channels), key by key: each product and each sum may vanish."""
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    scores = q @ k.T * np.float32(softmax_scale)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    rounded = weights.astype(BF16).astype(np.float32)
    out = np.zeros((len(q), v.shape[1]), np.float32)
    for key, row in enumerate(v):
        out = flushed(out + flushed(rounded[:, key, None] * row))
    return (out / weights.sum(-1, keepdims=True)).astype(BF16)


@pytest.mark.parametrize("exponent", [-127, -124, -122, -120, -118])
@pytest.mark.parametrize("keys", [2, 40, 300])
@pytest.mark.parametrize("gap", [0.0, 2.0, 6.5])
def test_results_that_vanish_below_the_normal_range_count_once_for_each_product_and_each_sum(exponent, keys, gap):
    """One key has the largest score and V = 0; all that the others add may vanish, a product or a sum at a time."""
    rng = np.random.default_rng([keys, -exponent])
    problem = AttentionProblem(1, 1, 1, 1, keys, 16, dtype="bf16", softmax_scale=1.0)
    q, k = np.zeros((1, 16)), np.zeros((keys, 16))
    q[:, 0], k[1:, 0] = 1, -gap
    v = rng.uniform(0.5, 1.5, (keys, 16)) * 2.0**exponent
    v[0] = 0
    given = [x.astype(BF16) for x in (q, k, v)]
    operands = Operands(*(x[None, :, None] for x in given))
    exact = attention(problem, *operands.dequantized(problem)).out
    bound = forward_bound(problem, operands, KernelModel.any_order("bf16", "bf16")).out
    got = flushing(*given, problem.softmax_scale).astype(float)[None, :, None]
    assert np.all(np.abs(got - exact) <= bound)
