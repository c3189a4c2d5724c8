"""Assemble a campaign's outcomes into one JSON summary with a verdict (keys: :data:`SCHEMA_NOTES`)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from fa3verify import __version__, candidates, operations
from fa3verify.campaign.tasks import Outcome, families_of, pooled
from fa3verify.gate import Baseline, GateRow, baseline_rows, bit_rows, bound_rows, layer_status

SCHEMA = "fa3verify.summary/1"
SCHEMA_NOTES = {
    "schema": "fa3verify.summary/1; a change of meaning changes the number",
    "version": "version of fa3verify",
    "command": "command line",
    "profile": "quick, release or soak",
    "seed": "seed of every draw",
    "started": "UTC, ISO 8601",
    "wall_s": "seconds",
    "verdict": "pass or fail; fail if any part of the verdict fails or any task was lost",
    "exit_code": "of the command",
    "layers": "status of bits (L0), bound (L1), baseline (L2) and properties (laws): "
    "pass, fail, not compared, or why not run",
    "kernels": "one object per kernel",
    "kernels[].name": "candidate name",
    "kernels[].description": "one line",
    "kernels[].verdict": "pass or fail",
    "kernels[].cases": "judged cases and law examples",
    "kernels[].outputs": "output values compared",
    "kernels[].worst_ratio": "largest error / bound of any output over the families",
    "kernels[].operation": "what the kernel computes: forward or quantize",
    "kernels[].worst_ratio_lse": "the same for lse; null for an operation without it",
    "kernels[].worst_ratios": "the same for every output beside the main ones, by its name",
    "kernels[].worst": "family, one-line case and replay file of worst_ratio, or null",
    "kernels[].search_effort": "cases behind worst_ratio: a largest known error is a lower bound of the true one",
    "kernels[].families": "per input family the pooled figures of fa3verify.metrics.measures_of, "
    "RMSE against both references",
    "kernels[].laws": "law, statement, kind, status, examples, outputs, message, replay",
    "gate": "every comparison: layer, rule, kernel, family, observed, limit, baseline, margin, status",
    "baseline": "name and sha256 of the baseline compared with, or null",
    "failures": "kernel, what, message (one line), replay (path below the output directory, or null)",
    "cases": "every judged case: kernel, family, case (as in a replay file), one-line description, measures",
    "provenance": "versions, platform, seed and the hash of the twin's sources",
}


def summarize(
    kernels: list[str], outcomes: list[Outcome], baseline: Baseline | None, *, profile: str, seed: int
) -> dict[str, Any]:
    """Build the summary of a finished campaign, without times and command (the caller adds them)."""
    bodies, gate, failures, cases = [], [], [], []
    for name in kernels:
        body, problems, judged = _kernel(name, outcomes)
        rows = bit_rows(body) + bound_rows(body) + baseline_rows(body, baseline)
        problems += _gate_failures(rows, judged)
        body["verdict"] = "fail" if problems else "pass"
        bodies.append(body)
        gate += rows
        failures += problems
        cases += judged
    laws = [law for body in bodies for law in body["laws"]]
    return {
        "schema": SCHEMA,
        "version": __version__,
        "profile": profile,
        "seed": seed,
        "verdict": "fail" if failures else "pass",
        "exit_code": 1 if failures else 0,
        "layers": {
            "L0": layer_status(gate, "L0") if any(row.layer == "L0" for row in gate) else "not run: no GPU kernel",
            "L1": layer_status(gate, "L1"),
            "L2": layer_status(gate, "L2"),
            "laws": "fail" if any(law["status"] == "fail" for law in laws) else ("pass" if laws else "not compared"),
        },
        "kernels": bodies,
        "gate": [row.to_json() for row in gate],
        "baseline": {"name": baseline.name, "sha256": baseline.sha256} if baseline else None,
        "failures": failures,
        "cases": cases,
        "provenance": provenance(seed),
    }


def _failure(kernel: str, what: str, message: str, replay: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"kernel": kernel, "what": what, "message": message, "replay": replay}


def _lost_law(law: str, error: str | None) -> dict[str, Any]:
    """A law whose worker died or hung: a failure without a trial."""
    empty = {"statement": "", "kind": "", "examples": 0, "outputs": 0, "trial": None}
    return {"law": law, "status": "fail", "message": error, **empty}


def _kernel(name: str, outcomes: list[Outcome]) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Body, failures so far and judged cases of one kernel."""
    failures, cases, families = [], [], []
    candidate = candidates.find(name)
    operation = operations.find(candidate.operation)
    for family, records, error in families_of(outcomes, name):
        if error:
            failures.append(_failure(name, f"family {family}", error))
        for record in records:
            if "error" in record:
                failures.append(
                    _failure(name, f"family {family}", f"{record['describe']}: {record['error']}", record["case"])
                )
            else:
                cases.append({"kernel": name, **record})
        good = [r for r in records if "measures" in r]
        if good:
            families.append({"family": family, **pooled(good, operation)})
    laws = []
    for outcome in outcomes:
        if outcome.task.kind != "law" or outcome.task.arguments["kernel"] != name:
            continue
        law = outcome.task.arguments["law"]
        body = outcome.value or _lost_law(law, outcome.error)
        laws.append(body)
        if body["status"] == "fail":
            failures.append(_failure(name, f"law {law}", body["message"] or "", body.get("trial")))
    sides = {
        side.name: max((f[f"ratio_{side.name}_max"] or 0.0 for f in families), default=None) for side in operation.sides
    }
    worst = max(cases, key=lambda c: c["measures"]["ratio_max"], default=None)
    body = {
        "name": name,
        "description": candidate.description,
        "operation": operation.name,
        "cases": len(cases) + sum(law["examples"] for law in laws),
        "outputs": sum(f["outputs"] for f in families) + sum(law.get("outputs", 0) for law in laws),
        "worst_ratio": max((f["ratio_max"] for f in families), default=None),
        "worst_ratio_lse": sides.get("lse"),
        "worst_ratios": sides,
        "worst": worst and {"family": worst["family"], "case": worst["describe"], "replay": worst["case"]},
        "search_effort": len(cases) + sum(law["examples"] for law in laws if law["law"] == "error_within_bound"),
        "families": families,
        "laws": laws,
    }
    return body, failures, cases


