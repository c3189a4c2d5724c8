"""Attention in numpy's binary32 that keeps every rule, with places where a kernel may go another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

F = np.float32
Step = Callable[[np.ndarray], np.ndarray]
SAME: Step = lambda x: x  # noqa: E731


def attend(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, **options: Any):
    """Return out and lse of batched (batch, seqlen, heads, head_dim) or packed (tokens, heads, head_dim) arrays."""
    if cu_seqlens_q is None:
        each = [sequence(*arrays, **options) for arrays in zip(q, k, v, strict=True)]
        return np.stack([out for out, _ in each]), np.stack([lse for _, lse in each])
    outs, lses = [], []
    for a, b, c, d in zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True):
        out, lse = sequence(q[a:b], k[c:d], v[c:d], **options)
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs), np.concatenate(lses, 1)


def sequence(  # noqa: PLR0913 (a kernel's options and its steps)
    q,
    k,
    v,
    *,
    softmax_scale,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    scores: Step = SAME,
    weights: Step | None = None,
    summed: Step = SAME,
    product: Step = SAME,
    finish: Step = SAME,
    logs: Step = SAME,
):
    """Return out (seqlen_q, heads, head_dim_v) and lse (heads, seqlen_q) of one sequence; the steps may be others."""
    dtype = q.dtype
    group = q.shape[1] // k.shape[1]
    qs, ks, vs = (np.swapaxes(np.asarray(x).astype(F), 0, 1) for x in (q, k, v))
    ks, vs = np.repeat(ks, group, 0), np.repeat(vs, group, 0)
    rows, keys = qs.shape[1], ks.shape[1]
    with np.errstate(all="ignore"):
        s = scores(qs @ np.swapaxes(ks, 1, 2)) * F(softmax_scale)
        if softcap:
            s = F(softcap) * np.tanh(s / F(softcap))
        at = np.arange(rows)[:, None] + keys - rows
        key = np.arange(keys)[None]
        left, right = window
        hidden = (key > at) & bool(causal) | (key > at + right) & (right >= 0) | (key < at - left) & (left >= 0)
        s = np.where(hidden, F(-np.inf), s)
        top = s.max(-1, initial=-np.inf)
        base = np.where(np.isneginf(top), F(0), top)
        p = np.exp(s - base[..., None])
        total = summed(p).sum(-1)
        rounded = weights(p) if weights else p.astype(dtype if dtype.itemsize == 2 else ml_dtypes.bfloat16).astype(F)
        o = product(rounded @ vs)
        o = np.where(total[..., None] == 0, F(0), o / np.where(total == 0, F(1), total)[..., None])
        lse = np.where(total == 0, F(-np.inf), base + np.log(total))
    return np.swapaxes(finish(o), 0, 1).astype(dtype if dtype.itemsize == 2 else ml_dtypes.bfloat16), logs(lse)
