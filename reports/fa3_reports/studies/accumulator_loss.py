"""Accumulator loss in FP8 over long key sequences, of our twins, of other FP8 forwards, and of peers on an H200.

:mod:`fa3verify.campaign.accumulator_loss` says what is drawn and measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import xarray as xr

from fa3_kernels.twin.forward import forward
from fa3_reports.stored import read_csv
from fa3_reports.studies import drawn, tables
from fa3_reports.studies.study import Extent, Records, Study, meaning, pivot, texts
from fa3verify.campaign import accumulator_loss as loss
from fa3verify.campaign.profiles import ProfileName
from fa3verify.files import Json

EXACT = "twin.e4m3, exact P V"
KERNELS = ("twin.e4m3", "twin.e4m3_chained", EXACT)
V_MEANS = (0.0, 1.0)
LONGEST = 1 << 20
PEERS = Path(__file__).parents[2] / "h200" / "accumulator_loss" / "peers.csv"

LENGTHS = (2048, 8192, 32768, 131072)
EXTENTS: dict[ProfileName, Extent] = {
    "quick": Extent(8, LENGTHS, 1),
    "release": Extent(64, LENGTHS, 4),
    "soak": Extent(256, LENGTHS, 8),
}


def peers() -> dict[str, dict[tuple[float, int], float]]:
    """Return the relative RMSE that was measured on an H200, by kernel, mean of V and number of keys."""
    found: dict[str, dict[tuple[float, int], float]] = {}
    for row in read_csv(PEERS, ("kernel", "v_mean", "seqlen_k", "rel_rmse")):
        place = float(row["v_mean"]), int(row["seqlen_k"])
        found.setdefault(row["kernel"], {})[place] = float(row["rel_rmse"])
    return found


def measure(kernel: str, v_mean: float, seqlen_k: int, rows: int, seed: int) -> Records:
    """Return errors and bias of one forward at one length; nothing where it does not take that, or is no forward."""
    if kernel == EXACT:
        problem = loss.problem_of("e4m3", rows, seqlen_k)
        operands, truth = loss.drawn(problem, v_mean, seed)
        found = loss.lost(forward(problem, operands, ideal=frozenset({"pv"})).out, truth)
    else:
        found = loss.measure(kernel, v_mean, seqlen_k, rows, seed)
    unit = {"kernel": kernel, "v_mean": v_mean, "seqlen_k": seqlen_k, "seed": seed, "rows": rows}
    return [unit | asdict(found)] if found else []


def units(profile: ProfileName, seed: int, kernels: Sequence[str] = KERNELS) -> list[Json]:
    """Return one unit per mean, length, draw and kernel; of kernels that are not ours, and but for the quick profile,
    one draw at :data:`LONGEST` keys as well.
    """
    extent = EXTENTS[profile]
    draws = [
        {"seqlen_k": length, "rows": extent.rows, "seed": seed + i}
        for length in extent.lengths
        for i in range(extent.draws)
    ]
    longest = {"seqlen_k": LONGEST, "rows": EXTENTS["quick"].rows, "seed": seed}
    return [
        {"kernel": kernel, "v_mean": mean, **draw}
        for mean in V_MEANS
        for kernel in kernels
        for draw in draws + [longest] * (profile != "quick" and kernel not in KERNELS)
    ]


_MEANINGS = {
    "rel_rmse": "relative root mean square error against the dequantised operands",
    "bias": "signed: regression gain of the output on the truth, minus 1",
    "max_rel_error": "largest absolute error over the root mean square of the exact output",
}


def dataset(records: Records) -> xr.Dataset:
    """Return errors by (kernel, v_mean, seqlen_k, seed), and the H200 figures by (peer, v_mean, seqlen_k)."""
    data = pivot(
        records,
        ("kernel", "v_mean", "seqlen_k", "seed"),
        _MEANINGS,
        title="accumulator loss in FP8",
        comment=f"V ~ N(v_mean, 1), Q and K ~ N(0, 1), head_dim {loss.HEAD_DIM}, {records[0]['rows']} query rows, "
        f"{len({r['seed'] for r in records})} draws, one scale per tensor",
    )
    known = peers()
    places = [[(float(mean), int(length)) for length in data.seqlen_k.values] for mean in data.v_mean.values]
    found = [[[table.get(place, np.nan) for place in row] for row in places] for table in known.values()]
    data = data.assign_coords(peer=texts(known))
    told = meaning("relative RMSE measured on an NVIDIA H200 (head_dim 64, 4 heads, 256 queries, one run)")
    data["h200_rel_rmse"] = (("peer", "v_mean", "seqlen_k"), np.array(found), told)
    return data


STUDY = Study(
    "accumulator_loss",
    measure,
    units,
    dataset,
    draw=drawn.accumulator_loss,
    title="Accumulator loss over long keys",
    reading="With V of mean 0 every FP8 kernel looks alike. With V of mean 1 a chained accumulator loses output as "
    "keys grow, while promotion every 128 keys should keep the error flat. Black or white marks: production kernels "
    "measured on an NVIDIA H200.",
    table=tables.accumulator_loss,
)
