"""How keys and values are stored where kernels serve: in pages or rows of a cache, among numbers that nobody may read.

A problem with a cache still states the packed keys that its sequences attend to; only the call of a kernel differs.
:func:`serve` moves packed operands to the places where a kernel finds them, under FlashAttention-3's names
(``flash_attn_with_kvcache``), and :func:`gathered` moves them back. The places are stated by the record
:class:`~fa3_reference.layout.Cache`. Only rotary embedding changes a value:

    rotated x_c = x_c cos - x_c' sin,   rotated x_c' = x_c sin + x_c' cos

for the channels c, c' of a pair: 2 i and 2 i + 1 if interleaved, else i and i + rotary_dim / 2. Appended keys are
rotated by their position, and queries by theirs; without a mask every query has the position of the first appended key.
A position is a place in the cache, keys of others in front counted (upstream hopper/rotary.h and seqlen.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3_reference.layout import Cache as Cache
from fa3_reference.problem import Array, AttentionProblem, Descale, Floats, Operands, Sequence

_ROTARY_BASE = 10000.0


def rotary_tables(problem: AttentionProblem) -> tuple[Array, Array]:
    """Return cos and sin of every position and pair of channels, (positions, rotary_dim / 2) in the operands' format.

    The truth rotates by these rounded numbers too, so that they carry no error.
    """
    from fa3_reference.formats import FORMATS

    dim = problem.cache.rotary_dim if problem.cache else 0
    angles = np.arange(_positions(problem))[:, None] * _ROTARY_BASE ** (-np.arange(0, dim, 2) / max(1, dim))
    dtype = FORMATS[problem.dtype].dtype
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def _positions(problem: AttentionProblem) -> int:
    pads = problem.cache.pads(problem) if problem.cache else ()
    return max(1, problem.seqlen_k + max(pads, default=0))


def rotated(
    problem: AttentionProblem, q: Floats, k: Floats, *, of_sizes: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return Q and K as attention meets them, in float64: rotated where the problem's cache says so.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed.
    q, k : float arrays of the problem's shapes
        As they are given to a kernel.
    of_sizes : bool
        Return sums of the absolute values of the products instead: the sizes that rounding errors are relative to.
        ``q`` and ``k`` are then absolute values too.

    Returns
    -------
    q, k : float64 arrays
        New arrays of the same shapes. For 16-bit operands each is off by less than 2^-52 of the larger product.
    """
    q, k = (np.asarray(x).astype(np.float64) for x in (q, k))
    cache = problem.cache
    if cache is None or not problem.is_rotated:
        return q, k
    tables = tuple(x.astype(np.float64) for x in rotary_tables(problem))
    sign = 1.0 if of_sizes else -1.0
    tables = tuple(np.abs(x) for x in tables) if of_sizes else tables
    for seq, start, first in zip(problem.sequences(), cache.before(problem), cache.seqlens(problem), strict=True):
        _rotate(problem.rows_q(q, seq), query_positions(problem, seq, first), tables, cache, sign)
        _rotate(problem.rows_k(k, seq)[start:], first + np.arange(seq.seqlen_k - start), tables, cache, sign)
    return q, k


def query_positions(problem: AttentionProblem, seq: Sequence, first: int) -> NDArray[np.int64]:
    """Return the positions by which a call rotates the queries of one sequence.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed, with a cache. Without a mask all queries have the position of the first.
    seq : Sequence
        One of its sequences.
    first : int
        The position of the first key that the call appends, as :meth:`Cache.seqlens` has it.

    Returns
    -------
    int64 array (seqlen_q,)
        Rows of :func:`rotary_tables`; queries behind the last key get the last row.
    """
    is_masked = problem.causal or problem.window != (-1, -1) or problem.attention_chunk > 0
    steps = np.arange(seq.seqlen_q) if is_masked else np.zeros(seq.seqlen_q, np.int64)
    return np.clip(first + steps, 0, _positions(problem) - 1)


def _rotate(x: np.ndarray, positions: np.ndarray, tables: tuple[np.ndarray, ...], cache: Cache, sign: float) -> None:
    """Rotate x (rows, heads, dim) in place by each row's position; a sign of 1 adds sizes instead."""
    half = cache.rotary_dim // 2
    first = np.arange(half) * 2 if cache.interleaved else np.arange(half)
    second = first + (1 if cache.interleaved else half)
    cos, sin = (table[positions][:, None] for table in tables)
    a = x[..., first]
    b = x[..., second]
    x[..., first] = a * cos + sign * b * sin
    x[..., second] = a * sin + b * cos


