"""The torch operators ``fa3verify::forward`` and ``fa3verify::forward_varlen``, which graphs and fake tensors pass.

They are defined with a schema and one implementation each: torch's ``custom_op`` adds two Python layers to every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from fa3_kernels.gluon.launch import NO_DESCALES, Descales, Packed, check_starts, forward, operand
from fa3_kernels.plan.request import Choices, Semantics, request_of

OUT_DTYPES = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float8_e4m3fn: torch.bfloat16,
}
_OPTIONS = (
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float? softmax_scale, bool causal, int window_left, "
    "int window_right, float softcap, int num_splits, bool? pack_gqa, int[] descale_blocks, int promotion_interval"
)
_LIBRARY = torch.library.Library("fa3verify", "DEF")
_LIBRARY.define(f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "forward_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, "
    f"int max_seqlen_k, {_OPTIONS}) -> (Tensor, Tensor)"
)
forward_op: Any = torch.ops.fa3verify.forward.default
forward_varlen_op: Any = torch.ops.fa3verify.forward_varlen.default


@lru_cache(maxsize=1024)
def options_of(
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    num_splits: int,
    pack_gqa: bool | None,
    promotion_interval: int | None,
) -> tuple[Semantics, Choices]:
    """Options of a call as the launch takes them."""
    left, right = (int(n) for n in window)
    scale = None if softmax_scale is None else float(softmax_scale)
    semantics = Semantics(bool(causal), (left, right), float(softcap), scale)
    return semantics, Choices(int(num_splits), pack_gqa, promotion_interval=promotion_interval)


def descales_of(
    q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, blocks: Sequence[int]
) -> Descales:
    """The descales of a call; one object where there are none, which the launch looks for."""
    if q is None and k is None and v is None and tuple(blocks) == (0, 0, 0):
        return NO_DESCALES
    of_q, of_k, of_v = blocks
    return Descales(q, k, v, (of_q, of_k, of_v))


def arguments(q: torch.Tensor, options: tuple[Any, ...]) -> tuple[Semantics, Choices, Descales]:
    """The operators' options as the launch takes them; promotion exists for FP8 operands alone."""
    *factors, scale, causal, left, right, softcap, num_splits, pack_gqa, blocks, interval = options
    interval = interval if q.dtype is torch.float8_e4m3fn else None
    semantics, choices = options_of(scale, causal, (left, right), softcap, num_splits, pack_gqa, interval)
    return semantics, choices, descales_of(factors[0], factors[1], factors[2], blocks)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of batched sequences; arguments as :func:`fa3_kernels.api.flash_attn_func`. Returns out and lse."""
    semantics, choices, descales = arguments(q, options)
    return forward(q, k, v, semantics, choices, descales=descales)


def _forward_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of packed sequences; arguments as :func:`fa3_kernels.api.flash_attn_varlen_func`. Returns out, lse."""
    semantics, choices, descales = arguments(q, options)
    return forward(q, k, v, semantics, choices, descales=descales, packed=Packed(cu_q, cu_k, max_q, max_k))


_LIBRARY.impl("forward", _forward, "CUDA")
_LIBRARY.impl("forward_varlen", _forward_varlen, "CUDA")


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple, packed: tuple | None = None) -> None:
    """The checks of a launch, where all sizes are known."""
    semantics, choices, descales = arguments(q, options)
    operands = tuple(map(operand, (q, k, v)))
    given = tuple(None if x is None else operand(x) for x in descales[:3])
    sizes = [n for x in (*operands, *filter(None, given)) for n in (*x.shape, *x.strides)]
    if all(type(n) is int for n in (*sizes, *(packed or ()))):
        request_of(operands, semantics, choices, descales=given, descale_blocks=descales.blocks, packed=packed)


@torch.library.register_fake("fa3verify::forward")
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _check(q, k, v, options)
    batch, seqlen_q, nheads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, nheads, v.shape[-1]), dtype=OUT_DTYPES[q.dtype])
    return out, q.new_empty((batch, nheads, seqlen_q), dtype=torch.float32)


@torch.library.register_fake("fa3verify::forward_varlen")
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    check_starts(q, Packed(cu_q, cu_k, max_q, max_k))
    _check(q, k, v, options, (cu_q.shape[0] - 1, max_q, max_k))
    total_q, nheads, _ = q.shape
    out = q.new_empty((total_q, nheads, v.shape[-1]), dtype=OUT_DTYPES[q.dtype])
    return out, q.new_empty((nheads, total_q), dtype=torch.float32)
