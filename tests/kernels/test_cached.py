"""Attention over a cache with the GPU's part replaced: upstream's signature, what kernels get, what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
pytest.importorskip("triton", reason="needs triton: pip install triton==3.6.0")

import numpy as np
import torch
from hypothesis import given, strategies as st

from fa3_kernels import scheduler
from fa3_kernels.api import flash_attn_varlen_func, flash_attn_with_kvcache, get_scheduler_metadata
from fa3_kernels.gluon import launch
from fa3_kernels.gluon.dependent import check_wait
from fa3_kernels.gluon.run import KERNELS
from fa3_kernels.plan.append import Append, append_call
from fa3_kernels.plan.call import RAGGED_ROWS, Call, LaunchNumber, Pointer, View
from fa3_kernels.plan.plan import plan_of
from fa3_kernels.plan.request import ONE_PAGE, Choices, Semantics, TensorLayout, request_of
from tests.kernels.no_gpu import Encoded, no_gpu

pytestmark = pytest.mark.optional

# Upstream's parameters, in order (hopper/flash_attn_interface.py of FlashAttention-3).
UPSTREAM = [
    *("q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"),
    *("cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens"),
    *("q_descale", "k_descale", "v_descale", "softmax_scale", "causal", "window_size", "attention_chunk", "softcap"),
    *("rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin", "return_softmax_lse"),
]
BATCH = 3


@pytest.fixture
def started():
    with no_gpu() as found:
        yield found


def integers(*values: int):
    return torch.tensor(values, dtype=torch.int32)


def tensors(page: int = 16, *, pages: int = 40, seqlen_q: int = 1, dtype=torch.float16, heads=(8, 2), d=(64, 64)):
    """Queries and a cache."""
    q = torch.zeros(BATCH, seqlen_q, heads[0], d[0], dtype=dtype)
    return q, *(torch.zeros(pages, page, heads[1], n, dtype=dtype) for n in d)


def table(entries: int = 10):
    return torch.arange(BATCH * entries, dtype=torch.int32).view(BATCH, entries)


def test_the_signature_begins_with_upstreams():
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    assert [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == UPSTREAM
    defaults = {n: parameters[n].default for n in UPSTREAM[3:]}
    given = {"causal": False, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0, "rotary_interleaved": True}
    given |= {"num_splits": 0, "sm_margin": 0, "return_softmax_lse": False}
    assert {n: value for n, value in defaults.items() if value is not None} == given


def named(call, started) -> dict:
    """What a started kernel got, by the names of the call's pointers; other arguments are the call's own."""
    rest = iter(started.arguments)
    found = {}
    for wanted in call.arguments:
        got = next(rest)
        if isinstance(wanted, View):
            found[wanted.name] = got
            assert [next(rest) for _ in (*got.shape, *got.strides)] == [*got.shape, *got.strides]
        elif isinstance(wanted, Pointer):
            found[wanted.name] = got
        else:
            assert got == wanted
    assert not [x for x in rest if x is not None]
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page", [32, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True, "num_splits": 3}, {"window_size": (20, 0)}])
def test_kernels_are_given_the_calls_of_the_plan_and_the_addresses_of_their_tensors(started, dtype, page, options):
    q, k, v = tensors(page, seqlen_q=2, dtype=dtype)
    pages = table(20)[:, :10]
    used, sinks = integers(5, 0, 160), torch.zeros(8)
    out, lse, *rest = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=used, page_table=pages, sinks=sinks, return_softmax_lse=True, **options
    )
    assert (out.shape, lse.shape, lse.dtype) == ((BATCH, 2, 8, 64), (BATCH, 8, 2), torch.float32)
    assert [x.shape for x in rest] == [(0,), (0,)]  # where upstream has the partial results of splits
    rows = q.flatten(0, 1)
    choices = Choices(options.pop("num_splits", 0), promotion_interval=128 if dtype == torch.float8_e4m3fn else None)
    semantics = Semantics(options.pop("causal", False), options.pop("window_size", (-1, -1)))
    most = (BATCH, 2, launch.longest(10 * page))
    request = request_of(
        tuple(map(launch.operand, (rows, k, v))), semantics, choices, packed=most, page_size=page, has_sinks=True
    )
    plan = plan_of(request, 132)
    kernels, numbers = plan.launch(2 * BATCH, 10, (2, 10 * page))
    calls = [call.of(numbers | {"table_row": 20}) for call in kernels]
    assert [x.kernel for x in started] == [x.kernel for x in calls]
    order, attention = (named(call, x) for call, x in zip(calls[:2], started, strict=False))
    assert (order["cu_seqlens_k"], order["sequences"]) == (used.data_ptr(), attention["sequences"])
    assert (attention["page_table"], attention["sinks"]) == (pages.data_ptr(), sinks.data_ptr())
    for name, x in (("k", k), ("v", v)):
        view = next(x for x in calls[1].arguments if isinstance(x, View) and x.name == name)
        assert attention[name] == Encoded(x.data_ptr(), *view.of(x.shape, x.stride()))
        assert view.block[-2] == min(page, plan.config.tile_n)


def test_lse_is_contiguous_as_upstreams_is(started):
    q, k, v = tensors(seqlen_q=3)
    _, lse, *_ = flash_attn_with_kvcache(q, k, v, page_table=table(), return_softmax_lse=True)
    assert lse.shape == (BATCH, 8, 3)
    assert lse.is_contiguous()


@pytest.mark.parametrize("used", [5, np.int32(5)])
def test_one_length_of_all_sequences_may_be_any_integer(started, used):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "fa3_kernels.cached.forward",
            lambda *_, packed, **__: seen.append(packed) or (torch.zeros(3 * 8 * 64), None),
        )
        q, k, v = tensors()
        flash_attn_with_kvcache(q, k, v, cache_seqlens=used, page_table=table())
    assert seen[0].seqused_k.tolist() == [5] * BATCH
    with pytest.raises(ValueError, match=r"cache_seqlens must be an integer, got 5\.0"):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=5.0, page_table=table())


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_what_serving_adds_stands_at_the_parameters_of_its_name(dtype):
    q, k = (
        TensorLayout(x, y, dtype, "cuda:0")
        for x, y in (((6, 8, 64), (512, 64, 1)), ((40, 16, 2, 64), (4096, 128, 64, 1)))
    )
    request = request_of((q, k, k), Semantics(), Choices(), packed=(3, 2, 160), page_size=16, has_sinks=True)
    order, attention = plan_of(request, 132).kernels
    given = [dict(zip(KERNELS[call.kernel].arg_names, call.arguments, strict=False)) for call in (order, attention)]
    assert (given[0]["first_keys"].name, given[0]["KEEPS_EMPTY"]) == ("first_keys", True)
    assert [given[1][name].name for name in ("page_table", "table_entries", "sinks")] == [
        "page_table",
        "table_row",
        "sinks",
    ]
    assert [given[1][name] for name in ("page_keys", "page_rows")] == [16, 32]
    assert given[1]["tile_pages"] == (8 if dtype == "float16" else 1)  # small pages of e4m3 are gathered
    new = q._replace(shape=(6, 2, 64))
    called = append_call(Append(q, new, new, k, k, 16, 3, 32 if dtype == "float16" else 0, True, True))
    parameters = dict(zip(KERNELS["append"].arg_names, called.arguments, strict=True))
    assert all(name == x.name for name, x in parameters.items() if isinstance(x, Pointer | LaunchNumber))
    sizes = {"page_keys": 16, "page_rows": 32, "q_row": 512, "k_cache_row": 128, "v_cache_head": 64, "nheads": 8}
    assert {name: parameters[name] for name in sizes} == sizes


CACHES = st.sampled_from(["rows in front", "heads in front", "keys beside values"])


@given(CACHES, st.sampled_from([8, 16, 64]), st.integers(0, 39), st.integers(1, 64), st.data())
def test_a_box_holds_the_rows_of_its_page_that_hold_keys_and_no_others(kind, page, number, keys, data):
    """The coordinates are those of fa3_kernels.gluon.pages, of a page's first row."""
    shape = {"rows in front": (40, page, 2, 64), "heads in front": (40, 2, page, 64)}.get(kind, (40, 2, page, 2, 64))
    memory = torch.zeros(shape, dtype=torch.float16, device="meta")
    cache = {"rows in front": memory, "heads in front": memory.transpose(1, 2)}.get(kind, memory[:, 1:2].squeeze(1))
    x = launch.operand(cache)._replace(device="cuda:0")
    q = launch.operand(torch.zeros(1, 2, 64, dtype=torch.float16))._replace(device="cuda:0")
    request = request_of((q, x, x), Semantics(), Choices(), packed=(1, 1, 256), page_size=page)
    extents, strides = View("k", "float16", page, 64, is_packed=True).of(x.shape, x.strides)
    key = data.draw(st.integers(0, 3)) * page  # of the sequence, where the page begins
    seqlen = key + keys
    head, row = data.draw(st.integers(0, 1)), data.draw(st.integers(0, page - 1))
    assert request.pages
    start = number * request.pages.rows
    where = (RAGGED_ROWS, start + seqlen - key, head, RAGGED_ROWS - seqlen + key + row, 0)
    assert all(0 <= c < extent for c, extent in zip(where, extents, strict=True)) == (row < keys)
    address = sum(c * stride for c, stride in zip(where, strides, strict=True)) % (1 << 63)
    assert address == number * x.strides[0] + row * x.strides[1] + head * x.strides[2]


