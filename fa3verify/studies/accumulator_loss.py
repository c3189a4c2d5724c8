"""Accumulator loss in FP8 over long key sequences: V ~ N(mean, 1), few query rows, one scale per tensor.

Errors are against the dequantised operands, so that only P rounding, accumulation and output rounding remain. With V of
mean 0 (the paper's test) nothing shows; with mean 1 a chained accumulator loses a growing share of the output.
"""

from __future__ import annotations

import functools

import numpy as np
import xarray as xr

from fa3_kernels.twin.forward import forward
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.quantize import QuantScheme
from fa3verify import operations
from fa3verify.files import Json
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels import watch
from fa3verify.known import registry
from fa3verify.studies.study import HEAD_DIM, Extent, Profile, Records, Study, meaning, pivot, relative, seen, texts

EXACT = "twin.e4m3, exact P V"
KERNELS = ("twin.e4m3", "twin.e4m3_chained", EXACT)
V_MEANS = (0.0, 1.0)
LONGEST = 1 << 20

# Relative RMSE on an NVIDIA H200, head_dim 64, 4 heads, 256 queries, (V mean, keys): one run.
H200: dict[str, dict[tuple[float, int], float]] = {
    "FlashAttention-3": {
        (0.0, 2048): 2.48e-2,
        (0.0, 8192): 2.60e-2,
        (0.0, 32768): 2.65e-2,
        (0.0, 131072): 2.79e-2,
        (1.0, 2048): 2.32e-2,
        (1.0, 8192): 1.01e-1,
        (1.0, 32768): 3.01e-1,
        (1.0, 131072): 5.74e-1,
    },
    "FlashAttention-3, 16 splits": {
        (0.0, 2048): 2.27e-2,
        (0.0, 8192): 2.39e-2,
        (0.0, 32768): 2.46e-2,
        (0.0, 131072): 2.51e-2,
        (1.0, 2048): 2.39e-3,
        (1.0, 8192): 5.73e-3,
        (1.0, 32768): 2.31e-2,
        (1.0, 131072): 1.01e-1,
    },
    "vLLM fork (two-level)": {
        (0.0, 2048): 2.48e-2,
        (0.0, 8192): 2.59e-2,
        (0.0, 32768): 2.60e-2,
        (0.0, 131072): 2.59e-2,
        (1.0, 2048): 2.38e-3,
        (1.0, 8192): 2.13e-3,
        (1.0, 32768): 2.03e-3,
        (1.0, 131072): 2.02e-3,
    },
    "cuDNN (e4m3 output)": {
        (0.0, 2048): 3.63e-2,
        (0.0, 8192): 3.72e-2,
        (0.0, 32768): 3.76e-2,
        (0.0, 131072): 3.87e-2,
        (1.0, 2048): 3.26e-2,
        (1.0, 8192): 9.75e-2,
        (1.0, 32768): 3.04e-1,
        (1.0, 131072): 5.74e-1,
    },
}


LENGTHS = (2048, 8192, 32768, 131072)
EXTENTS: dict[Profile, Extent] = {
    "quick": Extent(8, LENGTHS, 1),
    "release": Extent(64, LENGTHS, 4),
    "soak": Extent(256, LENGTHS, 8),
}


@functools.lru_cache(maxsize=1)
def _inputs(problem: AttentionProblem, v_mean: float, seed: int) -> tuple[Operands, np.ndarray]:
    """Return the operands of a problem, and the exact output of these."""
    with watch.warming(f"draws of {problem.seqlen_k} keys"):
        arrays = Recipe("offset_v", {"mean": v_mean}, seed).draw(problem)
        return seen(problem, arrays, QuantScheme("tensor"))


def measure(kernel: str, v_mean: float, seqlen_k: int, rows: int, seed: int) -> Records:
    """Return relative RMSE and gain of one forward, of any dtype, at one length; nothing where it does not take
    that, or is no forward."""
    candidate = None if kernel == EXACT else registry.find(kernel)
    if candidate and candidate.operation != operations.FORWARD:
        return []
    problem = AttentionProblem(1, 1, 1, rows, seqlen_k, HEAD_DIM, dtype=candidate.dtype if candidate else "e4m3")
    if candidate and candidate.refusal(problem):
        return []
    operands, truth = _inputs(problem, v_mean, seed)
    if candidate is None:
        out = forward(problem, operands, ideal=frozenset({"pv"})).out
    else:
        config = candidate.configure(problem)
        returned = candidate.run(problem, operands, config)
        out = operations.find(operations.FORWARD).named(returned, problem, config)["out"]
    out = out.astype(np.float64)
    gain = float(np.sum(out * truth) / np.sum(truth * truth)) - 1
    return [
        {
            "kernel": kernel,
            "v_mean": v_mean,
            "seqlen_k": seqlen_k,
            "seed": seed,
            "rows": rows,
            "bias": gain,
            **relative(out - truth, truth),
        }
    ]


def _draws(profile: Profile, seed: int) -> list[Json]:
    """Return number of keys, query rows and seed of every draw."""
    extent = EXTENTS[profile]
    return [
        {"seqlen_k": length, "rows": extent.rows, "seed": seed + i}
        for length in extent.lengths
        for i in range(extent.draws)
    ]


def units(profile: Profile, seed: int) -> list[Json]:
    """Return one unit per mean, length, draw and kernel."""
    draws = _draws(profile, seed)
    return [{"kernel": kernel, "v_mean": mean, **draw} for mean in V_MEANS for draw in draws for kernel in KERNELS]


def of_kernel(kernel: str, profile: Profile, seed: int) -> list[Json]:
    """Return the same for another kernel, and but for the quick profile one draw at :data:`LONGEST` keys."""
    if kernel in KERNELS:
        return []
    draws = _draws(profile, seed)
    if profile != "quick":
        draws.append({"seqlen_k": LONGEST, "rows": EXTENTS["quick"].rows, "seed": seed})
    return [{"kernel": kernel, "v_mean": mean, **draw} for mean in V_MEANS for draw in draws]


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
        comment=f"V ~ N(v_mean, 1), Q and K ~ N(0, 1), head_dim {HEAD_DIM}, {records[0]['rows']} query rows, "
        f"{len({r['seed'] for r in records})} draws, one scale per tensor",
    )
    peers = [
        [
            [table.get((float(mean), int(length)), np.nan) for length in data.seqlen_k.values]
            for mean in data.v_mean.values
        ]
        for table in H200.values()
    ]
    data = data.assign_coords(peer=texts(H200))
    told = meaning("relative RMSE measured on an NVIDIA H200 (head_dim 64, 4 heads, 256 queries, one run)")
    data["h200_rel_rmse"] = (("peer", "v_mean", "seqlen_k"), np.array(peers), told)
    return data


STUDY = Study("drift", measure, units, dataset, of_kernel)
