"""Kernels that refuse calls by ValueError or NotImplementedError and declare nothing of it, right ones and wrong ones.

Each computes in float64 and rounds once, so that nothing but what it refuses, or its mistake, can be found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fa3verify

Rule = Callable[..., bool]


def exact(q, k, v, *, softmax_scale, causal):
    dtype = q.dtype
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * softmax_scale
    n, m = scores.shape[-2:]
    if causal:
        scores = np.where(np.arange(m) - np.arange(n)[:, None] > m - n, -np.inf, scores)
    most = scores.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(scores - np.where(np.isneginf(most), 0, most))
    total = p.sum(-1, keepdims=True)
    with np.errstate(all="ignore"):
        lse = (most + np.log(total))[..., 0]
        out = p @ v / np.where(total == 0, 1, total)
    return out.astype(dtype), lse.astype(np.float32)


def _kernel(takes: Rule, raised: type[Exception] = ValueError, attention: Callable[..., Any] = exact, **facts: Any):
    """A kernel that raises unless ``takes(n, m, causal, batch, nheads, group, scale, q)`` says that it takes a call."""

    def kernel(q, k, v, *, softmax_scale, causal=False):
        batch, nheads, n, head_dim = q.shape
        call = {"n": n, "m": k.shape[2], "causal": causal, "batch": batch, "nheads": nheads, "q": q}
        call |= {"group": nheads // k.shape[1], "scale": softmax_scale * np.sqrt(head_dim)}
        if not takes(**call):
            raise raised("this call is not supported")
        return attention(q, k, v, softmax_scale=softmax_scale, causal=causal)

    taken = {"features": ("causal", "gqa"), "dtypes": ("fp16",), "head_dims": (64,), "min_seqlen": 1} | facts
    return fa3verify.kernel(**taken)(kernel)


always_causal = _kernel(lambda causal, **_: causal)
self_attention = _kernel(lambda n, m, **_: n == m)
cached_queries = _kernel(lambda n, m, **_: n <= m)
one_query = _kernel(lambda n, **_: n == 1, NotImplementedError)
default_scale = _kernel(lambda scale, **_: bool(np.isclose(scale, 1)))
one_sequence = _kernel(lambda batch, **_: batch == 1)
no_groups = _kernel(lambda group, **_: group == 1, NotImplementedError)
not_causal = _kernel(lambda causal, **_: not causal, NotImplementedError)
few_keys = _kernel(lambda m, **_: m <= 300)
groups_of_four = _kernel(lambda group, **_: group <= 4)
tiles_of_queries = _kernel(lambda n, **_: n % 64 == 0)
tiles_of_keys = _kernel(lambda m, **_: m % 32 == 0)
tiles = _kernel(lambda n, m, **_: n % 16 == 0 and m % 16 == 0)
causal_self_attention = _kernel(lambda n, m, causal, **_: causal and n == m)
some_keys = _kernel(lambda m, **_: m > 0, min_seqlen=0)


def doubled(q, k, v, **options):
    out, lse = exact(q, k, v, **options)
    return out * 2, lse


def last_key_lost(q, k, v, **options):
    return exact(q, k[..., :-1, :], v[..., :-1, :], **options) if k.shape[2] > 1 else exact(q, k, v, **options)


dislikes_outliers = _kernel(lambda q, **_: float(np.abs(q).max(initial=0)) < 30)
odd_products = _kernel(lambda n, m, **_: (n * m) % 3 != 1)
refuses_all = _kernel(lambda **_: False)
always_causal_and_wrong = _kernel(lambda causal, **_: causal, attention=doubled)
one_query_and_a_key_less = _kernel(lambda n, **_: n == 1, attention=last_key_lost)
declared_too_wide = _kernel(lambda n, **_: n <= 64, attention=doubled, max_seqlen_q=128)


def _featured(refuses: Rule, *features: str, fraction: float = 1, **facts: Any):
    """A kernel of windows, softcap, biases and slopes that raises where ``refuses(options)`` says so.

    It adds a ``fraction`` of biases and slopes.
    """

    def kernel(q, k, v, *, softmax_scale, causal=False, bias=None, alibi_slopes=None, attn_mask=None, **masks):
        window, softcap = masks.get("window", (-1, -1)), masks.get("softcap", 0.0)
        if refuses(causal=causal, window=window != (-1, -1), softcap=softcap, bias=bias, slopes=alibi_slopes):
            raise NotImplementedError("these two do not go together")
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        scores = q @ k.swapaxes(-1, -2) * softmax_scale
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        n, m = scores.shape[-2:]
        behind = np.arange(m) - np.arange(n)[:, None] - (m - n)
        scores = scores if bias is None else scores + fraction * bias
        scores = scores if attn_mask is None else np.where(attn_mask, scores, -np.inf)
        if alibi_slopes is not None:
            scores = scores - fraction * alibi_slopes[..., None, None] * np.abs(behind)
        left, right = window
        hidden = (left >= 0) & (-behind > left) | (right >= 0) & (behind > right) | causal & (behind > 0)
        scores = np.where(hidden, -np.inf, scores)
        most = scores.max(-1, keepdims=True, initial=-np.inf)
        p = np.exp(scores - np.where(np.isneginf(most), 0, most))
        total = p.sum(-1, keepdims=True)
        return (p @ v / np.where(total == 0, 1, total)).astype(np.float16)

    taken = {"features": features, "dtypes": ("fp16",), "head_dims": (64,), "min_seqlen": 1} | facts
    return fa3verify.kernel(**taken)(kernel)


causal_windows = _featured(lambda window, causal, **_: window and not causal, "causal", "window")
no_window_of_softcaps = _featured(lambda window, softcap, **_: window and softcap > 0, "causal", "window", "softcap")
no_windows = _featured(lambda window, **_: window, "causal", "window")


def _slopes_of_batch(slopes, **_):
    return slopes is not None and slopes.ndim == 2


def _hiding(bias, **_):
    return bias is not None and bool(np.isneginf(bias).any())


slopes_by_head = _featured(_slopes_of_batch, "causal", "alibi")
finite_biases = _featured(_hiding, "causal", "bias_fp32", "attn_mask")
other_slopes = _featured(_slopes_of_batch, "causal", "alibi", fraction=0.998)
other_biases = _featured(_hiding, "causal", "bias_fp32", fraction=0.998)
