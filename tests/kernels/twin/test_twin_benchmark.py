"""Speed of the primitives on one core: `pytest tests/kernels/twin/test_twin_benchmark.py --benchmark-enable`.

On one core of a 2.1 GHz Xeon: wgmma 2.3-2.5 GMAC/s, exp2_scaled 0.34 G/s; a whole 512 x 512 x 128 head (67 M
multiply-adds) 37 ms, 1.8 GMAC/s.
"""

from __future__ import annotations

import numpy as np
import pytest

from fa3_kernels.twin.convert import encode_f32
from fa3_kernels.twin.float32 import exp2_scaled, thread_row_sums
from fa3_kernels.twin.forward import forward
from fa3_kernels.twin.wgmma import operand, operand_b, wgmma
from fa3_reference.problem import AttentionProblem, Operands

each_format = pytest.mark.parametrize("fmt", ["fp16", "bf16", "e4m3"])


def normal(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


@each_format
def test_wgmma_speed(benchmark, fmt: str) -> None:
    a, b = operand(encode_f32(normal(512, 128), fmt), fmt), operand_b(encode_f32(normal(512, 128), fmt), fmt)
    benchmark.extra_info["multiply_adds"] = 512 * 512 * 128
    assert benchmark(wgmma, a, b).shape == (512, 512)


@each_format
def test_p_tile_preparation_speed(benchmark, fmt: str) -> None:
    p = np.abs(normal(128, 128))
    benchmark(lambda: operand(encode_f32(p, fmt), fmt))


def test_softmax_tile_speed(benchmark) -> None:
    s, c, minus = normal(128, 128), np.full(128, 0.18, np.float32), np.ones(128, np.float32)
    benchmark(lambda: thread_row_sums(exp2_scaled(s, c, minus)))


@each_format
def test_whole_head_speed(benchmark, fmt) -> None:
    problem = AttentionProblem(1, 1, 1, 512, 512, 128, dtype=fmt)
    q, k, v = (encode_f32(normal(512, 128), fmt).reshape(problem.q_shape) for _ in range(3))
    benchmark.extra_info["multiply_adds"] = 2 * 512 * 512 * 128
    assert benchmark(forward, problem, Operands(q, k, v)).out.shape == problem.out_shape
