"""The static schedule hands out every tile that sees a key, once, and counts key blocks as the twin does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from fa3_kernels.plan.tile_order import (
    END,
    MAX_HEADS,
    MAX_M_BLOCKS,
    MAX_SPLITS,
    TILE_COST,
    Shape,
    check_entries,
    count_items,
    ends_at,
    handed_out,
    head_groups,
    items,
    key_blocks,
    shape_of,
    static_schedule,
)
from fa3_kernels.plan.tiles import Mask, row_tiles, split_ranges
from fa3_reference.problem import AttentionProblem

TILE = {"tile_m": 128, "tile_n": 128}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    batch = draw(st.integers(1, 3))
    lengths = [tuple(draw(st.integers(0, 1500)) for _ in range(batch)) for _ in "qk"]
    return Shape(
        *lengths,
        nheads=4,
        nheads_kv=draw(st.sampled_from([1, 2, 4])),
        left=draw(st.sampled_from([-1, 0, 100, 500])),
        right=draw(st.sampled_from([-1, 0, 70])),
        pack_gqa=draw(st.booleans()),
        num_splits=draw(st.sampled_from([1, 3])),
    )


def twin_blocks(shape: Shape, batch: int) -> list[range]:
    """Key blocks of every row tile of one tile head, by the twin's rules."""
    seqlen_q, seqlen_k = shape.seqlens_q[batch], shape.seqlens_k[batch]
    mask = Mask(seqlen_k, seqlen_k - seqlen_q, shape.left, shape.right)
    group = shape.group if shape.pack_gqa else 1
    return [mask.blocks(t.positions, 128) for t in row_tiles(seqlen_q, group, tile_m=128, pack_gqa=shape.pack_gqa)]


@given(shapes())
def test_items_are_the_twins_tiles_and_splits(shape: Shape) -> None:
    for batch in range(len(shape.seqlens_q)):
        want = [
            (m, split, len(part))
            for m, blocks in enumerate(twin_blocks(shape, batch))
            for split, part in enumerate(split_ranges(blocks, shape.num_splits))
            if len(part)
        ]
        assert items(shape, batch, **TILE) == want


@given(shapes(), st.sampled_from([1, 7, 132]))
def test_every_item_is_scheduled_once(shape: Shape, num_ctas: int) -> None:
    table = static_schedule(shape, num_ctas, head_dim=128, **TILE)
    want = [
        ((batch * shape.tile_heads + head) << 32) + (item.split << 20) + item.m_block
        for batch in range(len(shape.seqlens_q))
        for head in range(shape.tile_heads)
        for item in items(shape, batch, **TILE)
    ]
    assert sorted(table[table != END].tolist()) == sorted(want)
    assert len(want) <= count_items(shape, 128)
    assert np.all(table[:, -1] == END)
    assert np.all(table[:, :1] != END), "a CTA without a tile would wait for a load that never comes"


def test_causal_load_is_balanced() -> None:
    shape = Shape((16384,), (16384,), 16, 16, right=0)
    table = static_schedule(shape, 132, head_dim=128, **TILE)
    loads = [
        sum(len(key_blocks(shape, 0, m * 128, m * 128 + 127, 128)) for m in (row[row != END] & 0xFFFFF).tolist())
        for row in table
    ]
    assert max(loads) <= 1.02 * np.mean(loads)  # measured: 1.00x


@pytest.mark.parametrize(
    ("batch", "seqlen", "heads", "head_dim"),
    [(1, 12000, 15, 128), (3, 5000, 15, 128), (1, 12000, 7, 256), (5, 3000, 7, 256), (3, 3000, 24, 128)],
)
def test_no_cta_ends_much_later_than_the_others_where_heads_are_few(batch, seqlen, heads, head_dim) -> None:
    """Measured on an H200: 2 to 8 % of the time where the last group of heads began too late."""
    shape = Shape((seqlen,) * batch, (seqlen,) * batch, heads, heads, right=0)
    order = handed_out(shape, head_dim=head_dim, num_ctas=132, **TILE)
    blocks = [item.blocks for _, item in order]
    mean = (sum(blocks) + TILE_COST * len(blocks)) / 132
    assert ends_at(blocks, 132) <= 1.03 * mean  # 1.00 to 1.02; 1.06 to 1.15 with the heads of L2 to the end
    (first, *_) = head_groups(shape, head_dim=head_dim, **TILE)
    assert sorted(order[: len(first)]) == sorted(first)  # the heads of L2 come first, as where heads are many


def test_index_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="fit a schedule entry, got 2000000"):
        static_schedule(Shape((2_000_000,), (1,), 1, 1), 132, head_dim=128, **TILE)


@pytest.mark.parametrize("beyond", range(3))
def test_the_largest_indices_of_an_entry_are_taken_and_one_more_is_refused(beyond: int) -> None:
    largest = (MAX_M_BLOCKS, MAX_SPLITS, MAX_HEADS)
    rows, splits, heads = largest
    check_entries(rows, splits, 1, heads)
    rows, splits, heads = (size + (i == beyond) for i, size in enumerate(largest))
    with pytest.raises(ValueError, match="fit a schedule entry"):
        check_entries(rows, splits, 1, heads)


@given(
    *(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.booleans()),
    *(st.integers(-1, 9), st.integers(-1, 9), st.integers(0, 12)),
)
@example(5, 1, False, False, -1, -1, 1)  # a chunk of all keys, which hides them from the rows in front
@example(5, 3, False, True, -1, 2, 7)
def test_a_limit_that_the_schedule_drops_hides_no_key(seqlen_q, seqlen_k, causal, is_packed, left, right, chunk):
    sizes = {"nheads": 1, "nheads_kv": 1, "head_dim": 64, "causal": causal, "window": (left, right)}
    if is_packed:  # its sequences may be shorter than the longest
        problem = AttentionProblem.varlen((seqlen_q, 9), (seqlen_k, 9), attention_chunk=chunk, **sizes)
    else:
        problem = AttentionProblem(1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, attention_chunk=chunk, **sizes)
    shape = shape_of(problem)
    diagonal = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    keys = np.arange(seqlen_k)
    seen = np.ones((seqlen_q, seqlen_k), bool)
    seen &= (shape.left < 0) | (keys >= diagonal - shape.left)
    seen &= (shape.right < 0) | (keys <= diagonal + shape.right)
    if shape.chunk:
        seen &= keys // shape.chunk == diagonal // shape.chunk
    first, stop = problem.visible_keys(np.arange(seqlen_q), seqlen_q, seqlen_k)
    np.testing.assert_array_equal(seen, (keys >= first[:, None]) & (keys < stop[:, None]))