def test_a_cache_without_a_page_table_has_one_page_a_sequence(started):
    q, k, v = tensors(500, pages=BATCH)
    flash_attn_with_kvcache(q, k, v, cache_seqlens=7)
    assert started[1].descriptors[1].address == k.data_ptr()
    assert (ONE_PAGE, 500) in list(zip(started[1].arguments, started[1].arguments[1:]))


def plan_over_pages(seqlen_q: int, **choices):
    """The plan of a call over a cache with groups of four heads."""
    q, x = (launch.operand(y)._replace(device="cuda:0") for y in (torch.zeros(9, 8, 64).half(), tensors()[1]))
    return plan_of(request_of((q, x, x), Semantics(), Choices(**choices), packed=(3, seqlen_q, 256), page_size=16), 132)


@pytest.mark.parametrize(
    ("seqlen_q", "choices", "rows"),
    [
        (1, {}, 64),
        (16, {"pack_gqa": True}, 64),
        (17, {"pack_gqa": True}, 128),
        (64, {"pack_gqa": False}, 64),
        (65, {"pack_gqa": False}, 128),
        (1, {"tile": (128, 128)}, 128),
    ],
)
def test_a_tile_has_one_warpgroup_where_the_queries_of_a_sequence_have_no_more_rows(seqlen_q, choices, rows):
    config = plan_over_pages(seqlen_q, **choices).config
    assert (config.tile_m, config.pingpong) == (rows, rows > 64)


