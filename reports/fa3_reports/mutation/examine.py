"""Examine a mutant as a third party's kernel is: families, properties, bound and baseline, until one finds it.

The parts of a verdict that call it wrong are told apart: properties ("laws"), bound ("L1"), baseline ("L2"), a crash,
and bits ("L0"), which only a kernel with a twin has and which alone do not end an examination.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fa3_kernels.faults.table import load
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reports.mutation.apart import apart
from fa3_reports.mutation.edits import find
from fa3verify import operations
from fa3verify.campaign.cover import cover
from fa3verify.campaign.plan import judge_cases
from fa3verify.campaign.profiles import PROFILES, ProfileName, families, family_cases
from fa3verify.campaign.results import CaseResult
from fa3verify.cases.case import Case
from fa3verify.cases.coverage import COVER
from fa3verify.judging import metrics
from fa3verify.judging.family import Figured, family_row
from fa3verify.judging.gate import Baseline, baseline_rows, bit_rows, bound_rows, failed_parts, shipped_baseline
from fa3verify.judging.verdict import BOUND_LAWS
from fa3verify.kernels.record import Kernel
from fa3verify.known import registry
from fa3verify.properties import LAWS, find_law, run_law
from fa3verify.properties.law import Law, Trial, Violation, set_up

# What finds most for its time comes first; the rest in the order of a campaign.
_TELLING = ("normal", "offset_v", "block_scaled", "error_within_bound", "gradients_within_bound")
# The law whose trials are drawn to look for a difference from the sound twin, by operation.
_DRAWN = {
    "forward": "error_within_bound",
    "backward": "gradients_within_bound",
    "quantize": "stored_values_within_bound",
}
ALIAS = "fa3_mutant"  # a process has one
SEED = 0  # for which baselines ship
SEARCH = "drawn bits"  # a task: as many drawn trials as 100 times the examples of a property, compared bit for bit
_SEARCHED = 100
_STEP_S: dict[str, float] = {"quick": 60.0, "release": 900.0, "soak": 3600.0}  # CPU, of a task and compiling for it


@dataclass(frozen=True, slots=True)
class Examination:
    """What became of a mutant under some tasks of a profile.

    Parameters
    ----------
    found_by : tuple of str
        Parts of the verdict, without bits, that the last task failed: empty for a survivor.
    task, kernel : str
        Which task found it, of which kernel; empty for a survivor.
    bits : str
        The first task in which bits differed from the sound twin's, empty if none did or nobody compared.
    tasks : int
        How many were run.
    seconds : float
        Wall time.
    words : str
        Of a crash.
    """

    found_by: tuple[str, ...]
    task: str
    kernel: str
    bits: str
    tasks: int
    seconds: float
    words: str = ""


@cache
def tasks_of(kernel: str, profile: ProfileName) -> list[str]:
    """Return the tasks of a kernel, by its name, in a profile."""
    return tasks(registry.find(kernel), profile)


def tasks(asked: Kernel, profile: ProfileName) -> list[str]:
    """Return the tasks of a kernel in a profile: families and properties, the telling ones first, then the covering
    array.
    """
    laws = [law.name for law in LAWS if law.applies(asked) and law.is_claimed(asked)]
    names = [*families(asked, PROFILES[profile]), *laws]
    first = [name for name in _TELLING if name in names]
    rest = [name for name in laws + names if name not in first]
    return list(dict.fromkeys((*first, *rest, COVER)))


def mutant_kernel(kernel: str, package: str, *, bits: bool) -> Kernel:
    """Return a twin kernel that computes with another package's twin."""
    sound = registry.find(kernel)

    def run(problem: AttentionProblem, operands: Operands, config: Any) -> Any:
        return operations.find(sound.operation).twin(problem, operands, config, package=package)

    return replace(sound.altered(run=run), name=f"{kernel}+mutant", twin=sound if bits else None)


def found_by(kernel: Kernel, task: str, profile: ProfileName, seed: int) -> tuple[str, ...]:
    """Run one task on a kernel and return the parts of the verdict that fail."""
    size = PROFILES[profile]
    if task == SEARCH:
        outcome = run_law(
            _same_bits(kernel), kernel, max_examples=_SEARCHED * size.law_examples, seed=seed, shrink_seconds=0
        )
        return ("L0",) if outcome.violation else ()
    if task in {law.name for law in LAWS}:
        examples = size.bound_examples if task in BOUND_LAWS else size.law_examples
        outcome = run_law(find_law(task), kernel, max_examples=examples, seed=seed, shrink_seconds=0)
        if outcome.violation is None:
            return ()
        return ("crash",) if outcome.violation.failure else ("laws",)
    if task == COVER:
        cases = [case for _, case in cover(kernel, size.strength, seed) if case]
    else:
        cases = family_cases(kernel, task, size, seed)
    return _failing(kernel, task, cases, _baseline(profile, seed))


