"""The dense softmax matrix of one head, by the steps of the reference."""

from __future__ import annotations

import numpy as np

from fa3_reference.attention import as_float64, cap_and_mask, row_tiles, scaled_scores, sinks_of, softmax
from fa3_reference.cache import rotated
from fa3_reference.problem import AttentionProblem, Sequence


def probabilities(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    sinks: np.ndarray | None = None,
    *,
    seq: Sequence,
    head: int,
) -> np.ndarray:
    """Return the dense softmax matrix of one sequence and query head, float64 (seqlen_q, seqlen_k), without its sink.

    Invisible keys and empty rows hold 0; special values as in :func:`attention`. Relative error of an entry
    <= 2 u ((head_dim + 8) spread + range + n + 8), in the notation of the module.

    Raises
    ------
    ValueError
        If an operand has the wrong shape.
    """
    q, k = rotated(problem, *as_float64(q=(q, problem.q_shape), k=(k, problem.k_shape)))
    sink = sinks_of(problem, sinks)[head]
    q_head = problem.rows_q(q, seq)[:, head]
    k_head = problem.rows_k(k, seq)[:, head // problem.group]
    dense = np.zeros((seq.seqlen_q, seq.seqlen_k))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for tile in row_tiles(problem, seq, np.arange(seq.seqlen_q)):
            s = scaled_scores(problem, q_head[tile.rows], k_head[tile.keys])
            p, row_sum, _ = softmax(cap_and_mask(problem, s, tile.visible), sink)
            dense[tile.rows, tile.keys] = p / row_sum[:, None]
    return dense
