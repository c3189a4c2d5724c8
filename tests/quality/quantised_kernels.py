"""Attention in numpy that quantises its operands itself: right kernels of kinds that people have, and wrong ones.

All are one function, :func:`attend`, with steps exchanged: how a scale is made of a group's largest magnitude, which
scale an element meets, and how a quotient becomes a code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from fa3verify import Quantises

F = np.float32
E4M3 = ml_dtypes.float8_e4m3fn
LARGEST = {"int8": 127, "int4": 7, "e4m3": 448}
Array = np.ndarray
Step = Callable[..., Array]


def tops(x: Array, of: int | str) -> Array:
    """The largest magnitude of each element's group, of (heads, rows, channels)."""
    size = np.abs(x)
    if of == "channel":
        return np.broadcast_to(size.max(axis=1, keepdims=True, initial=0), x.shape)
    if of in ("head", "tensor"):
        return np.broadcast_to(size.max(axis=(1, 2), keepdims=True, initial=0), x.shape)
    blocks = np.arange(x.shape[1]) // int(of)
    found = np.zeros((len(x), x.shape[1], 1), F)
    for block in np.unique(blocks):
        found[:, blocks == block] = size[:, blocks == block].max(axis=(1, 2), keepdims=True)
    return np.broadcast_to(found, x.shape)


def raised(top: Array, largest: int) -> Array:
    return np.maximum(top / F(largest), F(1e-12))


def nearest(y: Array, fmt: str) -> Array:
    if fmt == "e4m3":
        return np.clip(y, -448, 448).astype(E4M3).astype(F)
    return np.clip(np.rint(y), -LARGEST[fmt], LARGEST[fmt])


def same(s: Array, name: str) -> Array:
    return s


def mean_of_keys(k: Array) -> Array:
    return k.mean(axis=1, keepdims=True, dtype=F)


def attend(  # noqa: PLR0913 (every step has a keyword)
    q: Array,
    k: Array,
    v: Array,
    *,
    by: Quantises,
    softmax_scale: float,
    causal: bool = False,
    finer: int = 1,
    scale: Step = raised,
    code: Step = nearest,
    stored: Step = same,
    used: Step = same,
    mean: Step = mean_of_keys,
    corrects: bool = True,
    exchanged: bool = False,
    unseen: int = 0,
    ahead: int = 0,
    kept: np.dtype | None = None,
) -> tuple[Array, Array]:
    """Out and lse of (batch, heads, seqlen, head_dim); a group has ``finer`` parts with scales of their own.

    ``stored`` changes the scales that numbers are divided by, ``used`` those that codes are multiplied by. The last
    ``unseen`` keys count for nothing, and a causal mask reaches ``ahead`` keys too far.
    """
    whole = dict(zip("qkv", (q, k, v), strict=True))
    outs, lses = [], []
    for b in range(len(q)):
        held: dict[str, tuple[Array, Array]] = {}
        shift: Array | float = 0.0
        for name in "qkv":
            x = whole[name][b].astype(F)
            if name == "k" and by.smooth_k and x.shape[1]:
                taken = mean(x)
                shift = taken
                x = x - taken
            held[name] = coded(x, whole[name], getattr(by, name), finer, scale, code, partial(stored, name=name))
        if exchanged:
            held["q"] = held["q"][0], np.broadcast_to(held["k"][1].max((1, 2), keepdims=True), held["q"][0].shape)
        group = len(q[b]) // len(k[b])
        held |= {name: tuple(np.repeat(x, group, axis=0) for x in held[name]) for name in "kv"}  # type: ignore[misc]
        qs, ks, vs = (c * used(s, name) for name, (c, s) in held.items())
        s = qs @ np.swapaxes(ks, 1, 2) * F(softmax_scale)
        rows, keys = s.shape[1:]
        if causal:
            s = np.where(np.arange(keys) > np.arange(rows)[:, None] + keys - rows + ahead, F(-np.inf), s)
        if unseen and keys > 1:
            s[..., -unseen:] = F(-np.inf)
        top = s.max(axis=-1, keepdims=True, initial=-np.inf)
        base = np.where(np.isneginf(top), F(0), top)
        p = np.exp(s - base)
        total = p.sum(axis=-1, keepdims=True)
        if by.p:
            p = nearest(p * F(by.p[1]), by.p[0]) / F(by.p[1])
        else:
            p = p.astype(q.dtype).astype(F)
        o = p @ vs / np.where(total == 0, F(1), total)
        lse = np.where(total == 0, F(-np.inf), base + np.log(np.where(total == 0, F(1), total)))
        if by.smooth_k and corrects and np.ndim(shift):
            lse = lse + q[b].astype(F) @ np.swapaxes(np.repeat(shift, group, axis=0), 1, 2)[..., :1] * F(softmax_scale)
        outs.append(np.where(total == 0, F(0), o).astype(kept or q.dtype))
        lses.append(lse[..., 0])
    return np.stack(outs), np.stack(lses)


