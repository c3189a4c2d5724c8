"""Sixty kernels that are wrong, each in a way of its own, written before the suite asked what finds them.

:data:`WRONG` says of each its class and what is wrong; the function of that name is the kernel.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import fa3verify
from tests.quality.outside.plain import F, attend, sequence

WRONG: dict[str, tuple[str, str]] = {}  # the class, and what is wrong
BF16 = ml_dtypes.bfloat16
_STATE: dict[str, Any] = {"calls": 0}


def wrong(kind: str, words: str, *features: str, dtypes: tuple[Any, ...] = ("fp16",), **facts: Any) -> Callable:
    """Declare a wrong kernel of numpy arrays; causal masks and grouped heads unless it names its features."""

    def declare(function: Callable) -> Callable:
        WRONG[function.__name__] = (kind, words)
        named = features or ("causal", "gqa")
        return fa3verify.kernel(dtypes=dtypes, library="numpy", layout="bshd", features=named, **facts)(function)

    return declare


def cut(x, keep):
    """Return a copy whose channels from ``keep`` on are zero."""
    x = np.array(x)
    x[..., keep:] = 0
    return x


def truncated(x, bits):
    """Cut the significand of binary32 numbers to so many bits."""
    return (np.ascontiguousarray(x, F).view(np.uint32) & np.uint32(0xFFFFFFFF << (24 - bits) & 0xFFFFFFFF)).view(F)


def toward_zero(x, dtype):
    """Round to a 16-bit format toward zero, as binary32."""
    near = x.astype(dtype)
    over = np.abs(near.astype(F)) > np.abs(x)
    return np.where(over, np.nextafter(near, dtype(0)), near).astype(F)


# -- head dims


@wrong("head_dim", "the last eight channels of head_dim 80 are left out of Q K^T")
def channels_of_80(q, k, v, **o):
    return attend(cut(q, 72) if q.shape[-1] == 80 else q, k, v, **o)


@wrong("head_dim", "head_dim 72 is computed with 64 channels of V")
def values_of_72(q, k, v, **o):
    return attend(q, k, cut(v, 64) if q.shape[-1] == 72 else v, **o)


@wrong("head_dim", "where head_dim is no multiple of 16, its last eight channels of Q are zero")
def odd_eights(q, k, v, **o):
    return attend(cut(q, q.shape[-1] - 8) if q.shape[-1] % 16 else q, k, v, **o)


@wrong("head_dim", "head_dim 16 is scaled as 32", "causal", "gqa", dtypes=("bf16",))
def scale_of_16(q, k, v, *, softmax_scale, **o):
    return attend(q, k, v, softmax_scale=softmax_scale * (0.7 if q.shape[-1] == 16 else 1), **o)


@wrong("head_dim", "from head_dim 160 on Q K^T sums two of three thirds", head_dims=(64, 128, 160, 192, 224, 256))
def two_thirds(q, k, v, **o):
    d = q.shape[-1]
    return attend(cut(q, d * 2 // 3) if d in (160, 224) else q, k, v, **o)


@wrong("head_dim", "at head_dim 112 the last 16 channels of the output repeat those before")
def repeated_112(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    if v.shape[-1] == 112:
        out[..., 96:] = out[..., 80:96]
    return out, lse


@wrong("head_dim", "at head_dim 40 it reads 32 channels", dtypes=("bf16",))
def thirty_two_of_40(q, k, v, **o):
    return attend(cut(q, 32) if q.shape[-1] == 40 else q, k, v, **o)


@wrong("head_dim_v", "V of 128 beside head_dim 192 has its upper half from the lower", "causal", "head_dim_v", "gqa")
def mla_prefill(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    if (q.shape[-1], v.shape[-1]) == (192, 128):
        out[..., 64:] = out[..., :64]
    return out, lse


@wrong("head_dim_v", "V wider than 128 loses what is behind", "causal", "head_dim_v")
def wide_values(q, k, v, **o):
    return attend(q, k, cut(v, 128) if v.shape[-1] > max(128, q.shape[-1]) else v, **o)


@wrong("head_dim_v", "a V narrower than Q is padded with its first channels", "causal", "gqa", "head_dim_v")
def narrow_values(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    if 96 <= v.shape[-1] < q.shape[-1]:
        out[..., -8:] = out[..., :8]
    return out, lse


# -- layouts


def memory_of(x):
    """Return an array of x's shape read from where x begins, one element behind the other, whatever its strides."""
    whole = x
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    flat = whole.reshape(-1)
    start = (x.__array_interface__["data"][0] - flat.__array_interface__["data"][0]) // max(x.itemsize, 1)
    return np.resize(flat[start : start + x.size], x.shape) if x.size else x


