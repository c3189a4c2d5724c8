"""How much of e4m3 the operands use, before and after rotation: underflow, subnormals, top code, scale
spread.

One scale per (sequence, kv head), as FlashAttention-3's interface has it; the spread is that of scales per 128 rows.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.quantize import QuantScheme, condition, quantize_qkv
from fa3_reports.studies import drawn_fp8
from fa3_reports.studies.study import Records, Study, pivot, texts
from fa3verify.campaign.profiles import ProfileName
from fa3verify.files import Json
from fa3verify.inputs import activations, captures
from fa3verify.inputs.recipe import Recipe

SYNTHETIC = ("normal", "fa3_outliers", "aligned_outliers", "sink")
_MIN_NORMAL = 2.0**-6
_MAX = 448.0


def _problem(source: str, kind: str, seqlen: int) -> tuple[AttentionProblem, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    if kind == "activation":
        stored = captures.load(source, dtype="e4m3")
        return stored.problem, (stored.q, stored.k, stored.v)
    problem = AttentionProblem(1, 4, 4, seqlen, seqlen, 64, dtype="e4m3")
    return problem, Recipe(source, seed=0).draw(problem)


def use(source: str, kind: str, seqlen: int) -> Records:
    """Return the figures of Q and K with and without rotation, and of V, for one input."""
    problem, arrays = _problem(source, kind, seqlen)
    records = []
    for rotation, signs in (("none", None), ("hadamard", 0)):
        scheme = QuantScheme("head", hadamard_seed=signs)
        q, k, _ = condition(problem, arrays[0], arrays[1], scheme)
        blocky = QuantScheme("block", hadamard_seed=signs)
        operands, blocks = (quantize_qkv(problem, *arrays, s).operands for s in (scheme, blocky))
        exact = {"q": q, "k": k, "v": arrays[2]}
        dequantised = dict(zip("qkv", operands.dequantized(problem), strict=True))
        for tensor in ("q", "k", "v") if signs is None else ("q", "k"):
            records.append(
                {"input": source, "kind": kind, "rotation": rotation, "tensor": tensor}
                | _figures(exact[tensor], getattr(operands, tensor).astype(np.float64), dequantised[tensor])
                | {"scale_spread": _spread(blocks, tensor)}
            )
    return records


def _figures(exact: np.ndarray, code: np.ndarray, value: np.ndarray) -> dict[str, float]:
    nonzero = exact != 0
    noise = float(np.sum(np.square(value - exact)))
    return {
        "underflow": float(np.mean((code == 0)[nonzero])),
        "subnormal": float(np.mean((np.abs(code) < _MIN_NORMAL)[nonzero] & (code != 0)[nonzero])),
        "top_code": float(np.mean(np.abs(code) == _MAX)),
        "sqnr_db": 10 * np.log10(float(np.sum(np.square(exact))) / noise) if noise else np.inf,
    }


def _spread(operands: Operands, tensor: str) -> float:
    values = getattr(operands, f"{tensor}_descale").values
    return float(np.max(values.max(axis=2) / values.min(axis=2)))


def units(profile: ProfileName, seed: int) -> list[Json]:
    """Return one unit per stored activation file and per synthetic input; the synthetic ones use seed 0 always."""
    seqlen = 512 if profile == "quick" else 4096
    made = [{"source": name, "kind": "synthetic", "seqlen": seqlen} for name in SYNTHETIC]
    return made + [{"source": x.name, "kind": "activation", "seqlen": 0} for x in activations.list_activations()]


_MEANINGS = {
    "underflow": "share of nonzero values that become 0",
    "subnormal": "share of nonzero values that become subnormal codes",
    "top_code": "share of values stored as the largest code, 448",
    "sqnr_db": "signal to quantisation noise",
    "scale_spread": "largest over smallest scale of a head's 128-row blocks",
}


def dataset(records: Records) -> xr.Dataset:
    """Return the figures by (input, rotation, tensor); V is never rotated (NaN)."""
    dims = ("input", "rotation", "tensor")
    data = pivot(records, dims, _MEANINGS, title="use of the e4m3 range", comment="one scale per kv head")
    data["sqnr_db"].attrs["units"] = "dB"
    kinds = {r["input"]: r["kind"] for r in records}
    data["kind"] = ("input", texts(kinds[name] for name in data.input.values), {"long_name": "activation or synthetic"})
    return data


STUDY = Study(
    "fp8_usage",
    use,
    units,
    dataset,
    draw=drawn_fp8.usage,
    title="How K uses e4m3, before and after rotation",
    reading="One row per input, synthetic ones first. Hollow: unrotated; filled: rotated. The scale spread is that of "
    "128-row blocks within one head: near 1, block scales have nothing to repair.",
)
