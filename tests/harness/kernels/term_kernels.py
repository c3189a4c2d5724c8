"""Kernels whose scores have a term: right ones of several orders of operations, and one mistake of each kind.

``attention`` is whole and right without a mistake. Layout bhsd, in numpy; binary32, with P rounded to the operands'
format where nothing else is said.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

F = np.float32
LOG2_E = F(1 / math.log(2))
LN2 = F(math.log(2))


def distances(n: int, m: int) -> np.ndarray:
    return np.arange(n)[:, None] + (m - n) - np.arange(m)


def bias_of(mistake: str, shape: tuple[int, ...], given: dict[str, Any], dtype: np.dtype) -> np.ndarray:
    """Return the bias (batch, nheads, seqlen_q, seqlen_k) in binary32 of whatever terms a call has, masks as -inf."""
    batch, nheads, n, m = shape
    total = np.zeros(shape, F)
    if (bias := given.get("bias")) is not None:
        if mistake == "batch 0 for all":
            bias = bias[:1]
        if mistake == "head 0 for all":
            bias = bias[:, :1]
        if mistake == "heads broadcast along queries" and bias.shape[1] > 1:
            bias = np.repeat(bias[:, :1], bias.shape[1], axis=1)
        if mistake == "transposed" and bias.shape[2] == bias.shape[3]:
            bias = bias.swapaxes(2, 3)
        if mistake == "first row for all":
            bias = bias[:, :, :1]
        if mistake == "rounded to 16 bits":
            bias = bias.astype(dtype)
        if mistake == "no minus infinity":
            bias = np.maximum(bias.astype(F), F(-20))
        if mistake == "of queries from the top":  # a bias of fewer queries than keys, read from its other end
            bias = bias[:, :, ::-1] if n < m else bias
        total = total + bias.astype(F)
    if (mask := given.get("attn_mask")) is not None:
        if mistake == "inverted":
            mask = ~mask
        if mistake == "ignored in the last tile":
            mask = np.broadcast_to(mask, shape).copy()
            mask[..., m // 64 * 64 :] = True
        if mistake == "sequence 0's mask":
            mask = mask[:1]
        total = total + np.where(mask, F(0), F(-np.inf))
    if (padding := given.get("key_padding_mask")) is not None:
        if mistake == "padding of queries":
            rows = np.ones((batch, n), bool)
            rows[:, : min(n, m)] = padding[:, : min(n, m)]
            total = np.where(rows[:, None, :, None], total, F(-np.inf))
        elif mistake == "padding counts keys":
            padding = np.arange(m) < padding.sum(1)[:, None]
        if mistake != "padding of queries":
            total = total + np.where(padding, F(0), F(-np.inf))[:, None, None]
    if (slopes := given.get("alibi_slopes")) is not None:
        if mistake == "slopes of sequence 0" and slopes.ndim == 2:
            slopes = slopes[:1]
        if mistake == "slopes of the group":
            slopes = slopes[..., np.arange(nheads) // 2]
        slopes = np.broadcast_to(slopes, (batch, nheads))[..., None, None].astype(F)
        far = np.abs(distances(n, m))
        if mistake == "alibi from the top left":
            far = np.abs(distances(n, n + m)[:, :m] - m)
        if mistake == "alibi without abs":
            far = distances(n, m)
        total = total + (slopes if mistake == "sign of the slope" else -slopes) * far.astype(F)
    if (queries := given.get("document_ids_q")) is not None:
        keys = given["document_ids_k"]
        same = queries[:, :, None] == keys[:, None]
        if mistake == "documents up to this one":
            same = queries[:, :, None] >= keys[:, None]
        if mistake == "document of the tile's first key":
            same = queries[:, :, None] == keys[:, None, np.arange(m) // 16 * 16]
        if mistake == "documents of sequence 0":
            same = np.broadcast_to(same[:1], same.shape)
        total = total + np.where(same, F(0), F(-np.inf))[:, None]
    return total


def attention(q, k, v, *, softmax_scale, causal=False, mistake="", order="nats", **given: Any):
    """Eager attention; ``order`` is "nats", "base 2", "bias first", "normalised" or "tiles"."""
    dtype = q.dtype
    batch, nheads, n, _ = q.shape
    m = k.shape[2]
    k, v = (np.repeat(x, nheads // x.shape[1], axis=1).astype(F) for x in (k, v))
    bias = bias_of(mistake, (batch, nheads, n, m), given, dtype)
    if causal:
        bias = np.where(distances(n, m) < 0, F(-np.inf), bias)
    raw = q.astype(F) @ k.swapaxes(-1, -2)
    scale = F(softmax_scale)
    with np.errstate(all="ignore"):
        if mistake == "added before scaling":
            s = (raw + bias) * scale
        elif mistake == "scaled twice":
            s = raw * scale * scale + bias if given.get("bias") is not None else raw * scale
        elif order == "bias first":
            s = (raw + bias / scale) * scale
        elif order == "base 2":
            s = (raw * (scale * LOG2_E) + bias * (F(1) if mistake == "nats in base 2" else LOG2_E)) * LN2
        else:
            s = raw * scale + bias
        if mistake == "kept in 16 bits":
            s = s.astype(dtype).astype(F)
        if mistake == "hidden scores are -1000":
            s = np.where(np.isneginf(bias), F(-1000), s)
        if order == "tiles":
            return tiles(s, v, dtype, mistake)
        return finish(s, raw * scale, v, dtype, mistake, order)


def finish(s, plain, v, dtype, mistake, order):
    """Softmax of whole rows."""
    seen = plain if mistake == "not in the maximum" else s
    top = seen.max(-1, keepdims=True, initial=-np.inf)
    base = top if mistake == "nan in empty rows" else np.where(np.isneginf(top), F(0), top)
    p = np.exp(s - base)
    total = p.sum(-1, keepdims=True)
    if order == "normalised":
        out = (p / np.where(total == 0, F(1), total)).astype(dtype).astype(F) @ v
    else:
        out = (
            p.astype(dtype).astype(F) @ v / (total if mistake == "nan in empty rows" else np.where(total, total, F(1)))
        )
    lse = (base + np.log(total))[..., 0]
    if mistake == "garbage in empty rows":
        out = np.where(total == 0, F(3), out)
    if mistake == "lse without the term":
        lse = np.log(np.exp(plain - plain.max(-1, keepdims=True)).sum(-1)) + plain.max(-1)
    return out.astype(dtype), lse.astype(F)


def tiles(s, v, dtype, mistake, width=32):
    """Online softmax over tiles of keys, which leaves out tiles that no row of a head sees."""
    shape = s.shape[:3]
    top, total = np.full(shape, F(-np.inf)), np.zeros(shape, F)
    o = np.zeros((*shape, v.shape[-1]), F)
    for start in range(0, s.shape[3], width):
        tile = s[..., start : start + width]
        hidden = np.isneginf(tile)
        if hidden.all() or (mistake == "skips a tile that one row hides" and hidden.all(-1).any()):
            continue
        new = np.maximum(top, tile.max(-1))
        base = np.where(np.isneginf(new), F(0), new)
        alpha = np.exp(np.where(np.isneginf(top), F(-np.inf), top) - base)
        p = np.exp(tile - base[..., None])
        total = total * alpha + p.sum(-1)
        o = o * alpha[..., None] + p.astype(dtype).astype(F) @ v[:, :, start : start + width]
        top = new
    lse = np.where(total > 0, np.where(np.isneginf(top), F(0), top) + np.log(total), F(-np.inf))
    out = o / np.where(total == 0, F(1), total)[..., None]
    return out.astype(dtype), lse.astype(F)


def masked_by_a_number(q, k, v, *, softmax_scale, causal=False, attn_mask=None, key_padding_mask=None):
    """Scores of hidden keys are -1e30, so that a row without a key is the mean of V."""
    dtype = q.dtype
    n, m = q.shape[2], k.shape[2]
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1).astype(F) for x in (k, v))
    s = q.astype(F) @ k.swapaxes(-1, -2) * F(softmax_scale)
    given = (attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None])
    for mask in (distances(n, m) >= 0 if causal else None, *given):
        s = s if mask is None else np.where(mask, s, F(-1e30))
    p = np.exp(s - s.max(-1, keepdims=True))
    out = p.astype(dtype).astype(F) @ v / p.sum(-1, keepdims=True)
    return out.astype(dtype), (s.max(-1) + np.log(p.sum(-1))).astype(F)


def biased_and_masked_by_a_number(q, k, v, *, softmax_scale, causal=False, attn_mask=None, bias=None):
    """A mask fills scores with -1e30 and a bias is added: rows that a bias of -inf empties are NaN, others the mean."""
    dtype = q.dtype
    n, m = q.shape[2], k.shape[2]
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1).astype(F) for x in (k, v))
    s = q.astype(F) @ k.swapaxes(-1, -2) * F(softmax_scale)
    s = s if bias is None else s + bias.astype(F)
    for mask in (distances(n, m) >= 0 if causal else None, attn_mask):
        s = s if mask is None else np.where(mask, s, F(-1e30))
    with np.errstate(invalid="ignore"):
        p = np.exp(s - s.max(-1, keepdims=True))
        return (p.astype(dtype).astype(F) @ v / p.sum(-1, keepdims=True)).astype(dtype)


def torch_mask(torch, shape, causal, *, dtype, **given):
    """Return all terms of a call, and its causal mask, as one additive mask of torch's attention; None for nothing."""
    batch, nheads, n, m = shape
    masks = []
    if causal:
        masks.append(torch.arange(m) <= torch.arange(n)[:, None] + (m - n))
    if (mask := given.get("attn_mask")) is not None:
        masks.append(mask)
    if (padding := given.get("key_padding_mask")) is not None:
        masks.append(padding[:, None, None])
    if (ids := given.get("document_ids_q")) is not None:
        masks.append((ids[:, :, None] == given["document_ids_k"][:, None])[:, None])
    total = given.get("bias")
    if (slopes := given.get("alibi_slopes")) is not None:
        far = (torch.arange(n)[:, None] + (m - n) - torch.arange(m)).abs()
        total = -slopes.broadcast_to(batch, nheads)[..., None, None] * far
    for mask in masks:
        total = torch.zeros((), dtype=dtype) if total is None else total
        total = torch.where(mask, total, -torch.inf)
    return None if total is None else total.broadcast_to(shape)


