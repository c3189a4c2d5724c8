"""The tile schedule of attention over a cache, made in front of the calls that share it, such as all layers' of a step.

It is the work of the first kernel of such a call, :mod:`fa3_kernels.gluon.packed_order`.
"""

from __future__ import annotations

import torch

from fa3_kernels.cached import numbers
from fa3_kernels.gluon import launch
from fa3_kernels.gluon.arguments import Paged, check_cache, whole
from fa3_kernels.gluon.run import Kept, PlanOnGpu
from fa3_kernels.operators import options_of
from fa3_kernels.plan.choose import longest
from fa3_kernels.plan.plan import plan_of
from fa3_kernels.plan.request import ONE_PAGE, request_of

_bound = Kept()  # by the request: the kernel once it is compiled


def get_scheduler_metadata(  # noqa: PLR0913 (upstream's signature)
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    total_q: int | None = None,
) -> torch.Tensor:
    """Make the schedule of calls of :func:`fa3_kernels.cached.flash_attn_with_kvcache`, which then start a kernel less.

    It is for calls with these sizes and options, and holds the lengths: make it again when they change, in the memory
    of the old one (``copy_``) where a CUDA graph reads it. Its size differs from that for most other calls, and a call
    reads none of another size than its own. Of two kinds of calls with schedules of one size, which sizes and options
    make about one in a thousand, one must not be given the schedule of the other.

    Parameters
    ----------
    batch_size : int
        Sequences.
    max_seqlen_q : int
        Queries of a sequence, or the longest sequence of packed ones.
    max_seqlen_k : int
        The call's ``max_seqlen_k`` if it has one, else the keys for which a sequence of the cache has room.
    num_heads_q, num_heads_kv, headdim : int
        Of q and k_cache.
    cache_seqlens : int32 (batch,)
        Keys in the cache in front of the call.
    qkv_dtype : torch.dtype
        Of q and the cache.
    headdim_v : int, optional
        Of v_cache; headdim by default.
    cu_seqlens_q : int32 (batch + 1,), optional
        Starts of packed queries, with ``total_q``.
    cu_seqlens_k_new : int32 (batch + 1,), optional
        Starts of packed new keys, which the schedule counts.
    cache_leftpad : int32 (batch,), optional
        As of the call.
    page_size : int, optional
        None for a cache without a page table.
    max_seqlen_k_new : int
        New keys of every sequence, if they are not packed. A call without new keys does not read a schedule with some.
    causal : bool
        This and what follows as of the call.
    window_size : (int, int)
        Keys visible left and right of the diagonal.
    attention_chunk : int
        Keys of a chunk.
    has_softcap : bool
        Whether the call has a softcap.
    num_splits : int
        Parts of the keys; 0 chooses.
    pack_gqa : bool, optional
        Chosen from the shape by default.
    sm_margin : int
        Multiprocessors that are left to others.
    total_q : int, optional
        Not upstream's. Rows of packed queries; by default as many as batch_size sequences of the longest would have.

    Returns
    -------
    scheduler_metadata : int32 (any,), on the GPU of ``cache_seqlens``
        The lengths and the tiles of every CTA, for ``flash_attn_with_kvcache(scheduler_metadata=...)``.

    Raises
    ------
    ValueError
        For anything the kernels do not take, in one line.

    Examples
    --------
    >>> used = torch.tensor([300, 17], dtype=torch.int32, device="cuda")  # doctest: +SKIP
    >>> made = get_scheduler_metadata(2, 1, 320, 8, 2, 64, used, page_size=16)  # doctest: +SKIP
    """
    device = cache_seqlens.device
    longest_q = whole("max_seqlen_q", max_seqlen_q)
    longest_k = whole("max_seqlen_k", max_seqlen_k)
    new_keys = whole("max_seqlen_k_new", max_seqlen_k_new)
    used = cache_seqlens.contiguous()
    if cu_seqlens_k_new is not None:
        used = used + (cu_seqlens_k_new[1:] - cu_seqlens_k_new[:-1]).clamp(min=0)
        new_keys = 1
    elif new_keys:
        used = used + new_keys
        new_keys += 1
    cache = Paged(
        cu_seqlens_q=numbers(0, longest_q, batch_size + 1, device) if cu_seqlens_q is None else cu_seqlens_q,
        seqused_k=used,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        page_table=numbers(0, 1, batch_size, device)[:, None],  # which no schedule depends on
        first_keys=numbers(0, 0, batch_size, device) if cache_leftpad is None else cache_leftpad,
        page_size=page_size or ONE_PAGE,
    )
    check_cache(used, cache)
    left, right = map(int, window_size)
    semantics, choices = options_of(
        None, causal, (left, right, attention_chunk), float(has_softcap), num_splits, pack_gqa, None, sm_margin
    )
    choices = choices._replace(gathers_pages=cache_leftpad is not None and page_size is not None)
    rows = batch_size * longest_q if total_q is None or cu_seqlens_q is None else total_q
    of_k = (1, page_size or max(1, longest_k), num_heads_kv)
    shapes = ((rows, num_heads_q, headdim), (*of_k, headdim), (*of_k, headdim_v or headdim))
    operands = (torch.empty(shape, dtype=qkv_dtype, device="meta") for shape in shapes)
    on_gpu = launch.operand(used).device
    request = request_of(
        tuple(launch.operand(x)._replace(device=on_gpu) for x in operands),
        semantics,
        choices,
        packed=(batch_size, longest(longest_q), longest(longest_k)),
        page_size=cache.page_size,
    )
    plan = plan_of(request, max(1, launch.num_sms(device) - choices.sm_margin))
    calls, sizes = plan.launch(rows, 1, (longest_q, longest_k))
    found = torch.empty(sizes["schedule_size"] + new_keys, dtype=torch.int32, device=device)
    values = sizes | {
        "cu_seqlens_q": cache.cu_seqlens_q.data_ptr(),
        "cu_seqlens_k": used.data_ptr(),
        "first_keys": cache.first_keys.data_ptr(),
        "sequences": found.data_ptr(),
        "schedule": found.data_ptr() + 16 * batch_size,
        "out": found.data_ptr(),  # tiles without a key are kept, so that neither out nor lse is written
        "lse": found.data_ptr(),
    }
    kernel = _bound.get(request) or _bound.keep(request, PlanOnGpu({}, device))
    kernel.run_anywhere(calls[:1], values, device)
    return found
