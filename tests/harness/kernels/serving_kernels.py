"""Small right kernels of calls that serve, in numpy, and one mistake of each kind."""

from __future__ import annotations

from typing import Any

import numpy as np

F = np.float32


def attend(q, k, v, scale, *, sinks=None, qv=None, causal=False, chunk=0, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one sequence, (seqlen, heads, head_dim), in binary32 with P rounded to the operands' format."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros((len(q), q.shape[1], v.shape[2]), F)
    lse = np.zeros((q.shape[1], len(q)), F)
    diagonal = np.arange(len(q))[:, None] + len(k) - len(q)
    keys = np.arange(len(k))
    hidden = causal & (keys > diagonal)
    left, right = more.get("window", (-1, -1))
    softcap = more.get("softcap", 0.0)
    hidden = hidden | ((left >= 0) & (keys < diagonal - left)) | ((right >= 0) & (keys > diagonal + right))
    if chunk:
        hidden = hidden | (keys // chunk != diagonal // chunk)
    for head in range(q.shape[1]):
        s = q[:, head].astype(F) @ k[:, head // group].astype(F).T
        if qv is not None:
            s = s + qv[:, head].astype(F) @ v[:, head // group].astype(F).T
        s = s * F(scale)
        s = np.where(hidden, F(-np.inf), F(softcap) * np.tanh(s / F(softcap)) if softcap else s)
        sink = F(-np.inf) if sinks is None else sinks[head]
        top = np.maximum(s.max(1, initial=-np.inf), sink)
        base = np.where(np.isneginf(top), F(0), top)
        p = np.exp(s - base[:, None])
        total = p.sum(1) + np.exp(sink - base)
        sums = p.astype(q.dtype).astype(F) @ v[:, head // group].astype(F)
        with np.errstate(divide="ignore", invalid="ignore"):
            out[:, head] = np.where(total[:, None] == 0, 0, sums / total[:, None])
            lse[head] = base + np.log(total)
    return out.astype(q.dtype), lse


def plain(q, k, v, *, softmax_scale, causal=False, attention_chunk=0, sinks=None, qv=None):
    """Batched calls, layout bshd."""
    found = [
        attend(
            *x[:3], softmax_scale, causal=causal, chunk=attention_chunk, sinks=sinks, qv=None if qv is None else x[3]
        )
        for x in zip(q, k, v, q if qv is None else qv, strict=True)
    ]
    return tuple(map(np.stack, zip(*found, strict=True)))


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotate (tokens, heads, head_dim) by (tokens, rotary_dim / 2), and round."""
    half = cos.shape[1]
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    y = x.astype(F)
    first, second, c, s = y[..., a].copy(), y[..., b].copy(), cos.astype(F)[:, None], sin.astype(F)[:, None]
    y[..., a], y[..., b] = first * c - second * s, first * s + second * c
    return y.astype(x.dtype)


def cached(
    q,
    k_cache,
    v_cache,
    *,
    softmax_scale,
    cache_seqlens,
    causal=False,
    mistake="",
    **given: Any,
):
    """Calls of caches, as flash_attn_with_kvcache has them."""
    is_packed = "cu_seqlens_q" in given
    window, chunk = given.get("window", (-1, -1)), given.get("attention_chunk", 0)
    is_masked = causal or window != (-1, -1) or chunk > 0
    masks = {"causal": causal, "window": window, "softcap": given.get("softcap", 0.0), "chunk": chunk}
    outs, sums = [], []
    for b, length in enumerate(cache_seqlens):
        own = slice(*given["cu_seqlens_q"][b : b + 2]) if is_packed else b
        row = given.get("cache_batch_idx", range(999))[b]
        if mistake == "row of a table" and "page_table" in given:
            row = b
        rows = given["page_table"][row] if "page_table" in given else np.array([row])
        k, v = (x[rows].reshape(-1, *x.shape[2:]) for x in (k_cache, v_cache))
        if "k_descale" in given and mistake != "descale":
            factors = (given["k_descale"], given["v_descale"])
            if factors[0].ndim == 3:  # of each key
                factors = tuple(x[rows].reshape(-1, x.shape[-1]) for x in factors)
            else:
                factors = tuple(x[0 if mistake == "descale of a packed sequence" and is_packed else b] for x in factors)
            k, v = (x.astype(F) * f[..., None] for x, f in zip((k, v), factors, strict=True))
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        if mistake == "stale page" and "page_table" in given and length > k_cache.shape[1]:
            k = np.concatenate([k[: k_cache.shape[1]], k])[: len(k)]
        pad = given["cache_leftpad"][b] if "cache_leftpad" in given and mistake != "leftpad" else 0
        pad = 0 if mistake == "leftpad in pages" and "page_table" in given else pad
        length = length + (mistake == "one key more") * (len(k) > length)
        k, v, asked = k[pad:length], v[pad:length], q[own]
        if "k_new" in given:
            span = slice(*given["cu_seqlens_k_new"][b : b + 2]) if "cu_seqlens_k_new" in given else b
            new, values = given["k_new"][span], given["v_new"][span]
            if mistake == "as many as queries":
                new, values = new[: len(asked)], values[: len(asked)]
            if "rotary_cos" in given:
                tables = given["rotary_cos"], given["rotary_sin"]
                if mistake == "32 channels":  # the angles are right, and channels behind stay
                    tables = tuple(x[:, :16] for x in tables)
                cos, sin = tuple(x[:2048] for x in tables) if mistake == "2,048 positions" else tables
                order = given["rotary_interleaved"] != (mistake == "rotary")
                first = length - pad if mistake == "positions without leftpad" else length
                new = rotate(new, *(x[np.minimum(first + np.arange(len(new)), len(x) - 1)] for x in (cos, sin)), order)
                steps = np.arange(len(asked)) * (is_masked and mistake != "one position")
                asked = rotate(asked, *(x[np.clip(first + steps, 0, len(x) - 1)] for x in (cos, sin)), order)
            if mistake != "unwritten":
                for j in range(len(new)):
                    place = divmod(length + j, k_cache.shape[1])
                    k_cache[rows[place[0]], place[1]], v_cache[rows[place[0]], place[1]] = new[j], values[j]
            if mistake != "append":
                k, v = np.concatenate([k, new]), np.concatenate([v, values])
        sinks = None if mistake == "sink of long rows" and len(k) > 2048 else given.get("sinks")
        if mistake == "wide windows" and window[0] > 4096:
            masks["window"] = (4096, window[1])
        if mistake == "long chunks" and chunk >= 1024:
            masks["chunk"] = 0
        out, lse = attend(asked, k, v, softmax_scale, **masks, sinks=sinks)
        outs.append(out)
        sums.append(lse)
    if is_packed:
        return np.concatenate(outs), np.concatenate(sums, axis=1)
    return np.stack(outs), np.stack(sums)
