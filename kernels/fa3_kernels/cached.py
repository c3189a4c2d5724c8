"""Attention over a cache of keys and values: pages, lengths on the GPU, new keys, rotary positions, sinks.

This is the function of a serving engine; :mod:`fa3_kernels.api` has those for operands without a cache. Keys lie in the
pages that a page table names; without a page table each sequence has one page, which is its row of the cache. Both are
one launch (:mod:`fa3_kernels.gluon.launch`), whose schedule the GPU makes from lengths that the host never reads. New
keys and rotary positions are written by another launch in front of it (:mod:`fa3_kernels.gluon.launch_append`).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from fa3_kernels.gluon.arguments import Paged, whole
from fa3_kernels.gluon.launch import forward
from fa3_kernels.gluon.launch_append import append
from fa3_kernels.operators import (
    PROMOTION_INTERVAL,
    WithoutGradient,
    contiguous,
    descales_of,
    factors_of,
    options_of,
    refuse,
    returned,
    wants_gradient,
)
from fa3_kernels.plan.request import ONE_PAGE


@lru_cache(maxsize=256)
def numbers(first: int, step: int, count: int, device: torch.device) -> torch.Tensor:
    """Return ``first``, ``first + step``, ... as int32 (count,) on a device; kept for all calls with these arguments.

    RuntimeError while a CUDA graph is captured and the numbers are not on the GPU yet: a copy cannot be captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a call whose tables are not on the GPU cannot be captured: run it once before")
    return torch.from_numpy(first + step * np.arange(count, dtype=np.int32)).to(device)


def _queries(
    q: torch.Tensor, cu_seqlens_q: torch.Tensor | None, max_seqlen_q: int | None
) -> tuple[torch.Tensor, int, int]:
    """Return the starts of the query sequences, int32 (batch + 1,), their number, and the longest length.

    Without ``cu_seqlens_q`` q is (batch, seqlen_q, nheads, head_dim) and all lengths are seqlen_q. ValueError for
    starts without ``max_seqlen_q``, and for a q of another rank.
    """
    if cu_seqlens_q is not None:
        if max_seqlen_q is None:
            raise ValueError("cu_seqlens_q needs max_seqlen_q, the longest sequence of queries there may be")
        return cu_seqlens_q, cu_seqlens_q.numel() - 1, whole("max_seqlen_q", max_seqlen_q)
    if q.ndim != 4:
        raise ValueError(
            f"q must be (batch, seqlen_q, nheads, head_dim), or packed with cu_seqlens_q, got {(*q.shape,)}"
        )
    batch, seqlen_q = q.shape[:2]
    return numbers(0, seqlen_q, batch + 1, q.device), batch, seqlen_q


def _paged(
    k_cache: torch.Tensor,
    queries: tuple[torch.Tensor, int, int],
    max_seqlen_k: int | None,
    cache_seqlens: int | torch.Tensor | None,
    page_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    schedule: torch.Tensor | None,
) -> Paged:
    """Return where the queries and the keys of a cache are, as the launch takes it.

    Without a page table every sequence has one page: its row of the cache. ``cache_seqlens`` None means as many keys as
    the cache has room for, ``cache_leftpad`` None that keys begin at 0, ``max_seqlen_k`` None that any number of keys
    with room may come. ValueError for a cache or a table of another rank.
    """
    starts, batch, longest_q = queries
    device = starts.device
    if k_cache.ndim != 4:
        raise ValueError(f"k_cache must be (batch or pages, rows, nheads_kv, head_dim), got {(*k_cache.shape,)}")
    page_size = room = k_cache.shape[1]  # room: keys of a sequence that the cache can hold
    if page_table is None:
        rows = numbers(0, 1, batch, device) if cache_batch_idx is None else cache_batch_idx
        page_table = rows[:, None]
        page_size = ONE_PAGE
    else:
        if page_table.ndim != 2:
            raise ValueError(f"page_table must be int32 (batch, entries), got {(*page_table.shape,)}")
        if cache_batch_idx is not None:
            page_table = page_table.index_select(0, cache_batch_idx)
        room *= page_table.shape[-1]
    if cache_seqlens is None:
        cache_seqlens = numbers(room, 0, batch, device)
    elif isinstance(cache_seqlens, torch.Tensor):
        cache_seqlens = cache_seqlens.contiguous()
    else:
        cache_seqlens = torch.full((batch,), whole("cache_seqlens", cache_seqlens), dtype=torch.int32, device=device)
    first_keys = numbers(0, 0, batch, device) if cache_leftpad is None else cache_leftpad
    longest_k = room if max_seqlen_k is None else min(whole("max_seqlen_k", max_seqlen_k), room)
    return Paged(starts, cache_seqlens, longest_q, longest_k, page_table, first_keys, page_size, schedule)


