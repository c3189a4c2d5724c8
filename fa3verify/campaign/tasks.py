"""Run a campaign: families, laws and studies for every kernel, on any executor, resumable, to one summary."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa3_reference.bounds import KernelModel
from fa3_reference.bounds.model import BackwardModel
from fa3verify import operations
from fa3verify.campaign.cover import cover
from fa3verify.campaign.introduction import Introduction, found
from fa3verify.campaign.pool import TaskError, WorkerLost
from fa3verify.campaign.profiles import PROFILES, captured_case, family_of, judged_cases
from fa3verify.campaign.results import CaseResult, CoverResult, UnderHypothesis, of_one_hypothesis
from fa3verify.cases import space
from fa3verify.cases.case import Case
from fa3verify.cases.coverage import COVER
from fa3verify.cases.practice import practice, probes
from fa3verify.files import Json, write_text
from fa3verify.inputs.captures import Capture, pinned
from fa3verify.judging import gate, hypotheses, sketch
from fa3verify.judging.family import Figured, family_row
from fa3verify.judging.verdict import BOUND_LAWS
from fa3verify.kernels import twins, watch
from fa3verify.kernels.calls import CandidateError
from fa3verify.kernels.record import REFUSALS, Candidate
from fa3verify.records import NOT_WRITTEN, plain, read
from fa3verify.text import of_error, of_traceback

if TYPE_CHECKING:
    from fa3verify.judging.judgement import Judgement
    from fa3verify.properties.runner import LawOutcome

LIBRARIES = ("numpy", "scipy", "numba", "ml_dtypes")  # on whose last bits a truth or a bound may depend
PARTS = 4  # tasks that the cases of practice are dealt to
PRACTICE = "practice"
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
    arguments: Json
    durable: bool = True

    @property
    def kernel(self) -> str | None:
        """Name of the kernel that it is about, None for a task about none."""
        return self.arguments.get("kernel")

    def identity(self, stamp: str) -> str:
        """Name under which the result is kept for resuming; ``stamp`` changes with the code."""
        text = json.dumps(
            [stamp, self.kind, self.function.__module__, self.function.__qualname__, self.arguments], sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds what became of a task: ``value``, or ``error``, one line.

    A task that lost its worker has the case it was ``at`` where that is known. A ``skipped`` task has nothing: its
    kernel had lost too many workers before, or the campaign was stopped. ``cpu_s`` is 0 where nobody says, as of a
    result that was kept. Files have no task: they name it.
    """

    task: Task = field(default=Task("", "", dict, {}), metadata=NOT_WRITTEN)
    value: Any = None
    cpu_s: float = 0.0
    error: str | None = None
    at: Json | None = None
    lost_worker: bool = False
    skipped: bool = False

    def result(self) -> Any:
        """Return the value.

        Raises
        ------
        TaskError
            If the task raised, lost its worker or was skipped.
        """
        if self.error or self.skipped:
            raise TaskError(self.error or f"{self.task.label} was skipped")
        return self.value


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
) -> list[CaseResult]:
    """Judge every case of one family of a campaign, or the first ones up to a limit."""
    candidate = found(kernel)
    cases = judged_cases(candidate, family, PROFILES[profile], seed)[:limit]
    return judge_cases(candidate, family, cases, is_fail_fast=is_fail_fast)


def judge_capture(kernel: str, family: str, profile: str, file: str, sha256: str, index: int) -> list[CaseResult]:
    """Judge the case of a user's file of activations, which has this place among all of them."""
    candidate = found(kernel)
    case = captured_case(candidate, pinned(file, sha256).capture, PROFILES[profile], index)
    return judge_cases(candidate, family, [case] if case else [])


