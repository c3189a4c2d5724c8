"""The launches that evidence is bound to: what ships, what keeps timelines, and launches of realistic sizes.

A measurement is of this package's kernels as long as every one of these launches gives the GPU the same. Shipped and
instrumented kernels are compiled by the audit, and bound by their PTX too; the others are there for what depends on
sizes: tiles, splits, packing, the schedule.
"""

from __future__ import annotations

from typing import Any

from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reports.audit.calls import ShippedLaunch
from fa3_reports.audit.shipped import shipped
from fa3_reports.stamps import STEPS

# of the paper's grid (arXiv 2407.08608, section 4.1), by which speed is measured
HIDDEN = 2048
TOKENS = 16384
_DTYPES: tuple[Dtype, ...] = ("fp16", "e4m3")
_DESCALED: dict[str, dict[str, Any]] = {"fp16": {}, "e4m3": {"descale_blocks": (0, 0, 0)}}


def _paper(
    name: str, dtype: Dtype, d: int, seqlen: int, choices: dict[str, Any] | None = None, **semantics
) -> ShippedLaunch:
    heads = HIDDEN // d
    problem = AttentionProblem(TOKENS // seqlen, heads, heads, seqlen, seqlen, d, dtype=dtype, **semantics)
    return ShippedLaunch(f"probe_{dtype}_d{d}_{name}", problem, {**_DESCALED[dtype], **(choices or {})})


def instrumented() -> tuple[ShippedLaunch, ...]:
    """Return the launches whose timelines are recorded."""
    found = []
    for dtype in _DTYPES:
        for d, tile in ((64, (192, 128)), (128, (128, 128)), (256, (128, 64 if dtype == "fp16" else 128))):
            for ending, interval in (("", 128), ("_chained", 0)) if dtype == "e4m3" else (("", None),):
                choices = {"tile": tile} | ({} if interval is None else {"promotion_interval": interval})
                plain = _paper("stamps", dtype, d, 8192, choices)
                found.append(ShippedLaunch(f"{dtype}_d{d}{ending}_stamps", plain.problem, plain.choices, stamps=STEPS))
    return tuple(found)


def audited() -> tuple[ShippedLaunch, ...]:
    """Return the launches that the audit compiles."""
    return (*shipped(), *instrumented())


def realistic() -> tuple[ShippedLaunch, ...]:
    """Return launches that the audit does not compile, of sizes that people have."""
    lengths = {"seqlens_q": (1, 37, 128, 1000, 4096), "seqlens_k": (900, 37, 640, 1000, 8000)}
    varlen: dict[str, Any] = {"nheads": 16, "nheads_kv": 4, "head_dim": 128, "dtype": "fp16", **lengths}
    quantised = AttentionProblem(2, 16, 4, 4000, 4000, 96, dtype="fp16")
    rotated = AttentionProblem(1, 16, 2, 8192, 8192, 128, dtype="bf16")
    gradients = {
        "d64_gqa": AttentionProblem(4, 32, 8, 4096, 4096, 64),
        "d128_causal": AttentionProblem(1, 16, 16, TOKENS, TOKENS, 128, causal=True),
        "d128_varlen_causal": AttentionProblem.varlen(**varlen, causal=True),
        "d256_window": AttentionProblem(2, 8, 8, 4000, 4000, 256, dtype="bf16", window=(1024, 0)),
    }
    others: dict[str, tuple[AttentionProblem, dict[str, Any]]] = {
        "fp16_decode": (AttentionProblem(4, 32, 8, 1, 65536, 128), {"num_splits": 0}),
        "e4m3_decode": (AttentionProblem(1, 32, 8, 1, 65536, 128, dtype="e4m3"), {"num_splits": 0}),
        "bf16_packed": (AttentionProblem(2, 24, 8, 100, 8192, 128, dtype="bf16", causal=True), {}),
        "fp16_gqa": (AttentionProblem(2, 32, 8, 8192, 8192, 128, causal=True), {}),
        "fp16_varlen": (AttentionProblem.varlen(**varlen), {}),
        "fp16_varlen_causal": (AttentionProblem.varlen(**varlen, causal=True), {"num_splits": 2}),
        "fp16_window": (AttentionProblem(2, 16, 16, 4000, 5000, 128, window=(1024, 256)), {}),
        "fp16_softcap_scaled": (AttentionProblem(2, 16, 4, 2048, 2048, 64, softcap=30.0, softmax_scale=0.25), {}),
        "fp16_d80": (AttentionProblem(2, 16, 16, 4096, 4096, 80), {}),
        "bf16_d192": (AttentionProblem(1, 16, 16, 4096, 4096, 192, dtype="bf16", causal=True), {}),
        "bf16_d192_v128": (AttentionProblem(1, 16, 16, 4096, 4096, 192, head_dim_v=128, dtype="bf16"), {}),
        "e4m3_d96_v64": (
            AttentionProblem(1, 16, 16, 4096, 4096, 96, head_dim_v=64, dtype="e4m3"),
            {"promotion_interval": 64},
        ),
    }
    return (
        *(
            _paper("causal" if causal else "dense", dtype, d, TOKENS, causal=causal)
            for dtype in _DTYPES
            for d in (64, 128, 256)
            for causal in (False, True)
        ),
        _paper("causal_2k", "fp16", 128, 2048, causal=True),
        _paper("causal_1k", "e4m3", 64, 1024, causal=True),
        _paper("128x64", "fp16", 128, 4096, {"tile": (128, 64)}),
        _paper("192x128_causal", "fp16", 64, 1024, {"tile": (192, 128)}, causal=True),
        *(ShippedLaunch(f"probe_{name}", *rest) for name, rest in others.items()),
        ShippedLaunch(
            "probe_quantize_d96", quantised, {"scale": "power_of_two", "block_rows": (192, 64, 256)}, "quantize_qkv"
        ),
        ShippedLaunch("probe_quantize_rotated", rotated, {"rotate": True, "seed": 7, "scope": "head"}, "quantize_qkv"),
        *(
            ShippedLaunch(f"probe_backward_{name}", problem, {"is_deterministic": True}, "backward")
            for name, problem in gradients.items()
        ),
    )


def probes() -> tuple[ShippedLaunch, ...]:
    """Return all of them, compiled ones first.

    >>> len(probes()) == len(audited()) + len(realistic())
    True
    """
    return (*audited(), *realistic())
