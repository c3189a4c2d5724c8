"""Run a campaign: families, laws and studies for every kernel, on any executor, resumable, to one summary."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa3_reference.bounds import KernelModel
from fa3_reference.bounds.model import BackwardModel
from fa3verify import operations
from fa3verify.campaign.cover import cover
from fa3verify.campaign.introduction import Introduction, found
from fa3verify.campaign.pool import TaskError, WorkerLost
from fa3verify.campaign.profiles import PROFILES, captured_case, family_of, judged_cases
from fa3verify.campaign.settled import of_one_hypothesis
from fa3verify.cases import space
from fa3verify.cases.case import Case
from fa3verify.cases.coverage import COVER
from fa3verify.files import write_text
from fa3verify.inputs.captures import Capture, pinned
from fa3verify.judging import bits_lost, gate, hypotheses, sketch
from fa3verify.judging.verdict import BOUND_LAWS
from fa3verify.kernels import watch
from fa3verify.kernels.calls import CandidateError
from fa3verify.kernels.record import Candidate
from fa3verify.operations import Operation
from fa3verify.text import of_error, of_traceback

if TYPE_CHECKING:
    from fa3verify.judging.judgement import Judgement
    from fa3verify.properties import Trial, Violation

LIBRARIES = ("numpy", "scipy", "numba", "ml_dtypes")  # on whose last bits a truth or a bound may depend
GIVE_UP = 3  # workers that one kernel may lose


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
    """Holds what became of a task: ``value`` (JSON-able), or ``error``, one line.

    A task that lost its worker has the case it was ``at`` where that is known. A ``skipped`` task has nothing: its
    kernel had lost too many workers before, or the campaign was stopped. ``cpu_s`` is 0 where nobody says, as of a
    result that was kept.
    """

    task: Task
    value: Any = None
    cpu_s: float = 0.0
    error: str | None = None
    at: dict[str, Any] | None = None
    lost_worker: bool = False
    skipped: bool = False

    @property
    def kernel(self) -> str | None:
        """Name of the kernel that it is about, None for a task about none."""
        return self.task.arguments.get("kernel")


def journal_stamp(*kernels: Candidate) -> str:
    """Return what a journal knows its results by: the packages that made them, their libraries, and the kernels.

    Results of another version of a library, or of a kernel whose code is another, are not gone on with.
    """
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    identities = [dict(kernel.identity()) for kernel in kernels if kernel.identity]
    return hashlib.sha256(json.dumps([source_stamp(), versions, identities]).encode()).hexdigest()


def source_stamp() -> str:
    """Return the hash of the modules and tables of the packages that make a result."""
    import fa3_kernels
    import fa3_reference
    import fa3verify

    digest = hashlib.sha256()
    for package in (fa3_reference, fa3_kernels, fa3verify):
        folder = Path(package.__path__[0])
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".json", ".toml"):
                content = path.read_bytes()
                digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def judge_family(
    kernel: str, family: str, profile: str, seed: int, limit: int | None = None, *, is_fail_fast: bool = False
) -> list[dict[str, Any]]:
    """Judge every case of one family of a campaign, or the first ones up to a limit."""
    candidate = found(kernel)
    cases = judged_cases(candidate, family, PROFILES[profile], seed)[:limit]
    return judge_cases(candidate, family, cases, is_fail_fast=is_fail_fast)


def judge_capture(kernel: str, family: str, profile: str, file: str, sha256: str, index: int) -> list[dict[str, Any]]:
    """Judge the case of a user's file of activations, which has this place among all of them."""
    candidate = found(kernel)
    case = captured_case(candidate, pinned(file, sha256).capture, PROFILES[profile], index)
    return judge_cases(candidate, family, [case] if case else [])


def judge_cover(
    kernel: str, profile: str, seed: int, limit: int | None = None, *, is_fail_fast: bool = False
) -> dict[str, Any]:
    """Judge the cases of a kernel's covering array; ``feasible`` are the points of all its rows."""
    candidate = found(kernel)
    rows = cover(candidate, PROFILES[profile].strength, seed)[:limit]
    records = judge_cases(candidate, COVER, [case for _, case in rows if case], is_fail_fast=is_fail_fast)
    return {"feasible": [dict(point) for point, _ in rows], "records": records}


