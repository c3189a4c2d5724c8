"""Error budget: what remains of a kernel's error when one source of it is made exact in the bit model.

contribution of a source = sqrt(max(0, total^2 - without^2)): what switching it off takes away. Sources interact and
errors may cancel, so contributions do not add up; ``rest`` is what remains with every source off (row sums, rescaling,
output rounding), ``inputs`` the change of the exact output when the inputs are rounded.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import xarray as xr

from fa3_kernels.twin.arithmetic import SOURCES
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reference.quantize import QuantScheme
from fa3_reports.studies import drawn_fp8
from fa3_reports.studies.study import Extent, Records, Study, meaning, pivot, rms, seen
from fa3verify.campaign.profiles import ProfileName
from fa3verify.files import Json
from fa3verify.inputs import captures
from fa3verify.inputs.recipe import Recipe

DTYPES: tuple[Dtype, ...] = ("fp16", "bf16", "e4m3")
SYNTHETIC = ("normal", "fa3_outliers", "offset_v")
ACTIVATION = "smollm2_dev-code_n384_L17_kv2"
EXTENTS: dict[ProfileName, Extent] = {
    "quick": Extent(256, (512,), 1),
    "release": Extent(512, (2048,), 4),
    "soak": Extent(1024, (4096,), 8),
}
NOTHING = "nothing"
EVERYTHING = "everything"


def measure(dtype: Dtype, source: str, rows: int, seqlen: int, seed: int) -> Records:
    """Return the relative RMSE of one kernel on one input with nothing, each source, and everything idealised."""
    if source == ACTIVATION:
        stored = captures.load(source, dtype=dtype)
        arrays = (stored.q[:, :, :1], stored.k, stored.v)
        problem = replace(stored.problem, nheads=1)
    else:
        problem = AttentionProblem(1, 1, 1, rows, seqlen, 64, dtype=dtype)
        arrays = Recipe(source, seed=seed).draw(problem)
    operands, truth = seen(problem, arrays, QuantScheme("head"))
    level = rms(truth)
    label = {"kernel": f"twin.{dtype}", "input": source, "seed": seed}
    off = {NOTHING: frozenset(), **{s: frozenset({s}) for s in SOURCES}, EVERYTHING: frozenset(SOURCES)}
    records = [
        {
            **label,
            "off": name,
            "rel_rmse": rms(forward(problem, operands, ideal=ideal).out.astype(np.float64) - truth) / level,
        }
        for name, ideal in off.items()
    ]
    return [*records, {**label, "off": "inputs", "rel_rmse": rms(truth - attention(problem, *arrays).out) / level}]


def units(profile: ProfileName, seed: int) -> list[Json]:
    """Return one unit per kernel, input and draw."""
    extent = EXTENTS[profile]
    sizes = {"rows": extent.rows, "seqlen": extent.lengths[0]}
    return [
        {"dtype": dtype, "source": source, **sizes, "seed": seed + i}
        for dtype in DTYPES
        for source in (*SYNTHETIC, ACTIVATION)
        for i in range(1 if source == ACTIVATION else extent.draws)
    ]


def dataset(records: Records) -> xr.Dataset:
    """Return total, what remains without each source, and contributions, by (kernel, input, source); RMS over draws."""
    raw = pivot(records, ("kernel", "input", "seed", "off"), {"rel_rmse": ""})
    pooled = np.sqrt((raw.rel_rmse**2).mean("seed"))
    total = pooled.sel(off=NOTHING, drop=True)
    without = pooled.sel(off=list(SOURCES)).rename(off="source")
    contribution = np.sqrt(np.maximum(total**2 - without**2, 0.0))
    data = total.to_dataset(name="total")
    data["without"] = without
    data["contribution"] = contribution.transpose("kernel", "input", "source")
    data["rest"] = pooled.sel(off=EVERYTHING, drop=True)
    data["inputs"] = pooled.sel(off="inputs", drop=True)
    meanings = {
        "total": "relative RMSE against the operands the kernel saw",
        "without": "the same with one source of error made exact",
        "contribution": "sqrt(max(0, total^2 - without^2)); not additive",
        "rest": "relative RMSE with every source made exact: row sums, rescaling and output rounding",
        "inputs": "relative RMS change of the exact output by rounding or quantising the inputs",
    }
    for name, long_name in meanings.items():
        data[name].attrs = meaning(long_name)
    data.attrs = {"title": "error budget by switching sources off", "comment": "head_dim 64; e4m3: one scale per head"}
    return data


STUDY = Study(
    "error_budget",
    measure,
    units,
    dataset,
    draw=drawn_fp8.budget,
    title="Error budget, by switching sources off in the bit model",
    reading="Contribution = √(total² − without²). Sources interact, so contributions do not add up to the total; one "
    "that is missing was not above 0. 'rest' remains with every source off; 'inputs' is the exact change by "
    "rounding or quantising the inputs.",
)
