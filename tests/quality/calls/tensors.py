"""Right attention of torch tensors (batch, seqlen, heads, head_dim), forward and as an autograd function."""

from __future__ import annotations

from typing import Any

import torch


def scores_of(q, k, *, softmax_scale, causal=False, softcap=0.0):
    """Return scores (batch, heads, rows, keys) in binary32, -inf where the mask hides a key."""
    group = q.shape[2] // k.shape[2]
    qs, ks = (x.float().transpose(1, 2) for x in (q, k))
    s = qs @ ks.repeat_interleave(group, 1).transpose(2, 3) * softmax_scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    if causal:
        rows, keys = s.shape[2:]
        hidden = torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows
        s = s.masked_fill(hidden, -torch.inf)
    return s


def weights_of(s):
    """Return the softmax of scores, zero in rows without a key, and lse."""
    lse = torch.logsumexp(s, -1) if s.shape[-1] else torch.full(s.shape[:-1], -torch.inf)
    base = lse.masked_fill(torch.isneginf(lse), 0)
    return torch.exp(s - base[..., None]), lse


def attend(q, k, v, **options: Any):
    """Return out and lse."""
    p, lse = weights_of(scores_of(q, k, **options))
    vs = v.float().transpose(1, 2).repeat_interleave(q.shape[2] // v.shape[2], 1)
    return (p @ vs).transpose(1, 2).to(q.dtype), lse


def gradients(q, k, v, dout, *, softmax_scale, causal=False):
    """Return dq, dk and dv of a forward of its own."""
    group = q.shape[2] // k.shape[2]
    p, _ = weights_of(scores_of(q, k, softmax_scale=softmax_scale, causal=causal))
    qs, douts = (x.float().transpose(1, 2) for x in (q, dout))
    ks, vs = (x.float().transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    dp = douts @ vs.transpose(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * softmax_scale
    dk, dv = ds.transpose(2, 3) @ qs, p.transpose(2, 3) @ douts
    dk, dv = (x.reshape(len(x), -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    return tuple(x.transpose(1, 2).to(q.dtype) for x in (ds @ ks, dk, dv))


def contiguous_read(x: torch.Tensor) -> torch.Tensor:
    """Return what a kernel sees that takes a tensor's strides for those of a contiguous one."""
    held = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())[x.storage_offset() :][: x.numel()]
    return torch.cat([held, held.new_zeros(x.numel() - len(held))]).view(x.shape)
