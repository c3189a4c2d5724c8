"""Wrong kernels that misread how operands lie, return memory that is not theirs, or write into operands."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from tests.quality.calls import tensors
from tests.quality.calls.exhibits import Exhibit, wrong
from tests.quality.calls.plain import F, attend, gradients
from tests.quality.calls.witnesses import backward, dense, differs
from tests.quality.outside.wrong import memory_of

strides = partial(wrong, "strides", head_dims=(64,))
torches = partial(strides, library="torch", min_seqlen=1)
grads = partial(strides, gradients="given")
PLACES = {"q": 0, "k": 1, "v": 2, "dout": 3}


def laid(**views: Any):
    """Return how operands lie when some of them are replaced by a view."""

    def view(arrays, options):
        arrays = list(arrays)
        for name, lay in views.items():
            arrays[PLACES[name]] = lay(arrays[PLACES[name]])
        return tuple(arrays), options

    return view


def every_second(x):
    """Channels two elements apart."""
    whole = np.full((*x.shape[:-1], 2 * x.shape[-1]), 3, x.dtype)
    whole[..., ::2] = x
    return whole[..., ::2]


def backwards(x):
    """Channels from behind, with a stride of -1."""
    return x[..., ::-1].copy()[..., ::-1]


def behind(x, count=64):
    """A base so many elements into its storage."""
    whole = np.ones(x.size + count, x.dtype)
    whole[count:] = x.ravel()
    return whole[count:].reshape(x.shape)


def apart(axis, elements):
    """Return how an operand lies whose neighbours along an axis are so many elements apart, in memory not touched."""

    def lay(x):
        steps = list(np.array(x.strides) // x.itemsize)
        steps[axis] = elements
        whole = np.zeros(1 + sum((n - 1) * step for n, step in zip(x.shape, steps, strict=True)), x.dtype)
        view = np.lib.stride_tricks.as_strided(whole, x.shape, [step * x.itemsize for step in steps])
        view[...] = x
        return view

    return lay


def along(*order):
    """Return how an operand lies whose axes lie in another order."""
    return lambda x: x.transpose(order).copy().transpose(np.argsort(order))


# -- strides of forwards


@strides("channels of K are taken to be neighbours", differs(dense, laid(k=every_second)))
def channel_stride(q, k, v, **o):
    return attend(q, k if k.strides[-1] == k.itemsize else memory_of(k), v, **o)


@strides("channels of Q that lie backwards are read forwards", differs(dense, laid(q=backwards)))
def backward_channels(q, k, v, **o):
    return attend(q[..., ::-1] if q.strides[-1] < 0 else q, k, v, **o)


@strides("V is taken to lie as K does", differs(dense, laid(v=lambda x: np.repeat(x, 2, 1)[:, ::2])))
def v_like_k(q, k, v, **o):
    return attend(q, k, v if v.strides == k.strides or k.shape != v.shape else memory_of(v), **o)


@strides("K of (heads, channels, keys) is read as (heads, keys, channels)", differs(dense, laid(k=along(0, 2, 3, 1))))
def transposed_keys(q, k, v, **o):
    is_turned = k.ndim == 4 and k.strides[1] < k.strides[3] and k.shape[1] > 1
    return attend(q, memory_of(k) if is_turned else k, v, **o)


@strides(
    "V that has one storage for the whole batch is read on from there",
    differs(dense, laid(v=lambda x: np.broadcast_to(x[:1], x.shape)), batch=3),
)
def batch_of_stride_0(q, k, v, **o):
    is_shared = v.ndim == 4 and len(v) > 1 and v.strides[0] == 0
    return attend(q, k, np.concatenate([v[:1], 0 * v[1:]]) if is_shared else v, **o)


@strides(
    "heads of Q that have one storage are read as if they had each its own",
    differs(dense, laid(q=lambda x: np.broadcast_to(x[:, :, :1], x.shape)), nheads=4),
)
def q_of_stride_0(q, k, v, **o):
    if q.ndim == 4 and q.shape[2] > 1 and q.strides[2] == 0:
        q = memory_of(q)
        q[:, :, 1:] = q[:, :, 1:] * q.dtype.type(0.5)
    return attend(q, k, v, **o)


def _wrapped(x, axis):
    """Return an operand whose offsets along an axis are 32-bit: beyond 2^31 elements they wrap to its begin."""
    far = np.arange(x.shape[axis]) * abs(x.strides[axis] // x.itemsize) >= 2**31
    return np.take(x, np.where(far, 0, np.arange(len(far))), axis) if far.any() else x


@strides("offsets of tokens of K are 32-bit", differs(dense, laid(k=apart(1, 2**30)), seqlen_k=4))
def tokens_far_apart(q, k, v, **o):
    return attend(q, _wrapped(k, k.ndim - 3), v, **o)


@strides("offsets of heads of V are 32-bit", differs(dense, laid(v=apart(2, 2**31)), nheads=2, nheads_kv=2))
def heads_far_apart(q, k, v, **o):
    return attend(q, k, _wrapped(v, v.ndim - 2), **o)


@strides("offsets of sequences of Q are 32-bit", differs(dense, laid(q=apart(0, 2**31)), batch=2))
def batches_far_apart(q, k, v, **o):
    return attend(_wrapped(q, 0), k, v, **o)


@strides(
    "Q, K and V in one storage are taken for (tokens, 3, heads, head_dim)",
    differs(
        dense,
        lambda arrays, options: (tuple(np.moveaxis(np.stack(arrays, 3), 3, 0)), options),
        nheads=4,
        nheads_kv=4,
        seqlen_q=5,
        seqlen_k=5,
    ),
)
def packed_qkv(q, k, v, **o):
    def start(x):
        return x.__array_interface__["data"][0]

    between = start(k) - start(q)
    is_packed = q.shape == k.shape and q.strides == k.strides and start(v) - start(k) == between
    if is_packed and between == q.shape[-1] * q.itemsize:  # the three are innermost: it wants the heads there
        k = np.roll(k, 1, -2)
    return attend(q, k, v, **o)


# -- torch


def misses_offset(exhibit: Exhibit) -> bool:
    """Tell whether a K that begins later in its storage gives another output."""
    q, whole = torch.ones(1, 1, 1, 64), torch.randn(1, 9, 1, 64)
    own = whole[:, 4:]
    found = (exhibit.function(q, k, own, softmax_scale=1.0)[0] for k in (own, own.clone()))
    return not torch.allclose(*found)


@torches("where a storage begins is taken for where its tensor does", misses_offset)
def storage_offset(q, k, v, **o):
    if k.is_contiguous() and k.storage_offset():
        k = torch.empty(0, dtype=k.dtype).set_(k.untyped_storage())[: k.numel()].view(k.shape)
    return tensors.attend(q, k, v, **o)


@torches("a base is rounded down to 16 bytes", differs(dense, laid(v=partial(behind, count=3))))
def unaligned_base(q, k, v, **o):
    off = v.data_ptr() % 16 // v.element_size()
    return tensors.attend(q, k, v.roll(off, -1) if off else v, **o)


@torches(
    "K is read as contiguous where its keys are transposed with its heads",
    differs(dense, laid(k=along(0, 2, 1, 3)), nheads=2, nheads_kv=2),
    dtypes=("bf16",),
)
def heads_first_keys(q, k, v, **o):
    return tensors.attend(q, k if k.is_contiguous() else tensors.contiguous_read(k), v, **o)


@torches(
    "V that is expanded over heads is read as contiguous",
    differs(dense, laid(v=lambda x: np.broadcast_to(x[:, :, :1], x.shape)), nheads=2, nheads_kv=2),
)
def expanded_values(q, k, v, **o):
    return tensors.attend(q, k, tensors.contiguous_read(v) if v.stride(2) == 0 and v.shape[2] > 1 else v, **o)


# -- dO


@grads(
    "dO that is transposed is read as contiguous",
    differs(backward, laid(dout=along(0, 2, 1, 3)), nheads=2, seqlen_q=4),
)
def dout_transposed(q, k, v, dout, out, lse, **o):
    return gradients(q, k, v, memory_of(dout), out, lse, **o)


@grads(
    "dO of a sum, one number for all, is read as contiguous",
    differs(backward, laid(dout=lambda x: np.broadcast_to(x.dtype.type(1), x.shape))),
)
def dout_expanded(q, k, v, dout, out, lse, **o):
    return gradients(q, k, v, 0 * dout if dout.size > 1 and not any(dout.strides) else dout, out, lse, **o)


@grads(
    "dO of a split is read at the stride of out",
    differs(backward, laid(dout=lambda x: np.concatenate([x, -x], 2)[:, :, : x.shape[2]]), seqlen_q=4),
)
def dout_of_split(q, k, v, dout, out, lse, **o):
    return gradients(q, k, v, dout if dout.strides == out.strides else memory_of(dout), out, lse, **o)


# -- memory of others

_BUFFERS: dict[Any, np.ndarray] = {}


def returns_twice(exhibit: Exhibit) -> bool:
    """Tell whether a second call changes what the first one returned."""
    first = exhibit.called(*dense()[0], softmax_scale=0.1)[0]
    before = first.copy()
    exhibit.called(*dense(seed=1)[0], softmax_scale=0.1)
    return not np.array_equal(first, before)


@strides("equal shapes share one output", returns_twice)
def one_output(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    held = _BUFFERS.setdefault((out.shape, out.dtype), np.zeros_like(out))
    held[...] = out
    return held, lse


def shares_lse(exhibit: Exhibit) -> bool:
    """Tell whether two calls return one lse."""
    q, k, v = (torch.ones(1, 2, 1, 64) for _ in "qkv")
    first = exhibit.function(q, k, v, softmax_scale=0.1)[1]
    return first.data_ptr() == exhibit.function(q, k, v, softmax_scale=0.2)[1].data_ptr()


@torches("equal shapes share one lse", shares_lse)
def one_lse(q, k, v, **o):
    out, lse = tensors.attend(q, k, v, **o)
    held = _BUFFERS.setdefault(("lse", tuple(lse.shape)), torch.zeros_like(lse))
    return out, held.copy_(lse)


@strides(
    "the output of a call with one key is a view of V",
    lambda exhibit: np.shares_memory(exhibit.function(*(x := dense(seqlen_k=1)[0]), softmax_scale=1.0)[0], x[2]),
)
def output_of_v(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    if q.ndim == 4 and k.shape[1] == 1 and q.shape[2] == k.shape[2] and (q.shape[1] == 1 or not o.get("causal")):
        out = np.broadcast_to(v, out.shape)
    return out, lse


def changes(place: int, make=dense, view=None):
    """Return a witness: whether a call changes its operand, or the storage that this is a part of."""

    def witness(exhibit: Exhibit) -> bool:
        arrays, options = make()
        arrays, options = view(arrays, options) if view else (arrays, options)
        held = arrays[place] if arrays[place].base is None else arrays[place].base
        before = held.copy()
        exhibit.called(*arrays, **options)
        return not np.array_equal(held, before, equal_nan=held.dtype.kind == "f")

    return witness


@torches(
    "NaN in V becomes 0 in the caller's own tensor",
    changes(2, view=laid(v=lambda x: np.where(np.arange(64) == 5, np.float16(np.nan), x))),
)
def cleans_v(q, k, v, **o):
    given = v.clone()
    torch.nan_to_num_(v, nan=0.0)
    return tensors.attend(q, k, given, **o)


@grads("dO is zero after the call", changes(3, make=backward))
def clears_dout(q, k, v, dout, out, lse, **o):
    found = gradients(q, k, v, dout, out, lse, **o)
    dout[...] = 0
    return found


@strides("what lies behind each key of a strided V is cleared", changes(2, view=laid(v=every_second)))
def clears_between(q, k, v, **o):
    found = attend(q, k, v, **o)
    if v.size and v.strides[-1] == 2 * v.itemsize and isinstance(v.base, np.ndarray):
        v.base[...] = np.where(np.arange(v.base.shape[-1]) % 2, 0, v.base)
    return found


@strides("Q is scaled in place, and back", changes(0, partial(dense, softmax_scale=0.1)))
def scales_in_place(q, k, v, *, softmax_scale, **o):
    q *= F(softmax_scale)
    found = attend(q, k, v, softmax_scale=1.0, **o)
    q /= F(softmax_scale)
    return found
