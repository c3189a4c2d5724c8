"""Checks of the outputs of timed kernels: some row tiles are compared with the twin and with float64.

The last rows of a sequence, with all its keys, are an attention problem of their own with the same row tile as in the
whole problem. The twin computes it in under a second, where the whole would take minutes.

For gradients, dQ of the last rows needs all keys, and dK and dV of the last keys need all rows, or under a mask the
rows that see them. Both are compared with float64 within the error bound of any order. :mod:`fa3verify.bench.run`
calls the checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.tiles import power_of_two
from fa3_reference.attention import Attention, attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.bounds import BackwardModel, KernelModel
from fa3_reference.bounds.backward import backward_bound
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.formats import FORMATS, ulp
from fa3_reference.problem import AttentionProblem, BackwardOperands, Descale, Operands
from fa3verify.known.launches import Given, GivenBackward, LaunchOutput
from fa3verify.operations.ratios import error_ratio
from fa3verify.tensors.convert import to_numpy
from fa3verify.timed.cells import Cell
from fa3verify.timed.results import SampleFigures

MAX_ROWS = 128  # that are compared where the row tile is not known
EDGE = 64  # rows, or keys, whose gradients are compared
EDGE_ROWS = 8  # rows whose bound is computed: it takes ten times as long as their truth
SCALING = 2.0**-22  # relative error of a scale in binary32, and of a product with it


class Sample(NamedTuple):
    """Some rows of one sequence and one group of heads, with the keys that the last of them may see, and the outputs.

    ``lse`` is None if the kernel returned none.
    """

    problem: AttentionProblem
    operands: Operands
    out: np.ndarray
    lse: np.ndarray | None

    @property
    def truth(self) -> np.ndarray:
        """Return float64 attention of the dequantised operands."""
        return attention(self.problem, *self.operands.dequantized(self.problem)).out


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


def last_rows(cell: Cell, config: Config | None) -> int:
    """Return how many rows the last row tile of a sequence has; without a configuration :data:`MAX_ROWS` at most.

    >>> from fa3_kernels.plan.config import default_config
    >>> cell = Cell("paper", "fp16", 32, 500, 500, 16, 16, 128, False)
    >>> last_rows(cell, default_config(cell.problem))  # tiles of 128 rows: 384 and 116
    116
    """
    if config is None:
        return min(cell.seqlen_q, MAX_ROWS)
    positions = config.tile_m // power_of_two(cell.nheads // cell.nheads_kv) if config.pack_gqa else config.tile_m
    return (cell.seqlen_q - 1) % positions + 1


def sample(cell: Cell, given: Given, output: LaunchOutput, rows: slice, batch: int, head_kv: int) -> Sample:
    """Cut some rows of one sequence and kv head out of operands and output, and copy them to the host."""
    group = cell.nheads // cell.nheads_kv
    heads = slice(head_kv * group, (head_kv + 1) * group)
    keys = max(0, cell.seqlen_k - (cell.seqlen_q - rows.stop if cell.causal else 0))
    q, out = (to_numpy(x[batch : batch + 1, rows, heads]) for x in (given.q, output.out))
    k, v = (to_numpy(x[batch : batch + 1, :keys, head_kv : head_kv + 1]) for x in (given.k, given.v))
    lse = None if output.lse is None else to_numpy(output.lse[batch : batch + 1, heads, rows])
    sizes = {"nheads": group, "nheads_kv": 1, "seqlen_q": rows.stop - rows.start, "seqlen_k": keys}
    descales = [
        None if x is None else Descale(np.full((1, n, 1), float(x[batch, head_kv]), np.float32))
        for n, x in zip((group, 1, 1), (given.q_descale, given.k_descale, given.v_descale))
    ]
    return Sample(replace(cell.problem, batch=1, **sizes), Operands(q, k, v, *descales), out, lse)


def edges(cell: Cell, given: Given, output: LaunchOutput) -> Iterator[Sample]:
    """Yield the rows of the last sequence and head in which a wrong mask shows.

    These are the first rows, and under a mask the last ones, which then see most keys.
    """
    rows = [slice(0, min(EDGE_ROWS, cell.seqlen_q))]
    if cell.causal and cell.seqlen_q > EDGE_ROWS:
        rows.append(slice(cell.seqlen_q - EDGE_ROWS, cell.seqlen_q))
    for each in rows:
        yield sample(cell, given, output, each, cell.batch - 1, cell.nheads_kv - 1)


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
    rows = slice(cell.seqlen_q - last_rows(cell, config), cell.seqlen_q)
    places = sorted({(0, 0), (cell.batch - 1, cell.nheads_kv - 1)})
    tiles = tuple(sample(cell, given, output, rows, *place) for place in places)
    return Gathered(tiles, () if model is None else tuple(edges(cell, given, output)), output.scale, config, model)


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
            differing += _bits_differing(part, work.config)
    bits = differing if work.config is not None else -1
    model = work.model
    ratio = math.nan if model is None else max(ratio_max(part, model, work.scale) for part in work.edges)
    return SampleFigures(outputs, bits, math.sqrt(square / (norm or math.nan)), product / (norm or math.nan) - 1, ratio)


def ratio_max(part: Sample, model: KernelModel, scale: float) -> float:
    """Return the largest error of a sample over the bound of an order of operations; infinite if an output is NaN.

    The bound is that before the last rounding. The rounding to the output's own format, at the output's scale, is added
    to it; in e4m3 outputs it is most of the error.
    """
    out = part.out
    truth = part.truth
    bound = forward_bound(part.problem, part.operands, replace(model, out_dtype="fp32")).out
    fmt = next(f for f in FORMATS.values() if f.dtype == out.dtype)
    reached = (bound + np.abs(truth) * SCALING) / scale  # error bound of the number that is rounded
    rounding = np.where(np.isinf(reached), 0.0, ulp(np.abs(truth) / scale + reached, fmt) / 2)
    bound = (reached + rounding) * scale
    return float(np.max(error_ratio(out.astype(np.float64) * scale - truth, bound), initial=0.0))


def _bits_differing(part: Sample, config: Config) -> int:
    from fa3_kernels.twin.forward import forward

    want = forward(part.problem, part.operands, config)
    out = part.out
    lse = part.lse
    assert lse is not None, "our kernels return one"
    if want.out.shape != out.shape or want.out.dtype != out.dtype:
        raise ValueError(f"out must be {want.out.dtype} {want.out.shape}, got {out.dtype} {out.shape}")
    wrong = np.count_nonzero(out.view(np.uint16) != want.out.view(np.uint16))
    return int(wrong + np.count_nonzero(lse.view(np.uint32) != want.lse.view(np.uint32)))


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
