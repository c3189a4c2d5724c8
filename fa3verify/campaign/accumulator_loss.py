"""Accumulator loss: the error of a forward over long rows of keys, with V ~ N(mean, 1) and in FP8 one scale per tensor.

Errors are against the dequantised operands, so that only P rounding, accumulation and output rounding remain. With V of
mean 0 (the paper's test) nothing shows; with mean 1 a chained accumulator loses a growing share of the output.
:mod:`fa3verify.commands.publish` calls :func:`measure` for every forward of an atlas.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from fa3_reference.attention import attention
from fa3_reference.problem import AttentionProblem, Dtype, Operands
from fa3_reference.quantize import QuantScheme, prepare
from fa3verify import operations
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels import watch
from fa3verify.known import registry

HEAD_DIM = 64


@dataclass(frozen=True, slots=True)
class Lost:
    """Errors of an output, divided by the root mean square of the exact one, and the regression gain minus 1 (bias)."""

    rel_rmse: float
    max_rel_error: float
    bias: float


def lost(out: np.ndarray, truth: np.ndarray) -> Lost:
    """Compare an output with the exact one, arrays of one shape; the exact one must not be all zeros."""
    out = out.astype(np.float64)
    error = out - truth
    level = float(np.sqrt(np.mean(np.square(truth))))
    rmse = float(np.sqrt(np.mean(np.square(error))))
    gain = float(np.sum(out * truth) / np.sum(truth * truth))
    return Lost(rmse / level, float(np.max(np.abs(error))) / level, gain - 1)


def problem_of(dtype: Dtype, rows: int, seqlen_k: int) -> AttentionProblem:
    """Return one head with so many query rows over so many keys."""
    return AttentionProblem(1, 1, 1, rows, seqlen_k, HEAD_DIM, dtype=dtype)


@functools.lru_cache(maxsize=1)
def drawn(problem: AttentionProblem, v_mean: float, seed: int) -> tuple[Operands, np.ndarray]:
    """Return the operands of a problem and their exact float64 output; the last draw is kept for the next kernel."""
    with watch.warming(f"draws of {problem.seqlen_k} keys"):
        arrays = Recipe("offset_v", {"mean": v_mean}, seed).draw(problem)
        operands = prepare(problem, *arrays, QuantScheme("tensor") if problem.dtype == "e4m3" else None).operands
        return operands, attention(problem, *operands.dequantized(problem)).out


def measure(kernel: str, v_mean: float, seqlen_k: int, rows: int, seed: int) -> Lost | None:
    """Return the loss of a forward of any dtype over ``seqlen_k`` keys, by ``rows`` queries of one head.

    None for a kernel that is no forward or does not take the length. It raises ValueError for an unknown kernel, and
    what the kernel itself raises.
    """
    forward = registry.find(kernel)
    if forward.operation != operations.FORWARD:
        return None
    problem = problem_of(forward.dtype, rows, seqlen_k)
    if forward.refusal(problem):
        return None
    operands, truth = drawn(problem, v_mean, seed)
    config = forward.code.configure(problem)
    returned = forward.code.run(problem, operands, config)
    return lost(operations.find(operations.FORWARD).named(returned, problem, config)["out"], truth)
