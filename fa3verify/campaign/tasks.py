"""Run a campaign: families, laws and studies for every kernel, on any executor, resumable, to one summary."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa3verify import candidates, operations
from fa3verify.calls import CandidateError
from fa3verify.campaign.pool import TaskError
from fa3verify.campaign.profiles import PROFILES, families, family_cases
from fa3verify.files import write_text
from fa3verify.operations import Operation
from fa3verify.text import of_error


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of work: a top-level function and JSON-able arguments; ``label`` is what progress shows.

    ``durable`` results may be kept for resuming; those of kernels outside this package may not, for their code may
    change.
    """

    kind: str
    label: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    durable: bool = True

    def identity(self, stamp: str) -> str:
        """Name under which the result is kept for resuming; ``stamp`` changes with the code."""
        text = json.dumps(
            [stamp, self.kind, self.function.__module__, self.function.__qualname__, self.arguments], sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task: ``value`` (JSON-able), or ``error``, one line."""

    task: Task
    value: Any = None
    error: str | None = None


def source_stamp() -> str:
    """Hash of every module of the packages whose code makes a result."""
    import fa3_kernels
    import fa3_reference
    import fa3verify

    digest = hashlib.sha256()
    for package in (fa3_reference, fa3_kernels, fa3verify):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def judge_family(kernel: str, family: str, profile: str, seed: int) -> list[dict[str, Any]]:
    """Judge every case of one family; a case that raises is recorded, not propagated."""
    from fa3verify.judgement import judge

    candidate = candidates.find(kernel)
    operation = operations.find(candidate.operation)
    records: list[dict[str, Any]] = []
    for case in family_cases(candidate, family, PROFILES[profile], seed):
        record: dict[str, Any] = {"family": family, "case": case.to_json(), "describe": case.describe()}
        try:
            judgement = judge(candidate, case)
            record["measures"] = judgement.measures
            record["quantisation"] = operation.beside(judgement)
        except CandidateError as error:
            record["error"] = str(error)
        except Exception as error:  # whatever a kernel under test raises is a finding
            record["error"] = of_error(error)
        records.append(record)
    return records


def check_law(kernel: str, law: str, max_examples: int, seed: int) -> dict[str, Any]:
    """Search for a trial that breaks one law on one kernel."""
    from fa3verify.properties import find_law, run_law

    rule = find_law(law)
    outcome = run_law(rule, candidates.find(kernel), max_examples=max_examples, seed=seed)
    return {
        "law": rule.name,
        "statement": rule.statement,
        "kind": rule.kind,
        "status": outcome.status,
        "examples": outcome.examples,
        "outputs": outcome.outputs,
        "message": outcome.violation and outcome.violation.message,
        "trial": outcome.trial and outcome.trial.to_json(),
    }


def plan(kernels: list[str], profile: str, seed: int) -> list[Task]:
    """Return the tasks of a campaign without its studies, the longest first; none for a kernel that takes no case."""
    from fa3verify.properties import LAWS

    size = PROFILES[profile]
    tasks = []
    for kernel in kernels:
        candidate = candidates.find(kernel)
        durable = kernel.startswith("twin.")
        taken = families(candidate, size)
        for law in LAWS if taken else ():
            if law.applies(candidate):
                examples = size.bound_examples if law.name == "error_within_bound" else size.law_examples
                arguments = {"kernel": kernel, "law": law.name, "max_examples": examples, "seed": seed}
                tasks.append(Task("law", f"{kernel}: {law.name}", check_law, arguments, durable))
        for family in taken:
            arguments = {"kernel": kernel, "family": family, "profile": profile, "seed": seed}
            tasks.append(Task("family", f"{kernel}: {family}", judge_family, arguments, durable))
    return sorted(tasks, key=lambda t: not t.label.endswith("error_within_bound"))


def execute(
    tasks: list[Task],
    executor: Executor,
    *,
    journal: Path | None = None,
    stamp: str = "",
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Run tasks on an executor; results already in the journal are not run again.

    A task that raises or loses its worker is one Outcome with an error. Results come back in the order of ``tasks``.
    """
    outcomes: dict[int, Outcome] = {}
    waiting: dict[Future, int] = {}
    for index, task in enumerate(tasks):
        kept = _recall(journal, task.identity(stamp)) if task.durable else None
        if kept is not None:
            outcomes[index] = Outcome(task, kept[0])
            if progress:
                progress(outcomes[index])
        else:
            waiting[executor.submit(task.function, **task.arguments)] = index
    for future in as_completed(waiting):
        index = waiting[future]
        outcomes[index] = _outcome(tasks[index], future)
        if journal and tasks[index].durable and outcomes[index].error is None:
            write_text(journal / f"{tasks[index].identity(stamp)}.json", json.dumps([outcomes[index].value]))
        if progress:
            progress(outcomes[index])
    return [outcomes[i] for i in range(len(tasks))]


def _outcome(task: Task, future: Future) -> Outcome:
    try:
        return Outcome(task, future.result())
    except TaskError as error:
        return Outcome(task, error=str(error))
    except Exception as error:  # an executor of another kind lost the task
        return Outcome(task, error=f"{type(error).__name__}: {error}")


def _recall(journal: Path | None, identity: str) -> list | None:
    """A kept result as a one-element list, or None; a damaged entry counts as absent."""
    if journal is None:
        return None
    try:
        kept = json.loads((journal / f"{identity}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, list) and len(kept) == 1 else None


def pooled(records: list[dict[str, Any]], operation: Operation) -> dict[str, Any]:
    """Aggregate the measures of one family of an operation: RMS pooled, maxima of maxima, the rest weighted means.

    The weight of a case is its number of main output values, for side outputs as well.
    """
    measures = [r["measures"] for r in records]
    weights = [max(m["outputs"] - m["unbounded"] - m["nonfinite"], 0) for m in measures]
    total = sum(weights) or 1

    def mean(key: str) -> float:
        return math.fsum(w * m[key] for w, m in zip(weights, measures, strict=True)) / total

    def root_mean(key: str) -> float:
        return math.sqrt(math.fsum(w * m[key] ** 2 for w, m in zip(weights, measures, strict=True)) / total)

    figures: dict[str, Any] = {"cases": len(records)}
    figures |= {key: sum(m[key] for m in measures) for key in ("outputs", "nonfinite", "unbounded")}
    figures |= {key: root_mean(key) for key in ("rms", "rmse_seen", "rmse_unrounded")}
    figures |= {key: root_mean(key) for key in ("rel_rmse_seen", "rel_rmse_unrounded")}
    maxima = ("max_error", "ulp_p99", "ulp_p999", "ulp_max", "ratio_max")
    figures |= {key: max(m[key] for m in measures) for key in maxima}
    for side in operation.sides:
        for key in (f"ratio_{side.name}_max", f"{side.name}_max_error"):
            figures[key] = max((m[key] for m in measures if key in m), default=None)
        key = f"{side.name}_rms_error"
        having = [(w, m[key]) for w, m in zip(weights, measures, strict=True) if key in m]
        power = math.fsum(w * x**2 for w, x in having)
        figures[key] = math.sqrt(power / (sum(w for w, _ in having) or 1)) if having else None
    compared = [m["bits_differing"] for m in measures if "bits_differing" in m]
    figures["bits_differing"] = sum(compared) if compared else None
    if all("outside" in m for m in measures):
        figures["outside"] = sum(m["outside"] for m in measures)
        figures |= {key: mean(key) for key in ("enclosed_median", "determined")}
    figures |= {key: mean(key) for key in ("ulp_p50", "ratio_median", "bias", "bit_equal")}
    pairs = [r["quantisation"] for r in records if r.get("quantisation")]
    predicted = math.fsum(p["predicted"] for p in pairs)
    figures["quantisation_ratio"] = (
        math.sqrt(math.fsum(p["measured"] for p in pairs) / predicted) if predicted > 0 else None
    )
    figures["quantisation_bound_ratio"] = max((p["bound_ratio"] for p in pairs), default=None)
    return figures


def families_of(outcomes: list[Outcome], kernel: str) -> Iterator[tuple[str, list[dict[str, Any]], str | None]]:
    """Yield (family, records, error) of one kernel."""
    for outcome in outcomes:
        if outcome.task.kind == "family" and outcome.task.arguments["kernel"] == kernel:
            yield outcome.task.arguments["family"], outcome.value or [], outcome.error
