"""Attention over a cache on a Hopper GPU: the bits of packed sequences, whatever pages, neighbours and garbage do."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu
LENGTHS = (1, 16, 17, 300, 1000, 0)


def packed(dtype: str = "bfloat16", *, seqlen_q: int = 1, d: int = 128, heads: tuple[int, int] = (8, 2)) -> list[Any]:
    """Queries (batch, seqlen_q, ...), and keys and values of all sequences in one piece."""
    import torch

    torch.manual_seed(0)
    shapes = [(len(LENGTHS), seqlen_q, heads[0], d), *((sum(LENGTHS), heads[1], d),) * 2]
    return [torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for shape in shapes]


def in_pages(x: Any, page: int, table: Any, *, behind: float = float("nan")) -> Any:
    """Keys in the pages that a table names."""
    import torch

    cache = torch.full((int(table.max()) + 1, page, *x.shape[1:]), behind, device="cuda").to(x.dtype)
    start = 0
    for row, n in zip(table.tolist(), LENGTHS, strict=True):
        for i in range(n):
            cache[row[i // page], i % page] = x[start + i]
        start += n
    return cache


def shuffled(page: int, *, garbage: int | None = None) -> Any:
    """A page table; entries behind the last used page lead out of the cache."""
    import torch

    entries = -(-max(LENGTHS) // page) + 1
    table = torch.randperm(len(LENGTHS) * entries).view(len(LENGTHS), entries).int()
    for row, n in zip(table, LENGTHS, strict=True):
        if garbage is not None:
            row[-(-n // page) :] = garbage
    return table.cuda()


def lengths() -> Any:
    import torch

    return torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")


def starts(*values: int) -> Any:
    import torch

    return torch.tensor([0, *values], device="cuda").cumsum(0).int()


def in_one_piece(q: Any, k: Any, v: Any, **options: Any) -> Any:
    from fa3_kernels.api import flash_attn_varlen_func

    batch, seqlen_q = q.shape[:2]
    given = (starts(*(seqlen_q,) * batch), starts(*LENGTHS), seqlen_q, max(LENGTHS))
    return flash_attn_varlen_func(q.flatten(0, 1), k, v, *given, **options).view(q.shape)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("page", [8, 16, 64, 128, 256])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"num_splits": 3}, {"window_size": (100, 0)}],
    ids=["dense", "causal", "3", "left"],
)
def test_pages_in_any_order_give_the_bits_of_one_piece_and_garbage_is_not_seen(dtype, page, options):
    import torch

    from fa3_kernels.api import flash_attn_with_kvcache

    q, k, v = packed(dtype, seqlen_q=1 if page % 16 else 5)
    table = shuffled(page)
    caches = [in_pages(x, page, table) for x in (k, v)]
    table = torch.where(torch.arange(table.shape[1]).cuda() * page < lengths()[:, None], table, 1 << 29)
    options = {"num_splits": 1} | options
    got = flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths(), page_table=table, **options)
    assert torch.equal(got, in_one_piece(q, k, v, **options))


def test_rows_of_a_cache_give_the_bits_of_one_piece():
    import torch

    from fa3_kernels.api import flash_attn_with_kvcache

    q, k, v = packed(seqlen_q=3)
    index = torch.randperm(9)[: len(LENGTHS)].int().cuda()
    caches = [in_pages(x, 1100, index[:, None]) for x in (k, v)]
    got = flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths(), cache_batch_idx=index, causal=True, num_splits=1)
    assert torch.equal(got, in_one_piece(q, k, v, causal=True))


def test_a_sink_of_minus_infinity_is_none_and_one_that_is_large_takes_all():
    import torch

    from fa3_kernels.api import flash_attn_with_kvcache

    q, k, v = packed()
    table = shuffled(16)
    caches = [in_pages(x, 16, table) for x in (k, v)]
    options: dict[str, Any] = {"cache_seqlens": lengths(), "page_table": table, "return_softmax_lse": True}
    want, want_lse, *_ = flash_attn_with_kvcache(q, *caches, **options)
    none = torch.full((8,), -torch.inf, device="cuda")
    got, lse, *_ = flash_attn_with_kvcache(q, *caches, sinks=none, **options)
    assert torch.equal(got, want)
    assert torch.equal(lse, want_lse)
    got, lse, *_ = flash_attn_with_kvcache(q, *caches, sinks=none.clone().fill_(60), **options)
    assert bool((got.abs() < 1e-18).all())
    assert bool((lse - 60).abs().max() < 1e-4)


@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_lse_is_contiguous_and_has_the_values_of_one_piece(seqlen_q):
    import torch

    from fa3_kernels.api import flash_attn_varlen_func, flash_attn_with_kvcache

    q, k, v = packed(seqlen_q=seqlen_q)
    table = shuffled(16)
    caches = [in_pages(x, 16, table) for x in (k, v)]
    options: dict[str, Any] = {"num_splits": 1, "causal": True}
    _, lse, *_ = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths(), page_table=table, return_softmax_lse=True, **options
    )
    given = (starts(*(seqlen_q,) * len(LENGTHS)), starts(*LENGTHS), seqlen_q, max(LENGTHS))
    _, want = flash_attn_varlen_func(q.flatten(0, 1), k, v, *given, return_attn_probs=True, **options)
    assert lse.is_contiguous()
    assert torch.equal(lse, want.view(8, len(LENGTHS), seqlen_q).transpose(0, 1))


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_keys_that_are_appended_are_attended_to(is_interleaved):
    import torch

    from fa3_kernels.api import flash_attn_with_kvcache

    q, k, v = packed(seqlen_q=2)
    new = [torch.randn(len(LENGTHS), 2, 2, 128, device="cuda").to(q.dtype) for _ in "kv"]
    table = shuffled(16)
    caches = [in_pages(x, 16, table) for x in (k, v)]
    angles = torch.rand(1100, 32, device="cuda") * 6
    rotary: dict[str, Any] = {"rotary_cos": angles.cos().to(q.dtype), "rotary_sin": angles.sin().to(q.dtype)}
    rotary |= {"rotary_interleaved": is_interleaved}
    options: dict[str, Any] = {"page_table": table, "causal": True, "num_splits": 1}
    got = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths(), **rotary, **options)
    turned = [x.clone() for x in caches]
    positions = lengths()[:, None] + torch.arange(2, device="cuda")
    a, b = (slice(0, 64, 2), slice(1, 64, 2)) if is_interleaved else (slice(0, 32), slice(32, 64))
    cos, sin = (rotary[f"rotary_{name}"][positions][:, :, None].float() for name in ("cos", "sin"))
    q_turned = q.clone()
    q_turned[..., a] = (q[..., a].float() * cos - q[..., b].float() * sin).to(q.dtype)
    q_turned[..., b] = (q[..., a].float() * sin + q[..., b].float() * cos).to(q.dtype)
    want = flash_attn_with_kvcache(q_turned, *turned, cache_seqlens=lengths() + 2, **options)
    assert torch.equal(got, want)


def test_a_captured_call_follows_lengths_and_pages_that_change():
    import torch

    from fa3_kernels.api import flash_attn_with_kvcache

    q, k, v = packed()
    table, used = shuffled(16), lengths()
    caches = [in_pages(x, 16, table) for x in (k, v)]
    options: dict[str, Any] = {"cache_seqlens": used, "page_table": table}
    flash_attn_with_kvcache(q, *caches, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flash_attn_with_kvcache(q, *caches, **options)
    used -= (used > 5).int() * 3
    table[3, :2] = table[3, :2].flip(0)
    graph.replay()
    assert torch.equal(got, flash_attn_with_kvcache(q, *caches, **options))
