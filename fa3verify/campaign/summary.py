"""Assemble a campaign's outcomes into one JSON summary with a verdict (its keys: ``docs/summary.md``)."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fa3_reference.problem import AttentionProblem
from fa3verify import __version__, operations
from fa3verify.campaign.findings import finding, ordered
from fa3verify.campaign.introduction import Introduction
from fa3verify.campaign.lapses import lapses
from fa3verify.campaign.profiles import CAPTURED
from fa3verify.campaign.settled import RULE, Settled, judged_under, refutations, settle, whole_row
from fa3verify.campaign.tasks import Outcome, outcomes_of, pooled
from fa3verify.cases import coverage
from fa3verify.cases.coverage import COVER
from fa3verify.cases.tried import REPEATED, Tried, concluded
from fa3verify.judging import bits_lost, sketch
from fa3verify.judging.gate import Baseline, GateRow, baseline_rows, bit_rows, bound_rows, layer_status
from fa3verify.judging.hypotheses import assumption, strain
from fa3verify.judging.verdict import BOUND_LAWS, EXIT_CODES, ratio_text

SCHEMA = "fa3verify.summary/1"


def summarize(
    kernels: list[Introduction], outcomes: list[Outcome], baseline: Baseline | None, *, profile: str, seed: int
) -> dict[str, Any]:
    """Build the summary of a finished campaign, without times and command (the caller adds them)."""
    bodies = []
    gate = []
    failures = []
    cases = []
    for kernel in kernels:
        body, rows, found, judged = of_kernel(kernel, outcomes, baseline, profile=profile, seed=seed)
        bodies.append(body)
        gate += rows
        failures += found
        cases += judged
    laws = [law for body in bodies for law in body["laws"]]
    return {
        "schema": SCHEMA,
        "version": __version__,
        "profile": profile,
        "seed": seed,
        "layers": {
            "L0": layer_status(gate, "L0") if any(row.layer == "L0" for row in gate) else "not run: no GPU kernel",
            "L1": layer_status(gate, "L1"),
            "L2": layer_status(gate, "L2"),
            "laws": _law_status([law["status"] for law in laws]),
        },
        "kernels": bodies,
        "gate": [row.to_json() for row in gate],
        "baseline": {"name": baseline.name, "sha256": baseline.sha256} if baseline else None,
        "cases": cases,
        "provenance": provenance(seed),
        **verdict_of(bodies, failures),
    }


def of_kernel(
    kernel: Introduction, outcomes: list[Outcome], baseline: Baseline | None, *, profile: str, seed: int
) -> tuple[dict[str, Any], list[GateRow], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the body, the gate's rows, the findings and the judged cases of one kernel, of any outcomes of it."""
    body, found, judged, settled = _kernel(kernel, outcomes)
    rows = bit_rows(body) + bound_rows(body) + baseline_rows(body, baseline)
    if settled is None:
        found += _gate_failures(rows, judged, profile, seed)
    else:
        rows.append(whole_row(kernel.name, settled.worst[settled.chosen], settled.holds))
        found += _under(settled, kernel, _gate_failures(rows, judged, profile, seed), judged)
    body["verdict"] = "fail" if found else "inconclusive" if body["inconclusive"] else "pass"
    return body, rows, found, judged