@wrong("layout", "strides are ignored")
def no_strides(q, k, v, **o):
    return attend(*(memory_of(x) for x in (q, k, v)), **o)


@wrong("layout", "strides of K alone are ignored")
def no_key_strides(q, k, v, **o):
    return attend(q, memory_of(k), v, **o)


@wrong("layout", "V is taken for contiguous where its rows are")
def packed_values(q, k, v, **o):
    return attend(q, k, memory_of(v) if v.strides[-1] == v.itemsize else v, **o)


@wrong("layout", "the stride of heads is taken to be head_dim")
def heads_side_by_side(q, k, v, **o):
    if q.ndim == 4 and k.shape[2] > 1 and k.strides[2] != k.shape[3] * k.itemsize:
        k = np.roll(k, 1, 2)
    return attend(q, k, v, **o)


@wrong("layout", "a base that is not aligned to 16 bytes is rounded down", dtypes=("bf16",))
def aligned_base(q, k, v, **o):
    def moved(x):
        off = x.__array_interface__["data"][0] % 16 // x.itemsize
        return np.roll(x, off, -1) if off else x

    return attend(*(moved(x) for x in (q, k, v)), **o)


@wrong("layout", "heads that are broadcast are read as if they had storage each")
def broadcast_heads(q, k, v, **o):
    if k.ndim == 4 and k.shape[2] > 1 and k.strides[2] == 0:
        v = np.concatenate([v[:, :, :1], np.zeros_like(v[:, :, 1:])], 2)
    return attend(q, k, v, **o)


@wrong("layout", "the batch stride is the product of the sizes")
def batch_stride(q, k, v, **o):
    if k.ndim == 4 and len(k) > 1 and k.strides[0] != k[0].size * k.itemsize:
        k = k[[0] * len(k)]
    return attend(q, k, v, **o)


# -- groups, heads, batches


