"""Functions that merge partial results in plain numpy: right ones of orders that people have, and wrong ones.

Those of parts are one function, :func:`at_once`, those of pairs another, :func:`pair`, with steps exchanged: a step is
what a kernel does to weights, to an lse, to sums, or to a part without a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import fa3verify

F = np.float32
LN2, LOG2_E = F(np.log(2)), F(1 / np.log(2))
Step = Callable[..., np.ndarray]
Pair = tuple[np.ndarray, np.ndarray]


def rows(lse: np.ndarray) -> np.ndarray:
    """What lies as lse, as it meets outputs of (..., seqlen, heads, channels)."""
    return np.swapaxes(lse, -1, -2)[..., None]


def finite(top: np.ndarray) -> np.ndarray:
    """The largest lse, or 0 where no part has a key."""
    return np.where(np.isneginf(top), F(0), top)


def no_step(x: np.ndarray) -> np.ndarray:
    return x


def sums(terms: np.ndarray) -> np.ndarray:
    return terms.sum(axis=0, dtype=F)


def last_first(terms: np.ndarray) -> np.ndarray:
    return sums(terms[::-1])


def in_16_bits(terms: np.ndarray) -> np.ndarray:
    """Add in bf16, part by part."""
    total = np.zeros(terms.shape[1:], ml_dtypes.bfloat16)
    for term in terms:
        total = total + term.astype(ml_dtypes.bfloat16)
    return total.astype(F)


def through_bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(F)


def at_once(  # noqa: PLR0913 (every step has a keyword)
    outs: np.ndarray,
    lses: np.ndarray,
    *,
    base: Step = lambda lses: finite(lses.max(axis=0)),
    exp: Step = np.exp,
    log: Step = np.log,
    by_lse: bool = False,
    skips: bool = False,
    weights: Step = no_step,
    lse_step: Step = no_step,
    divides: bool = True,
    adds: Step = sums,
    empty: float = 1.0,
) -> Pair:
    """Merge all parts at once, as split keys are."""
    with np.errstate(all="ignore"):
        shift = base(lses)
        w = exp(lses - shift)
        total = w.sum(axis=0)
        lse = shift + log(total)
        if by_lse:
            w = exp(lses - finite(lse))
        elif divides:
            w = w / np.where(total == 0, F(empty), total)
        x = outs.astype(F)
        if skips:
            x = np.where(rows(w) == 0, F(0), x)
        return adds(rows(weights(w)) * x).astype(outs.dtype), lse_step(lse)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return F(1) / (F(1) + np.exp(-x))


def difference(lse_a: np.ndarray, lse_b: np.ndarray) -> np.ndarray:
    """lse_b - lse_a, 0 where neither part has a key."""
    return np.where(np.isneginf(lse_a) & np.isneginf(lse_b), F(0), lse_b - lse_a)


def softplus_lse(lse_a: np.ndarray, lse_b: np.ndarray) -> np.ndarray:
    """The lse of both, as ring attention adds it up."""
    sum_of_both = lse_a + np.logaddexp(F(0), difference(lse_a, lse_b))
    return np.where(np.isneginf(lse_b), lse_a, np.where(np.isneginf(lse_a), lse_b, sum_of_both))


def by_sigmoids(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    return rows(sigmoid(-x)) * a + rows(sigmoid(x)) * b


def cancelling(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    """As one popular ring has it: a large output that loses all of its weight leaves its rounding behind."""
    return a - rows(sigmoid(x)) * (a - b)


def swapped(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    return by_sigmoids(a, b, -x)


def pair(
    out_a: np.ndarray,
    lse_a: np.ndarray,
    out_b: np.ndarray,
    lse_b: np.ndarray,
    *,
    mix: Step = by_sigmoids,
    lse_of: Step = softplus_lse,
) -> Pair:
    """Merge two results, as a rank of a ring does with what arrives."""
    with np.errstate(all="ignore"):
        x = difference(lse_a, lse_b)
        return mix(out_a.astype(F), out_b.astype(F), x), lse_of(lse_a, lse_b)


def max_shifted(out_a: np.ndarray, lse_a: np.ndarray, out_b: np.ndarray, lse_b: np.ndarray) -> Pair:
    """Merge two results in their own format, as FlashInfer and vLLM do."""
    return at_once(np.stack([out_a, out_b]), np.stack([lse_a, lse_b]))


def online(outs: np.ndarray, lses: np.ndarray) -> Pair:
    """Merge with a running maximum, part by part, unnormalised until the end."""
    top = np.full(lses.shape[1:], -np.inf, F)
    total, out = np.zeros_like(top), np.zeros(outs.shape[1:], F)
    with np.errstate(all="ignore"):
        for o, lse in zip(outs, lses, strict=True):
            new = np.maximum(top, lse)
            fade, w = np.exp(top - finite(new)), np.exp(lse - finite(new))
            total, out, top = total * fade + w, out * rows(fade) + rows(w) * o.astype(F), new
        return (out / rows(np.where(total == 0, F(1), total))).astype(outs.dtype), finite(top) + np.log(total)


def tree(outs: np.ndarray, lses: np.ndarray) -> Pair:
    """Merge neighbours in pairs, then pairs of pairs, in binary32; a part without a key is left out."""
    results = list(zip(outs.astype(F), lses, strict=True))
    while len(results) > 1:
        halves = [(*a, *b) for a, b in zip(results[::2], results[1::2], strict=False)]
        results = [*(pair(*both) for both in halves), *(results[-1:] if len(results) % 2 else [])]
    ((out, lse),) = results
    return out.astype(outs.dtype), lse


# Of parts: keywords of at_once, or a function of its own.
RIGHT: dict[str, Any] = {
    "weights divided by their sum": {},
    "weights by the lse of all": {"by_lse": True},
    "last part first": {"adds": last_first},
    "exp2 and log2": {"exp": lambda x: np.exp2(x * LOG2_E), "log": lambda x: np.log2(x) * LN2},
    "a running maximum": online,
    "a tree of pairs": tree,
}
RIGHT_PAIRS: dict[str, Any] = {
    "sigmoids": ({}, "fp32"),
    "less the larger lse, in the format of the parts": (max_shifted, ""),
}
WRONG: dict[str, Any] = {
    "no maximum": {"base": lambda lses: np.zeros_like(lses[0])},
    "the maximum of the first two parts": {"base": lambda lses: finite(lses[:2].max(axis=0))},
    "the smallest lse in place of the largest": {"base": lambda lses: finite(lses.min(axis=0))},
    "natural lse taken to base 2": {"exp": np.exp2},
    "a logarithm in base 2": {"log": np.log2},
    "sums of parts in 16 bits": {"adds": in_16_bits},
    "weights in 16 bits": {"weights": through_bf16},
    "lse in 16 bits": {"lse_step": through_bf16},
    "weights that are not divided": {"divides": False},
    "the first part left out": {"adds": lambda terms: sums(terms[1:] if len(terms) > 1 else terms)},
    "parts against the lse of others": {"weights": lambda w: w[::-1]},
    "a mean of all parts": {"weights": lambda w: np.full_like(w, F(1 / len(w)))},
    "a floor of 1e-6 in the sum": {"exp": lambda x: np.exp(x) + F(1e-6)},
}
WRONG_PAIRS: dict[str, Any] = {
    "a difference that cancels": {"mix": cancelling},
    "weights swapped": {"mix": swapped},
    "an lse that stays that of the first part": {"lse_of": lambda a, b: a},
    "the larger lse for the lse of both": {"lse_of": np.maximum},
    "the sum of both lse": {"lse_of": lambda a, b: a + b},
    "NaN where a part has no key": {"lse_of": lambda a, b: a - np.log(sigmoid(a - b))},
    "a difference of one lse too many": {"lse_of": lambda a, b: softplus_lse(a, b) - np.log(F(2))},
}


@fa3verify.kernel(merge="pairs", layout="bshd", out_dtype="fp32", head_dims=(64,))
def swaps(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    return pair(out_a, lse_a, out_b, lse_b, mix=swapped)


@fa3verify.kernel(merge="pairs", layout="bshd", out_dtype="fp32", head_dims=(64,))
def keeps_lse(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    return pair(out_a, lse_a, out_b, lse_b, lse_of=np.maximum)
