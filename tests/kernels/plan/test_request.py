"""A launch as values: what is refused and how, what shares a plan, and what the GPU is then given. No torch, no GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_kernels.plan.call import RAGGED_ROWS, Pointer, View
from fa3_kernels.plan.choose import config_of, without_lengths
from fa3_kernels.plan.packed_order import PackedOrder
from fa3_kernels.plan.plan import Plan, plan_of, shared_keys
from fa3_kernels.plan.request import Choices, Request, Semantics, TensorLayout, request_of
from fa3_kernels.plan.tile_order import END, Shape, items
from fa3_reference.problem import AttentionProblem
from tests.kernels.packed_schedule import packed_schedule, visible_blocks

SMS = 132


def operand(*shape: int, dtype: str = "float16", device: str = "cuda:0") -> TensorLayout:
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return TensorLayout(shape, strides, dtype, device)


def request(seqlen_q: int = 1, seqlen_k: int = 300, choices: Choices = Choices(), **semantics) -> Request:  # noqa: B008
    q, k = operand(2, seqlen_q, 8, 128), operand(2, seqlen_k, 2, 128)
    return request_of((q, k, k), Semantics(**semantics), choices)


def plan_for(request: Request) -> Plan:
    return plan_of(request, SMS)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 8])
def test_numbers_of_keys_that_fill_as_many_tiles_share_a_plan_with_the_same_calls(seqlen_q, causal):
    for seqlen_k in range(300, 700, 7):
        own = request(seqlen_q, seqlen_k, causal=causal)
        shared = plan_for(own.with_keys(shared_keys(own, seqlen_k, 128)))
        sizes = (seqlen_q, seqlen_k)
        mine = plan_for(own)
        assert shared.calls(*sizes) == mine.calls(*sizes)
        assert all(np.array_equal(shared.tables[name], mine.tables[name]) for name in ("schedule",))
        assert shared.is_complete == mine.is_complete


def test_a_decoding_loop_has_two_plans_for_every_key_tile():
    own = request()
    keys = {shared_keys(own, n, 128) for n in range(128, 128 + 4 * 128)}
    assert keys == {128, 255, 256, 383, 384, 511, 512, 639}


@pytest.mark.parametrize("window", [(100, 0), (-1, 3)])
def test_plans_of_windows_and_of_many_row_tiles_are_shared_by_nobody(window):
    assert {shared_keys(request(1, n, window=window), n, 128) for n in range(300, 310)} == set(range(300, 310))
    assert shared_keys(request(200, 300, causal=True), 300, 128) == 300


def test_a_packed_launch_has_the_configuration_that_the_twin_takes():
    problem = AttentionProblem.varlen((1, 700, 33), (900, 700, 4000), nheads=8, nheads_kv=2, head_dim=64)
    q, k = operand(734, 8, 64), operand(5600, 2, 64)
    for splits in (0, 1, 3):
        choices = Choices(num_splits=splits)
        own = request_of((q, k, k), Semantics(), choices, packed=(3, 700, 4000))
        assert plan_for(own).config == config_of(problem, num_splits=splits)
        assert own.problem == without_lengths(problem)


def test_packed_batches_of_about_one_length_share_a_plan():
    q, k = operand(734, 8, 64), operand(5600, 2, 64)
    plans = {
        plan_for(request_of((q, k, k), Semantics(), Choices(), packed=(3, n, 4000))).request for n in range(641, 769)
    }
    assert len(plans) == 1


def test_tensors_are_named_and_tables_are_there_for_every_name():
    plan = plan_for(request(100, 300))
    (call,) = plan.calls(100, 300)
    assert [x.name for x in call.arguments if isinstance(x, View)] == ["q", "k", "v", "out"]
    names = [x.name for x in call.arguments if isinstance(x, Pointer)]
    assert names == ["lse", "lse", "sequences", "sequences", "schedule"]
    assert set(plan.tables) == {"sequences", "schedule"}


def test_packed_sequences_have_no_table_of_the_host():
    q, k = operand(734, 8, 64), operand(5600, 2, 64)
    plan = plan_for(request_of((q, k, k), Semantics(causal=True), Choices(num_splits=2), packed=(3, 700, 4000)))
    calls = plan.calls(734, 5600, (700, 4000))
    assert [call.kernel for call in calls] == ["packed_order", "forward_fp16", "combine"]
    assert not plan.tables
    assert plan.calls(734, 0, (700, 1))[0].kernel == "combine"


@pytest.mark.parametrize("pack", [1, 4])
def test_the_rows_of_a_packed_tensors_block_step_by_the_tensors_rows(pack):
    """A block is of rows beside channels or, packed, of rows beside heads; neither may step where the other does."""
    nheads, channels = 8, 64
    row = nheads * channels
    view = View("q", "float16", 64, channels, pack, pack, is_packed=True)
    extents, strides = view.of((700, nheads, channels), (row, channels, 1))
    block = dict.fromkeys(range(len(extents)), 1) | dict(enumerate(view.block[::-1]))  # by dimension, innermost first
    steps = [(size, strides[::-1][i], extents[::-1][i]) for i, size in block.items() if size > 1]
    heads = [(pack, channels, nheads)] if pack > 1 else []
    assert steps == [(channels, 1, channels), *heads, (64 // pack, row, RAGGED_ROWS)]


def test_the_order_of_packed_tiles_reads_where_keys_begin_over_pages_alone():
    """A row whose sinks see no key is written too, but a cache alone has keys that begin elsewhere."""
    q, k = operand(734, 8, 128), operand(400, 64, 2, 128)
    paged = request_of((q, k, k), Semantics(), Choices(), packed=(3, 700, 4000), page_size=64)
    plain = operand(5600, 2, 128)
    sinks = request_of((q, plain, plain), Semantics(), Choices(), packed=(3, 700, 4000), has_sinks=True)
    last = [plan_for(each).kernels[0].arguments[-3:] for each in (paged, sinks)]
    assert last == [(Pointer("first_keys", "int32"), True, True), (None, True, False)]


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_combine_has_a_program_for_every_four_rows_begun(is_packed):
    q, k = (operand(*(1,) * (not is_packed), rows, heads, 64) for rows, heads in ((5, 3), (300, 1)))
    plan = plan_for(
        request_of((q, k, k), Semantics(), Choices(num_splits=2), packed=(2, 4, 200) if is_packed else None)
    )
    combine = plan.calls(5, 300, (4, 200) if is_packed else (0, 0))[-1]
    assert (combine.kernel, combine.grid) == ("combine", (4,))
    assert combine.arguments[4:6] == (15, 5)


REFUSALS = (
    ({"q": operand(2, 8, 3, 128)}, "nheads must be a multiple of nheads_kv, got 3 and 2"),
    ({"q": operand(2, 8, 8, 60), "k": operand(2, 9, 2, 60)}, "head_dim must be a multiple of 8 .TMA., got 60"),
    ({"q": operand(2, 8, 8, 320), "k": operand(2, 9, 2, 320)}, "head_dim must be at most 256, got 320"),
    ({"choices": Choices(tile=(128, 96))}, "tile_n must be a power of two from 32 to 256, got 96"),
    ({"q": operand(2, 8, 8, 128, dtype="float32")}, "must share float16, bfloat16 or float8_e4m3fn"),
    ({"q": operand(2, 8, 8, 128, device="cpu")}, "must be on one Hopper GPU, got cpu, cuda:0"),
    ({"q": operand(8, 8, 128)}, r"must be \(batch, seqlen, nheads, head_dim\)"),
    ({"k": TensorLayout((2, 9, 2, 128), (2, 4, 2, 2), "float16", "cuda:0")}, "last dimension of k must be contiguous"),
    (
        {"k": TensorLayout((2, 9, 2, 128), (2460, 260, 130, 1), "float16", "cuda:0")},
        "strides of k must be multiples of 16",
    ),
    ({"semantics": Semantics(softmax_scale=0.0)}, "softmax_scale must be finite and > 0, got 0.0"),
    ({"semantics": Semantics(softcap=-1.0)}, "softcap must be finite and >= 0, got -1"),
    ({"choices": Choices(num_splits=-1)}, "num_splits must be 0 .* or positive, got -1"),
    ({"choices": Choices(promotion_interval=128)}, "promotion_interval is for e4m3 operands, got dtype fp16"),
    ({"choices": Choices(warp_specialize=False, num_splits=2)}, "without warp specialisation the kernel takes"),
    ({"descales": (operand(2, 2, dtype="float32"), None, None)}, "q_descale is for float8_e4m3fn operands, got fp16"),
    ({"descale_blocks": (64, 0, 0)}, "blocks of 64 rows for q_descale, which is None"),
    ({"descale_blocks": (0, -1, 0)}, "three integers >= 0"),
)


@pytest.mark.parametrize(("given", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_a_request_is_refused_in_one_line_with_the_value_and_the_rule(given, message):
    given = dict(given)
    q, k = given.pop("q", operand(2, 8, 8, 128)), given.pop("k", operand(2, 9, 2, 128))
    semantics, choices = given.pop("semantics", Semantics()), given.pop("choices", Choices())
    with pytest.raises(ValueError, match=message) as caught:
        plan_for(request_of((q, k, k), semantics, choices, **given))
    assert "\n" not in str(caught.value)


def test_the_strides_of_descales_are_those_of_the_caller_or_of_the_copy_that_repeats_heads():
    """Two sequences of eight heads, and of two kv heads: Q's descales are one a kv head, and are repeated."""
    q, k = operand(2, 9, 8, 128, dtype="float8_e4m3fn"), operand(2, 300, 2, 128, dtype="float8_e4m3fn")
    dense, spread = operand(2, 2, dtype="float32"), TensorLayout((2, 2), (40, 3), "float32", "cuda:0")
    layouts = request_of((q, k, k), Semantics(), Choices(), descales=(dense, dense, spread)).descales
    assert [x and (x.strides, x.repeats) for x in layouts] == [
        ((8, 1, 0), (4, 1)),
        ((2, 1, 0), (1, 1)),
        ((40, 3, 0), (1, 1)),
    ]


