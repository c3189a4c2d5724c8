"""Tiles: which blocks are visited, what is masked, how splits cut; hand-derived and against the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_kernels.plan.tile_order import key_blocks, shape_of
from fa3_kernels.plan.tiles import mask_of, row_tiles, split_ranges
from fa3_reference.problem import AttentionProblem


def test_causal_blocks_stop_at_the_diagonal_of_the_last_row():
    problem = AttentionProblem(1, 1, 1, 256, 256, 64, causal=True)
    mask = mask_of(problem, 256, 256)
    assert mask.blocks(np.arange(0, 128), 128) == range(0, 1)
    assert mask.blocks(np.arange(128, 256), 128) == range(0, 2)


def test_a_window_starts_at_the_first_row():
    problem = AttentionProblem(1, 1, 1, 256, 512, 64, window=(100, 0))
    mask = mask_of(problem, 256, 512)  # row i sits at key i + 256
    assert mask.blocks(np.arange(0, 128), 64) == range(2, 6)  # keys 156 .. 383


def test_rows_above_the_first_key_visit_nothing():
    problem = AttentionProblem(1, 1, 1, 64, 8, 64, causal=True)
    assert len(mask_of(problem, 64, 8).blocks(np.arange(0, 50), 32)) == 0


@given(
    st.integers(1, 40),
    st.integers(1, 70),
    st.booleans(),
    st.integers(-1, 30),
    st.integers(-1, 30),
    st.sampled_from([8, 16]),
    st.sampled_from([0, 0, 1, 5, 16, 30]),
)
def test_tiles_hide_exactly_what_the_problem_hides(seqlen_q, seqlen_k, causal, left, right, tile_n, chunk):
    sizes = {
        "causal": causal,
        "window": (left, right),
        "attention_chunk": chunk,
    }
    problem = AttentionProblem(1, 1, 1, seqlen_q, seqlen_k, 64, **sizes)
    mask = mask_of(problem, seqlen_q, seqlen_k)
    shape = shape_of(problem)
    for tile in row_tiles(seqlen_q, 1, tile_m=16, pack_gqa=False):
        first, stop = problem.visible_keys(tile.positions, seqlen_q, seqlen_k)
        last = int(tile.positions.max())
        assert len(key_blocks(shape, 0, int(tile.positions.min()), last, tile_n)) == len(
            mask.blocks(tile.positions, tile_n)
        )
        visible = np.zeros((tile.positions.size, -(-seqlen_k // tile_n) * tile_n), bool)
        for block in mask.blocks(tile.positions, tile_n):
            columns = np.arange(block * tile_n, (block + 1) * tile_n)
            hidden = mask.hidden(tile.positions, columns)
            visible[:, columns] = True if hidden is None else ~hidden
        expected = np.arange(visible.shape[1])
        assert np.array_equal(visible, (expected >= first[:, None]) & (expected < stop[:, None]))


@given(st.integers(1, 50), st.integers(1, 5), st.booleans())
def test_row_tiles_cover_every_row_of_every_head_once(seqlen_q, group, pack):
    tiles = row_tiles(seqlen_q, group, tile_m=16, pack_gqa=pack)
    rows = [(int(p), int(h)) for t in tiles for p, h in zip(t.positions, t.heads, strict=True)]
    assert sorted(rows) == [(p, h) for p in range(seqlen_q) for h in range(group)]


@given(st.integers(0, 5), st.integers(0, 40), st.integers(1, 9))
def test_splits_cover_every_block_once_in_order(start, count, num_splits):
    parts = split_ranges(range(start, start + count), num_splits)
    assert len(parts) == num_splits
    assert [b for part in parts for b in part] == list(range(start, start + count))


def test_packed_tiles_hold_whole_positions_of_a_padded_group():
    tiles = row_tiles(40, 3, tile_m=64, pack_gqa=True)  # 4 rows per position, one of them padding
    assert [(t.positions.size, int(t.positions[0])) for t in tiles] == [(48, 0), (48, 16), (24, 32)]
    with pytest.raises(ValueError, match="multiple of the padded group 128, got 64"):
        row_tiles(4, 65, tile_m=64, pack_gqa=True)
