"""Tiles that do not ship, on a Hopper GPU: every bit of O and of the LSE is the twin's, whatever the tile."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from fa3_reference.problem import AttentionProblem
from fa3_reports.bench.kernels import TILES
from fa3_reports.bits.forward import device_bits, differing, twin_bits
from fa3_reports.bits.forward_cases import Case, operands

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

EACH = [(dtype, head_dim, tile) for (dtype, head_dim), tiles in TILES.items() for tile in tiles]
# Whole tiles of every size, tails of rows and keys, hidden keys on both sides.
SHAPES = ((1024, 1024, {}), (300, 777, {"causal": True}), (500, 700, {"window": (150, 30)}))


@pytest.mark.parametrize(("dtype", "head_dim", "tile"), EACH, ids=str)
@pytest.mark.parametrize("is_serial", [False, True], ids=["overlapped", "serial"])
def test_a_tile_gives_the_twins_bits(dtype, head_dim: int, tile: tuple[int, int], is_serial: bool) -> None:
    switches = {"pingpong": not is_serial, "intra_wg_overlap": not is_serial}
    for seed, (seqlen_q, seqlen_k, mask) in enumerate(SHAPES):
        problem = AttentionProblem(2, 4, 2, seqlen_q, seqlen_k, head_dim, dtype=dtype, **mask)
        case = Case("tile", problem, "outlier", seed, {"tile": tile})
        if dtype == "e4m3":
            case = replace(case, choices={**case.choices, "out_dtype": "bf16"}, scopes=("64", "256", "256"))
        given = operands(case)
        wrong = differing(device_bits(case, given, **switches), twin_bits(case, given))
        assert wrong == (0, 0), f"{case} {switches}: {wrong} of O and LSE differ"