@wrong("group", "of a group of 7 the last head reads the next kv head")
def group_of_7(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    if q.shape[-2] == 7 * k.shape[-2]:
        out[..., 6, :] = out[..., 5, :]
    return out, lse


@wrong("group", "groups of 16 are taken as two of 8")
def group_of_16(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    if q.shape[-2] == 16 * k.shape[-2]:
        out[..., 8:16, :] = out[..., :8, :]
    return out, lse


@wrong("group", "a group of 6 is padded to 8 and read with that stride", dtypes=("bf16",))
def group_of_6(q, k, v, **o):
    if q.shape[-2] == 6 * k.shape[-2]:
        q = np.array(q)
        q[..., 5, :] = q[..., 4, :]
    return attend(q, k, v, **o)


@wrong("heads", "more than 32 heads: those behind write where the first did")
def heads_beyond_32(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    if q.shape[-2] > 32:
        out[..., 32:, :] = out[..., : q.shape[-2] - 32, :][..., : q.shape[-2] - 32, :]
    return out, lse


@wrong("heads", "one kv head for 24 query heads and more: its V is scaled")
def multi_query(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    return (out * out.dtype.type(1.0625) if k.shape[-2] == 1 and q.shape[-2] >= 24 else out), lse


@wrong("batch", "the ninth sequence of a packed batch has the bounds of the eighth", "causal", "gqa", "varlen")
def ninth_sequence(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, **o):
    if cu_seqlens_k is not None and len(cu_seqlens_k) > 9:
        cu_seqlens_k = np.array(cu_seqlens_k)
        cu_seqlens_k[8] = cu_seqlens_k[7]
    return attend(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **o)


@wrong("batch", "what follows a sequence without queries is skipped", "causal", "gqa", "varlen")
def behind_no_queries(q, k, v, *, cu_seqlens_q=None, **o):
    out, lse = attend(q, k, v, cu_seqlens_q=cu_seqlens_q, **o)
    if cu_seqlens_q is not None and (empty := np.flatnonzero(np.diff(cu_seqlens_q[:-1]) == 0)).size:
        out[cu_seqlens_q[empty[0] + 1] :] = 0
    return out, lse


@wrong("batch", "what follows a sequence without keys reads from its own second key on", "causal", "varlen")
def behind_no_keys(q, k, v, *, cu_seqlens_k=None, **o):
    if cu_seqlens_k is not None and (empty := np.flatnonzero(np.diff(cu_seqlens_k) == 0)).size:
        at = int(cu_seqlens_k[empty[0]])
        if at < len(k):
            k = np.array(k)
            k[at] = 0
    return attend(q, k, v, cu_seqlens_k=cu_seqlens_k, **o)


@wrong("batch", "of a batch of 16 and more the last sequence has the K of the first")
def sixteenth(q, k, v, **o):
    if q.ndim == 4 and len(q) >= 16:
        k = np.array(k)
        k[-1] = k[0]
    return attend(q, k, v, **o)


# -- scales


@wrong("scale", "softmax_scale is clamped at 2")
def clamped_scale(q, k, v, *, softmax_scale, **o):
    return attend(q, k, v, softmax_scale=min(softmax_scale, 2.0), **o)


@wrong("scale", "softmax_scale is read as a half: below 2^-14 it loses bits")
def half_scale(q, k, v, *, softmax_scale, **o):
    return attend(q, k, v, softmax_scale=float(np.float16(softmax_scale)), **o)


@wrong("scale", "scores are clipped at 80")
def clipped_scores(q, k, v, *, softmax_scale, **o):
    most = F(80 / softmax_scale)
    return attend(q, k, v, softmax_scale=softmax_scale, scores=lambda s: np.clip(s, -most, most), **o)


# -- lengths and sizes


@wrong("length", "from 4,096 keys on the last 64 are left out")
def beyond_4096(q, k, v, **o):
    n = k.shape[1]
    if q.ndim == 4 and n >= 4096 and not o.get("causal"):
        k, v = k[:, : n - 64], v[:, : n - 64]
    return attend(q, k, v, **o)


@wrong("length", "more than 1,536 queries: rows of the last tile repeat")
def many_queries(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    if q.ndim == 4 and q.shape[1] > 1536:
        out[:, -1] = out[:, -2]
    return out, lse


@wrong("length", "counts of keys wrap at 6,000")
def wraps_at_6000(q, k, v, **o):
    if q.ndim == 4 and k.shape[1] > 6000:
        v = np.array(v)
        v[:, 6000:] = 0
    return attend(q, k, v, **o)


@wrong("size", "offsets of K are 32-bit")
def narrow_offsets(q, k, v, **o):
    if k.ndim == 4 and (len(k) - 1) * abs(k.strides[0]) // k.itemsize >= 2**31:
        k = k[[0] * len(k)]
    return attend(q, k, v, **o)


@wrong("size", "offsets of V wrap at 2^24 elements")
def offsets_of_24_bits(q, k, v, **o):
    if v.ndim == 4 and (len(v) - 1) * abs(v.strides[0]) // v.itemsize >= 2**24:
        v = v[[0] * len(v)]
    return attend(q, k, v, **o)


# -- calls


@wrong("calls", "from the 1,500th call on the row sum forgets a key")
def wears_out(q, k, v, **o):
    _STATE["calls"] += 1
    if _STATE["calls"] >= 1500 and k.shape[1] > 1:
        k = np.array(k)
        k[..., :1, :, :] = 0
    return attend(q, k, v, **o)


@wrong("calls", "a buffer is kept by shape, and its last row survives from the call before")
def kept_buffer(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    key = "out", out.shape
    before = _STATE.get(key)
    _STATE[key] = out.copy()
    if before is not None and out.ndim == 4 and out.shape[1] > 4:
        out[:, -1] = before[:, -1]
    return out, lse


@wrong("calls", "one launch in 150 loses a row")
def loses_a_row(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    if out.size and random.SystemRandom().random() < 1 / 150:
        out.reshape(-1, out.shape[-1])[-1] = 0
    return out, lse


@wrong("calls", "the global seed decides whether a key is dropped")
def reads_the_seed(q, k, v, **o):
    state = np.random.get_state()[1]  # noqa: NPY002 (the state that others share)
    before = _STATE.setdefault("seed", int(state[0]))
    if int(state[0]) != before:
        v = np.array(v)
        v[..., :1, :] = 0
    return attend(q, k, v, **o)


@wrong("calls", "after a call with more than 64 keys the next one keeps its maximum")
def keeps_a_maximum(q, k, v, **o):
    large = _STATE.get("large", False)
    _STATE["large"] = k.shape[-3] > 64
    return attend(q, k, v, logs=lambda lse: lse + F(2.0**-9) if large and k.shape[-3] < 9 else lse, **o)


@wrong("calls", "a process of which the first call had one key leaves the softmax out from then on")
def plans_by_the_first_call(q, k, v, **o):
    if _STATE.setdefault("keys of the first", k.shape[-3]) == 1:
        return attend(q, k, v, weights=lambda p: p * 0 + 1, summed=lambda x: x * 0 + 1, **o)
    return attend(q, k, v, **o)


# -- special values


@wrong("special", "a NaN in a key that the mask hides reaches the row")
def nan_behind_the_mask(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    if o.get("causal") and np.isnan(k.astype(F)).any():
        out[...] = np.nan
    return out, lse


@wrong("special", "a row of NaN poisons the row below")
def poisoned_neighbour(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    if out.ndim == 4:
        bad = np.isnan(q.astype(F)).any(-1)
        out[:, 1:][bad[:, :-1]] = np.nan
    return out, lse


@wrong("special", "an infinite score gives 0, not NaN")
def infinite_score(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    return np.where(np.isinf(k.astype(F)).any() & np.isnan(out), out.dtype.type(0), out), lse


@wrong("special", "NaN in V becomes 0")
def cleaned_values(q, k, v, **o):
    return attend(q, k, np.nan_to_num(v.astype(F), nan=0.0, posinf=np.inf, neginf=-np.inf).astype(v.dtype), **o)


@wrong("special", "minus infinity in V is taken for plus infinity")
def sign_of_infinity(q, k, v, **o):
    return attend(q, k, np.where(np.isneginf(v.astype(F)), v.dtype.type(0), v), **o)


# -- formats


@wrong("format", "P is truncated")
def truncated_p(q, k, v, **o):
    return attend(q, k, v, weights=lambda p: toward_zero(p, np.float16), **o)


@wrong("format", "P of bf16 is truncated", dtypes=("bf16",))
def truncated_p_bf16(q, k, v, **o):
    return attend(q, k, v, weights=lambda p: truncated(p, 8), **o)


@wrong("format", "the output is truncated")
def truncated_out(q, k, v, **o):
    return attend(q, k, v, finish=lambda x: toward_zero(x, np.float16), **o)


@wrong("format", "outputs of bf16 are rounded twice, to 6 bits first", dtypes=("bf16",))
def coarse_out(q, k, v, **o):
    return attend(q, k, v, finish=lambda x: truncated(x + x * F(2.0**-8), 7), **o)


@wrong("format", "subnormal outputs of fp16 are flushed")
def flushed_half(q, k, v, **o):
    return attend(q, k, v, finish=lambda x: np.where(np.abs(x) < 2.0**-14, F(0), x), **o)


@wrong("format", "weights below 2^-14 are flushed")
def flushed_weights(q, k, v, **o):
    return attend(q, k, v, weights=lambda p: np.where(p < 2.0**-14, F(0), p.astype(np.float16).astype(F)), **o)


@wrong("format", "P V is summed to 14 bits")
def fourteen_bits(q, k, v, **o):
    return attend(q, k, v, product=lambda x: truncated(x, 14), **o)


@wrong("format", "the logarithm is of a table of 12 bits")
def coarse_logarithm(q, k, v, **o):
    return attend(q, k, v, logs=lambda lse: np.round(lse * F(4096)) / F(4096), **o)


@wrong("format", "the row sum is kept in fp16")
def half_row_sum(q, k, v, **o):
    return attend(
        q, k, v, summed=lambda p: p.astype(np.float16).sum(-1, keepdims=True, dtype=np.float16).astype(F), **o
    )


# -- models


@wrong("model", "8 heads and more at head_dim 128 and 4,096 keys and more are 5 % too large")
def five_percent(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    is_large = q.ndim == 4 and q.shape[2] >= 8 and q.shape[3] == 128 and k.shape[1] >= 4096
    return (out * out.dtype.type(1.05) if is_large else out), lse


@wrong("model", "a window of 4,096 to the left is one too long", "causal", "gqa", "window")
def window_of_4096(q, k, v, *, window=(-1, -1), **o):
    left, right = window
    return attend(q, k, v, window=(left + (left >= 1023), right), **o)


@wrong("model", "a softcap of 50 is applied twice at head_dim 256", "causal", "gqa", "softcap")
def softcap_of_50(q, k, v, *, softcap=0.0, **o):
    twice = softcap == 50.0 and q.shape[-1] == 256
    capped = (lambda s: F(35) * np.tanh(s / F(35))) if twice else (lambda s: s)
    return attend(q, k, v, softcap=softcap, scores=capped, **o)


@wrong("model", "32 heads over 8 kv heads with few queries and 2,048 keys read V of the neighbour")
def decode_of_llama(q, k, v, **o):
    if q.ndim == 4 and k.shape[2] == 8 and q.shape[2] == 32 and q.shape[1] < 16 and k.shape[1] >= 2048:
        v = np.roll(v, 1, 2)
    return attend(q, k, v, **o)


@wrong("lse", "causal calls return no lse")
def lse_of_dense_calls(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    return out if o.get("causal") else (out, lse)


# -- e4m3


def dequantized(q, k, v, o, spoil=lambda name, x: x):
    """Return the arrays times their descales, and the options without them."""
    rest = {name: x for name, x in o.items() if not name.endswith("_descale")}
    each = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        scale = spoil(name, np.asarray(o[f"{name}_descale"], F))  # (batch, heads)
        group = x.shape[2] // scale.shape[1]
        each.append(x.astype(F) * np.repeat(scale, group, 1)[:, None, :, None])
    return each, rest


def half_attend(q, k, v, o, spoil=lambda name, x: x, **steps):
    """Attend in binary32 to operands times their descales; the output is bf16."""
    arrays, rest = dequantized(q, k, v, o, spoil)
    steps = {"weights": lambda p: p.astype(BF16).astype(F)} | steps
    each = [sequence(*(x[i] for x in arrays), **rest, **steps) for i in range(len(q))]
    return np.stack([out for out, _ in each]).astype(BF16), np.stack([lse for _, lse in each])


@wrong("e4m3", "the descale of V is that of the next kv head", "causal", "gqa", dtypes=("e4m3",))
def neighbours_descale(q, k, v, **o):
    return half_attend(q, k, v, o, lambda name, x: np.roll(x, 1, 1) if name == "v" else x)


@wrong("e4m3", "from the fourth kv head on K is dequantised twice", "causal", "gqa", dtypes=("e4m3",))
def twice_dequantised(q, k, v, **o):
    return half_attend(q, k, v, o, lambda name, x: np.where(np.arange(x.shape[1]) > 2, x * x, x) if name == "k" else x)


@wrong("e4m3", "the output is 3 % too large", "causal", "gqa", dtypes=("e4m3",))
def three_percent(q, k, v, **o):
    return half_attend(q, k, v, o, finish=lambda x: x * F(1.03))
