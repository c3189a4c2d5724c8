"""The ladders of sizes: calls in which one size grows to the largest of practice while all others stay tiny.

Sizes are asked from coarse to fine: first a few up to the end of each ladder, powers of two and their neighbours, then
every size from the smallest on, for as long as there is time. A ladder ends early where a kernel declares or refuses a
size, and where its own speed would not leave time for the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem
from fa3verify.files import Json
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.widths import is_absorbed
from fa3verify.operations.operation import needed_features

PAGED, ROWS = frozenset({"paged"}), frozenset({"seqused_k"})
Make = Callable[[Kernel, int], AttentionProblem]


@dataclass(frozen=True, slots=True)
class Ladder:
    """One size: the largest that is asked, and ``make(kernel, n)``, which returns a problem that has the size n."""

    top: int
    make: Make
    needs: frozenset[str] = frozenset()
    operations: tuple[str, ...] = ("forward", "backward")


def channels(kernel: Kernel) -> int:
    """Return the head_dim of calls: the usual 64 if the kernel takes it, else the smallest of those that it declares,
    or 0 if it takes absorbed heads alone.
    """
    dims = [d for d in kernel.head_dims or (64,) if not is_absorbed(kernel, d)]
    return 64 if 64 in dims else min(dims, default=0)


def _heads(kernel: Kernel, nheads_kv: int, group: int) -> Json:
    group = group if "gqa" in kernel.features else 1
    return {"nheads": nheads_kv * group, "nheads_kv": nheads_kv, "head_dim": channels(kernel), "dtype": kernel.dtype}


def batched(kernel: Kernel, batch: int = 2, queries: int = 3, keys: int = 19, **other: Any) -> AttentionProblem:
    """Return a problem whose other sizes are tiny: two kv heads, each of a group of two."""
    heads = _heads(kernel, other.pop("nheads_kv", 2), other.pop("group", 2))
    return AttentionProblem(batch=batch, seqlen_q=queries, seqlen_k=keys, **heads, **other)


def packed(kernel: Kernel, queries: tuple[int, ...], keys: tuple[int, ...], **other: Any) -> AttentionProblem:
    """Return a problem of packed sequences with two kv heads."""
    heads = _heads(kernel, other.pop("nheads_kv", 2), other.pop("group", 1))
    return AttentionProblem.varlen(queries, keys, **heads, **other)


def cached(
    kernel: Kernel,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    *,
    causal: bool = False,
    sinks: bool = False,
    **of: Any,
) -> AttentionProblem:
    """Return a problem whose keys lie in pages, of 16 keys unless the kernel declares other sizes, or in rows."""
    lies: Json = {"page_size": page_size(kernel)} | of
    return packed(kernel, queries, keys, causal=causal, cache=Cache(**lies), sinks=sinks)


def smallest(kernel: Kernel) -> int:
    """Return the smallest page size that a kernel takes."""
    return min(kernel.page_sizes or (1,))


def rotated(kernel: Kernel, keys: tuple[int, int]) -> AttentionProblem:
    """Return a problem that appends two keys to each sequence, with the whole head rotated by positions."""
    rotary_dim = channels(kernel) // 16 * 16
    return cached(kernel, (2, 2), keys, new=(2, 2), rotary_dim=rotary_dim, causal=_is_causal(kernel))


def page_size(kernel: Kernel) -> int:
    """Return the page size of calls: 16 if the kernel takes it; 0 stands for rows, if it takes no pages."""
    if "paged" not in kernel.features:
        return 0
    sizes = kernel.page_sizes or (16,)
    return 16 if 16 in sizes else min(sizes)


def place(kernel: Kernel, n: int) -> int:
    """Return the page size of calls at a size: 0 for rows, in turn with pages where the kernel takes both."""
    return 0 if "seqused_k" in kernel.features and n % 2 else page_size(kernel)


def _sequences(n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return queries and keys of n sequences, of which some are empty."""
    lengths = list(islice(cycle(((1, 5), (2, 3), (0, 2), (3, 9), (1, 0), (2, 11))), n))
    return tuple(a for a, _ in lengths), tuple(b for _, b in lengths)


def _beside(n: int) -> dict[str, int]:
    """Return the sizes beside a large one: two sequences, or two kv heads each of a group of two."""
    return {"batch": 2, "nheads_kv": 1, "group": 1} if n % 2 else {"batch": 1, "nheads_kv": 2, "group": 2}


def _is_causal(kernel: Kernel, n: int = 1) -> bool:
    """Tell whether a call has a causal mask: at every odd size, if the kernel takes it."""
    return "causal" in kernel.features and n % 2 == 1


def _is_sunk(kernel: Kernel) -> bool:
    """Tell whether a call has sinks: if the kernel is a forward that takes them in binary32."""
    return kernel.operation == "forward" and "sinks" in kernel.features and "narrow_sinks" not in kernel.features


