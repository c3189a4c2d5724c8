"""Accumulator loss: what a forward loses over long rows of keys, V ~ N(mean, 1), with one scale per tensor in FP8.

Errors are against the dequantised operands, so that only P rounding, accumulation and output rounding remain. With V of
mean 0 (the paper's test) nothing shows; with mean 1 a chained accumulator loses a growing share of the output.
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
    """Holds errors of an output over the root mean square of the exact one, and its regression gain on it minus 1."""

    rel_rmse: float
    max_rel_error: float
    bias: float


def lost(out: np.ndarray, truth: np.ndarray) -> Lost:
    """Compare an output with the exact one."""
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
    """Return the operands of a problem, and the exact output of these."""
    with watch.warming(f"draws of {problem.seqlen_k} keys"):
        arrays = Recipe("offset_v", {"mean": v_mean}, seed).draw(problem)
        operands = prepare(problem, *arrays, QuantScheme("tensor") if problem.dtype == "e4m3" else None).operands
        return operands, attention(problem, *operands.dequantized(problem)).out


def measure(kernel: str, v_mean: float, seqlen_k: int, rows: int, seed: int) -> Lost | None:
    """Return what a forward, of any dtype, loses at one length; None where it does not take that, or is no forward."""
    asked = registry.find(kernel)
    if asked.operation != operations.FORWARD:
        return None
    problem = problem_of(asked.dtype, rows, seqlen_k)
    if asked.refusal(problem):
        return None
    operands, truth = drawn(problem, v_mean, seed)
    config = asked.code.configure(problem)
    returned = asked.code.run(problem, operands, config)
    return lost(operations.find(operations.FORWARD).named(returned, problem, config)["out"], truth)
