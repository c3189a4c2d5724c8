"""Laws about where arrays lie in memory: views of packed and cached tensors, broadcast heads, offsets past 2^31.

A serving stack passes views: Q, K and V of one projection, a slice of a cache, kv heads that are expanded without a
copy. A kernel's results must not depend on that. A layout that it refuses, as
:data:`fa3verify.kernels.record.REFUSALS` says, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fa3verify.kernels.arrays import ArrayFunction
from fa3verify.kernels.calls import Refused
from fa3verify.kernels.record import Kernel
from fa3verify.properties.compare import Found, agree, called
from fa3verify.properties.law import Setup, Trial
from fa3verify.properties.trials import Wanted, law

_FAR = 2**31 + 64  # elements from one sequence to the next, beyond what 32 bits count

Arrays = Mapping[str, np.ndarray]


def _packed(arrays: Arrays) -> Arrays:
    """Return views of one tensor in which the heads of Q, K and V of a token lie side by side.

    Where lengths or head dims differ, each is a view of a larger array of its own.
    """
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    if not (q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1] == v.shape[-1]):
        return {name: _within(x, 3) for name, x in arrays.items()}
    whole = np.concatenate([q, k, v], axis=-2)
    heads, kv = q.shape[-2], k.shape[-2]
    return {"q": whole[..., :heads, :], "k": whole[..., heads : heads + kv, :], "v": whole[..., heads + kv :, :]}


def _within(x: np.ndarray, room: int) -> np.ndarray:
    """Return a view of a larger array that has ``room`` more heads between its tokens."""
    whole = np.zeros((*x.shape[:-2], x.shape[-2] + room, x.shape[-1]), x.dtype)
    whole[..., 1 : 1 + x.shape[-2], :] = x
    return whole[..., 1 : 1 + x.shape[-2], :]


def _cached(arrays: Arrays) -> Arrays:
    """Return K and V as the first tokens of a longer cache, if they are batched, and Q with room between its tokens."""

    def cache(x: np.ndarray) -> np.ndarray:
        if x.ndim == 3:
            return _within(x, 2)
        whole = np.zeros((x.shape[0], x.shape[1] + 7, *x.shape[2:]), x.dtype)
        whole[:, : x.shape[1]] = x
        return whole[:, : x.shape[1]]

    return {"q": _within(arrays["q"], 1), "k": cache(arrays["k"]), "v": cache(arrays["v"])}


def _heads_first(arrays: Arrays) -> Arrays:
    """Return views with the same axes, over memory in which all tokens of a head lie together."""
    return {name: np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2) for name, x in arrays.items()}


def _moved(arrays: Arrays) -> Arrays:
    """Return contiguous arrays that begin one element behind an aligned address."""

    def moved(x: np.ndarray) -> np.ndarray:
        flat = np.zeros(x.size + 1, x.dtype)
        flat[1:] = x.reshape(-1)
        return flat[1:].reshape(x.shape)

    return {name: moved(x) for name, x in arrays.items()}


def _broadcast(arrays: Arrays) -> Arrays:
    """Return K and V whose heads are all the first one, without storage of their own."""
    return {name: x if name == "q" else np.broadcast_to(x[..., :1, :].copy(), x.shape) for name, x in arrays.items()}


def _far(arrays: Arrays) -> Arrays:
    """Return arrays whose sequences lie further apart than 32 bits count; memory between them is never touched.

    Packed arrays, and those of one sequence, stay as they are.
    """

    def far(x: np.ndarray) -> np.ndarray:
        if x.ndim == 3 or len(x) < 2:
            return x
        flat = np.empty((len(x) - 1) * _FAR + x[0].size, x.dtype)
        inner = tuple(n // x.itemsize for n in x.strides[1:])
        view = as_strided(flat, x.shape, tuple(n * x.itemsize for n in (_FAR, *inner)))
        view[...] = x
        return view

    return {name: far(x) for name, x in arrays.items()}


LAYOUTS: Mapping[str, Callable[[Arrays], Arrays]] = {
    "packed": _packed,
    "cached": _cached,
    "heads first": _heads_first,
    "moved": _moved,
    "broadcast": _broadcast,
}


def is_strided(kernel: Kernel) -> bool:
    """Tell whether a kernel is a function of arrays that gets some of them with their strides."""
    return isinstance(kernel.code, ArrayFunction) and bool(kernel.code.views)


def _arrays(setup: Setup) -> Arrays:
    return {name: getattr(setup.operands, name) for name in ("q", "k", "v")}


def _layouts(setup: Setup, trial: Trial) -> Found:
    plain = called(setup)
    for name, laid in LAYOUTS.items():
        expected = plain
        arrays = laid(_arrays(setup))
        if name == "broadcast":
            expected = called(setup.fed(**{key: np.ascontiguousarray(x) for key, x in arrays.items()}))
        try:
            got = called(setup.fed(**arrays))
        except Refused:
            continue
        yield agree(trial, f"{name} arrays against contiguous ones", got=got, expected=expected)


def _offsets(setup: Setup, trial: Trial) -> Found:
    plain = called(setup)
    for name in _arrays(setup):
        try:
            got = called(setup.fed(**{name: _far({name: getattr(setup.operands, name)})[name]}))
        except (Refused, MemoryError):
            continue
        yield agree(trial, f"{name} with sequences 2^31 elements apart", got=got, expected=plain)


_SMALL = Wanted(permuted=True, max_edits=0, empty=False, softcap=False, families=("normal", "peaky"))
LAYOUT_LAWS = (
    law(
        "layouts_change_no_value",
        "views of packed and cached tensors, of heads first, of broadcast heads and of unaligned storage give what "
        "contiguous arrays give, bit for bit where claimed, else within the sum of both bounds",
        "agreement",
        _layouts,
        wanted=_SMALL,
        applies=is_strided,
    ),
    law(
        "offsets_beyond_32_bits",
        "sequences that lie 2^31 elements apart give what contiguous ones give, bit for bit where claimed, else within "
        "the sum of both bounds",
        "agreement",
        _offsets,
        wanted=Wanted(
            masks="none", layout="batched", several=True, longest_q=4, seqlens_k=(5, 17), max_edits=0, empty=False
        ),
        applies=is_strided,
    ),
)
