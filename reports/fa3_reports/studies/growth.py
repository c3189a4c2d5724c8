"""Growth of the error with the number of keys, with the slope of log error on log seqlen_k.

A fixed number of query rows (they are exchangeable) against all keys; N(0, 1) and V with mean 1.
"""

from __future__ import annotations

import math

import numpy as np
import xarray as xr

from fa3_reports.studies import drawn, tables
from fa3_reports.studies.study import HEAD_DIM, Extent, Records, Study, judged, meaning, pivot
from fa3verify.campaign.profiles import ProfileName
from fa3verify.files import Json
from fa3verify.inputs.recipe import Recipe

KERNELS = ("twin.fp16", "twin.bf16", "twin.e4m3", "twin.e4m3_chained")
DISTRIBUTIONS = ("normal", "offset_v")
EXTENTS: dict[ProfileName, Extent] = {
    "quick": Extent(32, (128, 256, 512, 1024, 2048, 4096), 2),
    "release": Extent(128, (128, 256, 512, 1024, 2048, 4096, 8192, 16384), 8),
    "soak": Extent(256, (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768), 16),
}


def measure(kernel: str, distribution: str, rows: int, lengths: list[int], seed: int) -> Records:
    """Return error and error over bound at every length for one draw."""
    records = []
    for seqlen_k in lengths:
        _, judgement = judged(kernel, Recipe(distribution, seed=seed), rows, seqlen_k, "head")
        figures = judgement.measures
        records.append(
            {
                "kernel": kernel,
                "distribution": distribution,
                "seqlen_k": seqlen_k,
                "seed": seed,
                "rows": rows,
                "rel_rmse_seen": figures["rel_rmse_seen"],
                "ratio_max": figures["ratio_max"],
            }
        )
    return records


def units(profile: ProfileName, seed: int) -> list[Json]:
    """Return one unit per kernel, distribution and draw."""
    extent = EXTENTS[profile]
    return [
        {"kernel": k, "distribution": d, "rows": extent.rows, "lengths": list(extent.lengths), "seed": seed + i}
        for k in KERNELS
        for d in DISTRIBUTIONS
        for i in range(extent.draws)
    ]


_MEANINGS = {
    "rel_rmse_seen": "relative root mean square error against the operands the kernel saw",
    "ratio_max": "largest error over bound",
}


def slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Fit log y = a log x + b by least squares; return a and the half width of its 95 % interval (Student's t).

    >>> a, half_width = slope(np.array([1.0, 2, 4, 8]), np.array([1.0, 4, 16, 64]))
    >>> round(a, 6), half_width < 1e-6
    (2.0, True)
    """
    good = np.isfinite(y) & (y > 0)
    log_x = np.log(x[good])
    log_y = np.log(y[good])
    n = log_x.size
    if n < 3 or np.ptp(log_x) == 0:
        return math.nan, math.nan
    from scipy.special import stdtrit

    centred = log_x - log_x.mean()
    spread = float(centred @ centred)
    a = float(centred @ log_y) / spread
    residual = log_y - log_y.mean() - a * centred
    return a, float(stdtrit(n - 2, 0.975)) * math.sqrt(float(residual @ residual) / (n - 2) / spread)


def dataset(records: Records) -> xr.Dataset:
    """Return errors by (kernel, distribution, seqlen_k, seed) and their log-log slopes with 95 % intervals."""
    data = pivot(
        records,
        ("kernel", "distribution", "seqlen_k", "seed"),
        _MEANINGS,
        title="growth of the error with the number of keys",
        comment=f"{records[0]['rows']} query rows, head_dim {HEAD_DIM}; e4m3: one scale per head",
    )
    for name in _MEANINGS:
        fits = np.array(
            [
                [_fit(data[name].sel(kernel=k, distribution=d)) for d in data.distribution.values]
                for k in data.kernel.values
            ]
        )
        dims = ("kernel", "distribution")
        data[f"slope_{name}"] = (dims, fits[..., 0], meaning(f"a in {name} ~ seqlen_k^a"))
        data[f"slope_{name}_ci95"] = (dims, fits[..., 1], meaning("half width of its 95 % interval"))
    return data


def _fit(values: xr.DataArray) -> tuple[float, float]:
    lengths = np.repeat(values.seqlen_k.values[:, None], values.sizes["seed"], axis=1)
    return slope(lengths.ravel().astype(float), values.transpose("seqlen_k", "seed").values.ravel())


STUDY = Study(
    "growth",
    measure,
    units,
    dataset,
    draw=drawn.growth,
    title="Growth with the number of keys",
    reading="A correct kernel stays below the bound, ratio 1, at every length. Dotted guides grow like √N and N; "
    "fitted slopes are in the table.",
    table=tables.slopes,
)