def judge_cases(
    candidate: Candidate, family: str, cases: list[Case], *, is_fail_fast: bool = False
) -> list[dict[str, Any]]:
    """Judge cases; one that raises is recorded, not propagated. Fail-fast, the first finding is the last record.

    The record of a kernel that states no order has figures and order by hypothesis; its ``measures`` are those under
    the one that the case speaks least against (:mod:`fa3verify.campaign.settled` chooses one for the whole kernel).
    """
    from fa3verify.judging.judgement import judge

    operation = operations.find(candidate.operation)
    records: list[dict[str, Any]] = []
    for case in cases:
        record: dict[str, Any] = {"family": family, "case": case.to_json(), "describe": case.describe()}
        watch.trying(f"family {family}", case.to_json)
        try:
            judgement = judge(candidate, case)
            record["measures"] = judgement.measures
            record["quantisation"] = operation.beside(judgement)
            if operation.name == operations.FORWARD:
                record["sketch"] = _sketch(judgement)
            if judgement.hypotheses:
                sides = hypotheses.under(candidate)
                record["hypotheses"] = {
                    name: {"measures": measures, "order": _order(sides[name], case)}
                    for name, measures in judgement.hypotheses.items()
                }
            else:
                record["order"] = _order(candidate, case)
            record["point"] = space.point(candidate, case)
        except CandidateError as error:
            record["error"] = str(error)
            record["traceback"] = error.traceback
        except Exception as error:  # whatever else a kernel under test leads to is a finding as well
            record["error"] = of_error(error)
            record["traceback"] = of_traceback(error)
        records.append(record)
        if is_fail_fast and _fails(candidate.name, [record]):
            break
    sketch.with_one_worst(records)
    return records


def _sketch(judgement: Judgement) -> dict[str, Any]:
    """Return where the errors of a forward lie."""
    problem = judgement.case.problem
    out, truth, bound = (each["out"] for each in (judgement.outputs, judgement.seen, judgement.bound))
    return sketch.of_case(problem, out, truth, bound, judgement.operands.dequantized(problem)[2])


def _order(candidate: Candidate, case: Case) -> dict[str, Any] | None:
    """The order of operations that the bound of a case assumed, None for an operation whose bound assumes none."""
    assumed = hypotheses.assumed(candidate, candidate.config_for(case.problem, case.changes))
    return asdict(assumed) if isinstance(assumed, KernelModel | BackwardModel) else None


def check_law(kernel: str, law: str, max_examples: int, seed: int) -> dict[str, Any]:
    """Search for a trial that breaks one law on one kernel."""
    from fa3verify.properties import find_law, run_law

    rule = find_law(law)
    outcome = run_law(rule, found(kernel), max_examples=max_examples, seed=seed)
    return {
        "law": rule.name,
        "statement": rule.statement,
        "kind": rule.kind,
        "status": outcome.status,
        "examples": outcome.examples,
        "outputs": outcome.outputs,
        "message": outcome.violation and outcome.violation.message,
        "traceback": outcome.violation and outcome.violation.traceback,
        "trial": outcome.trial and outcome.trial.to_json(),
        "classes": sorted(outcome.classes),
        "tried": outcome.tried,
        "optional": [(name, returned, trial.describe()) for (name, returned), trial in outcome.optional.items()],
        **({"hypotheses": refuting(outcome.hypotheses)} if outcome.hypotheses else {}),
    }


def refuting(found: Mapping[str, tuple[Trial, Violation] | None]) -> dict[str, dict[str, Any] | None]:
    """Return in JSON what a property found against every hypothesis about a kernel, None where nothing."""
    return {
        name: {"ratio": against[1].ratio, "trial": against[0].to_json(), "describe": against[0].describe()}
        if against
        else None
        for name, against in found.items()
    }


