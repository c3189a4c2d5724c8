"""Error against outlier size, per quantiser: N(0, 1) + N(0, std^2) Bernoulli(0.001), one head.

Scales per row do not fit whole key tiles, which the kernel needs, so that line is the float32 emulation.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import xarray as xr

from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reference.quantize import QuantScheme, prepare
from fa3_reports.emulated import emulated_fp8_attention
from fa3_reports.studies import drawn_fp8
from fa3_reports.studies.study import Extent, Records, Study, meaning, pivot
from fa3verify.campaign.accumulator_loss import lost
from fa3verify.campaign.profiles import ProfileName
from fa3verify.files import Json
from fa3verify.inputs.recipe import Recipe

QUANTISERS: dict[str, tuple[Dtype, QuantScheme | None]] = {
    "FP16": ("fp16", None),
    "tensor": ("e4m3", QuantScheme("tensor")),
    "head": ("e4m3", QuantScheme("head")),
    "block": ("e4m3", QuantScheme("block")),
    "row (emulated)": ("e4m3", QuantScheme("row")),
    "Hadamard, tensor": ("e4m3", QuantScheme("tensor", hadamard_seed=0)),
    "Hadamard, block": ("e4m3", QuantScheme("block", hadamard_seed=0)),
}


COARSE = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # standard deviations of outliers under the quick profile
FINE = tuple(round(float(x), 3) for x in np.geomspace(1, 1000, 13))  # and under the others
EXTENTS: dict[ProfileName, Extent] = {
    "quick": Extent(256, (512,), 3),
    "release": Extent(1024, (2048,), 8),
    "soak": Extent(4096, (4096,), 16),
}


def sweep(seqlen: int, rows: int, head_dim: int, std: float, seed: int) -> Records:
    """Return the relative RMSE of every quantiser for one outlier size and draw."""
    whole = AttentionProblem(1, 1, 1, rows, seqlen, head_dim)
    arrays = Recipe("fa3_outliers", {"outlier_variance": std * std}, seed).draw(whole)
    truth = attention(whole, *arrays).out
    records = []
    for quantiser, (dtype, scheme) in QUANTISERS.items():
        problem = replace(whole, dtype=dtype)
        operands = prepare(problem, *arrays, scheme).operands
        by_row = scheme is not None and scheme.granularity == "row"
        out = (
            emulated_fp8_attention(problem, operands).out
            if by_row
            else forward(problem, operands).out.astype(np.float64)
        )
        found = lost(out, truth)
        records.append(
            {
                "quantiser": quantiser,
                "outlier_std": std,
                "seed": seed,
                "seqlen": seqlen,
                "rows": rows,
                "head_dim": head_dim,
                "rel_rmse": found.rel_rmse,
                "max_rel_error": found.max_rel_error,
            }
        )
    return records


def units(profile: ProfileName, seed: int) -> list[Json]:
    """Return one unit per outlier size and draw."""
    extent = EXTENTS[profile]
    is_quick = profile == "quick"
    shape = {"seqlen": extent.lengths[0], "rows": extent.rows, "head_dim": 64 if is_quick else 128}
    return [
        {**shape, "std": std, "seed": seed + i} for std in (COARSE if is_quick else FINE) for i in range(extent.draws)
    ]


_MEANINGS = {
    "rel_rmse": "root mean square error over the root mean square of the exact output, from unrounded inputs",
    "max_rel_error": "largest absolute error over the root mean square of the exact output",
}


def dataset(records: Records) -> xr.Dataset:
    """Return relative errors by (quantiser, outlier_std, seed)."""
    first = records[0]
    size = f"seqlen_k {first['seqlen']}, {first['rows']} query rows, head_dim {first['head_dim']}"
    data = pivot(
        records,
        ("quantiser", "outlier_std", "seed"),
        _MEANINGS,
        title="relative error against outlier size",
        comment=f"{size}, outlier rate 0.001",
    )
    data["outlier_std"].attrs = meaning("standard deviation of the outliers; the paper's is 10")
    return data


STUDY = Study(
    "outlier_sweep",
    sweep,
    units,
    dataset,
    draw=drawn_fp8.outlier_sweep,
    title="Error against outlier size, per quantiser",
    reading="Reference: unrounded inputs. A steady scale costs e4m3 no precision, so the quantisers part only where "
    "outliers make single scores decide; bands reach from the smallest to the largest draw.",
)
