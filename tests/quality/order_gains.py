"""How much each thing that is known of a kernel's order sharpens its bound: ``python -m tests.quality.order_gains``.

Median over the elements of O of the bound before the last rounding, relative to the root mean square of O, on one
problem of normal inputs; each line knows what the lines above it know. The last one is the width of the enclosure.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fa3_kernels.plan.config import default_config
from fa3_reference.attention import attention
from fa3_reference.bounds.enclosure import forward_enclosure
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import DTYPES, AttentionProblem, Dtype
from fa3_reference.quantize import QuantScheme, prepare


def models(dtype: Dtype, problem: AttentionProblem) -> dict[str, KernelModel]:
    """Return what is assumed, by what is known; each name adds to those before it."""
    config = default_config(problem)
    stated = replace(config.kernel_model(), out_dtype="fp32")
    known = KernelModel.any_order(dtype, "fp32", "either")
    steps = {"nothing": known}

    def learn(words: str, **changes: object) -> None:
        nonlocal known
        order = {name: value for name, value in changes.items() if hasattr(known.order, name)}
        rest = {name: value for name, value in changes.items() if name not in order}
        known = replace(known, order=replace(known.order, **order), **rest)  # type: ignore[arg-type]
        steps[words] = known

    learn("P is divided by the row sum at the end", weights="running")
    learn("products are the tensor core's", accumulator="wgmma", keeps_subnormals=True)
    learn(
        "tile, direction, promotion",
        keys=stated.order.keys,
        tile_m=stated.tile_m,
        tile_n=stated.tile_n,
        promotion_interval=stated.promotion_interval,
    )
    learn("O takes the factor of every block", rescale="always")
    learn("the exponential is ex2.approx, tanh that of ex2", exp_error=stated.exp_error, tanh_error=0.0)
    learn("maxima in log2 units", maxima="scaled")
    learn("the threads' row sums", row_sum=stated.order.row_sum)
    assert known == replace(stated, pads_group=known.pads_group)
    return steps


def gains(dtype: Dtype) -> dict[str, float]:
    """Return the bound, relative to the size of O, by what is known."""
    problem = AttentionProblem(1, 1, 1, 64, 1024, 64, dtype=dtype)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    x, _ = prepare(problem, q, k, v, QuantScheme("head") if dtype == "e4m3" else None)
    truth = attention(problem, *x.dequantized(problem)).out
    size = np.sqrt(np.mean(np.square(truth)))
    steps = models(dtype, problem)
    found = {words: float(np.median(forward_bound(problem, x, model).out)) for words, model in steps.items()}
    low, high = forward_enclosure(problem, x, list(steps.values())[-1]).out
    found["every step: the enclosure"] = float(np.median(high - low))
    return {words: value / float(size) for words, value in found.items()}


def table() -> str:
    """Return the table as Markdown."""
    columns = {dtype: gains(dtype) for dtype in DTYPES}
    lines = [f"| known | {' | '.join(DTYPES)} |", "|---|" + "---|" * len(DTYPES)]
    for words in columns["fp16"]:
        cells = (f"2^{np.log2(columns[dtype][words]):.1f}" for dtype in DTYPES)
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
