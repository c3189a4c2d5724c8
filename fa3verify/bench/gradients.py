"""Gradients as the bench times them: ours and the peers', each judged on a cut of its own output.

The last rows with all keys are a problem of their own, whose dQ is whole; the last keys with all rows, or under a mask
with the rows that see them, are one whose dK and dV are. Both are judged by the error bound of any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from fa3_kernels.gluon.launch import forward
from fa3_kernels.plan.request import Semantics
from fa3_reference.attention import Attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.bounds.backward import backward_bound
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.problem import AttentionProblem, BackwardOperands
from fa3verify.bench.graphs import GraphTimed
from fa3verify.bench.kernels import Prepared, TimedKernel
from fa3verify.known import backward_launches, loaded
from fa3verify.known.backward_launches import GivenBackward
from fa3verify.known.launches import Given
from fa3verify.known.libraries import Unsupported
from fa3verify.known.peers import BACKWARDS
from fa3verify.operations.ratios import error_ratio
from fa3verify.tensors.convert import to_numpy
from fa3verify.timed.cells import Cell
from fa3verify.timed.results import SampleFigures

EDGE = 64  # rows or keys of a cut
_ABOUT = {
    "gluon": "this package, parts of dQ added in any order",
    "gluon.deterministic": "this package, parts of dQ added in a fixed order",
}


def given_of(cell: Cell, x: Given, seed: int) -> GivenBackward:
    """Return what a backward of a set of inputs reads: N(0, 1) gradients of the output, and our forward's out and
    lse.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    out, lse = forward(x.q, x.k, x.v, Semantics.of(cell.problem))
    dout = torch.randn(out.shape, device="cuda", dtype=torch.float32, generator=generator).to(out.dtype)
    return GivenBackward(x.q, x.k, x.v, dout, out, lse)


@lru_cache(maxsize=1)
def _given(cell: Cell, inputs: tuple[Given, ...]) -> tuple[GivenBackward, ...]:
    """Return what all kernels of a cell read."""
    return tuple(given_of(cell, x, i) for i, x in enumerate(inputs))


def _cut(cell: Cell, x: GivenBackward, rows: slice, keys: slice) -> tuple[AttentionProblem, BackwardOperands]:
    """Rows and keys of the last sequence and kv head."""
    group = cell.nheads // cell.nheads_kv
    heads = slice(cell.nheads - group, cell.nheads)
    of_rows = [to_numpy(y[-1:, rows, heads]) for y in (x.q, x.dout, x.out)]
    k, v = (to_numpy(y[-1:, keys, -1:]) for y in (x.k, x.v))
    lse = to_numpy(x.lse[-1:, heads, rows])
    sizes = {"nheads": group, "nheads_kv": 1, "seqlen_q": of_rows[0].shape[1], "seqlen_k": k.shape[1]}
    q, dout, out = of_rows
    problem = replace(cell.problem, batch=1, **sizes)
    return problem, BackwardOperands(q, k, v, dout=dout, out=out, lse=lse)


class _CutGradient(NamedTuple):
    """One gradient of a cut: where it lies in the whole one's rows and heads, its truth and its error bound."""

    name: str
    rows: slice
    heads: slice
    truth: np.ndarray
    bound: np.ndarray


@lru_cache(maxsize=1)  # all kernels of a cell are judged on the same tensors, which are hashed by identity
def _parts(cell: Cell, x: GivenBackward) -> tuple[_CutGradient, ...]:
    """dQ of the last rows and dK and dV of the last keys of the last head, in float64."""
    group = cell.nheads // cell.nheads_kv
    last_rows, last_keys = (slice(max(0, n - EDGE), n) for n in (cell.seqlen_q, cell.seqlen_k))
    whole = slice(0, None)
    heads = slice(cell.nheads - group, cell.nheads)
    seeing = last_rows if cell.causal else whole
    parts = []
    for rows, keys, names in ((last_rows, whole, ("dq",)), (seeing, last_keys, ("dk", "dv"))):
        problem, operands = _cut(cell, x, rows, keys)
        q, k, v, dout, out, lse = operands.dequantized(problem)
        truth = attention_bwd(problem, q, k, v, dout, Attention(out, lse))
        bound = backward_bound(problem, operands, BackwardModel.any_order(problem.dtype, accumulator="either"))
        for name in names:
            where = (rows, heads) if name == "dq" else (keys, slice(-1, None))
            parts.append(_CutGradient(name, *where, getattr(truth, name), getattr(bound, name)))
    return tuple(parts)


def judge(cell: Cell, x: GivenBackward, found: Sequence[torch.Tensor]) -> SampleFigures:
    """Compare the gradients of a cut, of dq, dk and dv, with float64."""
    returned: dict[str, torch.Tensor] = dict(zip(("dq", "dk", "dv"), found, strict=True))
    outputs = 0
    square = 0.0
    norm = 0.0
    worst = 0.0
    for part in _parts(cell, x):
        got = to_numpy(returned[part.name][-1:, part.rows, part.heads]).astype(np.float64)
        outputs += got.size
        square += float(((got - part.truth) ** 2).sum())
        norm += float((part.truth**2).sum())
        worst = max(worst, float(np.max(error_ratio(got - part.truth, part.bound), initial=0.0)))
    return SampleFigures(outputs, -1, math.sqrt(square / norm), math.nan, worst)


def _kernel(name: str) -> TimedKernel:
    missing = BACKWARDS[name].missing() if name in BACKWARDS else None

    def prepare(cell: Cell, inputs: Sequence[Given]) -> Prepared:
        backward = backward_launches.loaded(name)
        try:
            given = _given(cell, tuple(inputs))
            made = [backward(cell.problem, x) for x in given]
            made[0]()
        except ValueError as error:
            raise Unsupported(str(error)) from None
        return Prepared(GraphTimed(lambda i: made[i % len(made)]()), lambda: (given[0], made[0]()))

    about = _ABOUT.get(name) or f"{BACKWARDS[name].about}, {loaded.version(name)}"
    return TimedKernel(
        name,
        about,
        ("fp16", "bf16"),
        prepare,
        missing=missing,
        belongs=lambda cell: cell.grid == "backward",
        judge=lambda cell, returned: judge(cell, *returned),
    )


@cache
def _kernels() -> tuple[TimedKernel, ...]:
    return tuple(map(_kernel, backward_launches.NAMES))


def kernels(wants: Callable[[str], bool] = lambda name: True) -> list[TimedKernel]:
    """Load the backwards whose names are wanted."""
    return [kernel for kernel in _kernels() if wants(kernel.name)]