@np.errstate(invalid="ignore")  # keys may hold NaN and Inf
def check_written(
    problem: AttentionProblem, operands: Operands, before: Mapping[str, Any], after: tuple[Any, Any]
) -> None:
    """Check that a call wrote the keys that it appends into its cache, and nothing else.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed. Without a cache there is nothing to check.
    operands : Operands
        What :func:`serve` was given.
    before : mapping of str to array
        What :func:`serve` returned.
    after : (array, array)
        K and V of the cache after the call.

    Raises
    ------
    RuntimeError
        If an appended key or value is missing, or another place has changed. Rotated keys may differ by two roundings
        and by products below 2^-126, which binary32 may flush; all else must be equal.
    """
    from fa3_reference.formats import FORMATS

    cache = problem.cache
    if cache is None:
        return
    stored = dict(zip(("k_cache", "v_cache"), after, strict=True))
    for name, x in stored.items():
        changed = (x.view(np.uint8) != before[name].view(np.uint8)).any(axis=(2, 3))
        if int(changed.sum()) > sum(cache.new):
            places = f"{int(changed.sum())} keys of {name}, of which {sum(cache.new)} are appended"
            raise RuntimeError(f"it changed {places}")
    if not cache.new:
        return
    lengths = before["cache_seqlens"] + np.array(cache.new, np.int32)
    whole = replace(problem, cache=replace(cache, new=(), rotary_dim=0))  # the appended keys are in the cache now
    k, v = gathered(whole, {**before, **stored, "cache_seqlens": lengths})
    _, want = rotated(problem, operands.q, operands.k)
    _, sizes = rotated(problem, np.abs(operands.q), np.abs(operands.k), of_sizes=True)
    kept = FORMATS[problem.dtype]
    allowed = sizes * 2.0**-7 + kept.min_subnormal + 2.0**-125 if cache.rotary_dim else np.zeros(sizes.shape)
    has_values = np.array_equal(v.astype(np.float32), operands.v.astype(np.float32), equal_nan=True)
    if not (has_values and _holds(k.astype(np.float64), want, allowed, kept.max_finite)):
        raise RuntimeError("it did not write the keys that it appends into its cache")


def _holds(got: np.ndarray, want: np.ndarray, allowed: np.ndarray, largest: float) -> bool:
    """Tell whether keys are what they should be, up to ``allowed``.

    NaN must be NaN, and an infinity is right where the wanted key may round beyond ``largest``.
    """
    is_near = (got == want) | (np.isfinite(want) & (np.abs(got - want) <= allowed))
    is_beyond = np.isinf(got) & (np.sign(got) * want + allowed > largest)
    return bool(np.all(is_near | is_beyond | (np.isnan(got) & np.isnan(want))))


def with_cache(problem: AttentionProblem, cache: Cache) -> AttentionProblem:
    """Return a problem, packed, with its keys in a cache; a problem that has a cache stays as it is.

    Parameters
    ----------
    problem : AttentionProblem
        Batched or packed.
    cache : Cache
        Where its keys are to lie.

    Returns
    -------
    AttentionProblem
        The same attention over packed sequences.
    """
    if problem.cache is not None:
        return problem
    lengths = (problem.seqlens_q, problem.seqlens_k)
    if not problem.is_varlen:
        lengths = ((problem.seqlen_q,) * problem.batch, (problem.seqlen_k,) * problem.batch)
    return replace(problem, seqlens_q=lengths[0], seqlens_k=lengths[1], cache=cache)


def in_cache(problem: AttentionProblem, operands: Operands, cache: Cache) -> tuple[AttentionProblem, Operands]:
    """Return a problem as :func:`with_cache` does, and its operands packed; a problem that has a cache stays as it is.

    Parameters
    ----------
    problem : AttentionProblem
        Batched or packed.
    operands : Operands
        Operands of the problem.
    cache : Cache
        Where its keys are to lie.

    Returns
    -------
    problem : AttentionProblem
        The same attention over packed sequences.
    operands : Operands
        The same numbers, in packed shapes.
    """
    if problem.cache is not None:
        return problem, operands
    packed = {name: x.reshape(-1, *x.shape[-2:]) for name in "qkv" for x in [getattr(operands, name)]}
    return with_cache(problem, cache), replace(operands, **packed)


