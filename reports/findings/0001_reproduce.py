"""Print the rows of finding 0001 with the error bound that is installed: python reports/findings/0001_reproduce.py."""

from __future__ import annotations

import numpy as np

from fa3_kernels.plan.config import default_config
from fa3_kernels.twin import mufu
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.bounds import device as device_errors
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3_reference.quantize import QuantScheme, prepare
from fa3verify.operations.operation import error_ratio

PER_LOG2 = float(1 / np.log2(np.e))  # softmax_scale with which a raw score is in log2 units


def one_query(dtype, keys, softmax_scale=PER_LOG2, **rest):
    """Return a problem of one query and its operands: zeros, but V ones."""
    problem = AttentionProblem(1, 1, 1, 1, keys, 64, dtype=dtype, softmax_scale=softmax_scale, **rest)
    storage = FORMATS[dtype].dtype
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    q, k, v = (np.full(shape, value, storage) for shape, value in zip(shapes, (0, 0, 1), strict=True))
    return problem, q, k, v


def judged(problem, operands, **changes):
    """Return the twin's out, the truth and the bound, and the largest error / bound of out."""
    config = default_config(problem, **changes)
    with np.errstate(all="ignore"):
        got = forward(problem, operands, config).out.astype(float)
        truth = attention(problem, *operands.dequantized(problem)).out
        bound = forward_bound(problem, operands, config.kernel_model()).out
        ratio = float(np.max(error_ratio(got - truth, bound)))
    return got.flat[0], truth.flat[0], bound.flat[0], ratio


def show(row, problem, *arrays, **changes):
    got, truth, bound, ratio = judged(problem, Operands(*arrays), **changes)
    print(f"{row}: error / bound {ratio:.4g} (computed {got:.6g}, exact {truth:.6g}, bound {bound:.3g})")


def v1():
    problem, q, k, v = one_query("e4m3", 32, float(-np.log2(0.234375 / 256) / 10 * PER_LOG2))
    q[..., 0], k[:, 1:, :, 0], v[...] = 1, -10, 2.0**-9
    show("V1 e4m3", problem, q, k, v)
    problem, q, k, v = one_query("fp16", 129)
    q[..., 0], k[:, :16, :, 0], k[:, 16:128, :, 0] = 1, -24, -200
    v[...] = 0
    v[:, 0], v[:, 1], v[:, 2:16] = 32768, 15.5, 0.99951
    show("V1 fp16", problem, q, k, v)


def v1_sink(seeds=300):
    ratios = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        problem = AttentionProblem(1, 1, 1, 16, 32, 64, dtype="e4m3")
        u = np.where(rng.random(64) < 0.5, -1.0, 1.0)
        q = u + 0.25 * rng.standard_normal(problem.q_shape)
        k = 0.25 * rng.standard_normal(problem.k_shape)
        k[:, 0] = u * rng.uniform(6.5, 8) / 8  # the sink's score: 6.5 to 8 nats
        v = rng.uniform(0.5, 1.5, problem.v_shape)
        v[..., 0] = 2.0**17
        ratios.append(judged(problem, prepare(problem, q, k, v, QuantScheme("head")).operands)[-1])
    over = sum(ratio > 1 for ratio in ratios)
    print(f"V1 sink, one channel of V 2^17: {over} of {seeds} above 1, largest {max(ratios):.3g}")


def v2():
    problem, q, k, v = one_query("bf16", 256)
    q[..., :2], k[:, 128:, :, 0], k[:, 128:, :, 1] = 1, -112, -14.5
    v[:, :128], v[:, 128:] = 0, 64
    show("V2 126.5 apart, V = 64", problem, q, k, v)
    problem, q, k, v = one_query("bf16", 256)
    q[..., 0], k[:, 128:, :, 0] = 1, -127
    v[:, :128], v[:, 128:] = 0, 2.0**100
    show("V2 127 apart, V = 2^100", problem, q, k, v)


def v3_and_v4():
    problem, q, k, v = one_query("bf16", 8)
    show("V3", problem, q, k, v * v.dtype.type(2.0**126))
    problem, q, k, v = one_query("bf16", 8, 2.0**-125 * PER_LOG2)
    q[..., 0], k[:, 0, :, 0], v[:, 1:] = 2.0**64, 2.0**64, 2
    show("V4", problem, q, k, v)


def v5_to_v9():
    def one(*values, rows=0):
        return Descale(np.array([[values]], np.float32), rows)

    problem, q, k, v = one_query("e4m3", 8, 1.0)
    q[...], k[..., ::2, :, ::2] = 0.5, 0.25
    show("V5", problem, q, k, v, one(3e38), one(1e-37), one(1))
    problem, q, k, v = one_query("e4m3", 256)
    show("V6", problem, q, k, v, one(1), one(1), one(1e-20, 1e20, rows=128))
    for softcap in (1e-39, 1e37):
        problem, q, k, v = one_query("bf16", 8, 1 / 8, softcap=softcap)
        q[..., 0], k[:, 1:, :, 0], v[:, 1:] = 1, 4, 2
        show(f"V7 softcap {softcap:g}", problem, q, k, v)
    problem = AttentionProblem(1, 1, 1, 2, 1, 64, dtype="bf16", causal=True)  # row 0 sees no key
    _, q, k, v = one_query("bf16", 1)
    show("V8", problem, np.repeat(q, 2, axis=1), k, v * v.dtype.type(np.nan))
    problem, q, k, v = one_query("fp16", 300, 1 / 8, softcap=20.0)
    q[..., 0], k[..., 0] = np.inf, np.where(np.arange(300) % 3, 1, -1)[:, None]
    v[:, ::2] = 0.3
    for num_splits in (1, 2):
        show(f"V9 num_splits {num_splits}", problem, q, k, v, num_splits=num_splits)


def lg2():
    x = np.arange(0x3F800000, 0x40000000, dtype=np.uint32).view(np.float32)
    exact = np.log2(x.astype(float))
    error = np.abs(mufu.lg2(x) - exact)
    ratio = error / (device_errors.LG2_ABS + device_errors.LG2_REL * np.abs(exact))
    over = [hex(int(bits)) for bits in x[ratio > 1].view(np.uint32)]
    print(f"LG2: {ratio.max():.4f}, above 1 at {', '.join(over)}")


if __name__ == "__main__":
    for rows in (v1, v1_sink, v2, v3_and_v4, v5_to_v9, lg2):
        rows()
