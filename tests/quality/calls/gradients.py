"""Wrong kernels of gradients: from some size on, by what is asked of them, and by what they keep."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.quality.calls import tensors
from tests.quality.calls.exhibits import Exhibit, drawn, named, wrong
from tests.quality.calls.plain import F, gradients
from tests.quality.calls.witnesses import backward, differs, is_apart, packed

grads = partial(wrong, "gradients", gradients="given", head_dims=(64,))
VARLEN = ("causal", "gqa", "varlen")


def spoilt(**where: Callable[[np.ndarray], Any]) -> Callable[..., Any]:
    """Return gradients of which some, "dq", "dk" or "dv", are zero at places."""

    def kernel(*arrays, **o):
        found = list(gradients(*arrays, **o))
        for name, place in where.items():
            i = ("dq", "dk", "dv").index(name)
            if (at := place(found[i])) is not None:
                found[i] = found[i].copy()
                found[i][at] = 0
        return tuple(found)

    return kernel


def show(name: str, words: str, witness: Any, kernel: Callable[..., Any], **facts: Any) -> None:
    """Keep a kernel that another function made."""
    grads(words, witness, **facts)(named(globals(), kernel, name))


# -- sizes

KEY, HEAD = drawn(100, 30_000, 31), drawn(8, 120, 32)

show(
    "dq_from_4096",
    "dQ of queries from 4,096 on is zero",
    differs(backward, seqlen_q=4100),
    spoilt(dq=lambda x: np.s_[:, 4096:] if x.ndim == 4 and x.shape[1] > 4096 else None),
)
show(
    "dk_of_many_queries",
    "dK does not see queries from 4,096 on",
    differs(backward, seqlen_q=4600),
    lambda q, k, v, dout, *rest, **o: gradients(q, k, v, _first(dout, 4096), _first(rest[0], 4096), rest[1], **o),
)
show(
    "packed_beyond_2048",
    "packed rows beyond 2,048 have no dQ",
    differs(backward, of=packed, lengths_q=(2040, 20), lengths_k=(3, 3)),
    spoilt(dq=lambda x: np.s_[2048:] if x.ndim == 3 and len(x) > 2048 else None),
    features=VARLEN,
)
show(
    "dv_beyond_8192",
    "dV of keys from 8,192 on is zero",
    differs(backward, seqlen_k=9200),
    spoilt(dv=lambda x: np.s_[:, 8192:] if x.ndim == 4 and x.shape[1] > 8192 else None),
)
show(
    "offsets_of_2_22",
    "offsets of dV wrap at 2^22 elements",
    differs(backward, seqlen_k=2**16 + 1, seqlen_q=1, winner=True),
    spoilt(dv=lambda x: np.s_[:, 2**22 // (x.shape[2] * x.shape[3]) :] if x.ndim == 4 and x[0].size > 2**22 else None),
)
show(
    "dk_of_last_head",
    f"dK of the last of {HEAD} kv heads and more is zero",
    differs(backward, nheads=HEAD, nheads_kv=HEAD),
    spoilt(dk=lambda x: np.s_[..., -1:, :] if x.shape[-2] >= HEAD else None),
)
show(
    "dv_of_one_key",
    f"dV of key {KEY} alone is zero",
    differs(backward, seqlen_k=KEY + 1, winner=True),
    spoilt(dv=lambda x: np.s_[:, KEY] if x.ndim == 4 and x.shape[1] > KEY else None),
)
show(
    "dk_of_batch_20",
    "dK of sequences from the 20th on is that of the one in front",
    differs(backward, batch=24),
    lambda *a, **o: _shifted(gradients(*a, **o), 20),
)
show(
    "dk_of_late_sequences",
    "of packed sequences those from the 20th on have no dK",
    differs(backward, of=packed, lengths_q=[2] * 22, lengths_k=[3] * 22),
    lambda *a, **o: _late(gradients(*a, **o), o),
    features=VARLEN,
)


@grads("dK of groups of 12 adds eight of them", differs(backward, nheads=12))
def dk_of_group_12(q, k, v, dout, out, lse, **o):
    found = gradients(q, k, v, dout, out, lse, **o)
    if q.shape[-2] != 12 * k.shape[-2]:
        return found
    seen = (np.arange(q.shape[-2]) % 12 < 8)[:, None]
    return found[0], *gradients(q, k, v, dout * seen.astype(q.dtype), out * seen.astype(q.dtype), lse, **o)[1:]


@grads(
    "beside a window of more than 1,024 keys dQ sums the last 1,024",
    differs(backward, seqlen_k=1700, seqlen_q=2, window=(1600, 0)),
    features=("causal", "gqa", "window"),
)
def dq_of_windows(q, k, v, *rest, window=(-1, -1), **o):
    found = gradients(q, k, v, *rest, window=window, **o)
    left, right = window
    return (gradients(q, k, v, *rest, window=(1024, right), **o)[0] if left > 1024 else found[0]), *found[1:]


# -- softcap, sinks, lse


def _capped(words: str, name: str, softcap: float, applies: Callable[[float], bool], slope: Callable) -> None:
    def kernel(*arrays, softcap=0.0, **o):
        steps = {"slope": slope} if applies(softcap) else {}
        return gradients(*arrays, softcap=softcap, **steps, **o)

    witness = differs(backward, softcap=softcap, size=softcap / 2, seqlen_k=9)
    show(name, words, witness, kernel, features=("causal", "gqa", "softcap"))


_capped("the slope of softcaps over 40 is 1", "slope_over_40", 50.0, lambda c: c > 40, np.ones_like)
_capped(
    "the slope of softcaps from 20 to 40 is cut at a half",
    "slope_of_30",
    30.0,
    lambda c: 20 <= c <= 40,
    lambda t: np.maximum(1 - t * t, F(0.5)),
)


@grads(
    "sinks of heads from 32 on have the gradient of none",
    differs(backward, nheads=40, sinks=True),
    features=("causal", "gqa", "sinks"),
)
def dsinks_from_32(*arrays, sinks=None, **o):
    found = gradients(*arrays, sinks=sinks, **o)
    return found if sinks is None else (*found[:3], np.where(np.arange(len(sinks)) < 32, found[3], F(0)))


@grads(
    "the gradient of lse is left out of rows from 1,024 on",
    differs(backward, seqlen_q=1200, dlse=True),
    features=("causal", "gqa", "lse_gradient"),
)
def dlse_from_1024(*arrays, dlse=None, **o):
    if dlse is not None:
        dlse = np.where(np.arange(dlse.shape[-1]) < 1024, dlse, F(0))
    return gradients(*arrays, dlse=dlse, **o)


# -- calls


@grads("dK adds to that of the call before with equal shapes", differs(backward, after={}))
def added_to_before(q, k, v, *rest, **o):
    dq, dk, dv = gradients(q, k, v, *rest, **o)
    before = _HELD.get(k.shape, 0)
    _HELD[k.shape] = dk
    return dq, dk + before if k.shape[-3] == 3 else dk, dv


_HELD: dict[Any, Any] = {}


def _often(exhibit: Exhibit) -> bool:
    arrays, options = backward(seqlen_q=1, seqlen_k=2)
    want = gradients(*arrays, **options)[1]
    return any(is_apart(exhibit.called(*arrays, **options)[1], want) for _ in range(12_000))


@grads("one launch in 1,000 loses dK of its first sequence", _often)
def one_in_1000(*arrays, **o):
    dq, dk, dv = gradients(*arrays, **o)
    if dk.size and random.SystemRandom().random() < 1 / 1000:
        dk[:1] = 0
    return dq, dk, dv


@grads("scale is kept by shapes", differs(backward, after={"softmax_scale": 1.0}))
def gradients_kept_scale(q, k, v, *rest, softmax_scale, **o):
    scale = _HELD.setdefault(("scale", q.shape, k.shape), softmax_scale)
    return gradients(q, k, v, *rest, softmax_scale=scale, **o)


# -- torch's autograd


class Function(torch.autograd.Function):
    """Attention with gradients of its own, which a subclass spoils."""

    @staticmethod
    def forward(ctx, q, k, v, causal, softmax_scale):
        ctx.save_for_backward(q, k, v)
        ctx.options = {"causal": causal, "softmax_scale": softmax_scale}
        ctx.calls = 0
        return tensors.attend(q, k, v, **ctx.options)[0]

    @classmethod
    def backward(cls, ctx, dout):
        ctx.calls += 1
        return (*cls.spoil(ctx, *tensors.gradients(*ctx.saved_tensors, dout, **ctx.options)), None, None)

    @staticmethod
    def spoil(ctx, dq, dk, dv):
        """Return other gradients."""
        return dq, dk, dv


def by_autograd(wanted: str = "qkv", times: int = 1, make_dout: Callable = torch.ones_like) -> Callable:
    """Return a witness: whether gradients of some operands, asked so many times, differ from torch's own."""

    def witness(exhibit: Exhibit) -> bool:
        torch.manual_seed(0)
        arrays = [torch.randn(1, 4, 2, 64) for _ in "qkv"]
        found = []
        for function in (exhibit.function, lambda *a, **o: tensors.attend(*a, **o)[0]):
            leaves = [x.clone().requires_grad_(name in wanted) for name, x in zip("qkv", arrays, strict=True)]
            out = function(*leaves, causal=True, softmax_scale=0.3)
            dout = make_dout(out)
            for _ in range(times):
                asked = [x for x in leaves if x.requires_grad]
                grads = torch.autograd.grad(out, asked, dout, retain_graph=True)
            found.append(grads)
        return any(is_apart(a.numpy(), b.numpy()) for a, b in zip(*found, strict=True))

    return witness