def judge_cover(
    kernel: str, profile: str, seed: int, limit: int | None = None, *, is_fail_fast: bool = False
) -> CoverResult:
    """Judge the cases of a kernel's covering array."""
    candidate = found(kernel)
    rows = cover(candidate, PROFILES[profile].strength, seed)[:limit]
    records = judge_cases(candidate, COVER, [case for _, case in rows if case], is_fail_fast=is_fail_fast)
    return CoverResult(tuple(point for point, _ in rows), tuple(records))


def judge_practice(kernel: str, profile: str, seed: int, part: int, *, is_fail_fast: bool = False) -> CoverResult:
    """Judge one of :data:`PARTS` parts of the cases of practice; a size that a kernel refuses was not tried."""
    candidate = found(kernel)
    cases = [*probes(candidate), *practice(candidate, profile, seed)][part::PARTS]
    return CoverResult((), tuple(_taken(judge_cases(candidate, COVER, cases, is_fail_fast=is_fail_fast))))


def _taken(records: list[CaseResult]) -> list[CaseResult]:
    """Return the records but for those of calls that the kernel refused."""
    refusals = tuple(each.__name__ for each in REFUSALS)
    return [record for record in records if not (record.error or "").startswith(refusals)]


def judge_cases(
    candidate: Candidate, family: str, cases: list[Case], *, is_fail_fast: bool = False
) -> list[CaseResult]:
    """Judge cases; one that raises is recorded, not propagated. Fail-fast, the first finding is the last record.

    The record of a kernel that states no order has figures and order by hypothesis; its ``measures`` are those under
    the one that the case speaks least against; :func:`fa3verify.campaign.results.settle` chooses one for a kernel.
    """
    records: list[CaseResult] = []
    for case in cases:
        watch.trying(f"family {family}", case.to_json)
        try:
            record = _judged(candidate, family, case)
        except CandidateError as error:
            record = CaseResult(family, case, {}, error=str(error), traceback=error.traceback)
        except Exception as error:  # whatever else a kernel under test leads to is a finding as well
            record = CaseResult(family, case, {}, error=of_error(error), traceback=of_traceback(error))
        records.append(record)
        if is_fail_fast and _fails(candidate.name, [record]):
            break
    kept = sketch.with_one_worst([record.sketch for record in records])
    return [replace(record, sketch=drawn) for record, drawn in zip(records, kept, strict=True)]


def _judged(candidate: Candidate, family: str, case: Case) -> CaseResult:
    from fa3verify.judging.judgement import judge

    operation = operations.find(candidate.operation)
    judgement = judge(candidate, case)
    sides = hypotheses.under(candidate)
    under = {
        name: UnderHypothesis(measures, _order(sides[name], case)) for name, measures in judgement.hypotheses.items()
    }
    return CaseResult(
        family,
        case,
        judgement.measures,
        operation.beside(judgement),
        sketch=_sketch(judgement) if operation.name == operations.FORWARD else None,
        hypotheses=under,
        order=None if under else _order(candidate, case),
        point=space.point(candidate, case),
    )


def _sketch(judgement: Judgement) -> sketch.Sketch:
    """Return where the errors of a forward lie."""
    problem = judgement.case.problem
    out, truth, bound = (each["out"] for each in (judgement.outputs, judgement.seen, judgement.bound))
    return sketch.of_case(problem, out, truth, bound, judgement.operands.dequantized(problem)[2])


def _order(candidate: Candidate, case: Case) -> Json | None:
    """The order of operations that the bound of a case assumed, None for an operation whose bound assumes none."""
    assumed = hypotheses.assumed(candidate, candidate.config_for(case.problem, case.changes))
    return asdict(assumed) if isinstance(assumed, KernelModel | BackwardModel) else None


