"""Kernels that are wrong for some values alone: small numbers, floors, merges that cancel, sinks, softcaps, NaN.

``tests/quality/test_values_are_asked.py`` says what of the quick plan finds each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from fa3_reference.attention import Attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.problem import AttentionProblem
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.record import Kernel
from tests.quality.outside.plain import F, attend
from tests.quality.wrong_kernels import around

FORWARD = ("causal", "gqa", "window", "softcap", "varlen")
LEAST = 2.0**-14  # normal number of fp16


def made(function: Any, *features: str, gradients: Any = "") -> Kernel:
    (kernel,) = array_kernel(function, name="mine", layout="bshd", features=features or FORWARD, gradients=gradients)
    return kernel


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x.astype(F)) < LEAST, x.dtype.type(0), x)


def flush(operand: str, q, k, v, **o):
    """Take subnormal numbers of an operand, or of the output, for 0."""
    given = {"q": q, "k": k, "v": v}
    out, lse = attend(*(flushed(x) if name == operand else x for name, x in given.items()), **o)
    return (flushed(out) if operand == "out" else out), lse


def from_a_floor(q, k, v, *, floor=-1e6, **o):
    """Begin the maximum of a row at a finite number, which lower scores do not reach."""
    out, lse = attend(q, k, v, **o)
    with np.errstate(all="ignore"):
        is_lost = (lse < floor - 104) & ~np.isneginf(lse)
    rows = is_lost.T if out.ndim == 3 else np.swapaxes(is_lost, 1, 2)
    return np.where(rows[..., None], out.dtype.type(np.nan), out), np.where(is_lost, F(-np.inf), lse)


def merged(q, k, v, *, causal, softmax_scale, parts=4):
    """Merge blocks of keys by out - sigmoid(lse_block - lse) (out - out_block)."""
    out = np.zeros((*q.shape[:3], v.shape[3]), F)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf, F)
    n, m = q.shape[1], k.shape[1]
    for keys in np.array_split(np.arange(m), parts):
        if not len(keys):
            continue
        # the rows that see the first key of a block, and the diagonal of the block
        seen = np.arange(n) + m - n - keys[0] if causal else np.full(n, len(keys))
        each = [_row(q[:, i : i + 1], k[:, keys], v[:, keys], last, softmax_scale) for i, last in enumerate(seen)]
        o, logs = (
            (np.concatenate(x, axis) for x, axis in zip(zip(*each, strict=True), (1, 2), strict=True))
            if n
            else (out, lse)
        )
        with np.errstate(all="ignore"):
            share = np.where(np.isneginf(logs), F(0), F(1) / (F(1) + np.exp(lse - logs)))
            lse = np.where(np.isneginf(logs), lse, np.logaddexp(lse, logs))
        out = out - np.swapaxes(share, 1, 2)[..., None] * (out - o.astype(F))
    return out.astype(q.dtype), lse


def _row(q, k, v, last, softmax_scale):
    count = int(min(max(last + 1, 0), k.shape[1]))
    return attend(q, k[:, :count], v[:, :count], softmax_scale=softmax_scale)


def narrow_sinks(q, k, v, *, sinks=None, **o):
    """Round sinks to bf16."""
    out, lse = attend(q, k, v, **o)
    if sinks is None:
        return out, lse
    sinks = sinks.astype(ml_dtypes.bfloat16).astype(F)[:, None]
    with np.errstate(all="ignore"):
        share = np.where(np.isneginf(lse), F(0), 1 / (1 + np.exp(sinks - lse)))
        full = np.logaddexp(lse, sinks)
    return (out.astype(F) * np.swapaxes(share, -1, -2)[..., None]).astype(q.dtype), full


def capped(q, k, v, *, softcap=0.0, **o):
    """Know softcaps up to 40."""
    return attend(q, k, v, softcap=min(softcap, 40.0), **o)


def sloped(  # noqa: PLR0913 (the arrays of a backward)
    slope: Callable[[float], float], q, k, v, dout, out, lse, *, softmax_scale, causal=False, softcap=0.0
):
    """Return exact gradients, but for the slope of a softcap, which is that of another one, and 1 for one of 0."""
    arrays = [x.astype(np.float64) for x in (q, k, v, dout)]
    problem = AttentionProblem(
        q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], causal=causal,
        softmax_scale=softmax_scale, softcap=softcap,
    )  # fmt: skip
    given = Attention(out.astype(np.float64), lse.astype(np.float64))
    dq, dk, dv = attention_bwd(problem, *arrays, given)[:3]
    if slope(softcap) != softcap:
        dq, dk = _of_slope(problem, arrays, given, slope(softcap))
    return tuple(x.astype(q.dtype) for x in (dq, dk, dv))


def _of_slope(problem: AttentionProblem, arrays: list[np.ndarray], given: Attention, cap: float):
    q, k, v, dout = (np.swapaxes(x, 1, 2) for x in arrays)
    ks, vs = (np.repeat(x, problem.group, 1) for x in (k, v))
    raw = q @ np.swapaxes(ks, 2, 3) * problem.softmax_scale
    s = problem.softcap * np.tanh(raw / problem.softcap)
    n, m = s.shape[2:]
    if problem.causal:
        s = np.where(np.arange(m)[None] > np.arange(n)[:, None] + m - n, -np.inf, s)
    with np.errstate(all="ignore"):
        p = np.where(np.isneginf(given.lse)[..., None], 0, np.exp(s - given.lse[..., None]))
    d = (np.swapaxes(given.out, 1, 2) * dout).sum(-1)
    ds = p * (dout @ np.swapaxes(vs, 2, 3) - d[..., None])
    ds *= (1 - np.tanh(raw / cap) ** 2 if cap else 1) * problem.softmax_scale
    dk = (np.swapaxes(ds, 2, 3) @ q).reshape(*k.shape[:2], problem.group, *k.shape[2:]).sum(2)
    return np.swapaxes(ds @ ks, 1, 2), np.swapaxes(dk, 1, 2)


def added_mask(q, k, v, *, causal=False, window=(-1, -1), **o):
    """Add -inf to scores that are hidden, which leaves NaN what it is."""
    out, lse = attend(q, k, v, causal=causal, window=window, **o)
    if causal or window != (-1, -1):
        broken = np.repeat(np.isnan(k.astype(F)).any((1, 3)), q.shape[2] // k.shape[2], 1)
        out[:] = np.where(broken[:, None, :, None], out.dtype.type(np.nan), out)
    return out, lse


def tiles_behind(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, **o):
    """Multiply weights of 0 by the V that follows a packed sequence, up to a whole tile."""
    out, lse = attend(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **o)
    bounds: Iterable[Any] = (
        () if cu_seqlens_q is None else zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:])
    )
    for a, b, c, d in bounds:
        behind = v[d : c + -(-(d - c) // 64) * 64].astype(F)
        with np.errstate(invalid="ignore"):
            out[a:b] += np.repeat((behind * F(0)).sum(0), q.shape[1] // k.shape[1], 0).astype(out.dtype)
    return out, lse


def nan_as_zero() -> Kernel:
    """Store 0 for NaN."""

    def nan_stored_as_zero(problem, operands, config, named):
        codes = {x: named[x] for x in "qkv"}
        return {x: np.where(np.isnan(c.astype(F)), c.dtype.type(0), c) for x, c in codes.items()}

    return around("twin.quantize", nan_stored_as_zero)


def inf_in_descale() -> Kernel:
    """Let an infinity be a maximum."""

    def infinite_descales(problem, operands, config, named):
        descales = {name: named[name] for name in ("q_descale", "k_descale", "v_descale")}
        return {name: np.where(x >= 2.0**125, F(np.inf), x) for name, x in descales.items()}

    return around("twin.quantize", infinite_descales)


def zeros_of_scale_zero() -> Kernel:
    """Give a block of zeros the descale 0."""

    def descales_of_zero(problem, operands, config, named):
        x = operands.k
        is_zero = not problem.is_varlen and (x == 0).all((1, 2, 3))[:, None, None]
        return {"k_descale": np.where(is_zero, F(0), named["k_descale"])}

    return around("twin.quantize", descales_of_zero)


def seeds_in_a_byte() -> Kernel:
    """Keep the low byte of a seed."""
    sound = around("twin.quantize", lambda *_: {})

    def run(problem, operands, config):
        return sound.code.run(problem, operands, replace(config, seed=config.seed & 255))

    return replace(sound.altered(run=run), name="seeds_in_a_byte")


def long_rows_cut() -> Kernel:
    """Leave the keys from 4,000 on at 0."""

    def keys_cut(problem, operands, config, named):
        k = named["k"].copy()
        for seq in problem.sequences():
            problem.rows_k(k, seq)[4000:] = 0
        return {"k": k}

    return around("twin.quantize", keys_cut)


KERNELS: dict[str, Callable[[], Kernel]] = {
    **{f"flushed_{of}": partial(made, partial(flush, of)) for of in ("q", "k", "v", "out")},
    "floor": partial(made, from_a_floor),
    "merged": partial(made, merged, "causal", "gqa"),
    "narrow_sinks": partial(made, narrow_sinks, "causal", "gqa", "sinks"),
    "capped": partial(made, capped),
    "slope_of_40": partial(
        made, partial(sloped, lambda cap: min(cap, 40.0)), "causal", "gqa", "softcap", gradients="given"
    ),
    "slope_of_1": partial(
        made, partial(sloped, lambda cap: 0.0 if cap > 40 else cap), "causal", "gqa", "softcap", gradients="given"
    ),
    "right_slope": partial(made, partial(sloped, lambda cap: cap), "causal", "gqa", "softcap", gradients="given"),
    "added_mask": partial(made, added_mask, "causal", "gqa"),
    "added_window": partial(made, added_mask, "window", "gqa"),
    "tiles_behind": partial(made, tiles_behind),
    "nan_as_zero": nan_as_zero,
    "inf_in_descale": inf_in_descale,
    "zeros_of_scale_zero": zeros_of_scale_zero,
    "seeds_in_a_byte": seeds_in_a_byte,
    "long_rows_cut": long_rows_cut,
    "right": partial(made, attend),
}
