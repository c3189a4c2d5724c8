"""Laws about calls that serve: caches in pages and rows, appended keys, sinks, FP8 caches and attention chunks.

Where a key lies must change nothing; an appended key, and a sink, must act as a key; a key in FP8 must act as the
numbers that it dequantises to; and calls that append their keys one after the other must give what one prefill gives.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fa3_reference.cache import Cache, in_cache
from fa3_reference.formats import FORMATS
from fa3verify.cases.case import Case
from fa3verify.cases.dimensions import PAGE_SIZES
from fa3verify.kernels.record import Kernel
from fa3verify.properties.compare import Found, agree, agreeing, called, same_bits, slack, summed, within
from fa3verify.properties.law import Drawn, Setup, Trial, Untaken
from fa3verify.properties.trials import Wanted, drawn, law, needs
from fa3verify.properties.truncation import chunked, chunks

_SCORES = (0, 3, -3, 20, -40)  # of a sink, in nats
_MOST_PAGE = 1024  # keys of a page
_SCALE_BITS = 12  # significand of a scale whose product with a 16-bit number is exact in binary32, as a sink must be


def _stored(setup: Setup, cache: Cache) -> Setup:
    """Return the call with its keys in a cache."""
    problem, operands = in_cache(setup.problem, setup.operands, cache)
    return setup._replace(problem=problem, operands=operands)


def _same(setup: Setup, other: Setup, what: str) -> Found:
    """Compare two calls with the same arithmetic: bit for bit, or within what two runs of one call may differ by."""
    got = other.run()
    expected = setup.run()
    allowed = slack(setup)
    yield within(what, got, expected, allowed) if allowed else same_bits(what, got, expected)


def _sizes(kernel: Kernel) -> tuple[int, ...]:
    """Return the page sizes that a kernel takes; (0,), which stands for rows, if it takes no pages."""
    return (kernel.page_sizes or PAGE_SIZES) if "paged" in kernel.features else (0,)


def _pages(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    sizes = st.sampled_from(_sizes(kernel))
    return {"page_size": draw(sizes), "other_size": draw(sizes), "seed": draw(st.integers(1, 99))}


def _page(trial: Trial, name: str = "page_size") -> int:
    return trial.integer(name, 0, _MOST_PAGE)


def _behind(setup: Setup, trial: Trial) -> Found:
    rows = {0} if "seqused_k" in setup.kernel.features else set()
    for size in sorted({_page(trial), *rows}):  # a kernel that takes both has another path for rows
        plain = _stored(setup, Cache(size))
        poisoned = _stored(setup, Cache(size, behind="nan"))
        where = f"and in spare pages of {size} keys" if size else "in a row"
        yield from _same(plain, poisoned, f"NaN behind every sequence {where} against other garbage there")


def _anywhere(setup: Setup, trial: Trial) -> Found:
    seed = trial.integer("seed", 1, 99)
    yield from _same(_paged(setup, trial), _stored(setup, Cache(_page(trial), seed=seed)), "moved pages")


def _shared(setup: Setup, trial: Trial) -> Found:
    problem, operands = in_cache(setup.problem, setup.operands, Cache(_page(trial)))
    arrays = {"k": operands.k.copy(), "v": operands.v.copy()}
    first, *others = problem.sequences()
    for seq in others:  # give all sequences the first one's prefix
        n = min(first.seqlen_k, seq.seqlen_k)
        for x in arrays.values():
            problem.rows_k(x, seq)[:n] = problem.rows_k(x, first)[:n]
    alike = setup._replace(problem=problem, operands=replace(operands, **arrays))
    apart = alike._replace(problem=replace(problem, cache=Cache(_page(trial), shared=False)))
    yield from _same(apart, alike, "pages that sequences share against a copy for each")


def _paged(setup: Setup, trial: Trial, name: str = "page_size") -> Setup:
    """Return the call with its keys in the pages, or rows, of a trial."""
    return _stored(setup, Cache(_page(trial, name)))


def _appending(setup: Setup, trial: Trial) -> Setup:
    """Return the call that appends the keys of its own queries."""
    new = tuple(min(seq.seqlen_q, seq.seqlen_k) for seq in setup.problem.sequences())
    return _stored(setup, Cache(_page(trial), new=new))


def _kinds(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    kinds = ("tensor", "head") * ("fp8_cache" in kernel.features) + ("row",) * ("fp8_rows" in kernel.features)
    return _pages(draw, kernel, case) | {"fp8": draw(st.sampled_from(kinds))}


def _dequantized(setup: Setup, trial: Trial) -> Found:
    """Compare a cache in e4m3 with a 16-bit cache of the numbers that it dequantises to."""
    fp8: Any = trial.choice("fp8", ("tensor", "head", "row"))
    stored = _stored(setup, Cache(_page(trial), fp8=fp8))
    exact = stored.operands.dequantized(stored.problem)
    operands = stored.operation.prepare(stored.problem, exact, None, {}).operands
    dtype = operands.q.dtype
    keys, values = (x.astype(np.float32).astype(dtype) for x in operands.dequantized(stored.problem)[1:3])
    plain = _stored(
        setup.fed(k=keys.reshape(setup.operands.k.shape), v=values.reshape(setup.operands.v.shape)), Cache(_page(trial))
    )
    got = called(stored._replace(operands=operands))
    yield agree(
        trial, f"e4m3 with a descale for each {fp8} against what it dequantises to", got=got, expected=called(plain)
    )


def _no_sink(setup: Setup, trial: Trial) -> tuple[Setup, Setup]:
    none = np.full(setup.problem.nheads, -np.inf, np.float32)
    return setup._replace(problem=replace(setup.problem, sinks=True)).fed(sinks=none), setup


def _sink_as_key(setup: Setup, trial: Trial) -> Found:
    """Compare a sink with one more key of the same score and V = 0; Q is 1, and K 0, in channel 0 of all other keys."""
    score = trial.integer("score", -100, 100)
    fraction, exponent = math.frexp(setup.problem.softmax_scale)
    scale = math.ldexp(round(fraction * 2**_SCALE_BITS), exponent - _SCALE_BITS)
    problem = replace(setup.problem, softmax_scale=scale)
    dtype = FORMATS[problem.dtype].dtype
    along = np.array(score / problem.softmax_scale).astype(dtype)
    q = setup.operands.q.copy()
    k = setup.operands.k.copy()
    q[..., 0] = 1
    k[..., 0] = 0
    key = np.zeros((problem.batch, 1, *k.shape[2:]), dtype)
    key[..., 0] = along
    value = np.zeros((problem.batch, 1, *setup.operands.v.shape[2:]), dtype)
    sinks = np.full(problem.nheads, float(along) * problem.softmax_scale, np.float32)
    sunk = setup._replace(problem=replace(problem, sinks=True)).fed(q=q, k=k, sinks=sinks)
    longer = setup._replace(problem=replace(problem, seqlen_k=problem.seqlen_k + 1))
    keyed = longer.fed(q=q, k=np.concatenate([k, key], axis=1), v=np.concatenate([setup.operands.v, value], axis=1))
    what = f"sinks of {sinks[0]} against a key with that score and V = 0"
    got = called(sunk)
    expected = called(keyed)
    yield within(what, got.outputs, expected.outputs, summed(got.bound, expected.bound))


def _one_chunk(setup: Setup, trial: Trial) -> tuple[Setup, Setup]:
    if any(seq.seqlen_q > seq.seqlen_k for seq in setup.problem.sequences()):
        raise Untaken("a query in front of the first key is in no chunk that holds one")
    return setup._replace(problem=replace(setup.problem, attention_chunk=max(1, setup.problem.seqlen_k))), setup


_SINKS = needs("sinks", dtypes=("fp16", "bf16"))
_SMALL = Wanted(longest_q=16, descales="uniform")  # functions for caches take no other descales
_DENSE = Wanted(masks="none", layout="batched", softcap=False)
SERVING_LAWS = (
    law(
        "what_lies_behind_never_matters",
        "NaN behind every sequence's keys, in spare pages and in rows of none changes no bit",
        "exact",
        _behind,
        wanted=_SMALL,
        parameters=_pages,
        applies=lambda kernel: bool({"paged", "seqused_k"} & kernel.features),
    ),
    law(
        "pages_lie_anywhere",
        "pages in another order, with other garbage behind, change no bit",
        "exact",
        _anywhere,
        wanted=_SMALL,
        parameters=_pages,
        applies=needs("paged"),
    ),
    law(
        "shared_pages_equal_copies",
        "sequences that share pages of a common prefix give the bits of those that have a copy each",
        "exact",
        _shared,
        wanted=Wanted(longest_q=16, several=True, descales="uniform"),
        parameters=_pages,
        applies=needs("paged"),
    ),
    law(
        "pages_of_any_size",
        "pages of two sizes agree, bit for bit where claimed, else within the sum of both bounds",
        "agreement",
        agreeing("pages of another size", lambda x, trial: (_paged(x, trial, "other_size"), _paged(x, trial))),
        wanted=_SMALL,
        parameters=_pages,
        applies=needs("paged"),
    ),
    law(
        "pages_equal_rows",
        "keys in pages agree with keys in rows, bit for bit where claimed, else within the sum of both bounds",
        "agreement",
        agreeing("keys in pages against keys in rows", lambda x, trial: (_paged(x, trial), _stored(x, Cache(0)))),
        wanted=_SMALL,
        parameters=_pages,
        applies=needs("paged", "seqused_k"),
    ),
    law(
        "appended_keys_equal_stored_ones",
        "a call that appends its keys agrees with one whose cache holds them, bit for bit where claimed, else within "
        "the sum of both bounds",
        "agreement",
        agreeing("its own keys appended", lambda x, trial: (_appending(x, trial), _paged(x, trial))),
        wanted=_SMALL,
        parameters=_pages,
        applies=needs("append"),
    ),
    law(
        "prefill_equals_chunks_that_append",
        "rows of a causal call agree with calls of fewer of its queries that append their own keys to a cache of those "
        "before, of its last query alone too, bit for bit where claimed, else within the sum of both bounds",
        "agreement",
        lambda setup, trial: chunked(setup, trial, lambda chunk: _appending(chunk, trial)),
        wanted=Wanted(masks="causal", longest_q=16, single=True, descales="uniform"),
        parameters=lambda draw, kernel, case: _pages(draw, kernel, case) | chunks(draw, kernel, case),
        applies=needs("causal", "append"),
    ),
    law(
        "fp8_keys_equal_dequantised_ones",
        "a cache of e4m3 beside 16-bit Q agrees with one of its keys and values times their descales in binary32 and "
        "rounded to 16 bits, bit for bit where claimed, else within the sum of both bounds",
        "agreement",
        _dequantized,
        wanted=_SMALL,
        parameters=_kinds,
        applies=lambda kernel: bool({"fp8_cache", "fp8_rows"} & kernel.features),
    ),
    law(
        "a_sink_of_minus_infinity_is_none",
        "sinks of -inf agree with none, bit for bit where claimed, else within the sum of both bounds",
        "agreement",
        agreeing("sinks of -inf against none", _no_sink),
        wanted=Wanted(descales="uniform"),
        applies=needs("sinks"),
    ),
    law(
        "a_sink_is_a_key_without_value",
        "a sink agrees with a key that has its score and V = 0, within the sum of both bounds; dense, 16 bits",
        "agreement",
        _sink_as_key,
        wanted=_DENSE,
        parameters=drawn(score=st.sampled_from(_SCORES)),
        applies=lambda kernel: _SINKS(kernel) and "narrow_sinks" not in kernel.features,
    ),
    law(
        "one_chunk_is_none",
        "a chunk that holds all keys agrees with none, bit for bit where claimed, else within the sum of both bounds",
        "agreement",
        agreeing("one chunk of all keys against none", _one_chunk),
        wanted=Wanted(),
        applies=needs("attention_chunk"),
    ),
)
