"""Gradients with an additive bias by kernels of numpy, right ones and wrong ones, and one by torch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.record import Kernel

F = np.float32
Sums = Callable[[np.ndarray, tuple[int, ...]], np.ndarray]


class Kept(NamedTuple):
    """What a backward has of a call before it sums: float32 arrays (batch, nheads, seqlen_q, seqlen_k)."""

    ds: np.ndarray
    p: np.ndarray
    bias: np.ndarray
    scale: float
    group: int
    slope: np.ndarray | np.float32  # of the softcap, which dS has not been multiplied by


def shared_axes(bias: np.ndarray, full: np.ndarray) -> tuple[int, ...]:
    return tuple(axis for axis in range(4) if bias.shape[axis] == 1 < full.shape[axis])


def summed(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The gradient of a bias from dS, by sums in float32."""
    return x.sum(shared_axes(bias, x), keepdims=True, dtype=F).reshape(bias.shape)


def gradients(of_bias: Callable[[Kept], np.ndarray], *, rounds: bool = False, own: bool = False):
    """A flash backward in float32.

    ``rounds`` takes dS to the operands' format first, ``own`` computes its own forward.
    """

    def backward(q, k, v, *forward, softmax_scale, causal, bias, softcap=0.0):
        dout, out, lse = forward
        kind = q.dtype
        group = q.shape[1] // k.shape[1]
        q, k, v, dout, out = (x.astype(F) for x in (q, k, v, dout, out))
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        scores = q @ k.swapaxes(2, 3) * F(softmax_scale)
        tanh = np.tanh(scores / F(softcap)) if softcap else F(0)
        slope = F(1) - tanh * tanh
        scores = F(softcap) * tanh if softcap else scores
        scores = scores if bias is None else scores + bias.astype(F)
        n, m = scores.shape[2:]
        hidden = np.isneginf(scores) | (causal and ~np.tri(n, m, m - n, dtype=bool))
        scores = np.where(hidden, -np.inf, scores)
        with np.errstate(all="ignore"):
            if own:
                top = scores.max(3, keepdims=True)
                weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
                total = weights.sum(3, keepdims=True)
                p = np.where(hidden, 0, weights / total)
                out = p @ v
            else:
                p = np.where(hidden, 0, np.exp(scores - lse[..., None]))
            ds = np.where(hidden, 0, p * (dout @ v.swapaxes(2, 3) - (dout * out).sum(3, keepdims=True)))
            kept = ds.astype(kind).astype(F) if rounds else ds
            found = (
                None if bias is None else of_bias(Kept(kept, p, bias, softmax_scale, group, slope)).astype(bias.dtype)
            )
            ds = ds * slope * F(softmax_scale)
            by_head = (ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout)
            dk, dv = (x.reshape(len(x), -1, group, *x.shape[2:]).sum(2) for x in by_head)
            return *(x.astype(kind) for x in (ds @ k, dk, dv)), found

    return backward


def made(function: Callable[..., Any], dtype: str = "fp16", **facts: Any) -> Kernel:
    given: dict[str, Any] = {"gradients": "given", "features": ("causal", "gqa", "bias", "bias_fp32")} | facts
    (kernel,) = array_kernel(function, name="biased", dtypes=(dtype,), head_dims=(64,), **given)  # type: ignore[arg-type]
    return kernel


def right_sum(x: Kept) -> np.ndarray:
    return summed(x.ds, x.bias)


def in_pairs(x: Kept) -> np.ndarray:
    """The axes one after the other, which is another order of additions."""
    total = x.ds
    for axis in reversed(shared_axes(x.bias, x.ds)):
        total = np.add.reduce(total, axis=axis, keepdims=True, dtype=F)
    return total.reshape(x.bias.shape)


def by_torch(q, k, v, *, softmax_scale, causal, bias):
    import torch

    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) * softmax_scale
    scores = scores if bias is None else scores + bias.float()
    hidden = torch.isneginf(scores)
    if causal:
        hidden = hidden | torch.ones(scores.shape[2:], dtype=torch.bool).triu(scores.shape[3] - scores.shape[2] + 1)
    scores = scores.masked_fill(hidden, -torch.inf).masked_fill(hidden.all(-1, keepdim=True), 0)
    return (torch.softmax(scores, -1).masked_fill(hidden, 0) @ v).to(q.dtype)


WITH_SOFTCAP = ("causal", "gqa", "bias", "bias_fp32", "softcap")
RIGHT = {
    "numpy, sums in float32": made(gradients(right_sum), features=WITH_SOFTCAP),
    "numpy, dS rounded first, other order": made(gradients(in_pairs, rounds=True), "bf16"),
    "numpy, its own forward": made(gradients(right_sum, own=True), "fp32", gradients="own", features=WITH_SOFTCAP),
    "numpy, returns no dbias": made(lambda *arrays, **options: gradients(right_sum)(*arrays, **options)[:3]),
}


def scaled(x: Kept) -> np.ndarray:
    return summed(x.ds, x.bias) * F(x.scale)


def of_one_sequence(x: Kept) -> np.ndarray:
    """Not summed over the batch where that shares the bias."""
    return summed(x.ds[:1] if x.bias.shape[0] == 1 else x.ds, x.bias)


def of_kv_heads(x: Kept) -> np.ndarray:
    """Summed over the query heads of a kv head, which each have a bias of their own."""
    total = x.ds.reshape(len(x.ds), -1, x.group, *x.ds.shape[2:]).sum(2, keepdims=True)
    return summed(np.broadcast_to(total, (*total.shape[:2], x.group, *total.shape[3:])).reshape(x.ds.shape), x.bias)


def transposed(x: Kept) -> np.ndarray:
    n, m = x.ds.shape[2:]
    return summed(x.ds.swapaxes(2, 3).reshape(*x.ds.shape[:2], n, m), x.bias)


def of_weights(x: Kept) -> np.ndarray:
    return summed(x.p, x.bias)


def in_16_bits(x: Kept) -> np.ndarray:
    """Added up in the operands' format, one pair after the other."""
    import ml_dtypes

    total = x.ds.astype(ml_dtypes.bfloat16)
    for axis in shared_axes(x.bias, x.ds):
        total = np.add.accumulate(total, axis=axis).take([-1], axis=axis)
    return total.astype(F).reshape(x.bias.shape)


def of_the_mean(x: Kept) -> np.ndarray:
    """Divided by the number of pairs that share an element."""
    return summed(x.ds, x.bias) * F(x.bias.size / x.ds.size)


def of_hidden_keys(x: Kept) -> np.ndarray:
    """Something for a pair that the bias hides, as where the mask is left out of the last step."""
    return np.where(np.isneginf(x.bias), F(1e-6), summed(x.ds, x.bias))


def of_uncapped_scores(x: Kept) -> np.ndarray:
    """The gradient of the score in front of the softcap, which the bias is added behind."""
    return summed(x.ds * x.slope, x.bias)


_MISTAKES = (
    of_uncapped_scores,
    scaled,
    of_one_sequence,
    of_kv_heads,
    transposed,
    of_weights,
    in_16_bits,
    of_the_mean,
    of_hidden_keys,
)
WRONG = {function.__name__: made(gradients(function), features=WITH_SOFTCAP) for function in _MISTAKES}
