"""In FlashAttention-3's place on a Hopper GPU: used lengths, schedules made before, sinks, pages, its operators."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
LENGTHS = ((120, 300), (1, 17), (64, 64), (200, 0), (0, 130))  # of queries and of keys
USED = ((100, 250), (1, 17), (0, 30), (199, 0), (0, 5))


def starts_of(lengths: Any) -> Any:
    import torch

    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def integers(values: Any) -> Any:
    import torch

    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def rows(dtype: str = "bfloat16", d: int = 64) -> list[Any]:
    import torch

    torch.manual_seed(0)
    totals = [sum(x) for x in zip(*LENGTHS, strict=True)]
    shapes = [(totals[0], 8, d), *((totals[1], 2, d),) * 2]
    return [torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for shape in shapes]


def kept(side: int, is_q: bool, is_k: bool) -> tuple[Any, list[int]]:
    """The rows that count, as a mask, and their lengths."""
    import torch

    lengths = [x[side] for x in LENGTHS]
    used = [x[side] for x in USED] if (is_q, is_k)[side] else lengths
    return torch.cat([torch.arange(n) < m for n, m in zip(lengths, used, strict=True)]).cuda(), used


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, 0)}], ids=["dense", "causal", "window"])
@pytest.mark.parametrize(("is_q", "is_k"), [(True, False), (False, True), (True, True)])
def test_used_lengths_give_the_bits_of_the_rows_that_count_alone(dtype, splits, options, is_q, is_k):
    import torch

    from fa3_kernels.api import flash_attn_varlen_func

    q, k, v = rows(dtype)
    of_q, used_q = kept(0, is_q, is_k)
    of_k, used_k = kept(1, is_q, is_k)
    scales = {}
    if dtype == "float8_e4m3fn":
        scales = {f"{x}_descale": torch.rand(len(USED), 2, device="cuda") + 0.5 for x in "qkv"}
    run: Any = lambda *x, **more: flash_attn_varlen_func(  # noqa: E731
        *x, 200, 300, num_splits=splits, return_attn_probs=True, **options, **scales, **more
    )
    lengths = [starts_of(x[i] for x in LENGTHS) for i in (0, 1)]
    given = {"seqused_q": integers(used_q) if is_q else None, "seqused_k": integers(used_k) if is_k else None}
    behind = v.clone()
    behind.view(torch.uint8)[~of_k] = 0x7F if dtype == "float8_e4m3fn" else 0xFF  # NaN
    out, lse = run(q, k, behind, *lengths, **given)
    alone = [x.view(torch.uint8)[mask].view(x.dtype) for x, mask in ((q, of_q), (k, of_k), (v, of_k))]  # of any format
    want, want_lse = run(*alone, starts_of(used_q), starts_of(used_k))
    assert torch.equal(out[of_q], want)
    assert torch.equal(lse[:, of_q], want_lse)
    assert not out[~of_q].any()
    assert (lse[:, ~of_q] == -torch.inf).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, 0)}], ids=["dense", "causal", "window"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_gradients_of_used_lengths_are_those_of_the_rows_that_count_alone(options, d):
    import torch

    from fa3_kernels.api import flash_attn_varlen_func

    operands = rows(d=d)
    (of_q, used_q), (of_k, used_k) = kept(0, True, True), kept(1, True, True)
    masks = (of_q, of_k, of_k)
    lengths = [starts_of(x[i] for x in LENGTHS) for i in (0, 1)]
    leaves = [x.clone().requires_grad_() for x in operands]
    alone = [x[mask].clone().requires_grad_() for x, mask in zip(operands, masks, strict=True)]
    run: Any = flash_attn_varlen_func
    used = {"seqused_q": integers(used_q), "seqused_k": integers(used_k)}
    out = run(*leaves, *lengths, 200, 300, deterministic=True, **used, **options)
    want = run(*alone, starts_of(used_q), starts_of(used_k), 200, 300, deterministic=True, **options)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    wanted = torch.autograd.grad(want, alone, dout[of_q])
    for x, y, mask in zip(found, wanted, masks, strict=True):
        assert torch.equal(x[mask], y)
        assert not x[~mask].any()


def step(page: int | None, dtype: str, new: int, packed: bool) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """A decoding step: operands and options of the call, and arguments of its schedule."""
    import torch

    torch.manual_seed(1)
    kind = getattr(torch, dtype)
    batch, room, seqlen_q = 6, 512, 3
    shape = (batch, room, 2, 128) if page is None else (batch * room // page, page, 2, 128)
    cache = [torch.randn(shape, device="cuda").to(kind) for _ in "kv"]
    q = torch.randn(batch, seqlen_q, 8, 128, device="cuda").to(kind)
    seqlens = integers([1, 17, 300, 500, 40, 128])
    options: dict[str, Any] = {"cache_seqlens": seqlens, "causal": True}
    of_schedule: dict[str, Any] = {"page_size": page, "causal": True, "max_seqlen_k_new": new, "qkv_dtype": kind}
    if page is not None:
        options["page_table"] = torch.randperm(batch * room // page, device="cuda").view(batch, -1).int()
    if new:
        options |= {x: torch.randn(batch, new, 2, 128, device="cuda").to(kind) for x in "kv"}
    if packed:
        options |= {"cu_seqlens_q": starts_of([3, 1, 2, 3, 3, 1]), "max_seqlen_q": 3}
        of_schedule |= {"cu_seqlens_q": options["cu_seqlens_q"], "total_q": 13}
        q = q.flatten(0, 1)[:13]
    of_schedule["sizes"] = (batch, seqlen_q, room, 8, 2, 128, seqlens)
    return [q, *cache], options, of_schedule


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("page", [None, 4, 16, 128])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize(("new", "packed"), [(0, False), (3, False), (0, True)])
def test_a_schedule_made_before_is_read_and_gives_the_bits_of_the_call(dtype, page, num_splits, new, packed):
    import torch

    from fa3_kernels.api import flash_attn_with_kvcache, get_scheduler_metadata

    operands, options, of_schedule = step(page, dtype, new, packed)
    run: Any = flash_attn_with_kvcache
    options |= {"num_splits": num_splits, "return_softmax_lse": True}
    want = run(*operands, **options)
    *sizes, seqlens = of_schedule.pop("sizes")
    make: Any = lambda lengths: get_scheduler_metadata(*sizes, lengths, num_splits=num_splits, **of_schedule)  # noqa: E731
    made = make(seqlens)
    for _ in range(2):
        found = run(*operands, scheduler_metadata=made, **options)
        assert torch.equal(found[0], want[0])
        assert torch.equal(found[1], want[1])
    made.copy_(make(torch.ones_like(seqlens)))  # the lengths of a call with one key each
    assert not torch.equal(run(*operands, scheduler_metadata=made, **options)[0], want[0])
    for other in (made[1:], made.float(), torch.cat([made, made[:1]])):  # not for this call
        assert torch.equal(run(*operands, scheduler_metadata=other, **options)[0], want[0])


def test_a_captured_graph_follows_a_schedule_that_is_refreshed_in_place():
    import torch

    from fa3_kernels.api import flash_attn_with_kvcache, get_scheduler_metadata

    operands, options, of_schedule = step(16, "bfloat16", 0, False)
    *sizes, seqlens = of_schedule.pop("sizes")
    make: Any = lambda: get_scheduler_metadata(*sizes, seqlens, **of_schedule)  # noqa: E731
    held = make()
    flash_attn_with_kvcache(*operands, scheduler_metadata=held, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(*operands, scheduler_metadata=held, **options)
    for step_ in range(3):
        seqlens.add_(step_)
        held.copy_(make())
        graph.replay()
        assert torch.equal(out, flash_attn_with_kvcache(*operands, **options))


def test_multiprocessors_are_left_to_others_without_a_change_of_bits():
    import torch

    from fa3_kernels.api import flash_attn_func

    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 700, 8, 128, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    want = flash_attn_func(q, k, v, causal=True)
    out = flash_attn_func(q, k, v, causal=True, sm_margin=100)
    assert torch.equal(out, want)
    dout = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, want))
    assert all(torch.equal(x, y) for x, y in zip(found[1:], wanted[1:], strict=True))
    assert torch.allclose(found[0], wanted[0], atol=1e-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_e4m3_is_rotated_in_fp32_and_rounded_once(interleaved):
    import torch

    from fa3_kernels.api import flash_attn_with_kvcache

    torch.manual_seed(0)
    e4m3 = torch.float8_e4m3fn
    q, new = torch.randn(2, 1, 4, 64, device="cuda").to(e4m3), torch.randn(2, 1, 2, 64, device="cuda").to(e4m3)
    cache = [torch.zeros(2, 64, 2, 64, device="cuda").to(e4m3) for _ in "kv"]
    angle = torch.rand(64, 16, device="cuda") * 6
    cos, sin = angle.cos().to(e4m3), angle.sin().to(e4m3)
    options: dict[str, Any] = {"cache_seqlens": 5, "rotary_cos": cos, "rotary_sin": sin, "causal": True}
    flash_attn_with_kvcache(q, *cache, new, new, rotary_interleaved=interleaved, **options)
    x, c, s = new.float(), cos[5].float(), sin[5].float()
    first, second = (slice(0, 32, 2), slice(1, 32, 2)) if interleaved else (slice(0, 16), slice(16, 32))
    want = x.clone()
    want[..., first] = x[..., first] * c - x[..., second] * s
    want[..., second] = x[..., first] * s + x[..., second] * c
    assert torch.equal(cache[0][:, 5:6].float(), want.to(e4m3).float())


def test_all_heads_in_one_tensor_have_one_gradient():
    import torch

    from fa3_kernels.api import flash_attn_func, flash_attn_qkvpacked_func

    torch.manual_seed(0)
    qkv = torch.randn(2, 100, 3, 4, 64, device="cuda").half().requires_grad_()
    heads = torch.randn(2, 100, 8, 64, device="cuda").half().requires_grad_()
    for x, parts, more in (
        (qkv, qkv.unbind(2), {}),
        (heads, heads.split([4, 2, 2], 2), {"num_heads_q": 4}),
    ):
        out = flash_attn_qkvpacked_func(x, causal=True, deterministic=True, **more)
        want = flash_attn_func(*parts, causal=True, deterministic=True)
        assert torch.equal(out, want)
        dout = torch.randn_like(out)
        found, wanted = (torch.autograd.grad(y, x, dout)[0] for y in (out, want))
        assert torch.equal(found, wanted)


def test_an_output_may_be_given():
    import torch

    from fa3_kernels.api import flash_attn_func

    q = torch.randn(1, 50, 2, 64, device="cuda").half()
    memory = torch.full((1, 2, 50, 64), torch.nan, device="cuda").half().transpose(1, 2)
    assert flash_attn_func(q, q, q, out=memory) is memory
    assert torch.equal(memory, flash_attn_func(q, q, q))


@pytest.mark.parametrize("options", [{}, {"window_size": (20, 0)}])
def test_packed_sequences_with_sinks_are_those_of_the_mathematics(options):
    import torch

    from fa3_kernels.api import flash_attn_varlen_func

    torch.manual_seed(0)
    q = torch.randn(70, 4, 64, device="cuda").bfloat16()
    sinks = torch.randn(4, device="cuda")
    starts = starts_of([70])
    out = flash_attn_varlen_func(q, q, q, starts, starts, 70, 70, causal=True, sinks=sinks, **options)
    scores = torch.einsum("qhd,khd->hqk", q.float(), q.float()) / 8
    distance = torch.arange(70, device="cuda")[:, None] - torch.arange(70, device="cuda")
    left = options.get("window_size", (70, 0))[0]
    scores.masked_fill_((distance < 0) | (distance > left), -torch.inf)
    weights = torch.cat([scores, sinks[:, None, None].expand(-1, 70, 1)], -1).softmax(-1)[..., :-1]
    want = torch.einsum("hqk,khd->qhd", weights, q.float())
    assert torch.allclose(out.float(), want, atol=2e-2)


OPERATORS = """
import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel, SDPBackend
from fa3_kernels.drop_in import register_as_flash_attn_3
from fa3_kernels.frameworks import register_with_torch
from fa3_kernels.api import flash_attn_func, flash_attn_with_kvcache

