"""A file as a user writes it: attention of binary32 arrays, in numpy and torch, and gradients by autograd."""

import numpy as np
import torch

import fa3verify


@fa3verify.kernel(dtypes=("fp32",), features=("causal",), head_dims=(64,))
def online(q, k, v, *, softmax_scale, causal):
    rows, keys = q.shape[2], k.shape[2]
    top = np.full(q.shape[:3], -np.inf, np.float32)
    row_sum, out = np.zeros(q.shape[:3], np.float32), np.zeros((*q.shape[:3], v.shape[3]), np.float32)
    for start in range(0, keys, 64):
        part = np.arange(start, min(start + 64, keys))
        s = np.float32(softmax_scale) * (q @ k[:, :, part].swapaxes(2, 3))
        if causal:
            s = np.where(part <= np.arange(rows)[:, None] + (keys - rows), s, -np.inf)
        new = np.maximum(top, s.max(-1))
        base = np.where(np.isneginf(new), np.float32(0), new)
        p = np.exp(s - base[..., None])
        alpha = np.exp(top - base)
        row_sum = row_sum * alpha + p.sum(-1)
        out = out * alpha[..., None] + p @ v[:, :, part]
        top = new
    return out / np.where(row_sum == 0, np.float32(1), row_sum)[..., None]


def sdpa(q, k, v, *, softmax_scale, causal):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]) if causal else None
    s = q @ k.transpose(2, 3) * softmax_scale
    s = s if mask is None else s.masked_fill(~mask, -torch.inf)
    p = torch.softmax(s, -1)
    return (p if mask is None else torch.where(mask.any(-1, keepdim=True), p, 0.0)) @ v


eager = fa3verify.kernel(dtypes=("fp32",), library="torch", features=("causal",), head_dims=(64,))(sdpa)
gradients = fa3verify.kernel(
    dtypes=("fp32",), library="torch", features=(), head_dims=(64,), gradients="autograd", min_seqlen=1
)(lambda q, k, v, *, softmax_scale: torch.softmax(q @ k.transpose(2, 3) * softmax_scale, -1) @ v)