def plan(
    kernels: list[Introduction],
    profile: str,
    seed: int,
    captures: tuple[Capture, ...] = (),
    limit: int | None = None,
    is_fail_fast: bool = False,
) -> list[Task]:
    """Return the tasks of a campaign without its studies, the longest first; none for a kernel that takes no case.

    With a ``limit`` no property has more trials and no family more cases; ``is_fail_fast`` ends a family at its first
    finding.
    """
    size = PROFILES[profile]
    most: dict[str, Any] = {} if limit is None else {"limit": limit}
    most |= {"is_fail_fast": True} if is_fail_fast else {}
    own = {family_of(capture): (index, capture) for index, capture in enumerate(captures)}
    tasks = []
    for kernel in kernels:
        durable = kernel.name.startswith("twin.")
        for law in kernel.laws:
            examples = size.bound_examples if law in BOUND_LAWS else size.law_examples
            examples = min(examples, limit or examples)
            arguments = {"kernel": kernel.name, "law": law, "max_examples": examples, "seed": seed}
            tasks.append(Task("law", f"{kernel.name}: {law}", check_law, arguments, durable))
        if kernel.covers and (kernel.families or kernel.narrowed):
            arguments = {"kernel": kernel.name, "profile": profile, "seed": seed, **most}
            tasks.append(Task("cover", f"{kernel.name}: {COVER}", judge_cover, arguments, durable))
        for family in kernel.families:
            arguments = {"kernel": kernel.name, "family": family, "profile": profile}
            if family in own:
                index, capture = own[family]
                judged = judge_capture
                rest = {"file": capture.file, "sha256": capture.sha256, "index": index}
            else:
                judged = judge_family
                rest = {"seed": seed, **most}
            tasks.append(Task("family", f"{kernel.name}: {family}", judged, arguments | rest, durable))
    return sorted(tasks, key=lambda t: not t.label.endswith(("error_within_bound", COVER)))


class Interrupted(KeyboardInterrupt):
    """A campaign that was interrupted: ``outcomes`` of its tasks, those that had not ended as skipped.

    ``number`` is that of the signal; SIGINT where nobody says.
    """

    def __init__(self, number: int, outcomes: list[Outcome]) -> None:
        super().__init__(number)
        self.number = number
        self.outcomes = outcomes


def execute(
    tasks: list[Task],
    executor: Executor,
    *,
    journal: Path | None = None,
    stamp: str = "",
    progress: Callable[[Outcome], None] | None = None,
    stops: Callable[[Outcome], bool] = lambda outcome: False,
) -> list[Outcome]:
    """Run tasks on an executor; results already in the journal are not run again.

    A task that raises or loses its worker is one Outcome with an error. A kernel that has lost :data:`GIVE_UP` workers
    gets no more of them: hanging everywhere would take hours. After an outcome that ``stops``, running tasks are ended
    and nothing more is begun. Results come back in the order of ``tasks``.

    Raises
    ------
    Interrupted
        With the outcomes so far, at an interruption.
    """
    outcomes: dict[int, Outcome] = {}
    waiting: dict[Future, int] = {}
    lost: Counter[str] = Counter()

    def take(index: int, outcome: Outcome) -> None:
        outcomes[index] = outcome
        if progress:
            progress(outcome)

    try:
        for index, task in enumerate(tasks):
            kept = _recall(journal, task.identity(stamp)) if task.durable else None
            if kept is None:
                waiting[executor.submit(task.function, **task.arguments)] = index
            else:
                take(index, Outcome(task, kept[0]))
        for future in as_completed(waiting):
            outcome = _outcome(tasks[waiting[future]], future, lost)
            _keep(outcome, journal, stamp)
            take(waiting[future], outcome)
            if stops(outcome):
                break
            kernel = outcome.kernel
            if outcome.lost_worker and kernel:
                lost[kernel] += 1
                if lost[kernel] == GIVE_UP:
                    _give_up(f for f, place in waiting.items() if tasks[place].arguments.get("kernel") == kernel)
    except KeyboardInterrupt as stop:
        _give_up(waiting)
        number = stop.args[0] if stop.args else signal.SIGINT
        raise Interrupted(number, _with_skipped(tasks, outcomes)) from None
    _give_up(future for future, place in waiting.items() if place not in outcomes)
    return _with_skipped(tasks, outcomes)


