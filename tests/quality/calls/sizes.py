"""Wrong kernels of forwards that err from some size on, at one size, or at one index."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.quality.calls.exhibits import drawn, named, wrong
from tests.quality.calls.plain import attend
from tests.quality.calls.witnesses import dense, differs, packed

sizes = partial(wrong, "sizes", head_dims=(64,))
varlen = partial(sizes, features=("causal", "gqa", "varlen"))


def spoilt(function: Callable[..., Any] = attend, **where: Callable[[np.ndarray], Any]) -> Callable[..., Any]:
    """Return attention that reads copies of some operands, or gives back an output, with zeros at places."""

    def kernel(q, k, v, **o):
        given = {"q": q, "k": k, "v": v}
        for name, place in where.items():
            if name != "out" and (at := place(given[name])) is not None:
                given[name] = given[name].copy()
                given[name][at] = 0
        out, lse = function(*given.values(), **o)
        if "out" in where and (at := where["out"](out)) is not None:
            out = out.copy()
            out[at] = 0
        return out, lse

    return kernel


def show(name: str, words: str, witness: Any, kernel: Callable[..., Any], declare: Any = sizes, **facts: Any) -> None:
    """Keep a kernel that another function made."""
    declare(words, witness, **facts)(named(globals(), kernel, name))


# -- from some size on

show(
    "queries_from_4096",
    "queries from 4,096 on are not computed",
    differs(dense, seqlen_q=4100),
    spoilt(out=lambda x: np.s_[..., 4096:, :, :] if x.ndim == 4 and x.shape[1] > 4096 else None),
)
show(
    "heads_from_100",
    "heads from 100 on read the Q of none",
    differs(dense, nheads=104),
    spoilt(q=lambda x: np.s_[..., 100:, :] if x.shape[-2] > 100 else None),
)
show(
    "keys_of_few_queries",
    "from 16,384 keys on one key is lost where there are fewer than 8 queries",
    differs(dense, seqlen_k=16_400, seqlen_q=4, size=8.0),
    lambda q, k, v, **o: attend(*_without_middle(q, k, v), **o),
)
show(
    "batch_of_64",
    "a batch of 64 and more has the V of its first sequence from the 64th on",
    differs(dense, batch=70),
    lambda q, k, v, **o: attend(
        q, k, np.concatenate([v[:63], *[v[:1]] * (len(v) - 63)]) if _is_batch(v, 64) else v, **o
    ),
)
show(
    "twentieth_sequence",
    "of packed sequences the 20th and those behind have no keys but the first",
    differs(packed, lengths_q=[2] * 21, lengths_k=[3] * 21),
    lambda q, k, v, **o: attend(q, k, _late(v, o, 19), **o),
    varlen,
)
show(
    "grid_of_65535",
    "from block 65,535 of batch times heads on nothing is written",
    differs(dense, batch=129, nheads=512, seqlen_q=1, seqlen_k=1),
    spoilt(out=lambda x: _blocks_from(x, 65_535)),
)
show(
    "packed_tokens_beyond_65535",
    "packed keys beyond 65,535 are zero",
    differs(packed, lengths_q=(1, 1), lengths_k=(65_530, 12), size=4.0),
    spoilt(v=lambda x: np.s_[65_535:] if x.ndim == 3 and len(x) > 65_535 else None),
    varlen,
)
show(
    "packed_queries_beyond_32767",
    "packed queries beyond 32,767 are those of the row in front",
    differs(packed, lengths_q=(32_760, 12), lengths_k=(1, 4)),
    spoilt(out=lambda x: np.s_[32_767:] if x.ndim == 3 and len(x) > 32_767 else None),
    varlen,
)


@sizes(
    "a window of more than 4,096 keys ends there",
    differs(dense, seqlen_q=1, seqlen_k=5100, window=(5000, 0), size=6.0),
    features=("causal", "gqa", "window"),
)
def windows_over_4096(q, k, v, *, window=(-1, -1), **o):
    left, right = window
    return attend(q, k, v, window=(min(left, 4096), right), **o)


@sizes(
    "sinks of heads from 32 on are those of the first 32",
    differs(dense, nheads=40, sinks=True),
    features=("causal", "gqa", "sinks"),
)
def sinks_from_head_32(q, k, v, *, sinks=None, **o):
    return attend(q, k, v, sinks=None if sinks is None else sinks[np.arange(len(sinks)) % 32], **o)


# -- a size that equals n

GROUP, ROWS, KEYS, HEADS = drawn(9, 60, 20), drawn(100, 3000, 21), drawn(300, 20_000, 22), drawn(20, 200, 23)

show(
    "group_of_12",
    "in groups of 12 the last head has the K of the next kv head",
    differs(dense, nheads=24, nheads_kv=2),
    lambda q, k, v, **o: _last_of_group(q, k, v, 12, **o),
)
show(
    "group_equals",
    f"in groups of {GROUP} the last head is not computed",
    differs(dense, nheads=GROUP),
    lambda q, k, v, **o: _last_of_group(q, k, v, GROUP, **o),
)
show(
    "queries_equal",
    f"of {ROWS} queries the last is zero",
    differs(dense, seqlen_q=ROWS),
    spoilt(out=lambda x: np.s_[..., -1, :, :] if x.ndim == 4 and x.shape[1] == ROWS else None),
)
show(
    "keys_equal",
    f"of {KEYS} keys the last has no value",
    differs(dense, seqlen_k=KEYS, winner=True),
    spoilt(v=lambda x: np.s_[..., -9:, :, :] if x.shape[-3] == KEYS else None),
)
show(
    "heads_equal",
    f"of {HEADS} heads the last reads the K of the first",
    differs(dense, nheads=HEADS, nheads_kv=HEADS),
    spoilt(k=lambda x: np.s_[..., -1, :] if x.shape[-2] == HEADS else None),
)
show(
    "batch_equals_24",
    "of a batch of 24 the last sequence has no values",
    differs(dense, batch=24),
    spoilt(v=lambda x: -1 if x.ndim == 4 and len(x) == 24 else None),
)

# -- one index

QUERY, KEY, HEAD, SEQUENCE = drawn(200, 30_000, 24), drawn(500, 100_000, 25), drawn(10, 200, 26), drawn(20, 2000, 27)

show(
    "one_query",
    f"query {QUERY} alone is zero",
    differs(dense, seqlen_q=QUERY + 3),
    spoilt(out=lambda x: np.s_[..., QUERY, :, :] if x.ndim == 4 and x.shape[1] > QUERY else None),
)
show(
    "one_key",
    f"key {KEY} alone has no value",
    differs(dense, seqlen_q=1, seqlen_k=KEY + 1, causal=True, winner=True),
    spoilt(v=lambda x: np.s_[..., KEY, :, :] if x.shape[-3] > KEY else None),
)
show(
    "one_head",
    f"head {HEAD} alone has the K of none",
    differs(dense, nheads=HEAD + 1, nheads_kv=HEAD + 1),
    spoilt(k=lambda x: np.s_[..., HEAD, :] if x.shape[-2] > HEAD else None),
)
show(
    "one_sequence",
    f"sequence {SEQUENCE} of a batch is not computed",
    differs(dense, batch=SEQUENCE + 2),
    spoilt(out=lambda x: SEQUENCE if x.ndim == 4 and len(x) > SEQUENCE else None),
)

# -- a size only where another exceeds 1

show(
    "queries_of_two_heads",
    "queries from 2,048 on are zero in calls of several heads",
    differs(dense, seqlen_q=2050, nheads=2),
    spoilt(out=lambda x: np.s_[..., 2048:, :, :] if x.ndim == 4 and x.shape[1] > 2048 and x.shape[2] > 1 else None),
)
show(
    "heads_of_two_sequences",
    "heads from 64 on are zero in batches",
    differs(dense, batch=2, nheads=66),
    spoilt(out=lambda x: np.s_[..., 64:, :] if _is_batch(x, 2) and x.shape[2] > 64 else None),
)
show(
    "keys_of_two_groups",
    "keys from 8,192 on have no values where query heads share kv heads",
    differs(dense, nheads=2, seqlen_k=9200, size=4.0),
    lambda q, k, v, **o: spoilt(v=lambda x: np.s_[..., 8192:, :, :] if q.shape[-2] > k.shape[-2] else None)(
        q, k, v, **o
    ),
)


def _is_batch(x: np.ndarray, least: int) -> bool:
    return x.ndim == 4 and len(x) >= least


def _without_middle(q, k, v):
    n = k.shape[1] if k.ndim == 4 else 0
    return (
        (q, *(np.delete(x, np.s_[n // 2 : n // 2 + 128], 1) for x in (k, v)))
        if n >= 16_384 and q.shape[1] < 8
        else (q, k, v)
    )


def _late(v, o, first):
    if o.get("cu_seqlens_k") is not None and len(o["cu_seqlens_k"]) > first + 1:
        v = v.copy()
        for a, b in zip(o["cu_seqlens_k"][first:-1], o["cu_seqlens_k"][first + 1 :], strict=True):
            v[a:b] = v[a : a + 1]
    return v


def _blocks_from(x, first):
    if x.ndim != 4 or len(x) * x.shape[2] <= first:
        return None
    batch, head = np.divmod(np.arange(first, len(x) * x.shape[2]), x.shape[2])
    return batch, slice(None), head


def _last_of_group(q, k, v, group, **o):
    out, lse = attend(q, k, v, **o)
    if q.shape[-2] == group * k.shape[-2]:
        out = out.copy()
        out[..., group - 1 :: group, :] = 0
    return out, lse


# -- sizes drawn up to the ladder's end

_LADDER: dict[str, tuple[int, int, Callable[[int], Any], Callable[[int, np.ndarray], Any]]] = {
    "batch": (4, 4096, lambda n: differs(dense, batch=n + 1), lambda n, x: np.s_[n:] if _is_batch(x, n + 1) else None),
    "heads": (
        4,
        256,
        lambda n: differs(dense, nheads=n + 1),
        lambda n, x: np.s_[..., n:, :] if x.shape[-2] > n else None,
    ),
    "queries": (
        64,
        131_072,
        lambda n: differs(dense, seqlen_q=n + 1, seqlen_k=1),
        lambda n, x: np.s_[..., n:, :, :] if x.ndim == 4 and x.shape[1] > n else None,
    ),
}


def _drawn_sizes() -> None:
    for name, (low, high, witness, place) in _LADDER.items():
        for i in range(2):
            n = drawn(low, high, 100 + i + 10 * len(name))
            show(f"{name}_drawn_{i}", f"{name} from {n} on are zero", witness(n), spoilt(out=partial(place, n)))


_drawn_sizes()
