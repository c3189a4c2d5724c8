"""The shapes that are timed."""

from __future__ import annotations

from fa3_kernels.plan.families import FAMILIES
from fa3_reports.bench.cells import select


def test_fresh_lengths_are_divided_by_none_of_our_tiles_and_their_heads_are_odd() -> None:
    sizes = FAMILIES["gluon"].sizes.values()
    tiles = {n for size in sizes for n in (size.shipped.tile_m, size.shipped.tile_n, size.other.tile_m)}
    cells = select("fresh", ("fp16", "bf16", "e4m3"))
    assert len({cell.key for cell in cells}) == len(cells) == 54
    for cell in cells:
        assert cell.nheads % 2 == 1
        assert not any(cell.seqlen_k % tile == 0 for tile in tiles), cell.key
        assert 12_000 <= cell.batch * cell.seqlen_k <= 15_000
