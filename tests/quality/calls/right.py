"""Right kernels of legal styles in how they are called, each of which a nervous check might fail."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import fa3verify
from tests.quality.calls.exhibits import PAGES, ROWS, right
from tests.quality.calls.plain import F, attend, cached, gradients, hidden_keys, sequence
from tests.quality.quantised_kernels import attend as attend_quantised

_PLANS: dict[Any, Any] = {}
SMALL = {"head_dims": (64,)}
EVERYTHING = ("causal", "gqa", "window", "softcap", "varlen", "head_dim_v", "sinks", "attention_chunk")

# -- how operands and outputs lie


@right("it copies every operand to contiguous memory first", **SMALL)
def copies_first(q, k, v, **o):
    return attend(*map(np.ascontiguousarray, (q, k, v)), **o)


@right("it refuses operands whose channels are no neighbours", **SMALL)
def needs_channels(q, k, v, **o):
    if any(x.size and x.strides[-1] != x.itemsize for x in (q, k, v)):
        raise ValueError("the last dimension must be contiguous")
    return attend(q, k, v, **o)


@right("it refuses pools that are not contiguous", *PAGES, **SMALL)
def needs_contiguous_pool(q, k, v, **o):
    if not (k.flags.c_contiguous and v.flags.c_contiguous):
        raise ValueError("k_cache and v_cache must be contiguous")
    return cached(q, k, v, **o)


@right("it refuses bases that are not aligned to 16 bytes", **SMALL)
def needs_alignment(q, k, v, **o):
    if any(x.__array_interface__["data"][0] % 16 for x in (q, k, v)):
        raise ValueError("operands must be aligned to 16 bytes")
    return attend(q, k, v, **o)


@right("its output has its heads in front in memory", **SMALL)
def transposed_output(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    return np.ascontiguousarray(np.swapaxes(out, -3, -2)).swapaxes(-3, -2), np.asfortranarray(lse)


@right("its output is a slice of a padded buffer of its own", **SMALL)
def padded_output(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    whole = np.full((*out.shape[:-1], out.shape[-1] + 8), np.nan, out.dtype)
    whole[..., : out.shape[-1]] = out
    return whole[..., : out.shape[-1]], lse


@right("Q, K and V in one array", "causal", "varlen", packed="qkv", **SMALL)
def one_array(qkv, **o):
    return attend(*np.moveaxis(qkv, -3, 0), **o)


@right("K and V in one array", "causal", "gqa", packed="kv", **SMALL)
def two_arrays(q, kv, **o):
    return attend(q, *np.moveaxis(kv, -3, 0), **o)


@right("query heads of a group lie apart", "causal", "gqa", groups="interleaved", **SMALL)
def interleaved(q, k, v, **o):
    heads = np.arange(q.shape[-2]) % k.shape[-2]
    return attend(q, k[..., heads, :], v[..., heads, :], **o)


@right("lse of base 2 with heads last", lse_base=2, lse_layout="sh", **SMALL)
def other_lse(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    return out, np.swapaxes(lse, -1, -2) / F(np.log(2))


@right("no lse", "causal", "gqa", "varlen", **SMALL)
def no_lse(q, k, v, **o):
    return attend(q, k, v, **o)[0]


# -- features


@right("every feature of a forward", *EVERYTHING, head_dims=(64, 128))
def all_features(q, k, v, **o):
    return attend(q, k, v, **o)


@right("sinks in the operands' format", "causal", "gqa", "narrow_sinks", **SMALL)
def narrow_sinks(q, k, v, **o):
    return attend(q, k, v, **o)


@right("chunks", "causal", "gqa", "attention_chunk", **SMALL)
def chunks(q, k, v, **o):
    return attend(q, k, v, **o)


@right("a softcap beside windows", "causal", "window", "softcap", dtypes=("fp32",), **SMALL)
def capped(q, k, v, **o):
    return attend(q, k, v, **o)


@right("lse of rows without a key is +inf", policy=fa3verify.Policy(empty_lse="+inf"), **SMALL)
def plus_infinity(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    return out, np.where(np.isneginf(lse), F(np.inf), lse)


@right("packed sequences that are padded to max_seqlen", "causal", "gqa", "varlen", always=("varlen",), **SMALL)
def padded_sequences(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **o):
    outs, lses = np.zeros_like(q[..., : v.shape[-1]]), np.zeros((q.shape[1], len(q)), F)
    for a, b, c, d in zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True):
        rows = np.pad(q[a:b], ((max_seqlen_q - (b - a), 0), (0, 0), (0, 0)))  # the mask is aligned at the last
        out, lse = sequence(rows, k[c:d], v[c:d], **o)
        outs[a:b], lses[:, a:b] = out[len(out) - (b - a) :], lse[:, len(out) - (b - a) :]
    return outs, lses


@right("keys are padded to a multiple of 128 and masked", **SMALL)
def padded_keys(q, k, v, *, softmax_scale, causal=False):
    rows, keys = q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    extra = ((0, 0), (0, -keys % 128), (0, 0), (0, 0))
    ks, vs = (np.repeat(np.pad(x, extra).astype(F), group, 2).swapaxes(1, 2) for x in (k, v))
    with np.errstate(all="ignore"):
        s = q.astype(F).swapaxes(1, 2) @ ks.swapaxes(2, 3) * F(softmax_scale)
        hidden = np.pad(hidden_keys(rows, keys, causal=causal), ((0, 0), (0, -keys % 128)), constant_values=True)
        s = np.where(hidden, F(-np.inf), s)
        top = s.max(-1, initial=-np.inf)
        base = np.where(np.isneginf(top), F(0), top)
        p = np.exp(s - base[..., None])
        total = p.sum(-1)
        out = p.astype(q.dtype).astype(F) @ vs / np.where(total == 0, F(1), total)[..., None]
        return out.swapaxes(1, 2).astype(q.dtype), np.where(total == 0, F(-np.inf), base + np.log(total))


# -- limits


@right("four sequences at most", max_batch=4, **SMALL)
def few_sequences(q, k, v, **o):
    if q.ndim == 4 and len(q) > 4:
        raise ValueError(f"batch must be at most 4, got {len(q)}")
    return attend(q, k, v, **o)


@right("eight heads at most", max_nheads=8, **SMALL)
def few_heads(q, k, v, **o):
    if q.shape[-2] > 8:
        raise ValueError(f"nheads must be at most 8, got {q.shape[-2]}")
    return attend(q, k, v, **o)


@right("groups of four at most", max_group=4, **SMALL)
def small_groups(q, k, v, **o):
    assert q.shape[-2] <= 4 * k.shape[-2]
    return attend(q, k, v, **o)


@right("keys up to 2,048", max_seqlen_k=2048, max_seqlen_q=2048, **SMALL)
def short_rows(q, k, v, **o):
    if max(q.shape[-3], k.shape[-3]) > 2048:
        raise NotImplementedError("more than 2,048 rows")
    return attend(q, k, v, **o)


@right("lengths that are multiples of 32", seqlen_multiple=32, min_seqlen=32, **SMALL)
def multiples(q, k, v, **o):
    if q.shape[1] % 32 or k.shape[1] % 32:
        raise ValueError("lengths must be multiples of 32")
    return attend(q, k, v, **o)


@right("always causal", "causal", "gqa", always=("causal",), **SMALL)
def always_causal(q, k, v, *, causal, **o):
    assert causal
    return attend(q, k, v, causal=True, **o)


@right("as many queries as keys", equal_lengths=True, **SMALL)
def self_attention(q, k, v, **o):
    assert q.shape[1] == k.shape[1]
    return attend(q, k, v, **o)


@right("one query a sequence", *PAGES, max_seqlen_q=1, **SMALL)
def decode_alone(q, k, v, **o):
    assert q.shape[1] == 1
    return cached(q, k, v, **o)


@right("no more queries than keys", *ROWS, queries_within_keys=True, **SMALL)
def within_keys(q, k, v, **o):
    return cached(q, k, v, **o)


@right("pages of 64 alone", *PAGES, page_sizes=(64,), **SMALL)
def pages_of_64(q, k, v, **o):
    if k.shape[1] != 64:
        raise ValueError(f"page_size must be 64, got {k.shape[1]}")
    return cached(q, k, v, **o)


@right("the default scale alone", softmax_scale="default", **SMALL)
def default_scale(q, k, v, *, softmax_scale, **o):
    return attend(q, k, v, softmax_scale=q.shape[-1] ** -0.5, **o)


@right("heads of 192 and of 128", "causal", "head_dim_v", head_dims=((192, 128),))
def latent_heads(q, k, v, **o):
    return attend(q, k, v, **o)


# -- state


@right("plans are kept by all that they depend on", "causal", "gqa", "window", **SMALL)
def kept_plans(q, k, v, *, softmax_scale, causal=False, window=(-1, -1)):
    key = q.shape, k.shape, q.strides, k.strides, v.strides, softmax_scale, causal, window
    plan = _PLANS.setdefault(key, {"softmax_scale": softmax_scale, "causal": causal, "window": window})
    return attend(q, k, v, **plan)


@right("a scratch for each thread", **SMALL)
def scratch_by_thread(q, k, v, **o):
    if not hasattr(_LOCAL, "scratch") or _LOCAL.scratch.shape != q.shape or _LOCAL.scratch.dtype != q.dtype:
        _LOCAL.scratch = np.empty(q.shape, q.dtype)
    _LOCAL.scratch[...] = q
    return attend(_LOCAL.scratch, k, v, **o)


_LOCAL = threading.local()
_LOCK = threading.Lock()


@right("a lock around a scratch of all threads, freed by whatever is raised", **SMALL)
def locked_scratch(q, k, v, **o):
    with _LOCK:
        held = _PLANS.setdefault(("scratch", q.shape, q.dtype), np.empty(q.shape, q.dtype))
        held[...] = q
        return attend(held, k, v, **o)


@right("a thread for each kv head", **SMALL)
def threads(q, k, v, **o):
    group = q.shape[2] // k.shape[2]

    def one(head):
        span = slice(head * group, (head + 1) * group)
        return attend(q[:, :, span], k[:, :, head : head + 1], v[:, :, head : head + 1], **o)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one, range(k.shape[2])))
    return np.concatenate([out for out, _ in found], 2), np.concatenate([lse for _, lse in found], 1)


@right("the last bit of a row sum is that of a generator of its own", dtypes=("bf16",), **SMALL)
def random_rounding(q, k, v, **o):
    own = np.random.default_rng(random.SystemRandom().getrandbits(32))
    return attend(q, k, v, summed=lambda p: p * F(1 + own.integers(0, 2) * 2.0**-23), **o)


@right("20 ms a call", **SMALL)
def slow(q, k, v, **o):
    time.sleep(0.02)
    return attend(q, k, v, **o)


# -- codes inside, gradients

INT8 = fa3verify.Quantises(q=("int8", 64), k=("int8", 64))


@right("Q and K in int8", "causal", "gqa", layout="bhsd", min_seqlen=1, quantises=INT8, **SMALL)
def int8_inside(q, k, v, **o):
    return attend_quantised(q, k, v, by=INT8, **o)


@right("gradients of packed sequences", "causal", "gqa", "varlen", gradients="given", **SMALL)
def packed_gradients(*arrays, **o):
    return gradients(*arrays, **o)


@right(
    "gradients beside softcaps, sinks and lse",
    "causal",
    "gqa",
    "softcap",
    "sinks",
    "lse_gradient",
    gradients="given",
    **SMALL,
)
def capped_gradients(*arrays, **o):
    return gradients(*arrays, **o)


@right("gradients of a forward of its own", "causal", "gqa", "window", gradients="own", dtypes=("bf16",), **SMALL)
def own_gradients(q, k, v, dout, out, lse, **o):
    return gradients(q, k, v, dout, *attend(q, k, v, **o), **o)
