"""The launch that writes new keys and values to a cache, and rotates them and the queries, described as values.

:mod:`fa3_kernels.gluon.launch_append` runs the call, and the audit compiles it; the kernel is
:mod:`fa3_kernels.gluon.append`.
"""

from __future__ import annotations

from typing import NamedTuple

from fa3_kernels.plan.call import Call, LaunchNumber, Pointer
from fa3_kernels.plan.config import require
from fa3_kernels.plan.request import TensorLayout, pages_of
from fa3_kernels.plan.tiles import power_of_two

HEADS = 8  # heads of a row that are moved together


class Append(NamedTuple):
    """Says what is written where: tensors with rows in front, pages, and how they are rotated.

    Parameters
    ----------
    q, k, v : (total, heads, head_dim)
    k_cache, v_cache : (pages, page_size, nheads_kv, head_dim)
    page_size : int
        As of :func:`fa3_kernels.plan.request.pages_of`.
    batch : int
    rotary_dim : int
        Channels that are rotated; with 0 nothing is rotated and q is not copied.
    is_interleaved : bool
        Whether channels 2 i and 2 i + 1 are rotated together, else i and i + rotary_dim / 2.
    steps_queries : bool
        Whether the position of a query grows with its row; otherwise all queries of a sequence have one.
    """

    q: TensorLayout
    k: TensorLayout
    v: TensorLayout
    k_cache: TensorLayout
    v_cache: TensorLayout
    page_size: int
    batch: int
    rotary_dim: int
    is_interleaved: bool
    steps_queries: bool


def append_call(of: Append) -> Call:
    """Return the call; ValueError for tensors or a rotation that the kernel does not take."""
    pages = pages_of(of.k_cache, of.v_cache, of.page_size)
    nheads_kv = of.k_cache.shape[-2]
    for name, x, cache in (("k", of.k, of.k_cache), ("v", of.v, of.v_cache)):
        fits = len(x.shape) == 3 and x.shape[1:] == cache.shape[-2:] and x.shape[0] == of.k.shape[0]
        require(
            fits and x.dtype == cache.dtype and x.strides[-1] == 1 and x.device == cache.device,
            f"{name} must have the heads, channels and dtype of {name}_cache, contiguous channels and the rows of k, "
            f"got {x.dtype} {x.shape} for {cache.dtype} {cache.shape}",
        )
    is_rotary = of.rotary_dim > 0
    require(
        of.rotary_dim % 16 == 0 and of.rotary_dim <= of.q.shape[-1],
        f"rotary_dim must be a multiple of 16, at most head_dim {of.q.shape[-1]}, got {of.rotary_dim}",
    )
    dtype = of.q.dtype
    arguments = (
        *(Pointer(name, dtype) for name in ("q", "q_rotated", "k", "v", "k_cache", "v_cache")),
        *(Pointer(name, dtype if is_rotary else "int32") for name in ("rotary_cos", "rotary_sin")),
        *(
            Pointer(name, "int32")
            for name in ("starts_q", "starts_k", "seqlens", "rotary_seqlens", "page_table", "used")
        ),
        *(LaunchNumber(name) for name in ("rows_q", "rows_k", "table_row", "room", "angles")),
        of.batch,
        *pages[:2],
        *of.q.strides[:2],
        *of.k.strides[:2],
        *of.v.strides[:2],
        *of.k_cache.strides[1:3],
        *of.v_cache.strides[1:3],
        of.q.shape[1],
        nheads_kv,
        of.q.shape[2],
        of.v.shape[2],
        of.rotary_dim,
        of.is_interleaved,
        of.steps_queries,
        HEADS,
        power_of_two(of.q.shape[2]),
        power_of_two(of.v.shape[2]),
    )
    return Call("append", arguments, (LaunchNumber("rows"),), {"num_warps": 4, "enable_fp_fusion": False})
