"""Conclude from the outcomes of a campaign's tasks: :func:`summarize` makes one run with a verdict.

``verify`` calls it, also for merged shards. Here the figures are pooled, the rules of :mod:`fa3verify.judging.gate` are
applied and findings are collected; the records are those of :mod:`fa3verify.campaign.run`, and writing reports and
replay files is left to :mod:`fa3verify.commands.verify`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fa3verify import operations
from fa3verify.campaign.findings import Finding, MovedFigure, finding, ordered, with_clause
from fa3verify.campaign.lapses import answered, lapses
from fa3verify.campaign.plan import JudgeTask, SearchLaw
from fa3verify.campaign.profiles import CAPTURED
from fa3verify.campaign.results import Assumed, contradiction, judged_under, refutations, settle
from fa3verify.campaign.run import BaselineName, Introduction, KernelRun, Provenance, Run, WorstCase, verdict_of
from fa3verify.campaign.tasks import Outcome, outcomes_of
from fa3verify.cases import coverage
from fa3verify.cases.coverage import COVER
from fa3verify.cases.space import Point
from fa3verify.cases.tried import SizesTried, Tried, concluded
from fa3verify.judging import bits_lost, sketch
from fa3verify.judging.bits_lost import BitsLost
from fa3verify.judging.family import CaseResult, FamilyRow, family_row
from fa3verify.judging.gate import QUANTISATION, Baseline, GateRow, baseline_rows, bit_rows, bound_rows, layer_status
from fa3verify.judging.hypotheses import assumption
from fa3verify.judging.verdict import BOUND_LAWS, EXIT_CODES, Part, What, ratio_text
from fa3verify.operations import Operation
from fa3verify.properties import LawOutcome, Violation
from fa3verify.tensors import interpreter
from fa3verify.text import Failure
from fa3verify.version import __version__

WHOLE = "error / bound of the whole kernel"  # the gate's rule about kernels that state no order: one hypothesis holds


def summarize(
    kernels: list[Introduction], outcomes: list[Outcome], baseline: Baseline | None, *, profile: str, seed: int
) -> Run:
    """Return the run of a finished campaign, without times and command (the caller adds them).

    Skipped tasks count as not tried. Without a ``baseline`` its rows of the gate are "not compared".
    """
    parts = [of_kernel(kernel, outcomes, baseline, profile=profile, seed=seed) for kernel in kernels]
    bodies = tuple(body for body, *_ in parts)
    gate = tuple(row for _, rows, *_ in parts for row in rows)
    failures = ordered(finding for *_, findings, _ in parts for finding in findings)
    laws = {law.status for body in bodies for law in body.laws}
    verdict = verdict_of(bodies, failures)
    return Run(
        version=__version__,
        profile=profile,
        seed=seed,
        layers={
            "L0": layer_status(gate, "L0") if any(row.layer == "L0" for row in gate) else "not run: no GPU kernel",
            "L1": layer_status(gate, "L1"),
            "L2": layer_status(gate, "L2"),
            "laws": next((status for status in ("fail", "pass") if status in laws), "not compared"),
        },
        kernels=bodies,
        gate=gate,
        baseline=BaselineName(baseline.name, baseline.sha256) if baseline else None,
        cases=tuple(case for *_, cases in parts for case in cases),
        provenance=provenance(seed),
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        failures=failures,
    )


def of_kernel(
    kernel: Introduction, outcomes: list[Outcome], baseline: Baseline | None, *, profile: str, seed: int
) -> tuple[KernelRun, list[GateRow], list[Finding], list[CaseResult]]:
    """Conclude from the outcomes about one kernel: its part of the run, the gate's rows, findings and judged cases.

    Outcomes about other kernels are passed over.
    """
    kernel, outcomes = answered(kernel, outcomes)
    laws, broken = _laws(kernel, outcomes)
    records = [record for _, _, judged in _judged(kernel, outcomes) for record in judged]
    settled = settle(records, laws)
    families, findings, results = _families(kernel, outcomes, settled)
    findings += broken
    findings += lapses(kernel.name, operations.find(kernel.operation), outcomes, results, laws)
    if kernel.failed:
        findings.append(finding(kernel.name, What(Part.LOADING), kernel.failed))
    crashed = {finding.what for finding in findings}
    judged = [outcome.value for _, outcome in outcomes_of(outcomes, kernel.name, JudgeTask) if outcome.value]
    feasible = [point for value in judged for point in value.feasible]
    body = _body(kernel, families, laws, results, feasible, crashed, settled)
    cases = [replace(result, kernel=kernel.name, describe=result.case.describe()) for result in results]
    figured = body.figured
    rows = bit_rows(figured) + bound_rows(figured) + baseline_rows(figured, baseline)
    if settled is None:
        findings += _gate_failures(rows, cases, profile, seed)
    else:
        ratio = next(row.worst_ratio for row in settled.hypotheses if row.name == settled.chosen)
        status = "fail" if settled.chosen in settled.refuted else "pass"
        rows.append(GateRow(Part.BOUND, WHOLE, kernel.name, "all", ratio, 1.0, None, status))
        findings += _under(settled, kernel, _gate_failures(rows, cases, profile, seed), cases)
    findings = [with_clause(each, kernel.operation) for each in findings]
    return replace(body, verdict="fail" if findings else body.verdict), rows, findings, cases


def _families(
    kernel: Introduction, outcomes: list[Outcome], settled: Assumed | None
) -> tuple[list[FamilyRow], list[Finding], list[CaseResult]]:
    """Return the figures by family, the findings of lost tasks and of cases that raised, and the judged cases.

    ``settled`` is None for a kernel that states its order; for others the figures are those of the chosen hypothesis.
    """
    families = []
    failures = []
    cases = []
    for outcome, family, records in _judged(kernel, outcomes):
        what = What(Part.FAMILY, family)
        if settled is not None:
            records = [judged_under(record, settled.chosen) for record in records]
        lost = Failure(outcome.error, outcome.raised) if outcome.error else None
        failed = [
            (lost, (outcome.at or {}).get("content")),
            *((record.error, record.case.to_json()) for record in records),
        ]
        failures += [finding(kernel.name, what, failure, content) for failure, content in failed if failure]
        if good := [record for record in records if not record.error]:
            cases += good
            families.append(family_row(good, operations.find(kernel.operation)))
    return families, failures, cases


def _judged(kernel: Introduction, outcomes: list[Outcome]) -> Iterator[tuple[Outcome, str, Sequence[CaseResult]]]:
    """Yield the outcomes of one kernel's judged cases with their family and its records; a lost task has no record."""
    covers = []
    for task, outcome in outcomes_of(outcomes, kernel.name, JudgeTask):
        if task.family == COVER and not outcome.error:
            covers.append(outcome)
        else:
            yield outcome, task.family, outcome.value.records if outcome.value else []
    if covers:  # the array and what is launched in practice are one family
        yield covers[0], COVER, [record for outcome in covers if outcome.value for record in outcome.value.records]


