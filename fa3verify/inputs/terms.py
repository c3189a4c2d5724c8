"""Values of terms of scores: biases, masks, paddings, slopes and documents, as :class:`ScoreTerm` names them.

| word | biases | masks, paddings, documents | slopes |
|---|---|---|---|
| plain | a few nats | hide some keys, at the end of a padded sequence | as published |
| large | tens of nats for all keys, more for one | hide runs of keys, at the start of a padded sequence | steep |
| cancelling | take the scores away | | |
| lowest | the format's least number for some keys | | |
| one visible, none visible | -inf for the rest; for all keys of some rows | leave one key; none to some rows | |
| neutral | 0 | hide nothing | 0 |

Calls that serve draw all their arrays here: with sinks, a term of scores, or a K that holds V.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fa3_reference.attention import attention, cap_and_mask, scaled_scores
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem
from fa3verify.inputs.recipe import Recipe

_LARGEST = 60000.0  # of a bias that takes scores away, so that fp16 holds it
_DOCUMENTS = np.array([7, 2, 9, 4, 0, 11, 5, 3])  # numbers of documents, in no order


def format_of(problem: AttentionProblem) -> np.dtype:
    """Return the dtype of the operand of a problem's term."""
    kind = "" if problem.term is None else problem.term.kind
    own = {"bias": FORMATS[problem.dtype].dtype, "attn_mask": bool, "key_padding": bool, "documents": np.int32}
    return np.dtype(own.get(kind, np.float32))


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
    assert problem.term is not None
    values = problem.term.values
    shape = problem.term_shape
    rng = np.random.default_rng([seed, *shape])
    if problem.term.kind in ("bias", "bias_fp32"):
        is_cancelling = values == "cancelling"
        drawn = _cancelling(problem, q, k) if is_cancelling else _bias(problem, values, shape, rng)
    else:
        drawn = _OTHERS[problem.term.kind](problem, values, shape, rng)
    return drawn.astype(format_of(problem)).astype(np.float64)


