"""The kernels where programs look for FlashAttention-3 itself: its module and its torch operators.

Importing this module registers nothing. What the operators get is handed to :mod:`fa3_kernels.api`, which says what is
computed and what is refused. The schemas are those that torch's own use of FlashAttention-3 calls.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
from torch.library import Library

from fa3_kernels import api
from fa3_kernels.gluon.arguments import packed_by, with_used
from fa3_kernels.gluon.launch_backward import backward
from fa3_kernels.operators import contiguous, options_of, returned

__all__ = ["register_as_flash_attn_3"]

MODULE = "flash_attn_interface"
_MASK = "bool is_causal=False, int window_size_left=-1, int window_size_right=-1"
_LENGTHS = "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None"
_CHOICES = "int num_splits=0, bool? pack_gqa=None, int sm_margin=0"
_SCHEMAS = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    f"{_LENGTHS}, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
    f"Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, {_MASK}, int attention_chunk=0, "
    f"float softcap=0., bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, {_CHOICES}) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    f"{_LENGTHS}, float? softmax_scale=None, {_MASK}, float softcap=0., bool deterministic=False, int sm_margin=0) "
    "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) "
    "-> (Tensor(out!), Tensor)",
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? leftpad_k=None, "
    f"int? page_size=None, int max_seqlen_k_new=0, {_MASK}, int attention_chunk=0, bool has_softcap=False, "
    f"{_CHOICES}) -> Tensor",
)
_registered: list[Library] = []  # an operator lives as long as its library


def register_as_flash_attn_3() -> None:
    """Offer the kernels as ``torch.ops.flash_attn_3`` and as the module ``flash_attn_interface``.

    ``torch.nn.attention.activate_flash_attention_impl("FA3")`` then finds them. Transformers does not: it asks for an
    installed distribution, and has :func:`fa3_kernels.frameworks.register_with_transformers` instead. The operators
    have no gradient and no fake tensors of their own; the functions have.

    Raises
    ------
    ValueError
        Where FlashAttention-3 is installed, or the kernels are registered already.
    """
    if importlib.util.find_spec(MODULE) is not None or hasattr(torch.ops.flash_attn_3, "fwd"):
        raise ValueError(f"{MODULE} or torch.ops.flash_attn_3 is there already, and is not replaced")
    library = Library("flash_attn_3", "DEF")
    for schema, function in zip(_SCHEMAS, (_fwd, _bwd, api.flash_attn_combine, _metadata), strict=True):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    _registered.append(library)
    sys.modules[MODULE] = api


@torch.no_grad()
def _fwd(  # noqa: PLR0913 (upstream's signature)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    seqlens_rotary: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    is_rotary_interleaved: bool = False,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Run the forward; the last two of four tensors, upstream's partial results, are empty."""
    options: Any = {
        "softmax_scale": softmax_scale,
        "causal": is_causal,
        "qv": q_v,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "window_size": (window_size_left, window_size_right),
        "attention_chunk": attention_chunk,
        "softcap": softcap,
        "num_splits": num_splits,
        "pack_gqa": pack_gqa,
        "sm_margin": sm_margin,
        "out": out,
    }
    found: Any
    if cu_seqlens_k is not None:
        starts: Any = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
        found = api.flash_attn_varlen_func(q, k, v, *starts, return_attn_probs=True, **options)
    elif seqused_q is not None:
        raise ValueError("seqused_q is for packed queries and keys, with cu_seqlens_q and cu_seqlens_k")
    elif any(x is not None for x in (k_new, seqused_k, page_table, kv_batch_idx, leftpad_k, cu_seqlens_q)):
        found = api.flash_attn_with_kvcache(
            q,
            k,
            v,
            k_new,
            v_new,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=seqused_k,
            cache_batch_idx=kv_batch_idx,
            cache_leftpad=leftpad_k,
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k_new=cu_seqlens_k_new,
            max_seqlen_q=max_seqlen_q,
            rotary_seqlens=seqlens_rotary,
            rotary_interleaved=is_rotary_interleaved,
            scheduler_metadata=scheduler_metadata,
            return_softmax_lse=True,
            **options,
        )
    else:
        found = api.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    return *found[:2], *found[1].new_empty((2, 0))


@torch.no_grad()
def _bwd(  # noqa: PLR0913 (upstream's signature)
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Run the backward; the last five of eight tensors, upstream's intermediate results, are empty."""
    visible = (window_size_left, window_size_right, 0)
    semantics, _ = options_of(softmax_scale, is_causal, visible, softcap, 1, None, None)
    packed = None
    if any(x is not None for x in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)):
        starts = packed_by(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        packed, _ = with_used(q, starts, seqused_q, seqused_k)
    found = backward(
        contiguous(dout),
        contiguous(q),
        contiguous(k),
        contiguous(v),
        contiguous(out),
        softmax_lse,
        semantics,
        packed=packed,
        is_deterministic=deterministic,
        sm_margin=sm_margin,
    )
    gradients = (returned(x, to) for x, to in zip(found, (dq, dk, dv), strict=True))
    return *gradients, *softmax_lse.new_empty((5, 0))


def _metadata(  # noqa: PLR0913 (upstream's signature)
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    headdim_v: int,
    qkv_dtype: torch.dtype,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    _cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    _seqused_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    *choices: Any,
) -> torch.Tensor:
    """Make a schedule for calls over a cache, which have neither packed keys nor used queries."""
    sizes = (batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, seqused_k, qkv_dtype, headdim_v)
    tensors = (cu_seqlens_q, cu_seqlens_k_new, leftpad_k)
    window = (window_size_left, window_size_right)
    return api.get_scheduler_metadata(*sizes, *tensors, page_size, max_seqlen_k_new, is_causal, window, *choices)
