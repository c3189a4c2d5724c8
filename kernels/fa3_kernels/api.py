"""The kernels as a library: FlashAttention-3's functions, differentiable, for Hopper GPUs.

Those for caches stand in :mod:`fa3_kernels.cached`; the launch itself, which checks tensors and starts kernels, in
:mod:`fa3_kernels.gluon.launch`. An argument that the kernels do not support raises a ValueError of one line and is
never ignored. With ``sys.modules["flash_attn_interface"] = fa3_kernels.api`` programs for FlashAttention-3 find them.

A call takes one of three ways. Traced code (torch.compile, fake tensors) sees the torch operators of
:mod:`fa3_kernels.operators`. A call that wants a gradient goes through the autograd function of that module. All other
calls go straight to the launch, which saves the time of torch's dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch

from fa3_kernels.cached import flash_attn_with_kvcache
from fa3_kernels.gluon.arguments import Packed, packed_by, with_used
from fa3_kernels.gluon.launch import forward
from fa3_kernels.merging import flash_attn_combine
from fa3_kernels.operators import (
    PROMOTION_INTERVAL,
    WithoutGradient,
    contiguous,
    factors_of,
    is_traced,
    of_forward,
    recorded,
    refuse,
    returned,
    wants_gradient,
)
from fa3_kernels.scheduler import get_scheduler_metadata

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


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
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with FlashAttention-3's signature, layout and conventions.

    Gradients of q, k and v are computed for float16 and bfloat16, under every mask, with a softcap and for grouped
    heads.

    Parameters
    ----------
    q : float16, bfloat16 or float8_e4m3fn (batch, seqlen_q, nheads, head_dim), on a Hopper GPU
        head_dim at most 256, a multiple of 16 bytes. A tensor whose last dimension is not contiguous is copied; other
        strides are multiples of 16 bytes.
    k, v : same dtype (batch, seqlen_k, nheads_kv, head_dim or head_dim_v)
        Keys and values; nheads is a multiple of nheads_kv.
    softmax_scale : float, optional
        1 / sqrt(head_dim) by default; > 0.
    causal : bool
        Whether keys behind the diagonal are hidden, which is aligned bottom-right.
    qv : None
        Refused unless None.
    q_descale, k_descale, v_descale : float32 (batch, nheads_kv), or float, optional
        FP8 only, and ignored elsewhere: multiply to dequantise; 1 by default. With ``descale_blocks`` (batch, heads,
        blocks). A number holds for the whole operand, as a checkpoint states it for a layer.
    window_size : (int, int)
        Keys visible left and right of the diagonal, inclusive; -1 is unlimited.
    attention_chunk : int
        Keys of a chunk, 0 for none: a query sees no key outside the one that holds its diagonal. It has no gradient.
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
        Multiprocessors that the kernels leave to others.
    return_attn_probs : bool
        Whether lse is returned as well, as upstream does under this name. Unlike upstream's it has gradients.
    descale_blocks : (int, int, int)
        Not upstream's. Rows per block of the q, k and v descales; 0 is one factor per sequence and kv head.
    promotion_interval : int
        Not upstream's. FP8 only: keys after which P V is added to fp32; 0 chains as upstream does, which loses
        long-context output.
    out : like the result, optional
        Not upstream's. The output is copied into it, and it is returned. Only where no gradient is wanted and nothing
        is traced.

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
        For anything the kernels do not take, in one line; for a gradient that none computes in the backward.

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
    refuse(qv)
    options = (
        softmax_scale,
        causal,
        *map(int, window_size),
        softcap,
        num_splits,
        pack_gqa,
        list(descale_blocks),
        promotion_interval,
        deterministic,
        sm_margin,
        attention_chunk,
    )
    factors = factors_of(q_descale, k_descale, v_descale, k)
    return _attend((q, k, v), None, (*factors, *options), return_attn_probs, out=out)


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
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
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
    seqused_q, seqused_k : int32 (batch,), optional
        Rows of every sequence that count, from its start; the diagonal is aligned with their ends. Queries behind them
        have out 0, lse -inf and gradient 0, keys behind them are not seen and have gradient 0.
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
        Keys of a chunk, 0 for none: a query sees no key outside the one that holds its diagonal. It has no gradient.
    softcap : float
        c > 0 replaces scores x by c * tanh(x / c).
    num_splits : int
        Parts of the keys, merged in a fixed order; 0 chooses from the shape. Bits depend on it.
    pack_gqa : bool, optional
        Chosen from the shape by default. No bit depends on it.
    deterministic : bool
        Whether the backward adds the parts of dQ in a fixed order.
    sm_margin : int
        Multiprocessors that the kernels leave to others.
    return_attn_probs : bool
        Whether lse is returned as well.
    descale_blocks : (int, int, int)
        Not upstream's. Rows per block of the q, k and v descales; 0 is one factor per sequence and kv head.
    promotion_interval : int
        Not upstream's. FP8 only: keys after which P V is added to fp32; 0 chains as upstream does.
    sinks : float32 (nheads,), optional
        Not upstream's. As of :func:`fa3_kernels.cached.flash_attn_with_kvcache`, where nothing is traced. Operands may
        require a gradient, but a backward raises a ValueError.
    out : like the result, optional
        Not upstream's. As of :func:`flash_attn_func`.

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
    refuse(qv)
    options = (
        softmax_scale,
        causal,
        *map(int, window_size),
        softcap,
        num_splits,
        pack_gqa,
        list(descale_blocks),
        promotion_interval,
        deterministic,
        sm_margin,
        attention_chunk,
    )
    given = packed_by(contiguous(cu_seqlens_q), contiguous(cu_seqlens_k), max_seqlen_q, max_seqlen_k)
    packed, parts = with_used(q, given, seqused_q, seqused_k)
    factors = factors_of(q_descale, k_descale, v_descale, k, cu_seqlens_q)
    if parts > 1:
        factors = tuple(x if x is None else x.repeat_interleave(parts, 0) for x in factors)
    return _attend((q, k, v), packed, (*factors, *options), return_attn_probs, sinks=sinks, out=out)


def flash_attn_qkvpacked_func(  # noqa: PLR0913 (upstream's signature)
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | float | None = None,
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of :func:`flash_attn_func` for q, k and v in one tensor, whose gradient is one tensor, too.

    Parameters
    ----------
    qkv : float16, bfloat16 or float8_e4m3fn (batch, seqlen, 3, nheads, head_dim), on a Hopper GPU
        Or (batch, seqlen, nheads + 2 nheads_kv, head_dim) with ``num_heads_q``: heads of q, then of k, then of v.
    softmax_scale : float, optional
        This and all others but ``num_heads_q`` as of :func:`flash_attn_func`.
    causal : bool
        See there.
    q_descale, k_descale, v_descale : float32 (batch, nheads_kv), or float, optional
        See there.
    window_size : (int, int)
        See there.
    attention_chunk : int
        See there.
    softcap : float
        See there.
    deterministic : bool
        See there.
    num_heads_q : int, optional
        nheads, where the heads lie in one dimension.
    sm_margin : int
        See there.
    return_attn_probs : bool
        See there.

    Returns
    -------
    out : float16 or bfloat16 (batch, seqlen, nheads, head_dim)
        Or out and lse, as of :func:`flash_attn_func`.

    Raises
    ------
    ValueError
        For another shape, and as :func:`flash_attn_func`.

    Examples
    --------
    >>> x = torch.randn(2, 64, 3, 8, 64, dtype=torch.bfloat16, device="cuda")  # doctest: +SKIP
    >>> flash_attn_qkvpacked_func(x, causal=True).shape  # doctest: +SKIP
    torch.Size([2, 64, 8, 64])
    """
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.ndim == 4 and num_heads_q is not None and (rest := qkv.shape[2] - num_heads_q) > 0 and rest % 2 == 0:
        q, k, v = qkv.split([num_heads_q, rest // 2, rest // 2], 2)
    else:
        given = f"{tuple(qkv.shape)} with num_heads_q {num_heads_q}"
        raise ValueError(f"qkv must be (batch, seqlen, 3, nheads, head_dim) or all heads in one dimension, got {given}")
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def _attend(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    packed: Packed | None,
    rest: tuple[Any, ...],
    needs_lse: bool,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run a forward, and return out, or out and lse; ``rest`` are descales and options in the order of the operators'
    schema.
    """
    q, k, v = map(contiguous, operands)
    run = recorded(q, k, v, is_packed=packed is not None) if sinks is None or is_traced(q) else None
    if run and (sinks is not None or out is not None):
        raise ValueError("sinks and out are for calls that are not traced, and out for such as want no gradient")
    if run:
        found, lse = run(q, k, v, *(packed or ()), *rest)
    else:
        semantics, choices, descales, _ = of_forward(q, rest)
        found, lse = forward(
            q, k, v, semantics, choices, descales=descales, packed=packed, sinks=sinks, needs_lse=needs_lse
        )
        found = returned(found, out)
    if sinks is not None and wants_gradient(q, k, v, sinks):
        found, lse = WithoutGradient.apply(found, lse, q, k, v, sinks)
    return (found, lse) if needs_lse else found