def _laws(kernel: Introduction, outcomes: list[Outcome]) -> tuple[list[LawOutcome], list[Finding]]:
    """Return the laws and findings of one kernel; a law whose worker died or hung fails, with its trial if known."""
    rows = []
    failures = []
    for task, outcome in outcomes_of(outcomes, kernel.name, SearchLaw):
        row: LawOutcome = outcome.value or LawOutcome(task.law, "fail", message=outcome.error)
        if row.status == "fail":
            trial = row.content or (outcome.at or {}).get("content")
            violation = row.violation or Violation("", failure=Failure(outcome.error or "", outcome.raised))
            failure = violation.failure
            message = str(failure or row.message)
            # Trials that refuted other hypotheses: only together with this one do they show that none is left.
            others = {name: x[0] for name, x in row.hypotheses.items() if x and x[0].to_json() != trial}
            if trial and others:
                trial = refutations([trial, *(other.to_json() for other in others.values())])
                message = f"{message}; refuted before: " + ", ".join(
                    f"{name!r} by {other.describe()}" for name, other in others.items()
                )
                row = replace(row, message=message)
            cause = replace(failure, message=message) if failure else message
            failures.append(finding(kernel.name, What(Part.LAW, row.law), cause, trial, seen=violation.seen))
        rows.append(row)
    return rows, failures


