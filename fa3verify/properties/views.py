"""Views that callers hold: how arguments of a call may lie in memory, each with the numbers of a contiguous tensor.

They are made of numpy arrays and of torch tensors alike, on whatever device. The memory between the elements is filled
with bytes that are NaN, or very large numbers, so that what is read there shows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fa3verify.files import Json

_AXES = ("first axis", "second axis", "third axis", "last axis")
_ALIGNED = 64  # elements: far views ask for offsets, and keep every row where vector loads may be
_GARBAGE = 0x7F  # in every byte: NaN of e4m3 and fp16, and a very large number of the others
Blank = Callable[[tuple[int, ...]], Any]
View = Callable[[Any, Blank], Any]


def is_numpy(x: Any) -> bool:
    """Tell whether an argument is a numpy array."""
    return isinstance(x, np.ndarray)


def is_tensor(x: Any) -> bool:
    """Tell whether an argument is an array or a tensor of one axis or more."""
    return is_numpy(x) or hasattr(x, "untyped_storage")


def copied(x: Any) -> Any:
    """Return a contiguous copy of an array or a tensor."""
    return np.array(x, order="C") if is_numpy(x) else x.contiguous().clone()


def blank(like: Any, shape: tuple[int, ...]) -> Any:
    """Return a contiguous tensor of another one's kind, dtype and device, filled with garbage."""
    size = math.prod(shape) * like.itemsize
    if is_numpy(like):
        return np.full(size, _GARBAGE, np.uint8).view(like.dtype).reshape(shape)
    torch = sys.modules["torch"]  # which has made the tensor
    return torch.full((size,), _GARBAGE, dtype=torch.uint8, device=like.device).view(like.dtype).reshape(shape)


def filled(view: Any, x: Any) -> Any:
    """Copy a tensor's numbers into a view, and return it; read-only where the array is."""
    view[...] = x
    if is_numpy(x) and not x.flags.writeable:
        view.flags.writeable = False
    return view


def _swapped(x: Any, axes: tuple[int, ...], made: Blank) -> Any:
    """Return a view whose memory has the axes of ``x`` in another order, given as places from the last axis."""
    front = tuple(range(len(x.shape) - len(axes)))
    order = (*front, *(len(x.shape) + a for a in axes))
    back = tuple(np.argsort(order).tolist())
    memory = made(tuple(x.shape[a] for a in order))
    return memory.transpose(back) if is_numpy(x) else memory.permute(back)


def _longer(x: Any, axis: int, front: int, behind: int, made: Blank) -> Any:
    """Return a part of a tensor that is longer along an axis."""
    axis %= len(x.shape)
    shape = tuple(n + (front + behind) * (a == axis) for a, n in enumerate(x.shape))
    return made(shape)[(slice(None),) * axis + (slice(front, front + x.shape[axis]),)]


def _offset(x: Any, elements: int, made: Blank) -> Any:
    """Return a contiguous tensor that begins so many elements behind the begin of its memory."""
    return made((math.prod(x.shape) + elements,))[elements:].reshape(x.shape)


VIEWS: Mapping[str, View] = {
    "channels 2 apart": lambda x, made: made((*x.shape[:-1], 2 * x.shape[-1]))[..., ::2],
    "channels backwards": lambda x, made: made(x.shape)[..., ::-1],
    "channels of a wider tensor": lambda x, made: _longer(x, -1, 8, 8, made),
    "heads and tokens swapped": lambda x, made: _swapped(x, (-2, -3, -1), made),
    "channels first": lambda x, made: _swapped(x, (-1, -3, -2), made),
    "tokens last": lambda x, made: _swapped(x, (-2, -1, -3), made),
    "room behind the last axis but one": lambda x, made: _longer(x, -2, 1, 2, made),
    "room behind the last axis but two": lambda x, made: _longer(x, -3, 2, 5, made),
    "half of a pool": lambda x, made: made((2, *x.shape))[1],
    "halves of pages": lambda x, made: made((x.shape[0], 2, *x.shape[1:]))[:, 1],
    "every second": lambda x, made: made((2 * x.shape[0], *x.shape[1:]))[::2],
    "behind an offset": lambda x, made: _offset(x, 64, made),
    "unaligned": lambda x, made: _offset(x, 1, made),
}
_LEAST_AXES = {
    "channels of a wider tensor": 2,
    "room behind the last axis but one": 2,
    "halves of pages": 2,
    "channels first": 3,
    "tokens last": 3,
    "heads and tokens swapped": 3,
    "room behind the last axis but two": 3,
}
WIDE = "64-bit integers"
EXPANDED = "expanded"
POOLS = {"parts of one pool": 0, "parts of each page": 1, "side by side in each head": -1}  # the axis of the parts
PROJECTION = "parts of one projection"
FAR = {f"{axis} beyond 2^{bits} elements": (i, 2**bits) for bits in (31, 16, 32, 15) for i, axis in enumerate(_AXES)}
SLOW = frozenset(name for name, (_, n) in FAR.items() if n in (2**32, 2**15))  # asked where there is time


