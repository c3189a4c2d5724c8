"""Arguments of a call beside q, k and v, and their checks: descales, starts of packed sequences, pages, sinks.

The public functions and the framework adapters make these records; the launches in this folder take them.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, cast

import torch

from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require


class Descales(NamedTuple):
    """Descales of e4m3 operands, float32 (batch, heads) or (batch, heads, blocks), and rows per block of q, k and v.

    A descale multiplies the stored operand to give its value; None counts as 1, and 0 rows as one block. Values must be
    finite and > 0, which is not checked: that would wait for the GPU.
    """

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    blocks: tuple[int, int, int] = (0, 0, 0)


class Packed(NamedTuple):
    """Starts of packed sequences, int32 (batch + 1,) on the GPU of q, and the longest lengths there may be.

    The starts are read on the GPU alone. They must rise from 0 to the number of rows, and no sequence may be longer
    than the longest lengths say; checking either would take a wait. Starts that break this rule read and write nothing
    outside the tensors, but rows beyond the longest length are not computed.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class Paged(NamedTuple):
    """Says where queries and the keys of a cache are: :class:`Packed` where keys lie in pages.

    Parameters
    ----------
    cu_seqlens_q : int32 (batch + 1,)
        As of :class:`Packed`.
    seqused_k : int32 (batch,)
        Keys of each sequence, read on the GPU alone; more than the page table has room for are cut.
    max_seqlen_q, max_seqlen_k : int
        As of :class:`Packed`: longer sequences are cut to them.
    page_table : int32 (batch, entries)
        Pages of each sequence in order. Entries behind its last key are not read, and may be anything; those before
        must be pages of the cache: not checked, for that would take a wait.
    first_keys : int32 (batch,)
        Where the keys of each sequence begin in the cache.
    page_size : int
        Keys of a page; :data:`fa3_kernels.plan.request.ONE_PAGE` where a sequence has one page.
    schedule : int32 (any,), optional
        Of :func:`fa3_kernels.scheduler.get_scheduler_metadata`; one that is not for this launch is not read.
    new_keys : int
        What ``seqused_k`` has beyond what the cache had before the call: 0 for nothing, 1 for packed rows, n + 1 for n
        rows of every sequence.
    """

    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    page_table: torch.Tensor
    first_keys: torch.Tensor
    page_size: int
    schedule: torch.Tensor | None = None
    new_keys: int = 0


NO_DESCALES = Descales()


def whole(name: str, number: Any) -> int:
    """Return a number that a caller gave as an int.

    A number on the GPU is waited for, a traced one stays as it is. ValueError for anything but an integer.
    """
    if isinstance(number, int | torch.SymInt):
        return cast(int, number)
    try:
        return operator.index(number)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {number!r}") from None


def packed_by(starts_q: torch.Tensor | None, starts_k: torch.Tensor | None, max_q: Any, max_k: Any) -> Packed:
    """Return the starts and longest lengths that a caller gave as a record; ValueError where one of two starts is
    None.
    """
    if starts_q is None or starts_k is None:
        missing = "cu_seqlens_q" if starts_q is None else "cu_seqlens_k"
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must be given together, got None for {missing}")
    return Packed(starts_q, starts_k, whole("max_seqlen_q", max_q), whole("max_seqlen_k", max_k))