@pytest.mark.parametrize(("right", "pays"), [(-1, False), (0, True), (5, True)])
def test_tiles_go_in_pairs_where_a_mask_makes_them_differ_and_every_cta_gets_one(right, pays):
    order = PackedOrder(1, 128, 128, 2, 1, -1, right, 1, 128)
    assert [order.pays_in_pairs(tiles, SMS) for tiles in (2 * SMS - 1, 2 * SMS)] == [False, pays]


@given(st.integers(2 * SMS, 50 * SMS))
def test_no_cta_gets_more_tiles_in_pairs_than_one_by_one(tiles):
    order = PackedOrder(1, 128, 128, 2, 1, -1, 0, 1, 128)
    pairs = np.arange((tiles + 1) // 2) % SMS
    if order.pays_in_pairs(tiles, SMS):
        assert 2 * np.bincount(pairs).max() <= -(-tiles // SMS)


def test_32_bits_count_the_rows_of_outputs_and_the_elements_of_splits():
    """2^20 queries of 16 heads with 128 channels are 2^31 elements, which TMA addresses by itself."""
    long = (operand(1, 1 << 20, 16, 128), *[operand(1, 1 << 20, 16, 128)] * 2)
    request_of(long, Semantics(), Choices())
    with pytest.raises(ValueError, match=r"at most 2\^31 rows of output, or elements and rows of splits"):
        request_of(long, Semantics(), Choices(2))
    with pytest.raises(ValueError, match=r"at most 2\^31 rows of output"):
        request_of((operand(128, 1 << 20, 16, 128), *[operand(128, 16, 16, 128)] * 2), Semantics(), Choices())


@st.composite
def packed_problems(draw):
    batch = draw(st.integers(1, 6))
    lengths = st.lists(st.integers(0, 500), min_size=batch, max_size=batch)
    q, k = draw(lengths), draw(lengths)
    q[0] = max(q[0], 1)
    group = draw(st.sampled_from([1, 2, 4]))
    order = PackedOrder(
        draw(st.sampled_from([1, 2])),
        128 // group,
        128,
        2,
        1,
        draw(st.sampled_from([-1, 60])),
        draw(st.sampled_from([-1, 0, 20])),
        draw(st.sampled_from([1, 3])),
        64,
    )
    return order, tuple(q), tuple(k), draw(st.integers(1, 40))


@given(packed_problems())
def test_a_packed_schedule_has_every_tile_that_sees_a_key_once_and_no_idle_cta(drawn):
    order, q, k, ctas = drawn
    table = packed_schedule(order, q, k, ctas)
    shape = Shape(q, k, 2, 2, order.left, order.right, num_splits=order.num_splits)
    wanted = {
        ((b * 2 + head) << 32) + (item.split << 20) + item.m_block
        for b in range(len(q))
        for head in range(2)
        for item in items(shape, b, order.positions, order.tile_n)
    }
    found = table[table != END]
    assert set(found.tolist()) - {0} == wanted - {0}
    assert (table[:, 0] != END).all()
    own = [n for n in found.tolist() if n in wanted]
    repeats = len(own) - len(wanted)
    assert repeats <= len(table)  # a CTA without a tile of its own repeats one
    assert (table[:, -1] == END).all()


def test_a_schedule_of_pairs_is_as_long_as_the_greedy_one_within_five_percent():
    from fa3_kernels.plan.tile_order import TILE_COST, static_schedule

    lengths = (4096, 3000, 2500, 900, 700, 64, 64, 64)
    order = PackedOrder(2, 128, 128, 16, 1, -1, 0, 1, 128)
    shape = Shape(lengths, lengths, 16, 16, right=0)

    def longest(table: np.ndarray) -> float:
        return max(
            sum(
                visible_blocks(order, lengths[e // 16 >> 32], lengths[e // 16 >> 32], e & 0xFFFFF, 0) + TILE_COST
                for e in row
                if e >= 0
            )
            for row in table.tolist()
        )

    greedy = longest(static_schedule(shape, SMS, tile_m=128, tile_n=128, head_dim=128))
    assert longest(packed_schedule(order, lengths, lengths, SMS)) <= 1.05 * greedy
