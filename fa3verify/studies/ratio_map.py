"""Error over bound of single outputs of one case, row by row and channel by channel.

A correct kernel gives noise without structure; structure along the tile grid is the signature of a tiling bug. One
planted fault is drawn beside the kernels to show what that looks like.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from fa3verify.files import Json
from fa3verify.inputs.recipe import Recipe
from fa3verify.known import registry
from fa3verify.operations.ratios import error_over_bound
from fa3verify.studies.study import HEAD_DIM, Profile, Records, Study, judged, meaning, texts

PLANTED = "twin.e4m3+neighbour_q_descale"
KERNELS = ("twin.fp16", "twin.bf16", "twin.e4m3", PLANTED)
ROWS = 512
SEQLEN_K = 512


def ratios(kernel: str, seed: int) -> Records:
    """Return |error| / bound of every output of one run, to three digits."""
    case, found = judged(kernel, Recipe("fa3_outliers", seed=seed), ROWS, SEQLEN_K, "block")
    ratio = error_over_bound(found.outputs["out"], found.seen["out"], found.bound["out"])[0, :, 0]
    config: Any = registry.find(kernel).configure(case.problem)
    digits = [[float(f"{x:.3g}") for x in row] for row in ratio]
    return [
        {
            "kernel": kernel,
            "seed": seed,
            "ratio": digits,
            "tile_m": config.tile_m,
            "tile_n": config.tile_n,
            "case": case.key(),
        }
    ]


def units(profile: Profile, seed: int) -> list[Json]:
    """Return one unit per kernel, the same in every profile."""
    return [{"kernel": kernel, "seed": seed} for kernel in KERNELS]


def dataset(records: Records) -> xr.Dataset:
    """Return the ratio by (kernel, row, channel), with the tile sizes and the case of each kernel."""
    ratio = np.array([r["ratio"] for r in records])
    data = xr.Dataset(
        {
            "ratio": (("kernel", "row", "channel"), ratio, meaning("absolute error over its bound")),
            "tile_m": ("kernel", [r["tile_m"] for r in records], meaning("query rows of a tile")),
            "tile_n": ("kernel", [r["tile_n"] for r in records], meaning("keys of a tile")),
            "case": ("kernel", texts(r["case"] for r in records), {"long_name": "replayable case"}),
        },
        {
            "kernel": texts(r["kernel"] for r in records),
            "row": np.arange(ratio.shape[1]),
            "channel": np.arange(ratio.shape[2]),
        },
    )
    size = f"{ROWS} query rows, seqlen_k {SEQLEN_K}, head_dim {HEAD_DIM}, e4m3: scales per 128 rows"
    data.attrs = {"title": "error over bound of every output of one case", "comment": f"fa3_outliers, {size}"}
    return data


STUDY = Study("ratio_map", ratios, units, dataset)