def serve(problem: AttentionProblem, operands: Operands) -> dict[str, Array]:
    """Return the arrays that a kernel is called with, by FlashAttention-3's names.

    Parameters
    ----------
    problem : AttentionProblem
        Its ``cache`` says where keys lie; without one q, k and v stay as they are.
    operands : Operands
        Packed, in the kernel's format.

    Returns
    -------
    dict of str to array
        ``q`` is (batch, seqlen_q, nheads, head_dim) where all sequences have equally many queries, else packed, with
        ``cu_seqlens_q``; a problem with ``qv`` has its last channels apart, under that name. ``sinks`` are there where
        the problem has them. Without a cache the rest is ``k`` and ``v``. With one, ``k_cache`` and ``v_cache`` are
        (num_pages, page_size, nheads_kv, head_dim) with ``page_table``, int32 (rows, pages), or (rows, keys,
        nheads_kv, head_dim). ``cache_seqlens``, int32 (batch,), are the lengths before the call, leftpad included.
        ``k_new`` and ``v_new`` are appended behind them; where sequences append different numbers of keys they are
        packed, with ``cu_seqlens_k_new``. ``rotary_cos``, ``rotary_sin``, ``cache_leftpad`` and ``cache_batch_idx`` are
        there where the cache has them. Where each key has a descale of its own, ``k_descale`` and ``v_descale`` are
        stored as keys are.

    Notes
    -----
    Entries of the page table that no key of a sequence needs, in front and behind, name a spare page if there is one.
    """
    q, k, v = operands.q, operands.k, operands.v
    call: dict[str, Array] = {"q": q}
    if problem.qv:
        own = problem.head_dim - problem.head_dim_v
        call["q"], call["qv"] = (np.ascontiguousarray(x) for x in (q[..., :own], q[..., own:]))
        k = np.ascontiguousarray(k[..., :own])
    if operands.sinks is not None:
        call["sinks"] = operands.sinks
    cache = problem.cache
    if cache is None:
        return call | {"k": k, "v": v}
    if problem.has_equal_queries:
        for name in call.keys() & {"q", "qv"}:
            call[name] = call[name].reshape(problem.batch, problem.seqlen_q, *call[name].shape[1:])
    else:
        call["cu_seqlens_q"] = problem.cu_seqlens_q
    call["cache_seqlens"] = np.array(cache.seqlens(problem), np.int32)
    if cache.new:
        call |= _appended(problem, cache, {"k_new": k, "v_new": v})
    if cache.rotary_dim:
        call["rotary_cos"], call["rotary_sin"] = rotary_tables(problem)
    if cache.leftpad:
        call["cache_leftpad"] = np.array(cache.leftpad, np.int32)
    arrays = {"k_cache": k, "v_cache": v}
    if cache.fp8 == "row":
        arrays |= {f"{name}_descale": _by_row(problem, getattr(operands, f"{name}_descale")) for name in "kv"}
    return call | (_in_pages if cache.page_size else _in_rows)(problem, cache, arrays)


def _by_row(problem: AttentionProblem, descale: Descale) -> Array:
    """Return the descale of every key and kv head, float32 (total_k, nheads_kv)."""
    heads = range(problem.nheads_kv)
    parts = [[descale.rows(s.index, h, s.seqlen_k) for h in heads] for s in problem.sequences()]
    return np.concatenate([np.stack(part, axis=1) for part in parts])


def _appended(problem: AttentionProblem, cache: Cache, arrays: Mapping[str, Array]) -> dict[str, Array]:
    # the last keys of each sequence: batched where all append equally many, else packed
    parts = list(zip(problem.sequences(), cache.before(problem), strict=True))
    call = {name: np.concatenate([problem.rows_k(x, seq)[n:] for seq, n in parts]) for name, x in arrays.items()}
    if len(set(cache.new)) == 1:
        return {name: x.reshape(problem.batch, cache.new[0], *x.shape[1:]) for name, x in call.items()}
    return call | {"cu_seqlens_k_new": np.array([0, *accumulate(cache.new)], np.int32)}


def _behind(cache: Cache, shape: tuple[int, ...], like: Array, rng: np.random.Generator) -> Array:
    """Return numbers for the places that no kernel may read: NaN, or random numbers four times as large as usual."""
    if cache.behind == "nan":
        return np.full(shape, np.nan).astype(like.dtype)
    return (4 * rng.standard_normal(shape)).astype(like.dtype)


def _rows(problem: AttentionProblem, cache: Cache, rng: np.random.Generator) -> tuple[int, dict[str, Array]]:
    """Return how many rows there are, and ``cache_batch_idx`` by its name where it says which is a sequence's."""
    if not cache.indexed:
        return problem.batch, {}
    count = problem.batch + cache.spare
    return count, {"cache_batch_idx": rng.permutation(count)[: problem.batch].astype(np.int32)}


