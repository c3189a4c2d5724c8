"""Gradients with sinks as training code computes them, in numpy and by autograd, and one mistake of each kind."""

from __future__ import annotations

from typing import Any

import numpy as np

F = np.float32
MISTAKES = ("sign", "without dlse", "half of the rows", "base 2")


@np.errstate(all="ignore")
def gradients(*given, softmax_scale, causal=False, sinks=None, dlse=None, mistake="") -> Any:
    """(dq, dk, dv), and with sinks dsinks, of batched arrays bhsd and the out and lse that are given, in binary32."""
    q, k, v, dout, out, lse = given
    group = q.shape[1] // k.shape[1]
    q32, k32, v32, dout32, out32 = (x.astype(F) for x in (q, k, v, dout, out))
    k32, v32 = (np.repeat(x, group, axis=1) for x in (k32, v32))
    s = q32 @ k32.swapaxes(2, 3) * F(softmax_scale)
    rows, keys = s.shape[2:]
    if causal:
        s = np.where(np.arange(keys) > np.arange(rows)[:, None] + keys - rows, F(-np.inf), s)
    p = np.where(np.isneginf(s), F(0), np.exp(s - lse[..., None]))
    dots = (dout32 * out32).sum(3)
    dots = dots if dlse is None else dots - np.where(np.isneginf(lse), F(0), dlse)
    ds = p * (dout32 @ v32.swapaxes(2, 3) - dots[..., None])
    dk, dv = (x.swapaxes(2, 3) @ y for x, y in ((ds, q32 * F(softmax_scale)), (p, dout32)))
    dk, dv = (x.reshape(len(x), -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    found = tuple(x.astype(q.dtype) for x in (ds @ k32 * F(softmax_scale), dk, dv))
    return (
        found
        if sinks is None or mistake == "left out"
        else (*found, _of_sinks(sinks, lse, dout32, out32, dlse, mistake))
    )


def _of_sinks(sinks, lse, dout, out, dlse, mistake) -> np.ndarray:
    dots = (dout * out).sum(3)
    if dlse is not None and mistake != "without dlse":
        dots = dots - dlse
    exponential = np.exp2 if mistake == "base 2" else np.exp
    p = np.where(np.isneginf(sinks)[:, None], F(0), exponential(sinks[:, None] - lse))
    terms = np.where(p == 0, F(0), p * dots)
    if mistake == "half of the rows":
        terms = terms[:, :, : -(-terms.shape[2] // 2)]
    total = terms.sum((0, 2), dtype=F)
    return total if mistake == "sign" else -total


def sunk(q, k, v, *, softmax_scale, causal, sinks=None):
    """Return out and lse of tensors bhsd as gpt-oss computes them: a column of sinks beside the scores."""
    import torch

    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    s = q.float() @ k.transpose(2, 3) * softmax_scale
    rows, keys = s.shape[2:]
    if causal:
        hidden = torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows
        s = s.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], dim=3)
    is_empty = torch.isneginf(s).all(3, keepdim=True)
    p = torch.softmax(s.masked_fill(is_empty, 0), 3).masked_fill(is_empty, 0)[..., :keys]
    return (p @ v).to(q.dtype), torch.logsumexp(s, 3)
