"""The static schedule hands out every tile that sees a key, once, and counts key blocks as the twin does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3_kernels.gluon.schedule import END, Shape, empty_rows, key_blocks, static_schedule
from fa3_kernels.tiles import Mask, row_tiles

TILE = {"tile_m": 128, "tile_n": 128}
shapes = st.builds(
    Shape,
    batch=st.integers(1, 3),
    nheads=st.just(4),
    nheads_kv=st.sampled_from([1, 2, 4]),
    seqlen_q=st.integers(1, 1500),
    seqlen_k=st.integers(0, 1500),
    causal=st.booleans(),
)


def twin_blocks(shape: Shape) -> list[range]:
    """Key blocks of every row tile of one head."""
    mask = Mask(shape.seqlen_k, shape.seqlen_k - shape.seqlen_q, -1, 0 if shape.causal else -1)
    tiles = row_tiles(shape.seqlen_q, 1, tile_m=128, pack_gqa=False)
    return [mask.blocks(tile.positions, 128) for tile in tiles]


@given(shapes)
def test_key_blocks_are_those_of_the_twin(shape: Shape) -> None:
    want = [len(blocks) for blocks in twin_blocks(shape)]
    assert [key_blocks(shape, m, **TILE) for m in range(len(want))] == want


@given(shapes, st.sampled_from([1, 7, 132]))
def test_every_tile_that_sees_a_key_is_scheduled_once(shape: Shape, num_ctas: int) -> None:
    table = static_schedule(shape, num_ctas, head_dim=128, **TILE)
    visited = [m for m, blocks in enumerate(twin_blocks(shape)) if len(blocks)]
    want = [head * 65536 + m for head in range(shape.batch * shape.nheads) for m in visited]
    assert sorted(table[table != END].tolist()) == want
    assert np.all(table[:, -1] == END)
    assert np.all(table[:, :1] != END), "a CTA without a tile would wait for a load that never comes"


@given(shapes)
def test_unscheduled_rows_are_the_leading_empty_ones(shape: Shape) -> None:
    first = next((m for m, blocks in enumerate(twin_blocks(shape)) if len(blocks)), None)
    assert empty_rows(shape, **TILE) == (shape.seqlen_q if first is None else 128 * first)


def test_causal_load_is_balanced() -> None:
    shape = Shape(1, 16, 16, 16384, 16384, True)
    table = static_schedule(shape, 132, head_dim=128, **TILE)
    loads = [sum(key_blocks(shape, e & 65535, **TILE) for e in row[row != END].tolist()) for row in table]
    assert max(loads) <= 1.02 * np.mean(loads)  # measured: 1.00x


def test_index_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 65536 row tiles and 32768 heads"):
        static_schedule(Shape(40000, 1, 1, 1, 1, False), 132, head_dim=128, **TILE)
