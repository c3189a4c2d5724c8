"""Cases of the campaign of caches: every page size, mask, split and packing, ragged lengths, sinks, new keys, rotary.

Drawn the same on every machine: seeds count the cases. What differs between neighbours goes round, so that a size of
heads meets every value of each, and many pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import Any

import numpy as np

from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem, Dtype, Operands
from fa3_reports.bits import forward_cases
from fa3_reports.bits.forward_cases import E4M3_FAMILIES, FAMILIES, Case

SIZES = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
OTHER_SIZES = ((40, 40), (72, 72), (128, 64), (112, 96), (160, 160))  # padded, V's own, or compiled since
PAGES = (16, 64, 8, 256, 0, 128, 32)
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (90, 0)},
    {"causal": True, "softcap": 20.0},
    {"window": (200, 30)},
)
SPLITS = (1, 3, 1, 7)
HEADS = ((8, 2), (4, 4), (6, 2), (8, 1))
# Queries and keys: steps of decoding, of several queries, chunks beside steps, whole prompts.
LENGTHS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((1,) * 9, (1, 15, 16, 17, 127, 128, 129, 1000, 3001)),
    ((4,) * 5, (4, 100, 255, 2, 777)),
    ((100, 1, 0, 257, 64, 1), (130, 500, 70, 257, 64, 1023)),
    ((300, 1, 5), (280, 0, 900)),
    ((700, 500), (700, 1500)),
)
PER_SIZE = 210
FIRST_SEED = 400_000


def operands(case: Case) -> Operands:
    """Draw q, k, v and descales as the other campaign, and sinks: -inf, one that takes nearly all, and between."""
    given = forward_cases.operands(case)
    problem = case.problem
    if not problem.sinks:
        return given
    rng = np.random.default_rng([case.seed, problem.nheads])
    sinks = rng.normal(3, 4, problem.nheads).astype(np.float32)
    sinks[rng.integers(problem.nheads)] = -np.inf
    sinks[rng.integers(problem.nheads)] = 60
    return Operands(given.q, given.k, given.v, given.q_descale, given.k_descale, given.v_descale, sinks=sinks)


def _cache(
    page_size: int, queries: tuple[int, ...], keys: tuple[int, ...], dtype: Dtype, head_dim: int, i: int
) -> Cache:
    """Where keys lie; every third cache is appended to, of 16 bits mostly with a rotation."""
    settings: dict[str, Any] = {"behind": ("nan", "random")[i // 2 % 2], "seed": i}
    if i % 3 == 1:
        settings["new"] = tuple(min(n, max(0, m + (i + j) % 3 - 1)) for j, (m, n) in enumerate(zip(queries, keys)))
        if dtype != "e4m3" and i % 4:
            settings |= {"rotary_dim": min(32 * (1 + i % 2), head_dim // 16 * 16), "interleaved": i % 2 == 0}
    if not page_size and "rotary_dim" not in settings:
        settings |= {"indexed": i % 2 == 0, "leftpad": tuple(i * j % 23 for j in range(len(keys))) if i % 4 < 2 else ()}
    return Cache(page_size, **settings)


def _of_size(dtype: Dtype, size: tuple[int, int], number: int, seeds: Iterator[int]) -> Iterator[Case]:
    families = E4M3_FAMILIES if dtype == "e4m3" else FAMILIES
    for i in range(number):
        queries, keys = LENGTHS[i % len(LENGTHS)]
        page_size = PAGES[i % len(PAGES)]
        heads, heads_kv = HEADS[i // 2 % len(HEADS)]
        problem = AttentionProblem.varlen(
            queries,
            keys,
            nheads=heads,
            nheads_kv=heads_kv,
            head_dim=size[0],
            head_dim_v=size[1],
            dtype=dtype,
            sinks=i % 4 in (1, 2),
            cache=_cache(page_size, queries, keys, dtype, size[0], i),
            **MASKS[i // 2 % len(MASKS)],
        )
        is_power = heads // heads_kv in (1, 2, 4, 8)
        choices: dict[str, Any] = {"num_splits": SPLITS[i // 3 % len(SPLITS)], "pack_gqa": is_power and i % 3 != 0}
        scope = "none"
        if dtype == "e4m3":
            choices |= {"promotion_interval": (128, 128, 0)[i // 5 % 3], "out_dtype": "bf16"}
            scope = ("head", "none", "tensor")[i % 3]
        family = families[i % len(families)]
        yield Case(
            f"pages{page_size}" if page_size else "rows", problem, family, next(seeds), choices, (scope, scope, scope)
        )


@cache
def cases() -> tuple[Case, ...]:
    """Return all cases; those of one dtype do not depend on the others."""
    found: list[Case] = []
    dtypes: tuple[tuple[Dtype, int], ...] = (("fp16", FIRST_SEED), ("bf16", FIRST_SEED + 50_000), ("e4m3", 500_000))
    for dtype, first in dtypes:
        seeds = count(first)
        for size in SIZES:
            if dtype != "bf16" or size in ((64, 64), (128, 128)):
                found += _of_size(dtype, size, PER_SIZE, seeds)
        others = [(a // 16 * 16, b // 16 * 16) for a, b in OTHER_SIZES] if dtype == "e4m3" else OTHER_SIZES
        for size in others if dtype != "bf16" else ():
            found += _of_size(dtype, size, PER_SIZE // 6, seeds)
    return tuple(found)