def verdict_of(kernels: list[dict[str, Any]], failures: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the verdict over kernels and findings, its exit code, and the findings in order of their causes."""
    verdict = "fail" if failures else "pass"
    if not failures and any(kernel["verdict"] == "inconclusive" for kernel in kernels):
        verdict = "inconclusive"
    return {"verdict": verdict, "exit_code": EXIT_CODES[verdict], "failures": ordered(failures)}


def _law_status(statuses: list[str]) -> str:
    """Fail beats pass beats not compared."""
    return next((status for status in ("fail", "pass") if status in statuses), "not compared")


def _lost_law(law: str, error: str | None) -> dict[str, Any]:
    """A law whose worker died or hung: a failure, with the trial it was at where that is known."""
    empty = {"statement": "", "kind": "", "examples": 0, "outputs": 0, "trial": None, "classes": []}
    return {"law": law, "status": "fail", "message": error, **empty}


def _settled(kernel: Introduction, outcomes: list[Outcome]) -> Settled | None:
    """Return which hypotheses about a kernel hold in all outcomes, None for one that states its order."""
    records = [record for _, _, found in _judged(kernel, outcomes) for record in found]
    laws = [outcome.value for outcome in outcomes_of(outcomes, kernel.name, "law") if outcome.value]
    return settle(operations.find(kernel.operation), records, laws)


def _families(
    kernel: Introduction, outcomes: list[Outcome], settled: Settled | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Figures by family, findings and judged cases of one kernel."""
    families = []
    failures = []
    cases = []
    for outcome, family, records in _judged(kernel, outcomes):
        if settled is not None:
            records = [judged_under(record, settled.chosen) for record in records]
        if outcome.error:
            at = (outcome.at or {}).get("content")
            failures.append(finding(kernel.name, f"family {family}", outcome.error, at, crashed=True))
        for record in records:
            if "error" in record:
                given = (kernel.name, f"family {family}", record["error"], record["case"])
                failures.append(finding(*given, crashed=True, traceback=record.get("traceback")))
            else:
                cases.append({"kernel": kernel.name, **_told(record, kernel)})
        if good := [r for r in records if "measures" in r]:
            families.append({"family": family, **pooled(good, operations.find(kernel.operation))})
    return families, failures, cases


def _told(record: dict[str, Any], kernel: Introduction) -> dict[str, Any]:
    """A judged case as a summary has it: of a hypothesis only the largest error / bound is kept."""
    if "hypotheses" not in record:
        return record
    operation = operations.find(kernel.operation)
    ratios = {name: strain(operation, x["measures"]) for name, x in record["hypotheses"].items()}
    return record | {"hypotheses": ratios}


def _judged(kernel: Introduction, outcomes: list[Outcome]) -> Iterator[tuple[Outcome, str, list[dict[str, Any]]]]:
    """Outcomes of judged cases of one kernel, their family, which those of the covering array do not have, records."""
    for outcome in outcomes_of(outcomes, kernel.name, "family"):
        yield outcome, outcome.task.arguments["family"], outcome.value or []
    for outcome in outcomes_of(outcomes, kernel.name, "cover"):
        yield outcome, COVER, (outcome.value or {}).get("records", [])


def _laws(kernel: Introduction, outcomes: list[Outcome]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Laws and findings of one kernel."""
    laws = []
    failures = []
    for outcome in outcomes_of(outcomes, kernel.name, "law"):
        law = outcome.task.arguments["law"]
        body = dict(outcome.value) if outcome.value else _lost_law(law, outcome.error)
        against = body.pop("hypotheses", {})
        laws.append(body)
        if body["status"] == "fail":
            trial = body["trial"] or (outcome.at or {}).get("content")
            message = (body["message"] or "").removeprefix(f"{kernel.name} failed: ")
            if trial and (others := {name: x for name, x in against.items() if x and x["trial"] != trial}):
                trial = refutations([trial, *(x["trial"] for x in others.values())])
                body["message"] = message = f"{message}; refuted before: " + ", ".join(
                    f"{name!r} by {x['describe']}" for name, x in others.items()
                )
            crashed = outcome.error is not None or message != body["message"]
            raised = body.get("traceback")
            failures.append(finding(kernel.name, f"law {law}", message, trial, crashed=crashed, traceback=raised))
    return laws, failures


def _kernel(
    kernel: Introduction, outcomes: list[Outcome]
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]], Settled | None]:
    """Body, findings so far and judged cases of one kernel, and which hypotheses about it hold."""
    name = kernel.name
    operation = operations.find(kernel.operation)
    settled = _settled(kernel, outcomes)
    families, failures, cases = _families(kernel, outcomes, settled)
    laws, broken = _laws(kernel, outcomes)
    failures += broken
    failures += lapses(name, operation, outcomes, cases, laws)
    if kernel.failed:
        failures.append(finding(name, "loading", kernel.failed, crashed=True, traceback=kernel.raised))
    covered = coverage.judged(kernel.claims, _tried(families, laws, cases), kernel.constraint)
    optional = [side.name for side in operation.sides if side.optional and cases]
    absent = [name for name in optional if not any(f"ratio_{name}_max" in case["measures"] for case in cases)]
    feasible = [p for o in outcomes_of(outcomes, name, "cover") for p in (o.value or {}).get("feasible", [])]
    covered["pairs"] = coverage.paired(feasible, [case["point"] for case in cases if _is_compared(case)])
    covered["not_claimed"] = [*kernel.not_claimed, *(f"output {name}" for name in absent)]
    ran = _ran(kernel, laws, cases)
    for law in laws:
        for key in ("classes", "tried", "traceback", "optional"):  # which stand elsewhere
            law.pop(key, None)
    sides = {
        side.name: max((f[f"ratio_{side.name}_max"] or 0.0 for f in families), default=None) for side in operation.sides
    }
    orders = [case.pop("order", None) for case in cases]
    for case in cases:
        case.pop("point")
    drawn = [(case["describe"], case.pop("sketch")) for case in cases if "sketch" in case]
    worst = max(cases, key=lambda c: c["measures"]["ratio_max"], default=None)
    body = {
        "name": name,
        "description": kernel.description,
        "operation": operation.name,
        "dtype": kernel.dtype,
        "identity": asdict(kernel.identity),
        "states_order": kernel.states_order,
        "orders": [order for i, order in enumerate(orders) if order and order not in orders[:i]],
        "policy": list(kernel.policy),
        "cases": len(cases) + sum(law["examples"] for law in laws),
        "outputs": sum(f["outputs"] for f in families) + sum(law.get("outputs", 0) for law in laws),
        "worst_ratio": max((f["ratio_max"] for f in families), default=None),
        "bits_lost": _bits_lost(kernel, families, failures),
        "worst_ratio_lse": sides.get("lse"),
        "worst_ratios": sides,
        "worst": worst and {"family": worst["family"], "case": worst["describe"], "replay": worst["case"]},
        "search_effort": len(cases) + sum(law["examples"] for law in laws if law["law"] in BOUND_LAWS),
        "tried": ran,
        "coverage": covered,
        "inconclusive": None if kernel.failed else kernel.narrowed or coverage.inconclusive(covered),
        "families": families,
        "laws": laws,
        "sketch": sketch.merged(drawn),
    }
    if settled is not None:
        body["assumed"] = settled.to_json(kernel)
    return body, failures, cases, settled


def _bits_lost(
    kernel: Introduction, families: list[dict[str, Any]], failures: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """The number that ranks a kernel, None where a family of ours was not judged whole."""
    crashed = {failure["what"] for failure in failures}
    ranked = [name for name in kernel.families if not name.startswith(f"{CAPTURED}:")]
    if kernel.narrowed or any(f"family {name}" in crashed for name in ranked):
        return None
    return bits_lost.of_kernel(families, ranked)


def _under(
    settled: Settled, kernel: Introduction, failures: list[dict[str, Any]], cases: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Findings of the gate that say what the bound assumed.

    Where one case by itself refutes every hypothesis, it is a finding as of any kernel. Where it takes several, they
    are replayed together, and one more finding says which of them refutes what.
    """
    words = assumption(kernel.sums or "", settled.chosen)
    found = []
    of_case = {json.dumps(case["case"], sort_keys=True): case["hypotheses"] for case in cases}
    for failure in failures:
        if not failure["what"].startswith("L1") or "quantisation" in failure["what"]:
            found.append(failure)
        elif failure["what"] != f"L1 {RULE}":
            ratios = of_case.get(json.dumps(failure["replay"], sort_keys=True), {})
            replay = failure["replay"] if min(ratios.values(), default=0.0) > 1 else settled.content
            found.append(failure | {"message": f"{failure['message']}; {words}", "replay": replay})
        elif not settled.is_at_once:
            found.append(failure | {"message": f"{settled.words}; {kernel.sums}", "replay": settled.content})
    return found


def _tried(families: list[dict[str, Any]], laws: list[dict[str, Any]], cases: list[dict[str, Any]]) -> set[str]:
    """Classes of which some output was compared with a bound, or by a property."""
    tried = {f"family {f['family']}" for f in families if f["outputs"] > f["unbounded"]}
    tried |= {f"property {law['law']}" for law in laws if law["status"] in ("pass", "fail")}
    tried |= {name for law in laws for name in law.get("classes", ())}
    return tried.union(*(coverage.named(case["point"]) for case in cases if _is_compared(case)))


def _ran(kernel: Introduction, laws: list[dict[str, Any]], cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Sizes of the calls behind a kernel's judged cases and trials, and what nobody asked of it."""
    operation = operations.find(kernel.operation)
    tried = Tried()
    for case in filter(_is_compared, cases):
        tried.add(AttentionProblem.from_json(case["case"]["problem"]))
    for law in laws:
        if law.get("tried"):
            tried.update(law["tried"])
    optional = [side.name for side in operation.sides if side.optional]
    return concluded(
        tried.to_json(),
        features=operation.features,
        head_dims=kernel.head_dims,
        outputs={name: (sum(f"ratio_{name}_max" in c["measures"] for c in cases), len(cases)) for name in optional},
        is_repeated=any(law["law"] == REPEATED and law["status"] in ("pass", "fail") for law in laws),
        is_forward=operation.name == operations.FORWARD,
    )


def _is_compared(case: dict[str, Any]) -> bool:
    """Tell whether some output of a judged case was compared with a bound."""
    return case["measures"]["outputs"] > case["measures"]["unbounded"]


def _figures(case: dict[str, Any]) -> dict[str, float]:
    """Measures of a judged case, and how far quantising its inputs went towards its own bound."""
    quantisation = case.get("quantisation") or {"bound_ratio": 0.0}
    return case["measures"] | {"quantisation_bound_ratio": quantisation["bound_ratio"]}


def _gate_failures(rows: list[GateRow], judged: list[dict[str, Any]], profile: str, seed: int) -> list[dict[str, Any]]:
    """One finding per failed gate row, each with the most telling case of its family."""
    failures = []
    for row in rows:
        if row.status != "fail" or row.observed is None or row.limit is None:
            continue
        against = f", baseline {row.baseline:.4g}" if row.baseline is not None else ""
        write = ratio_text if row.limit == 1 else "{:,.0f}".format if row.limit == 0 else "{:.4g}".format
        message = f"family {row.family}: observed {write(row.observed)}, limit {row.limit:.4g}"
        cases = [c for c in judged if c["family"] == row.family]
        case = max(cases, key=lambda c: _figures(c).get(row.telling, 0.0), default=None)
        stored = None
        if row.layer == "L2":
            stored = {"family": row.family, "profile": profile, "seed": seed, "measure": row.rule}
            stored |= {"limit": row.limit, "baseline": row.baseline}
        what = f"{row.layer} {row.rule}"
        replay = case and case["case"]
        failures.append(finding(row.kernel, what, message + against, replay, baseline=stored))
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
