"""Gradients before the last rounding, with the ends of what additions of their parts in any order can give.

The arithmetic is that of :mod:`fa3_kernels.twin.backward` for FlashAttention-3, on whole small problems; a test
compares the two once this is rounded. Error over bound is largest at one of the two ends, so that no order need be
tried.
"""

from __future__ import annotations

import numpy as np

from fa3_kernels.twin import convert, float32
from fa3_kernels.twin.backward import LOG2_E, capped, row_dots, scale_log2
from fa3_kernels.twin.wgmma import operand, operand_b, wgmma
from fa3_reference.problem import BackwardOperands
from fa3_reports.adversary.gradients.colony import GradientColony, GradientIsland
from fa3_reports.gradient_range import Range, range_of_sums

_F32 = np.float32
GRADIENTS = ("dq", "dk", "dv")


def execute(colony: GradientColony) -> dict[str, Range]:
    """Run every individual of a colony; returns both ends of every gradient, float32, in the shapes of q, k and v."""
    with np.errstate(all="ignore"):
        operands = colony.operands
        found = [_problem(colony, operands, index) for index in range(len(colony.q))]
    ends = (Range(*(np.stack(x) for x in zip(*parts))) for parts in zip(*found))
    return dict(zip(GRADIENTS, ends, strict=True))


def _problem(colony: GradientColony, operands: BackwardOperands, index: int) -> tuple[Range, Range, Range]:
    """Run one individual; dK is scaled by head, before heads are added, and a single head's is not added at all."""
    scale = _F32(colony.environment.softmax_scale)
    heads = range(colony.island.heads)
    dqs, dks, dvs = zip(*(_head(colony, operands, index, head) for head in heads))
    dq = [range_of_sums(x, flushes=False) for x in dqs]
    dk = _heads_sum([float32.flushed(float32.flushed(x) * scale) for x in dks])
    dv = _heads_sum(list(dvs))
    scaled = (np.stack([float32.flushed(float32.flushed(end) * scale) for end in ends], 1) for ends in zip(*dq))
    dk, dv = (Range(*(end[:, None] for end in ends)) for ends in (dk, dv))
    return Range(*scaled), dk, dv


def _heads_sum(parts: list[np.ndarray]) -> Range:
    if len(parts) == 1:
        return Range(parts[0], parts[0])
    return Range(*(float32.flushed(end) for end in range_of_sums(np.stack(parts), flushes=False)))


def _head(colony: GradientColony, operands: BackwardOperands, index: int, head: int) -> tuple[np.ndarray, ...]:
    """Return what one query head adds, float32: to dQ (blocks, rows, head_dim), and to dK and dV (keys, head_dim)."""
    island = colony.island
    q, dout, out = (x[index, :, head] for x in (operands.q, operands.dout, operands.out))
    k, v = (x[index, :, 0] for x in (operands.k, operands.v))
    p, ds = _weights(colony, q, k, v, dout, row_dots(out, dout, island.order), operands.lse[index, head])
    cuts = [slice(start, start + island.tile_n) for start in range(0, island.keys, island.tile_n)]
    dq = np.stack([_product(ds[:, cut], k[cut], island) for cut in cuts])
    return dq, _product(ds.T, q, island), _product(p.T, dout, island)


def _weights(
    colony: GradientColony,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    dots: np.ndarray,
    lse: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return P and dS of all pairs, float32 (rows, keys); a softcap's slope is taken before the mask."""
    flushed = float32.flushed
    dtype = colony.island.dtype
    s = wgmma(operand(q, dtype), operand_b(k, dtype))
    slope = None
    scores = colony.environment.softmax_scale, colony.environment.softcap, colony.island.order
    if colony.environment.softcap:
        s, slope = capped(s, *scores)
    first, stop = colony.problem.visible_keys(np.arange(len(q)), len(q), len(k))
    keys = np.arange(len(k))
    s[(keys < first[:, None]) | (keys >= stop[:, None])] = -np.inf
    lse = np.where(np.isneginf(lse), _F32(0), lse)
    factor = flushed(np.array([scale_log2(*scores)]))
    p = float32.exp2_scaled(s, np.repeat(factor, len(s)), flushed(flushed(lse) * _F32(LOG2_E)))
    dp = flushed(wgmma(operand(dout, dtype), operand_b(v, dtype)))
    ds = flushed(p * flushed(dp - dots[:, None]))
    return p, ds if slope is None else flushed(ds * slope)


def _product(weights: np.ndarray, x: np.ndarray, island: GradientIsland) -> np.ndarray:
    """Return weights (rows, n) times x (n, head_dim), float32: one chain of wgmma, or exact where weights are not
    rounded.
    """
    if island.weights == "fp32":
        return (weights.astype(np.float64) @ x.astype(np.float64)).astype(_F32)
    columns = operand_b(np.ascontiguousarray(x.T), island.dtype)
    return wgmma(operand(convert.encode_f32(np.ascontiguousarray(weights), island.dtype), island.dtype), columns)
