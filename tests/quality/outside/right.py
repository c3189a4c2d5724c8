"""Thirty kernels that are right and unusual; the suite must pass every one of them.

:data:`RIGHT` says what is unusual about each.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import fa3verify
from tests.quality.outside.plain import F, attend, sequence
from tests.quality.outside.wrong import BF16, dequantized

RIGHT: dict[str, str] = {}


def right(words: str, *features: str, dtypes: tuple[Any, ...] = ("fp16",), **facts: Any) -> Callable:
    """Declare a right kernel of numpy arrays; causal masks and grouped heads unless it names its features."""

    def declare(function: Callable) -> Callable:
        RIGHT[function.__name__] = words
        named = features or ("causal", "gqa")
        given = {"dtypes": dtypes, "library": "numpy", "layout": "bshd", "features": named} | facts
        return fa3verify.kernel(**given)(function)

    return declare


def blocked(q, k, v, *, softmax_scale, causal=False, tile=64, backwards=False, splits=1, lazy=0.0):  # noqa: PLR0913
    """Attend block by block with a running maximum, in any order of blocks; one sequence, (seqlen, heads, head_dim)."""
    group = q.shape[1] // k.shape[1]
    qs, ks, vs = (np.swapaxes(x.astype(F), 0, 1) for x in (q, k, v))
    ks, vs = np.repeat(ks, group, 0), np.repeat(vs, group, 0)
    rows, keys = qs.shape[1], ks.shape[1]
    at = np.arange(rows)[:, None] + keys - rows
    starts = list(range(0, keys, tile))[:: -1 if backwards else 1]
    parts = []
    with np.errstate(all="ignore"):
        for split in range(splits):
            top = np.full(qs.shape[:2], -np.inf, F)
            total = np.zeros(qs.shape[:2], F)
            acc = np.zeros((*qs.shape[:2], vs.shape[2]), F)
            for a in starts[split::splits]:
                s = qs @ np.swapaxes(ks[:, a : a + tile], 1, 2) * F(softmax_scale)
                s = np.where((np.arange(a, a + s.shape[2])[None] > at) & bool(causal), F(-np.inf), s)
                new = np.fmax(top, s.max(-1))
                new = np.where((new - top) <= lazy, top, new) if lazy else new
                base = np.where(np.isneginf(new), F(0), new)
                alpha = np.exp(np.where(np.isneginf(top), F(-np.inf), top - base))
                p = np.exp(s - base[..., None])
                total = total * alpha + p.sum(-1)
                held = p.astype(q.dtype).astype(F)
                acc = acc * alpha[..., None] + held @ vs[:, a : a + tile]
                top = new
            parts.append((top, total, acc))
        top = np.max([t for t, _, _ in parts], 0)
        base = np.where(np.isneginf(top), F(0), top)
        total = sum(x * np.exp(np.where(np.isneginf(t), F(-np.inf), t - base)) for t, x, _ in parts)
        acc = sum(a * np.exp(np.where(np.isneginf(t), F(-np.inf), t - base))[..., None] for t, _, a in parts)
        empty = total == 0
        out = np.where(empty[..., None], F(0), acc / np.where(empty, F(1), total)[..., None])
        lse = np.where(empty, F(-np.inf), base + np.log(np.where(empty, F(1), total)))
    return np.swapaxes(out, 0, 1).astype(q.dtype), lse.astype(F)


def batch(q, k, v, **o):
    """Attend by :func:`blocked` sequence by sequence."""
    each = [blocked(*arrays, **o) for arrays in zip(q, k, v, strict=True)]
    return np.stack([out for out, _ in each]), np.stack([lse for _, lse in each])


@right("whole rows in binary32", "causal", "gqa", "window", "softcap", "varlen", "head_dim_v")
def whole_rows(q, k, v, **o):
    return attend(q, k, v, **o)


@right("tiles of 64 keys")
def tiles(q, k, v, **o):
    return batch(q, k, v, **o)


@right("tiles from right to left", dtypes=("bf16",))
def backwards(q, k, v, **o):
    return batch(q, k, v, backwards=True, **o)


@right("32 splits in turn")
def splits(q, k, v, **o):
    return batch(q, k, v, tile=16, splits=32, **o)


@right("one key at a time", "causal")
def one_key_at_a_time(q, k, v, **o):
    return batch(q[:, :, :], k, v, tile=1, **o) if k.shape[1] <= 64 else batch(q, k, v, **o)


@right("the maximum stays until it grew by 5", dtypes=("bf16",))
def lazy(q, k, v, **o):
    return batch(q, k, v, tile=16, lazy=5.0, **o)


@right("P stays in binary32")
def wide_p(q, k, v, **o):
    return attend(q, k, v, weights=lambda p: p, **o)


@right("the row sum adds the rounded P")
def rounded_sum(q, k, v, **o):
    return attend(q, k, v, summed=lambda p: p.astype(np.float16).astype(F), **o)


@right("the row sum adds the rounded P", dtypes=("bf16",))
def rounded_sum_bf16(q, k, v, **o):
    return attend(q, k, v, summed=lambda p: p.astype(BF16).astype(F), **o)


@right("everything in float64, rounded once")
def exact(q, k, v, *, softmax_scale, causal=False):
    group = q.shape[2] // k.shape[2]
    q64, k64, v64 = (np.swapaxes(x.astype(np.float64), 1, 2) for x in (q, k, v))
    s = q64 @ np.swapaxes(np.repeat(k64, group, 1), 2, 3) * softmax_scale
    at = np.arange(s.shape[2])[:, None] + s.shape[3] - s.shape[2]
    with np.errstate(all="ignore"):
        s = np.where((np.arange(s.shape[3])[None] > at) & causal, -np.inf, s)
        top = s.max(-1, initial=-np.inf)
        p = np.exp(s - np.where(np.isneginf(top), 0, top)[..., None])
        total = p.sum(-1)
        out = p @ np.repeat(v64, group, 1) / np.where(total == 0, 1, total)[..., None]
        return np.swapaxes(out, 1, 2).astype(q.dtype), (np.where(np.isneginf(top), 0, top) + np.log(total)).astype(F)


@right("P is divided by the row sum before it is rounded")
def normalised(q, k, v, **o):
    held = {}

    def keep(p):
        held["sum"] = p.sum(-1, keepdims=True)
        return p

    def weights(p):
        safe = np.where(held["sum"] == 0, F(1), held["sum"])
        return (p / safe).astype(np.float16).astype(F) * safe

    return attend(q, k, v, summed=keep, weights=weights, **o)


@right("exponentials are off by two units in the last place")
def coarse_exponential(q, k, v, **o):
    return attend(
        q,
        k,
        v,
        summed=lambda p: p * F(1 + 2.0**-22),
        weights=lambda p: (p * F(1 + 2.0**-22)).astype(np.float16).astype(F),
        **o,
    )


@right("no lse, ever")
def without_lse(q, k, v, **o):
    return attend(q, k, v, **o)[0]


@right("head_dim 64 alone", head_dims=(64,))
def only_64(q, k, v, **o):
    if q.shape[-1] != 64:
        raise ValueError("head_dim must be 64")
    return attend(q, k, v, **o)


@right("it says nothing of head dims, and refuses all but 64 and 128")
def refuses_others(q, k, v, **o):
    if q.shape[-1] not in (64, 128):
        raise ValueError(f"head_dim must be 64 or 128, got {q.shape[-1]}")
    return attend(q, k, v, **o)


@right("it says nothing of head dims, and raises NotImplementedError where they are no multiples of 32")
def not_implemented(q, k, v, **o):
    if q.shape[-1] % 32:
        raise NotImplementedError(f"head_dim {q.shape[-1]}")
    return attend(q, k, v, **o)


@right("dense, without grouped heads", "head_dim_v")
def dense(q, k, v, **o):
    return attend(q, k, v, **o)


@right("lengths of whole tiles", seqlen_multiple=64, min_seqlen=64)
def whole_tiles(q, k, v, **o):
    return batch(q, k, v, **o)


@right("it refuses arrays that are not contiguous")
def contiguous_alone(q, k, v, **o):
    if not all(x.flags.c_contiguous for x in (q, k, v)):
        raise ValueError("q, k and v must be contiguous")
    return attend(q, k, v, **o)


@right("it copies what is not contiguous, and keeps a workspace that it clears")
def copies(q, k, v, **o):
    out, lse = attend(*map(np.ascontiguousarray, (q, k, v)), **o)
    with _LOCK:  # or two threads at once write into one workspace
        space = _SPACE.setdefault(out.shape, np.zeros(out.shape, out.dtype))
        space[...] = out
        return space.copy(), lse


_SPACE: dict[tuple[int, ...], np.ndarray] = {}
_LOCK = threading.Lock()


@right("sums in threads' order: the last bit differs from call to call", dtypes=("bf16",))
def not_deterministic(q, k, v, **o):
    order = np.random.default_rng().permutation(q.shape[-1])
    return attend(q[..., order], k[..., order], v, **o)


@right("it prints, and takes a millisecond more")
def talks(q, k, v, **o):
    print("attention of", q.shape)
    sys.stdout.flush()
    time.sleep(0.001)
    return attend(q, k, v, **o)


def _double(x: int) -> int:
    return 2 * x


@right("a pool of processes inside", "causal")
def pooled(q, k, v, **o):
    if (0,) not in _SPACE:
        _SPACE[0,] = np.array(_pool_once())
    return attend(q, k, v, **o)


def _pool_once() -> list[int]:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(_double, [1, 2])


@right("a window, with a mask of its own", "causal", "gqa", "window", dtypes=("bf16",))
def windowed(q, k, v, **o):
    return attend(q, k, v, **o)


@right("a softcap by a rational function of exponentials", "causal", "softcap")
def capped(q, k, v, *, softcap=0.0, softmax_scale, **o):
    def tanh(s):
        e = np.exp(np.clip(F(2) * s * F(softmax_scale) / F(softcap), -80, 80))
        return F(softcap) * (F(1) - F(2) / (e + F(1))) / F(softmax_scale)

    return attend(q, k, v, softmax_scale=softmax_scale, scores=tanh if softcap else (lambda s: s), **o)


def _fp8(q, k, v, o, offset, **steps):
    """Attend to e4m3 operands with P in e4m3 times an offset."""
    arrays, rest = dequantized(q, k, v, o)

    def weights(p):
        return np.clip(p * F(offset), 0, 448).astype(ml_dtypes.float8_e4m3fn).astype(F) / F(offset)

    each = [sequence(*(x[i] for x in arrays), weights=weights, **rest, **steps) for i in range(len(q))]
    return np.stack([out for out, _ in each]).astype(BF16), np.stack([lse for _, lse in each])


@right("FP8, P in e4m3 times 256", "causal", "gqa", dtypes=("e4m3",))
def fp8_offset(q, k, v, **o):
    return _fp8(q, k, v, o, 256)


@right("FP8, P in e4m3 times 448", "causal", dtypes=("e4m3",))
def fp8_to_the_end(q, k, v, **o):
    return _fp8(q, k, v, o, 448)


@right("FP8 whose sums keep 14 bits, as Hopper's tensor core", "causal", "gqa", dtypes=("e4m3",), accumulator="either")
def fp8_short_sums(q, k, v, **o):
    def short(x):
        return (np.ascontiguousarray(x, F).view(np.uint32) & np.uint32(0xFFFFFC00)).view(F)

    return _fp8(q, k, v, o, 256, product=short)


@right(
    "torch's scaled_dot_product_attention, which returns 0 for a row whose query is NaN",
    "causal",
    library="torch",
    layout="bhsd",
    dtypes=("bf16",),
    min_seqlen=1,
    policy=fa3verify.Policy(special_values="undefined"),
)
def sdpa(q, k, v, *, softmax_scale, causal=False):
    import torch

    mask = None
    if causal:
        rows, keys = q.shape[2], k.shape[2]
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
    return out if mask is None else torch.where(mask.any(-1)[:, None], out, torch.zeros_like(out))


@right(
    "gradients by torch's autograd",
    library="torch",
    layout="bhsd",
    dtypes=("bf16",),
    gradients="autograd",
    min_seqlen=1,
)
def autograd(q, k, v, *, softmax_scale, causal=False):
    import torch

    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q.float() @ k.float().transpose(2, 3) * softmax_scale
    if causal:
        hidden = torch.ones(s.shape[2:], dtype=torch.bool).triu(s.shape[3] - s.shape[2] + 1)
        s = s.masked_fill(hidden, -torch.inf)
        p = torch.softmax(s, -1).masked_fill(hidden.all(-1)[:, None], 0)
    else:
        p = torch.softmax(s, -1)
    return (p @ v.float()).to(q.dtype)
