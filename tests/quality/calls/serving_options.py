"""Wrong kernels of calls that serve, by rotary embedding, sinks, chunks, windows, descales and packed queries."""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.quality.calls.exhibits import DENSE, PAGES, ROWS, wrong
from tests.quality.calls.plain import attend, cached
from tests.quality.calls.witnesses import cache, dense, differs

serving = partial(wrong, "serving", head_dims=(64,))
rotates = partial(serving, features=(*PAGES, "append", "rotary"))


def turned(o, change):
    """Return options whose rotary tables are changed, where there are any."""
    if o.get("rotary_cos") is None:
        return o
    return o | dict(zip(("rotary_cos", "rotary_sin"), change(o["rotary_cos"], o["rotary_sin"]), strict=True))


def still(cos, sin, keep):
    """Return tables that turn the first pairs alone."""
    cos, sin = cos.copy(), sin.copy()
    cos[:, keep:], sin[:, keep:] = 1, 0
    return cos, sin


@rotates(
    "of a rotation of the whole head the upper half of the pairs stays",
    differs(cache, new=(3, 3), rows=3, rotary_dim=64),
)
def whole_head(q, k, v, **o):
    return cached(q, k, v, **turned(o, lambda c, s: still(c, s, 16) if 2 * c.shape[1] == q.shape[-1] else (c, s)))


@rotates("the partner of a channel is always 16 apart", differs(cache, new=(3, 3), rows=3, rotary_dim=64))
def partners_of_16(q, k, v, **o):
    if o.get("rotary_cos") is not None and not o["rotary_interleaved"] and o["rotary_cos"].shape[1] > 16:
        o = turned(o, lambda c, s: (c[:, :16], s[:, :16]))
    return cached(q, k, v, **o)


@rotates("positions from 2,048 on have the table's row 2,047", differs(cache, lengths=(2100,), new=(2,), rotary_dim=32))
def table_of_2048(q, k, v, **o):
    return cached(q, k, v, **turned(o, lambda c, s: (c[:2048], s[:2048])))


@rotates(
    "pairs are interleaved up to 32 channels, and halves beyond",
    differs(cache, new=(3, 3), rows=3, rotary_dim=48, interleaved=True),
)
def interleaved_beyond_32(q, k, v, **o):
    if o.get("rotary_cos") is not None and o["rotary_cos"].shape[1] > 16:
        o["rotary_interleaved"] = False
    return cached(q, k, v, **o)


@rotates("a rotation of 16 channels is skipped", differs(cache, new=(3, 3), rows=3, rotary_dim=16))
def rotary_of_16(q, k, v, **o):
    return cached(q, k, v, **turned(o, lambda c, s: still(c, s, 0) if c.shape[1] == 8 else (c, s)))


@rotates(
    "a table that is longer than the cache is read from its end",
    differs(cache, new=(3, 3), rows=3, rotary_dim=32, positions=4096),
)
def long_tables(q, k, v, **o):
    most = o["page_table"].shape[1] * k.shape[1]
    return cached(q, k, v, **turned(o, lambda c, s: (c[-most:], s[-most:]) if len(c) > 4 * most else (c, s)))


@serving(
    "sinks are lost where a row of more than 2,048 keys is split",
    differs(cache, lengths=(2100,), rows=1, sinks=True),
    features=(*PAGES, "sinks"),
)
def sinks_beside_splits(q, k, v, *, sinks=None, cache_seqlens, **o):
    is_split = max(cache_seqlens, default=0) > 2048 and q.shape[-3] <= 16
    if sinks is not None and is_split:
        sinks = sinks + np.float32(4.0)
    return cached(q, k, v, sinks=sinks, cache_seqlens=cache_seqlens, **o)


@serving(
    "a sink that has a window beside it is lost on rows of more than 1,000 keys",
    differs(cache, lengths=(1100,), rows=1, sinks=True, window=(16, 0)),
    features=(*PAGES, "sinks", "window"),
)
def sinks_beside_windows(q, k, v, *, sinks=None, cache_seqlens, window=(-1, -1), **o):
    is_lost = max(cache_seqlens, default=0) > 1000 and window != (-1, -1)
    return cached(q, k, v, sinks=None if is_lost else sinks, cache_seqlens=cache_seqlens, window=window, **o)