def views_of(x: Any) -> tuple[str, ...]:
    """Return the names of the views that an argument can have by itself; none of what is no tensor, and of an empty
    one.
    """
    if not is_tensor(x) or not x.shape or not math.prod(x.shape):
        return ()
    names = (name for name in VIEWS if len(x.shape) >= _LEAST_AXES.get(name, 1))
    names = (name for name in names if is_numpy(x) or name != "channels backwards")
    longer = (name for name, (axis, _) in FAR.items() if axis < len(x.shape) > 1 and x.shape[axis] > 1)
    return (*names, *[WIDE] * str(x.dtype).endswith("int32"), *longer)


def viewed(x: Any, name: str) -> Any:
    """Return a view of an argument, by its name; MemoryError where there is not so much address space."""
    if name in FAR:
        return _far(x, *FAR[name])
    if name == WIDE:
        return x.astype(np.int64) if is_numpy(x) else x.long()
    if name == EXPANDED:
        return _expanded(x)
    return filled(VIEWS[name](x, lambda shape: blank(x, shape)), x)


def joined(arguments: Json, name: str) -> Json:
    """Return K and V, or Q, K and V, as views of one tensor, by name; nothing where their shapes do not allow that."""
    if name == PROJECTION:
        given = {each: arguments[each] for each in ("q", "k", "v") if each in arguments}
        axes = [axis for axis in (-2, -3) if len({_without(x.shape, axis) for x in given.values()}) == 1]
        if len(given) < 3 or not axes:
            return {}
        one, axis = given["q"], axes[0] % len(given["q"].shape)
        ends = np.cumsum([x.shape[axis] for x in given.values()]).tolist()
        like = blank(one, (*one.shape[:axis], ends[-1], *one.shape[axis + 1 :]))
        whole = like if axes[0] == -2 else _swapped(like, (-2, -3, -1), lambda shape: blank(one, shape))
        ranges = (slice(end - x.shape[axis], end) for end, x in zip(ends, given.values(), strict=True))
        parts = [whole[(slice(None),) * axis + (part,)] for part in ranges]
    else:
        groups = (
            {each: arguments[each] for each in group if each in arguments}
            for group in (("q", "k", "v"), ("k", "v"), ("k_cache", "v_cache"))
        )
        given = next((of for of in groups if len(of) > 1 and len({x.shape for x in of.values()}) == 1), {})
        if not given:
            return {}
        one = next(iter(given.values()))
        axis = POOLS[name] % len(one.shape)
        whole = blank(one, (*one.shape[:axis], len(given), *one.shape[axis:]))
        parts = [whole[(slice(None),) * axis + (i,)] for i in range(len(given))]
    return {each: filled(part, x) for part, (each, x) in zip(parts, given.items(), strict=True)}


def _without(shape: Any, axis: int) -> tuple[int, ...]:
    """Return a shape without one of its last three axes; of fewer axes, nothing that another shape has."""
    return (*shape[:axis], *shape[axis:][1:]) if len(shape) >= -axis else (-len(shape),)


def _expanded(x: Any) -> Any:
    """Return a tensor without memory for the axes along which it is the same, but for that of channels."""
    one = x
    for axis, n in enumerate(x.shape[:-1]):
        first = one[(slice(None),) * axis + (slice(1),)]
        one = first if n and bool((first == one).all()) else one
    return np.broadcast_to(one.copy(), x.shape) if is_numpy(x) else one.clone().expand(x.shape)


def _far(x: Any, axis: int, beyond: int) -> Any:
    """Return a view whose last element along an axis lies more than ``beyond`` elements behind its first.

    MemoryError where there is not so much address space; on a CPU what lies between is never touched.
    """
    others = tuple(1 if a == axis else n for a, n in enumerate(x.shape))
    strides = [math.prod(others[a + 1 :]) for a in range(len(others))]
    apart = max(math.prod(others), -(-beyond // (x.shape[axis] - 1)) + 1)
    strides[axis] = -(-apart // _ALIGNED) * _ALIGNED
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    if is_numpy(x):
        memory = np.empty(size, x.dtype)
        view = as_strided(memory, x.shape, tuple(n * x.itemsize for n in strides))
    else:
        torch = sys.modules["torch"]
        view = torch.empty(size, dtype=x.dtype, device=x.device).as_strided(tuple(x.shape), tuple(strides))
    return filled(view, x)
