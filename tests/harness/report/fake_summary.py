"""A summary of schema fa3verify.summary/1 with made-up figures, for tests of the report."""

from __future__ import annotations

import json
from typing import Any

from fa3_reference.problem import AttentionProblem
from fa3verify.campaign.run import Run, parse
from fa3verify.cases.case import Case
from fa3verify.files import json_text
from fa3verify.inputs.recipe import FAMILIES
from fa3verify.judging.metrics import MEASURES


def _measures(scale: float) -> dict[str, float]:
    values = dict.fromkeys(MEASURES, scale * 0.001)
    values |= {
        "outputs": 4096,
        "nonfinite": 0,
        "unbounded": 0,
        "ulp_p50": 0.25,
        "ulp_p99": 0.52,
        "ulp_p999": 0.9,
        "ulp_max": 3.75 * scale,
    }
    values |= {
        "ratio_max": 0.3 + 0.01 * scale,
        "ratio_median": 0.02,
        "ratio_lse_max": 0.11,
        "bias": -2e-5 * scale,
        "bit_equal": 0.9512,
    }
    return values


def _case(kernel: str, family: str, i: int) -> dict[str, Any]:
    template = next(each for each in FAMILIES if each.name == family)
    case = Case(kernel, AttentionProblem(1, 1, 1, 8, 8, 64), template.recipe(seed=i))
    told = {"describe": case.describe(), "measures": _measures(1 + i), "quantisation": None}
    return {"kernel": kernel, "family": family, "case": case.to_json(), **told}


def _kernel(name: str, families: list[str], fp8: bool) -> dict[str, Any]:
    rows = [
        {"family": f, "cases": 12, **_measures(1 + i), "quantisation_ratio": 1.02 + 0.01 * i if fp8 else None}
        | {"replay": f"worst/{name}-{f}.json"}
        for i, f in enumerate(families)
    ]
    laws = [
        {
            "law": "key_permutation",
            "statement": "lse does not depend on the order of keys beyond rounding",
            "kind": "bounded",
            "status": "pass",
            "examples": 40,
            "outputs": 163840,
            "message": "",
            "replay": None,
        },
        {
            "law": "batch_invariance",
            "statement": "a row's bits do not depend on the batch",
            "kind": "exact",
            "status": "not_applicable",
            "examples": 0,
            "outputs": 0,
            "message": "",
            "replay": None,
        },
    ]
    return {
        "name": name,
        "description": f"bit-exact CPU twin {name}",
        "verdict": "pass",
        "cases": 12 * len(rows),
        "outputs": 1_234_567,
        "worst_ratio": max(r["ratio_max"] for r in rows),
        "worst_ratio_lse": 0.11,
        "worst": {
            "family": families[-1],
            "case": f"{name} b1 h1/1 128x128 d64 | {families[-1]}, seed 3",
            "replay": f"worst/{name}.json",
        },
        "families": rows,
        "laws": laws,
        "search_effort": 2048,
    }


def read(body: dict[str, Any]) -> Run:
    """Return the run of a summary."""
    return parse(json.loads(json_text(body)), "summary")


def summary(
    *, verdict: str = "pass", kernels: tuple[str, ...] = ("twin.fp16", "twin.bf16", "twin.e4m3")
) -> dict[str, Any]:
    """Return a complete summary; with verdict "fail", one gate rule and one failure."""
    families = [f.name for f in FAMILIES]
    rules = [
        {
            "layer": "L1",
            "rule": "ratio_max",
            "kernel": k,
            "family": "all",
            "observed": 0.55,
            "limit": 1.0,
            "baseline": None,
            "margin": 0.45,
            "status": "pass",
        }
        for k in kernels
    ]
    failures = []
    if verdict == "fail":
        rules.insert(
            1,
            {
                "layer": "L2",
                "rule": "rel_rmse_seen",
                "kernel": kernels[0],
                "family": "peaky",
                "observed": 3.1e-4,
                "limit": 2.4e-4,
                "baseline": 2.2e-4,
                "margin": -7e-5,
                "status": "fail",
            },
        )
        failures = [
            {
                "kernel": kernels[0],
                "what": "L1 error / bound",
                "message": "rel_rmse_seen 3.1e-4 above 2.4e-4",
                "replay": "worst/x.json",
            }
        ]
    return {
        "schema": "fa3verify.summary/1",
        "version": "0.1.0",
        "command": "fa3verify verify --quick --seed 0",
        "profile": "quick",
        "seed": 0,
        "started": "2026-01-02T03:04:05Z",
        "wall_s": 71.5,
        "verdict": verdict,
        "exit_code": int(verdict == "fail"),
        "layers": {
            "L0": "not run: no GPU",
            "L1": "pass",
            "L2": "fail" if verdict == "fail" else "pass",
            "laws": "pass",
        },
        "kernels": [_kernel(k, families, "e4m3" in k) for k in kernels],
        "gate": rules,
        "baseline": {"name": "baseline-quick", "sha256": "ab" * 32},
        "failures": failures,
        "cases": [_case(k, f, i) for k in kernels for i, f in enumerate(families)],
        "provenance": {
            "version": "0.1.0",
            "python": "3.11.7",
            "platform": "linux x86_64",
            "cpu_count": 2,
            "git": "0123abcd",
            "twin_hash": "cd" * 16,
            "seed": 0,
            "packages": {"numpy": "2.4.6", "xarray": "2026.9.0"},
        },
    }
