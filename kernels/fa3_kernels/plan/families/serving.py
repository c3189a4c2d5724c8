"""The builds of FlashAttention-3 in serving engines: vLLM's and SGLang's.

Sources: hopper/tile_size.h, hopper/heuristics.h and hopper/flash_api.cpp of vllm-project/flash-attention (617264c1) and
of sgl-project/sgl-attn. SGLang's decode tile of e4m3 is in no published source; outputs of sglang-kernel 0.4.5 show it.
Splits and packing are FlashAttention-3's own (:mod:`fa3_kernels.plan.families.flash3`). The tiles for pages are those
of kernels that copy pages without TMA; where pages are powers of two, kernels that copy by TMA have the same tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fa3_kernels.plan.families.flash3 import ABSORBED, FLASH3, flash3_mask
from fa3_kernels.plan.families.record import Shipped, Sizes, Traits, broken
from fa3_reference.problem import AttentionProblem

# By head_dim: rows of vLLM's tiles, and their keys: causal, dense, causal over pages, dense over pages, with a window.
_VLLM = {
    64: (192, (128, 192, 128, 160, 160)),
    96: (192, (144, 144, 128, 128, 128)),
    128: (128, (128, 160, 128, 128, 128)),
    192: (128, (96, 96, 96, 96, 96)),
    256: (128, (80, 80, 80, 80, 64)),
}
_VLLM_NARROW_V = (128, (128, 128, 96, 96, 96))  # head_dim 192 with head_dim_v of at most 128
# By head_dim: rows and keys of vLLM's e4m3 tiles.
_VLLM_FP8 = {64: (192, 128), 96: (128, 128), 128: (128, 192), 192: (128, 96), 256: (128, 128)}


def _is_paged(problem: AttentionProblem) -> bool:
    """Tell whether keys lie in pages of a cache."""
    return problem.cache is not None and problem.cache.page_size > 0


def _kind(problem: AttentionProblem) -> tuple[int, bool]:
    """Return the column of :data:`_VLLM`, and whether a problem takes the tile of one warpgroup.

    It does where the longest queries of the *whole batch*, times the heads of a group, fit one warpgroup, at the sizes
    that are compiled for it. One query over pages counts as causal at head_dim of more than 64 and at most 128, where
    the keys of a tile depend on that.

    >>> [_kind(AttentionProblem(1, 8, 2, n, 2000, 128, causal=True)) for n in (1, 16, 17)]
    [(1, True), (0, True), (0, False)]
    """
    is_causal, is_local = flash3_mask(problem)
    is_paged = _is_paged(problem)
    is_causal = is_causal or (is_paged and problem.causal and 64 < problem.head_dim <= 128)
    is_compiled = problem.head_dim in (64, 128) and problem.head_dim_v == problem.head_dim and not is_local
    return 4 if is_local else 2 * is_paged + (not is_causal), is_compiled and problem.seqlen_q * problem.group <= 64


def _vllm_tile(problem: AttentionProblem) -> Shipped:
    """Return the tile of vLLM's build; for e4m3 it is small, as a second accumulator takes registers."""
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


def _sglang_tile(problem: AttentionProblem) -> Shipped:
    """Return the tile of SGLang's build at head_dim 128, the one that was recorded."""
    column, is_one = _kind(problem)
    if problem.dtype != "e4m3":
        return Shipped(128, 176 if column == 1 else 128)
    return Shipped(64, 96) if is_one else Shipped(128, 160 if _is_paged(problem) else 224)


def _refuses(problem: AttentionProblem) -> str:
    """Return the rules that a problem breaks, in words: kinds of which no output of a serving build was compared."""
    sizes = (576, 512) if problem.qv else (128, 128)
    is_fp8 = problem.dtype == "e4m3"
    is_other = problem.window != (-1, -1) or problem.sinks
    return broken(
        ((problem.head_dim, problem.head_dim_v) != sizes, "head_dim 128, and 64 with V of 512, alone were compared"),
        (problem.softcap > 0, "no output with softcap was compared"),
        (not any(seq.seqlen_k for seq in problem.sequences()), "no output without a key was compared"),
        (is_fp8 and is_other, "no output of e4m3 with windows or sinks was compared"),
    )


def _serving(
    title: str, version: str, sizes: Sizes, tile: Callable[[AttentionProblem], Shipped], **changes: Any
) -> Traits:
    """Return the traits of FlashAttention-3 as a serving engine builds it.

    It has tiles of 64 rows too, and key tiles that begin where a window does. fp16 was not recorded.
    """
    return replace(
        FLASH3,
        title=f"FlashAttention-3 of {title}",
        version=version,
        sizes={key: size if size is ABSORBED else replace(size, rows=(64, 128, 192)) for key, size in sizes.items()},
        tile=lambda problem, size: size.shipped if size is ABSORBED else tile(problem),
        dtypes=("bf16", "e4m3"),
        order=replace(FLASH3.order, key_tiles="from_window", contracts_promotion=False, sinks_without_keys=False),
        features=frozenset({"causal", "window", "varlen", "gqa"}),
        refuses=_refuses,
        **changes,
    )


FAMILIES = {
    "vllm": _serving(
        "vLLM",
        "vllm 0.33.0",
        FLASH3.sizes,
        _vllm_tile,
        promotes=True,
        promoted_keys=256,
        serving=frozenset({"sinks", "qv", "paged", "seqused_k", "leftpad", "batch_idx"}),
    ),
    "sglang": _serving(
        "SGLang",
        "sglang-kernel 0.4.5",
        {key: size for key, size in FLASH3.sizes.items() if key[1] in (128, 576)},
        _sglang_tile,
        pads_head_dim=False,
        serving=FLASH3.serving | {"sinks", "paged"},
    ),
}