def with_used(
    q: torch.Tensor, packed: Packed, seqused_q: torch.Tensor | None, seqused_k: torch.Tensor | None
) -> tuple[Packed, int]:
    """Return starts by which only the first rows of every sequence meet, and how many sequences stand for one.

    Queries behind the used ones become a sequence of their own without a key, and such keys one without a query, so
    that every kernel takes them, and none reads or writes more. Lengths are read on the GPU alone.

    Parameters
    ----------
    q : (total_q, nheads, head_dim)
    packed : Packed
    seqused_q, seqused_k : int32 (batch,), optional
        Rows that count of every sequence; None for all.

    Raises
    ------
    ValueError
        For lengths of another shape or dtype, and as :func:`check_starts`.
    """
    if seqused_q is None and seqused_k is None:
        return packed, 1
    check_starts(q, packed)
    stops = []
    for name, starts, used in (
        ("seqused_q", packed.cu_seqlens_q, seqused_q),
        ("seqused_k", packed.cu_seqlens_k, seqused_k),
    ):
        stop = starts[1:]
        if used is not None:
            check_tensor(name, used, tuple(stop.shape), torch.int32, q.device, is_strided=True)
            stop = torch.minimum(starts[:-1] + used.clamp(min=0), stop)
        stops.append(stop)
    stop_q, stop_k = stops
    of_q = [packed.cu_seqlens_q[:-1]]
    of_k = [packed.cu_seqlens_k[:-1]]
    if seqused_q is not None:
        of_q.append(stop_q)
        of_k.append(stop_k)
    if seqused_k is not None:
        of_q.append(packed.cu_seqlens_q[1:])
        of_k.append(stop_k)
    starts_q, starts_k = (
        torch.cat([torch.stack(parts, 1).flatten(), starts[-1:]])
        for parts, starts in ((of_q, packed.cu_seqlens_q), (of_k, packed.cu_seqlens_k))
    )
    return packed._replace(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k), len(of_q)


def packed_of(problem: AttentionProblem) -> Packed | None:
    """Return the starts of a problem's packed sequences on a GPU; None for a problem without packed sequences."""
    if not problem.is_varlen:
        return None
    of_q, of_k = (torch.from_numpy(x).to("cuda") for x in (problem.cu_seqlens_q, problem.cu_seqlens_k))
    return Packed(of_q, of_k, problem.seqlen_q, problem.seqlen_k)


def check_starts(q: torch.Tensor, packed: Packed | Paged) -> None:
    """Raise ValueError for starts that the kernels cannot read; what they hold is seen on the GPU alone.

    For a cache :func:`check_cache` is asked.
    """
    if isinstance(packed, Paged):
        check_cache(q, packed)
        return
    a = packed.cu_seqlens_q.numel()
    b = packed.cu_seqlens_k.numel()
    check_tensor("cu_seqlens_q", packed.cu_seqlens_q, (max(a, 2),), torch.int32, q.device)  # batch + 1
    check_tensor("cu_seqlens_k", packed.cu_seqlens_k, (max(b, 2),), torch.int32, q.device)
    require(a == b, f"cu_seqlens_q and cu_seqlens_k must have one length, got {a} and {b}")


def check_cache(q: torch.Tensor, cache: Paged) -> None:
    """Raise ValueError for lengths and a page table of a cache that the kernels cannot read."""
    batch = cache.cu_seqlens_q.numel() - 1
    table = cache.page_table
    columns = max(1, table.shape[1]) if table.ndim == 2 else 1
    wanted = {"cu_seqlens_q": (batch + 1,), "seqused_k": (batch,), "page_table": (batch, columns)}
    for name, shape in (wanted | {"first_keys": (batch,)}).items():
        check_tensor(name, getattr(cache, name), shape, torch.int32, q.device)


def has_schedule(cache: Paged, size: int) -> bool:
    """Tell whether a cache comes with a schedule for its launch, whose size is ``size`` and the number of new keys."""
    x = cache.schedule
    if x is None or x.shape != (size + cache.new_keys,) or x.dtype != torch.int32 or not x.is_contiguous():
        return False
    return x.device == cache.seqused_k.device and x.data_ptr() % 16 == 0


def check_tensor(
    name: str,
    x: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_strided: bool = False,
) -> None:
    """Raise ValueError unless a tensor has a shape and a dtype, is on a device, and its last dimension is contiguous,
    which does not matter where it ``is_strided``.
    """
    is_read = is_strided or x.is_contiguous() or x.stride(-1) == 1
    if x.dtype != dtype or tuple(x.shape) != shape or x.device != device or not is_read:
        wanted = f"{str(dtype).removeprefix('torch.')} {shape}{'' if is_strided else ', contiguous,'} on {device}"
        given = f"{x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}"
        raise ValueError(f"{name} must be {wanted}, got {given}")
