"""Calls that show a mistake: operands of every kind, and whether a kernel differs there from the right one.

A witness is a function of an exhibit. Operands are made anew for each call, as kernels write into caches, and pages of
a large pool that no call touches take no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import fa3verify
from tests.quality.calls import plain
from tests.quality.calls.exhibits import Exhibit

F = np.float32
E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
Operands = tuple[tuple[np.ndarray, ...], dict[str, Any]]
Make = Callable[..., Operands]
APART = 2.0**-6  # of the largest number, by which a wrong output must be off
_COMPARED = 2**26  # elements of a cache beyond which its contents are not compared


def normal(rng, shape, dtype, size=1.0):
    """Standard normal numbers in a format."""
    return (size * rng.standard_normal(shape, F)).astype(dtype)


def dense(  # noqa: PLR0913 (sizes)
    batch=1,
    nheads=1,
    nheads_kv=1,
    seqlen_q=2,
    seqlen_k=3,
    head_dim=64,
    head_dim_v=None,
    *,
    size=2.0,
    dtype=np.float16,
    sinks=False,
    winner=False,
    seed=0,
    **options: Any,
) -> Operands:
    """Batched operands of a forward whose scores differ by about ``size``, or whose last key is the ``winner``."""
    rng = np.random.default_rng(seed)
    q = normal(rng, (batch, seqlen_q, nheads, head_dim), dtype, size)
    k = normal(rng, (batch, seqlen_k, nheads_kv, head_dim), dtype)
    v = normal(rng, (batch, seqlen_k, nheads_kv, head_dim_v or head_dim), dtype)
    if winner:
        k[:, -1] = q[:, -1, : k.shape[2]]
    named = {"sinks": normal(rng, nheads, F)} if sinks else {}
    return (q, k, v), {"softmax_scale": head_dim**-0.5} | named | options


def packed(lengths_q=(2, 3), lengths_k=(3, 5), nheads=1, nheads_kv=1, head_dim=64, **options: Any) -> Operands:
    """Packed operands of a forward."""
    (q, k, v), options = dense(1, nheads, nheads_kv, sum(lengths_q), sum(lengths_k), head_dim, **options)
    for name, lengths in (("q", lengths_q), ("k", lengths_k)):
        options[f"cu_seqlens_{name}"] = np.cumsum([0, *lengths]).astype(np.int32)
        options[f"max_seqlen_{name}"] = max(lengths)
    return (q[0], k[0], v[0]), options


def backward(*, of: Make = dense, dlse=False, **sizes: Any) -> Operands:
    """Operands of gradients that are given out and lse."""
    (q, k, v), options = of(**sizes)
    out, lse = plain.attend(q, k, v, **options)
    rng = np.random.default_rng(1)
    named = {"dlse": normal(rng, lse.shape, F)} if dlse else {}
    return (q, k, v, normal(rng, out.shape, q.dtype), out, lse), options | named


def cache(  # noqa: PLR0913 (what a call of a cache has)
    lengths=(20, 37),
    rows=2,
    *,
    lengths_q=None,
    nheads=2,
    nheads_kv=1,
    head_dim=64,
    page_size=16,
    spare=1,
    first=0,
    new=(),
    rotary_dim=0,
    positions=0,
    leftpad=None,
    indexed=False,
    fp8="",
    sinks=False,
    winner=False,
    dtype=np.float16,
    **options: Any,
) -> Operands:
    """Operands of a call over a cache; ``lengths`` count what is appended, and no page or row lies before ``first``.

    Of the first sequence the last key may be the ``winner`` of all.
    """
    rng = np.random.default_rng(0)
    batch = len(lengths)
    pads = np.array(leftpad or (0,) * batch, np.int32)
    ends = pads + lengths
    kept = E4M3 if fp8 else dtype
    shape = (sum(lengths_q),) if lengths_q else (batch, rows)
    q = normal(rng, (*shape, nheads, head_dim), dtype, 2.0)
    options |= {"softmax_scale": head_dim**-0.5} | ({"sinks": normal(rng, nheads, F)} if sinks else {})
    if lengths_q:
        options |= {"cu_seqlens_q": np.cumsum([0, *lengths_q]).astype(np.int32), "max_seqlen_q": max(lengths_q)}
    options["cache_seqlens"] = (ends - np.array(new or (0,) * batch)).astype(np.int32)
    if page_size:
        counts = -(-ends // page_size)
        order = rng.permutation(sum(counts) + spare) + first
        table = np.full((batch, max(counts) + spare), order[-1], np.int32)
        for line, begin, count in zip(table, np.cumsum(counts) - counts, counts, strict=True):
            line[:count] = order[begin : begin + count]
        options["page_table"] = table
        held = (len(order), page_size, nheads_kv, head_dim)
    else:
        held = (batch + spare * indexed, max(ends) + spare, nheads_kv, head_dim)
        if indexed:
            options["cache_batch_idx"] = (rng.permutation(held[0])[:batch] + first).astype(np.int32)
    pools = [np.zeros((first + held[0], *held[1:]), kept) for _ in "kv"]
    for pool in pools:
        pool[first:] = normal(rng, held, kept)
    if winner:
        pools[0][plain.places(options["page_table"][0], ends[0] - 1, ends[0], page_size)] = q[0, -1, :nheads_kv]
    if leftpad:
        options["cache_leftpad"] = pads
    if fp8:
        scales = held[:3] if fp8 == "row" else (batch, nheads_kv)
        options |= {f"{name}_descale": np.exp(rng.standard_normal(scales)).astype(F) for name in "kv"}
    if new:
        ragged = {} if len(set(new)) == 1 else {"cu_seqlens_k_new": np.cumsum([0, *new]).astype(np.int32)}
        shape = (sum(new),) if ragged else (batch, new[0])
        options |= ragged | {f"{name}_new": normal(rng, (*shape, nheads_kv, head_dim), dtype) for name in "kv"}
    if rotary_dim:
        angles = np.arange(positions or max(lengths))[:, None] * 1e4 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
        named = {"rotary_cos": np.cos(angles).astype(dtype), "rotary_sin": np.sin(angles).astype(dtype)}
        options |= named | {"rotary_interleaved": options.pop("interleaved", False)}
    return (q, *pools), options


RIGHT: dict[Make, Callable[..., Any]] = {
    dense: plain.attend,
    packed: plain.attend,
    cache: plain.cached,
    backward: plain.gradients,
}


def same(arrays: tuple[np.ndarray, ...], options: dict[str, Any]) -> Operands:
    """Leave operands as they are."""
    return arrays, options


def differs(make: Make, view: Callable[..., Operands] = same, *, after: dict[str, Any] | None = None, **sizes: Any):
    """Return a witness: whether outputs, or what a call leaves in its cache, differ from the right one's.

    ``view`` changes how operands lie. With ``after`` a call of these sizes comes first.
    """

    def witness(exhibit: Exhibit) -> bool:
        if after is not None:
            arrays, options = view(*make(**(sizes | after)))
            exhibit.called(*arrays, **options)
        given, options = view(*make(**sizes))
        want = RIGHT[make](*given, **options)
        again, options = view(*make(**sizes))
        try:
            got = exhibit.called(*again, **options)
        except (IndexError, ValueError, RuntimeError):
            return True
        is_kept = make is cache and given[1].size < _COMPARED
        pairs = [*zip(got, want, strict=False), *(zip(again[1:], given[1:], strict=True) if is_kept else ())]
        return any(is_apart(*pair) for pair in pairs if pair[0] is not None)

    return witness


def is_apart(got: np.ndarray, want: np.ndarray) -> bool:
    """Tell whether an array is off by more than rounding explains."""
    a, b = (np.asarray(x).astype(F) for x in (got, want))
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return True
    a, b = (np.where(np.isfinite(b), x, F(0)) for x in (a, b))
    return bool(a.size) and bool(np.abs(a - b).max() > APART * np.abs(b).max())


def judged(problem: fa3verify.AttentionProblem, recipe: fa3verify.Recipe | None = None):
    """Return a witness: whether an error exceeds its bound in a call that the package's own judge is given."""

    def witness(exhibit: Exhibit) -> bool:
        kernel = fa3verify.find_kernel(exhibit.reference)
        try:
            judgement = fa3verify.judge(kernel, problem, recipe or fa3verify.Recipe("normal"))
        except fa3verify.KernelError:
            return True
        return not max(judgement.measures.get(f"ratio{of}_max", 0.0) for of in ("", "_lse")) <= 1

    return witness
