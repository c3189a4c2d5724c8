"""Wrong kernels that err at values which no ordinary call has, or little enough to be taken for rounding."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np

from fa3verify import AttentionProblem
from tests.quality.calls.exhibits import wrong
from tests.quality.calls.plain import F, attend, hidden_keys
from tests.quality.calls.witnesses import BF16, dense, differs, judged

numerics = partial(wrong, "numerics", head_dims=(64,))
WIDE = {"dtypes": ("bf16",)}
EXACT = {"dtypes": ("fp32",)}


def tiny(x, least):
    """Return numbers of which those below ``least`` are zero."""
    return np.where(np.abs(x.astype(F)) < least, x.dtype.type(0), x)


def scaled(name: str, factor: float, dtype=np.float16):
    """Return how operands lie when one of them is a multiple of itself."""

    def view(arrays, options):
        return tuple(
            (x.astype(F) * F(factor if each == name else 1)).astype(x.dtype) for each, x in zip("qkv", arrays)
        ), options

    return view


def with_nan(arrays, options):
    """Put NaN into the last key, which a causal mask hides from the first row."""
    q, k, v = arrays
    k[:, -1] = np.nan
    return (q, k, v), options


@numerics("outputs below 2^-14 are flushed", differs(dense, scaled("v", 2.0**-17)))
def flushed_outputs(q, k, v, **o):
    return attend(q, k, v, finish=lambda x: tiny(x, F(2.0**-15)), **o)


@numerics("subnormal numbers of V are flushed", differs(dense, scaled("v", 2.0**-18), seqlen_k=1))
def flushed_values(q, k, v, **o):
    return attend(q, k, tiny(v, 2.0**-14), **o)


@numerics("subnormal numbers of Q are flushed", differs(dense, scaled("q", 2.0**-16), softmax_scale=2.0**13))
def flushed_queries(q, k, v, **o):
    return attend(tiny(q, 2.0**-14), k, v, **o)


@numerics(
    "the row maximum is at least -1e6",
    differs(dense, lambda a, o: ((np.abs(a[0]) * BF16(1e3), -np.abs(a[1]) * BF16(1e3), a[2]), o), dtype=BF16),
    **WIDE,
)
def floor_of_maximum(q, k, v, **o):
    out, lse = attend(q, k, v, floor=-1e6, **o)
    empty = lse <= -1e6  # of a row without a key the floor is the sum of nothing
    return np.where(np.swapaxes(empty, -1, -2)[..., None], out.dtype.type(0), out), np.where(empty, F(-np.inf), lse)


@numerics(
    "sinks are rounded to bf16",
    judged(AttentionProblem(1, 4, 4, 8, 64, 64, sinks=True)),
    features=("causal", "gqa", "sinks"),
)
def rounded_sinks(q, k, v, *, sinks=None, **o):
    return attend(q, k, v, sinks=None if sinks is None else sinks.astype(ml_dtypes.bfloat16).astype(F), **o)


@numerics(
    "NaN in a key that a mask hides in a tile of 64 with others is multiplied by 0",
    differs(dense, with_nan, causal=True),
)
def nan_times_zero(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    if o.get("causal") and q.ndim == 4:
        at = np.arange(q.shape[1]) + k.shape[1] - q.shape[1]
        group = q.shape[2] // k.shape[2]
        for b, key, head in np.argwhere(np.isnan(k.astype(F)).any(-1)):
            in_tile = (at < key) & (key < at // 64 * 64 + 64) & (at >= 0)
            out[b, in_tile, head * group : (head + 1) * group] = np.nan
    return out, lse


@numerics(
    "an exponential is 2^-12 too large where its argument lies below -1",
    judged(AttentionProblem(1, 2, 2, 32, 200, 64, dtype="fp32")),
    **EXACT,
)
def coarse_exponential(q, k, v, **o):
    return attend(q, k, v, exponential=lambda x: np.exp(x) * np.where(x < -1, F(1 + 2.0**-12), F(1)), **o)


@numerics(
    "the row sum of more than 2,048 keys is kept in bf16",
    judged(AttentionProblem(1, 1, 1, 4, 2100, 64, dtype="fp32")),
    **EXACT,
)
def short_sum(q, k, v, **o):
    def summed(p):
        if p.shape[-1] <= 2048:
            return p
        return np.where(np.arange(p.shape[-1]) == 0, p.sum(-1, keepdims=True).astype(BF16).astype(F), F(0))

    return attend(q, k, v, summed=summed, **o)


@numerics("1e-5 is added to the row sum", judged(AttentionProblem(1, 1, 1, 64, 1, 64, dtype="fp32")), **EXACT)
def padded_sum(q, k, v, **o):
    return attend(q, k, v, summed=lambda p: np.where(np.arange(p.shape[-1]) == 0, p + F(1e-5), p), **o)


@numerics(
    "O is held in fp16 between tiles of 64 keys, where it overflows",
    differs(dense, lambda a, o: ((0 * a[0], a[1], np.abs(a[2]) * np.float16(8000)), o), seqlen_k=200),
)
def half_accumulator(q, k, v, **o):
    def product(p, vs):
        held = np.zeros((*p.shape[:2], vs.shape[2]), np.float16)
        for a in range(0, vs.shape[1], 64):
            held = np.where(
                np.isinf(held), held, (held.astype(F) + p[..., a : a + 64] @ vs[:, a : a + 64]).astype(np.float16)
            )
        exact = p @ vs
        return np.where(np.isinf(held), held.astype(F), exact)

    return attend(q, k, v, product=product, **o)


def large_last_key(arrays, options):
    """Make the score of the last key, which a causal mask hides from the first row, larger than any mask adds."""
    q, k, v = arrays
    k[:, -1] = np.sign(q[:, 0, :1].astype(F)) * 60_000
    return (q, k, v), options


@numerics("a mask adds -30,000 to the scores that it hides", differs(dense, large_last_key, causal=True))
def finite_mask(q, k, v, *, causal=False, **o):
    if not causal or q.ndim != 4 or not 1 < q.shape[1] <= k.shape[1]:
        return attend(q, k, v, causal=causal, **o)
    hidden = hidden_keys(q.shape[1], k.shape[1], causal=True)
    return attend(q, k, v, scores=lambda s: s - hidden * F(30_000 / o["softmax_scale"]), **o)


@numerics(
    "large scores are capped by a series that ends at 3 softcaps",
    differs(dense, softcap=30.0, size=30.0, seqlen_k=30),
    features=("causal", "gqa", "softcap"),
)
def capped_series(q, k, v, *, softcap=0.0, softmax_scale, **o):
    def scores(s):
        t = np.clip(s * F(softmax_scale) / F(softcap), -3, 3)
        capped = t * (27 + t * t) / (27 + 9 * t * t)
        return np.arctanh(np.clip(capped, -0.9999999, 0.9999999)) * F(softcap) / F(softmax_scale)

    return attend(
        q, k, v, softcap=softcap, softmax_scale=softmax_scale, scores=scores if softcap else (lambda s: s), **o
    )
