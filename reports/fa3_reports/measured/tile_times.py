"""The times by which the plan chooses a tile, fitted to what the simulator says of launches of many shapes.

    python -m fa3_reports.measured.tile_times kernels/fa3_kernels/plan/tile_times.csv

Of every tile launch_cycles and block_cycles minimise the mean square of relative errors over :data:`SHAPES`, and
tile_blocks is the best of :data:`TILE_BLOCKS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.tile_order import items, shape_of
from fa3_kernels.plan.tile_times import TileTime, last_end
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_simulator.machine import load
from fa3_simulator.run import estimate
from fa3verify import files

TILE_BLOCKS = tuple(round(0.1 * n, 1) for n in range(2, 21))
# Batch, heads, queries, keys: from a part of a wave to many, decoding, chunks and whole prompts.
SHAPES = (
    (1, 8, 300, 300),
    (2, 12, 512, 512),
    (4, 16, 700, 700),
    (1, 24, 900, 4000),
    (1, 32, 512, 9000),
    (16, 16, 1024, 1024),
    (2, 32, 1536, 1536),
    (8, 8, 2048, 2048),
    (1, 16, 4096, 4096),
    (2, 20, 3300, 3300),
    (16, 32, 4, 6000),
    (64, 8, 1, 3000),
    (1, 4, 16384, 16384),
)
# What is listed: operands, head dims, and tiles among which the plan chooses.
LISTED = (
    ("16 bits", 64, 64, ((192, 128), (128, 128))),
    ("e4m3", 64, 64, ((192, 128), (128, 128))),
    *(("16 bits", d, d, ((128, 128),)) for d in (96, 128)),
    ("16 bits", 192, 128, ((128, 128),)),
    *(("16 bits", d, d, ((128, 64),)) for d in (192, 256)),
    *(("e4m3", d, v, ((128, 128),)) for d, v in ((96, 96), (128, 128), (192, 128), (192, 192), (256, 256))),
)
MACHINE = "h200"


def problems(operands: str, head_dim: int, head_dim_v: int) -> Iterator[AttentionProblem]:
    """Yield every shape, dense and causal."""
    dtype: Dtype = "e4m3" if operands == "e4m3" else "bf16"
    for batch, heads, seqlen_q, seqlen_k in SHAPES:
        for causal in (False, True):
            sizes = (batch, heads, heads, seqlen_q, seqlen_k, head_dim)
            yield AttentionProblem(*sizes, head_dim_v=head_dim_v, dtype=dtype, causal=causal)


def fitted(operands: str, head_dim: int, head_dim_v: int, tile: tuple[int, int]) -> TileTime:
    """Fit the three numbers of one tile."""
    machine = load(MACHINE)
    found = [*problems(operands, head_dim, head_dim_v)]
    cycles = np.array([estimate(p, default_config(p, tile=tile), machine).cycles for p in found])
    best: tuple[float, TileTime] | None = None
    for tile_blocks in TILE_BLOCKS:
        ends = [last_end(items(shape_of(p), 0, *tile), p.batch * p.nheads, tile_blocks) for p in found]
        terms = np.stack([np.ones(len(found)), ends], axis=1) / cycles[:, None]
        (launch, block), *_ = np.linalg.lstsq(terms, np.ones(len(found)), rcond=None)
        error = float(np.sqrt(np.mean((terms @ (launch, block) - 1) ** 2)))
        if best is None or error < best[0]:
            time = TileTime(operands, head_dim, head_dim_v, *tile, round(launch), round(block), tile_blocks)
            best = error, time
    assert best is not None
    return best[1]


def rows() -> list[TileTime]:
    """Return the table."""
    return [fitted(*sizes, tile) for *sizes, tiles in LISTED for tile in tiles]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    files.write_text(parser.parse_args().file, files.csv_text(TileTime._fields, rows()))
