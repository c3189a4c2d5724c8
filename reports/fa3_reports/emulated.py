"""What FlashAttention-3 must beat: unfused FP16 and per-tensor FP8 attention, emulated in float32 tile
loops.

Emulations of arithmetic, not of a machine: products and sums are IEEE float32 in whatever order BLAS takes,
exp is accurate, and Hopper's shorter FP8 accumulator is not modelled. Their errors are meant to be compared
as RMSE.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from fa3_reference.attention import Attention, QueryTile, as_float64, row_tiles
from fa3_reference.formats import FORMATS, encode, round_to
from fa3_reference.problem import AttentionProblem, Operands, Sequence

P_OFFSET_LOG2 = np.float32(8.0)  # P spans [0, 256]: fewer probabilities fall below e4m3's 2^-10
LOG2_E = np.float32(math.log2(math.e))
LN_2 = np.float32(math.log(2.0))
_E4M3 = FORMATS["e4m3"].dtype


_TileFunction = Callable[[QueryTile], tuple[np.ndarray, np.ndarray]]  # out (rows, head_dim_v), lse (rows,)


def _per_head(problem: AttentionProblem, compute: Callable[[Sequence, int], _TileFunction]) -> Attention:
    """Fill out and lse tile by tile; rows that see no key keep 0 and -inf."""
    out = np.zeros(problem.out_shape)
    lse = np.full(problem.lse_shape, -np.inf)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        for seq in problem.sequences():
            for head in range(problem.nheads):
                one_tile = compute(seq, head)
                for tile in row_tiles(problem, seq, np.arange(seq.seqlen_q)):
                    out_tile, lse_tile = one_tile(tile)
                    problem.rows_q(out, seq)[tile.rows, head] = out_tile
                    problem.rows_lse(lse, seq)[head, tile.rows] = lse_tile
    return Attention(out, lse)


def _half(x: np.ndarray) -> np.ndarray:
    """Round float32 to fp16, kept as float32."""
    return x.astype(np.float16).astype(np.float32)


def standard_attention_fp16(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale_on: Literal["s", "q"] = "s",
) -> Attention:
    """Compute attention the unfused way, every intermediate stored in FP16.

    Parameters
    ----------
    q, k, v : float arrays of the problem's shapes
        Rounded to fp16 on entry.
    scale_on : {"s", "q"}
        Whether softmax_scale multiplies the stored scores, or Q before the first product. Either product
        rounds to fp16.

    Returns
    -------
    Attention
        ``out`` holds fp16 values, ``lse`` float32 values, both as float64. Rounded to fp16 on the way: S
        (before and after scaling and softcap), the normalised P, and O; products accumulate and the softmax
        works in float32. Empty rows as in :func:`~fa3_reference.attention.attention`. A score beyond 65504
        becomes Inf and its row NaN: FP16 softmax does that. NaN or Inf anywhere in V may poison rows that do
        not see it.

    Raises
    ------
    ValueError
        If an operand has the wrong shape or ``scale_on`` is unknown.
    """
    if scale_on not in ("s", "q"):
        raise ValueError(f"scale_on must be 's' or 'q', got {scale_on!r}")
    operands = as_float64(q=(q, problem.q_shape), k=(k, problem.k_shape), v=(v, problem.v_shape))
    q, k, v = (encode(x, FORMATS["fp16"], "ieee").astype(np.float32) for x in operands)
    scale = np.float32(problem.softmax_scale)

    def compute(seq: Sequence, head: int) -> _TileFunction:
        q_head = problem.rows_q(q, seq)[:, head]
        k_head, v_head = (problem.rows_k(x, seq)[:, head // problem.group] for x in (k, v))

        def one_tile(tile: QueryTile) -> tuple[np.ndarray, np.ndarray]:
            q_rows = q_head[tile.rows]
            keys = k_head[tile.keys]
            if scale_on == "q":
                s = _half(_half(q_rows * scale) @ keys.T)
            else:
                s = _half(_half(q_rows @ keys.T) * scale)
            if problem.softcap > 0:
                s = _half(np.float32(problem.softcap) * np.tanh(s / np.float32(problem.softcap)))
            return _softmax_times_v_fp16(s, tile.visible, v_head[tile.keys])

        return one_tile

    return _per_head(problem, compute)


def _softmax_times_v_fp16(s: np.ndarray, visible: np.ndarray | None, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if visible is not None:
        s[~visible] = -np.inf
    row_max = s.max(axis=1)
    p = np.exp(s - row_max[:, None])
    row_sum = p.sum(axis=1)
    p = _half(p / row_sum[:, None])
    return _half(p @ v), row_max + np.log(row_sum)


def emulated_fp8_attention(
    problem: AttentionProblem,
    operands: Operands,
    *,
    tile_n: int = 128,
    out_dtype: Literal["bf16", "fp16"] = "bf16",
) -> Attention:
    """Compute FP8 attention as FlashAttention-3 does, with any grain of descales, in a float32 tile loop.

    Parameters
    ----------
    operands : Operands
        e4m3 with or without descales. One scale per tensor makes this the paper's FP8 baseline.
    tile_n : int
        Keys per step of the online softmax; visited right to left.
    out_dtype : {"bf16", "fp16"}

    Returns
    -------
    Attention
        ``out`` rounded to ``out_dtype``, ``lse`` in float32, both as float64. P * 2^8 rounds to e4m3 before
        the second product while the row sum keeps the unrounded P. Empty rows as in
        :func:`~fa3_reference.attention.attention`. NaN anywhere in V may poison rows that do not see it.

    Raises
    ------
    ValueError
        If the problem is not e4m3, operands do not fit it, ``tile_n`` is below 1 or ``out_dtype`` is unknown.
    """
    if problem.dtype != "e4m3":
        raise ValueError(f"emulated FP8 attention needs dtype e4m3, got {problem.dtype}")
    if tile_n < 1:
        raise ValueError(f"tile_n must be at least 1, got {tile_n}")
    if out_dtype not in ("bf16", "fp16"):
        raise ValueError(f"out_dtype must be 'bf16' or 'fp16', got {out_dtype!r}")
    operands.check(problem)
    # Descales enter Q, K and V as float32 factors: one rounding each per element, far below the e4m3 error.
    q, k, v = (x.astype(np.float32) for x in operands.dequantized(problem))

    def compute(seq: Sequence, head: int) -> _TileFunction:
        q_head = problem.rows_q(q, seq)[:, head]
        k_head, v_head = (problem.rows_k(x, seq)[:, head // problem.group] for x in (k, v))

        def one_tile(tile: QueryTile) -> tuple[np.ndarray, np.ndarray]:
            arrays = (q_head[tile.rows], k_head[tile.keys], v_head[tile.keys])
            return _online_softmax_fp8(problem, *arrays, tile.visible, tile_n)

        return one_tile

    out, lse = _per_head(problem, compute)
    return Attention(round_to(out, FORMATS[out_dtype], "ieee"), lse)


def _scores_log2(problem: AttentionProblem, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    s = q @ k.T
    s *= np.float32(problem.softmax_scale)
    if problem.softcap > 0:
        s = np.float32(problem.softcap) * np.tanh(s / np.float32(problem.softcap))
    return s * LOG2_E


def _online_softmax_fp8(
    problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray | None, tile_n: int
) -> tuple[np.ndarray, np.ndarray]:
    height = q.shape[0]
    seqlen_k = k.shape[0]
    row_max = np.full(height, -np.inf, np.float32)
    row_sum = np.zeros(height, np.float32)
    acc = np.zeros((height, problem.head_dim_v), np.float32)
    for start in reversed(range(0, seqlen_k, tile_n)):
        keys = slice(start, min(start + tile_n, seqlen_k))
        s = _scores_log2(problem, q, k[keys])  # float32 (rows, tile_n)
        if visible is not None:
            s[~visible[:, keys]] = -np.inf
        new_max = np.maximum(row_max, s.max(axis=1))
        shift = np.where(np.isneginf(new_max), np.float32(0), new_max)
        rescale = np.exp2(row_max - shift)
        p = np.exp2(s - shift[:, None] + P_OFFSET_LOG2)
        row_sum = row_sum * rescale + p.sum(axis=1)
        acc = acc * rescale[:, None] + p.astype(_E4M3).astype(np.float32) @ v[keys]
        row_max = new_max
    return acc / row_sum[:, None], (row_max + np.log2(row_sum) - P_OFFSET_LOG2) * LN_2
