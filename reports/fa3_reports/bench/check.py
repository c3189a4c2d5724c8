"""Checks of the outputs of timed kernels: some row tiles are compared with the twin and with float64.

The last rows of a sequence, with all its keys, are an attention problem of their own with the same row tile as in the
whole problem. The twin computes it in under a second, where the whole would take minutes.

For gradients, dQ of the last rows needs all keys, and dK and dV of the last keys need all rows, or under a mask the
rows that see them. Both are compared with float64 within the error bound of any order. :mod:`fa3_reports.bench.run`
calls the checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from fa3_kernels.plan.config import Config
from fa3_reference.attention import Attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.bounds import BackwardModel, KernelModel
from fa3_reference.bounds.backward import backward_bound
from fa3_reference.problem import AttentionProblem, BackwardOperands
from fa3_reports.bench.cells import Cell
from fa3_reports.bench.results import SampleFigures
from fa3verify.bench.check import Sample, bits_differing, edges, last_tiles, positions, ratio_max
from fa3verify.known.launches import Given, GivenBackward, LaunchOutput
from fa3verify.operations.operation import error_ratio
from fa3verify.tensors.convert import to_numpy

MAX_ROWS = 128  # that are compared where the row tile is not known
EDGE = 64  # rows, or keys, whose gradients are compared


class Gathered(NamedTuple):
    """Holds what is checked of one output, copied to the host.

    ``tiles`` are row tiles that are compared with float64, and with the twin if ``config`` says how it is launched;
    ``edges`` are rows whose error must be within the bound of ``model``. ``scale`` multiplies the output.
    """

    tiles: tuple[Sample, ...]
    edges: tuple[Sample, ...]
    scale: float
    config: Config | None
    model: KernelModel | None


def gather(
    cell: Cell, given: Given, output: LaunchOutput, config: Config | None, model: KernelModel | None = None
) -> Gathered:
    """Copy the parts of an output that are checked from the GPU: of the first and of the last (sequence, head).

    Parameters
    ----------
    given : Given
        The operands of ``output``.
    config : Config, optional
        For our kernels: O and LSE must have the bits of the twin in this configuration.
    model : KernelModel, optional
        For peers: the order of operations whose error bound the output must keep.
    """
    rows = positions(cell.problem, config) if config else MAX_ROWS
    tiles = last_tiles(cell.problem, given, output, rows)
    sampled = [] if model is None else edges(cell.problem, given, output)
    return Gathered(tiles, tuple(sampled), output.scale, config, model)


def judge(work: Gathered) -> SampleFigures:
    """Compare an output with the twin, with float64 and with its error bound, as far as :class:`Gathered` has them.

    Relative error and gain are NaN where all sampled truth is 0. ValueError if the twin has outputs of another shape or
    dtype.
    """
    outputs = differing = 0
    square = norm = product = 0.0
    for part in work.tiles:
        truth = part.truth
        value = part.out.astype(np.float64) * work.scale
        square += float(((value - truth) ** 2).sum())
        norm += float((truth**2).sum())
        product += float((value * truth).sum())
        outputs += part.out.size
        if work.config is not None:
            differing += bits_differing(part, work.config)
    bits = differing if work.config is not None else -1
    model = work.model
    ratio = math.nan if model is None else max(ratio_max(part, model, work.scale) for part in work.edges)
    return SampleFigures(outputs, bits, math.sqrt(square / (norm or math.nan)), product / (norm or math.nan) - 1, ratio)


def _cut(cell: Cell, x: GivenBackward, rows: slice, keys: slice) -> tuple[AttentionProblem, BackwardOperands]:
    """Return the backward problem of some rows and keys of the last sequence and kv head, on the host."""
    group = cell.nheads // cell.nheads_kv
    heads = slice(cell.nheads - group, cell.nheads)
    of_rows = [to_numpy(y[-1:, rows, heads]) for y in (x.q, x.dout, x.out)]
    k, v = (to_numpy(y[-1:, keys, -1:]) for y in (x.k, x.v))
    lse = to_numpy(x.lse[-1:, heads, rows])
    sizes = {"nheads": group, "nheads_kv": 1, "seqlen_q": of_rows[0].shape[1], "seqlen_k": k.shape[1]}
    q, dout, out = of_rows
    problem = replace(cell.problem, batch=1, **sizes)
    return problem, BackwardOperands(q, k, v, dout=dout, out=out, lse=lse)


@lru_cache(maxsize=1)  # all kernels of a cell are judged on the same tensors, which are hashed by identity
def _true_gradients(cell: Cell, x: GivenBackward) -> dict[str, tuple[slice, slice, np.ndarray, np.ndarray]]:
    """Return for dQ of the last rows, and dK and dV of the last keys, of the last head: rows and heads of the whole
    gradient in which it lies, its truth in float64, and its error bound.
    """
    group = cell.nheads // cell.nheads_kv
    last_rows, last_keys = (slice(max(0, n - EDGE), n) for n in (cell.seqlen_q, cell.seqlen_k))
    whole = slice(0, None)
    heads = slice(cell.nheads - group, cell.nheads)
    seeing = last_rows if cell.causal else whole
    gradients = {}
    for rows, keys, names in ((last_rows, whole, ("dq",)), (seeing, last_keys, ("dk", "dv"))):
        problem, operands = _cut(cell, x, rows, keys)
        q, k, v, dout, out, lse = operands.dequantized(problem)
        truth = attention_bwd(problem, q, k, v, dout, Attention(out, lse))
        bound = backward_bound(problem, operands, BackwardModel.any_order(problem.dtype, accumulator="either"))
        where = (rows, heads) if names == ("dq",) else (keys, slice(-1, None))
        gradients |= {name: (*where, getattr(truth, name), getattr(bound, name)) for name in names}
    return gradients


def judge_gradients(cell: Cell, x: GivenBackward, found: Sequence[torch.Tensor]) -> SampleFigures:
    """Compare parts of dq, dk and dv, in this order, with float64 and their bound; their bits are not compared."""
    returned: dict[str, torch.Tensor] = dict(zip(("dq", "dk", "dv"), found, strict=True))
    outputs = 0
    square = norm = worst = 0.0
    for name, (rows, heads, truth, bound) in _true_gradients(cell, x).items():
        got = to_numpy(returned[name][-1:, rows, heads]).astype(np.float64)
        outputs += got.size
        square += float(((got - truth) ** 2).sum())
        norm += float((truth**2).sum())
        worst = max(worst, float(np.max(error_ratio(got - truth, bound), initial=0.0)))
    return SampleFigures(outputs, -1, math.sqrt(square / (norm or math.nan)), math.nan, worst)