def check_law(kernel: str, law: str, max_examples: int, seed: int) -> LawOutcome:
    """Search for a trial that breaks one law on one kernel."""
    from fa3verify.properties import find_law, run_law

    return run_law(find_law(law), found(kernel), max_examples=max_examples, seed=seed)


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
    most: Json = {} if limit is None else {"limit": limit}
    most |= {"is_fail_fast": True} if is_fail_fast else {}
    own = {family_of(capture): (index, capture) for index, capture in enumerate(captures)}
    tasks = []
    for kernel in kernels:
        durable = twins.is_twin(kernel.name)
        for law in kernel.laws:
            examples = size.bound_examples if law in BOUND_LAWS else size.law_examples
            examples = min(examples, limit or examples)
            arguments = {"kernel": kernel.name, "law": law, "max_examples": examples, "seed": seed}
            tasks.append(Task("law", f"{kernel.name}: {law}", check_law, arguments, durable))
        if kernel.covers and (kernel.families or kernel.narrowed):
            arguments = {"kernel": kernel.name, "profile": profile, "seed": seed, **most}
            tasks.append(Task("cover", f"{kernel.name}: {COVER}", judge_cover, arguments, durable))
            for part in range(PARTS if limit is None else 0):
                own_part = arguments | {"part": part}
                tasks.append(Task("cover", f"{kernel.name}: {PRACTICE} {part + 1}", judge_practice, own_part, durable))
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
    return sorted(tasks, key=lambda t: t.kind != "cover" and not t.label.endswith("error_within_bound"))


class Interrupted(KeyboardInterrupt):
    """A campaign that was interrupted: ``outcomes`` of its tasks, those that had not ended as skipped.

    ``number`` is that of the signal; SIGINT where nobody says.
    """

    def __init__(self, number: int, outcomes: list[Outcome]) -> None:
        super().__init__(number)
        self.number = number
        self.outcomes = outcomes


def run(
    tasks: Iterable[Task],
    executor: Executor,
    *,
    journal: Path | None = None,
    stamp: str = "",
    until: float = math.inf,
    drops: Callable[[Outcome, Task], bool] | None = None,
) -> Generator[Outcome, None, None]:
    """Run tasks on an executor and yield what becomes of each as it ends; results in the journal are not run again.

    A task that raises or loses its worker is one Outcome with an error. A kernel that has lost :data:`GIVE_UP` workers
    gets no more of them: hanging everywhere would take hours. Who stops listening ends what runs, and no other begins.

    Parameters
    ----------
    until : float
        Time, by the monotonic clock, at which the tasks that run are ended and no other begins.
    drops : callable
        ``drops(outcome, task)`` tells after an outcome whether a task that no worker has begun is skipped.
    """
    waiting: dict[Future, Task] = {}
    lost: Counter[str] = Counter()
    try:
        for task in tasks:
            if kept := _recall(journal, task, stamp):
                yield kept
            else:
                waiting[executor.submit(task.function, **task.arguments)] = task
        left_s = None if math.isinf(until) else max(0.0, until - time.monotonic())
        for future in as_completed(list(waiting), left_s):
            outcome = _outcome(waiting.pop(future), future, lost)
            kernel = outcome.task.kernel
            _keep(outcome, journal, stamp)
            if outcome.lost_worker and kernel:
                lost[kernel] += 1
                if lost[kernel] == GIVE_UP:
                    _give_up(other for other, task in waiting.items() if task.kernel == kernel)
            yield outcome
            if drops:
                for other in [future for future, task in waiting.items() if drops(outcome, task)]:
                    other.cancel()
    except TimeoutError:
        return
    finally:
        _give_up(waiting)


def execute(
    tasks: list[Task],
    executor: Executor,
    *,
    journal: Path | None = None,
    stamp: str = "",
    progress: Callable[[Outcome], None] | None = None,
    stops: Callable[[Outcome], bool] = lambda outcome: False,
) -> list[Outcome]:
    """Run tasks as :func:`run` does, and return what became of them in the order of ``tasks``.

    After an outcome that ``stops``, running tasks are ended and nothing more is begun.

    Raises
    ------
    Interrupted
        With the outcomes so far, at an interruption.
    """
    found: dict[int, Outcome] = {}

    def outcomes() -> list[Outcome]:
        return [found.get(id(task)) or Outcome(task, skipped=True) for task in tasks]

    try:
        with contextlib.closing(run(tasks, executor, journal=journal, stamp=stamp)) as ended:
            for outcome in ended:
                found[id(outcome.task)] = outcome
                if progress:
                    progress(outcome)
                if stops(outcome):
                    break
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        raise Interrupted(number, outcomes()) from None
    return outcomes()


