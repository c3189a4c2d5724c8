"""Evaluates the functions of scores and masks of a kernel in float64, as FlexAttention calls them: element by element.

:mod:`fa3_reference.mods` says what they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # lets a scalar that is batched index
from torch.nn.attention.flex_attention import create_block_mask

Function = Callable[..., Any]
_PER_KEY = (None, None, None, 0)  # which of b, h, q_idx and kv_idx differ between the keys of a row
_PER_ROW = (None, 0, 0, None)


def evaluated(
    function: Function, b: int, heads: np.ndarray, queries: np.ndarray, keys: np.ndarray, *scores: np.ndarray
) -> np.ndarray:
    """Return what a function gives for every row and key; places and scores are :data:`fa3_reference.mods.Evaluate`'s.

    Numbers that it makes of its indices are float64 as well. Tensors that it captures may lie on a GPU. What the
    function raises passes through.
    """
    if not (len(queries) and len(keys)):  # which torch does not map over
        return np.zeros((len(queries), len(keys)))
    of_scores = (0,) * len(scores)
    call = torch.vmap(torch.vmap(function, (*of_scores, *_PER_KEY)), (*of_scores, *_PER_ROW))
    arguments = [torch.from_numpy(np.array(x)) for x in (*scores, b, heads, queries, keys)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), TransformGetItemToIndex():
            return _on("cpu", call, arguments)
    finally:
        torch.set_default_dtype(before)


def _on(device: str, call: Function, arguments: list[torch.Tensor]) -> np.ndarray:
    """Call with arguments on a device, and on a GPU if tensors that the function captures are not on the CPU."""
    try:
        return call(*(x.to(device) for x in arguments)).cpu().numpy()
    except RuntimeError:
        if device != "cpu" or not torch.cuda.is_available():
            raise
        return _on("cuda", call, arguments)


def arguments_of(
    functions: dict[str, Function], known: frozenset[str], q: torch.Tensor, k: torch.Tensor
) -> dict[str, object]:
    """Return the arguments by which a function like FlexAttention is given ``score_mod`` and ``mask_mod``.

    ``known`` are the names of those that it has.
    """
    given: dict[str, object] = {**functions}
    if "block_mask" in known and "mask_mod" in functions:
        batch, nheads, rows, _ = q.shape
        mask = functions["mask_mod"]
        given["block_mask"] = create_block_mask(mask, batch, nheads, rows, k.shape[2], device=str(q.device))
    return {name: x for name, x in given.items() if name in known}
