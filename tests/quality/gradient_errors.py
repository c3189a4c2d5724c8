"""Errors of our gradients beside FlashAttention-3's: ``python -m tests.quality.gradient_errors --heads 2 --jobs 2``.

The accuracy experiment of the FlashAttention-3 paper in fp16 at head_dim 128: Q, K and V of N(0, 1) + N(0, 100)
Bernoulli(0.001), and plain normal ones, with a normal dO. Our twin and that of the released FlashAttention-3, each
behind its own forward, or both behind that of ``--forward``; relative RMSE against the float64 gradients of what the
kernels saw.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.backward import backward_config
from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.backward import backward
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, BackwardOperands
from fa3verify.inputs.recipe import Recipe
from fa3verify.operations.backward import drawn_dout

FAMILIES = ("gluon", "flash3.dew")
INPUTS = {"sd 10": "fa3_outliers", "normal": "normal"}


class Errors(NamedTuple):
    """Relative RMSE of one kernel's gradients."""

    dq: float
    dk: float
    dv: float


def errors(family: str, inputs: str, causal: bool, heads: int, seqlen: int, seed: int, before: str) -> Errors:
    """Run a family's backward twin on one batch, behind the forward twin of the family ``before``."""
    problem = AttentionProblem(1, heads, heads, seqlen, seqlen, 128, causal=causal)
    drawn = Recipe(INPUTS[inputs], seed=seed).draw(problem)
    dout = drawn_dout(problem, Recipe("normal", seed=seed))
    q, k, v, dout = (encode(x, FORMATS["fp16"], "ieee") for x in (*drawn, dout))
    operands = BackwardOperands(q, k, v, dout=dout, out=dout, lse=np.zeros(problem.lse_shape, np.float32))
    out, lse = forward(problem, operands, default_config(problem, family=before))
    operands = BackwardOperands(q, k, v, dout=dout, out=out, lse=lse)
    got = backward(problem, operands, backward_config(problem, family=family))
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    truth = attention_bwd(problem, q, k, v, dout, attention(problem, q, k, v))
    return Errors(*(_relative_rmse(a, b) for a, b in zip(got, truth, strict=True)))


def _relative_rmse(got: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - truth) / np.linalg.norm(truth))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("heads", 1), ("seqlen", 2048), ("seed", 0), ("jobs", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--forward", choices=FAMILIES)
    given = parser.parse_args()
    tasks = list(product(INPUTS, (False, True), FAMILIES))
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        shape = given.heads, given.seqlen, given.seed
        found = [
            pool.submit(errors, family, inputs, causal, *shape, given.forward or family)
            for inputs, causal, family in tasks
        ]
        for (inputs, causal, family), future in zip(tasks, found, strict=True):
            figures = " | ".join(f"{x:.3e}" for x in future.result())
            print(f"| {inputs} | {'causal' if causal else 'dense'} | {family} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
