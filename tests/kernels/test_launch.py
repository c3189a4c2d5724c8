"""The host side of a launch with the GPU's part replaced: what kernels are given, and what is refused."""

from __future__ import annotations

import math
import sys
import threading
from itertools import pairwise

import pytest

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
pytest.importorskip("triton", reason="needs triton: pip install triton==3.6.0")

import torch
from hypothesis import given, strategies as st

from fa3_kernels.gluon import launch
from fa3_kernels.gluon.arguments import Packed
from fa3_kernels.gluon.launch import forward
from fa3_kernels.plan.call import Pointer, View
from fa3_kernels.plan.plan import plan_of
from fa3_kernels.plan.request import Choices, Semantics, request_of
from tests.kernels.no_gpu import Encoded, no_gpu

pytestmark = pytest.mark.optional


@pytest.fixture
def started():
    with no_gpu() as found:
        yield found


def starts(*lengths: int):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def assert_given(started, tensors, semantics, choices, sizes, packed=None) -> dict[str, int]:
    """What kernels got are the calls of a plan made for this launch alone; returns the addresses of its tensors."""
    request = request_of(tuple(launch.operand(tensors[x]) for x in "qkv"), semantics, choices, packed=packed)
    calls = plan_of(request, 132).calls(*sizes)
    assert [(x.kernel, x.grid) for x in started] == [(x.kernel, (*x.grid, 1, 1)[:3]) for x in calls]
    addresses = {}
    for call, got_of_call in zip(calls, started, strict=True):
        rest = iter(got_of_call.arguments)
        for wanted in call.arguments:
            got = next(rest)
            if isinstance(wanted, View):
                x = tensors[wanted.name]
                shape, strides = wanted.of(tuple(x.shape), x.stride())
                assert got == Encoded(x.data_ptr(), shape, strides), wanted
                assert [next(rest) for _ in (*shape, *strides)] == [*shape, *strides]
            elif isinstance(wanted, Pointer):
                assert addresses.setdefault(wanted.name, got) == got, wanted
            else:
                assert got == wanted
        assert not [x for x in rest if x is not None]  # what a kernel has more is at its default
    assert addresses.get("out", tensors["out"].data_ptr()) == tensors["out"].data_ptr()
    return addresses


MEMORY = torch.zeros(1 << 19, dtype=torch.uint8)
# Few addresses, lengths and strides, so that launches which differ in one of them meet.
PLACE = st.tuples(st.sampled_from([0, 128]), st.sampled_from([0, 512]))
PLACES = st.tuples(PLACE, PLACE, PLACE)
SEMANTICS = st.sampled_from([Semantics(), Semantics(causal=True)])
CHOICES = st.sampled_from([Choices(), Choices(num_splits=2)])
DTYPES = st.sampled_from(["float16", "float8_e4m3fn"])
KIND = st.tuples(DTYPES, st.sampled_from([1, 100]), st.sampled_from([64, 128]), SEMANTICS, CHOICES)
KEYS = st.sampled_from([129, 190, 256])
LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=4)
PACKED = st.tuples(LENGTHS, PLACES, SEMANTICS, CHOICES, st.booleans())


def batched(dtype: str, place: tuple[int, int], rows: int, nheads: int, head_dim: int):
    """Two sequences at an address that holds many shapes and strides."""
    (first, gap), row = place, nheads * head_dim
    strides = (rows * row + gap, row, head_dim, 1)
    return MEMORY[first:].view(getattr(torch, dtype)).as_strided((2, rows, nheads, head_dim), strides)


@given(KIND, st.lists(st.tuples(KEYS, PLACES), min_size=2, max_size=10))
def test_kernels_are_given_their_own_numbers_and_tensors_wherever_these_lie(kind, launches):
    dtype, rows_q, head_dim_v, semantics, choices = kind
    with no_gpu() as started:
        for rows_k, places in launches:
            sizes = ((rows_q, 4, 64), (rows_k, 2, 64), (rows_k, 2, head_dim_v))
            q, k, v = (batched(dtype, place, *size) for place, size in zip(places, sizes, strict=True))
            started.clear()
            out, lse = forward(q, k, v, semantics, choices)
            tensors = {"q": q, "k": k, "v": v, "out": out}
            at = assert_given(started, tensors, semantics, choices, (rows_q, rows_k))
            assert at["lse"] == lse.data_ptr()


@given(st.lists(PACKED, min_size=1, max_size=6))
def test_kernels_of_packed_sequences_share_a_workspace_in_which_nothing_overlaps(launches):
    made, workspace = [], launch._packed_workspace
    with no_gpu() as started, pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_packed_workspace", lambda *given: made.append(workspace(*given)) or made[-1])
        for lengths, places, semantics, choices, needs_lse in launches:
            total, longest, batch = sum(lengths), max(lengths), len(lengths)
            shapes = zip(places, ((total, 3, 64), (total, 1, 64), (total, 1, 64)), strict=True)
            q, k, v = (MEMORY[x[0] :].view(torch.float16)[: math.prod(shape)].view(shape) for x, shape in shapes)
            of_q, of_k = starts(*lengths), starts(*lengths)
            started.clear()
            given_starts = Packed(of_q, of_k, longest, longest)
            out, lse = forward(q, k, v, semantics, choices, packed=given_starts, needs_lse=needs_lse)
            tensors, sizes = {"q": q, "k": k, "v": v, "out": out}, (total, total, (longest, longest))
            at_most = (batch, launch.longest(longest), launch.longest(longest))
            at = assert_given(started, tensors, semantics, choices, sizes, at_most)
            assert (at["cu_seqlens_q"], at["cu_seqlens_k"]) == (of_q.data_ptr(), of_k.data_ptr())
            spans = {"sequences": 16 * batch, "schedule": 8 * started[0].grid[0] * started[0].arguments[11]}
            if needs_lse:
                assert at["lse"] == lse.data_ptr()
            else:
                assert lse is None
                spans["lse"] = 4 * 3 * total
            first, end = made[-1].data_ptr(), made[-1].data_ptr() + made[-1].nbytes
            ordered = [(first, first), *sorted((at[name], at[name] + size) for name, size in spans.items()), (end, end)]
            assert all(a[1] <= b[0] for a, b in pairwise(ordered))
            assert not any((address - first) % 16 for address, _ in ordered[:-1])


