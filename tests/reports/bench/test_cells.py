"""The shapes that are timed."""

from __future__ import annotations

from fa3_kernels.plan.families import FAMILIES
from fa3_reports.bench.cells import Cell, select
from fa3verify import records
from fa3verify.cases.practice import models


def test_fresh_lengths_are_divided_by_none_of_our_tiles_and_their_heads_are_odd() -> None:
    sizes = FAMILIES["gluon"].sizes.values()
    tiles = {n for size in sizes for n in (size.shipped.tile_m, size.shipped.tile_n, size.other.tile_m)}
    cells = select("fresh", ("fp16", "bf16", "e4m3"))
    assert len({cell.key for cell in cells}) == len(cells) == 54
    for cell in cells:
        assert cell.nheads % 2 == 1
        assert not any(cell.seqlen_k % tile == 0 for tile in tiles), cell.key
        assert 12_000 <= cell.batch * cell.seqlen_k <= 15_000


def test_practice_has_the_heads_of_public_models_over_pages_and_half_of_its_lengths_are_irregular() -> None:
    cells = select("practice", ("bf16",))
    layers = {
        (x.nheads, x.nheads_kv, x.head_dim, x.head_dim_v or x.head_dim) for x in (m.share for m in models() if m.causal)
    }
    assert {(x.nheads, x.nheads_kv, x.head_dim, x.value_dim) for x in cells} == layers
    assert len({x.key for x in cells}) == len(cells) == 2 * len(layers)
    for of_kind in ([x for x in cells if x.seqlen_q == 1], [x for x in cells if x.seqlen_q > 1]):
        assert {x.problem.cache.page_size for x in of_kind if x.problem.cache} == {1, 16, 64}
        is_odd = [len(set(x.problem.seqlens_k or ())) > 1 or max(x.problem.seqlens_k or ()) % 512 > 0 for x in of_kind]
        assert abs(2 * sum(is_odd) - len(of_kind)) <= 1


def test_a_cell_of_a_line_counts_its_own_lengths_and_is_read_back() -> None:
    cell = Cell.of("practice", "8/2 2 x 1 x 100,300 d64 page 16 bf16")
    assert cell.flops == 4 * 8 * 64 * 400
    assert cell.kv_bytes == 2 * 400 * 2 * 64 * 2
    assert cell.io_bytes == cell.kv_bytes + 2 * 8 * 64 * (2 + 2)
    plain = records.plain(cell)
    assert records.read(Cell, plain, "cell") == cell
    (older, *_) = select("gqa", ("fp16",))
    kept = {name: x for name, x in records.plain(older).items() if name != "line"}  # as older files have it
    assert records.read(Cell, kept, "cell") == older
    assert select("practice", ("e4m3",), head_dims=(128,), causal=False)[0].dtype == "e4m3"
