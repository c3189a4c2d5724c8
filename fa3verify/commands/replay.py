"""The job of ``fa3verify replay``: run the content of a replay file again, on the kernel it names or on another.

The files are read and written in :mod:`fa3verify.campaign.replay_files`. A content is one case, a trial of a law, the
cases of a family, the largest case of every family, cases that refute hypotheses together, or what a hunt found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fa3_reference.rules import require
from fa3verify import operations
from fa3verify.campaign import results
from fa3verify.campaign.findings import MovedFigure
from fa3verify.campaign.plan import judge_cases
from fa3verify.campaign.profiles import CAPTURED, PROFILES, judged_cases
from fa3verify.campaign.replay_files import FAMILY_SCHEMA, HUNTED_SCHEMA, LARGEST_SCHEMA, ReplayFile
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.judging import gate, hypotheses
from fa3verify.judging.family import CaseResult, pooled
from fa3verify.judging.judgement import judge, passes
from fa3verify.judging.verdict import Part
from fa3verify.kernels.calls import KernelError
from fa3verify.kernels.record import Kernel
from fa3verify.known import registry
from fa3verify.properties import LawOutcome, Trial, find_law, replay_trial
from fa3verify.properties.law import SCHEMA as TRIAL
from fa3verify.properties.runner import verdicts
from fa3verify.text import Failure, of_error

NOT_SHOWN = (
    "not reproduced by this call alone: the kernel was mended since, or what was found depends on calls before it, as "
    "of state that it keeps; only fa3verify verify tells which"
)


class Replayed(NamedTuple):
    """The result of running a replay file again.

    Parameters
    ----------
    holds : bool
        Whether the kernel now keeps its bound, the law, or the margin of the baseline that the file is about.
    message : str
        One line that says so; if the kernel raises, the traceback follows.
    measures : mapping of str to float, optional
        Figures of the judged cases (:mod:`fa3verify.judging.metrics`); None for laws, and where nothing was judged.
    """

    holds: bool
    message: str
    measures: Mapping[str, float | None] | None


def run(
    file: ReplayFile, kernel: str | None = None, activations: Path | None = None, family: str | None = None
) -> Replayed:
    """Run a replay file's content again.

    Parameters
    ----------
    file : ReplayFile
    kernel : str, optional
        Name of another kernel than the file names.
    activations : Path, optional
        Folder of a user's own activations, if they have been moved; their content must be the same.
    family : str, optional
        The only family to run, for a file with the largest case of every family.

    Raises
    ------
    ValueError
        If there is no such kernel, if the content is damaged or not for this kernel, or if ``family`` is given and the
        file does not have it.
    """
    judged_kernel = registry.find(kernel or file.kernel)
    replayed = _judged(judged_kernel, file, activations, family)
    if replayed.holds and file.is_finding_of(kernel):
        replayed = replayed._replace(message=f"{replayed.message}; {NOT_SHOWN}")
    assumed = str(hypotheses.sums_of(judged_kernel)) if hypotheses.under(judged_kernel) else "what its order says"
    if file.sums in (None, assumed):
        return replayed
    return replayed._replace(message=f"{replayed.message}; the file's bound assumed {file.sums}, here it is {assumed}")


def _judged(kernel: Kernel, file: ReplayFile, activations: Path | None, family: str | None) -> Replayed:
    """Run the content by its kind and return the result, to which :func:`run` adds remarks."""
    content = file.content
    if content.get("schema") == results.REFUTATIONS:
        return _refutations(kernel, content, activations)
    if file.what.part is Part.LAW:
        law = file.what.subject
        trial = _trial(content, activations)
        violation = replay_trial(find_law(law).name, kernel, trial)
        if violation is None:
            return Replayed(True, f"{law} holds for {trial.case.describe()}", None)
        return Replayed(False, _raised(violation.message, violation.failure), None)
    if content.get("schema") == HUNTED_SCHEMA:
        from fa3verify.search.run import replay_content  # takes long to import

        return Replayed(*replay_content(kernel, content))
    if content.get("schema") == LARGEST_SCHEMA:
        cases = _of_largest(content, family)
        return _family(kernel, str(file.what), content | {"cases": cases}, activations)
    require(family is None, "the replay file is not one of the largest case of every family")
    if content.get("schema") == FAMILY_SCHEMA:
        return _family(kernel, str(file.what), content, activations)
    case = _case(kernel, content, activations)
    if file.baseline is not None:
        return _against_baseline(kernel, file.baseline, case)
    try:
        judged = judge(kernel, case)
    except KernelError as error:
        return Replayed(False, _raised(f"{case.describe()}: {error}", error.failure), None)
    message = case.describe()
    if judged.hypotheses:
        operation = operations.find(kernel.operation)
        ratios = {name: hypotheses.strain(operation, x) for name, x in judged.hypotheses.items()}
        leaves = f"this case leaves {hypotheses.holding(ratios)}"
        message += f"; assumed: any order, {hypotheses.sums_of(kernel)}; {leaves}"
    if file.what.part is Part.BASELINE:
        message += "; only its bound is judged here: the file does not say which figure moved"
    return Replayed(passes(kernel, judged.measures), message, judged.measures)


def _trial(content: Any, activations: Path | None) -> Trial:
    """Read a trial of a law; ValueError for a damaged one."""
    trial = Trial.from_json(content)
    return replace(trial, case=_found(trial.case, activations))


def _refutations(kernel: Kernel, content: Json, activations: Path | None) -> Replayed:
    """Judge together the cases and trials that refuted different hypotheses: one hypothesis must hold in all of them.

    A kernel that states its order must pass every case. One that raises, or breaks a law under every hypothesis at
    once, fails.
    """
    contents: Any = content.get("contents")
    require(
        isinstance(contents, list) and all(isinstance(each, dict) for each in contents),
        "the replay file is damaged: it names nothing that refutes a hypothesis",
    )
    cases = [_case(kernel, each, activations) for each in contents if each.get("schema") != TRIAL]
    trials = [_trial(each, activations) for each in contents if each.get("schema") == TRIAL]
    records = judge_cases(kernel, "replayed", cases)
    if lost := [record for record in records if record.error]:
        return Replayed(False, f"{lost[0].case.describe()}: {lost[0].error}", None)
    laws = []
    for trial in trials:
        violation, under = verdicts(find_law(trial.law), kernel, trial)
        if violation and not under:
            return Replayed(False, violation.message, None)
        against = {name: (trial, broken) if broken else None for name, broken in under.items()}
        laws.append(LawOutcome(trial.law, "fail" if violation else "pass", hypotheses=against))
    settled = results.settle(records, laws)
    if settled is None:
        return Replayed(all(passes(kernel, record.measures) for record in records), f"{len(records)} cases", None)
    is_left = settled.chosen not in settled.refuted
    words = f"{settled.chosen} holds in {len(records)} cases and {len(trials)} trials"
    words = f"{words if is_left else results.contradiction(settled)}; {hypotheses.sums_of(kernel)}"
    held = all(passes(kernel, results.judged_under(record, settled.chosen).measures) for record in records)
    return Replayed(is_left and held, words, None)


def _raised(message: str, failure: Failure | None) -> str:
    """Return a message with the traceback of what the kernel raised, if there is one."""
    return f"{message}\n{failure.traceback['text']}" if failure and failure.traceback else message


def _case(kernel: Kernel, content: Any, activations: Path | None) -> Case:
    """Read a case; ValueError if it is not one for this kernel."""
    case = _found(Case.from_json(content), activations)
    require(
        case.operation == kernel.operation,
        f"the case is for operation {case.operation}, {kernel.name} computes {kernel.operation}",
    )
    return case


def _of_largest(content: Json, family: str | None) -> list[Any]:
    """Return the largest case of all families, or of one; ValueError if the file does not have it."""
    cases: Any = content.get("cases")
    require(isinstance(cases, dict), "the replay file is damaged: it names no case of its families")
    require(family is None or family in cases, f"the replay file has no family {family!r}; it has {', '.join(cases)}")
    return list(cases.values()) if family is None else [cases[family]]


def _family(kernel: Kernel, what: str, content: Json, activations: Path | None) -> Replayed:
    """Judge all cases of a family again, and return figures pooled over them.

    The content may name the hypothesis that a campaign chose, under which a kernel that states no order is judged.
    """
    require(
        isinstance(content.get("cases"), list) and content["cases"],
        "the replay file is damaged: it names no case of its family",
    )
    kernel = hypotheses.under(kernel).get(content.get("hypothesis", ""), kernel)
    records = _records(kernel, what, [_case(kernel, case, activations) for case in content["cases"]])
    if isinstance(records, Replayed):
        return records
    holds = all(passes(kernel, record.measures) for record in records)
    message = f"{len(records)} cases, of which the first had the largest error: {records[0].case.describe()}"
    return Replayed(holds, message, pooled(records, operations.find(kernel.operation)))


def _records(kernel: Kernel, family: str, cases: list[Case]) -> Sequence[CaseResult] | Replayed:
    """Judge cases under the hypothesis that fits them; return the failed replay if the kernel raises in one of them."""
    records = judge_cases(kernel, family, cases)
    for record in records:
        if record.error:
            return Replayed(False, _raised(f"{record.case.describe()}: {record.error}", record.error), None)
    return results.of_one_hypothesis(records)


def _found(case: Case, activations: Path | None) -> Case:
    """Return the case, with the path of a user's own activations changed to another folder, if one is named."""
    if activations is None or case.recipe.distribution != CAPTURED:
        return case
    settings = case.recipe.settings
    moved = settings | {"file": str(activations / Path(str(settings["file"])).name)}
    return replace(case, recipe=replace(case.recipe, params=moved))


