"""The kernels as a library: FlashAttention-3's functions, differentiable, for Hopper GPUs.

Users import these functions from :mod:`fa3_kernels`. The one for caches stands in :mod:`fa3_kernels.cached`; the launch
itself, which checks tensors and starts kernels, in :mod:`fa3_kernels.gluon.launch`. An argument that the kernels do not
support raises a ValueError of one line and is never ignored.

A call takes one of three ways. Traced code (torch.compile, fake tensors) sees the torch operators of
:mod:`fa3_kernels.operators`. A call that wants a gradient goes through the autograd function of that module. All other
calls go straight to the launch, which saves the time of torch's dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch

from fa3_kernels.cached import flash_attn_with_kvcache
from fa3_kernels.gluon.arguments import packed_by
from fa3_kernels.gluon.launch import forward
from fa3_kernels.gluon.launch_backward import check_differentiable
from fa3_kernels.operators import (
    PROMOTION_INTERVAL,
    Attention,
    descales_of,
    factors_of,
    forward_op,
    forward_varlen_op,
    inference_op,
    inference_varlen_op,
    is_traced,
    options_of,
    refuse,
)

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(  # noqa: PLR0913 (upstream's signature)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | float | None = None,
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    descale_blocks: tuple[int, int, int] = (0, 0, 0),
    promotion_interval: int = PROMOTION_INTERVAL,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with FlashAttention-3's signature, layout and conventions.

    Gradients of q, k and v are computed for float16 and bfloat16 with head_dim of at most
    :data:`fa3_kernels.gluon.launch_backward.MAX_HEAD_DIM`, under every mask, with a softcap and for grouped heads.

    Parameters
    ----------
    q : float16, bfloat16 or float8_e4m3fn (batch, seqlen_q, nheads, head_dim), on a Hopper GPU
        head_dim at most 256, a multiple of 16 bytes; last dimension contiguous, other strides multiples of 16 bytes.
    k, v : same dtype (batch, seqlen_k, nheads_kv, head_dim or head_dim_v)
        Keys and values; nheads is a multiple of nheads_kv.
    softmax_scale : float, optional
        1 / sqrt(head_dim) by default; > 0.
    causal : bool
        Whether keys behind the diagonal are hidden, which is aligned bottom-right.
    qv : None
        Refused unless None.
    q_descale, k_descale, v_descale : float32 (batch, nheads_kv), or float, optional
        FP8 only: multiply to dequantise; 1 by default. With ``descale_blocks`` (batch, heads, blocks). A number holds
        for the whole operand, as a checkpoint states it for a layer.
    window_size : (int, int)
        Keys visible left and right of the diagonal, inclusive; -1 is unlimited.
    attention_chunk : int
        Refused unless 0.
    softcap : float
        c > 0 replaces scores x by c * tanh(x / c).
    num_splits : int
        Parts of the keys, merged in a fixed order; 0 chooses from the shape. Bits depend on it.
    pack_gqa : bool, optional
        Chosen from the shape by default. No bit depends on it.
    deterministic : bool
        Whether the backward adds the parts of dQ in a fixed order, so that a call repeats bit for bit. The forward, dK
        and dV always do.
    sm_margin : int
        Refused unless 0.
    return_attn_probs : bool
        Whether lse is returned as well, as upstream does under this name. Unlike upstream's it has gradients.
    descale_blocks : (int, int, int)
        Not upstream's. Rows per block of the q, k and v descales; 0 is one factor per sequence and kv head.
    promotion_interval : int
        Not upstream's. FP8 only: keys after which P V is added to fp32; 0 chains as upstream does, which loses
        long-context output.

    Returns
    -------
    out : float16 or bfloat16 (batch, seqlen_q, nheads, head_dim_v)
        In the format of the operands, bfloat16 for FP8. The bits are those of the CPU twin of the launch, so the error
        is within :func:`fa3verify.forward_bound`. Rows without a key are 0, with a gradient of 0.
    lse : float32 (batch, nheads, seqlen_q)
        Natural logarithm, with ``return_attn_probs`` alone. Rows without a key are -inf.

    Raises
    ------
    ValueError
        For anything the kernels do not take, in one line; where a gradient is wanted that none computes, before the
        forward is run.

    Notes
    -----
    A NaN score or a score of +inf makes its row and lse NaN, a score of -inf is a key of weight 0, and a NaN or an
    infinity in V reaches its channel of every row that sees it. It may also reach rows that do not see it, where its
    key lies in a tile that they visit.

    Examples
    --------
    >>> import torch
    >>> x = torch.randn(2, 1024, 8, 64, dtype=torch.bfloat16, device="cuda")  # doctest: +SKIP
    >>> flash_attn_func(x, x, x, causal=True).shape  # doctest: +SKIP
    torch.Size([2, 1024, 8, 64])
    """
    refuse(qv, attention_chunk, sm_margin)
    factors = factors_of(q_descale, k_descale, v_descale, k)
    descales = descales_of(*factors, descale_blocks)
    if run := _recorded(q, k, v, forward_op, inference_op):
        out, lse = run(
            q,
            k,
            v,
            *factors,
            softmax_scale,
            causal,
            *window_size,
            softcap,
            num_splits,
            pack_gqa,
            list(descale_blocks),
            promotion_interval,
            deterministic,
        )
    else:
        interval = promotion_interval if q.dtype is torch.float8_e4m3fn else None
        semantics, choices = options_of(
            softmax_scale, causal, tuple(window_size), softcap, num_splits, pack_gqa, interval
        )
        out, lse = forward(q, k, v, semantics, choices, descales=descales, needs_lse=return_attn_probs)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(  # noqa: PLR0913 (upstream's signature)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | float | None = None,
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    descale_blocks: tuple[int, int, int] = (0, 0, 0),
    promotion_interval: int = PROMOTION_INTERVAL,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed sequences with FlashAttention-3's signature; see :func:`flash_attn_func`.

    Parameters
    ----------
    q : float16, bfloat16 or float8_e4m3fn (total_q, nheads, head_dim), on a Hopper GPU
        Queries of all sequences, one after the other.
    k, v : same dtype (total_k, nheads_kv, head_dim or head_dim_v)
        Keys and values likewise.
    cu_seqlens_q, cu_seqlens_k : int32 (batch + 1,)
        Starts of the sequences, from 0 to the number of rows, on the GPU of q. They are read there alone, so no call
        waits for the GPU: the schedule is made there too.
    max_seqlen_q, max_seqlen_k : int
        At least the longest sequence. Not checked, for that would take a wait: rows beyond are not computed. A tensor
        of one integer is waited for where it is on the GPU.
    seqused_q, seqused_k : None
        Refused unless None.
    softmax_scale : float, optional
        1 / sqrt(head_dim) by default; > 0.
    causal : bool
        Whether keys behind the diagonal are hidden, which is aligned bottom-right in every sequence.
    qv : None
        Refused unless None.
    q_descale, k_descale, v_descale : float32 (batch, nheads_kv), or float, optional
        FP8 only: as of :func:`flash_attn_func`.
    window_size : (int, int)
        Keys visible left and right of the diagonal, inclusive; -1 is unlimited.
    attention_chunk : int
        Refused unless 0.
    softcap : float
        c > 0 replaces scores x by c * tanh(x / c).
    num_splits : int
        Parts of the keys, merged in a fixed order; 0 chooses from the shape. Bits depend on it.
    pack_gqa : bool, optional
        Chosen from the shape by default. No bit depends on it.
    deterministic : bool
        Whether the backward adds the parts of dQ in a fixed order.
    sm_margin : int
        Refused unless 0.
    return_attn_probs : bool
        Whether lse is returned as well.
    descale_blocks : (int, int, int)
        Not upstream's. Rows per block of the q, k and v descales; 0 is one factor per sequence and kv head.
    promotion_interval : int
        Not upstream's. FP8 only: keys after which P V is added to fp32; 0 chains as upstream does.

    Returns
    -------
    out : float16 or bfloat16 (total_q, nheads, head_dim_v)
        In the format of the operands, bfloat16 for FP8; errors and special values as of :func:`flash_attn_func`.
    lse : float32 (nheads, total_q)
        Natural logarithm, with ``return_attn_probs`` alone. Rows without a key are -inf.

    Raises
    ------
    ValueError
        For anything the kernels do not take, in one line.

    Examples
    --------
    >>> import torch
    >>> x = torch.randn(300, 8, 64, dtype=torch.bfloat16, device="cuda")  # doctest: +SKIP
    >>> starts = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")  # doctest: +SKIP
    >>> flash_attn_varlen_func(x, x, x, starts, starts, 200, 200, causal=True).shape  # doctest: +SKIP
    torch.Size([300, 8, 64])
    """
    refuse(qv, attention_chunk, sm_margin, seqused_q=seqused_q, seqused_k=seqused_k)
    packed = packed_by(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    factors = factors_of(q_descale, k_descale, v_descale, k, cu_seqlens_q)
    descales = descales_of(*factors, descale_blocks)
    if run := _recorded(q, k, v, forward_varlen_op, inference_varlen_op):
        out, lse = run(
            q,
            k,
            v,
            *packed,
            *factors,
            softmax_scale,
            causal,
            *window_size,
            softcap,
            num_splits,
            pack_gqa,
            list(descale_blocks),
            promotion_interval,
            deterministic,
        )
    else:
        interval = promotion_interval if q.dtype is torch.float8_e4m3fn else None
        semantics, choices = options_of(
            softmax_scale, causal, tuple(window_size), softcap, num_splits, pack_gqa, interval
        )
        out, lse = forward(q, k, v, semantics, choices, descales=descales, packed=packed, needs_lse=return_attn_probs)
    return (out, lse) if return_attn_probs else out


def _recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward: Any, inference: Any) -> Any:
    """Return the function through which a graph or autograd sees the call; None where the launch is called directly.

    ``forward`` is the operator with a gradient, ``inference`` the one without. torch.compile may use ``inference`` for
    operands that want no gradient, as it traces again for those that do. All other graphs, such as exported ones, are
    run for operands of both kinds and have ``forward``. ValueError where a gradient is wanted that no kernel computes.
    """
    wants_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if wants_gradient:
        check_differentiable(q.dtype, max(q.shape[-1], v.shape[-1]))
    if is_traced(q):
        if wants_gradient or torch.compiler._is_exporting_flag:  # is_exporting() is True in all that torch 2.11 traces
            return forward
        return inference if torch.compiler.is_dynamo_compiling() else forward
    return Attention.apply if wants_gradient else None
