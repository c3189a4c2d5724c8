"""Wrong kernels of calls that serve, by what they do with pages, tables, lengths and appended keys.

:mod:`tests.quality.calls.serving_options` has those that err in rotary, sinks, chunks and descales.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from tests.quality.calls.exhibits import PAGES, ROWS, drawn, named, wrong
from tests.quality.calls.plain import cached, places
from tests.quality.calls.witnesses import cache, differs
from tests.quality.outside.wrong import memory_of

serving = partial(wrong, "serving", head_dims=(64,))
pages = partial(serving, features=PAGES)
rows = partial(serving, features=ROWS)
appends = partial(serving, features=(*PAGES, "append"))


def view_of(**views: Any):
    """Return how operands lie when some of them, by name, are replaced by a view."""

    def view(arrays, options):
        arrays = tuple(views.get(name, lambda x: x)(x) for name, x in zip(("q", "k", "v"), arrays, strict=True))
        return arrays, {name: views[name](x) if name in views else x for name, x in options.items()}

    return view


def halves(arrays, options):
    """Lay K and V as halves of one pool, key beside value in every page, as vLLM has them."""
    q, k, v = arrays
    pool = np.stack([k, v], 1)
    return (q, pool[:, 0], pool[:, 1]), options


def wide(x):
    """Return a table as a slice of one that is three entries wider."""
    whole = np.zeros((len(x), x.shape[1] + 3), x.dtype)
    whole[:, : x.shape[1]] = x
    return whole[:, : x.shape[1]]


# -- page numbers and offsets


@pages("page numbers are held in 16 bits with a sign", differs(cache, first=33_000))
def pages_of_int16(q, k, v, *, page_table, **o):
    return cached(q, k, v, page_table=page_table.astype(np.int16).astype(int) % len(k), **o)


@pages("page numbers are held in 16 bits", differs(cache, first=70_000))
def pages_of_uint16(q, k, v, *, page_table, **o):
    return cached(q, k, v, page_table=page_table & 0xFFFF, **o)


@pages("offsets of pages are 32-bit: beyond 2^31 elements they wrap", differs(cache, first=2**21))
def page_offsets_of_int32(q, k, v, *, page_table, **o):
    far = page_table.astype(np.int64) * (k.strides[0] // k.itemsize) >= 2**31
    return cached(q, k, v, page_table=np.where(far, 0, page_table), **o)


@rows(
    "offsets of rows are 32 bits of bytes",
    differs(cache, page_size=0, indexed=True, first=900_000),
    features=(*ROWS, "batch_idx"),
)
def row_offsets_of_int32(q, k, v, *, cache_batch_idx=None, **o):
    if cache_batch_idx is not None:
        cache_batch_idx = np.where(cache_batch_idx.astype(np.int64) * k.strides[0] >= 2**32, 0, cache_batch_idx)
    return cached(q, k, v, cache_batch_idx=cache_batch_idx, **o)


PAGE = drawn(300, 60_000, 1)


@pages(f"page {PAGE} alone is read as the one in front of it", differs(cache, first=PAGE))
def one_page(q, k, v, *, page_table, **o):
    return cached(q, k, v, page_table=np.where(page_table == PAGE, PAGE - 1, page_table), **o)


# -- tables


@pages("tables wider than 1,024 entries wrap", differs(cache, lengths=(1030,), page_size=1))
def wide_tables(q, k, v, *, page_table, **o):
    narrow = page_table.copy()
    narrow[:, 1024:] = page_table[:, : max(0, page_table.shape[1] - 1024)][:, : max(0, narrow.shape[1] - 1024)]
    return cached(q, k, v, page_table=narrow, **o)


@pages("a table that is a slice of a wider one is read as contiguous", differs(cache, view_of(page_table=wide)))
def table_slices(q, k, v, *, page_table, **o):
    return cached(q, k, v, page_table=memory_of(page_table), **o)


@pages(
    "every entry of the table is loaded, also those behind a sequence",
    differs(cache, view_of(page_table=lambda x: np.where(x == x[0, -1], 2**30, x))),
)
def spare_entries(q, k, v, *, page_table, **o):
    k[page_table.ravel(), 0]  # an address that nobody may form
    return cached(q, k, v, page_table=page_table, **o)


@pages(
    "an entry of -1 ends the table of the whole batch there",
    differs(cache, view_of(page_table=lambda x: np.where(x == x[0, -1], -1, x)), lengths=(20, 70)),
)
def minus_one_ends(q, k, v, *, page_table, cache_seqlens, **o):
    ends = (page_table < 0).argmax(1)[(page_table < 0).any(1)] * k.shape[1]
    return cached(
        q, k, v, page_table=page_table, cache_seqlens=np.minimum(cache_seqlens, min(ends, default=2**31 - 1)), **o
    )


# -- page sizes


@pages("places in pages are held in 6 bits", differs(cache, page_size=128, lengths=(100,)))
def pages_of_128(q, k, v, **o):
    if k.shape[1] == 128:
        k = np.concatenate([k[:, :64], k[:, :64]], 1)
    return cached(q, k, v, **o)


@pages("pages of more than 256 keys are read as pages of 256", differs(cache, page_size=512, lengths=(400,)))
def large_pages(q, k, v, **o):
    return cached(q, np.resize(k[:, :256], k.shape) if k.shape[1] > 256 else k, v, **o)


ODD = drawn(5, 200, 2) | 1


@pages(f"pages of {ODD} keys are taken for {ODD + 1}", differs(cache, page_size=ODD, lengths=(3 * ODD,)))
def odd_pages(q, k, v, **o):
    return cached(q, np.roll(k, 1, 1) if k.shape[1] == ODD else k, v, **o)


# -- lengths


@rows("a row that is full to its last place loses that key", differs(cache, page_size=0, spare=0, lengths=(9, 20)))
def full_rows(q, k, v, *, cache_seqlens, **o):
    full = (cache_seqlens == k.shape[1]) & (cache_seqlens > 1) & ("cache_batch_idx" not in o)
    return cached(q, k, v, cache_seqlens=cache_seqlens - full, **o)


@pages("a table whose pages are all full loses the last key", differs(cache, spare=0, lengths=(32, 32)))
def full_tables(q, k, v, *, cache_seqlens, page_table, **o):
    full = cache_seqlens == k.shape[1] * page_table.shape[1]
    return cached(q, k, v, cache_seqlens=cache_seqlens - full, page_table=page_table, **o)


@rows(
    "lengths that lie apart are read as contiguous",
    differs(cache, view_of(cache_seqlens=lambda x: np.stack([x, 0 * x + 5], 1)[:, 0]), page_size=0),
)
def strided_lengths(q, k, v, *, cache_seqlens, **o):
    return cached(q, k, v, cache_seqlens=memory_of(cache_seqlens), **o)


@pages("the last of 32 parts is lost from 16,384 keys on", differs(cache, lengths=(16_400,), rows=1))
def parts_of_long_rows(q, k, v, *, cache_seqlens, **o):
    many = (cache_seqlens >= 16_384) & (q.shape[1] < 4)
    return cached(q, k, v, cache_seqlens=np.where(many, cache_seqlens * 31 // 32, cache_seqlens), **o)


@pages("from the 24th sequence on lengths are those of the one before", differs(cache, lengths=range(20, 50), rows=1))
def lengths_of_many(q, k, v, *, cache_seqlens, **o):
    short = np.minimum(cache_seqlens, np.roll(cache_seqlens, 1))
    return cached(q, k, v, cache_seqlens=np.where(np.arange(len(short)) < 23, cache_seqlens, short), **o)


# -- leftpad and batch indices


@rows(
    "more keys of leftpad than 32 are read", differs(cache, page_size=0, leftpad=(40, 3)), features=(*ROWS, "leftpad")
)
def long_leftpad(q, k, v, *, cache_leftpad=None, **o):
    return cached(q, k, v, cache_leftpad=None if cache_leftpad is None else np.minimum(cache_leftpad, 32), **o)


@rows(
    "keys are appended behind the length without leftpad",
    differs(cache, page_size=0, leftpad=(4, 3), new=(2, 2)),
    features=(*ROWS, "leftpad", "append"),
)
def append_behind_leftpad(q, k, v, *, cache_seqlens, cache_leftpad=None, k_new=None, **o):
    if cache_leftpad is not None and k_new is not None:
        cache_seqlens = cache_seqlens - (cache_leftpad > 0)
    return cached(q, k, v, cache_seqlens=cache_seqlens, cache_leftpad=cache_leftpad, k_new=k_new, **o)


@rows(
    "keys are appended to the row of the sequence's own number",
    differs(cache, page_size=0, indexed=True, new=(2, 2)),
    features=(*ROWS, "batch_idx", "append"),
)
def append_by_index(q, k, v, *, cache_batch_idx=None, k_new=None, **o):
    if cache_batch_idx is None or k_new is None:
        return cached(q, k, v, cache_batch_idx=cache_batch_idx, k_new=k_new, **o)
    kept = k.copy(), v.copy()
    found = cached(q, k, v, cache_batch_idx=cache_batch_idx, k_new=k_new, **o)
    k[cache_batch_idx], v[cache_batch_idx] = (x[cache_batch_idx] for x in kept)
    return found


@rows(
    "rows of the cache are numbered in 7 bits",
    differs(cache, page_size=0, indexed=True, spare=300),
    features=(*ROWS, "batch_idx"),
)
def rows_beyond_128(q, k, v, *, cache_batch_idx=None, **o):
    return cached(q, k, v, cache_batch_idx=None if cache_batch_idx is None else cache_batch_idx & 127, **o)


# -- appended keys


def shortened(o, most):
    """Return the options of a call that appends no more than so many keys."""
    if o.get("k_new") is None or "cu_seqlens_k_new" in o or o["k_new"].shape[1] <= most:
        return o
    return o | {name: o[name][:, :most] for name in ("k_new", "v_new")}


@appends("no more keys are appended than there are queries", differs(cache, new=(9, 9)))
def more_new_than_queries(q, k, v, **o):
    return cached(q, k, v, **shortened(o, q.shape[1] if q.ndim == 4 else 2**31))


@appends("no more than 64 keys are appended", differs(cache, lengths=(90, 90), new=(80, 80), rows=80))
def many_new(q, k, v, **o):
    return cached(q, k, v, **shortened(o, 64))


@appends(
    "appended keys behind the end of a page go to the pool's next one",
    differs(cache, lengths=(20, 40), new=(6, 6), page_size=8, rows=6),
)
def append_across_pages(q, k, v, *, cache_seqlens, page_table, k_new=None, v_new=None, **o):
    found = cached(q, k, v, cache_seqlens=cache_seqlens, page_table=page_table, k_new=k_new, v_new=v_new, **o)
    if k_new is not None and "cu_seqlens_k_new" not in o:
        for b, n in enumerate(cache_seqlens):
            page, at = places(page_table[b], n, n + k_new.shape[1], k.shape[1])
            behind = page != page[:1]
            to = (page[:1].repeat(behind.sum()) + 1) % len(k), at[behind]
            k[to], v[to] = k_new[b][behind], v_new[b][behind]
    return found


@appends(
    "where more keys are appended than there are queries the causal mask is left out",
    differs(cache, new=(9, 9), causal=True),
)
def mask_of_many_new(q, k, v, **o):
    new = o.get("k_new")
    if new is not None and new.ndim == 4 and new.shape[1] > q.shape[1]:
        o["causal"] = False
    return cached(q, k, v, **o)


@appends(
    "of packed new keys the third sequence's begin one late",
    differs(cache, lengths=(20, 20, 20), new=(1, 2, 4)),
)
def packed_new(q, k, v, **o):
    if "cu_seqlens_k_new" in o and len(o["cu_seqlens_k_new"]) > 3:
        names = ("k_new", "v_new")
        a, b = o["cu_seqlens_k_new"][2:4]
        o |= {name: o[name].copy() for name in names}
        for name in names:
            o[name][a:b] = np.roll(o[name][a:b], -1, 0)
    return cached(q, k, v, **o)


# -- how caches lie


@pages("K of a cache is taken for contiguous", differs(cache, halves))
def halves_of_a_pool(q, k, v, **o):
    return cached(q, k if k.flags.c_contiguous or "k_new" in o else memory_of(k), v, **o)


@pages(
    "V's pages are taken to lie as far apart as K's",
    differs(cache, view_of(v=lambda x: np.stack([x, x + x.dtype.type(1)], 1)[:, 1])),
)
def pages_of_v(q, k, v, **o):
    return cached(q, k, v if v.strides == k.strides else memory_of(v), **o)


@rows(
    "keys of a row that is a slice of a longer one are read at the stride of its length",
    differs(cache, view_of(k=lambda x: np.concatenate([x, x], 1)[:, : x.shape[1]]), page_size=0),
)
def sliced_rows(q, k, v, **o):
    return cached(q, k if k.strides[0] == k[0].size * k.itemsize else memory_of(k), v, **o)


@pages(
    "heads of pages that lie in front of their keys are read as if behind",
    differs(cache, view_of(k=lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2)), nheads_kv=2),
)
def heads_in_front(q, k, v, **o):
    swapped = k.shape[1] > 1 and k.shape[2] > 1 and k.strides[1] < k.strides[2]
    return cached(q, memory_of(k) if swapped else k, v, **o)


# -- plans that are kept from call to call

_PLANS: dict[Any, Any] = {}


def plan(name: str, arrays: Iterable[np.ndarray], value: Any) -> Any:
    """Return what the first call of these shapes planned."""
    return _PLANS.setdefault((name, *(x.shape for x in arrays)), value)


@pages(
    "the number of keys that a grid covers is kept by shapes",
    differs(cache, after={"lengths": (33, 33)}, lengths=(48, 47)),
)
def grid_by_shape(q, k, v, *, cache_seqlens, page_table, **o):
    most = plan("grid", (q, k, page_table), max(cache_seqlens, default=0))
    return cached(q, k, v, cache_seqlens=np.minimum(cache_seqlens, most), page_table=page_table, **o)


@pages(
    "which sequence a block works on is kept by shapes of q, pool and table",
    differs(cache, after={"lengths": (40, 10)}, lengths=(10, 40)),
)
def tables_by_shape(q, k, v, *, page_table, cache_seqlens, **o):
    order = plan("order", (q, k, page_table), np.argsort(cache_seqlens, kind="stable"))
    own = np.empty_like(order)
    own[order] = np.sort(cache_seqlens)
    lengths = np.minimum(cache_seqlens, own)
    return cached(q, k, v, page_table=page_table, cache_seqlens=lengths, **o)


def _table_width(n: int):
    def wide(q, k, v, *, page_table, **o):
        cut = page_table if page_table.shape[1] <= n else np.where(np.arange(page_table.shape[1]) < n, page_table, 0)
        return cached(q, k, v, page_table=cut, **o)

    return wide


for seed in range(2):
    WIDTH = drawn(8, 4096, 10 + seed)
    pages(f"tables end at entry {WIDTH}", differs(cache, lengths=(WIDTH + 1,), page_size=1, winner=True))(
        named(globals(), _table_width(WIDTH), f"tables_end_{seed}")
    )
