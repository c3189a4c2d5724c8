"""Kernels of binary32 operands in plain numpy: right ones, each in another order, and wrong ones with one mistake each.

All are one function, :func:`attend`, with steps exchanged: what a kernel does to its operands, scores, weights, sums
and outputs. A file that a user would write has a right one as well, ``fp32_user.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

F = np.float32
LOG2_E = F(1.4426950408889634)
Step = Callable[[np.ndarray], np.ndarray]


def as_it_is(x: np.ndarray) -> np.ndarray:
    return x


def through(kind: Any) -> Step:
    """Return the step that rounds to a narrower format."""
    return lambda x: x.astype(kind).astype(F)


def tf32(x: np.ndarray) -> np.ndarray:
    """Cut to 10 fraction bits, as tensor cores read binary32 operands."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(F)


def tf32_nearest(x: np.ndarray) -> np.ndarray:
    """Round to 10 fraction bits, ties away from zero, as cvt.rna does."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(F)


def product(a: np.ndarray, b: np.ndarray, operand: Step = as_it_is) -> np.ndarray:
    return np.matmul(operand(np.ascontiguousarray(a)), operand(np.ascontiguousarray(b)))


def narrow_sums(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Add products in fp16, sixteen at a time, as an accumulator of 16 bits does."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float16)
    for i in range(0, a.shape[-1], 16):
        total = total + product(a[..., i : i + 16], b[..., i : i + 16, :]).astype(np.float16)
    return total.astype(F)


def attend(  # noqa: PLR0913 (every step of a kernel has a keyword)
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    softmax_scale: float,
    causal: bool = False,
    tile: int = 0,
    base_2: bool = False,
    scale: str = "after",
    scaled: Step = as_it_is,
    operand: Step = as_it_is,
    inputs: Step = as_it_is,
    scores: Step = as_it_is,
    weights: Step = as_it_is,
    factor: Step = as_it_is,
    outputs: Step = as_it_is,
    lses: Step = as_it_is,
    log2_e: np.float32 = LOG2_E,
    hidden: float = -np.inf,
    subtracts: bool = True,
    next_head: bool = False,
    reciprocal: Step = as_it_is,
    mix: Callable[..., np.ndarray] = product,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of (batch, heads, rows, head_dim) arrays; every keyword but the first three is a step or a mistake."""
    group = q.shape[1] // k.shape[1]
    if next_head:
        k = np.roll(k, 1, axis=1)
    k, v = (np.repeat(inputs(x), group, axis=1) for x in (k, v))
    q = inputs(q)
    c = factor(np.array(softmax_scale, F))
    if scale == "query":
        q, c = q * c, F(1)
    if scale == "root":
        q, k, c = q * np.sqrt(c), k * np.sqrt(c), F(1)
    multiply = partial(product, operand=operand)
    exp = np.exp2 if base_2 else np.exp
    unit = log2_e if base_2 else F(1)
    rows, keys = q.shape[2], k.shape[2]
    top = np.full(q.shape[:3], -np.inf, F)
    row_sum, o = np.zeros(q.shape[:3], F), np.zeros((*q.shape[:3], v.shape[3]), F)
    for start in range(0, keys, tile or max(keys, 1)):
        part = slice(start, start + (tile or keys))
        s = scaled(scores(multiply(q, k[:, :, part].swapaxes(2, 3))) * c) * unit
        if causal:
            columns = np.arange(keys)[part]
            s = np.where(columns <= np.arange(rows)[:, None] + (keys - rows), s, F(hidden))
        new = np.maximum(top, s.max(-1, initial=-np.inf))
        base = np.where(np.isneginf(new), F(0), new) if subtracts else np.zeros_like(new)
        p = exp(s - base[..., None])
        alpha = exp(np.where(np.isneginf(top), top, top - base) if subtracts else np.zeros_like(top))
        row_sum = row_sum * alpha + p.sum(-1)
        mixed = mix(weights(p), v[:, :, part]) if mix is not product else multiply(weights(p), v[:, :, part])
        o, top = o * alpha[..., None] + mixed, new
    base = np.where(np.isneginf(top), F(0), top) if subtracts else np.zeros_like(top)
    inverse = reciprocal(F(1) / np.where(row_sum == 0, F(1), row_sum))
    lse = base / unit + np.log(row_sum)
    return outputs(o * inverse[..., None]), lses(lse)


BF16 = through(ml_dtypes.bfloat16)
FP16 = through(np.float16)
RIGHT: dict[str, dict[str, Any]] = {
    "eager": {},
    "online softmax in tiles of 64": {"tile": 64},
    "online softmax in tiles of 16, base 2": {"tile": 16, "base_2": True},
    "base 2": {"base_2": True},
    "scale in Q": {"scale": "query"},
    "root of scale in Q and K, tiles of 32": {"scale": "root", "tile": 32},
    "one key at a time": {"tile": 1},
}
# Right where products in tf32 are declared, wrong where they are not.
TF32: dict[str, dict[str, Any]] = {
    "tf32 by truncation": {"operand": tf32, "tile": 64},
    "tf32 to nearest": {"operand": tf32_nearest},
    "tf32 by truncation, scale in Q": {"operand": tf32, "scale": "query"},
}
WRONG: dict[str, dict[str, Any]] = {
    "P in bf16": {"weights": BF16},
    "P in fp16": {"weights": FP16, "tile": 64},
    "scores in fp16": {"scores": FP16},
    "scaled scores in bf16": {"scaled": BF16},
    "operands in bf16": {"inputs": BF16},
    "operands in fp16": {"inputs": FP16},
    "sums of P V in fp16": {"mix": narrow_sums},
    "log2(e) in fp16": {"base_2": True, "log2_e": F(np.float16(LOG2_E))},
    "lse in fp16": {"lses": FP16},
    "lse in bf16": {"lses": BF16},
    "a mask of -10000": {"hidden": -10000.0},
    "no maximum": {"subtracts": False},
    "K of another head": {"next_head": True},
    "output in bf16": {"outputs": BF16},
    "output in fp16": {"outputs": FP16},
    "scale in bf16": {"factor": BF16},
    "reciprocal of the row sum in fp16": {"reciprocal": FP16},
}


def silent(function: Callable[..., Any], **steps: Any) -> Callable[..., Any]:
    """Return a function of a user with its steps chosen, which does not warn of overflow."""

    def mine(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool) -> Any:
        with np.errstate(all="ignore"):
            return function(q, k, v, softmax_scale=softmax_scale, causal=causal, **steps)

    return mine