def coded(
    x: Array, operand: Array, group: Any, finer: int, scale: Step, code: Step, stored: Step
) -> tuple[Array, Array]:
    """Codes and the scales of their elements, in the shape of x."""
    if group is None:
        return x, np.ones_like(x)
    fmt, of = group
    top = tops(x, of // finer if isinstance(of, int) else of)
    if of == "tensor":
        top = np.full_like(x, np.abs(operand.astype(F)).max(initial=0))
    s = np.broadcast_to(scale(top, LARGEST[fmt]), x.shape).astype(F)
    return code(x / stored(s), fmt), s


# Steps of kernels that people have.


def added(top: Array, largest: int) -> Array:
    return top / F(largest) + F(1e-7)


def floored(top: Array, largest: int) -> Array:
    return np.maximum(top / F(largest), F(1e-5))


def away(y: Array, fmt: str) -> Array:
    """Ties away from zero, as adding half a step and cutting does."""
    return np.clip(np.trunc(y + F(0.5) * np.sign(y)), -LARGEST[fmt], LARGEST[fmt])


def mean_in_16_bits(k: Array) -> Array:
    return k.mean(axis=1, keepdims=True).astype(np.float16).astype(F)


# Mistakes.


def of_neighbour(s: Array, name: str) -> Array:
    """Codes meet the scale of the block beside theirs."""
    return np.roll(s, 64, axis=1) if name == "k" and s.shape[1] > 64 else s


def of_next_channel(s: Array, name: str) -> Array:
    return np.roll(s, 1, axis=2) if name == "v" else s


def forgotten(s: Array, name: str) -> Array:
    """The second tile of keys meets the scale of the first."""
    if name != "k":
        return s
    first = s[:, :1]
    return np.where(np.arange(s.shape[1])[:, None] < 64, s, first)


def by_128(top: Array, largest: int) -> Array:
    return np.maximum(top / F(largest + 1), F(1e-12))


def wraps(y: Array, fmt: str) -> Array:
    return (np.rint(y).astype(np.int64).astype(np.int8)).astype(F)


def unguarded(top: Array, largest: int) -> Array:
    return top / F(largest)


def truncated(y: Array, fmt: str) -> Array:
    return np.clip(np.trunc(y), -LARGEST[fmt], LARGEST[fmt])


def of_head(top: Array, largest: int) -> Array:
    """One scale of all rows, where each block was to have its own."""
    return np.broadcast_to(raised(top.max(axis=(1, 2), keepdims=True, initial=0), largest), top.shape)


def mean_of_tiles(k: Array) -> Array:
    """Each tile of 64 keys loses a mean of its own, which moves scores of one row apart."""
    tiles = [np.broadcast_to(t.mean(1, keepdims=True), t.shape) for t in np.split(k, range(64, k.shape[1], 64), axis=1)]
    return np.concatenate(tiles, axis=1)


BLOCKS = Quantises(q=("int8", 128), k=("int8", 64))
SAGE = Quantises(q=("int8", 128), k=("int8", 64), v=("e4m3", "channel"), p=("e4m3", 448), smooth_k=True)
TOKENS = Quantises(q=("int8", 1), k=("int8", 1), v=("int8", "head"), p=("int8", 127))
FP8 = Quantises(q=("e4m3", "head"), k=("e4m3", "head"), v=("e4m3", "head"), p=("e4m3", 256))
TENSOR = Quantises(q=("int8", "tensor"), k=("int8", "tensor"), v=("int8", "tensor"))

Steps = dict[str, Any]
RIGHT: dict[str, tuple[Quantises, Steps]] = {
    "int8 by blocks": (BLOCKS, {}),
    "int8 by tokens, P too": (TOKENS, {}),
    "int8 by tensors": (TENSOR, {}),
    "e4m3 by heads": (FP8, {}),
    "e4m3 by blocks": (Quantises(q=("e4m3", 128), k=("e4m3", 128), v=("e4m3", 128), p=("e4m3", 448)), {}),
    "smoothed K, P and V in e4m3": (SAGE, {}),
    "a mean in 16 bits": (SAGE, {"mean": mean_in_16_bits}),
    "ties away, and 1e-7 added to scales": (BLOCKS, {"scale": added, "code": away}),
    "scales of at least 1e-5": (SAGE, {"scale": floored}),
    "a scale for each warp of a block": (BLOCKS, {"finer": 4}),
    "int4 by rows of a warp": (Quantises(q=("int4", 32), k=("int4", 64)), {}),
}
WRONG: dict[str, tuple[Quantises, Steps]] = {
    "the scale of the neighbouring block": (BLOCKS, {"used": of_neighbour}),
    "a scale of 1/128, saturated": (BLOCKS, {"scale": by_128}),
    "a scale of 1/128, wrapped": (BLOCKS, {"scale": by_128, "code": wraps}),
    "the scale of K for Q": (BLOCKS, {"exchanged": True}),
    "the first tile's scale in all": (BLOCKS, {"used": forgotten}),
    "the scale of the next channel": (SAGE, {"used": of_next_channel}),
    "a smoothed K without the correction of lse": (SAGE, {"corrects": False}),
    "a mean of each tile": (SAGE, {"mean": mean_of_tiles}),
    "one scale where blocks are declared": (BLOCKS, {"scale": of_head}),
    "0 / 0 in a group of zeros": (BLOCKS, {"scale": unguarded}),
    "the last key dropped": (SAGE, {"unseen": 1}),
    "a causal mask one key too far": (BLOCKS, {"ahead": 1}),
    "codes cut toward zero": (BLOCKS, {"code": truncated}),
    "int4 where int8 is declared": (BLOCKS, {"code": lambda y, fmt: np.rint(y / F(18)) * F(18)}),
}
