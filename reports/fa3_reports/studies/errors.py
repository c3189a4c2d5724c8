"""Where the errors of each kernel lie on a fixed set of inputs: their survival function, and their
signed size in ulp.

``standard FP16`` is the unfused baseline. Errors are against the operands each kernel saw.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from fa3_reference.formats import FORMATS, ulp
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme
from fa3_reports.emulated import standard_attention_fp16
from fa3_reports.studies import drawn
from fa3_reports.studies.study import Extent, Records, Study, meaning, pivot, rms, seen
from fa3verify.campaign.profiles import ProfileName
from fa3verify.files import Json
from fa3verify.inputs.recipe import Recipe
from fa3verify.known import registry

STANDARD = "standard FP16"
KERNELS = ("twin.fp16", "twin.bf16", "twin.e4m3", STANDARD)
INPUTS = ("normal", "fa3_outliers", "peaky", "offset_v")
LEVELS = 10.0 ** np.arange(-9, 1.01, 0.125)  # of |error| / rms
BINS = np.arange(-4.0, 4.01, 0.125)  # edges, in ulp
EXTENTS: dict[ProfileName, Extent] = {
    "quick": Extent(256, (512,), 1),
    "release": Extent(1024, (2048,), 2),
    "soak": Extent(2048, (4096,), 4),
}


def distribute(kernel: str, distribution: str, rows: int, seqlen: int, seed: int) -> Records:
    """Return counts of errors above each level and in each ulp bin, for one kernel and one draw."""
    dtype = "fp16" if kernel == STANDARD else registry.find(kernel).dtype
    problem = AttentionProblem(1, 1, 1, rows, seqlen, 128, dtype=dtype)
    arrays = Recipe(distribution, seed=seed).draw(problem)
    operands, truth = seen(problem, arrays, QuantScheme("head"))
    if kernel == STANDARD:
        out = standard_attention_fp16(problem, *arrays).out
        out_dtype = "fp16"
    else:
        asked = registry.find(kernel)
        config: Any = asked.code.configure(problem)
        returned: Any = asked.code.run(problem, operands, config)
        out = returned.out.astype(np.float64)
        out_dtype = config.out_dtype
    error = (out - truth).ravel()
    signed = error / ulp(truth, FORMATS[out_dtype]).ravel()
    size = np.sort(np.abs(error) / rms(truth))
    above = size.size - np.searchsorted(size, LEVELS, side="right")
    inside = np.clip(signed, BINS[0], BINS[-1])
    counts = [int(np.sum(signed < BINS[0])), *np.histogram(signed, BINS)[0].tolist(), int(np.sum(signed > BINS[-1]))]
    return [
        {
            "kernel": kernel,
            "distribution": distribution,
            "seed": seed,
            "rows": rows,
            "seqlen": seqlen,
            "outputs": error.size,
            "above": above.tolist(),
            "counts": counts,
            "mean_ulp": float(np.mean(inside)),
            "max_ulp": float(np.max(np.abs(signed))),
        }
    ]


def units(profile: ProfileName, seed: int) -> list[Json]:
    """Return one unit per kernel, distribution and draw."""
    extent = EXTENTS[profile]
    sizes = {"rows": extent.rows, "seqlen": extent.lengths[0]}
    return [
        {"kernel": kernel, "distribution": d, **sizes, "seed": seed + i}
        for kernel in KERNELS
        for d in INPUTS
        for i in range(extent.draws)
    ]


_SUMS = {
    "outputs": "output values",
    "mean_ulp": "mean signed error, in ulp of the output format, values beyond 4 ulp counted as 4",
    "max_ulp": "largest absolute error, in ulp of the output format",
}


def dataset(records: Records) -> xr.Dataset:
    """Return survival and histogram by kernel, pooled over inputs, and mean and maximum by kernel and distribution."""
    by_seed = pivot(records, ("kernel", "distribution", "seed"), _SUMS)
    data = by_seed[["outputs"]].sum("seed")
    data["mean_ulp"] = by_seed.mean_ulp.mean("seed", keep_attrs=True)
    data["max_ulp"] = by_seed.max_ulp.max("seed", keep_attrs=True)
    data["outputs"].attrs = meaning(_SUMS["outputs"])
    pooled = {k: [r for r in records if r["kernel"] == k] for k in data.kernel.values}
    total = {k: sum(r["outputs"] for r in rows) for k, rows in pooled.items()}
    survival, shares = (
        np.array([np.sum([r[name] for r in rows], axis=0) / total[k] for k, rows in pooled.items()])
        for name in ("above", "counts")
    )
    data = data.assign_coords(level=LEVELS, ulp_bin=(BINS[:-1] + BINS[1:]) / 2)
    data["level"].attrs = meaning("absolute error over the root mean square of the exact output")
    data["ulp_bin"].attrs = meaning("signed error in ulp of the output format, centre of the bin")
    data["survival"] = (("kernel", "level"), survival, meaning("share of outputs with a larger error"))
    data["ulp_share"] = (("kernel", "ulp_bin"), shares[:, 1:-1], meaning("share of outputs in the bin"))
    below, above = (
        f"share of outputs with an error {side} ulp" for side in (f"below {BINS[0]:g}", f"above {BINS[-1]:g}")
    )
    data["below"] = ("kernel", shares[:, 0], meaning(below))
    data["beyond"] = ("kernel", shares[:, -1], meaning(above))
    first = records[0]
    size = f"{first['rows']} query rows, seqlen_k {first['seqlen']}, head_dim 128"
    data.attrs = {
        "title": "where the errors lie",
        "comment": f"{', '.join(data.distribution.values)}; {size}; e4m3: one scale per head",
    }
    return data


STUDY = Study(
    "error_distribution",
    distribute,
    units,
    dataset,
    draw=drawn.error_distribution,
    title="Where the errors lie",
    reading="Reference: the operands each kernel saw. An unbiased kernel gives a symmetric histogram; truncation "
    "shifts it. Triangles: everything beyond 4 ulp.",
)
