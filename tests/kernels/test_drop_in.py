"""In FlashAttention-3's place: the table of what is refused, and the operators where torch looks for them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
pytest.importorskip("triton", reason="needs triton: pip install triton==3.6.0")

import torch
from hypothesis import given, settings, strategies as st

from fa3_kernels import api
from tests.kernels.no_gpu import no_gpu

pytestmark = pytest.mark.optional
LIMITS = Path(__file__).parents[2] / "docs" / "limits.md"


def half(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.float16)


def integers(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


Q, K = half(2, 8, 4, 64), half(2, 16, 2, 64)
ROWS = (Q.flatten(0, 1), *(K.flatten(0, 1),) * 2, integers(0, 8, 16), integers(0, 16, 32), 8, 16)
WIDE = half(2, 16, 2, 512)


def everywhere(**options: Any) -> tuple[Any, ...]:
    """A call of each function, with these options."""
    return (
        lambda: api.flash_attn_func(Q, K, K, **options),
        lambda: api.flash_attn_varlen_func(*ROWS, **options),
        lambda: api.flash_attn_with_kvcache(Q, K, K, **options),
    )


def packed_heads(**options: Any) -> Any:
    return lambda: api.flash_attn_qkvpacked_func(half(2, 8, 3, 4, 64), **options)


BIG = half(128).as_strided((128, 1 << 20, 16, 128), (0, 0, 0, 1))
REFUSED = {
    "`qv`": everywhere(qv=Q),
    "V of more than 256 channels": (
        lambda: api.flash_attn_func(Q, K, WIDE),
        lambda: api.flash_attn_varlen_func(*ROWS[:2], WIDE.flatten(0, 1), *ROWS[3:]),
        lambda: api.flash_attn_with_kvcache(Q, K, WIDE),
        lambda: api.get_scheduler_metadata(2, 8, 16, 4, 2, 64, integers(1, 2), headdim_v=512),
    ),
    "a `softmax_scale` of 0 or below": (
        *everywhere(softmax_scale=0.0),
        *everywhere(softmax_scale=-1.0),
        packed_heads(softmax_scale=0),
    ),
    "`cu_seqlens` of one of Q and K alone": (
        lambda: api.flash_attn_varlen_func(*ROWS[:4], None, 8, 16),
        lambda: api.flash_attn_varlen_func(*ROWS[:3], None, *ROWS[4:]),
    ),
    "pages of K and V that do not lie equally many rows apart, or rows of unlike size": (
        lambda: api.flash_attn_with_kvcache(Q, K, half(2, 32, 2, 64)[:, :16]),
        lambda: api.flash_attn_with_kvcache(Q, half(2, 16 * 128 + 8).as_strided((2, 16, 2, 64), (2056, 128, 64, 1)), K),
    ),
    "a cache without a row, a page table without an entry": (
        lambda: api.flash_attn_with_kvcache(Q, K[:, :0], K[:, :0]),
        lambda: api.flash_attn_with_kvcache(Q, K, K, page_table=torch.zeros(2, 0, dtype=torch.int32)),
    ),
    "2^31 rows of the output, or elements where keys are cut: queries times heads": (
        lambda: api.flash_attn_func(BIG, *(half(128, 1, 16, 128),) * 2),
    ),
}


def test_every_row_of_the_table_is_refused_and_the_table_has_every_row():
    table = re.search(r"\| refused \|.*?\n\n", LIMITS.read_text(encoding="utf-8"), re.DOTALL)
    assert table
    assert [row.split(" | ")[0].removeprefix("| ") for row in table[0].splitlines()[2:] if row] == list(REFUSED)


@pytest.mark.parametrize("row", REFUSED)
def test_what_the_table_says_raises_one_line_before_anything_is_started(row):
    for call in REFUSED[row]:
        with no_gpu() as started:
            with pytest.raises(ValueError, match=r"^[^\n]+$"):
                call()
            assert not started


MASKS = st.fixed_dictionaries({"causal": st.booleans(), "window_size": st.tuples(*(st.integers(-2, 20),) * 2)})
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "softmax_scale": st.floats(0.1, 2.0),
        "softcap": st.sampled_from([-1.0, 0.0, 2.0]),
        "num_splits": st.integers(-1, 5),
        "pack_gqa": st.sampled_from([None, False, True]),
        "sm_margin": st.integers(0, 200),
    },
)
SIZES = st.fixed_dictionaries(
    {
        "batch": st.integers(0, 3),
        "seqlen_q": st.integers(0, 5),
        "seqlen_k": st.integers(1, 40),
        "heads": st.sampled_from([(1, 1), (6, 2), (66, 1), (8, 8), (5, 1)]),
        "dims": st.sampled_from([(64, 64), (64, 256), (192, 128), (256, 256), (32, 32)]),
        "kind": st.sampled_from([torch.float16, torch.bfloat16, torch.float8_e4m3fn]),
        "is_transposed": st.booleans(),
        "wants_gradient": st.booleans(),
    }
)


def operands(data: Any, sizes: dict, of_q: tuple[int, ...], of_k: tuple[int, ...], **caches: bool) -> list[Any]:
    """q, k and v; those that are no cache may have their channels in front."""
    found = []
    for i, (rows, heads, dim) in enumerate(
        ((of_q, sizes["heads"][0], 0), (of_k, sizes["heads"][1], 0), (of_k, sizes["heads"][1], 1))
    ):
        shape = (*rows, heads, sizes["dims"][dim])
        x = torch.zeros(shape).to(sizes["kind"])
        if sizes["is_transposed"] and heads > 1 and not (i and caches):
            x = torch.zeros((*shape[:-2], *shape[:-3:-1])).to(sizes["kind"]).transpose(-1, -2)
        found.append(x.requires_grad_(sizes["wants_gradient"]))
    return found


def factors(data: Any, sizes: dict) -> dict[str, object]:
    of = st.sampled_from([None, torch.ones(sizes["batch"], sizes["heads"][1])])
    return {f"{x}_descale": data.draw(of) for x in "qkv"}


@given(st.data(), SIZES, MASKS, OPTIONS)
def test_nothing_else_that_upstream_takes_is_refused_of_batches(data, sizes, mask, options):
    batch = sizes["batch"]
    given = operands(data, sizes, (batch, sizes["seqlen_q"]), (batch, sizes["seqlen_k"]))
    with no_gpu():
        found = api.flash_attn_func(*given, **mask, **options, **factors(data, sizes), return_attn_probs=True)
    assert found[0].shape == (*given[0].shape[:-1], given[2].shape[-1])


@given(st.data(), SIZES, MASKS, OPTIONS)
def test_nothing_else_that_upstream_takes_is_refused_of_packed_sequences(data, sizes, mask, options):
    batch = sizes["batch"]
    lengths = [
        data.draw(st.lists(st.integers(0, sizes[x]), min_size=batch, max_size=batch)) for x in ("seqlen_q", "seqlen_k")
    ]
    given = operands(data, sizes, (sum(lengths[0]),), (sum(lengths[1]),))
    starts = [integers(0, *x).cumsum(0).int() for x in lengths]
    longest = [max(1, *x, 0) for x in lengths]
    used = {
        f"seqused_{x}": data.draw(st.sampled_from([None, integers(*n)])) for x, n in zip("qk", lengths, strict=True)
    }
    if batch == 0:
        used = {}
    with no_gpu():
        found = api.flash_attn_varlen_func(
            *given, *starts, *longest, **used, **mask, **options, **factors(data, sizes), return_attn_probs=True
        )
    assert found[0].shape == (*given[0].shape[:-1], given[2].shape[-1])


@settings(max_examples=200)
@given(st.data(), SIZES, MASKS, OPTIONS, st.sampled_from([None, 1, 4, 16, 128]), st.booleans(), st.booleans())
def test_nothing_else_that_upstream_takes_is_refused_over_caches(data, sizes, mask, options, page, is_new, is_packed):
    batch, seqlen_q = sizes["batch"], sizes["seqlen_q"]
    of_k = (batch + 2, sizes["seqlen_k"]) if page is None else (50, page)
    lengths = data.draw(st.lists(st.integers(0, seqlen_q), min_size=batch, max_size=batch))
    of_q = (sum(lengths),) if is_packed else (batch, seqlen_q)
    q, *cache = operands(data, sizes, of_q, of_k, cache=True)
    seqlens = integers(*(5,) * batch)
    call: dict[str, Any] = {"cache_seqlens": seqlens, **mask, **options, **factors(data, sizes)}
    if page is not None:
        call["page_table"] = torch.zeros(batch, 3, dtype=torch.int32)
    elif batch:
        call["cache_batch_idx"] = torch.arange(batch).int()
    if is_packed:
        call |= {"cu_seqlens_q": integers(0, *lengths).cumsum(0).int(), "max_seqlen_q": max(1, seqlen_q)}
    if data.draw(st.booleans()):
        call["cache_leftpad"] = integers(*(1,) * batch)
    if data.draw(st.booleans()):
        call["rotary_seqlens"] = integers(*(1,) * batch)
    if is_new:
        call |= {x: torch.zeros(batch, 2, *c.shape[2:]).to(c.dtype) for x, c in zip("kv", cache, strict=True)}
        if data.draw(st.booleans()):
            call |= {x: torch.zeros(50, 16).to(q.dtype) for x in ("rotary_cos", "rotary_sin")}
    if data.draw(st.booleans()):
        call["scheduler_metadata"] = torch.zeros(data.draw(st.integers(0, 2000)), dtype=torch.int32)
    with no_gpu():
        found = api.flash_attn_with_kvcache(q, *cache, **call, return_softmax_lse=True)
    assert found[0].shape == (*q.shape[:-1], cache[1].shape[-1])
    assert len(found) == 4


OPERATORS = """
import sys
import torch
import fa3_kernels.frameworks
from fa3_kernels import api
from fa3_kernels.drop_in import register_as_flash_attn_3
from tests.kernels.no_gpu import no_gpu

