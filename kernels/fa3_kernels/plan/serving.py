"""This module says which tiles the builds of FlashAttention-3 take that serve: vLLM's and SGLang's.

Sources: hopper/tile_size.h, hopper/heuristics.h and hopper/flash_api.cpp of vllm-project/flash-attention (617264c1) and
of sgl-project/sgl-attn. SGLang's decode tile of e4m3 is in no published source; outputs of sglang-kernel 0.4.5 show it.
Splits and packing are those of :mod:`fa3_kernels.plan.heuristics`. Pages are those that TMA does not copy; where pages
are powers of two, a copy by TMA has the same tile.
"""

from __future__ import annotations

from fa3_kernels.plan.family import Shipped
from fa3_kernels.plan.heuristics import flash3_mask
from fa3_reference.problem import AttentionProblem

# Rows of vLLM's tiles and their keys: causal, dense, causal and dense over pages, with a window.
_VLLM = {
    64: (192, (128, 192, 128, 160, 160)),
    96: (192, (144, 144, 128, 128, 128)),
    128: (128, (128, 160, 128, 128, 128)),
    192: (128, (96, 96, 96, 96, 96)),
    256: (128, (80, 80, 80, 80, 64)),
}
_VLLM_NARROW_V = (128, (128, 128, 96, 96, 96))  # head_dim 192 with head_dim_v of at most 128
_VLLM_FP8 = {64: (192, 128), 96: (128, 128), 128: (128, 192), 192: (128, 96), 256: (128, 128)}


def _is_paged(problem: AttentionProblem) -> bool:
    return problem.cache is not None and problem.cache.page_size > 0


def _kind(problem: AttentionProblem) -> tuple[int, bool]:
    """Return the column of a table, and whether the longest queries of the *whole batch* fit one warpgroup.

    One query over pages stays causal at head dims of (64, 128], where the keys of a tile follow from it.

    >>> [_kind(AttentionProblem(1, 8, 2, n, 2000, 128, causal=True)) for n in (1, 16, 17)]
    [(1, True), (0, True), (0, False)]
    """
    is_causal, is_local = flash3_mask(problem)
    is_paged = _is_paged(problem)
    is_causal = is_causal or (is_paged and problem.causal and 64 < problem.head_dim <= 128)
    is_compiled = problem.head_dim in (64, 128) and problem.head_dim_v == problem.head_dim and not is_local
    return 4 if is_local else 2 * is_paged + (not is_causal), is_compiled and problem.seqlen_q * problem.group <= 64


def vllm_tile(problem: AttentionProblem) -> Shipped:
    """Return the tile of vLLM's build; of e4m3 smaller than upstream's, as a second accumulator takes registers."""
    column, is_one = _kind(problem)
    head_dim = next(size for size in _VLLM if problem.head_dim <= size)
    if problem.dtype == "e4m3":
        rows, keys = (64, 128 if head_dim == 64 else 96) if is_one else _VLLM_FP8[head_dim]
        return Shipped(rows, 64 if (head_dim, column) == (256, 4) else keys)
    if is_one:
        return Shipped(64, 192 if head_dim == 64 else 176 if column == 1 else 128)
    is_narrow = head_dim == 192 and problem.head_dim_v <= 128
    rows, keys_by_kind = _VLLM_NARROW_V if is_narrow else _VLLM[head_dim]
    return Shipped(rows, keys_by_kind[column])


def sglang_tile(problem: AttentionProblem) -> Shipped:
    """Return the tile of SGLang's build at head_dim 128, the one that was recorded."""
    column, is_one = _kind(problem)
    if problem.dtype != "e4m3":
        return Shipped(128, 176 if column == 1 else 128)
    return Shipped(64, 96) if is_one else Shipped(128, 160 if _is_paged(problem) else 224)