_DECODING: Json = {"operations": ("forward",)}
LADDERS: Mapping[str, Ladder] = {
    "batch": Ladder(4096, lambda kernel, n: batched(kernel, n, keys=5)),
    "heads": Ladder(256, lambda kernel, n: batched(kernel, nheads_kv=n, group=1, sinks=_is_sunk(kernel))),
    "kv heads": Ladder(256, lambda kernel, n: batched(kernel, nheads_kv=n), frozenset({"gqa"})),
    "group": Ladder(128, lambda kernel, n: batched(kernel, group=n), frozenset({"gqa"})),
    "queries": Ladder(131072, lambda kernel, n: batched(kernel, queries=n, **_beside(n))),
    "keys": Ladder(1048576, lambda kernel, n: batched(kernel, keys=n, **_beside(n), causal=_is_causal(kernel, n))),
    "queries and keys": Ladder(4096, lambda kernel, n: batched(kernel, 1, n, n, group=1)),
    "batch times heads": Ladder(70000, lambda kernel, n: batched(kernel, -(-n // 16), 1, 5, nheads_kv=16, group=1)),
    "sequences": Ladder(1024, lambda kernel, n: packed(kernel, *_sequences(n)), frozenset({"varlen"})),
    "packed queries": Ladder(
        262144, lambda kernel, n: packed(kernel, (n, 2, 3), (5, 7, 4), nheads_kv=1 + n % 2), frozenset({"varlen"})
    ),
    "packed keys": Ladder(
        262144, lambda kernel, n: packed(kernel, (2, 3, 1), (5, n, 7), nheads_kv=1 + n % 2), frozenset({"varlen"})
    ),
    "window": Ladder(
        65536,
        lambda kernel, n: batched(kernel, 1, 3, 2 * n + 40, window=(n, n % 2 - 1), sinks=_is_sunk(kernel)),
        frozenset({"window"}),
    ),
    "chunk": Ladder(
        65536,
        lambda kernel, n: batched(kernel, 1, 3, n + n // 2 + 3, attention_chunk=n, causal=_is_causal(kernel)),
        frozenset({"attention_chunk"}),
        **_DECODING,
    ),
    "sequences of a cache": Ladder(1024, lambda kernel, n: cached(kernel, (1,) * n, _sequences(n)[1]), **_DECODING),
    "keys in pages": Ladder(
        262144, lambda kernel, n: cached(kernel, (3, 3), (n, 5), sinks=_is_sunk(kernel)), PAGED, **_DECODING
    ),
    "keys in rows": Ladder(262144, lambda kernel, n: cached(kernel, (3, 3), (n, 5), page_size=0), ROWS, **_DECODING),
    "page size": Ladder(
        2048, lambda kernel, n: cached(kernel, (2, 2), (2 * n + 1, n), page_size=n), PAGED, **_DECODING
    ),
    "pages": Ladder(
        70000,
        lambda kernel, n: cached(kernel, (2, 2), (n * smallest(kernel), 5), page_size=smallest(kernel)),
        PAGED,
        **_DECODING,
    ),
    "keys in front of a sequence": Ladder(
        65536,
        lambda kernel, n: cached(kernel, (2, 2), (9, 20), page_size=place(kernel, n), leftpad=(n, n // 2)),
        frozenset({"leftpad"}),
        **_DECODING,
    ),
    "rows of a cache": Ladder(
        1024,
        lambda kernel, n: cached(kernel, (1,) * n, _sequences(n)[1], page_size=place(kernel, n), indexed=True),
        frozenset({"batch_idx"}),
        **_DECODING,
    ),
    "heads of an FP8 cache": Ladder(
        64,
        lambda kernel, n: packed(kernel, (2, 2), (9, 5), nheads_kv=n, cache=Cache(page_size(kernel), fp8="head")),
        frozenset({"fp8_cache"}),
        **_DECODING,
    ),
    "appended keys": Ladder(
        8192, lambda kernel, n: cached(kernel, (2, 2), (n + 21, n), new=(n, n)), frozenset({"append"}), **_DECODING
    ),
    "rotary positions": Ladder(
        131072, lambda kernel, n: rotated(kernel, (n + 2, 9)), frozenset({"rotary"}), **_DECODING
    ),
}


def work(problem: AttentionProblem) -> int:
    """Return what the time of a call goes with: its elements and its scores."""
    scores = (
        sum((seq.seqlen_q + 8) * (seq.seqlen_k + 8) for seq in problem.sequences())
        if problem.is_varlen
        else (problem.batch * (problem.seqlen_q + 8) * (problem.seqlen_k + 8))
    )
    elements = math.prod(problem.q_shape) + 2 * math.prod(problem.k_shape)
    return scores * problem.nheads + 4 * elements


def coarse(top: int) -> Iterator[int]:
    """Yield sizes up to a ladder's end: powers of eight and what lies around them, and the end."""
    n = 8
    yield from (1, 2, 3, 5)
    while n < top:
        yield from (m for m in (n - 1, n, n + 1, 3 * n + 1) if m < top - 1)
        n *= 8
    yield from (top - 1, top)


def problem_of(kernel: Kernel, ladder: Ladder, n: int) -> AttentionProblem | None:
    """Return the problem that has a size; None if the kernel takes none of it."""
    try:
        made = ladder.make(kernel, n)
        problem = kernel.fitted(made)
    except ValueError:
        return None
    is_large = work(problem) >= work(made) / 2  # a declared limit would make a smaller one of it
    return problem if is_large and needed_features(problem) <= kernel.features and kernel.supports(problem) else None


def ladders(kernel: Kernel) -> dict[str, Ladder]:
    """Return the ladders that concern a kernel, by name; none of one that takes absorbed heads alone."""
    if not channels(kernel):
        return {}
    return {
        name: ladder
        for name, ladder in LADDERS.items()
        if kernel.operation in ladder.operations and ladder.needs <= kernel.features
    }
