"""Functions of scores and masks that a kernel has built in, with the signatures of FlexAttention.

    S_ij <- score_mod(S_ij, b, h, i, j),  after softmax_scale and softcap

Key j is hidden from query i of head h where ``mask_mod(b, h, i, j)`` is false, and where ``score_mod`` returns -inf for
every score. Positions count from the first query and the first key of a sequence.

The functions are those of users and are called with tensors of torch, which this room does not import: whoever judges
kernels says by :func:`plug` how one is evaluated. The truth is what a function returns in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fa3_reference.score_term import ScoreTerm

Positions = NDArray[np.int64]
# evaluate(function, b, heads, queries, keys, *scores): what a function named ``module:name`` returns for each of the
# rows, which have a head and a query each, and the keys; a float64 array (rows, keys), or bool of a ``mask_mod``.
Evaluate = Callable[..., NDArray[np.generic]]
_PROBES = (-1e4, 0.0, 1e4)  # scores: a key whose score becomes -inf from each of them is hidden by its place
_plugged: list[Evaluate] = []


def plug(evaluate: Evaluate) -> None:
    """Say how functions are evaluated, which :data:`Evaluate` describes; the last one plugged counts."""
    _plugged[:] = [evaluate]


def modified(
    term: ScoreTerm, scores: NDArray[np.float64], b: int, heads: Positions, queries: Positions, keys: Positions
) -> NDArray[np.float64]:
    """Return scores in nats after a term's ``score_mod``; as they are where it has none.

    Parameters
    ----------
    term : ScoreTerm
        One of functions.
    scores : float64 array (rows, keys)
        Scaled scores, in nats.
    b : int
        Number of the sequence in its batch.
    heads, queries : int64 arrays (rows,)
        The query head of every row, and its position.
    keys : int64 array (keys,)
        The position of every key.

    Returns
    -------
    float64 array (rows, keys)
        What the function returns, NaN and infinities included.

    Raises
    ------
    ValueError
        If nobody said how functions are evaluated.
    """
    return _evaluated(term.score_mod, b, heads, queries, keys, scores).astype(np.float64) if term.score_mod else scores


def hidden(term: ScoreTerm, b: int, heads: Positions, queries: Positions, keys: Positions) -> NDArray[np.bool_]:
    """Return which keys a term's functions hide from which rows, bool (rows, keys); parameters as of :func:`modified`.

    Raises
    ------
    ValueError
        If nobody said how functions are evaluated.
    """
    shape = (len(queries), len(keys))
    probed = [modified(term, np.full(shape, probe), b, heads, queries, keys) for probe in _PROBES]
    seen = _evaluated(term.mask_mod, b, heads, queries, keys).astype(bool) if term.mask_mod else np.ones(shape, bool)
    return np.all(np.isneginf(probed), axis=0) | ~seen


def _evaluated(function: str, *arguments: int | NDArray[np.generic]) -> NDArray[np.generic]:
    if not _plugged:
        raise ValueError(f"nothing is plugged that evaluates {function}: fa3verify does so where a kernel declares it")
    return _plugged[0](function, *arguments)