def _one_of_each_row(problem: AttentionProblem, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return a mask that has one visible key in each row, which the other masks of the problem do not hide if any."""
    first, stop = problem.visible_keys(np.arange(shape[2]), problem.seqlen_q, problem.seqlen_k)
    key = first + np.floor(rng.random(shape[:3]) * np.maximum(stop - first, 1))
    return np.arange(shape[3]) == np.minimum(key, shape[3] - 1)[..., None]


def _mask(
    problem: AttentionProblem, values: str, shape: tuple[int, ...], rng: np.random.Generator
) -> NDArray[np.bool_]:
    visible = rng.random(shape) < 0.6
    if values == "one visible":
        return _one_of_each_row(problem, shape, rng)
    if values == "large":  # keys from one place on, up to it, or all but a run, in every row
        low, high = np.sort(rng.integers(0, shape[3] + 1, 2))
        keys = np.arange(shape[3])
        seen = (keys >= low, keys < max(high, 1), (keys < low) | (keys >= high))[rng.integers(3)]
        return np.broadcast_to(seen, shape)
    if values == "none visible":
        some = rng.random(shape[:3]) < 0.4
        some.flat[rng.integers(some.size)] = True
        visible[some] = False
    return visible | (values == "neutral")


def _bias(
    problem: AttentionProblem, values: str, shape: tuple[int, ...], rng: np.random.Generator
) -> NDArray[np.float64]:
    bias = 3 * rng.normal(size=shape) * (values != "neutral")
    one = _one_of_each_row(problem, shape, rng)
    if values == "large":
        wins = one & (rng.random(shape[:3]) < 0.5)[..., None]
        return bias + 50 * rng.choice([-1, 1], shape[:3])[..., None] + 30 * wins
    if values == "lowest":
        least = -float(ml_dtypes.finfo(format_of(problem)).max)
        return np.where(_mask(problem, "plain", shape, rng) | one, bias, least)
    hides = values in ("one visible", "none visible")
    return np.where(_mask(problem, values, shape, rng), bias, -np.inf) if hides else bias


def _cancelling(problem: AttentionProblem, q: NDArray[np.float64], k: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return minus the scores, of the first index of each axis along which the bias has one value."""
    bias = np.zeros(problem.term_shape)
    for b, h in np.ndindex(bias.shape[:2]):
        rows = scaled_scores(problem, q[b, : bias.shape[2], h], k[b, : bias.shape[3], h // problem.group])
        # Without keys the bias has one all the same.
        bias[b, h, :, : rows.shape[1]] = -cap_and_mask(problem, rows, None)
    return np.clip(np.nan_to_num(bias), -_LARGEST, _LARGEST)


def _padding(
    problem: AttentionProblem, values: str, shape: tuple[int, ...], rng: np.random.Generator
) -> NDArray[np.bool_]:
    length = rng.integers(1, max(shape[1], 1) + 1, (shape[0], 1))
    length[rng.integers(shape[0])] *= values != "none visible"
    beyond = np.arange(shape[1]) - length
    named = {"neutral": beyond < shape[1], "one visible": beyond == -1, "large": beyond >= -1}
    return named.get(values, beyond < 0)


def _slopes(
    problem: AttentionProblem, values: str, shape: tuple[int, ...], rng: np.random.Generator
) -> NDArray[np.float64]:
    published = 2.0 ** (-8 * np.arange(1, problem.nheads + 1) / problem.nheads) * rng.uniform(0.5, 1.5, shape)
    return rng.uniform(1, 8, shape) if values == "large" else published * (values != "neutral")


def _documents(
    problem: AttentionProblem, values: str, shape: tuple[int, ...], rng: np.random.Generator
) -> NDArray[np.int64]:
    n = problem.seqlen_q
    ids = np.zeros(shape, int)
    for row in ids if problem.seqlen_k and values != "neutral" else ():
        keys = np.sort(rng.integers(0, len(_DOCUMENTS), problem.seqlen_k))
        if values == "large":  # documents that are not contiguous
            rng.shuffle(keys)
        row[n:] = rng.permutation(problem.seqlen_k) if values == "one visible" else rng.permutation(_DOCUMENTS)[keys]
        chosen = np.sort(rng.integers(0, problem.seqlen_k, n))
        row[:n] = np.where((rng.random(n) < 0.4) & (values == "none visible"), -1, row[n:][chosen])
    return ids


_OTHERS = {
    "attn_mask": _mask,
    "key_padding": _padding,
    "alibi": _slopes,
    "documents": _documents,
    "mods": lambda problem, values, shape, rng: np.zeros(shape),
}


# By how many nats a sink exceeds the lse of a row: its weight is that of all keys together, nearly nothing, nearly all,
# nothing, so much that 16 bits keep nothing else, and none. Heads have them in turn; the seed chooses the first.
SINKS_OVER_LSE = (0.0, -3.0, 4.0, -40.0, 20.0, -np.inf)


def draw_served(problem: AttentionProblem, recipe: Recipe) -> tuple[NDArray[np.float64], ...]:
    """Draw q, k and v by a recipe, and sinks and a term of scores where the problem has them.

    Parameters
    ----------
    problem : AttentionProblem
        Where it has ``qv``, the last channels of K are V.
    recipe : Recipe
        Its seed draws the sinks and the term as well.

    Returns
    -------
    q, k, v : float64 arrays in the problem's shapes
        As :meth:`Recipe.draw` returns them.
    sinks : float64 (nheads,)
        Only if the problem has them. They are binary32 numbers, as kernels get them, which no 16-bit format holds.
    term : float64 array
        Only if the problem has one, as :func:`~fa3verify.inputs.terms.draw_term` returns it.
    """
    q, k, v = recipe.draw(problem)
    if problem.qv:
        k[..., -problem.head_dim_v :] = v
    further = [_sinks(problem, (q, k, v), recipe.seed)] if problem.sinks else []
    further += [draw_term(problem, q, k, recipe.seed)] if problem.term else []
    return q, k, v, *further


def _sinks(problem: AttentionProblem, arrays: tuple[NDArray[np.float64], ...], seed: int) -> NDArray[np.float64]:
    """Draw every head's sink near the lse of one of its rows that see a key; near 0 if no row does."""
    rng = np.random.default_rng([seed, problem.nheads])
    with np.errstate(all="ignore"):
        lse = attention(replace(problem, sinks=False, term=None), *arrays).lse
    by_head = np.moveaxis(lse, -2, 0).reshape(problem.nheads, -1)
    sinks = rng.uniform(-1, 1, problem.nheads)
    for head, rows in enumerate(by_head):
        usable = rows[np.isfinite(rows)]
        sinks[head] += usable[rng.integers(usable.size)] if usable.size else 0.0
        sinks[head] += SINKS_OVER_LSE[(seed + head) % len(SINKS_OVER_LSE)]
    return sinks.astype(np.float32).astype(np.float64)
