"""Questions: the one contract that explains what a kernel does other than FlashAttention-3, which nobody declared.

A kernel that fails is wrong unless a contract of :data:`fa3verify.kernels.policy.CONTRACTS` explains what failed, or a
rule of :mod:`fa3verify.campaign.refusals` the calls that it refused. :func:`ask_all` then runs the whole campaign again
under what explains them. What fails there too is wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal

from fa3_reference.problem import AttentionProblem
from fa3verify import operations
from fa3verify.campaign import refusals, tasks as campaign
from fa3verify.campaign.findings import ContractQuestion, Finding, clusters, ordered
from fa3verify.campaign.introduction import found
from fa3verify.campaign.plan import judge_cases
from fa3verify.campaign.run import Introduction, KernelRun, Run, verdict_of
from fa3verify.campaign.tasks import Outcome, Task, is_finding
from fa3verify.cases.case import SCHEMA, Case
from fa3verify.files import Json
from fa3verify.judging.judgement import passes
from fa3verify.judging.verdict import BOUND_LAWS, EXIT_CODES, Part, What
from fa3verify.kernels import watch
from fa3verify.kernels.names import KernelName, declaration, declaring
from fa3verify.kernels.policy import CONTRACTS, empty_rows
from fa3verify.kernels.record import NAMES_OF_REFUSALS, Kernel
from fa3verify.properties import Trial, find_law, replay_trial, run_law
from fa3verify.properties.law import SCHEMA as TRIAL

Answer = Literal["ask", "fail", "pass"]  # what a question does to the verdict
MOST_TRIED = 16  # findings of a kernel, of one cause each, that are tried under other contracts
MOST_S = 30.0  # for that, and for twenty calls of a new shape beside
ASKING_S = 60.0  # for judging again what an interrupted campaign had found
FRESH = 20  # trials that tell contracts apart that explain as much
ROUNDS = 4  # of a campaign in which a contract may grow: what it opens to be judged may need another


@dataclass(frozen=True, slots=True, kw_only=True)
class FindContract(Task):
    """Find the fields of a kernel's policy that together explain what failed.

    The findings that fewest fields could matter to go first, and each leaves the contracts that explain it; one that
    none explains leaves all of them. Its value has by field a value and the place, among ``failed`` and behind it
    ``refused``, of the first that needs it, and what declares all of them beside what is declared.
    """

    kind: ClassVar[str] = "contract"

    failed: tuple[tuple[str, Json], ...]  # what found it, as files have it, and the content of its replay file
    has_lse: bool
    refused: tuple[Json, ...] = ()  # the cases and trials in which it raised
    most_s: float = MOST_S  # for contracts, and again for rules

    @property
    def label(self) -> str:
        return f"{self.kernel}: contracts"

    def run(self) -> tuple[dict[str, tuple[str, int]], str]:
        kernel = found(self.kernel)
        problems = [_case(content).problem for content in self.refused]
        rules = refusals.rule(kernel, problems, time.monotonic() + self.most_s) if problems else {}
        contract = (
            self._contract(kernel, declaring(kernel, {name: value for name, (value, _) in rules.items()}))
            if self.failed
            else {}
        )
        needs = contract | {name: (value, place + len(self.failed)) for name, (value, place) in rules.items()}
        said = {**KernelName.parse(self.kernel).contract} | {name: value for name, (value, _) in needs.items()}
        return needs, declaration(kernel, said)

    def _contract(self, kernel: Kernel, taken: Kernel) -> dict[str, tuple[str, int]]:
        """Return the fields of the policy that explain what failed; ``taken`` is asked nothing that was refused."""
        trials = [(What.from_json(words), content) for words, content in self.failed]
        concerned = [concerns(kernel.operation, what, content) for what, content in trials]
        asked = (
            set().union(*concerned)
            - kernel.policy.said.keys()
            - kernel.sizes.said.keys()
            - (set() if self.has_lse else {"empty_lse"})
        )
        until = time.monotonic() + self.most_s
        nothing: frozenset[tuple[str, str]] = frozenset()
        known = {(place, nothing): False for place in range(len(trials))}

        def holds(place: int, contract: Mapping[str, str]) -> bool:
            own = {name: value for name, value in contract.items() if name in concerned[place]}
            key = place, frozenset(own.items())
            if key not in known:
                what, content = trials[place]
                watch.trying(str(what), lambda: content)
                named = declaring(kernel, own)
                if "combinations" in own:
                    named = named.altered(run=partial(_without_causal, named.code.run))
                known[key] = time.monotonic() < until and _holds(named, what, content)
            return known[key]

        known_to = [x for x in CONTRACTS if kernel.operation != "merge" or x.value != "mean"]  # a merge has no V
        values = [[(name, None), *((x.field, x.value) for x in known_to if x.field == name)] for name in sorted(asked)]
        contracts = ({name: value for name, value in chosen if value} for chosen in product(*values))
        every = sorted(contracts, key=lambda each: "undefined" in each.values())
        left = [each for each in every if all(holds(place, each) for place in range(len(trials)))]
        left = left or [each for each in every if "undefined" not in each.values()]
        for place in sorted(range(len(trials)), key=lambda place: (len(concerned[place]), trials[place][0].subject)):
            left = [each for each in left if holds(place, each)] or left
        least = [each for each in left if not any(other.items() < each.items() for other in left)]
        best = least[0]
        if len(least) > 1:
            best = next((each for each in least if _fits(taken, each)), best)
        needs: dict[str, tuple[str, int]] = {}
        for name, value in best.items():
            rest = {other: x for other, x in best.items() if other != name}
            needing = [place for place in range(len(trials)) if holds(place, best) and not holds(place, rest)]
            if needing:
                needs[name] = value, needing[0]
        return needs


def _fits(kernel: Kernel, contract: Mapping[str, str]) -> bool:
    """Tell whether fresh trials hold under a contract: few findings may fit several, those of the bound any."""
    named = declaring(kernel, contract)
    special = ["special_values_follow_policy"] * ("special_values" in contract)
    laws = [
        law
        for law in map(find_law, (*BOUND_LAWS, "empty_rows_are_zero", "rows_that_a_term_empties_are_zero", *special))
        if law.applies(kernel)
    ]
    return all(run_law(law, named, max_examples=FRESH, seed=0, shrink_seconds=0).status != "fail" for law in laws)


def concerns(operation: str, what: What, content: Json) -> frozenset[str]:
    """Return the fields of a policy that could matter to what found a case or a trial."""
    case = _case(content)
    problem = case.problem
    has_masks = operation != "merge"
    has_empty = operation in (operations.FORWARD, "merge")
    is_uneven = any(seq.seqlen_q != seq.seqlen_k for seq in problem.sequences())
    concerned = (
        (has_masks and problem.causal and is_uneven, ("causal",)),
        (has_masks and problem.window != (-1, -1) and not problem.causal, ("combinations",)),
        (has_empty and _has_empty_rows(case), ("empty_out", "empty_lse")),
        # A row of -Inf scores is like one without keys.
        (
            has_empty and what.subject == "special_values_follow_policy",
            ("special_values", "empty_out", "empty_lse"),
        ),
    )
    return frozenset(name for holds, names in concerned if holds for name in names)


def _has_empty_rows(case: Case) -> bool:
    """Tell whether a row sees no key, however the causal mask is aligned."""
    problem = case.problem
    term = case.operands().term if problem.term else None
    sides = (False, True) if problem.causal else (problem.top_left,)
    return any(bool(empty_rows(replace(problem, top_left=side), term).any()) for side in sides)


def _case(content: Json) -> Case:
    return Trial.from_json(content).case if content.get("schema") == TRIAL else Case.from_json(content)


def _holds(kernel: Kernel, what: What, content: Json) -> bool:
    """Tell whether a kernel that declares more keeps what was broken, its problem aligned as that says."""
    case = _case(content)
    case = replace(case, problem=kernel.fitted(case.problem))
    if what.part is not Part.LAW:
        (record,) = judge_cases(kernel, what.subject, [case])
        return not record.error and passes(kernel, record.measures)
    try:
        return replay_trial(find_law(what.subject).name, kernel, replace(Trial.from_json(content), case=case)) is None
    except ValueError:  # it does not take the trial
        return False


def _without_causal(run: Callable[..., object], problem: AttentionProblem, *rest: object) -> object:
    """Run a kernel on a call whose window is causal as on one with the window alone."""
    return run(replace(problem, causal=problem.causal and problem.window == (-1, -1)), *rest)


def _tried(failures: Sequence[Finding]) -> list[Finding]:
    """Return findings that a contract may explain, the first of every cause: judged outputs of one call or trial."""
    judged = [each for each in failures if each.raised is None and _is_call(each)]
    return [first for first, _ in clusters(judged)][:MOST_TRIED]


def _refused(failures: Sequence[Finding]) -> list[Finding]:
    """Return findings of calls in which a kernel raised what says that it does not support them, a few of each cause.

    The first of a cause is the smallest: a rule that explains larger ones too is seen at others alone.
    """
    refused = [each for each in failures if each.raised in NAMES_OF_REFUSALS and _is_call(each)]
    return refused[:: max(1, len(refused) // MOST_TRIED)]


def _is_call(failure: Finding) -> bool:
    return (failure.content or {}).get("schema") in (SCHEMA, TRIAL)


def ask(kernel: KernelRun, failures: Sequence[Finding], executor: Executor) -> tuple[ContractQuestion, ...]:
    """Return one question for each contract that explains a part of what failed, in a process of its own.

    Parameters
    ----------
    kernel : KernelRun
        By the name of the campaign that failed, which has what is declared so far.
    failures : sequence of Finding
        Its findings.

    Returns
    -------
    tuple of ContractQuestion
        Of the kernel by the name under which all of them are declared; empty where no contract explains anything.
    """
    tried = _tried(failures)
    refused = _refused(failures)
    if not (tried or refused):
        return ()
    failed = tuple((str(each.what), each.content) for each in tried if each.content)
    returned = {name for law in kernel.laws for name, is_returned, _ in law.optional if is_returned}
    task = FindContract(
        kernel=kernel.name,
        durable=False,
        failed=failed,
        has_lse="lse" in returned or kernel.worst_ratio_lse is not None,
        refused=tuple(each.content for each in refused if each.content),
        most_s=MOST_S + 20 * sum(kernel.introduction.pace),
    )
    (outcome,) = campaign.execute([task], executor)
    if outcome.value is None:
        return ()
    adopted, declared = outcome.value
    name = KernelName.parse(kernel.name)
    asked = replace(name, contract={**name.contract} | {field: value for field, (value, _) in adopted.items()})
    told = {(each.field, each.value): (each.meaning, each.public) for each in CONTRACTS} | {
        (field, value): (refusals.MEANINGS[field].format(value), refusals.PUBLIC)
        for field, (value, place) in adopted.items()
        if field in refusals.MEANINGS and place >= len(failed)
    }
    return tuple(
        ContractQuestion(
            str(asked), meaning=meaning, public=public, seen=[*tried, *refused][place], declaration=declared
        )
        for field, (value, place) in adopted.items()
        for meaning, public in [told[field, value]]
    )


def ask_all(
    kernels: tuple[Introduction, ...],
    outcomes: list[Outcome],
    begun: Sequence[Outcome] | None = None,
    *,
    is_own: Callable[[str], bool],
    **terms: Any,
) -> tuple[tuple[Introduction, ...], list[Outcome], tuple[ContractQuestion, ...]]:
    """Ask about each of the user's kernels; return all kernels, their outcomes and the questions.

    ``is_own`` tells by its name whether a kernel is asked about. ``begun`` are the last outcomes of an interrupted
    campaign, None of another; ``terms`` are those of :func:`_judged_again`.
    """
    asked: tuple[ContractQuestion, ...] = ()
    for kernel in [each for each in kernels if is_own(each.name)]:
        mine = [outcome for outcome in outcomes if outcome.task.kernel == kernel.name]
        again, judged, more = _judged_again(kernel, mine, () if kernel.limit and begun is None else begun, **terms)
        kernels = tuple(again if each is kernel else each for each in kernels)
        outcomes = [outcome for outcome in outcomes if outcome.task.kernel != kernel.name] + judged
        asked += more
    return kernels, outcomes, asked


def _judged_again(
    kernel: Introduction,
    outcomes: list[Outcome],
    begun: Sequence[Outcome] | None,
    *,
    executor: Executor,
    execute: Callable[[Sequence[Task], float], list[Outcome]],
    planned: Callable[[tuple[str, ...]], tuple[tuple[Introduction, ...], Sequence[Task]]],
    of_kernel: Callable[[Introduction, list[Outcome]], tuple[KernelRun, Any, list[Finding], Any]],
    part: str,
) -> tuple[Introduction, list[Outcome], tuple[ContractQuestion, ...]]:
    """Judge a kernel again under the contracts that explain what failed, as long as they explain more of it.

    Where a contract leaves some of what it should have explained, no contract does: the kernel is as it was. Of an
    interrupted campaign, and of a slow kernel, only the tasks that found something run again, for :data:`ASKING_S` and
    as long as twenty calls of new shapes. A lost process counts under every contract.

    Parameters
    ----------
    execute : callable
        Runs tasks until a time.
    planned : callable
        Introduces kernels by name, and plans their tasks.
    of_kernel : callable
        Concludes from outcomes, as :func:`fa3verify.campaign.summary.of_kernel`.
    part : str
        Which part of a campaign was asked for; empty for all of it.
    """
    first = kernel, outcomes
    asked: list[ContractQuestion] = []
    for left in reversed(range(ROUNDS)):
        body, _, failures, _ = of_kernel(kernel, outcomes)
        more = ask(body, ordered(failures), executor) if left else ()
        if not more:
            if asked and is_refuted(body, failures):
                return *first, ()
            break
        asked += more
        (kernel,), tasks = planned((more[0].kernel,))
        failed = [replace(x, task=replace(x.task, kernel=kernel.name)) for x in first[1] if is_finding(x)]
        known = [x for x in begun or () if x.task.kernel == kernel.name and not x.skipped]
        if begun is not None:
            known += [x for x in failed if x.error]
            tasks = [task for task in tasks if task in {x.task for x in failed} - {x.task for x in known}]
        outcomes = known + execute(
            tasks, math.inf if begun is None else time.monotonic() + ASKING_S + 20 * sum(kernel.pace)
        )
    whole = [replace(x, kernel=kernel.name, declaration=asked[-1].declaration, meaning=x.meaning + part) for x in asked]
    return kernel, outcomes, tuple(whole)


def is_refuted(kernel: KernelRun, failures: Sequence[Finding]) -> bool:
    """Tell whether a contract leaves anything of what it was to explain: then it is not the kernel's."""
    contract = KernelName.parse(kernel.name).contract
    if refusals.MEANINGS.keys() & contract.keys() and _refused(failures):
        return True
    left = [(each.what, each.content) for each in failures if each.raised is None and each.content and _is_call(each)]
    return any(concerns(kernel.operation, *each) & contract.keys() for each in left)


def with_questions(run: Run, questions: Sequence[ContractQuestion], answer: Answer) -> Run:
    """Return a run with the questions that it leaves, and the verdict that they give it.

    Parameters
    ----------
    answer : {"ask", "fail", "pass"}
        A question makes a verdict "question" where nothing failed; counts as a finding; or is only listed.
    """
    if not questions:
        return run
    asked = {question.kernel for question in questions} if answer == "ask" else set()
    failures = run.failures + (tuple(each.seen for each in questions) if answer == "fail" else ())
    kernels = tuple(
        replace(kernel, verdict="question") if kernel.name in asked and kernel.verdict != "fail" else kernel
        for kernel in run.kernels
    )
    verdict = verdict_of(kernels, failures)
    return replace(
        run,
        kernels=kernels,
        failures=failures,
        questions=tuple(questions),
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
    )
