"""The kernels as a library: FlashAttention-3's functions over the operators of :mod:`fa3_kernels.operators`.

Forward only, for Hopper GPUs. What the kernels do not do is refused in one line, never ignored.
"""

from __future__ import annotations

import torch

from fa3_kernels.operators import (
    check_descales,
    check_problem,
    check_tensors,
    check_unsupported,
    choices,
    forward_op,
    forward_varlen_op,
    require,
)

PROMOTION_INTERVAL = 128  # keys; the accumulator of FP8 wgmma loses bits over longer chains


def flash_attn_func(  # noqa: PLR0913 (upstream's signature)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
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
    """Attention with FlashAttention-3's signature, layout and conventions; forward only.

    Parameters
    ----------
    q : float16, bfloat16 or float8_e4m3fn (batch, seqlen_q, nheads, head_dim), on a Hopper GPU
        head_dim at most 256, a multiple of 16 bytes; last dimension contiguous, other strides multiples of 16 bytes.
    k, v : same dtype (batch, seqlen_k, nheads_kv, head_dim or head_dim_v)
    softmax_scale : float, optional
        1 / sqrt(head_dim) by default; > 0.
    causal : bool
        Bottom-right aligned.
    q_descale, k_descale, v_descale : float32 (batch, nheads_kv), optional
        FP8 only: multiply to dequantise; 1 by default. With ``descale_blocks`` (batch, heads, blocks).
    window_size : (int, int)
        Keys visible left and right of the diagonal, inclusive; -1 is unlimited.
    softcap : float
        c > 0 replaces scores x by c * tanh(x / c).
    num_splits : int
        Parts of the keys, merged in a fixed order; 0 chooses from the shape. Bits depend on it.
    pack_gqa : bool, optional
        Chosen from the shape by default. No bit depends on it.
    deterministic : bool
        The forward always is.
    return_attn_probs : bool
        Return lse as well, as upstream does under this name.
    qv, attention_chunk, sm_margin
        Refused unless at their defaults.
    descale_blocks : (int, int, int)
        Not upstream's. Rows per block of the q, k and v descales; 0 is one factor per sequence and kv head.
    promotion_interval : int
        Not upstream's. FP8 only: keys after which P V is added to fp32; 0 chains as upstream does, which loses
        long-context output.

    Returns
    -------
    out : float16 or bfloat16 (batch, seqlen_q, nheads, head_dim_v)
        bfloat16 for FP8 operands.
    lse : float32 (batch, nheads, seqlen_q)
        Natural logarithm; with ``return_attn_probs``. Rows without a key: out 0, lse -inf.

    Raises
    ------
    ValueError
        For anything the kernels do not take, in one line.
    """
    check_unsupported(qv, attention_chunk, sm_margin, (q, k, v))
    check_tensors(q, k, v, 4)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    check_descales(q, k, q.shape[0], descales, descale_blocks)
    chosen = choices(softmax_scale, causal, window_size, softcap, num_splits)
    check_problem(q, k, v, chosen)
    out, lse = forward_op(
        q, k, v, *descales.values(), *chosen.values(), pack_gqa, list(descale_blocks), promotion_interval
    )
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
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
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
    q : (total_q, nheads, head_dim)
    k, v : (total_k, nheads_kv, head_dim or head_dim_v)
    cu_seqlens_q, cu_seqlens_k : int32 (batch + 1,)
        Starts of the sequences, from 0 to the number of rows. On the GPU they are copied to the host once per call, which
        waits for the GPU: the schedule is made there.
    max_seqlen_q, max_seqlen_k : int
        At least the longest sequence; checked, otherwise without effect.
    seqused_q, seqused_k
        Refused unless None.

    Returns
    -------
    out : (total_q, nheads, head_dim_v)
    lse : float32 (nheads, total_q)
        With ``return_attn_probs``.
    """
    check_unsupported(qv, attention_chunk, sm_margin, (q, k, v), seqused_q=seqused_q, seqused_k=seqused_k)
    check_tensors(q, k, v, 3)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        is_index = x.ndim == 1 and x.dtype == torch.int32 and x.numel() > 1
        require(is_index, f"{name} must be int32 (batch + 1,), got {x.dtype} {tuple(x.shape)}")
    require(
        len(cu_seqlens_q) == len(cu_seqlens_k),
        f"cu_seqlens_q and cu_seqlens_k must have one length, got {len(cu_seqlens_q)} and {len(cu_seqlens_k)}",
    )
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    check_descales(q, k, len(cu_seqlens_q) - 1, descales, descale_blocks)
    chosen = choices(softmax_scale, causal, window_size, softcap, num_splits)
    out, lse = forward_varlen_op(
        q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), *descales.values(),
        *chosen.values(), pack_gqa, list(descale_blocks), promotion_interval,
    )  # fmt: skip
    return (out, lse) if return_attn_probs else out