def _in_rows(problem: AttentionProblem, cache: Cache, arrays: Mapping[str, Array]) -> dict[str, Array]:
    # one row of the cache for each sequence, its own keys behind its leftpad
    rng = np.random.default_rng(cache.seed)
    pads = cache.pads(problem)
    keys = max((pad + n for pad, n in zip(pads, problem.seqlens_k or (), strict=True)), default=0) + cache.spare
    count, index = _rows(problem, cache, rng)
    where = index.get("cache_batch_idx", range(count))
    call = {name: _behind(cache, (count, keys, *x.shape[1:]), x, rng) for name, x in arrays.items()}
    for seq, pad, n in zip(problem.sequences(), pads, cache.before(problem), strict=True):
        for name, x in arrays.items():
            call[name][where[seq.index], pad : pad + n] = problem.rows_k(x, seq)[:n]
    return call | index


def _in_pages(problem: AttentionProblem, cache: Cache, arrays: Mapping[str, Array]) -> dict[str, Array]:
    # pages in a random order; a page whose bytes are those of an earlier full page is not stored again
    rng = np.random.default_rng(cache.seed)
    size = cache.page_size
    pages: list[tuple[int, dict[str, Array]]] = []  # places of others in front, and a sequence's keys behind them
    known: dict[tuple[bytes, ...], int] = {}
    tables: list[list[int]] = []
    for seq, pad, n in zip(problem.sequences(), cache.pads(problem), cache.before(problem), strict=True):
        tables.append([-1] * (pad // size))  # pages of others are the last one, which is spare if any is
        for start in range(-(pad % size), seq.seqlen_k, size):  # of the keys of the sequence, the page's first
            held = {name: problem.rows_k(x, seq)[max(start, 0) : min(start + size, n)] for name, x in arrays.items()}
            content = tuple(x.tobytes() for x in held.values())
            is_full = cache.shared and start >= 0 and start + size <= n
            tables[-1].append(known.get(content, len(pages)) if is_full else len(pages))
            if tables[-1][-1] == len(pages):
                pages.append((max(-start, 0), held))
                known |= {content: len(pages) - 1} if is_full else {}
    count = len(pages) + cache.spare
    place = rng.permutation(max(count, 1))
    call = {name: _behind(cache, (count, size, *x.shape[1:]), x, rng) for name, x in arrays.items()}
    for page, (first, held) in zip(place, pages, strict=False):
        for name, x in held.items():
            call[name][page, first : first + len(x)] = x
    rows, index = _rows(problem, cache, rng)
    table = np.full((rows, max(map(len, tables)) + cache.spare), place[-1], np.int32)
    for b, used in enumerate(tables):
        table[index["cache_batch_idx"][b] if index else b, : len(used)] = place[used]
    return call | index | {"page_table": table}


def gathered(problem: AttentionProblem, call: Mapping[str, Any]) -> tuple[Array, Array]:
    """Return packed K and V of a call: those that :func:`serve` moved, or those in an engine's own cache and tables.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed, with a cache.
    call : mapping of str to array
        The arrays of the call, under the names of :func:`serve`.

    Returns
    -------
    k, v : arrays of the problem's shapes
        Exact: keys are moved, and none is rotated.

    Raises
    ------
    ValueError
        If the problem has no cache, a table names a place outside the cache, or a sequence has too few keys there.
    KeyError
        If an array is missing.
    """
    cache = problem.cache
    if cache is None:
        raise ValueError("a problem without a cache has nothing to gather")
    found = []
    pads = np.asarray(call.get("cache_leftpad", np.zeros(problem.batch, np.int32)))
    news = np.array([0, *accumulate(cache.new or (0,) * problem.batch)])
    for stored, appended in (("k_cache", "k_new"), ("v_cache", "v_new")):
        x = np.asarray(call[stored])
        rows = np.asarray(call["page_table"]) if cache.page_size else np.arange(len(x))[:, None]
        size = cache.page_size or max(1, x.shape[1])
        new = np.asarray(call[appended]).reshape(-1, *x.shape[2:]) if cache.new else x[:0].reshape(0, *x.shape[2:])
        parts = []
        for b, n in enumerate(cache.before(problem)):
            row = int(np.asarray(call.get("cache_batch_idx", range(problem.batch)))[b])
            if n and not 0 <= row < len(rows):
                raise ValueError(f"the row of sequence {b} must lie in [0, {len(rows)}), got {row}")
            first, pad = divmod(int(pads[b]), size)
            where = rows[row, first : first - (-(pad + n) // size)] if n else rows.ravel()[:0]
            if not np.all((where >= 0) & (where < len(x))):
                raise ValueError(f"the entries of sequence {b} must lie in [0, {len(x)}), got {where.tolist()}")
            if len(own := x[where].reshape(-1, *x.shape[2:])[pad : pad + n]) != n:
                raise ValueError(f"sequence {b} must have {n} keys in its cache, got {len(own)}")
            parts += [own, new[news[b] : news[b + 1]]]
        found.append(np.concatenate(parts))
    k, v = found
    return (np.concatenate([k, v], axis=-1) if problem.qv else k), v