register_as_flash_attn_3()
register_with_torch()
torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 100, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
rows = [x.detach().transpose(1, 2) for x in (q, k, v)]
want = flash_attn_func(*rows, causal=True)
e4m3 = [x.to(torch.float8_e4m3fn) for x in rows]
scales = [torch.rand(2, 4, device="cuda") + 0.5 for _ in "qkv"]
want8 = flash_attn_func(*e4m3, causal=True, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2])
pool = [torch.randn(20, 16, 4, 64, device="cuda").bfloat16() for _ in "kv"]
table = torch.randperm(20, device="cuda").view(2, 10).int()
used = torch.tensor([40, 150], dtype=torch.int32, device="cuda")
starts = torch.tensor([0, 100, 200], dtype=torch.int32, device="cuda")
paged = flash_attn_with_kvcache(
    rows[0].flatten(0, 1), *pool, cache_seqlens=used, page_table=table, cu_seqlens_q=starts, max_seqlen_q=100,
    causal=True, num_splits=1,
)
for name in ("FA3", "fa3verify"):
    activate_flash_attention_impl(name)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(out.transpose(1, 2), want, atol=1e-2), name
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(x.isfinite().all() and x.any() for x in gradients)
    try:
        from torch.nn.attention.experimental import _scaled_dot_product_attention_quantized as quantized
        run = quantized._scaled_dot_product_attention_quantized
    except ImportError:
        print("no quantized attention")
    else:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out8 = run(*(x.transpose(1, 2) for x in e4m3), is_causal=True, q_descale=scales[0], k_descale=scales[1],
                       v_descale=scales[2])
        assert torch.allclose(out8.transpose(1, 2), want8, atol=2e-2), name
    with torch.no_grad():
        try:
            from torch.nn.attention.varlen import varlen_attn
            found = varlen_attn(rows[0].flatten(0, 1), *pool, starts, None, 100, 160, window_size=(-1, 0),
                                seqused_k=used, block_table=table, num_splits=1)
        except TypeError:
            print("no pages in varlen_attn")
        else:
            assert torch.equal(found, paged), name
    restore_flash_attention_impl()
print("equal")
"""


def test_torch_finds_the_kernels_as_flash_attention_3():
    found = subprocess.run([sys.executable, "-c", OPERATORS], capture_output=True, text=True, check=False)
    assert found.stdout.strip().endswith("equal"), found.stdout + found.stderr[-3000:]