assert "flash_attn_interface" not in sys.modules and not hasattr(torch.ops.flash_attn_3, "fwd")
register_as_flash_attn_3()
import flash_attn_interface
assert flash_attn_interface.flash_attn_func is api.flash_attn_func
try:
    register_as_flash_attn_3()
except ValueError as error:
    assert "is there already, and is not replaced" in str(error)
else:
    raise AssertionError("registered twice")
ops = torch.ops.flash_attn_3
half = lambda *shape: torch.zeros(shape, dtype=torch.float16)
integers = lambda *x: torch.tensor(x, dtype=torch.int32)
q, k = half(2, 8, 4, 64), half(2, 16, 2, 64)
rows = [x.flatten(0, 1) for x in (q, k, k)]
starts, used = (integers(0, 8, 16), integers(0, 16, 32)), integers(3, 8)
window = {"window_size_left": 5, "window_size_right": 0}
cache = {"cache_seqlens": used, "num_splits": 3, "window_size": (5, 0)}


def same(one, other):
    with no_gpu() as started:
        first = one()
        count = len(started)
        second = other()
    kernels = [(x.kernel, x.grid, len(x.arguments)) for x in started]
    assert kernels[:count] == kernels[count:], kernels
    assert kernels
    for x, y in zip(first, second):
        assert x.shape == y.shape
    return first