def _give_up(futures: Iterable[Future]) -> None:
    """Cancel tasks, and end those that run, where their executor can; the last ones first, so that none begins."""
    for future in reversed(list(futures)):
        getattr(future, "give_up", future.cancel)()


def _with_skipped(tasks: list[Task], outcomes: dict[int, Outcome]) -> list[Outcome]:
    """The outcomes of all tasks in their order; one that has none was skipped."""
    return [outcomes.get(index) or Outcome(task, skipped=True) for index, task in enumerate(tasks)]


def _keep(outcome: Outcome, journal: Path | None, stamp: str) -> None:
    """Write a result that may be kept into the journal."""
    if journal and outcome.task.durable and outcome.value is not None:
        with contextlib.suppress(OSError):  # a full disk costs what could be resumed, not the verdict
            write_text(journal / f"{outcome.task.identity(stamp)}.json", json.dumps([outcome.value]))


def is_finding(outcome: Outcome) -> bool:
    """Tell whether a task found something that needs no baseline: it was lost, a case failed or left its bound, or a
    property broke.
    """
    if outcome.error or outcome.skipped:
        return not outcome.skipped
    if outcome.task.kind == "law":
        return outcome.value["status"] == "fail"
    if outcome.task.kind not in ("family", "cover"):
        return False
    return _fails(outcome.task.label, outcome.value["records"] if outcome.task.kind == "cover" else outcome.value)


def _fails(label: str, records: list[dict[str, Any]]) -> bool:
    """Tell whether judged cases of one family have a finding that needs no baseline."""
    if not records or any("error" in record for record in records):
        return bool(records)
    operation = operations.find(records[0]["case"].get("operation", operations.FORWARD))
    body = one_family(label, operation, records[0]["family"], of_one_hypothesis(operation, records))
    return bool(gate.failed_parts(gate.bit_rows(body) + gate.bound_rows(body)))


def cpu_seconds(outcomes: list[Outcome]) -> dict[str, dict[str, float]]:
    """CPU seconds of a campaign, by kernel ("-": of none) and by what they were spent on: families, laws, a study."""
    found: dict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for outcome in outcomes:
        found[outcome.task.arguments.get("kernel", "-")][outcome.task.kind] += outcome.cpu_s
    return {kernel: {kind: round(cpu_s, 2) for kind, cpu_s in kinds.items()} for kernel, kinds in found.items()}


def _outcome(task: Task, future: Future, lost: Mapping[str, int]) -> Outcome:
    """Return what became of a task; what a kernel that is given up was still running is skipped like what it had not
    begun.
    """
    try:
        return Outcome(task, future.result(), getattr(future, "cpu_s", 0.0))
    except CancelledError:
        return Outcome(task, skipped=True)
    except WorkerLost as error:
        if lost.get(task.arguments.get("kernel", ""), 0) >= GIVE_UP:
            return Outcome(task, skipped=True)
        return Outcome(task, error=str(error), at=error.at, lost_worker=True)
    except TaskError as error:
        return Outcome(task, error=str(error))
    except Exception as error:  # an executor of another kind lost the task
        return Outcome(task, error=of_error(error))


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
    figures |= {key: root_mean(key) for key in ("rel_rmse_seen", "rel_rmse_unrounded", "rel_rmse_ideal")}
    figures["bits_lost"] = bits_lost.of_family(r for r in records if r.get("family") != COVER)
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


def one_family(kernel: str, operation: Operation, family: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a kernel's body in a summary with the figures of one family, as the rules of the gate read it."""
    figures = {"family": family, **pooled(records, operation)}
    return {"name": kernel, "operation": operation.name, "families": [figures]}


def outcomes_of(outcomes: list[Outcome], kernel: str, kind: str) -> Iterator[Outcome]:
    """Yield the outcomes of one kernel's tasks of a kind that were not skipped."""
    for outcome in outcomes:
        if outcome.task.kind == kind and outcome.task.arguments["kernel"] == kernel and not outcome.skipped:
            yield outcome
