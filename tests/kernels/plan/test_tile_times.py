"""The modelled time of a launch with each of its tiles, and the tile and packing that are chosen by it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_kernels.plan.choose import check_tile, config_of
from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.families import FAMILIES, OURS
from fa3_kernels.plan.tile_order import Shape, items, shape_of
from fa3_kernels.plan.tile_times import SMS, blocks_of, last_end, table
from fa3_reference.problem import AttentionProblem, Dtype

Size = tuple[str, int, int]
SIZES: tuple[Size, ...] = tuple(dict.fromkeys(key[:3] for key in table()))
CHOSEN = tuple(size for size in SIZES if len(table()[*size, "all"]) > 1)  # sizes with more tiles than one
DTYPES: dict[str, Dtype] = {"16 bits": "bf16", "e4m3": "e4m3"}


def problem(size: Size, batch: int, heads: int, seqlen: int, **semantics) -> AttentionProblem:
    operands, head_dim, head_dim_v = size
    numbers = (batch, heads, heads, seqlen, seqlen, head_dim)
    return AttentionProblem(*numbers, head_dim_v=head_dim_v, dtype=DTYPES[operands], **semantics)


def tile_of(asked: AttentionProblem) -> tuple[int, int]:
    config = config_of(asked)
    return config.tile_m, config.tile_n


@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.integers(-1, 1500),
    st.integers(-1, 1500),
    st.sampled_from([1, 2, 3, 8]),
    st.booleans(),
    st.sampled_from([(128, 128), (192, 128), (128, 64)]),
)
def test_blocks_are_those_of_the_schedule(seqlen_q, seqlen_k, left, right, group, pack, tile):
    shape = Shape((seqlen_q,), (seqlen_k,), group, 1, left, right, pack)
    assert blocks_of(shape, *tile).tolist() == [item.blocks for item in items(shape, 0, *tile)]


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.integers(1, 400), st.floats(0, 4))
def test_no_launch_ends_before_its_longest_tile_and_its_mean_cta(blocks, heads, tile_blocks):
    costs = np.array(blocks) + tile_blocks
    end = last_end(np.array(blocks), heads, tile_blocks)
    least = max(costs.max(), costs.sum() * heads / SMS)
    assert least * (1 - 1e-9) <= end <= least + costs.max()


@pytest.mark.parametrize(("heads", "rounds"), [(1, 1), (SMS, 1), (SMS + 1, 2), (2 * SMS, 2), (10 * SMS + 1, 11)])
def test_equal_tiles_go_in_rounds(heads, rounds):
    assert last_end(np.array([8]), heads, 0.5) == rounds * 8.5
    assert last_end(np.array([8, 8, 8]), heads, 0.5) == -(-3 * heads // SMS) * 8.5


def test_a_launch_of_nothing_takes_no_block():
    assert last_end(np.array([], int), 5, 1.0) == 0.0


def test_every_size_that_is_compiled_has_its_tiles():
    ours = FAMILIES[OURS]
    compiled = {("e4m3" if is_fp8 else "16 bits", d, d) for is_fp8, d in ours.sizes}
    assert {*SIZES} == compiled | {("16 bits", 192, 128), ("e4m3", 192, 128)}


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_all_tiles_of_a_size_are_built_and_have_one_number_of_keys(size):
    """By which the bits of a row follow from nothing but its own sequence; see reports/notes/invariance.md."""
    tiles = table()[*size, "all"] + table()[*size, "some"]
    shipped = default_config(problem(size, 1, 1, 8192))
    assert {tile.tile_n for tile in tiles} == {shipped.tile_n}
    assert shipped.tile_m in {tile.tile_m for tile in tiles}
    for tile in tiles:
        check_tile(default_config(problem(size, 1, 1, 8192), tile=(tile.tile_m, tile.tile_n)))
        assert min(tile.launch_cycles, tile.block_cycles, tile.tile_blocks) > 0


@pytest.mark.parametrize("size", CHOSEN, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_tall_tiles_are_for_launches_of_many_rounds_and_short_ones_for_a_part_of_one(size, causal):
    assert tile_of(problem(size, 8, 16, 8192, causal=causal)) == (192, 128)
    assert tile_of(problem(size, 1, 8, 1024, causal=causal)) == (128, 128)


@pytest.mark.parametrize("size", CHOSEN, ids=str)
def test_a_tile_too_many_for_a_round_is_avoided(size):
    """132 tiles of 192 rows are one round, of 128 rows two."""
    assert tile_of(problem(size, 1, SMS // 2, 2 * 192)) == (192, 128)
    assert tile_of(problem(size, 1, SMS // 3, 3 * 128)) == (128, 128)


# Timed on an H200: cycles of tiles of 192 rows over those of 128, fp16 and bf16, causal.
@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "ratio"),
    [
        (16, 32, 1024, 1.305),
        (5, 20, 1536, 1.040),
        (4, 36, 2200, 0.957),
        (4, 32, 4096, 0.901),
        (2, 32, 8192, 0.828),
        (1, 32, 16384, 0.812),
    ],
)
def test_tiles_are_those_that_were_faster_where_both_were_timed(batch, heads, seqlen, ratio):
    asked = AttentionProblem(batch, heads, heads, seqlen, seqlen, 64, dtype="bf16", causal=True)
    assert tile_of(asked) == ((192 if ratio < 1 else 128), 128)
    tall, short = (tile.cycles(shape_of(asked)) for tile in table()["16 bits", 64, 64, "some"])
    assert tall / short == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize("size", CHOSEN, ids=str)
@pytest.mark.parametrize("semantics", [{"window": (500, 0)}, {"window": (-1, 3)}])
def test_windows_have_short_tiles_whatever_the_launch_as_they_need_registers(size, semantics):
    assert tile_of(problem(size, 8, 16, 8192, **semantics)) == (128, 128)


@pytest.mark.parametrize("seqlen", [700, 2500, 9000])
def test_both_formats_of_16_bits_choose_alike(seqlen):
    of_fp16, of_bf16 = (
        config_of(AttentionProblem(4, 8, 2, seqlen, seqlen, 64, dtype=dtype, causal=True)) for dtype in ("fp16", "bf16")
    )
    assert (of_fp16.tile_m, of_fp16.pack_gqa) == (of_bf16.tile_m, of_bf16.pack_gqa)


def test_the_tile_of_packed_sequences_follows_from_the_longest_alone():
    for batch in (1, 50):
        lengths = ((1000,) * batch,) * 2
        asked = AttentionProblem.varlen(*lengths, nheads=8, nheads_kv=8, head_dim=64, dtype="bf16")
        assert tile_of(asked) == (192, 128)


def test_heads_are_packed_where_that_makes_fewer_tiles_and_not_where_it_makes_as_many():
    """Of a group of 8 heads with 40 queries each, packed rows fill 3 tiles instead of 8; 4,096 queries gain nothing."""
    assert config_of(AttentionProblem(132, 8, 1, 40, 2000, 128)).pack_gqa
    assert not config_of(AttentionProblem(4, 16, 4, 4096, 4096, 128, causal=True)).pack_gqa