memory = half(2, 8, 4, 64)
found = same(
    lambda: ops.fwd(q, k, k, out=memory, num_splits=3, softcap=2.0, **window),
    lambda: api.flash_attn_func(q, k, k, num_splits=3, softcap=2.0, window_size=(5, 0), return_attn_probs=True),
)
assert found[0].data_ptr() == memory.data_ptr() and [len(x) for x in found[2:]] == [0, 0]
none = (None,) * 4
same(
    lambda: ops.fwd(*rows, *none, *starts, None, None, used, 8, 16, num_splits=1, is_causal=True),
    lambda: api.flash_attn_varlen_func(*rows, *starts, 8, 16, None, used, causal=True, return_attn_probs=True),
)
new = half(2, 1, 2, 64)
same(
    lambda: ops.fwd(q, k, k, new, new, seqused_k=used, num_splits=3, **window),
    lambda: api.flash_attn_with_kvcache(q, k, k, new, new, return_softmax_lse=True, **cache),
)
made = same(
    lambda: [ops.get_scheduler_metadata(2, 8, 16, 4, 2, 64, 64, torch.float16, used, num_splits=3, **window)],
    lambda: [api.get_scheduler_metadata(2, 8, 16, 4, 2, 64, used, torch.float16, num_splits=3, window_size=(5, 0))],
)
with no_gpu() as started:
    ops.fwd(q, k, k, seqused_k=used, num_splits=3, scheduler_metadata=made[0], **window)
    assert [x.kernel for x in started] == ["forward_fp16", "combine"]
    gradients = [torch.empty_like(x) for x in (q, k, k)]
    found = ops.bwd(q, q, k, k, q, torch.zeros(2, 4, 8), *gradients, is_causal=True)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape, *[torch.Size([0])] * 5]
    assert [x.data_ptr() for x in found[:3]] == [x.data_ptr() for x in gradients]
    of_rows = (rows[0], *rows, rows[0], torch.zeros(4, 16), None, None, None, *starts, used, used, 8, 16)
    assert [len(x) for x in ops.bwd(*of_rows)[:3]] == [16, 32, 32]
    ops.fwd(*[x.requires_grad_() for x in (q, k, k)])
for call in (
    lambda: ops.fwd(q, k, k, seqused_q=used),
    lambda: ops.bwd(q, q, k, k, q, torch.zeros(2, 4, 8), seqused_q=used),
):
    try:
        with no_gpu():
            call()
    except ValueError as error:
        assert chr(10) not in str(error)
    else:
        raise AssertionError("taken")
merged, lse = ops.fwd_combine(torch.ones(2, 3, 4, 8), torch.zeros(2, 3, 4), None, torch.float16)
assert merged.dtype == torch.float16 and (merged == 1).all()
if hasattr(torch.nn.attention, "activate_flash_attention_impl"):
    torch.nn.attention.activate_flash_attention_impl("FA3")
    torch.nn.attention.restore_flash_attention_impl()
print("registered")
"""


def test_the_operators_of_flash_attention_3_are_the_functions_once_they_are_asked_for():
    found = subprocess.run([sys.executable, "-c", OPERATORS], capture_output=True, text=True, check=False)
    assert found.stdout.strip().endswith("registered"), found.stderr[-3000:]