def test_threads_that_decode_at_once_are_given_their_own_number_of_keys(started):
    q, cache = torch.zeros(1, 1, 8, 64, dtype=torch.float16), torch.zeros(1, 4096, 2, 64, dtype=torch.float16)
    forward(q, cache[:, :129], cache[:, :129])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda first=first: [forward(q, *(cache[:, : first + n],) * 2) for n in range(120)])
            for first in (129, 130, 131, 132)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(started) == 481
    for x in started:
        numbers = [n for n in x.arguments if type(n) is int][-8:]  # from nheads to the rows of all heads
        assert [view.shape[2] for view in x.descriptors[1:3]] == [numbers[3]] * 2


def test_a_request_is_checked_again_where_its_key_says_nothing(started):
    q, cache = torch.zeros(2, 4, 8, 64, dtype=torch.float16), torch.zeros(2, 64, 2, 64, dtype=torch.float16)
    forward(q, cache, cache)
    with pytest.raises(ValueError, match="one shape but for head_dim"):
        forward(q, cache, cache[:, :32])
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        forward(torch.zeros(q.numel() + 8, dtype=q.dtype)[1 : q.numel() + 1].view(q.shape), cache, cache)
    odd = torch.zeros(2 * (64 * 128 + 4), dtype=torch.float16).as_strided((2, 64, 2, 64), (64 * 128 + 4, 128, 64, 1))
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        forward(q, odd, odd)
    for x in (cache[0], cache[0, 0], cache[0, 0, 0], cache[0, 0, 0, 0]):
        with pytest.raises(ValueError, match="must be"):
            forward(q, x, x)


def test_starts_are_checked_again_when_they_are_others(started):
    q, k = torch.zeros(12, 8, 64, dtype=torch.float16), torch.zeros(12, 2, 64, dtype=torch.float16)
    good = starts(4, 8)
    forward(q, k, k, packed=Packed(good, good, 8, 8))
    for bad in (good.long(), good[:1], good[None], torch.zeros(6, dtype=torch.int32)[::2]):
        for pair in ((bad, good), (good, bad)):
            with pytest.raises(ValueError, match=r"must be int32 \(\d,\), contiguous, on cpu, got"):
                forward(q, k, k, packed=Packed(*pair, 8, 8))
    for pair in ((good, starts(2, 2, 8)), (starts(2, 2, 8), good)):
        with pytest.raises(ValueError, match="must have one length, got"):
            forward(q, k, k, packed=Packed(*pair, 8, 8))
    with pytest.raises(ValueError, match=r"cu_seqlens_k must be int32 \(3,\), contiguous, on cpu, got .* on meta"):
        forward(q, k, k, packed=Packed(good, good.to("meta"), 8, 8))
    assert len(started) == 2


def test_no_keys_start_no_kernel_and_give_zero_and_minus_infinity(started):
    q, none = torch.zeros(2, 4, 8, 64, dtype=torch.float16), torch.zeros(2, 0, 2, 64, dtype=torch.float16)
    out, lse = forward(q, none, none)
    assert not started
    assert bool((out == 0).all() and (lse == -torch.inf).all())
    packed = Packed(starts(4, 4), starts(0, 0), 4, 1)
    for needs_lse in (True, False):
        out, lse = forward(q.flatten(0, 1), *(none.flatten(0, 1),) * 2, packed=packed, needs_lse=needs_lse)
        assert not started
        assert bool((out == 0).all())
        assert (lse is None) == (not needs_lse)
        assert lse is None or bool((lse == -torch.inf).all())


def test_more_packed_rows_than_32_bits_count_are_refused_after_a_launch_of_fewer(started):
    def packed_of(rows: int):
        q, k = (torch.empty(rows, n, 128, dtype=torch.float16, device="meta") for n in (64, 8))
        return q, k, k

    both = Packed(*(starts(4, 4).to("meta"),) * 2, 8, 8)
    forward(*packed_of(8), packed=both, needs_lse=False)
    forward(*packed_of((1 << 25) - 1), packed=both, needs_lse=False)
    with pytest.raises(ValueError, match=r"at most 2\^31 rows of output"):
        forward(*packed_of(1 << 25), packed=both, needs_lse=False)
    in_parts = Choices(2)
    forward(*packed_of((1 << 18) - 1), choices=in_parts, packed=both, needs_lse=False)
    with pytest.raises(ValueError, match=r"at most 2\^31 rows of output, or elements and rows of splits"):
        forward(*packed_of(1 << 18), choices=in_parts, packed=both, needs_lse=False)
    assert len(launch._families) == 2
