"""The tasks of a verification: :func:`plan` makes them in the main process, and their ``run`` judges in a worker.

There is one kind for the cases of a family of inputs, of a user's own file, of the covering array and of practice, and
one for each property. How tasks run is in :mod:`fa3verify.campaign.tasks`; how one case is judged is in
:mod:`fa3verify.judging.judgement`; :mod:`fa3verify.campaign.summary` concludes from the results.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from fa3_reference.bounds import KernelModel
from fa3_reference.bounds.model import BackwardModel
from fa3verify import operations
from fa3verify.campaign.cover import cover
from fa3verify.campaign.introduction import found
from fa3verify.campaign.profiles import PROFILES, ProfileName, captured_case, family_of, judged_cases
from fa3verify.campaign.results import JudgedCases, of_one_hypothesis
from fa3verify.campaign.run import Introduction
from fa3verify.campaign.tasks import Task
from fa3verify.cases import space
from fa3verify.cases.case import Case
from fa3verify.cases.coverage import COVER
from fa3verify.cases.practice import practice, probes
from fa3verify.cases.space import Point
from fa3verify.files import Json
from fa3verify.inputs.captures import Capture, pinned
from fa3verify.judging import gate, hypotheses, sketch
from fa3verify.judging.family import CaseResult, Figured, family_row
from fa3verify.judging.judgement import Judgement, judge
from fa3verify.judging.verdict import BOUND_LAWS
from fa3verify.kernels import twins, watch
from fa3verify.kernels.calls import KernelError
from fa3verify.kernels.record import NAMES_OF_REFUSALS, Kernel, Unfilled
from fa3verify.properties import LawOutcome, find_law, run_law
from fa3verify.records import read
from fa3verify.text import Failure

PARTS = 4  # tasks among which the cases of practice are divided, so that they run side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTask(Task):
    """Judge the cases of one family of a kernel; with ``is_fail_fast`` no case is judged after the first finding."""

    kind: ClassVar[str] = "family"

    family: str
    profile: ProfileName
    is_fail_fast: bool = False

    @property
    def label(self) -> str:
        return f"{self.kernel}: {self.family}"

    @abstractmethod
    def cases(self, kernel: Kernel) -> Sequence[Case]:
        """Return the cases that are judged."""

    def run(self) -> JudgedCases:
        kernel = found(self.kernel)
        return JudgedCases(judge_cases(kernel, self.family, self.cases(kernel), is_fail_fast=self.is_fail_fast))

    def read(self, value: Any) -> JudgedCases | None:
        return None if value is None else read(JudgedCases, value, self.family, private=True)

    def is_finding(self, value: JudgedCases) -> bool:
        return _fails(self.label, value.records)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeFamily(JudgeTask):
    """Judge the cases of one family of inputs, at most the first ``limit`` of them."""

    seed: int
    limit: int | None = None

    def cases(self, kernel: Kernel) -> Sequence[Case]:
        return judged_cases(kernel, self.family, PROFILES[self.profile], self.seed)[: self.limit]

    @property
    def estimated_s(self) -> float:
        profile = PROFILES[self.profile]
        scores = sum(p.batch * p.nheads * p.seqlen_q * p.seqlen_k for p in profile.shapes)
        return 1.5e-6 * profile.seeds * scores


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCapture(JudgeTask):
    """Judge the case of a user's file of activations; ``index`` is the file's place among the user's files."""

    file: str
    sha256: str
    index: int

    def cases(self, kernel: Kernel) -> Sequence[Case]:
        capture = pinned(self.file, self.sha256).capture
        case = captured_case(kernel, capture, PROFILES[self.profile], self.index)
        return [case] if case else []


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCover(JudgeTask):
    """Judge the cases of a kernel's covering array, at most the first ``limit`` rows of it."""

    kind: ClassVar[str] = "cover"

    family: str = COVER
    seed: int
    limit: int | None = None

    def _rows(self, kernel: Kernel) -> list[tuple[Point, Case | None]]:
        return cover(kernel, PROFILES[self.profile].strength, self.seed)[: self.limit]

    def cases(self, kernel: Kernel) -> Sequence[Case]:
        return [case for _, case in self._rows(kernel) if case]

    def run(self) -> JudgedCases:
        rows = self._rows(found(self.kernel))
        return replace(JudgeTask.run(self), feasible=tuple(point for point, _ in rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePractice(JudgeTask):
    """Judge one of :data:`PARTS` parts of the cases of practice; a case that the kernel refuses leaves no record."""

    kind: ClassVar[str] = "cover"

    family: str = COVER
    seed: int
    part: int

    @property
    def label(self) -> str:
        return f"{self.kernel}: practice {self.part + 1}"

    def cases(self, kernel: Kernel) -> Sequence[Case]:
        return [*probes(kernel), *practice(kernel, self.profile, self.seed)][self.part :: PARTS]

    def run(self) -> JudgedCases:
        records = JudgeTask.run(self).records
        return JudgedCases(
            tuple(record for record in records if not record.error or record.error.raised not in NAMES_OF_REFUSALS)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLaw(Task):
    """Search for a trial that breaks one law on one kernel."""

    kind: ClassVar[str] = "law"

    law: str
    max_examples: int
    seed: int

    @property
    def label(self) -> str:
        return f"{self.kernel}: {self.law}"

    def run(self) -> LawOutcome:
        return run_law(find_law(self.law), found(self.kernel), max_examples=self.max_examples, seed=self.seed)

    def read(self, value: Any) -> LawOutcome | None:
        return None if value is None else read(LawOutcome, value, self.law, private=True)

    def is_finding(self, value: LawOutcome) -> bool:
        return value.status == "fail"

    @property
    def estimated_s(self) -> float:
        return 0.05 * self.max_examples


def judge_cases(
    kernel: Kernel, family: str, cases: Sequence[Case], *, is_fail_fast: bool = False
) -> tuple[CaseResult, ...]:
    """Judge cases and return a record of each; one in which anything raises has the error in its record.

    With ``is_fail_fast`` the first record that is a finding is the last one. For a kernel that states no order a record
    has figures under each hypothesis, and its ``measures`` are those under the one that the case fits best;
    :func:`fa3verify.campaign.results.settle` later chooses one hypothesis for the whole kernel.
    """
    records: list[CaseResult] = []
    for case in cases:
        watch.trying(f"family {family}", case.to_json)
        try:
            record = _judged(kernel, family, case)
        except Unfilled:
            continue
        except Exception as error:  # whatever else a kernel under test leads to is a finding as well
            failure = error.failure if isinstance(error, KernelError) else Failure.of(error)
            record = CaseResult(family, case, {}, error=failure)
        records.append(record)
        if is_fail_fast and _fails(kernel.name, [record]):
            break
    sketches = sketch.with_one_worst([record.sketch for record in records])
    return tuple(replace(record, sketch=drawn) for record, drawn in zip(records, sketches, strict=True))


def _judged(kernel: Kernel, family: str, case: Case) -> CaseResult:
    """Judge one case and return its record; it raises what :func:`fa3verify.judging.judgement.judge` raises."""
    operation = operations.find(kernel.operation)
    judgement = judge(kernel, case)
    sides = hypotheses.under(kernel)
    assumed = judgement.hypotheses
    return CaseResult(
        family,
        case,
        judgement.measures,
        judgement.quantisation,
        sketch=_sketch(judgement) if operation.name == operations.FORWARD else None,
        hypotheses={name: hypotheses.strain(operation, measures) for name, measures in assumed.items()},
        under={name: (measures, _order(sides[name], case)) for name, measures in assumed.items()},
        order=None if assumed else _order(kernel, case),
        point=space.point(kernel, case),
    )


def _sketch(judgement: Judgement) -> sketch.Sketch:
    """Return where the errors of a forward lie."""
    problem = judgement.case.problem
    out, truth, bound = (each["out"] for each in (judgement.outputs, judgement.seen, judgement.bound))
    return sketch.of_case(problem, out, truth, bound, judgement.operands.dequantized(problem)[2])


def _order(kernel: Kernel, case: Case) -> Json | None:
    """Return as JSON the order of operations that the bound of a case assumed; None for one that assumes none."""
    assumed = hypotheses.assumed(kernel, kernel.config_for(case.problem, case.changes))
    return asdict(assumed) if isinstance(assumed, KernelModel | BackwardModel) else None


def _fails(label: str, records: Sequence[CaseResult]) -> bool:
    """Tell whether records of one family have an error, or fail bits or bound; False without a record."""
    if not records or any(record.error for record in records):
        return bool(records)
    operation = operations.find(records[0].case.operation)
    body = Figured(label, (family_row(of_one_hypothesis(records), operation),), operation.name)
    return bool(gate.failed_parts(gate.bit_rows(body) + gate.bound_rows(body)))


def plan(
    kernels: Sequence[Introduction],
    profile: ProfileName,
    seed: int,
    captures: tuple[Capture, ...] = (),
    limit: int | None = None,
    is_fail_fast: bool = False,
) -> list[JudgeTask | SearchLaw]:
    """Return the tasks of a campaign, the longest first; none for a kernel that takes no case.

    ``limit`` is the most trials of a property and cases of a family; cases of practice are then left out. A kernel
    with a limit of its own is slow: its families, which share few shapes, come in front of its properties. With
    ``is_fail_fast`` each task ends at its first finding.
    """
    tasks: list[JudgeTask | SearchLaw] = []
    for kernel in kernels:
        searches = _searches(kernel, profile, seed, kernel.limit or limit)
        judges = [
            replace(each, is_fail_fast=is_fail_fast)
            for each in _judges(kernel, profile, seed, captures, kernel.limit or limit)
        ]
        tasks += [*judges, *searches] if kernel.limit else [*searches, *judges]
    tasks = [replace(each, durable=twins.is_twin(each.kernel)) for each in tasks]
    return sorted(tasks, key=lambda task: task.kind != "cover" and not task.label.endswith("error_within_bound"))


def _searches(kernel: Introduction, profile: ProfileName, seed: int, limit: int | None) -> list[SearchLaw]:
    """Return a task for each property of a kernel."""
    size = PROFILES[profile]
    trials = {law: size.bound_examples if law in BOUND_LAWS else size.law_examples for law in kernel.laws}
    return [
        SearchLaw(kernel=kernel.name, law=law, max_examples=min(count, limit or count), seed=seed)
        for law, count in trials.items()
    ]


def _judges(
    kernel: Introduction, profile: ProfileName, seed: int, captures: tuple[Capture, ...], limit: int | None
) -> list[JudgeTask]:
    """Return the tasks that judge cases of a kernel: covering array, practice, and a task for each family."""
    own = {family_of(capture): (index, capture) for index, capture in enumerate(captures)}
    judges: list[JudgeTask] = []
    if kernel.covers and (kernel.families or kernel.narrowed):
        judges.append(JudgeCover(kernel=kernel.name, profile=profile, seed=seed, limit=limit))
        parts = range(PARTS if limit is None else 0)
        judges += [JudgePractice(kernel=kernel.name, profile=profile, seed=seed, part=part) for part in parts]
    for family in kernel.families:
        if family in own:
            index, capture = own[family]
            judges.append(
                JudgeCapture(
                    kernel=kernel.name,
                    family=family,
                    profile=profile,
                    index=index,
                    file=capture.file,
                    sha256=capture.sha256,
                )
            )
        else:
            judges.append(JudgeFamily(kernel=kernel.name, family=family, profile=profile, seed=seed, limit=limit))
    return judges
