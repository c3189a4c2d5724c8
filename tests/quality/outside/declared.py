"""Right kernels of the kinds that people have and that an earlier version failed, each beside a wrong one of its kind.

:data:`KERNELS` says of each what it is and which properties it is tried by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import fa3verify
from fa3_reference.problem import AttentionProblem
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.record import Kernel
from tests.harness.kernels import serving_kernels
from tests.quality.outside.plain import F, attend

SPECIAL = "special_values_follow_policy"
EMPTY = ("invisible_keys_never_matter", "empty_rows_are_zero")
BIAS = "errors_have_no_bias"
PLUS = fa3verify.Policy(empty_lse="+inf")


@dataclass(frozen=True)
class Declared:
    """A kernel, what is unusual about it, the properties it is tried by, and its wrong sibling, which breaks one."""

    words: str
    kernel: Kernel
    laws: tuple[str, ...]
    wrong: Kernel


def made(function: Callable[..., Any], *features: str, configure: Any = None, **facts: Any) -> Kernel:
    """A kernel of batched (batch, seqlen, heads, head_dim) arrays with head_dim 64."""
    given: dict[str, Any] = {"dtypes": ("fp16",), "layout": "bshd", "head_dims": (64,)} | facts
    (kernel,) = array_kernel(function, name="declared", features=features, **given)
    return kernel.altered(configure=partial(configure, kernel.code.configure)) if configure else kernel


# Rows without a key as 0 times V, whose sign they take.


def zero_times_v(q, k, v, *, hidden=0.0, **o):
    out, lse = attend(q, k, v, **o)
    if not v.shape[1]:
        return out, lse
    first = np.repeat(v[:, :1], q.shape[2] // v.shape[2], axis=2)
    empty = np.isneginf(lse).swapaxes(1, 2)[..., None]
    return np.where(empty, np.array(hidden, q.dtype) * first, out), lse


# Calls that `configure` refuses.


def always_causal(configure, problem: AttentionProblem):
    if not problem.causal:
        raise ValueError("it is causal always")
    return configure(problem)


def many_queries(configure, problem: AttentionProblem):
    if any(seq.seqlen_q == 1 for seq in problem.sequences()):
        raise NotImplementedError("more queries than one")
    return configure(problem)


def nothing(configure, problem: AttentionProblem):
    raise ValueError("not today")


def causal_alone(q, k, v, *, softmax_scale, causal, shift=0):
    assert causal, "it was asked what it refuses"
    if not shift:
        return attend(q, k, v, softmax_scale=softmax_scale, causal=True)
    return attend(q, k, v, softmax_scale=softmax_scale, window=(-1, shift))


def several(q, k, v, *, scale=1.0, softmax_scale, **o):
    assert q.shape[1] != 1, "it was asked what it refuses"
    return attend(q, k, v, softmax_scale=scale * softmax_scale, **o)


def causal_gradients(*given, softmax_scale, causal, factor=1.0):
    """Gradients of the out and lse that are given."""
    assert causal, "it was asked what it refuses"
    *arrays, lse = given
    q, k, v, dout, out = (x.astype(F).swapaxes(1, 2) for x in arrays)
    s = q @ k.swapaxes(2, 3) * F(softmax_scale)
    s = np.where(np.tri(*s.shape[2:], s.shape[3] - s.shape[2], dtype=bool), s, F(-np.inf))
    p = np.exp(s - np.where(np.isneginf(lse), F(0), lse)[..., None])
    ds = p * (dout @ v.swapaxes(2, 3) - (dout * out).sum(-1, keepdims=True)) * F(softmax_scale * factor)
    found = (ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout)
    return tuple(x.swapaxes(1, 2).astype(np.float16) for x in found)


# Absorbed heads, as the page says it.


def absorbed(q, k, v, *, softmax_scale, causal, qv=None, drops=False):
    return serving_kernels.plain(q, k, v, softmax_scale=softmax_scale, causal=causal, qv=None if drops else qv)


# A row sum, or one over it, of 16 bits: all channels of a row share its error.


def short_sum(q, k, v, *, of=lambda x: x, inverse=False, **o):
    """Divide by a sum that is rounded, or multiply by its rounded inverse."""
    held: dict[str, Any] = {}

    def summed(p):
        total = p.sum(-1, keepdims=True)
        rounded = F(1) / of(F(1) / total) if inverse else of(total)
        held["lse"] = total
        return np.where(np.arange(p.shape[-1]) == 0, rounded, F(0))

    return attend(q, k, v, summed=summed, **o)[0]


def rounded(dtype, x):
    return x.astype(dtype).astype(F)


def truncated(x):
    """Cut to the eight bits of bf16."""
    return (np.ascontiguousarray(x, F).view(np.uint32) & np.uint32(0xFFFF0000)).view(F)


# Parts of the keys, merged two by two; a part of weight 0 is skipped, so that 0 times NaN never happens.


def tree(q, k, v, *, softmax_scale, skip=0.0, tile=32, drops_nan=False, ring=False, **o):
    """Merge parts of so many keys as a tree, or as a ring one after the other."""
    starts = range(0, k.shape[1], tile)
    parts = [_part(q, k[:, a : a + tile], v[:, a : a + tile], softmax_scale) for a in starts] or [
        _part(q, k, v, softmax_scale)
    ]
    join = partial(_merged, skip=skip, drops_nan=drops_nan)
    while len(parts) > 1:
        if ring:
            parts = [join(parts[0], parts[1]), *parts[2:]]
        else:
            parts = [join(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    out, lse = parts[0]
    return out.swapaxes(1, 2).astype(q.dtype), lse.astype(F)


def _part(q, k, v, scale):
    qs, ks, vs = (x.astype(F).swapaxes(1, 2) for x in (q, k, v))
    with np.errstate(all="ignore"):
        s = qs @ ks.swapaxes(2, 3) * F(scale)
        top = s.max(-1, initial=-np.inf)
        base = np.where(np.isneginf(top), F(0), top)
        p = np.exp(s - base[..., None])
        total = p.sum(-1)
        out = p @ vs / np.where(total == 0, F(1), total)[..., None]
        return out, np.where(total == 0, F(-np.inf), base + np.log(total))


def _merged(a, b, *, skip, drops_nan):
    with np.errstate(all="ignore"):
        top = np.maximum(a[1], b[1])
        base = np.where(np.isneginf(top), F(0), top)
        weights = [np.exp(x[1] - base) for x in (a, b)]
        if drops_nan:
            weights = [np.where(w > 0, w, F(0)) for w in weights]
        total = weights[0] + weights[1]
        shares = [(w / np.where(total == 0, F(1), total))[..., None] for w in weights]
        out = sum(np.where(w <= skip, F(0), w * x[0]) for w, x in zip(shares, (a, b), strict=True))
        return out, base + np.log(total)


# The lse of rows whose sum is 0, as FlashAttention-2 has it.


def plus_infinity(q, k, v, *, lse_of_none=np.inf, **o):
    out, lse = attend(q, k, v, **o)
    return out, np.where(np.isneginf(lse) | np.isnan(lse), F(lse_of_none), lse)


# Caches: a signature holds what comes with the declared features, and nothing else is taken.


def serving(q, k_cache, v_cache, *, softmax_scale, cache_seqlens, causal, takes, mistake="", **given):
    if surplus := given.keys() - set(takes):
        raise TypeError(f"unexpected keyword argument {sorted(surplus)[0]!r}")
    options = {"softmax_scale": softmax_scale, "cache_seqlens": cache_seqlens, "causal": causal}
    return serving_kernels.cached(q, k_cache, v_cache, mistake=mistake, **options, **given)


def cache(words: str, features: tuple[str, ...], takes: tuple[str, ...], mistake: str = "one key more") -> Declared:
    right, wrong = (partial(serving, takes=takes, mistake=name) for name in ("", mistake))
    facts: dict[str, Any] = {"dtypes": ("bf16",), "page_sizes": (16,)}
    features = ("causal", "gqa", *features)
    return Declared(words, made(right, *features, **facts), ("error_within_bound",), made(wrong, *features, **facts))


def pair(words: str, laws: tuple[str, ...], function: Any, *features: str, wrong: Mapping[str, Any], **facts: Any):
    """A right kernel, and what it becomes by other arguments."""
    right = made(function, *features, **facts)
    return Declared(words, right, laws, made(partial(function, **wrong), *features, **facts))


BF16 = {"dtypes": ("bf16",)}
NEW = ("k_new", "v_new", "cu_seqlens_k_new")
PACKED = ("cu_seqlens_q", "max_seqlen_q")
ROTARY = ("rotary_cos", "rotary_sin", "rotary_interleaved")
KERNELS: dict[str, Declared] = {
    "zero_times_v": pair("-0.0 in rows without a key", EMPTY, zero_times_v, "causal", "gqa", wrong={"hidden": 0.01}),
    "zero_times_v_bf16": pair("-0.0, bf16", EMPTY, zero_times_v, "causal", wrong={"hidden": 0.01}, **BF16),
    "always_causal": pair(
        "configure refuses dense calls",
        ("error_within_bound", *EMPTY),
        causal_alone,
        "causal",
        wrong={"shift": 1},
        configure=always_causal,
    ),
    "many_queries": pair(
        "configure raises NotImplementedError for one query",
        ("error_within_bound", "split_keys_merge_by_lse", "ring_of_shards_equals_one_call"),
        several,
        "causal",
        wrong={"scale": 1.1},
        configure=many_queries,
    ),
    "causal_gradients": pair(
        "gradients of which configure refuses dense calls",
        ("gradients_at_telling_lengths", "gradients_within_bound"),
        causal_gradients,
        "causal",
        wrong={"factor": 1.1},
        configure=always_causal,
        gradients="given",
    ),
    **{
        f"absorbed_{head_dim}": pair(
            f"absorbed heads of 64 and {head_dim - 64}",
            ("error_within_bound", "neighbours_never_leak"),
            absorbed,
            "causal",
            "gqa",
            "qv",
            wrong={"drops": True},
            head_dims=(head_dim,),
            **BF16,
        )
        for head_dim in (576, 192)
    },
    "sum_of_16_bits": pair(
        "a row sum of fp16",
        (BIAS,),
        partial(short_sum, of=partial(rounded, np.float16)),
        wrong={"of": lambda x: x * F(1 + 2.0**-9)},
        min_seqlen=1,
    ),
    "inverse_of_16_bits": pair(
        "one over the row sum in bf16",
        (BIAS,),
        partial(short_sum, of=partial(rounded, ml_dtypes.bfloat16), inverse=True),
        wrong={"of": truncated},
        min_seqlen=1,
        **BF16,
    ),
    "tree": pair("a tree of parts that skips weight 0", (SPECIAL,), tree, wrong={"drops_nan": True}),
    "ring": pair(
        "a ring of parts that skips weight 0", (SPECIAL,), partial(tree, ring=True), wrong={"skip": 0.05}, **BF16
    ),
    "plus_infinity": pair(
        "lse +inf where the sum is 0",
        (SPECIAL, *EMPTY),
        plus_infinity,
        "causal",
        wrong={"lse_of_none": 0.0},
        policy=PLUS,
    ),
    "rows": cache("rows alone", ("seqused_k",), ()),
    "pages": cache("pages alone", ("paged",), ("page_table",), "stale page"),
    "rows_appended": cache("rows, append", ("seqused_k", "append"), NEW, "append"),
    "pages_rotated": cache(
        "pages, append, rotary", ("paged", "append", "rotary"), ("page_table", *NEW, *ROTARY), "rotary"
    ),
    "rows_padded": cache("rows, leftpad", ("seqused_k", "leftpad"), ("cache_leftpad",), "leftpad"),
    "rows_indexed": cache("rows, batch indices", ("seqused_k", "batch_idx"), ("cache_batch_idx",)),
    "rows_of_fp8": cache("rows of e4m3", ("seqused_k", "fp8_cache"), ("k_descale", "v_descale"), "descale"),
    "pages_packed": cache(
        "pages, packed", ("paged", "varlen"), ("page_table", "cu_seqlens_q", "max_seqlen_q"), "stale page"
    ),
}
