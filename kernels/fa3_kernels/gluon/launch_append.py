"""Host side of the launch that writes new keys and values to a cache, and rotates them and the queries.

:func:`fa3_kernels.cached.flash_attn_with_kvcache` calls it before the forward. The kernel is
:mod:`fa3_kernels.gluon.append`.
"""

from __future__ import annotations

import torch

from fa3_kernels.gluon.arguments import Paged, check_cache, check_tensor
from fa3_kernels.gluon.launch import operand
from fa3_kernels.gluon.run import Kept, PlanOnGpu
from fa3_kernels.plan.append import Append, append_call
from fa3_kernels.plan.call import Call
from fa3_kernels.plan.request import TMA_BYTES

_bound = Kept()  # by what a call depends on: the call, and its kernel once it is compiled


def _rotary_dim(q: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> int:
    """Check the angles, and return how many channels they rotate: 0 without angles.

    ValueError for one of two tables, and for tables of another shape, dtype or device than they must have.
    """
    if cos is None and sin is None:
        return 0
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin must be given together")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x.ndim != 2 or x.shape != cos.shape or x.dtype != q.dtype or x.device != q.device or not x.is_contiguous():
            raise ValueError(
                f"{name} must be {q.dtype} (positions, rotary_dim / 2) on {q.device}, contiguous, as the other, "
                f"got {x.dtype} {(*x.shape,)}"
            )
    return 2 * cos.shape[1]


def append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache: Paged,
    starts_k: torch.Tensor,
    rotary: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    *,
    is_interleaved: bool,
    steps_queries: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write new keys and values to a cache, behind those it has.

    Parameters
    ----------
    q, k, v : (total, heads, head_dim)
    k_cache, v_cache : (pages, page_size, nheads_kv, head_dim)
    cache : Paged
    starts_k : int32 (batch + 1,)
        Of the rows of k and v.
    rotary : rotary_cos, rotary_sin, and int32 (batch,) positions
        Without cos and sin nothing is rotated; without positions those are ``cache.seqused_k``.
    is_interleaved : bool
        Whether channels 2 i and 2 i + 1 are rotated together, else i and i + rotary_dim / 2.
    steps_queries : bool
        Whether the position of a query grows with its row.

    Returns
    -------
    q : a rotated copy, or q itself where nothing is rotated
    seqused_k : int32 (batch,)
        The keys that there are now.

    Raises
    ------
    ValueError
        For tensors that the kernel does not take.
    """
    cos, sin, positions = rotary
    device = q.device
    tensors = (q, k, v, k_cache, v_cache)
    counted = (cache.cu_seqlens_q, starts_k, cache.seqused_k, cache.page_table, cache.first_keys, *rotary)
    key = (
        *[(x.shape, x.stride(), x.dtype, x.device) for x in tensors],
        *[x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in counted],
        cache.page_size,
        is_interleaved,
        steps_queries,
    )
    found: tuple[Call, PlanOnGpu] | None = _bound.get(key)
    if found is None:
        batch = cache.cu_seqlens_q.numel() - 1
        rotary_dim = _rotary_dim(q, cos, sin)
        check_tensor("cu_seqlens_k_new", starts_k, (batch + 1,), torch.int32, device)
        if positions is not None:
            check_tensor("rotary_seqlens", positions, (batch,), torch.int32, device)
        check_cache(q, cache)
        layouts = (operand(q), operand(k), operand(v), operand(k_cache), operand(v_cache))
        of = Append(*layouts, cache.page_size, batch, rotary_dim, is_interleaved, steps_queries)
        found = append_call(of), PlanOnGpu({}, device)
        _bound.keep(key, found)
    call, on_gpu = found
    rotated = torch.empty_like(q, memory_format=torch.contiguous_format) if cos is not None else q
    used = torch.empty_like(cache.seqused_k)
    entries = cache.page_table.shape[1]
    named = {"q": q, "q_rotated": rotated, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    values = {name: x.data_ptr() for name, x in named.items()}
    if any(address % TMA_BYTES for address in values.values()):
        raise ValueError("addresses of q, k, v and of the cache must be multiples of 16 bytes")
    values |= {
        "rotary_cos": used.data_ptr() if cos is None else cos.data_ptr(),
        "rotary_sin": used.data_ptr() if sin is None else sin.data_ptr(),
        "starts_q": cache.cu_seqlens_q.data_ptr(),
        "starts_k": starts_k.data_ptr(),
        "seqlens": cache.seqused_k.data_ptr(),
        "rotary_seqlens": (cache.seqused_k if positions is None else positions).data_ptr(),
        "page_table": cache.page_table.data_ptr(),
        "used": used.data_ptr(),
        "rows_q": q.shape[0],
        "rows_k": k.shape[0],
        "rows": max(0 if cos is None else q.shape[0], k.shape[0], used.numel()),
        "table_row": cache.page_table.stride(0),
        "room": entries * min(cache.page_size, k_cache.shape[1]),
        "angles": 0 if cos is None else cos.shape[0],
    }
    on_gpu.run_anywhere((call,), values, device)
    return rotated, used