def test_over_a_cache_alone_a_kernel_starts_before_the_one_in_front_has_ended(started):
    q, k, v = tensors()
    flash_attn_with_kvcache(q, k, v, page_table=table(), num_splits=2)
    flash_attn_varlen_func(q[:, 0], k[0], v[0], integers(0, 1, 2, 3), integers(0, 4, 8, 9), 1, 5, num_splits=2)
    found = [(x.kernel, x.is_dependent) for x in started]
    names = ("packed_order", "forward_fp16", "combine")
    assert found == [*zip(names, (False, True, True)), *zip(names, (False,) * 3)]


@pytest.mark.parametrize(
    ("ptx", "is_early"),
    [
        ("ld.global.b32; griddepcontrol.wait;", True),
        ("cp.async.bulk.tensor; griddepcontrol.wait;", True),
        ("ld.global.b32;", True),
        ("griddepcontrol.wait; ld.global.b32;", False),
    ],
)
def test_a_kernel_that_starts_early_and_reads_before_it_waits_is_not_launched(ptx, is_early):
    with pytest.raises(RuntimeError, match="combine must wait for the grid in front before it reads"):
        check_wait(Call("combine", (), (), {"launch_pdl": is_early}), ptx)


def test_new_keys_are_written_before_attention_reads_how_many_there_are(started):
    q, k, v = tensors(seqlen_q=2)
    new = torch.zeros(BATCH, 2, 2, 64, dtype=torch.float16)
    used = integers(1, 2, 3)
    angles = torch.zeros(100, 16, dtype=torch.float16)
    options: dict[str, Any] = {"cache_seqlens": used, "page_table": table(), "rotary_cos": angles, "rotary_sin": angles}
    flash_attn_with_kvcache(q, k, v, new, new, causal=True, **options)
    assert [x.kernel for x in started] == ["append", "packed_order", "forward_fp16", "combine"][: len(started)]
    written, read = started[0].arguments, started[1].arguments
    assert written[10] == used.data_ptr() != written[13] == read[1]
    assert started[2].descriptors[0].address == written[1] != q.data_ptr()


