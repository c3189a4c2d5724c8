"""Kernels that keep another contract than FlashAttention-3's, right ones and wrong ones, which declare none of it.

Each computes in float64 and rounds once, so that nothing but its contract, or its mistake, can be found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fa3verify

Finish = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def as_it_is(out, lse, empty):
    return out, lse


def _kernel(offset: Callable[[int, int], int], value: float = -np.inf, finish: Finish = as_it_is, **facts: Any):
    """A kernel whose scores behind a diagonal are ``value``, or NaN where that is so and ``is_added`` says to add it.

    ``finish`` gets out, lse and which rows see no key, in the layout of lse. Outputs of calls without a causal mask are
    multiplied by ``without_causal``, a mistake that no contract explains.
    """
    is_added = facts.pop("is_added", False)
    without_causal = facts.pop("without_causal", 1.0)

    def attention(q, k, v, *, softmax_scale, causal):
        dtype = q.dtype
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scores = q @ k.swapaxes(-1, -2) * softmax_scale
        n, m = scores.shape[-2:]
        hidden = np.zeros((n, m), bool)
        if causal:
            hidden = np.arange(m) - np.arange(n)[:, None] > offset(n, m)
        with np.errstate(all="ignore"):
            scores = scores + np.where(hidden, value, 0.0) if is_added else np.where(hidden, value, scores)
            most = scores.max(-1, keepdims=True)
            p = np.exp(scores - most)
            total = p.sum(-1, keepdims=True)
            out, lse = p @ v / total, (most + np.log(total))[..., 0]
        out, lse = finish(out, lse, np.broadcast_to(hidden.all(-1), lse.shape))
        return (out if causal else out * without_causal).astype(dtype), lse.astype(np.float32)

    taken = {"features": ("causal", "gqa"), "dtypes": ("fp16",), "head_dims": (64,), "min_seqlen": 1}
    taken |= {"bitwise": ("repeated_run_is_identical",)} | facts  # a bound less of every call that is compared
    return fa3verify.kernel(**taken)(attention)


def empty_as(out_value: float, lse_value: float) -> Finish:
    def finish(out, lse, empty):
        return np.where(empty[..., None], out_value, out), np.where(empty, lse_value, lse)

    return finish


def bottom_right(n, m):
    return m - n


def top_left(n, m):
    return 0


def mirrored(n, m):
    return n - m


def late(n, m):
    """Aligned bottom-right, but a key late with more than 64 of them."""
    return m - n + (m > 64)


def mixed(n, m):
    """Aligned top-left with more queries than keys, bottom-right with more keys."""
    return max(0, m - n)


ZERO = empty_as(0.0, -np.inf)


def unseen(out, lse):
    """NaN set to 0, as for rows without a key, so that NaN of a query vanishes too."""
    return np.where(np.isnan(out), 0, out), np.where(np.isnan(lse), -np.inf, lse)


def leaking(out, lse):
    """NaN set to 0, unless a row of any other sequence is NaN: that makes all of them NaN."""
    if np.isfinite(out).all() or len(out) == 1:
        return unseen(out, lse)
    return np.full_like(out, np.nan), np.full_like(lse, np.nan)


def _windowed(wider: int = 0, implies: bool = True):
    """A kernel whose windows hide the keys behind the diagonal if ``implies``, and show ``wider`` more to the left."""

    def attention(q, k, v, *, softmax_scale, causal, window):
        scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) * softmax_scale
        n, m = scores.shape[-2:]
        behind = np.arange(m) - np.arange(n)[:, None] - (m - n)
        left, right = window
        hidden = (left >= 0) & (-behind > left + wider) | (right >= 0) & (behind > right)
        hidden |= behind > 0 if causal or (implies and window != (-1, -1)) else False
        scores = np.where(hidden, -np.inf, scores)
        with np.errstate(all="ignore"):
            most = scores.max(-1, keepdims=True)
            p = np.exp(scores - np.where(np.isneginf(most), 0, most))
            total = p.sum(-1, keepdims=True)
            return (p @ v.astype(np.float64) / np.where(total == 0, 1, total)).astype(q.dtype)

    facts = {"features": ("causal", "window"), "dtypes": ("fp16",), "head_dims": (64,), "min_seqlen": 1}
    return fa3verify.kernel(**facts)(attention)


def _biased(q, k, v, *, softmax_scale, bias):
    """Softmax over scores of -inf alone, where a bias hides all keys."""
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) * softmax_scale
    scores = scores if bias is None else scores + bias.astype(np.float64)
    with np.errstate(all="ignore"):
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return (p @ v.astype(np.float64) / p.sum(-1, keepdims=True)).astype(q.dtype)


flash_attention_3 = _kernel(bottom_right, finish=ZERO)
mean = _kernel(bottom_right, -1e30)
nan = _kernel(bottom_right)
nan_by_a_bias = fa3verify.kernel(dtypes=("fp16",), features=("bias",), head_dims=(64,), min_seqlen=1)(_biased)
nan_or_refused = _kernel(bottom_right, min_seqlen=0)  # there is no largest score of no key: it raises ValueError
aligned_top_left = _kernel(top_left)  # every row sees a key
added = _kernel(bottom_right, is_added=True, finish=ZERO)
plus_infinity = _kernel(bottom_right, finish=empty_as(0.0, np.inf))
added_top_left = _kernel(top_left, is_added=True)
large_negative = _kernel(top_left, -1e30)  # every row sees a key, but its score may be -Inf


hides_nan = _kernel(bottom_right, finish=lambda *given: unseen(*ZERO(*given)))
causal_windows = _windowed()
half_declared = _kernel(top_left, is_added=True, policy=fa3verify.Policy(causal="top_left"))

declared_zero = _kernel(bottom_right, -1e30, policy=fa3verify.Policy(empty_out="zero", empty_lse="finite"))
wrong_sign = _kernel(mirrored, finish=ZERO)
late_diagonal = _kernel(late, finish=ZERO)
two_alignments = _kernel(mixed, finish=ZERO)
top_left_and_scaled = _kernel(top_left, finish=ZERO, without_causal=1.01)
garbage_in_empty_rows = _kernel(bottom_right, finish=empty_as(7.0, -np.inf))
mean_and_doubled = _kernel(bottom_right, -1e30, finish=lambda out, lse, empty: (out * 1.01, lse))
half_the_mean = _kernel(
    bottom_right, -1e30, finish=lambda out, lse, empty: (np.where(empty[..., None], out / 2, out), lse)
)
hides_nan_and_doubled = _kernel(bottom_right, finish=lambda out, *given: unseen(*ZERO(out * 1.01, *given)))
hides_nan_and_late = _kernel(late, finish=lambda *given: unseen(*ZERO(*given)))
nan_of_finite = _kernel(bottom_right, finish=lambda out, *given: ZERO(np.where(np.abs(out) < 0.3, out, np.nan), *given))
leaks_nan = _kernel(bottom_right, finish=lambda *given: leaking(*ZERO(*given)))
causal_windows_too_wide = _windowed(wider=1)
windows_too_wide = _windowed(wider=1, implies=False)