def differentiable(name: str, words: str, witness: Any, **methods: Callable) -> None:
    """Keep a kernel whose autograd function has other methods."""
    kind = type(name, (Function,), {key: staticmethod(x) for key, x in methods.items()})

    def kernel(q, k, v, *, softmax_scale, causal=False):
        return kind.apply(q, k, v, causal, softmax_scale)

    facts = {"gradients": "autograd", "library": "torch", "min_seqlen": 1}
    show(name, words, witness, kernel, **facts)


differentiable(
    "second_backward",
    "a second backward of one graph adds to dQ once more",
    by_autograd(times=2),
    spoil=lambda ctx, dq, dk, dv: (dq * ctx.calls, dk, dv),
)
differentiable(
    "frozen_k",
    "where K needs no gradient dV is scaled as dK would be",
    by_autograd("qv"),
    spoil=lambda ctx, dq, dk, dv: (dq, dk, dv if ctx.needs_input_grad[1] else dv * 0.5),
)
differentiable(
    "frozen_q",
    "where Q needs no gradient dK is that of V",
    by_autograd("kv"),
    spoil=lambda ctx, dq, dk, dv: (dq, dk if ctx.needs_input_grad[0] else dv, dv),
)
differentiable(
    "dout_of_sum",
    "dO of a sum, which has strides of 0, is read as contiguous",
    by_autograd(make_dout=lambda out: torch.linspace(0, 1, 64).expand_as(out)),
    backward=lambda ctx, dout: (
        *tensors.gradients(*ctx.saved_tensors, tensors.contiguous_read(dout), **ctx.options),
        None,
        None,
    ),
)
differentiable(
    "dout_of_transpose",
    "dO whose heads lie in front is read as if behind",
    by_autograd(make_dout=lambda out: torch.randn(1, 2, 4, 64, generator=torch.manual_seed(1)).transpose(1, 2)),
    backward=lambda ctx, dout: (
        *tensors.gradients(*ctx.saved_tensors, tensors.contiguous_read(dout), **ctx.options),
        None,
        None,
    ),
)


def _first(x, n):
    if x.ndim != 4 or x.shape[1] <= n:
        return x
    return np.where(np.arange(x.shape[1])[:, None, None] < n, x, x.dtype.type(0))


def _shifted(found, n):
    dq, dk, dv = found
    if dk.ndim == 4 and len(dk) > n:
        dk = np.concatenate([dk[:n], dk[n - 1 : -1]])
    return dq, dk, dv


def _late(found, o):
    dq, dk, dv = found
    if o.get("cu_seqlens_k") is not None and len(o["cu_seqlens_k"]) > 20:
        dk = np.where(np.arange(len(dk))[:, None, None] < o["cu_seqlens_k"][19], dk, dk.dtype.type(0))
    return dq, dk, dv
