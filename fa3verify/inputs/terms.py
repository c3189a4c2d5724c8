"""Values of terms of scores: biases, masks, paddings, slopes and documents, as :class:`ScoreTerm` names them.

| word | biases | masks, paddings, documents | slopes |
|---|---|---|---|
| plain | a few nats | hide some keys, at the end of a padded sequence | as published |
| large | tens of nats for all keys, more for one | hide runs of keys, at the start of a padded sequence | steep |
| cancelling | take the scores away | | |
| lowest | the format's least number for some keys | | |
| one visible, none visible | -inf for the rest; for all keys of some rows | leave one key; none to some rows | |
| neutral | 0 | hide nothing | 0 |
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fa3_reference.attention import cap_and_mask, scaled_scores
from fa3_reference.formats import FORMATS
from fa3_reference.problem import Array, AttentionProblem

_LARGEST = 60000.0  # of a bias that takes scores away, so that fp16 holds it
_DOCUMENTS = np.array([7, 2, 9, 4, 0, 11, 5, 3])  # numbers of documents, in no order


def format_of(problem: AttentionProblem) -> np.dtype:
    """Return the dtype of the operand of a problem's term."""
    assert problem.term is not None
    kind = problem.term.kind
    if kind in ("attn_mask", "key_padding"):
        return np.dtype(bool)
    if kind == "documents":
        return np.dtype(np.int32)
    return np.dtype(FORMATS[problem.dtype].dtype if kind == "bias" else np.float32)


def draw_term(
    problem: AttentionProblem, q: NDArray[np.float64], k: NDArray[np.float64], seed: int
) -> NDArray[np.float64]:
    """Draw the operand of a problem's term, of the kind and the values that the problem names.

    Parameters
    ----------
    problem : AttentionProblem
        One with a term.
    q, k : float64 arrays
        In the problem's shapes, for a bias that takes their scores away.
    seed : int
        The same seed gives the same values.

    Returns
    -------
    float64 array
        Numbers of the operand's format; 1 and 0 for a mask's True and False.
    """
    term = problem.term
    assert term is not None
    shape = problem.term_shape
    rng = np.random.default_rng([seed, *shape])
    if term.kind == "alibi":
        drawn = _slopes(problem, term.values, shape, rng)
    elif term.kind == "key_padding":
        drawn = _padding(term.values, shape, rng)
    elif term.kind == "documents":
        drawn = _documents(problem, term.values, rng)
    elif term.kind == "attn_mask":
        drawn = _visible(problem, term.values, shape, rng)
    else:
        drawn = _bias(problem, (q, k), shape, rng)
    return drawn.astype(format_of(problem)).astype(np.float64)


def split_documents(problem: AttentionProblem, term: Array) -> tuple[Array, Array]:
    """Return the documents of the queries, (batch, seqlen_q), and of the keys, (batch, seqlen_k)."""
    return term[:, : problem.seqlen_q], term[:, problem.seqlen_q :]


