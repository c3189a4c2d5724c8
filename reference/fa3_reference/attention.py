"""Softmax attention in float64: the truth that every kernel is measured against.

    S = softmax_scale * Q K^T,  S <- softcap * tanh(S / softcap),  P = softmax(S + mask),  O = P V
    lse = log sum_j exp(S_j + mask_j)

A term of the problem, such as a bias, is added to S after the softcap (:mod:`fa3_reference.terms`); the error statement
counts it in ``spread``. A ``score_mod`` maps S instead (:mod:`fa3_reference.mods`), whose slope and error in float64
the statement does not count. With sinks each row's softmax has one more score, that of its head's sink, which has no
value. lse includes it, and the error statement counts it as a key with V = 0, whose score is exact.

The gradients are in :mod:`fa3_reference.attention_bwd`. How far a kernel may be from this truth is bounded in
:mod:`fa3_reference.bounds`.

Work proceeds in tiles of query rows that see all their keys at once: no online rescaling, no approximation.

Error statement. Let u = 2^-53 and, for one query row with n visible keys,
``spread`` = max_j softmax_scale * sum_c |q_c k_jc|  and  ``range`` = max_j s_j - min_j s_j. Then

    |out - exact| <= 2 u ((head_dim + 8) spread + range + n + 8) * sum_j P_j |v_j|
    |lse - exact| <=   u ((head_dim + 8) spread + range + n + 8 + |lse|)

with softcap included (tanh has slope <= 1), given exp, log and tanh within 1 ulp and no underflow. Scores carry
gamma_(head_dim + 1) relative to ``spread`` and 4 u for the softcap; subtracting the row maximum adds u * range; exp,
division and sums add the rest; score errors enter numerator and denominator, hence the 2. Proved on small problems by
ball arithmetic in ``tests/reference/test_exact.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa3_reference.cache import rotated
from fa3_reference.mods import modified
from fa3_reference.problem import AttentionProblem, Floats, Sequence
from fa3_reference.terms import added, rows_without_keys

TILE_ELEMENTS = 1 << 22  # scores held at once: 32 MiB of float64
MIN_TILE_ROWS = 16
MAX_TILE_ROWS = 512
Positions = NDArray[np.int64] | None  # of queries in every sequence, ascending; None for all


class Attention(NamedTuple):
    """Result of a forward pass, in the layout of the problem.

    Parameters
    ----------
    out : float64 array of shape ``problem.out_shape``
        The output; 0 in rows that see no key.
    lse : float64 array of shape ``problem.lse_shape``
        Natural logarithm of the sum of exponentials; -inf in rows that see no key.
    """

    out: NDArray[np.float64]
    lse: NDArray[np.float64]


class QueryTile(NamedTuple):
    """Some query rows of one sequence, the span of keys that any of them sees, and which of those each row sees."""

    rows: np.ndarray  # int64 (rows,)
    keys: slice
    visible: np.ndarray | None  # bool (rows, keys); None where every row sees the whole span


def as_float64(**operands: tuple[Floats, tuple[int, ...]]) -> tuple[NDArray[np.float64], ...]:
    """Convert named arrays to float64, exactly, after checking each against the shape it must have.

    Each keyword is ``name=(array, shape)``; the arrays are returned in the order of the keywords.

    Raises
    ------
    ValueError
        If an array has another shape; the message names it.
    """
    for name, (x, shape) in operands.items():
        if np.shape(x) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {np.shape(x)}")
    return tuple(np.asarray(x).astype(np.float64, copy=False) for x, _ in operands.values())


def row_tiles(
    problem: AttentionProblem, seq: Sequence, rows: np.ndarray, poisoned: bool = False
) -> Iterator[QueryTile]:
    """Cut the query rows that see any key into tiles of bounded memory.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed.
    seq : Sequence
        One of its sequences.
    rows : int array
        Query positions inside the sequence, ascending. Rows that see no key are in no tile.
    poisoned : bool
        Make tiles without a masked key, so that a zero probability never meets a NaN or Inf it should not
        see. Slower.

    Yields
    ------
    QueryTile
        Rows in ascending order, with the keys that they see.
    """
    first, stop = problem.visible_keys(rows, seq.seqlen_q, seq.seqlen_k)
    seen = stop > first
    rows = rows[seen]
    first = first[seen]
    stop = stop[seen]
    height = int(np.clip(TILE_ELEMENTS // max(1, seq.seqlen_k), MIN_TILE_ROWS, MAX_TILE_ROWS))
    cuts = set(range(height, rows.size, height))
    if poisoned:
        cuts.update((np.flatnonzero((np.diff(first) != 0) | (np.diff(stop) != 0)) + 1).tolist())
    for part in np.split(np.arange(rows.size), sorted(cuts)):
        if part.size:
            yield _tile(rows[part], first[part], stop[part])


def _tile(rows: np.ndarray, first: np.ndarray, stop: np.ndarray) -> QueryTile:
    # rows (rows,) that see the keys first <= key < stop, as one tile
    low = int(first.min())
    high = int(stop.max())
    if first.max() == low and stop.min() == high:
        return QueryTile(rows, slice(low, high), None)
    keys = np.arange(low, high)
    return QueryTile(rows, slice(low, high), (keys >= first[:, None]) & (keys < stop[:, None]))


def scaled_scores(problem: AttentionProblem, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return softmax_scale * q k^T for (rows, head_dim) and (keys, head_dim), before softcap and mask."""
    x = q @ k.T
    x *= problem.softmax_scale
    return x