def _body(
    kernel: Introduction,
    families: Sequence[FamilyRow],
    laws: Sequence[LawOutcome],
    cases: Sequence[CaseResult],
    feasible: Sequence[Point],
    crashed: Collection[What],
    settled: Assumed | None,
) -> KernelRun:
    """Return one kernel's part of the run, with the verdict that it has if the gate finds nothing.

    ``feasible`` are points of the covering array that are possible, ``crashed`` the subjects of findings so far.
    """
    operation = operations.find(kernel.operation)
    absent = [name for name, (returned, due) in _returned(operation, cases).items() if due and not returned]
    met = [case.point for case in cases if case.is_compared]
    without = [f"property {law.law}" for law in laws if law.status == "not_applicable"]
    covered = coverage.judged(
        [name for name in kernel.claims if name not in without],
        _tried(families, laws, met),
        kernel.constraint,
        [*kernel.not_claimed, *without, *(f"output {name}" for name in absent)],
        coverage.paired(feasible, met),
    )
    sides = {
        side.name: max((row.figures[side.figure("ratio")] or 0.0 for row in families), default=None)
        for side in operation.sides
    }
    orders = [case.order for case in cases]
    worst = max(cases, key=lambda case: case.measures["ratio_max"], default=None)
    inconclusive = None if kernel.failed else kernel.narrowed or covered.inconclusive
    drawn = [(case.case.describe(), case.sketch) for case in cases if case.sketch]
    return KernelRun(
        introduction=kernel,
        families=tuple(families),
        verdict="inconclusive" if inconclusive else "pass",
        orders=tuple(order for i, order in enumerate(orders) if order and order not in orders[:i]),
        cases=len(cases) + sum(law.examples for law in laws),
        outputs=sum(int(row.number("outputs")) for row in families) + sum(law.outputs for law in laws),
        worst_ratio=max((row.number("ratio_max") for row in families), default=None),
        bits_lost=_bits_lost(kernel, families, crashed),
        worst_ratio_lse=sides.get("lse"),
        worst_ratios=sides,
        worst=worst and WorstCase(worst.family, worst.case.describe(), content=worst.case.to_json()),
        search_effort=len(cases) + sum(law.examples for law in laws if law.law in BOUND_LAWS),
        tried=_ran(kernel, laws, cases),
        coverage=covered,
        inconclusive=inconclusive,
        laws=tuple(laws),
        sketch=sketch.merged(drawn),
        assumed=settled and replace(settled, sums=kernel.sums, accumulator=kernel.accumulator),
    )


def _bits_lost(kernel: Introduction, families: Sequence[FamilyRow], crashed: Collection[What]) -> BitsLost | None:
    """Return the number that ranks a kernel; None where a family, captured ones apart, was not judged whole."""
    ranked = [name for name in kernel.families if not name.startswith(f"{CAPTURED}:")]
    if kernel.narrowed or any(What(Part.FAMILY, name) in crashed for name in ranked):
        return None
    return bits_lost.of_kernel({row.family: row.figures["bits_lost"] for row in families}, ranked)


def _under(
    settled: Assumed, kernel: Introduction, failures: Sequence[Finding], cases: Sequence[CaseResult]
) -> list[Finding]:
    """Return the gate's findings about a kernel that states no order, with what its bound assumed.

    Where one case by itself refutes every hypothesis, its finding is like that of any other kernel. Where it takes
    several cases, they are replayed together, and one more finding says which of them refutes what.
    """
    words = assumption(kernel.sums or "", settled.chosen)
    together = refutations([by.content for by in settled.refuted.values() if by.content])
    findings = []
    of_case = {case.case.key(): case.hypotheses for case in cases}
    for failure in failures:
        if failure.what.part is not Part.BOUND or failure.what.subject == QUANTISATION:
            findings.append(failure)
        elif failure.what.subject != WHOLE:
            ratios = of_case.get(json.dumps(failure.content, sort_keys=True), {})
            content = failure.content if min(ratios.values(), default=0.0) > 1 else together
            findings.append(replace(failure, message=f"{failure.message}; {words}", content=content))
        elif not settled.is_at_once:
            findings.append(replace(failure, message=f"{contradiction(settled)}; {kernel.sums}", content=together))
    return findings


