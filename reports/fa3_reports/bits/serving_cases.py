"""Cases that are recorded of the builds that serve: steps of decoding, chunks and prompts over pages and rows.

Drawn the same on every machine: seeds count the cases. Prompts, which make up the volume, stand last.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reports.bits.recorded_cases import Draws
from fa3verify.cases.case import Case

PAGES = (16, 64, 0, 256, 1)
HEADS = ((32, 8), (8, 1), (16, 16), (28, 4))
# Queries and keys: steps of one and of four queries, steps beside chunks, chunks.
LENGTHS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((1,) * 12, (1, 15, 16, 17, 95, 97, 127, 129, 176, 177, 1000, 3001)),
    ((4,) * 6, (4, 100, 255, 129, 777, 2048)),
    ((100, 1, 257, 64, 1), (130, 500, 257, 64, 1023)),
    ((17, 160, 300), (170, 161, 1300)),
)
PROMPTS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((700, 500), (700, 1500)),
    ((1024, 333), (1100, 333)),
    ((2000,), (2000,)),
)
MASKS: tuple[dict[str, Any], ...] = ({"causal": True}, {}, {"window": (100, 0)}, {"window": (200, 30)})
SPLITS = (1, 3, 1, 7)


def _cache(
    library: str, dtype: Dtype, page_size: int, lengths: tuple[tuple[int, ...], tuple[int, ...]], i: int
) -> Cache:
    """Where keys lie: rows in another order or behind padding; in SGLang's build every third is appended to.

    Nothing but random values lies behind keys that TMA copies: both builds add 0 times what is there.
    """
    queries, keys = lengths
    is_random = page_size in (0, 256) or i % 2
    settings: dict[str, Any] = {"behind": "random" if is_random else "nan", "seed": i, "spare": i % 3}
    if library == "sglang" and dtype == "bf16" and i % 3 == 1:
        settings["new"] = tuple(min(m, n) for m, n in zip(queries, keys, strict=True))
        settings |= {"rotary_dim": (64, 128, 0)[i // 3 % 3], "interleaved": i % 2 == 0}
    elif not page_size:
        settings |= {"indexed": i % 2 == 0, "leftpad": tuple(i * j % 23 for j in range(len(keys))) if i % 4 < 2 else ()}
    return Cache(page_size, **settings)


def _short(library: str, dtype: Dtype, draws: Draws) -> Iterator[Case]:
    """Every page size with every mask and lengths, heads and parts in turn."""
    heads, parts = cycle(HEADS), cycle(SPLITS)
    i = 0
    for lengths in LENGTHS:
        for page_size in PAGES:
            for mask in MASKS if dtype == "bf16" else MASKS[:2]:
                i += 1
                nheads, nheads_kv = next(heads)
                sizes = {"nheads": nheads, "nheads_kv": nheads_kv, "head_dim": 128, "dtype": dtype, **mask}
                cache = _cache(library, dtype, page_size, lengths, i)
                problem = AttentionProblem.varlen(*lengths, cache=cache, **sizes)
                yield draws.case(library, problem, num_splits=next(parts))
        if dtype == "bf16":
            sizes = {"nheads": 16, "nheads_kv": 1, "head_dim": 576, "head_dim_v": 512, "dtype": dtype, "causal": True}
            cache = Cache(64, behind="nan" if max(lengths[0]) <= 4 else "random", seed=i)
            yield draws.case(library, AttentionProblem.varlen(*lengths, qv=True, cache=cache, **sizes))


def _prompts(library: str, dtype: Dtype, draws: Draws, rounds: int) -> Iterator[Case]:
    for i in range(rounds):
        for j, lengths in enumerate(PROMPTS):
            cache = Cache(PAGES[(i + j) % len(PAGES)], seed=i, behind="random")
            sizes = {"nheads": 32, "nheads_kv": 8, "head_dim": 128, "dtype": dtype, **MASKS[(i + j) % 2]}
            yield draws.case(library, AttentionProblem.varlen(*lengths, cache=cache, **sizes))


def cases(library: str, dtypes: tuple[str, ...], rounds: int) -> list[Case]:
    """Cases of a build, the short ones first; ``rounds`` says how many prompts."""
    short: list[Case] = []
    long: list[Case] = []
    of: tuple[Dtype, ...] = ("bf16", "e4m3")
    for i, dtype in enumerate(of):
        if dtype in dtypes:
            draws = Draws(10_000_000 * (i + 1))
            short += _short(library, dtype, draws)
            long += _prompts(library, dtype, draws, rounds)
    return short + long