def torch_sdpa(q, k, v, *, softmax_scale, causal=False, **given):
    """torch's own choice of a kernel on a CPU, for one mask of 16 bits or of binary32."""
    import torch

    mask = torch_mask(torch, (*q.shape[:3], k.shape[2]), causal, dtype=q.dtype, **given)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
    )


def torch_flex(q, k, v, *, softmax_scale, causal=False, **given):
    """FlexAttention, not compiled, with a score_mod that reads the terms."""
    import warnings

    import torch
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    mask = torch_mask(torch, (*q.shape[:3], k.shape[2]), causal, dtype=torch.float32, **given)

    def score(s, b, h, i, j):
        return s if mask is None else s + mask[b, h, i, j]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, aux = flex_attention(
            q, k, v, score_mod=score, scale=softmax_scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
    return out, aux.lse


def torch_eager(q, k, v, *, softmax_scale, causal=False, **given):
    """As T5 and BLOOM compute it: scores in 16 bits, to which the mask is added, a softmax in binary32."""
    import torch

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    mask = torch_mask(torch, (*q.shape[:3], k.shape[2]), causal, dtype=q.dtype, **given)
    s = q @ k.mT * softmax_scale
    s = s if mask is None else s + mask.to(q.dtype)
    p = torch.softmax(s.float(), -1).nan_to_num(0.0)
    return p.to(q.dtype) @ v


def packed(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, mistake="", **given):
    """Slopes over packed sequences, one after the other; the mistake takes the slopes of the first for all."""
    if cu_seqlens_q is None:
        return attention(q, k, v, **given)
    out, lse = np.zeros((*q.shape[:2], v.shape[-1]), q.dtype), np.zeros((q.shape[1], len(q)), F)
    slopes = given.pop("alibi_slopes")
    for i in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(cu[i], cu[i + 1]) for cu in (cu_seqlens_q, cu_seqlens_k))
        x = (y.swapaxes(0, 1)[None] for y in (q[rows], k[keys], v[keys]))
        own = slopes if slopes is None or slopes.ndim == 1 else slopes[:1] if mistake else slopes[i : i + 1]
        of_one, lse_of_one = attention(*x, **given, alibi_slopes=own)
        out[rows], lse[:, rows] = of_one[0].swapaxes(0, 1), lse_of_one[0]
    return out, lse