def flash_attn_with_kvcache(  # noqa: PLR0913 (upstream's signature)
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | float | None = None,
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: torch.Tensor | None = None,
    max_seqlen_k: int | None = None,
    promotion_interval: int = PROMOTION_INTERVAL,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attention over a cache of keys and values with FlashAttention-3's signature; it has no gradient.

    Operands may require one, as upstream's may; a backward through the output then raises a ValueError. Nothing waits
    for the GPU: lengths and pages are read there alone, so that a call can be captured by a CUDA graph that is replayed
    while they change. What lies in the cache behind a sequence's last key, NaN included, is not seen.

    Parameters
    ----------
    q : float16, bfloat16 or float8_e4m3fn (batch, seqlen_q, nheads, head_dim), on a Hopper GPU
        Or, with ``cu_seqlens_q``, (total_q, nheads, head_dim). As of :func:`fa3_kernels.api.flash_attn_func`.
    k_cache, v_cache : same dtype (batch_cache, seqlen_cache, nheads_kv, head_dim or head_dim_v)
        With ``page_table`` (pages, page_size, nheads_kv, head_dim or head_dim_v), of any page_size. TMA copies pages of
        multiples of 8 keys (32 in e4m3) that divide the keys of a tile (128; 64 for 16 bits beyond head_dim 128), or
        are multiples of them, and threads copy others row by row. Heads and rows may lie in any order, the pages of
        both a whole number of rows apart.
    k, v : same dtype (batch, seqlen_new, nheads_kv, head_dim or head_dim_v), optional
        Written to the cache behind ``cache_seqlens`` before attention, as far as it has room. With ``cu_seqlens_k_new``
        (total_new, nheads_kv, head_dim or head_dim_v).
    qv : None
        Refused unless None.
    rotary_cos, rotary_sin : dtype of q (seqlen_ro, rotary_dim / 2), optional
        Rotate k at its positions and q at those from ``cache_seqlens`` on, or all of q at ``cache_seqlens`` where
        neither a causal mask nor a window hides keys. Where k is given alone. Their last row serves all positions
        behind it.
    cache_seqlens : int32 (batch,), or int, optional
        Keys in the cache, those in front of ``cache_leftpad`` counted; by default as many as fit.
    cache_batch_idx : int32 (batch,), optional
        The row of the cache, or of the page table, of each sequence.
    cache_leftpad : int32 (batch,), optional
        Where the keys of each sequence begin, in its row or its pages.
    page_table : int32 (batch, entries), optional
        Pages of each sequence, in order. Entries behind its last key may be anything; others must be pages of the
        cache, which is not checked, for that would take a wait.
    cu_seqlens_q : int32 (batch + 1,), optional
        Starts of packed queries; needs ``max_seqlen_q``.
    cu_seqlens_k_new : int32 (batch + 1,), optional
        Starts of packed k and v; without them it is ignored.
    max_seqlen_q : int, optional
        At least the longest sequence of packed queries. Rows beyond are not computed.
    rotary_seqlens : int32 (batch,), optional
        Positions to rotate from, instead of ``cache_seqlens``; ignored where nothing is rotated.
    q_descale, k_descale, v_descale : float32 (batch, nheads_kv), or float, optional
        FP8 only: as of :func:`fa3_kernels.api.flash_attn_func`.
    softmax_scale : float, optional
        1 / sqrt(head_dim) by default; > 0.
    causal : bool
        Whether keys behind the diagonal are hidden, which is aligned bottom-right in every sequence.
    window_size : (int, int)
        Keys visible left and right of the diagonal, inclusive; -1 is unlimited.
    attention_chunk : int
        Keys of a chunk, 0 for none: a query sees no key outside the one that holds its diagonal.
    softcap : float
        c > 0 replaces scores x by c * tanh(x / c).
    rotary_interleaved : bool
        Whether channels 2 i and 2 i + 1 are rotated together; else i and i + rotary_dim / 2.
    scheduler_metadata : int32, optional
        Of :func:`fa3_kernels.scheduler.get_scheduler_metadata`, which says for which calls it is; other calls make
        their own schedule. The lengths are then those from which it was made.
    num_splits : int
        Parts of the keys, merged in a fixed order; 0 chooses from the shape and ``max_seqlen_k``. Bits depend on it.
    pack_gqa : bool, optional
        Chosen from the shape by default. No bit depends on it.
    sm_margin : int
        Multiprocessors that the launch leaves to others.
    return_softmax_lse : bool
        Whether lse is returned as well, and two empty tensors where upstream has the partial results of splits.
    sinks : float32 (nheads,), optional
        Not upstream's. A score of every head, in nats, that takes part in the softmax of its rows and has no value. One
        that is 77 nats or more above a row's largest score may overflow, as in the builds of FlashAttention-3 that take
        sinks.
    max_seqlen_k : int, optional
        Not upstream's. At least the longest sequence of keys, new ones counted, for which num_splits is chosen; by
        default as many as fit. Not checked, for that would take a wait: keys beyond are not seen.
    promotion_interval : int
        Not upstream's. FP8 only: keys after which P V is added to fp32; 0 chains as upstream does.
    out : like the result, optional
        Not upstream's. The output is copied into it, and it is returned.

    Returns
    -------
    out : float16 or bfloat16 (batch, seqlen_q, nheads, head_dim_v), or (total_q, nheads, head_dim_v)
        The bits of :func:`fa3_kernels.api.flash_attn_varlen_func` over the keys in one piece, with the same splits.
    lse : float32 (batch, nheads, seqlen_q), or (nheads, total_q)
        Natural logarithm, with ``return_softmax_lse`` alone; it includes the sink. Rows without a key are -inf, or the
        sink.

    Raises
    ------
    ValueError
        For anything the kernels do not take, in one line.

    Examples
    --------
    >>> import torch
    >>> q = torch.randn(2, 1, 8, 64, dtype=torch.bfloat16, device="cuda")  # doctest: +SKIP
    >>> cache = torch.randn(2, 40, 16, 2, 64, dtype=torch.bfloat16, device="cuda")  # doctest: +SKIP
    >>> pages = torch.randperm(40, dtype=torch.int32, device="cuda").view(2, 20)  # doctest: +SKIP
    >>> lengths = torch.tensor([300, 17], dtype=torch.int32, device="cuda")  # doctest: +SKIP
    >>> flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, page_table=pages).shape  # doctest: +SKIP
    torch.Size([2, 1, 8, 64])
    """
    refuse(qv)
    leaves = [x for x in (q, k_cache, v_cache, k, v, sinks) if x is not None]
    q = contiguous(q)
    cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens = map(contiguous, (cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens))
    cache_batch_idx, cache_leftpad, page_table = map(contiguous, (cache_batch_idx, cache_leftpad, page_table))
    queries = _queries(q, cu_seqlens_q, max_seqlen_q)
    starts, batch, longest_q = queries
    paged = _paged(
        k_cache, queries, max_seqlen_k, cache_seqlens, page_table, cache_batch_idx, cache_leftpad, scheduler_metadata
    )
    rows = q if cu_seqlens_q is not None else q.flatten(0, 1)
    left, right = map(int, window_size)
    if (k is not None or v is not None) and q.numel():  # as upstream's, which writes nothing where nobody asks
        if k is None or v is None or cache_seqlens is None:
            raise ValueError("k, v and cache_seqlens must be given together")
        k = contiguous(k)
        v = contiguous(v)
        starts_k = cu_seqlens_k_new
        new_keys = 1
        if starts_k is None:
            new_keys = k.shape[1] + 1
            starts_k = numbers(0, k.shape[1], batch + 1, q.device)
            k = k.flatten(0, 1)
            v = v.flatten(0, 1)
        rows, used = append(
            rows,
            k,
            v,
            k_cache,
            v_cache,
            paged,
            starts_k,
            (rotary_cos, rotary_sin, None if rotary_cos is None else rotary_seqlens),
            is_interleaved=rotary_interleaved,
            steps_queries=causal or attention_chunk > 0 or (left, right) != (-1, -1),
        )
        paged = paged._replace(seqused_k=used, new_keys=new_keys)
    elif k is None and (rotary_cos is not None or rotary_sin is not None):
        raise ValueError("rotary_cos and rotary_sin rotate new keys: they need k and v, which are None")
    factors = factors_of(q_descale, k_descale, v_descale, k_cache, starts)
    interval = promotion_interval if q.dtype is torch.float8_e4m3fn else None
    semantics, choices = options_of(
        softmax_scale, causal, (left, right, attention_chunk), softcap, num_splits, pack_gqa, interval, sm_margin
    )
    if cache_leftpad is not None and page_table is not None:
        choices = choices._replace(gathers_pages=True)
    found, lse = forward(
        rows,
        k_cache,
        v_cache,
        semantics,
        choices,
        descales=descales_of(*factors, (0, 0, 0)),
        packed=paged,
        sinks=sinks if sinks is None or sinks.dtype is torch.float32 else sinks.float(),
        needs_lse=return_softmax_lse,
    )
    if cu_seqlens_q is None:
        found = found.view(batch, longest_q, q.shape[2], v_cache.shape[-1])
        if return_softmax_lse:  # contiguous, as upstream's
            lse = lse.view(q.shape[2], batch, longest_q).transpose(0, 1).contiguous()
    found = returned(found, out)
    if wants_gradient(*leaves):
        found, lse = WithoutGradient.apply(found, lse, *leaves)
    return (found, lse, *lse.new_empty((2, 0))) if return_softmax_lse else found