REFUSALS = (
    ({"qv": 1}, "qv .* is not supported"),
    ({"sm_margin": -1}, "sm_margin must be >= 0, got -1"),
    ({"cu_seqlens_q": integers(0, 1, 2, 3)}, "cu_seqlens_q needs max_seqlen_q"),
    ({"rotary_cos": torch.zeros(1, 8)}, "they need k and v, which are None"),
    ({"k": torch.zeros(1)}, "k, v and cache_seqlens must be given together"),
    ({"page_table": table().long()}, r"page_table must be int32 \(3, 10\), contiguous, on cpu, got torch.int64"),
    ({"page_table": table()[:2]}, r"page_table must be int32 \(3, 10\)"),
    ({"page_table": table()[0]}, r"page_table must be int32 \(batch, entries\), got \(10,\)"),
    ({"page_table": table(0)}, r"page_table must be int32 \(3, 1\)"),
    ({"cache_seqlens": integers(1, 2)}, r"seqused_k must be int32 \(3,\)"),
    ({"sinks": torch.zeros(2)}, r"sinks must be float32 \(8,\), contiguous, on cpu"),
    ({"softmax_scale": -1.0}, "softmax_scale must be finite and > 0, got -1"),
)


@pytest.mark.parametrize(("options", "message"), REFUSALS)
def test_what_no_kernel_does_is_refused_in_one_line(started, options, message):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=message) as caught:
        flash_attn_with_kvcache(q, k, v, **({"page_table": table()} | options))
    assert "\n" not in str(caught.value)
    assert not started


@pytest.mark.parametrize(
    ("page", "options"), [(1, {}), (4, {}), (100, {}), (192, {}), (16, {"cache_leftpad": integers(3, 0, 20)})]
)
def test_pages_that_no_tile_is_made_of_are_gathered_row_by_row(started, page, options):
    q, k, v = tensors(page)
    flash_attn_with_kvcache(q, k, v, page_table=table(), **options)
    sources = (k.data_ptr(), *k.stride()[1:3], v.data_ptr(), *v.stride()[1:3])
    given = started[1].arguments
    assert sources in [given[i : i + 6] for i in range(len(given))]


@pytest.mark.parametrize(("dtype", "gathered"), [(torch.float16, (64, 96)), (torch.float8_e4m3fn, (64, 96))])
def test_a_launch_that_gathers_has_a_warpgroup_that_copies_and_knows_the_channels_of_a_row(dtype, gathered):
    q, k, v = (
        launch.operand(x.squeeze(1) if i == 0 else x)._replace(device="cuda:0")
        for i, x in enumerate(tensors(3, dtype=dtype, d=(64, 96)))
    )
    variant = plan_of(request_of((q, k, v), Semantics(), Choices(), packed=(3, 1, 30), page_size=3), 132).variant
    assert (variant.gathered_qk, variant.gathered_v) == gathered
    assert (variant.page_boxes, variant.producer_warps, sum((variant.producer_regs, variant.consumer_regs))) == (
        1,
        4,
        2 * variant.entry_regs,
    )


