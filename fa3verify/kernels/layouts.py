"""How operands lie where a function has them otherwise than FlashAttention-3: permutations, and their inverses.

:class:`fa3verify.kernels.arrays.ArrayFunction` hands operands over by them, and takes back what a function returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from fa3_reference.problem import AttentionProblem, Operands

CacheLayout = Literal["nhd", "hnd", "vllm"]
Packed = Literal["", "qkv", "kv"]
Groups = Literal["adjacent", "interleaved"]
_VECTOR_BYTES = 16  # of neighbouring channels of a key, in vLLM's cache


# From (pages, page_size, heads, channels) of each operand, and back.
_LAID: Mapping[str, Mapping[str, tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]]] = {
    "hnd": {name: (lambda x: x.swapaxes(1, 2), lambda x: x.swapaxes(1, 2)) for name in ("k_cache", "v_cache")},
    "vllm": {
        "k_cache": (
            lambda x: x.reshape(*x.shape[:3], -1, _VECTOR_BYTES // x.itemsize).transpose(0, 2, 3, 1, 4),
            lambda x: x.transpose(0, 3, 1, 2, 4).reshape(len(x), x.shape[3], x.shape[1], -1),
        ),
        "v_cache": (lambda x: x.transpose(0, 2, 3, 1), lambda x: x.transpose(0, 3, 1, 2)),
    },
}


def laid(layout: CacheLayout, name: str, x: np.ndarray, *, back: bool = False) -> np.ndarray:
    """Return a cache as the function has it, contiguous, or ``back`` as we have it; any other operand as it is."""
    steps = _LAID.get(layout, {}).get(name)
    return np.ascontiguousarray(steps[back](x)) if steps else x


def stacked(packed: Packed, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return Q, K and V by name, or in place of those that are packed one array with an axis in front of the heads."""
    if not packed:
        return dict(inputs)
    rest = {name: x for name, x in inputs.items() if name not in packed}
    return rest | {packed: np.stack([inputs[name] for name in packed], axis=-3)}


def _order(problem: AttentionProblem) -> np.ndarray:
    """Return which of our query heads each one of the function's is, if those of a group lie nheads_kv apart."""
    return np.arange(problem.nheads).reshape(problem.nheads_kv, problem.group).T.ravel()


def interleaved(problem: AttentionProblem, operands: Operands) -> Operands:
    """Return operands whose query heads lie interleaved: head h goes with kv head h mod nheads_kv."""
    order = _order(problem)
    sinks = None if operands.sinks is None else operands.sinks[order]
    return replace(operands, q=operands.q[..., order, :], sinks=sinks)


def adjacent(problem: AttentionProblem, x: Any) -> Any:
    """Return an output of interleaved query heads, out or lse, with the heads of a group beside each other.

    None, and an array of another number of heads, stays as it is: its operation then refuses it.
    """
    if x is None or x.ndim < 2 or x.shape[-2] != problem.nheads:
        return x
    return x.take(np.argsort(_order(problem)), axis=-2)