def _figures(case: dict[str, Any]) -> dict[str, float]:
    """Measures of a judged case, and how far quantising its inputs went towards its own bound."""
    quantisation = case.get("quantisation") or {"bound_ratio": 0.0}
    return case["measures"] | {"quantisation_bound_ratio": quantisation["bound_ratio"]}


def _gate_failures(rows: list[GateRow], judged: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One failure per failed gate row, each with the most telling case of its family."""
    failures = []
    for row in rows:
        if row.status != "fail":
            continue
        against = f", baseline {row.baseline:.4g}" if row.baseline is not None else ""
        message = f"family {row.family}: observed {row.observed:.4g}, limit {row.limit:.4g}{against}"
        cases = [c for c in judged if c["family"] == row.family]
        case = max(cases, key=lambda c: _figures(c).get(row.telling, 0.0), default=None)
        failures.append(_failure(row.kernel, f"{row.layer} {row.rule}", message, case and case["case"]))
    return failures


def provenance(seed: int) -> dict[str, Any]:
    """Versions, platform and the hash of the twin's sources."""
    import importlib.metadata

    from fa3_kernels.twin.compiled import source_hash

    packages = {}
    for name in ("numpy", "scipy", "numba", "ml_dtypes", "xarray", "hypothesis", "torch", "triton"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "absent"
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "git": _git_revision(),
        "twin_hash": source_hash(),
        "seed": seed,
        "packages": packages,
    }


def _git_revision() -> str | None:
    """Commit of the checkout this package runs from, with ``-dirty`` where it differs; None outside one."""
    here = Path(__file__).resolve().parents[1]
    if not (here.parent / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