@pytest.mark.parametrize("wants", range(6))
def test_operands_may_require_a_gradient_and_a_backward_raises(started, wants):
    new = torch.zeros(BATCH, 1, 2, 64, dtype=torch.float16)
    operands = [*tensors(), new, new.clone(), torch.zeros(8)]
    operands[wants].requires_grad_()
    options = {"sinks": operands.pop(), "page_table": table(), "cache_seqlens": integers(1, 2, 3)}
    for x in flash_attn_with_kvcache(*operands, **options, return_softmax_lse=True)[:2]:
        with pytest.raises(ValueError, match="has no gradient: call it under"):
            x.sum().backward()
    assert started
    with torch.no_grad():
        assert not flash_attn_with_kvcache(*operands, **options).requires_grad


@pytest.mark.parametrize("options", [{"rotary_seqlens": integers(1, 2, 3)}, {"cu_seqlens_k_new": integers(0, 1, 2, 3)}])
def test_what_is_said_of_new_keys_changes_nothing_where_there_are_none(started, options):
    q, k, v = tensors()
    flash_attn_with_kvcache(q, k, v, page_table=table())
    plain = [x.arguments for x in started]
    started.clear()
    flash_attn_with_kvcache(q, k, v, page_table=table(), **options)
    assert [len(x.arguments) for x in started] == [len(x) for x in plain]
    assert [x.kernel for x in started] == ["packed_order", "forward_fp16", "combine"][: len(started)]


SIZES = (BATCH, 2, 160, 8, 2, 64)


def schedule(used, **options):
    return get_scheduler_metadata(*SIZES, used, torch.float16, **({"page_size": 16, "causal": True} | options))


def run_with(schedule, started, **options):
    """The kernels of a call, and the address of the schedule that it reads."""
    started.clear()
    q, k, v = tensors(seqlen_q=2)
    given = {"cache_seqlens": integers(5, 0, 100), "page_table": table(), "causal": True} | options
    flash_attn_with_kvcache(q, k, v, scheduler_metadata=schedule, **given)
    kernels = [x.kernel for x in started]
    forward = next(x for x in started if x.kernel.startswith("forward"))
    return kernels, schedule.data_ptr() in forward.arguments and schedule.data_ptr() + 16 * BATCH in forward.arguments


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_a_call_with_a_schedule_starts_a_kernel_less_and_reads_it(started, num_splits):
    used = integers(5, 0, 100)
    made = schedule(used, num_splits=num_splits)
    (order,) = started
    assert order.kernel == "packed_order"
    of = dict(zip(KERNELS["packed_order"].arg_names, order.arguments, strict=False))
    assert (of["cu_seqlens_k"], of["sequences"], of["schedule"]) == (
        used.data_ptr(),
        made.data_ptr(),
        made.data_ptr() + 16 * BATCH,
    )
    assert 4 * made.numel() >= 16 * BATCH + 8 * order.grid[0] * of["width"]
    kernels, is_read = run_with(made, started, num_splits=num_splits)
    assert "packed_order" not in kernels
    assert is_read
    q, k, v = tensors(seqlen_q=2)
    started.clear()
    flash_attn_with_kvcache(q, k, v, cache_seqlens=used, page_table=table(), causal=True, num_splits=num_splits)
    assert {**of, "sequences": 0, "schedule": 0, "out": 0, "lse": 0} == {
        **dict(zip(KERNELS["packed_order"].arg_names, started[0].arguments, strict=False)),
        **{"sequences": 0, "schedule": 0, "out": 0, "lse": 0, "total_k": of["total_k"]},
    }