def _failing(kernel: Kernel, family: str, cases: list[Case], baseline: Baseline | None) -> tuple[str, ...]:
    """Parts of the verdict that cases of one family fail: the first beyond its bound ends them, and the baseline, which
    is of all together, is asked where there is none.
    """
    operation = operations.find(kernel.operation)
    records: list[CaseResult] = []

    def body(judged: Sequence[CaseResult]) -> Figured:
        return Figured(kernel.name, (family_row(judged, operation),), operation.name)

    parts: set[str] = set()
    for case in cases:
        records += judge_cases(kernel, family, [case])
        if records[-1].error:
            return ("crash",)
        alone = body(records[-1:])
        parts |= failed_parts(bit_rows(alone) + bound_rows(alone))
        if parts - {"L0"}:
            return tuple(sorted(parts))
    return tuple(sorted(parts | failed_parts(baseline_rows(body(records), baseline))))


def _same_bits(kernel: Kernel) -> Law:
    """A law that a kernel's outputs are its twin's, on the trials of the operation's bound; NaN equals NaN."""

    def check(kernel: Kernel, trial: Trial) -> Violation | None:
        setup = set_up(kernel, trial.case)
        assert kernel.twin is not None
        differ = metrics.bits_differing(setup.run(), setup._replace(kernel=kernel.twin).run())
        return Violation(f"{differ} values differ from {kernel.twin.name}") if differ else None

    return replace(find_law(_DRAWN[kernel.operation]), name=SEARCH, check=check)


@cache
def _baseline(profile: str, seed: int) -> Baseline | None:
    return shipped_baseline(profile, seed)


def examine(
    make: Callable[[str], Kernel],
    plan: list[tuple[str, str]],
    profile: ProfileName,
    seed: int,
    *,
    until: float = math.inf,
) -> Examination | None:
    """Run tasks on kernels, in a process of their own, until a part of the verdict other than bits fails.

    A task that the sound twin fails as well, such as that of a library whose kernels are not sound, finds nothing.

    Parameters
    ----------
    make : callable
        ``make(kernel)``: the kernel, called in that process.
    plan : list of (str, str)
        Kernels and tasks, in order.
    until : float
        Time, in seconds since the epoch, after which no task begins; what has found nothing by then gives None.

    Raises
    ------
    RuntimeError
        If a kernel cannot be made: that is no finding.
    """
    started = time.monotonic()

    def steps() -> Iterator[list[str] | None]:
        made = {kernel: make(kernel) for kernel in dict.fromkeys(kernel for kernel, _ in plan)}
        yield []
        for kernel, task in plan:
            if time.time() > until:
                yield None
                return
            parts = found_by(made[kernel], task, profile, seed)
            if set(parts) - {"L0"} and set(found_by(registry.find(kernel), task, profile, seed)) - {"L0"}:
                parts = tuple(part for part in parts if part == "L0")
            yield list(parts)
            if set(parts) - {"L0"}:
                return

    said = apart(steps, _STEP_S[profile])
    if not said.values:
        raise RuntimeError(f"the kernel could not be made: {said.words}")
    _, *steps_found = said.values
    if steps_found and steps_found[-1] is None:
        return None
    bits = next((plan[i][1] for i, parts in enumerate(steps_found) if "L0" in parts), "")
    parts = tuple(part for part in (steps_found[-1] if steps_found else ()) if part != "L0")
    place = max(len(steps_found) - 1, 0)
    ran = len(steps_found)
    if said.end != "finished":
        parts = ("crash",)
        place = min(ran, len(plan) - 1)
        ran = ran + 1
    kernel, task = plan[place] if parts else ("", "")
    return Examination(parts, task, kernel, bits, ran, round(time.monotonic() - started, 2), said.words[:200])


def examine_mutant(
    mutant: str, plan: list[tuple[str, str]], profile: ProfileName, *, bits: bool = True, until: float = math.inf
) -> Examination | None:
    """Examine the mutant of an identity, as :func:`examine`, on the inputs that the shipped baseline is for."""
    chosen = find(mutant)

    @cache
    def package() -> str:
        return load(ALIAS, chosen)

    return examine(lambda kernel: mutant_kernel(kernel, package(), bits=bits), plan, profile, SEED, until=until)


def warm_up(plan: list[tuple[str, str]]) -> None:
    """Import and compile here what every fork needs: each kernel's first family, sound."""
    for kernel in dict.fromkeys(kernel for kernel, _ in plan):
        asked = registry.find(kernel)
        judge_cases(asked, "normal", family_cases(asked, "normal", PROFILES["quick"], SEED))
