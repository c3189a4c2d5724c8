"""Attention in other orders of operations, as numpy functions in binary32, and mistakes that can be planted in them.

Each rounds P and O, and S where its order says so, and nothing else beyond binary32: a correct kernel of its order.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial

import ml_dtypes
import numpy as np

from fa3_reference.bounds import KernelModel, SoftmaxOrder
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.policy import Policy
from fa3verify.kernels.record import Kernel

TILE = 64


class Mistake(StrEnum):
    """What is planted."""

    DROPPED_TILE = "dropped_tile"
    FP16_ACCUMULATOR = "fp16_accumulator"
    COARSE_P = "coarse_p"  # P in a format with three bits less
    MASK_OFF_BY_ONE = "mask_off_by_one"
    WRONG_SCALE = "wrong_scale"


def _coarse(p: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == np.float16:
        return p.astype(ml_dtypes.bfloat16).astype(np.float32)
    return p.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _scores(q, k, softmax_scale, causal, mistake):
    scale = softmax_scale * (np.sqrt(q.shape[3] / (q.shape[3] + 1)) if mistake is Mistake.WRONG_SCALE else 1)
    group = q.shape[1] // k.shape[1]
    s = q.astype(np.float32) @ np.repeat(k, group, 1).astype(np.float32).swapaxes(2, 3) * np.float32(scale)
    if causal:
        off = s.shape[3] - s.shape[2] + (mistake is Mistake.MASK_OFF_BY_ONE)
        s = np.where(np.tri(s.shape[2], s.shape[3], off, dtype=bool), s, np.float32(-np.inf))
    elif mistake is Mistake.MASK_OFF_BY_ONE:
        s[..., -1:] = -np.inf
    return s


def _product(p, v, group, mistake):
    values = np.repeat(v, group, 1).astype(np.float32)
    if mistake is not Mistake.FP16_ACCUMULATOR:
        return p @ values
    total = np.zeros((*p.shape[:3], v.shape[3]), np.float16)
    for start in range(0, p.shape[3], TILE):
        with np.errstate(over="ignore", invalid="ignore"):
            part = p[..., start : start + TILE] @ values[:, :, start : start + TILE]
            total = (total.astype(np.float32) + part).astype(np.float16)
    return total.astype(np.float32)


def _unfused(rounds_scores, mistake, q, k, v, *, softmax_scale, causal):
    if mistake is Mistake.DROPPED_TILE:
        k, v = k[:, :, : max(1, k.shape[2] - TILE)], v[:, :, : max(1, k.shape[2] - TILE)]
    s = _scores(q, k, softmax_scale, causal, mistake)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if rounds_scores:
            s = s.astype(q.dtype).astype(np.float32)
        top = s.max(3, keepdims=True)
        e = np.exp(s - np.where(np.isneginf(top), np.float32(0), top))
        total = e.sum(3, keepdims=True)
        p = np.where(total == 0, np.float32(0), e / total)
        lse = np.log(total[..., 0]) + top[..., 0]
        p = _coarse(p, q.dtype) if mistake is Mistake.COARSE_P else p.astype(q.dtype).astype(np.float32)
        return _product(p, v, q.shape[1] // k.shape[1], mistake).astype(q.dtype), lse.astype(np.float32)


def _left_to_right(mistake, q, k, v, *, softmax_scale, causal):
    group, keys = q.shape[1] // k.shape[1], k.shape[2]
    stop = max(1, keys - TILE) if mistake is Mistake.DROPPED_TILE else keys
    scores = _scores(q, k, softmax_scale, causal, mistake)
    out = np.zeros((*q.shape[:3], v.shape[3]), np.float32)
    top, total = np.full(q.shape[:3], -np.inf, np.float32), np.zeros(q.shape[:3], np.float32)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for start in range(0, stop, TILE):
            s = scores[..., start : min(start + TILE, stop)]
            new = np.maximum(top, s.max(3))
            base = np.where(np.isneginf(new), np.float32(0), new)
            alpha, p = np.exp(top - base), np.exp(s - base[..., None])
            total = total * alpha + p.sum(3)
            p = _coarse(p, q.dtype) if mistake is Mistake.COARSE_P else p.astype(q.dtype).astype(np.float32)
            out = out * alpha[..., None] + _product(p, v[:, :, start : start + s.shape[3]], group, mistake)
            if mistake is Mistake.FP16_ACCUMULATOR:
                out = out.astype(np.float16).astype(np.float32)
            top = new
        out = np.where(total[..., None] == 0, np.float32(0), out / total[..., None])
        return out.astype(q.dtype), (np.log(total) + top).astype(np.float32)


_UNFUSED = SoftmaxOrder("unscaled", "always", "any", "normalised")
_TREE = {"accumulator": "fp32", "exp_error": 2.0**-22, "keeps_subnormals": False}
ORDERS = {
    "normalised": (partial(_unfused, False), lambda c: KernelModel(c.dtype, c.out_dtype, order=_UNFUSED, **_TREE)),
    "rounded_scores": (
        partial(_unfused, True),
        lambda c: KernelModel(c.dtype, c.out_dtype, order=_UNFUSED, scores=c.dtype, **_TREE),
    ),
    "left_to_right": (
        _left_to_right,
        lambda c: KernelModel(
            c.dtype,
            c.out_dtype,
            tile_m=TILE,
            tile_n=TILE,
            order=SoftmaxOrder("unscaled", "always", "left_to_right"),
            **_TREE,
        ),
    ),
}


def ideal(order: str, dtype: str, mistake: Mistake | None = None, *, states_order: bool = True) -> Kernel:
    """A kernel of an order, with a planted mistake; its bound is of its order, or of any."""
    function, model = ORDERS[order]
    stated = {"order": model} if states_order else {}
    (kernel,) = array_kernel(
        partial(function, mistake), name=order, dtypes=(dtype,), min_seqlen=1, policy=Policy(), **stated
    )
    return kernel
