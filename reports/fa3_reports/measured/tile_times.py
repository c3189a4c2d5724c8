"""The times by which the plan chooses a tile, fitted to what the simulator says of launches of many shapes.

    python -m fa3_reports.measured.tile_times kernels/fa3_kernels/plan/tile_times.csv

Of every tile launch_cycles and block_cycles minimise the mean square of relative errors, and tile_blocks is the best of
:data:`TILE_BLOCKS`.

The simulator is known to be wrong in places. Causal launches of 1k to 3k queries at head_dim 64 in tiles of 192 rows
take 3 to 15 % longer than it says. There the plan chooses between two tiles, so that causal launches of this size are
those that were timed, and only what a launch costs before its first block is the simulator's, of dense ones. At
head_dim 96 and 192 in bf16 it is 5 to 9 % too slow, and at 80 causal in e4m3 13 to 18 % too fast: one tile is listed of
each of these sizes, so that no choice of a tile hangs on it; if more are, they are to be chosen by measured times.

All tiles of a size have one number of keys, by which no bit of a launch depends on the batch that it is in
(``reports/notes/invariance.md``). Tiles of 64 keys, of 192 rows at head_dim 96 and 128 and of 128 rows at 192 with V of
128, would take up to a quarter of the time off launches of few tiles by the simulator; up to 1,100 keys, where they
would pay, it has 192 x 64 at head_dim 128 4 to 12 % too fast.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.tile_order import shape_of
from fa3_kernels.plan.tile_times import TileTime
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reports.bench_rows import read_rows
from fa3_simulator.machine import load
from fa3_simulator.run import estimate
from fa3verify import files

TILE_BLOCKS = tuple(round(0.1 * n, 1) for n in range(2, 61))
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
LISTED: tuple[tuple[str, int, int, tuple[tuple[int, int], ...]], ...] = (
    ("16 bits", 64, 64, ((192, 128), (128, 128))),
    ("e4m3", 64, 64, ((192, 128), (128, 128))),
    *(("16 bits", d, d, ((128, 128),)) for d in (96, 128, 160)),
    ("16 bits", 192, 128, ((128, 128),)),
    *(("16 bits", d, d, ((128, 64),)) for d in (192, 256)),
    *(("e4m3", d, v, ((128, 128),)) for d, v in ((96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256))),
)
MACHINE = "h200"
REPORTS = Path(__file__).parents[2]

Launches = list[tuple[AttentionProblem, float]]  # and the SM cycles that they take


def simulated(operands: str, head_dim: int, head_dim_v: int, keys: str, tile: tuple[int, int]) -> Launches:
    """Every shape; where some keys are to be hidden, causal."""
    machine = load(MACHINE)
    dtype: Dtype = "e4m3" if operands == "e4m3" else "bf16"
    found = []
    for batch, heads, seqlen_q, seqlen_k in SHAPES:
        sizes = (batch, heads, heads, seqlen_q, seqlen_k, head_dim)
        problem = AttentionProblem(*sizes, head_dim_v=head_dim_v, dtype=dtype, causal=keys == "some")
        found.append((problem, estimate(problem, default_config(problem, tile=tile), machine).cycles))
    return found


def timed(operands: str, head_dim: int, keys: str, tile: tuple[int, int]) -> Launches:
    """Return what was timed of a tile as it ships: with turns, overlapped, and in e4m3 promoted."""
    wanted = {"head_dim": str(head_dim), "head_dim_v": str(head_dim), "tile_m": str(tile[0]), "tile_n": str(tile[1])}
    wanted |= dict.fromkeys(("pingpong", "overlap", "warp_specialized"), "True")
    wanted |= {"causal": str(keys == "some")} | ({"promotion_interval": "128"} if operands == "e4m3" else {})
    found = []
    folders = [folder for room in ("speed", "simulator") for folder in sorted((REPORTS / MACHINE / room).iterdir())]
    for path in (folder / "bench.jsonl" for folder in folders):
        for row in read_rows(path) if files.stored(path).is_file() else ():
            is_ours = row["kernel"].startswith("gluon") and row["grid"] not in ("decode", "drawn", "practice")
            is_tile = all(row[name] == value for name, value in wanted.items())
            if not (is_ours and is_tile and row["burst_cycles"] and (row["dtype"] == "e4m3") == (operands == "e4m3")):
                continue
            numbers = (int(row[name]) for name in ("batch", "nheads", "nheads_kv", "seqlen_q", "seqlen_k", "head_dim"))
            problem = AttentionProblem(*numbers, dtype=row["dtype"], causal=row["causal"] == "True")  # type: ignore[arg-type]
            found.append((problem, float(row["burst_cycles"])))
    return found


def fitted(
    operands: str, head_dim: int, head_dim_v: int, keys: str, tile: tuple[int, int], launch_cycles: float | None = None
) -> TileTime:
    """Fit the numbers of one tile to simulated launches; with ``launch_cycles`` given, the other two to timed ones."""
    size = (operands, head_dim, head_dim_v, keys)
    found = simulated(*size, tile) if launch_cycles is None else timed(operands, head_dim, keys, tile)
    shapes = [shape_of(problem) for problem, _ in found]
    cycles = np.array([x for _, x in found])
    best: tuple[float, TileTime] | None = None
    for tile_blocks in TILE_BLOCKS:
        unit = TileTime(*size, *tile, 0.0, 1.0, tile_blocks)
        ends = np.array([unit.cycles(shape) for shape in shapes])
        if launch_cycles is None:
            terms = np.stack([np.ones(len(found)), ends], axis=1) / cycles[:, None]
            (launch, block), *_ = np.linalg.lstsq(terms, np.ones(len(found)), rcond=None)
        else:
            launch = launch_cycles
            block = np.sum(ends * (cycles - launch) / cycles**2) / np.sum((ends / cycles) ** 2)
        error = float(np.mean(((launch + block * ends) / cycles - 1) ** 2))
        if best is None or error < best[0]:
            best = error, unit._replace(launch_cycles=round(launch), block_cycles=round(block))
    assert best is not None
    return best[1]


def rows() -> list[TileTime]:
    """Return the table."""
    found = []
    for operands, head_dim, head_dim_v, tiles in LISTED:
        size = (operands, head_dim, head_dim_v)
        dense = [fitted(*size, "all", tile) for tile in tiles]
        known = [x.launch_cycles if len(tiles) > 1 else None for x in dense]
        found += dense + [fitted(*size, "some", tile, launch) for tile, launch in zip(tiles, known, strict=True)]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    files.write_text(parser.parse_args().file, files.csv_text(TileTime._fields, rows()))