def _give_up(futures: Iterable[Future]) -> None:
    """Cancel tasks, and end those that run, where their executor can; the last ones first, so that none begins."""
    for future in reversed(list(futures)):
        getattr(future, "give_up", future.cancel)()


def _keep(outcome: Outcome, journal: Path | None, stamp: str) -> None:
    """Write a result that may be kept into the journal."""
    if journal and outcome.task.durable and outcome.value is not None:
        with contextlib.suppress(OSError):  # a full disk costs what could be resumed, not the verdict
            write_text(journal / f"{outcome.task.identity(stamp)}.json", json.dumps([plain(outcome.value)]))


def is_finding(outcome: Outcome) -> bool:
    """Tell whether a task found something that needs no baseline: it was lost, a case failed or left its bound, or a
    property broke.
    """
    if outcome.error or outcome.skipped:
        return not outcome.skipped
    if outcome.task.kind == "law":
        return outcome.value.status == "fail"
    if outcome.task.kind not in ("family", "cover"):
        return False
    return _fails(outcome.task.label, outcome.value.records if outcome.task.kind == "cover" else outcome.value)


def _fails(label: str, records: Sequence[CaseResult]) -> bool:
    """Tell whether judged cases of one family have a finding that needs no baseline."""
    if not records or any(record.error for record in records):
        return bool(records)
    operation = operations.find(records[0].case.operation)
    body = Figured(label, (family_row(of_one_hypothesis(operation, records), operation),), operation.name)
    return bool(gate.failed_parts(gate.bit_rows(body) + gate.bound_rows(body)))


def cpu_seconds(outcomes: list[Outcome]) -> dict[str, dict[str, float]]:
    """CPU seconds of a campaign, by kernel ("-": of none) and by what they were spent on: families, laws, a study."""
    found: dict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for outcome in outcomes:
        found[outcome.task.kernel or "-"][outcome.task.kind] += outcome.cpu_s
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
        if task.kernel and lost.get(task.kernel, 0) >= GIVE_UP:
            return Outcome(task, skipped=True)
        return Outcome(task, error=str(error), at=error.at, lost_worker=True)
    except TaskError as error:
        return Outcome(task, error=str(error))
    except Exception as error:  # an executor of another kind lost the task
        return Outcome(task, error=of_error(error))


def _recall(journal: Path | None, task: Task, stamp: str) -> Outcome | None:
    """Return a result that was kept, None where there is none; a damaged entry counts as absent."""
    if journal is None or not task.durable:
        return None
    try:
        (kept,) = json.loads((journal / f"{task.identity(stamp)}.json").read_text(encoding="utf-8"))
        return Outcome(task, of_kind(task.kind, kept))
    except (OSError, TypeError, ValueError):
        return None


def of_kind(kind: str, value: Any) -> Any:
    """Return the value of a task from JSON; ValueError for a damaged one. Those of studies and searches are JSON."""
    from fa3verify.properties.runner import LawOutcome

    types = {"family": list[CaseResult], "cover": CoverResult, "law": LawOutcome}
    return value if value is None or kind not in types else read(types[kind], value, kind)


def outcomes_of(outcomes: list[Outcome], kernel: str, kind: str) -> Iterator[Outcome]:
    """Yield the outcomes of one kernel's tasks of a kind that were not skipped."""
    for outcome in outcomes:
        if outcome.task.kind == kind and outcome.task.kernel == kernel and not outcome.skipped:
            yield outcome
