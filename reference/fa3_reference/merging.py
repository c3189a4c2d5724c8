"""Partial results of attention, merged in float64 by their lse: the truth of kernels that merge.

    lse = log sum_i exp(lse_i),  out = sum_i exp(lse_i - lse) out_i

over parts of the keys that have out_i and lse_i. :mod:`fa3_reference.bounds.merging` bounds how far a kernel may be
from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fa3_reference.attention import Attention, scaled_scores, softmax
from fa3_reference.problem import Array, AttentionProblem, Element, Floats, Operands

NOISE = 2.0**-45  # relative error of float64 in a merge of 64 parts


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOperands(Operands):
    """Holds what a kernel sees that merges: outputs of parts in 16 bits or binary32, and their natural-log lse.

    ``outs`` is (parts, *problem.out_shape), ``lses`` float32 (parts, *problem.lse_shape). The parts are those of q, k
    and v, which the kernel does not see.
    """

    outs: Array
    lses: NDArray[np.float32]

    def dequantized(self, problem: AttentionProblem) -> tuple[NDArray[np.float64], ...]:  # type: ignore[override]
        """Return outs and lses as float64 values, exactly."""
        return self.outs.astype(np.float64), self.lses.astype(np.float64)


@np.errstate(invalid="ignore", divide="ignore")
def merge(outs: Floats, lses: Floats) -> Attention:
    """Merge partial results.

    Parameters
    ----------
    outs : float array (parts, ..., nheads, head_dim_v)
        Outputs of the parts, batched (parts, batch, seqlen_q, nheads, head_dim_v) or packed (parts, tokens, nheads,
        head_dim_v); any float dtype, converted exactly.
    lses : float array (parts, ..., nheads, seqlen_q)
        Their natural-log lse, (parts, batch, nheads, seqlen_q) or (parts, nheads, tokens).

    Returns
    -------
    Attention
        out and lse of all parts, float64, with a relative error of :data:`NOISE` of sum_i w_i |out_i| and of 1 + |lse|.
        A part whose lse is -inf has weight 0, whatever its out holds, NaN included. Where all are, out is 0 and lse
        -inf. A NaN or +inf in an lse makes its row NaN.

    Examples
    --------
    >>> out, lse = merge(np.array([[[[1.0]]], [[[4.0]]]]), np.log([[[2.0]], [[1.0]]]))
    >>> round(float(out[0, 0, 0]), 6), round(float(np.exp(lse[0, 0])), 6)
    (2.0, 3.0)
    """
    outs = np.asarray(outs).astype(np.float64, copy=False)
    lses = np.asarray(lses).astype(np.float64, copy=False)
    weights, total, lse = softmax(np.array(lses.reshape(len(lses), -1).T))
    weights = by_rows((weights / np.where(total == 0, 1.0, total)[:, None]).T.reshape(lses.shape))
    out = np.where(by_rows(np.isneginf(lses)), 0.0, weights * outs).sum(axis=0)
    return Attention(out, lse.reshape(lses.shape[1:]))


def by_rows(lses: NDArray[Element]) -> NDArray[Element]:
    """Return what lies as lse does, (..., nheads, seqlen_q), as outputs do, (..., seqlen_q, nheads, 1); a view."""
    return np.swapaxes(lses, -1, -2)[..., None]


def parts_of(problem: AttentionProblem, q: Floats, k: Floats, v: Floats, count: int) -> Attention:
    """Attend to the keys of every sequence in ``count`` parts of about equal length.

    Parameters
    ----------
    problem : AttentionProblem
        One without a cache, sinks and a term of scores.
    q, k, v : float arrays of shapes ``problem.q_shape``, ``k_shape``, ``v_shape``
        Any float dtype; finite.
    count : int
        At least 1. Where a sequence has fewer keys some parts have none.

    Returns
    -------
    Attention
        out (count, *problem.out_shape) and lse (count, *problem.lse_shape) of the parts in the order of the keys,
        float64, exact but for float64's rounding; out is 0 and lse -inf in rows that see no key of a part.
    """
    outs = np.zeros((count, *problem.out_shape))
    lses = np.full((count, *problem.lse_shape), -np.inf)
    for seq in problem.sequences():
        first, stop = problem.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)
        edges = np.linspace(0, seq.seqlen_k, count + 1).astype(int)
        for head in range(problem.nheads):
            rows = problem.rows_q(q, seq)[:, head]
            keys, values = (problem.rows_k(x, seq)[:, head // problem.group] for x in (k, v))
            for i, (low, high) in enumerate(pairwise(edges)):
                columns = np.arange(low, high)
                hidden = (columns < first[:, None]) | (columns >= stop[:, None])
                s = np.where(hidden, -np.inf, scaled_scores(problem, rows, keys[low:high]))
                with np.errstate(divide="ignore"):
                    p, total, problem.rows_lse(lses[i], seq)[head] = softmax(s)
                own = p @ values[low:high] / np.where(total == 0, 1.0, total)[:, None]
                problem.rows_q(outs[i], seq)[:, head] = own
    return Attention(outs, lses)