def cap_and_mask(problem: AttentionProblem, x: np.ndarray, visible: np.ndarray | None) -> np.ndarray:
    """Apply the softcap, then set invisible scores to -inf; works in place."""
    if problem.softcap > 0:
        x /= problem.softcap
        np.tanh(x, out=x)
        x *= problem.softcap
    if visible is not None:
        x[~visible] = -np.inf
    return x


def softmax(s: np.ndarray, sink: float = -np.inf) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return unnormalised probabilities (in place of s), their row sums with the sink in them, and the lse of each row.

    A sink of -inf adds nothing. Rows of -inf have probabilities of 0, the sum 0 and an lse of -inf.
    """
    row_max = s.max(axis=1, initial=sink)
    # a row whose scores are all -inf would make -inf - -inf, which is NaN
    shift = np.where(np.isneginf(row_max), 0.0, row_max)
    s -= shift[:, None]
    p = np.exp(s, out=s)
    row_sum = p.sum(axis=1) + np.exp(sink - shift)
    return p, row_sum, shift + np.log(row_sum)


def _tile_attention(
    s: np.ndarray, visible: np.ndarray | None, v: np.ndarray, sink: float, term: np.ndarray | None
) -> Attention:
    if visible is not None:
        s[~visible] = -np.inf
    if term is not None:
        s = np.where(np.isneginf(term), -np.inf, s + term)
    p, row_sum, lse = softmax(s, sink)
    return Attention((p @ v) / row_sum[:, None], lse)


def sinks_of(problem: AttentionProblem, sinks: Floats | None) -> NDArray[np.float64]:
    """Return the score of every head's sink, float64 (nheads,); -inf, a key of weight 0, where there are none.

    Raises
    ------
    ValueError
        If the problem has sinks and ``sinks`` is None, or the other way round, or if their shape is not (nheads,).
    """
    if problem.sinks != (sinks is not None):
        raise ValueError(f"sinks must be given where the problem has them, got {problem.sinks} and {sinks}")
    if sinks is None:
        return np.full(problem.nheads, -np.inf)
    return as_float64(sinks=(sinks, (problem.nheads,)))[0]


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def _rows(
    problem: AttentionProblem, operands: tuple[np.ndarray, ...], seq: Sequence, head: int, rows: np.ndarray
) -> Attention:
    # the output (rows, head_dim_v) and lse (rows,) of one query head
    q, k, v, sinks, *given = operands
    q_head = problem.rows_q(q, seq)[:, head]
    k_head = problem.rows_k(k, seq)[:, head // problem.group]
    v_head = problem.rows_k(v, seq)[:, head // problem.group]
    out = np.zeros((rows.size, problem.head_dim_v))
    lse = np.full(rows.size, sinks[head])
    poisoned = not (np.isfinite(k_head).all() and np.isfinite(v_head).all())
    term = added(problem, given[0], seq, head, rows) if given else None
    for tile in row_tiles(problem, seq, rows, poisoned):
        s = cap_and_mask(problem, scaled_scores(problem, q_head[tile.rows], k_head[tile.keys]), None)
        if problem.term is not None:
            places = np.full(tile.rows.size, head), tile.rows, np.arange(tile.keys.start, tile.keys.stop)
            s = modified(problem.term, s, seq.index, *places)
        where = np.searchsorted(rows, tile.rows)
        own = None if term is None else term[where, tile.keys]
        part = _tile_attention(s, tile.visible, v_head[tile.keys], sinks[head], own)
        out[where], lse[where] = part
    if term is not None:
        empty = rows_without_keys(problem, seq, term, rows)
        out[empty], lse[empty] = 0.0, sinks[head]
    return Attention(out, lse)


def attention(
    problem: AttentionProblem, q: Floats, k: Floats, v: Floats, *further: Floats | None, only: Positions = None
) -> Attention:
    """Compute attention in float64.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed; its ``dtype`` does not matter here.
    q, k, v : float arrays of shapes ``problem.q_shape``, ``k_shape``, ``v_shape``
        Values the kernel under test should see: any float dtype, converted exactly.
    *further : float arrays
        What ``problem.further`` names, in its order: with sinks the score of every head's sink, (nheads,), in nats,
        -inf for a head without one; and the operand of its term.
    only : int array, optional
        Ascending positions of the queries, in every sequence, that are computed; the rows of others stay 0 and -inf.

    Returns
    -------
    Attention
        ``out`` (``problem.out_shape``) and natural-log ``lse`` (``problem.lse_shape``), float64, with the
        error stated at the top of this module. Rows that see no key have out = 0 and lse = -inf, or that of their
        sink.

    Raises
    ------
    ValueError
        If an operand has the wrong shape, or sinks or a term are missing or not wanted.

    Notes
    -----
    A row depends on nothing but its own query and the keys and values it sees: NaN and Inf elsewhere change
    no bit of the meaning. Inside the visible range IEEE arithmetic decides: a NaN score or a +Inf score makes
    the whole row and its lse NaN; a -Inf score is a key of weight 0; if all are -Inf, lse = -inf and out is
    NaN. A NaN or Inf in V reaches its channel of every row that sees it, and Inf meeting a probability that
    underflowed to 0 is NaN.

    Examples
    --------
    >>> problem = AttentionProblem(1, nheads=1, nheads_kv=1, seqlen_q=1, seqlen_k=4, head_dim=8)
    >>> q, k, v = (np.ones(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    >>> out, lse = attention(problem, q, k, v)
    >>> float(out.max()), round(float(lse[0, 0, 0]), 6)  # sqrt(8) + log(4)
    (1.0, 4.214721)
    """
    q, k, v = as_float64(q=(q, problem.q_shape), k=(k, problem.k_shape), v=(v, problem.v_shape))
    if problem.cache is not None:
        q, k = rotated(problem, q, k)
    further = tuple(x for x in further if x is not None)
    if len(further) != len(problem.further):
        has = " and ".join(problem.further) or "neither"
        raise ValueError(
            f"sinks must be given where the problem has them, and so must a term: it has {has}, got {len(further)}"
        )
    named = dict(zip(problem.further, further))
    operands = (q, k, v, sinks_of(problem, named.get("sinks")))
    if problem.term is not None:
        operands = (*operands, *as_float64(term=(named["term"], problem.term_shape)))
    out = np.zeros(problem.out_shape)
    lse = np.full(problem.lse_shape, -np.inf)
    for seq in problem.sequences():
        rows = np.arange(seq.seqlen_q) if only is None else only
        for head in range(problem.nheads):
            part = _rows(problem, operands, seq, head, rows)
            problem.rows_q(out, seq)[rows, head] = part.out
            problem.rows_lse(lse, seq)[head, rows] = part.lse
    return Attention(out, lse)
