"""Functions that nobody declared to be kernels, as their authors write them; tests draft their declarations."""

from __future__ import annotations

import numpy as np


def exact(q, k, v, scale, *, causal=False, top_left=False, empty="zero"):
    """Attention of (batch, heads, tokens, channels) in binary64."""
    scores = scale * (q.astype(float) @ k.astype(float).swapaxes(-1, -2))
    n, m = scores.shape[-2:]
    hidden = np.triu(np.ones((n, m), bool), 1 if top_left else m - n + 1) if causal else np.zeros((n, m), bool)
    scores = np.where(hidden, -1e30 if empty == "mean" else -np.inf, scores)
    p = np.exp(scores - np.where(np.isneginf(top := scores.max(-1, keepdims=True)), 0, top))
    total = p.sum(-1, keepdims=True)
    return (p @ v.astype(float) / np.where(total == 0, 1, total)).astype(q.dtype)


def of_heads(query, key, value, is_causal=False, sm_scale=None):
    """A row without a key is the mean of V, and the mask is aligned top-left."""
    assert query.shape[1] == key.shape[1]
    assert key.shape[2] > 0
    return exact(query, key, value, sm_scale or 0.125, causal=is_causal, top_left=True, empty="mean")


def of_tokens(q, k, v, causal, scale):
    """Its arguments are required, and its layout is FlashAttention's."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return exact(q, k, v, scale, causal=causal).swapaxes(1, 2)


def always_causal(q, k, v):
    """As many queries as keys, and the default scale."""
    if q.shape[2] != k.shape[2]:
        raise ValueError("this is self-attention")
    return exact(q, k, v, q.shape[-1] ** -0.5, causal=True)


def with_weights(q, k, v, mask, dropout_p, scale=None):
    """A mask of zeros and ones, and weights beside the output."""
    scores = (scale or q.shape[-1] ** -0.5) * (q.astype(float) @ k.astype(float).swapaxes(-1, -2))
    scores = scores if mask is None else np.where(mask == 0, -1e30, scores)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v.astype(float)).astype(q.dtype), p


def of_one_length(q, k, v):
    """It raises of other lengths what libraries raise, and its scores have no scale."""
    if q.shape[2] != k.shape[2]:
        raise RuntimeError("the size of k must match the size of q")
    return exact(q, k, v, 1.0)


def of_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    """Packed sequences, always causal."""
    out = np.empty_like(q)
    for i, j, m, n in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:]):
        parts = (x[None].swapaxes(1, 2) for x in (q[i:j], k[m:n], v[m:n]))
        out[i:j] = exact(*parts, q.shape[-1] ** -0.5, causal=True)[0].swapaxes(0, 1)
    return out


class Applied:
    """As an autograd function of torch, whose apply takes no keyword."""

    @staticmethod
    def forward(context, q, k, v, scale):
        return exact(q, k, v, scale)

    @classmethod
    def apply(cls, *arguments):
        return cls.forward(None, *arguments)


applied = Applied.apply


def padded(q, k, v, key_padding_mask=None, hidden=False):
    """A mask of the keys that count, or of those that are hidden as torch's MultiheadAttention has it."""
    scores = q.shape[-1] ** -0.5 * (q.astype(float) @ k.astype(float).swapaxes(-1, -2))
    if key_padding_mask is not None:
        scores = np.where((key_padding_mask != hidden)[:, None, None], scores, -np.inf)
    p = np.exp(scores - np.where(np.isneginf(top := scores.max(-1, keepdims=True)), 0, top))
    total = p.sum(-1, keepdims=True)
    return (p @ v.astype(float) / np.where(total == 0, 1, total)).astype(q.dtype)


def padded_by_hidden_keys(q, k, v, key_padding_mask=None):
    """True hides a key."""
    return padded(q, k, v, key_padding_mask, hidden=True)


def off_by_a_hundredth(q, k, v, is_causal=False, scale=None):
    """Wrong: no contract says that scores are larger by 1 %."""
    return exact(q, k, v, 1.01 * (scale or q.shape[-1] ** -0.5), causal=is_causal)


def of_tiles(q, k, v, block_m):
    """It needs what nobody can know."""
    return q[:, :, :block_m]