def _tried(families: Sequence[FamilyRow], laws: Sequence[LawOutcome], met: Sequence[Point]) -> set[str]:
    """Return the classes that were tried: an output of such a case was compared with a bound or by a property."""
    tried = {f"family {row.family}" for row in families if row.is_compared}
    tried |= {f"property {law.law}" for law in laws if law.status in ("pass", "fail")}
    tried |= {name for law in laws for name in law.classes}
    return tried.union(*map(coverage.named, met))


def _returned(operation: Operation, cases: Sequence[CaseResult]) -> dict[str, tuple[int, int]]:
    """Return for each optional output in how many cases it was returned, and in how many it was due."""
    return {
        side.name: (sum(side.figure("ratio") in case.measures for case in due), len(due))
        for side in operation.sides
        for due in [[case for case in cases if side.optional and side.is_due(case.case.problem)]]
    }


def _ran(kernel: Introduction, laws: Sequence[LawOutcome], cases: Sequence[CaseResult]) -> SizesTried:
    """Return the sizes of the calls behind a kernel's judged cases and trials, and in words what was not tried."""
    operation = operations.find(kernel.operation)
    tried = Tried()
    for case in cases:
        if case.is_compared:
            tried.add(case.case.problem)
    for law in laws:
        if law.tried:
            tried.update(law.tried)
    return concluded(
        tried.noted(),
        features=operation.features,
        head_dims=kernel.head_dims,
        outputs=_returned(operation, cases),
        properties=[law.law for law in laws if law.status in ("pass", "fail")],
        is_forward=operation.name == operations.FORWARD,
        refused=kernel.constraint,
    )


def _gate_failures(rows: Sequence[GateRow], cases: Sequence[CaseResult], profile: str, seed: int) -> list[Finding]:
    """Return a finding for each failed row of the gate, with the case of its family that shows it most clearly."""
    failures = []
    for row in rows:
        if row.status != "fail" or row.observed is None or row.limit is None:
            continue
        against = f", baseline {row.baseline:.4g}" if row.baseline is not None else ""
        # A limit of 1 is that of error / bound, a limit of 0 that of a count of outputs.
        write = ratio_text if row.limit == 1 else "{:,.0f}".format if row.limit == 0 else "{:.4g}".format
        message = f"family {row.family}: observed {write(row.observed)}, limit {row.limit:.4g}"
        mine = [case for case in cases if case.family == row.family]
        telling = max(mine, key=lambda case: case.figures.get(row.telling, 0.0), default=None)
        what = What(Part(row.layer), row.rule)
        moved = MovedFigure(row.family, profile, seed, row.rule, row.limit, row.baseline)
        stored = moved if what.part is Part.BASELINE else None
        content = telling and telling.case.to_json()
        failures.append(finding(row.kernel, what, message + against, content, seen=row.seen, baseline=stored))
    return failures


def provenance(seed: int) -> Provenance:
    """Return versions, platform and the hash of the twin's sources."""
    from fa3_kernels.twin.compiled import source_hash

    packages = {}
    for name in ("numpy", "scipy", "numba", "ml_dtypes", "xarray", "hypothesis", "torch", "triton"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "absent"
    if interpreter.is_on():
        packages["triton"] += f" (its interpreter: {interpreter.correct() or 'corrected'})"
    return Provenance(
        version=__version__,
        python=platform.python_version(),
        platform=f"{sys.platform} {platform.machine()}",
        cpu_count=os.cpu_count(),
        git=_git_revision(),
        twin_hash=source_hash(),
        seed=seed,
        packages=packages,
    )


def _git_revision() -> str | None:
    """Return the commit of the checkout this package runs from, with ``-dirty`` where files differ from it.

    None outside a checkout, and where git is missing or fails.
    """
    here = Path(__file__).resolve().parents[1]
    if not (here.parent / ".git").exists():
        return None
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
