"""Terms of scores: what a call adds to its scores, or which of them it hides, beside a causal mask and a window.

    S_ij <- S_ij + B_ij,  after softmax_scale and softcap

B is an operand (a bias), or made of slopes (ALiBi, arXiv:2108.12409: B_ij = -slope |i + seqlen_k - seqlen_q - j|), or
-inf where a mask, a padding, another document or a function of the kernel (:mod:`fa3_reference.mods`) hides key j from
query i, and 0 elsewhere. A B of -inf hides a key wherever it comes from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3_reference.mods import hidden
from fa3_reference.problem import AttentionProblem, Sequence

Rows = NDArray[np.int64] | slice


def added(
    problem: AttentionProblem, term: NDArray[Any], seq: Sequence, head: int, rows: Rows = slice(None)
) -> NDArray[np.float64]:
    """Return what is added to the scores of one query head, in nats.

    Parameters
    ----------
    problem : AttentionProblem
        One with a term.
    term : array of shape ``problem.term_shape``
        The operand, in any format.
    seq : Sequence
        One of the problem's sequences.
    head : int
        A query head.
    rows : slice or int array
        Positions of queries in the sequence; all by default.

    Returns
    -------
    float64 array (rows, seqlen_k)
        Exact; -inf where a key is hidden. It may be a view that repeats rows.
    """
    assert problem.term is not None
    kind = problem.term.kind
    sizes = (seq.seqlen_q, seq.seqlen_k)
    if kind == "mods":
        queries = np.arange(sizes[0])[rows]
        places = np.full(queries.size, head), queries, np.arange(sizes[1])
        return np.where(hidden(problem.term, seq.index, *places), -np.inf, 0.0)
    if kind == "alibi":
        return -float(term[seq.index, head] if term.ndim == 2 else term[head]) * distances(seq, rows)
    if kind == "documents":
        ids = term[seq.index]
        seen = ids[: sizes[0]][rows, None] == ids[None, sizes[0] :]
    else:
        own = term[seq.index] if term.ndim == 2 else term[seq.index % len(term), head % term.shape[1]]
        seen = np.broadcast_to(own, sizes)[rows]
    if kind.startswith("bias"):
        return seen.astype(np.float64, copy=False)
    return np.where(seen, 0.0, -np.inf)


def add_to_bias(
    total: NDArray[Any],
    part: NDArray[Any],
    seq: Sequence,
    head: int,
    rows: Rows = slice(None),
    keys: slice = slice(None),
) -> None:
    """Add numbers of pairs of a query and a key to an array in the shape of a bias, with all that share an element.

    Parameters
    ----------
    total : float64 array of shape ``problem.term_shape``
        Changed in place.
    part : float64 array (rows, keys)
        Numbers of one query head.
    seq, head : Sequence, int
        The sequence and the query head.
    rows, keys : slice, or int array of rows
        Which queries and keys of the sequence; all by default.
    """
    i = np.arange(seq.seqlen_q)[rows, None] % total.shape[2]
    j = np.arange(seq.seqlen_k)[keys] % total.shape[3]
    np.add.at(total, (seq.index % total.shape[0], head % total.shape[1], i, j), part)


def distances(seq: Sequence, rows: Rows = slice(None)) -> NDArray[np.float64]:
    """Return how far each key is from each query, float64 (rows, seqlen_k), which count from the last ones."""
    queries = np.arange(seq.seqlen_k - seq.seqlen_q, seq.seqlen_k)[rows]
    return np.abs(queries[:, None] - np.arange(seq.seqlen_k)).astype(np.float64)


def rows_without_keys(
    problem: AttentionProblem, seq: Sequence, added_scores: NDArray[np.float64] | None, rows: Rows = slice(None)
) -> NDArray[np.bool_]:
    """Return which rows of a sequence see no key, bool (rows,); ``added_scores`` is what :func:`added` returns."""
    first, stop = problem.visible_keys(np.arange(seq.seqlen_q)[rows], seq.seqlen_q, seq.seqlen_k)
    if added_scores is None:
        return stop <= first
    keys = np.arange(seq.seqlen_k)
    seen = (keys >= first[:, None]) & (keys < stop[:, None]) & ~np.isneginf(added_scores)
    return np.logical_not(np.any(seen, axis=1))
