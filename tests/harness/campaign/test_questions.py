"""A kernel of another contract is asked whether it means to; what no contract explains is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

import fa3verify
from fa3_reference.problem import AttentionProblem
from fa3_reference.score_term import ScoreTerm
from fa3verify import Case, Kernel, Recipe, find_kernel
from fa3verify.campaign import plan, questions, replay_files, run as runs
from fa3verify.campaign.findings import finding
from fa3verify.campaign.introduction import Only
from fa3verify.campaign.junit import junit
from fa3verify.campaign.tasks import Outcome, is_finding
from fa3verify.commands import replay, verify
from fa3verify.judging.verdict import Part, What
from fa3verify.kernels.names import KernelName, declaring
from fa3verify.kernels.policy import CONTRACTS, VALUES
from fa3verify.kernels.sizes import Sizes
from fa3verify.properties import Trial, replay_trial, run_law
from fa3verify.report.build import render

KERNELS = Path(__file__).with_name("contracts.py")
ASKED = Only(properties=("error_within_bound", "special_values*"), limit=4)
RIGHT = {
    "mean": {"empty_out": "mean", "empty_lse": "finite"},
    "nan": {"empty_out": "nan", "empty_lse": "nan"},
    "aligned_top_left": {"causal": "top_left"},
    "added": {"special_values": "visible"},
    "plus_infinity": {"empty_lse": "+inf"},
    "added_top_left": {"causal": "top_left", "special_values": "visible"},
    "causal_windows": {"combinations": "window with causal"},
    "hides_nan": {"special_values": "undefined"},
    "large_negative": {"causal": "top_left", "empty_out": "mean", "empty_lse": "finite"},
}
WRONG = (
    "wrong_sign",
    "late_diagonal",
    "two_alignments",
    "garbage_in_empty_rows",
    "half_the_mean",
    "mean_and_doubled",
    "declared_zero",
    "hides_nan_and_doubled",
    "hides_nan_and_late",
    "nan_of_finite",
    "leaks_nan",
    "causal_windows_too_wide",
    "windows_too_wide",
)


def campaign_of(name: str, out: Path, progress: verify.Progress = lambda total, outcome: None) -> runs.Run:
    """Return what a campaign of the properties that concern contracts says of a kernel."""
    settings = verify.Settings((f"{KERNELS}:{name}",), "quick", 1, out, only=ASKED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "run_law", partial(run_law, shrink_seconds=0.2))
        return verify.run(settings, progress)


@pytest.fixture(scope="module")
def judged(in_this_process, tmp_path_factory):
    """Return what such a campaign says of a kernel, once for all tests."""
    known: dict[str, tuple[runs.Run, Path]] = {}

    def of(name: str) -> tuple[runs.Run, Path]:
        if name not in known:
            out = tmp_path_factory.mktemp("out")
            known[name] = campaign_of(name, out), out
        return known[name]

    return of


def small_trials(kernel: Kernel) -> list[Trial]:
    """Causal ones with more queries than keys, fewer, and many keys."""
    place = {"rule": "every", "sequence": 0, "head": 0, "row": 2, "channel": 0}
    asked: list[tuple[str, int, int, dict]] = [
        ("error_within_bound", 5, 3, {}),
        ("error_within_bound", 3, 5, {}),
        ("error_within_bound", 5, 70, {}),
        ("empty_rows_are_zero", 5, 3, {"num_splits": 1}),
        ("special_values_follow_policy", 5, 4, place),
        ("special_values_follow_policy", 1, 2, place | {"row": 0}),
    ]
    masks: list[dict] = [{"causal": True}]
    masks += [{"window": (2, 1)}, {"window": (-1, 0)}] if "window" in kernel.features else []
    return [
        Trial(law, Case(kernel.name, AttentionProblem(2, 1, 1, n, m, 64, **mask), Recipe("normal")), parameters)
        for law, n, m, parameters in asked
        for mask in masks
    ]


def explained(name: str) -> tuple[dict[str, str], bool]:
    """The contract that is found for what fails of a kernel, and whether all trials hold under it."""
    kernel = find_kernel(f"{KERNELS}:{name}")
    trials = small_trials(kernel)
    failed = [(f"law {trial.law}", trial.to_json()) for trial in trials if replay_trial(trial.law, kernel, trial)]
    assert failed
    task = questions.FindContract(kernel=kernel.name, durable=False, failed=tuple(failed), has_lse=True)
    contract = {field: value for field, (value, _) in task.run()[0].items()}
    kernel = declaring(kernel, contract)
    return contract, all(replay_trial(trial.law, kernel, aligned(kernel, trial)) is None for trial in trials)


def aligned(kernel: Kernel, trial: Trial) -> Trial:
    return replace(trial, case=replace(trial.case, problem=kernel.fitted(trial.case.problem)))


@pytest.mark.parametrize("name", RIGHT)
def test_one_contract_explains_what_a_right_kernel_does(name):
    assert explained(name) == (RIGHT[name], True)


@pytest.mark.parametrize("name", ["mean", "nan"])
def test_what_findings_of_the_bound_leave_open_is_told_by_rows_without_a_key(name):
    kernel = find_kernel(f"{KERNELS}:{name}")
    failed = tuple((f"law {each.law}", each.to_json()) for each in small_trials(kernel)[:1])
    task = questions.FindContract(kernel=kernel.name, durable=False, failed=failed, has_lse=True)
    assert {field: value for field, (value, _) in task.run()[0].items()} == RIGHT[name]


def test_contracts_are_told_apart_by_calls_that_the_kernel_does_not_refuse():
    kernel = find_kernel(f"{KERNELS}:nan_or_refused")
    first, *_ = small_trials(kernel)
    failed = ((f"law {first.law}", first.to_json()),)
    refused = replace(first.case, problem=replace(first.case.problem, seqlen_k=0, causal=False)).to_json()
    task = questions.FindContract(kernel=kernel.name, durable=False, failed=failed, has_lse=True, refused=(refused,))
    assert {name: value for name, (value, _) in task.run()[0].items()} == RIGHT["nan"] | {"min_seqlen": "1"}


def test_nan_in_a_row_that_a_bias_empties_is_not_called_the_mean():
    kernel = find_kernel(f"{KERNELS}:nan_by_a_bias")
    term = ScoreTerm(kind="bias", values="none visible")
    case = Case(kernel.name, AttentionProblem(2, 1, 1, 5, 7, 64, term=term), Recipe("normal"))
    task = questions.FindContract(
        kernel=kernel.name, durable=False, failed=(("family normal", case.to_json()),), has_lse=False
    )
    assert {name: value for name, (value, _) in task.run()[0].items()} == {"empty_out": "nan"}


@pytest.mark.parametrize("name", WRONG)
def test_no_contract_explains_what_a_wrong_kernel_does(name):
    assert not explained(name)[1]


@pytest.mark.parametrize("name", ["added_top_left", "wrong_sign"])
def test_a_campaign_asks_a_right_kernel_and_fails_a_wrong_one(judged, name):
    found, _ = judged(name)
    (kernel,) = found.kernels
    is_right = name in RIGHT
    assert (found.verdict, found.exit_code) == (("question", 6) if is_right else ("fail", 1))
    assert (kernel.verdict, bool(found.failures)) == (found.verdict, not is_right)
    assert KernelName.parse(kernel.name).contract == RIGHT.get(name, {})
    assert {each.kernel for each in found.questions} == ({kernel.name} if is_right else set())


@pytest.mark.parametrize(
    ("causal", "is_refuted"), [((False, True), True), ((True,), True), ((False,), False), ((), False)]
)
def test_a_case_that_a_contract_concerns_and_does_not_explain_refutes_it(causal, is_refuted):
    """Of a kernel that aligns its mask in no known way findings were told under causal=top_left."""
    name = "mine.py:attention[causal=top_left]"
    cases = [Case(name, AttentionProblem(1, 1, 1, 3, 5, 64, causal=each), Recipe("normal")) for each in causal]
    left = [finding(name, What(Part.FAMILY, "normal"), "wrong", case.to_json()) for case in cases]
    kernel = runs.KernelRun(introduction=runs.Introduction(name), verdict="fail")
    assert questions.is_refuted(kernel, left) is is_refuted


def test_a_mistake_that_a_contract_does_not_concern_leaves_the_question_and_is_told_alone(judged):
    found, _ = judged("top_left_and_scaled")
    assert found.verdict == "fail"
    assert {KernelName.parse(each.kernel).contract["causal"] for each in found.questions} == {"top_left"}
    contents = [each.content for each in found.failures if each.content]
    assert contents
    assert not any(content.get("case", content)["problem"]["causal"] for content in contents)


@pytest.mark.parametrize(
    ("name", "round", "verdict"),
    [
        ("added_top_left", 1, "question"),
        pytest.param("added_top_left", 2, "question", marks=pytest.mark.nightly),
        ("top_left_and_scaled", 2, "fail"),
        ("flash_attention_3", 1, "inconclusive"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_an_interrupted_campaign_asks_what_it_would_have_asked(tmp_path, name, round, verdict):
    """It said FAIL for what a contract explains. A part of it can fail a kernel and never passes one."""
    begun: list[int] = []
    stopped: list[str] = []

    def stops(total: int, outcome: Outcome | None) -> None:
        if outcome is None:
            begun.append(total)
        elif len(begun) == round and not stopped and (is_finding(outcome) or name == "flash_attention_3" or round == 2):
            stopped.append(outcome.task.label)
            raise KeyboardInterrupt

    with pytest.raises(verify.Interrupted) as stop:
        campaign_of(name, tmp_path, stops)
    found = stop.value.found
    (kernel,) = found.kernels
    assert (found.verdict, kernel.verdict, found.exit_code) == (verdict, verdict, 130)
    assert str(kernel.inconclusive).startswith("interrupted when ")
    assert bool(found.failures) == (verdict == "fail")
    assert bool(found.questions) == (name != "flash_attention_3")
    assert len(begun) <= round + 2


def test_a_kernel_that_declares_its_contract_is_asked_nothing(judged):
    found, _ = judged("added_top_left")
    declared = eval(found.questions[0].declaration.removeprefix("policy="), {"fa3verify": fa3verify})
    assert declared == fa3verify.Policy(**RIGHT["added_top_left"])
    again, _ = judged("added_top_left[causal=top_left,special_values=visible]")
    assert (again.verdict, again.questions, again.failures) == ("inconclusive", (), ())  # a part has no verdict


def test_the_answer_keeps_what_the_kernel_declares_already(judged):
    found, _ = judged("half_declared")
    (question,) = found.questions
    assert KernelName.parse(question.kernel).contract == {"special_values": "visible"}
    declared = eval(question.declaration.removeprefix("policy="), {"fa3verify": fa3verify})
    assert declared == fa3verify.Policy(**RIGHT["added_top_left"])


def test_a_question_of_a_part_says_on_which_part_it_rests(judged):
    found, _ = judged("added_top_left")
    part = "(seen in a part: only properties error_within_bound, special_values* and 4 cases or trials of each)"
    assert all(each.meaning.endswith(part) for each in found.questions)


def test_a_question_shows_one_case_that_fails_without_its_answer_and_holds_with_it(judged):
    found, out = judged("added_top_left")
    assert len(found.questions) == 2
    for question in found.questions:
        file = replay_files.read(out / str(question.seen.replay))
        assert not replay.run(file).holds
        assert question.meaning
        assert question.public


@pytest.mark.parametrize(
    ("answer", "verdict", "code"), [("fail", "fail", 1), ("pass", "pass", 0), ("ask", "question", 6)]
)
def test_ci_decides_what_a_question_is(judged, answer, verdict, code):
    found, _ = judged("added_top_left")
    passed = tuple(replace(kernel, verdict="pass") for kernel in found.kernels)
    answered = questions.with_questions(replace(found, kernels=passed, verdict="pass"), found.questions, answer)
    assert (answered.verdict, answered.exit_code, len(answered.questions)) == (verdict, code, 2)


def test_every_contract_is_a_value_of_its_field_and_not_flash_attention_3s():
    for contract in CONTRACTS:
        assert (
            contract.value in VALUES[contract.field][1:]
            if contract.field in VALUES
            else Sizes(combinations=(contract.value,))
        )
    assert len({(each.field, each.value) for each in CONTRACTS}) == len(CONTRACTS)


def test_the_page_of_verdicts_says_of_every_contract_who_has_it():
    page = (Path(__file__).parents[3] / "docs" / "verdict.md").read_text()
    assert [f"| {each.meaning} | {each.public} |" in page for each in CONTRACTS] == [True] * len(CONTRACTS)


@pytest.mark.parametrize(("answer", "failed"), [("ask", 2), ("fail", 2), ("pass", 0)])
def test_reports_and_junit_show_every_question_and_its_answer(judged, answer, failed):
    found, _ = judged("added_top_left")
    told = questions.with_questions(replace(found, questions=(), failures=()), found.questions, answer)
    if answer == "pass":
        told = replace(told, kernels=tuple(replace(each, verdict="pass") for each in told.kernels), verdict="pass")
    tests = ElementTree.fromstring(junit(told)).iter("testcase")
    assert sum(test.find("failure") is not None for test in tests) == failed
    pages = render(told, "").values()
    for shown in pages:
        unescaped = shown.replace("\\", "")
        assert all(unescaped.count(each.seen.kernel) and "top_left" in shown for each in found.questions)


def test_a_run_with_questions_is_read_back(judged):
    found, _ = judged("added_top_left")
    read = runs.parse(found.to_json(), "summary").questions
    written = [replace(each, seen=replace(each.seen, content=None)) for each in found.questions]  # in the replay file
    assert list(read) == written