def _one_of_each_row(problem: AttentionProblem, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return a mask that has one visible key in each row, which the other masks of the problem do not hide if any."""
    first, stop = problem.visible_keys(np.arange(shape[2]), problem.seqlen_q, problem.seqlen_k)
    key = first + np.floor(rng.random(shape[:3]) * np.maximum(stop - first, 1))
    return np.arange(shape[3]) == np.minimum(key, shape[3] - 1)[..., None]


def _visible(
    problem: AttentionProblem, values: str, shape: tuple[int, ...], rng: np.random.Generator
) -> NDArray[np.bool_]:
    visible = rng.random(shape) < 0.6
    if values == "neutral" or not visible.size:
        return np.ones(shape, bool)
    if values == "one visible":
        return _one_of_each_row(problem, shape, rng)
    if values == "large":  # keys from one place on, up to it, or all but a run, in every row
        low, high = np.sort(rng.integers(0, shape[3] + 1, 2))
        keys = np.arange(shape[3])
        return np.broadcast_to(
            (keys >= low, keys < max(high, 1), (keys < low) | (keys >= high))[rng.integers(3)], shape
        )
    if values == "none visible":
        some = rng.random(shape[:3]) < 0.4
        some.flat[rng.integers(some.size)] = True
        visible[some] = False
    return visible


def _bias(
    problem: AttentionProblem,
    operands: tuple[NDArray[np.float64], NDArray[np.float64]],
    shape: tuple[int, ...],
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    assert problem.term is not None
    values = problem.term.values
    bias = 3 * rng.normal(size=shape)
    if values == "neutral":
        return np.zeros(shape)
    if values == "cancelling":
        return _scores_taken_away(problem, *operands, shape)
    if values == "large":
        wins = _one_of_each_row(problem, shape, rng) & (rng.random(shape[:3]) < 0.5)[..., None]
        return bias + 50 * rng.choice([-1, 1], shape[:3])[..., None] + 30 * wins
    if values == "plain":
        return bias
    visible = _visible(problem, "plain" if values == "lowest" else values, shape, rng)
    if values == "lowest":
        least = -FORMATS["fp32" if problem.term.kind == "bias_fp32" else problem.dtype].max_finite
        return np.where(visible | _one_of_each_row(problem, shape, rng), bias, least)
    return np.where(visible, bias, -np.inf)


def _scores_taken_away(
    problem: AttentionProblem, q: NDArray[np.float64], k: NDArray[np.float64], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Return minus the scores, of the first index of each axis along which the bias has one value."""
    bias = np.zeros(shape)
    for b in range(shape[0]):
        for h in range(shape[1]):
            rows = scaled_scores(problem, q[b, : shape[2], h], k[b, : shape[3], h // problem.group])
            bias[b, h] = -cap_and_mask(problem, rows, None)
    return np.clip(np.nan_to_num(bias), -_LARGEST, _LARGEST)


def _padding(values: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.bool_]:
    keys = np.arange(shape[1])
    length = rng.integers(1, max(shape[1], 1) + 1, shape[0])[:, None]
    if values == "neutral":
        return np.ones(shape, bool)
    if values == "one visible":
        return keys == length - 1
    if values == "large":
        return keys >= length - 1
    counts = keys < length
    if values == "none visible":
        counts[rng.integers(shape[0])] = False
    return counts


def _slopes(
    problem: AttentionProblem, values: str, shape: tuple[int, ...], rng: np.random.Generator
) -> NDArray[np.float64]:
    if values == "neutral":
        return np.zeros(shape)
    if values == "large":
        return rng.uniform(1, 8, shape)
    return 2.0 ** (-8 * np.arange(1, problem.nheads + 1) / problem.nheads) * rng.uniform(0.5, 1.5, shape)


def _documents(problem: AttentionProblem, values: str, rng: np.random.Generator) -> NDArray[np.int64]:
    sizes = (problem.seqlen_q, problem.seqlen_k)
    ids = np.full((problem.batch, sum(sizes)), 5)
    if values == "neutral":
        return ids
    for row in ids:
        names = rng.permutation(_DOCUMENTS)
        keys = np.sort(rng.integers(0, len(names), sizes[1]))
        queries = np.sort(rng.choice(keys, sizes[0])) if keys.size else np.zeros(sizes[0], int)
        if values == "large":  # documents that are not contiguous
            keys = rng.integers(0, 3, sizes[1])
            queries = rng.choice(keys, sizes[0]) if keys.size else queries
        row[:] = names[np.concatenate([queries, keys])]
        if values == "one visible":
            row[sizes[0] :] = rng.permutation(sizes[1])
            row[: sizes[0]] = rng.integers(0, max(sizes[1], 1), sizes[0])
        if values == "none visible":
            row[: sizes[0]][rng.random(sizes[0]) < 0.4] = -1
    return ids