def _against_baseline(kernel: Kernel, stored: MovedFigure, case: Case) -> Replayed:
    """Judge the whole family of a case again, and compare the figure that got worse with its limit.

    ValueError if the file does not name a profile, family and figure that exist, or the kernel takes no case of it.
    """
    family = stored.family
    try:
        is_own = family.startswith(f"{CAPTURED}:")  # the family of a user's file has no other case
        cases = [case] if is_own else judged_cases(kernel, family, PROFILES[stored.profile], stored.seed)
    except (KeyError, ValueError, StopIteration) as error:
        raise ValueError(f"the replay file names no figure of a baseline: {of_error(error)}") from None
    records = _records(kernel, family, cases)
    if isinstance(records, Replayed):
        return records
    require(records, f"{kernel.name} takes no case of family {family}")
    operation = operations.find(kernel.operation)
    figures = gate.gated_figures(operation, pooled(records, operation))
    require(
        stored.measure in figures, f"the replay file names no figure of a baseline: unknown measure {stored.measure!r}"
    )
    observed = figures[stored.measure]
    words = f"{stored.measure} {observed:.4g}, limit {stored.limit:.4g}, baseline {stored.baseline}"
    return Replayed(math.isfinite(observed) and observed <= stored.limit, f"family {family}: {words}", figures)