OTHERS = (
    lambda used: schedule(used)[1:],
    lambda used: schedule(used).float(),
    lambda used: torch.cat([schedule(used)] * 2)[::2],
    lambda used: schedule(used, num_splits=3),
    lambda used: schedule(used, causal=False),
    lambda used: schedule(used, window_size=(7, 0)),
    lambda used: schedule(used, max_seqlen_k_new=2),
    lambda used: schedule(used, pack_gqa=False),
    lambda used: get_scheduler_metadata(BATCH, 2, 176, 8, 2, 64, used, torch.float16, page_size=16, causal=True),
    lambda used: get_scheduler_metadata(BATCH, 2, 160, 16, 2, 64, used, torch.float16, page_size=16, causal=True),
    lambda used: get_scheduler_metadata(4, 2, 160, 8, 2, 64, integers(1, 1, 1, 1), page_size=16, causal=True),
)


@pytest.mark.parametrize("other", OTHERS)
def test_a_schedule_for_another_call_is_not_read(started, other):
    kernels, is_read = run_with(other(integers(5, 0, 100)), started, num_splits=1)
    assert kernels[0] == "packed_order"
    assert not is_read


@given(st.integers(1, 64), st.integers(1, 128), st.integers(1, 128))
def test_schedules_for_unlike_numbers_of_splits_have_unlike_sizes(batch, one, other):
    """A schedule of more splits would name parts of the result that there are not."""
    sizes = []
    for splits in (one, other):
        q, x = (launch.operand(y)._replace(device="cuda:0") for y in (torch.zeros(batch, 8, 64).half(), tensors()[1]))
        request = request_of((q, x, x), Semantics(), Choices(splits), packed=(batch, 1, 4096), page_size=16)
        sizes.append(plan_of(request, 132).launch(batch, 1, (1, 4096))[1]["schedule_size"])
    assert (sizes[0] == sizes[1]) == (one == other)


def test_a_schedule_counts_new_keys(started):
    used = integers(5, 0, 100)
    new = integers(0, 3, 3, 4)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        check = scheduler.check_cache
        patch.setattr(
            scheduler, "check_cache", lambda x, cache: (seen.append(cache.seqused_k.tolist()), check(x, cache))
        )
        none, equal, packed = (
            schedule(used, **options) for options in ({}, {"max_seqlen_k_new": 2}, {"cu_seqlens_k_new": new})
        )
    assert seen == [[5, 0, 100], [7, 2, 102], [8, 0, 101]]
    assert none.numel() < packed.numel() < equal.numel()
    new = torch.zeros(BATCH, 2, 2, 64, dtype=torch.float16)
    kernels, is_read = run_with(equal, started, k=new, v=new)
    assert (kernels[:2], is_read) == (["append", "forward_fp16"], True)


def test_without_a_query_or_a_sequence_outputs_are_empty_and_nothing_is_started(started):
    q, k, v = tensors()
    new = torch.zeros(BATCH, 1, 2, 64, dtype=torch.float16)
    for empty, options in (
        (q[:, :0], {"cache_seqlens": integers(1, 1, 1), "k": new, "v": new}),
        (q[:0], {"page_table": table()[:0]}),
    ):
        out, lse, *_ = flash_attn_with_kvcache(
            empty, k, v, **({"page_table": table()} | options), return_softmax_lse=True
        )
        assert out.shape == empty.shape
        assert lse.shape == (len(empty), 8, empty.shape[1])
    assert not started


def test_tensors_whose_last_dimension_is_not_contiguous_are_copied(started):
    q, k, v = tensors()
    other = q.transpose(1, 3).contiguous().transpose(1, 3)
    flash_attn_with_kvcache(other, k, v, page_table=table())
    assert started[1].descriptors[0].shape == (0x7FFF0000,) * 2 + started[1].descriptors[0].shape[2:]
    assert started[1].descriptors[0].strides[-1] == 1
