"""Right attention in numpy's binary32 for every kind of call, which the wrong kernels of this folder spoil.

Batched arrays are (batch, seqlen, heads, head_dim), packed ones (tokens, heads, head_dim).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.harness.kernels.serving_kernels import rotate

F = np.float32
Step = Callable[[np.ndarray], np.ndarray]
SAME: Step = lambda x: x  # noqa: E731


def heads_first(x, group=1):
    """Return (heads, rows, channels) in binary32, each head ``group`` times."""
    return np.repeat(np.swapaxes(np.asarray(x), 0, 1).astype(F), group, 0)


def hidden_keys(rows, keys, *, causal=False, window=(-1, -1), chunk=0):
    """Return which keys a mask hides from which rows, (rows, keys)."""
    at = np.arange(rows)[:, None] + keys - rows
    key = np.arange(keys)[None]
    left, right = window
    hidden = (key > at) & bool(causal) | (key > at + right) & (right >= 0) | (key < at - left) & (left >= 0)
    return hidden | (key // chunk != at // chunk) if chunk else hidden


@np.errstate(all="ignore")
def sequence(  # noqa: PLR0913 (a kernel's options and its steps)
    q,
    k,
    v,
    *,
    softmax_scale,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    attention_chunk=0,
    sinks=None,
    scores: Step = SAME,
    floor=-np.inf,
    exponential: Step = np.exp,
    weights: Step | None = None,
    summed: Step = SAME,
    product: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.matmul,
    finish: Step = SAME,
):
    """Return out (seqlen_q, heads, head_dim_v) and lse (heads, seqlen_q) of one sequence; any step may be another."""
    group = q.shape[1] // k.shape[1]
    qs, ks, vs = heads_first(q), heads_first(k, group), heads_first(v, group)
    s = scores(qs @ np.swapaxes(ks, 1, 2)) * F(softmax_scale)
    s = F(softcap) * np.tanh(s / F(softcap)) if softcap else s
    hidden = hidden_keys(len(q), len(k), causal=causal, window=window, chunk=attention_chunk)
    s = np.where(hidden, F(-np.inf), s)
    sink = np.full((len(qs), 1), -np.inf, F) if sinks is None else np.asarray(sinks, F)[:, None]
    top = np.maximum(s.max(-1, initial=-np.inf), np.maximum(sink, F(floor)))
    base = np.where(np.isneginf(top), F(0), top)
    p = exponential(s - base[..., None])
    total = summed(p).sum(-1, dtype=F) + np.exp(sink - base)
    o = product(weights(p) if weights else p.astype(q.dtype).astype(F), vs)
    o = np.where(total[..., None] == 0, F(0), o / np.where(total == 0, F(1), total)[..., None])
    lse = np.where(total == 0, F(-np.inf), base + np.log(total))
    return np.swapaxes(finish(o), 0, 1).astype(q.dtype), lse


def attend(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, **options: Any):
    """Return out and lse of batched or packed arrays."""
    if cu_seqlens_q is None:
        each = [sequence(*arrays, **options) for arrays in zip(q, k, v, strict=True)]
        return np.stack([out for out, _ in each]), np.stack([lse for _, lse in each])
    bounds = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)
    each = [sequence(q[a:b], k[c:d], v[c:d], **options) for a, b, c, d in bounds]
    out = np.concatenate([out for out, _ in each])
    rest = len(q) - len(out)  # tokens behind the last sequence
    lse = np.concatenate([lse for _, lse in each], 1)
    return np.pad(out, ((0, rest), (0, 0), (0, 0))), np.pad(lse, ((0, 0), (0, rest)))


def places(row, first, last, size):
    """Return the rows of a cache and the places in them where keys from ``first`` to ``last`` of a sequence lie.

    ``row`` is a line of a page table, or the one row of a sequence.
    """
    at = np.arange(first, last)
    return (row[at // size], at % size) if np.ndim(row) else (np.full(len(at), row), at)


def cached(  # noqa: PLR0913 (what a call of a cache has)
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens,
    page_table=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    k_new=None,
    v_new=None,
    cu_seqlens_k_new=None,
    cu_seqlens_q=None,
    max_seqlen_q=0,
    rotary_cos=None,
    rotary_sin=None,
    rotary_interleaved=False,
    k_descale=None,
    v_descale=None,
    **options: Any,
):
    """Return out and lse of calls over a cache, as flash_attn_with_kvcache has them; appended keys are written."""
    outs, sums = [], []
    is_masked = options.get("causal") or options.get("window", (-1, -1)) != (-1, -1) or options.get("attention_chunk")
    for b, length in enumerate(int(n) for n in cache_seqlens):
        asked = q[b] if cu_seqlens_q is None else q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]]
        index = b if cache_batch_idx is None else int(cache_batch_idx[b])
        row = index if page_table is None else page_table[index]
        pad = 0 if cache_leftpad is None else int(cache_leftpad[b])
        total = length
        if k_new is not None:
            span = b if cu_seqlens_k_new is None else slice(*cu_seqlens_k_new[b : b + 2])
            new, values = k_new[span], v_new[span]
            total += len(new)
            if rotary_cos is not None:
                last, begin = len(rotary_cos) - 1, length - pad
                at = np.minimum(begin + np.arange(len(new)), last)
                new = rotate(new, rotary_cos[at], rotary_sin[at], rotary_interleaved)
                at = np.clip(begin + np.arange(len(asked)) * bool(is_masked), 0, last)
                asked = rotate(asked, rotary_cos[at], rotary_sin[at], rotary_interleaved)
            to = places(row, length, total, k_cache.shape[1])
            k_cache[to], v_cache[to] = new, values
        at = places(row, pad, total, k_cache.shape[1])
        k, v = k_cache[at], v_cache[at]
        if k_descale is not None:
            factors = (x[at] if np.ndim(x) == 3 else x[b][None] for x in (k_descale, v_descale))
            k, v = (x.astype(F) * np.asarray(f, F)[..., None] for x, f in zip((k, v), factors, strict=True))
        out, lse = sequence(asked, k.astype(q.dtype), v.astype(q.dtype), **options)
        outs.append(out)
        sums.append(lse)
    if cu_seqlens_q is not None:
        return np.concatenate(outs), np.concatenate(sums, 1)
    return np.stack(outs), np.stack(sums)


@np.errstate(all="ignore")
def sequence_gradients(  # noqa: PLR0913 (a kernel's options)
    q,
    k,
    v,
    dout,
    out,
    lse,
    *,
    softmax_scale,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
    dlse=None,
    slope: Callable[..., np.ndarray] = lambda capped: 1 - capped * capped,
):
    """Return dq, dk, dv and dsinks of one sequence from the out and lse that are given, P and dS in binary32."""
    group = q.shape[1] // k.shape[1]
    qs, douts, outs = heads_first(q), heads_first(dout), heads_first(out)
    ks, vs = heads_first(k, group), heads_first(v, group)
    s = qs @ np.swapaxes(ks, 1, 2) * F(softmax_scale)
    capped = np.tanh(s / F(softcap)) if softcap else F(0)
    s = F(softcap) * capped if softcap else s
    hidden = hidden_keys(len(q), len(k), causal=causal, window=window)
    p = np.where(hidden | np.isneginf(lse)[..., None], F(0), np.exp(s - lse[..., None]))
    dots = (douts * outs).sum(-1) - (0 if dlse is None else np.where(np.isneginf(lse), F(0), dlse))
    ds = p * (douts @ np.swapaxes(vs, 1, 2) - dots[..., None]) * F(softmax_scale)
    ds = ds * slope(capped) if softcap else ds
    dk, dv = np.swapaxes(ds, 1, 2) @ qs, np.swapaxes(p, 1, 2) @ douts
    dk, dv = (x.reshape(-1, group, *x.shape[1:]).sum(1) for x in (dk, dv))
    found = tuple(np.swapaxes(x, 0, 1).astype(q.dtype) for x in (ds @ ks, dk, dv))
    if sinks is None:
        return found
    sunk = np.where(np.isneginf(lse), F(0), np.exp(np.asarray(sinks, F)[:, None] - lse))
    return (*found, -np.where(sunk == 0, F(0), sunk * dots).sum(-1, dtype=F))


def gradients(  # noqa: PLR0913 (operands of gradients)
    q, k, v, dout, out, lse, *, dlse=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, **options: Any
):
    """Return dq, dk, dv, and with sinks dsinks, of batched or packed arrays."""
    options = {name: x for name, x in options.items() if not name.startswith("max_")} | {"sinks": sinks}
    rows = (q, dout, out)
    if cu_seqlens_q is None:
        calls = [(*(x[b] for x in (q, k, v, dout, out, lse)), None if dlse is None else dlse[b]) for b in range(len(q))]
    else:
        calls = []
        for a, b, c, d in zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True):
            qs, douts, outs = (x[a:b] for x in rows)
            own = None if dlse is None else dlse[:, a:b]
            calls.append((qs, k[c:d], v[c:d], douts, outs, lse[:, a:b], own))
    each = [sequence_gradients(*arrays, dlse=own, **options) for *arrays, own in calls]
    join = np.stack if cu_seqlens_q is None else np.concatenate
    found = [join([x[i] for x in each]) for i in range(3)]
    return tuple(found) if sinks is None else (*found, np.sum([x[3] for x in each], 0, dtype=F))