@serving(
    "chunks from 1,024 keys on are not applied",
    differs(cache, lengths=(1030,), rows=3, attention_chunk=1024, causal=True),
    features=(*PAGES, "attention_chunk"),
)
def chunks_from_1024(q, k, v, *, attention_chunk=0, **o):
    return cached(q, k, v, attention_chunk=0 if attention_chunk >= 1024 else attention_chunk, **o)


@serving(
    "a chunk of 8,192 is taken for 8,191",
    differs(cache, lengths=(8193,), rows=1, attention_chunk=8192, causal=True),
    features=(*PAGES, "attention_chunk"),
)
def chunk_of_8192(q, k, v, *, attention_chunk=0, **o):
    return cached(q, k, v, attention_chunk=attention_chunk - (attention_chunk == 8192), **o)


@serving(
    "without a causal mask queries in front of the first key see the first chunk",
    differs(dense, seqlen_q=7, seqlen_k=4, attention_chunk=3),
    features=(*DENSE, "attention_chunk"),
)
def chunk_in_front(q, k, v, *, attention_chunk=0, causal=False, **o):
    out, lse = attend(q, k, v, attention_chunk=attention_chunk, causal=causal, **o)
    if attention_chunk and not causal and (early := max(0, q.shape[1] - k.shape[1])):
        first = attend(q[:, :early], k[:, :attention_chunk], v[:, :attention_chunk], **o)
        out[:, :early], lse[..., :early] = first
    return out, lse


@serving(
    "where queries are packed all sequences have the descales of the first",
    differs(cache, lengths_q=(2, 3), fp8="head"),
    features=(*PAGES, "varlen", "fp8_cache"),
)
def packed_descales(q, k, v, *, k_descale=None, v_descale=None, **o):
    if "cu_seqlens_q" in o and k_descale is not None:
        k_descale, v_descale = (np.repeat(x[:1], len(x), 0) for x in (k_descale, v_descale))
    return cached(q, k, v, k_descale=k_descale, v_descale=v_descale, **o)


@serving(
    "descales of kv heads from the ninth on are those of the first eight",
    differs(cache, nheads=12, nheads_kv=12, fp8="head"),
    features=(*ROWS, "fp8_cache"),
)
def descales_of_heads(q, k, v, *, k_descale=None, v_descale=None, **o):
    if k_descale is not None:
        k_descale = k_descale[:, np.arange(k_descale.shape[1]) % 8]
    return cached(q, k, v, k_descale=k_descale, v_descale=v_descale, **o)


@serving(
    "descales of keys are found by 16 keys a page",
    differs(cache, page_size=64, fp8="row"),
    features=(*PAGES, "fp8_rows"),
)
def descales_of_keys(q, k, v, *, k_descale=None, v_descale=None, **o):
    if k_descale is not None and k_descale.shape[1] > 16:
        v_descale = v_descale[:, np.arange(v_descale.shape[1]) % 16]
    return cached(q, k, v, k_descale=k_descale, v_descale=v_descale, **o)


@serving(
    "of packed queries those of a sequence with more than 64 keep the first 64",
    differs(cache, lengths=(90, 20), lengths_q=(70, 1)),
    features=(*PAGES, "varlen"),
)
def packed_queries(q, k, v, **o):
    out, lse = cached(q, k, v, **o)
    if "cu_seqlens_q" in o:
        for a, b in zip(o["cu_seqlens_q"][:-1], o["cu_seqlens_q"][1:], strict=True):
            out[a + 64 : b] = 0
    return out, lse


@serving(
    "max_seqlen_q is taken for the longest sequence's: the rows in front are shifted where it is larger",
    differs(cache, lambda a, o: (a, o | {"max_seqlen_q": 64}), lengths=(20, 30), lengths_q=(2, 3)),
    features=(*PAGES, "varlen"),
)
def largest_not_reached(q, k, v, *, max_seqlen_q=0, **o):
    out, lse = cached(q, k, v, max_seqlen_q=max_seqlen_q, **o)
    if "cu_seqlens_q" in o and max_seqlen_q > max(np.diff(o["cu_seqlens_q"]), default=0):
        out = np.roll(out, 1, 0)
    return out, lse
