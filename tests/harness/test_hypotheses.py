"""What is assumed of a kernel that states no order: whose sums, and hypotheses about all of it at once."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fa3_reference.bounds.model import BackwardModel, KernelModel
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme
from fa3verify import records
from fa3verify.campaign import replay_files
from fa3verify.campaign.introduction import introduce
from fa3verify.campaign.plan import JudgeFamily, SearchLaw, judge_cases
from fa3verify.campaign.replay_files import ReplayFile
from fa3verify.campaign.results import HypothesisRow, JudgedCases, refutations, settle
from fa3verify.campaign.run import Introduction, Run, parse
from fa3verify.campaign.summary import summarize
from fa3verify.campaign.tasks import Outcome, is_finding
from fa3verify.cases.case import Case
from fa3verify.commands import replay
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.hypotheses import sums_of, under
from fa3verify.judging.judgement import judge, passes
from fa3verify.judging.verdict import Part, Seen, What
from fa3verify.kernels import twins
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.record import Kernel
from fa3verify.known import registry
from fa3verify.known.registry import find
from fa3verify.operations import forward
from fa3verify.properties import LawOutcome, Trial, Violation, find_law, replay_trial, run_law
from fa3verify.report.build import render

PLAIN, ROUNDED = "the row sum adds P", "the row sum adds the rounded P"
FAMILIES = ("normal", "peaky", "sink", "offset_v")
LAW = "error_within_bound"


def softmax(q, k, v, *, softmax_scale, causal, is_rounded):
    """Attention in binary32 of 16-bit arrays, whose row sum is of P or of the P that meets V."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float32), group, 1) for x in (k, v))
    s = q.astype(np.float32) @ k.swapaxes(-1, -2) * np.float32(softmax_scale)
    if causal:
        rows, keys = s.shape[-2:]
        s = np.where(np.tri(rows, keys, keys - rows, dtype=bool), s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-1e30)
    p = np.exp(s - top, dtype=np.float32)
    stored = p.astype(q.dtype)
    total = (stored if is_rounded else p).sum(-1, keepdims=True, dtype=np.float32)
    some = np.maximum(total, np.float32(1e-30))
    out = np.where(total > 0, stored.astype(np.float32) @ v / some, 0).astype(q.dtype)
    return out, np.where(total > 0, top + np.log(some), -np.inf)[..., 0].astype(np.float32)


def of_p(q, k, v, **options):
    return softmax(q, k, v, **options, is_rounded=False)


def of_rounded_p(q, k, v, **options):
    return softmax(q, k, v, **options, is_rounded=True)


def now_so_now_otherwise(q, k, v, *, causal, **options):
    return softmax(q, k, v, causal=causal, **options, is_rounded=causal)


def kernel_of(function, **facts) -> Kernel:
    (kernel,) = array_kernel(function, dtypes=("bf16",), name="mine", **facts)
    return kernel


def cut(terms):
    """Sum the last axis as a tensor core that keeps 13 bits below the largest term, and cuts what is below them."""
    top = np.frexp(np.abs(terms).max(-1, keepdims=True))[1]
    quantum = np.ldexp(1.0, top - 1 - 13)
    return (np.trunc(terms / quantum) * quantum).sum(-1)


def product(a, b):
    """Multiply (..., m, k) and (..., n, k) in steps of 32, each on top of the sum so far."""
    total = np.zeros((*a.shape[:-1], b.shape[-2]))
    for i in range(0, a.shape[-1], 32):
        terms = a[..., :, None, i : i + 32] * b[..., None, :, i : i + 32]
        total = cut(np.concatenate([total[..., None], terms], -1))
    return total.astype(np.float32)


def fp8(q, k, v, *, softmax_scale, q_descale, k_descale, v_descale):
    """Attention of e4m3 arrays with both products in a tensor core of 13 bits, P in e4m3 and the rest in binary32."""
    stored, values = q.dtype, [x.astype(np.float64) for x in (q, k, v)]
    scale = (q_descale * k_descale * np.float32(softmax_scale))[..., None, None]
    s = product(values[0], values[1]) * scale
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top, dtype=np.float32)
    out = product(p.astype(stored).astype(np.float64), values[2].swapaxes(-1, -2)) * v_descale[..., None, None]
    total = p.sum(-1, keepdims=True)
    return (out / total).astype(FORMATS["bf16"].dtype), (top + np.log(total))[..., 0].astype(np.float32)


def honest_fp8(**facts) -> Kernel:
    (kernel,) = array_kernel(fp8, dtypes=("e4m3",), features=(), min_seqlen=1, **facts)
    return kernel


@pytest.fixture
def judged(monkeypatch):
    """Return the summary of a small campaign of a kernel: cases by family, then trials of one property."""

    def run(kernel: Kernel, *cases: Case, examples: int = 0, seed: int = 0) -> dict:
        monkeypatch.setattr(registry, "find", lambda name: kernel)
        known = replace(introduce(kernel.name, "quick"), claims=(), covers=False)
        outcomes = [
            Outcome(JudgeFamily(kernel=kernel.name, family=family, profile="quick", seed=0), JudgedCases(tuple(found)))
            for family in FAMILIES
            if (found := judge_cases(kernel, family, [case for case in cases if family_of(case) == family]))
        ]
        if examples:
            law = SearchLaw(kernel=kernel.name, law=LAW, max_examples=examples, seed=seed)
            outcomes.append(Outcome(law, law.run()))
        outcomes = [
            replace(o, value=o.task.read(json.loads(json.dumps(records.plain(o.value, private=True)))))
            for o in outcomes
        ]
        summary = summarize([known], outcomes, None, profile="quick", seed=0)
        return replace(summary, started="2026-11-23T00:00:00+00:00")

    return run


def family_of(case: Case) -> str:
    return case.recipe.distribution if case.recipe.distribution in FAMILIES else "normal"


def case_of(kernel: Kernel, family: str = "normal", *, causal: bool = False, **sizes: int) -> Case:
    shape = {"batch": 1, "nheads": 2, "nheads_kv": 1, "seqlen_q": 40, "seqlen_k": 200, "head_dim": 64} | sizes
    problem = AttentionProblem(**shape, causal=causal, dtype=kernel.dtype)
    scheme = QuantScheme("head") if kernel.dtype == "e4m3" else None
    return Case(kernel.name, problem, Recipe(family), scheme)


def two_cases(kernel: Kernel) -> tuple[Case, Case]:
    """Cases that tell the two row sums apart: out of two weights and V of one sign, and lse of many weights."""
    return case_of(kernel, "offset_v", seqlen_k=2), case_of(kernel, causal=True)


def row(summary: Run, hypothesis: str) -> HypothesisRow:
    (found,) = (x for x in summary.kernels[0].assumed.hypotheses if x.name == hypothesis)
    return found


def test_an_honest_fp8_kernel_passes_with_the_sums_of_its_machine_and_without_them_the_finding_names_what_was_assumed(
    judged,
):
    for accumulator in ("either", "wgmma"):
        kernel = honest_fp8(accumulator=accumulator)
        summary = judged(kernel, *(case_of(kernel, family, nheads_kv=2, seqlen_k=70) for family in FAMILIES))
        assert summary.failures == ()
        assert "(declared); surviving" in summary.kernels[0].assumption
    kernel = honest_fp8()
    summary = judged(kernel, *(case_of(kernel, family, nheads_kv=2, seqlen_k=70) for family in FAMILIES))
    assert summary.verdict == "fail"
    told = [failure.message for failure in summary.failures]
    assert any("assumed: any order, sums in binary32 (device: CPU)" in message for message in told), told
    assert all(message.startswith("family ") for message in told)


def test_a_row_sum_of_rounded_weights_passes_and_every_page_says_which_hypothesis_survives(judged):
    kernel = kernel_of(of_rounded_p)
    summary = judged(kernel, *(case_of(kernel, f, causal=c) for f in FAMILIES for c in (False, True)), examples=3)
    assert summary.failures == ()
    assert row(summary, ROUNDED).refuted_by is None
    assert row(summary, PLAIN).refuted_by.ratio > 1
    line = summary.kernels[0].assumption
    assert line.startswith(
        f"bound of any order, sums in binary32 (device: CPU); surviving: {ROUNDED}; refuted: {PLAIN} ("
    )
    pages = render(parse(json.loads(json.dumps(summary.to_json())), "summary"), "0" * 64)
    assert all(f"surviving: {ROUNDED}" in " ".join(page.split()) for page in pages.values())


def test_a_kernel_that_fits_another_hypothesis_in_another_case_fails_and_the_finding_says_which_case_refutes_which(
    judged,
):
    kernel = kernel_of(now_so_now_otherwise)
    dense, causal = two_cases(kernel)
    for case in (dense, causal):
        assert passes(kernel, judge(kernel, case).measures)
        assert judged(kernel, case).failures == ()
    summary = judged(kernel, dense, causal)
    assert summary.verdict == "fail"
    assert summary.layers["L1"] == "fail"
    (whole,) = (f for f in summary.failures if "whole kernel" in f.what.subject)
    for name, case in ((PLAIN, causal), (ROUNDED, dense)):
        assert f"{name!r} is refuted by" in whole.message
        assert case.describe() in whole.message
    body = ReplayFile(kernel.name, whole.what, json.loads(json.dumps(whole.content)))
    holds, message, _ = replay.run(body)
    assert not holds
    assert "no hypothesis about the whole kernel holds" in message
    for failure in summary.failures:
        assert not replay.run(ReplayFile(kernel.name, failure.what, failure.content))[0]


def test_a_finding_about_the_whole_kernel_holds_where_it_is_replayed_on_a_kernel_of_one_order(judged, monkeypatch):
    kernel = kernel_of(now_so_now_otherwise)
    summary = judged(kernel, *two_cases(kernel))
    (whole,) = (f for f in summary.failures if "whole kernel" in f.what.subject)
    for mended in (kernel_of(of_p), kernel_of(of_rounded_p), find_twin("bf16")):
        monkeypatch.setattr(registry, "find", lambda name, mended=mended: mended)
        assert replay.run(ReplayFile("mine", whole.what, whole.content))[0]


def find_twin(dtype):
    return twins.twin(dtype, name="mine")


def test_a_replay_gives_the_figures_of_its_campaign_and_says_where_it_assumes_other_sums(judged, monkeypatch, tmp_path):
    kernel = honest_fp8()
    found = judged(kernel, case_of(kernel, "peaky", nheads_kv=2, seqlen_k=70))
    summary = replay_files.write_all(found, tmp_path)
    body = replay_files.read(tmp_path / summary.failures[0].replay)
    holds, message, _ = replay.run(body)
    assert not holds
    assert "the file's bound" not in message
    (family,) = summary.kernels[0].families
    figures = replay.run(replay_files.read(tmp_path / family.replay))[2]
    assert figures["ratio_lse_max"] == family.figures["ratio_lse_max"]
    monkeypatch.setattr(registry, "find", lambda name: honest_fp8(accumulator="either"))
    holds, message, _ = replay.run(body)
    assert holds
    assert "the file's bound assumed sums in binary32 (device: CPU), here it is sums of Hopper's" in message


def test_trials_of_a_property_that_refute_different_hypotheses_are_one_finding_with_one_replay(judged, monkeypatch):
    kernel = kernel_of(now_so_now_otherwise)
    monkeypatch.setattr("fa3verify.properties.runner.MAX_SHRINK_TRIALS", 0)
    summary = judged(kernel, examples=29, seed=2)
    found = {str(failure.what): failure for failure in summary.failures}
    assert "refuted before" in found[f"law {LAW}"].message
    for what, failure in found.items():
        assert not replay.run(ReplayFile(kernel.name, failure.what, failure.content))[0], what


def test_a_kernel_that_raises_where_hypotheses_were_refuted_does_not_hold(monkeypatch):
    def raises(*call):
        raise RuntimeError("no")

    kernel = kernel_of(of_p)
    monkeypatch.setattr(registry, "find", lambda name: kernel.altered(run=raises))
    content = refutations([case.to_json() for case in two_cases(kernel)])
    again = replay.run(ReplayFile(kernel.name, What.from_json("L1 whole kernel error / bound"), content))
    assert not again.holds
    assert "RuntimeError: no" in again.message


def test_a_hypothesis_is_refuted_by_what_speaks_most_against_it():
    case = case_of(kernel_of(of_p))

    def law(name, ratio):
        return LawOutcome(
            name, "fail", hypotheses={PLAIN: (Trial(name, case), Violation(name, Seen("out", ratio=ratio)))}
        )

    found = settle([], [law("first", 2.0), law("worst", 3.0), law("last", 1.5)])
    assert found is not None
    (only,) = found.hypotheses
    assert (only.name, only.worst_ratio, only.refuted_by.what) == (PLAIN, 3.0, What(Part.LAW, "worst"))
    assert only.refuted_by.content == Trial("worst", case).to_json()


def test_one_trial_is_judged_by_whichever_hypothesis_holds_and_the_kernel_runs_once():
    kernel, runs = kernel_of(of_rounded_p), []
    counting = kernel.altered(run=lambda *given: runs.append(1) or kernel.code.run(*given))
    case = case_of(kernel, seqlen_k=400)
    assert replay_trial(LAW, counting, Trial(LAW, case)) is None
    assert len(runs) == 1
    assert run_law(find_law(LAW), kernel, max_examples=20, seed=0).hypotheses[ROUNDED] is None


def test_a_wrong_kernel_is_a_finding_of_one_case_under_every_hypothesis(judged):
    def wrong(q, k, v, **options):
        out, lse = of_p(q, k, v, **options)
        return out, lse + np.float32(0.1)

    kernel = kernel_of(wrong)
    summary = judged(kernel, case_of(kernel))
    assert [str(failure.what) for failure in summary.failures] == ["L1 lse error / bound"]
    assert summary.failures[0].content == case_of(kernel).to_json()
    (record,) = judge_cases(kernel, "normal", [case_of(kernel)])
    assert is_finding(
        Outcome(JudgeFamily(kernel="k", family="normal", profile="quick", seed=0), JudgedCases((record,)))
    )
    broken = replay_trial(LAW, kernel, Trial(LAW, case_of(kernel)))
    assert "assumed: any order, sums in binary32 (device: CPU), the row sum adds" in broken.message


def test_a_stated_order_is_the_only_hypothesis_and_its_summary_has_no_word_of_others(judged):
    kernel = find("twin.fp16")
    assert under(kernel) == {}
    summary = judged(kernel, replace(case_of(kernel), kernel="twin.fp16"), examples=2)
    assert summary.verdict != "fail"
    body = summary.to_json()
    assert "assumed" not in body["kernels"][0]
    assert not any("hypotheses" in part for part in (*body["cases"], *body["kernels"][0]["laws"]))
    assert not any("whole kernel" in gate.rule for gate in summary.gate)
    assert judge(kernel, case_of(kernel)).hypotheses == {}


@pytest.mark.parametrize(
    ("facts", "match"),
    [
        ({"accumulator": "bf16"}, "accumulator must be among fp32, wgmma, either, tf32, got 'bf16'"),
        (
            {"accumulator": "fp32", "order": forward.order_of_family},
            r"mine\.bf16 takes no accumulator, got 'fp32': its order",
        ),
        (
            {"order": KernelModel.any_order("bf16", "bf16")},
            "such as lambda config: KernelModel",
        ),
    ],
)
def test_an_order_that_is_no_function_or_an_accumulator_that_contradicts_one_or_says_nothing_is_refused(facts, match):
    with pytest.raises(ValueError, match=match):
        kernel_of(of_p, **facts)


@pytest.mark.optional
@pytest.mark.parametrize(
    ("capability", "dtype", "accumulator"),
    [
        ((9, 0), "bf16", "either"),
        ((9, 0), "e4m3", "either"),
        ((8, 9), "e4m3", "either"),
        ((8, 0), "bf16", "either"),
        ((8, 0), "e4m3", "fp32"),
        ((10, 0), "e4m3", "fp32"),
    ],
)
def test_the_device_says_whose_sums_are_assumed_and_a_declaration_goes_before_it(
    monkeypatch, capability, dtype, accumulator
):
    from fa3verify.tensors import convert as tensors

    monkeypatch.setattr(
        tensors, "gpu_of", lambda device: SimpleNamespace(name="NVIDIA X", major=capability[0], minor=capability[1])
    )
    (kernel,) = array_kernel(of_p, dtypes=(dtype,), library="torch", device="cuda")
    sums = sums_of(kernel)
    assert sums.accumulator == accumulator
    assert ("not measured" in str(sums)) == (capability != (9, 0))
    assert "device: NVIDIA X" in str(sums)
    assert sums_of(replace(kernel, accumulator="wgmma"))[:2] == ("wgmma", "declared")
    assert sums_of(replace(kernel, device="cpu")).accumulator == "fp32"


def test_a_shard_keeps_what_was_assumed_so_that_one_of_another_device_is_foreign():
    known = Introduction("k", accumulator="either", sums="sums of Hopper's tensor core or in binary32 (device: A)")
    assert (
        records.read(
            Introduction, json.loads(json.dumps(records.plain(known, private=True))), "kernel", private=True
        ).sums
        == known.sums
    )


@pytest.mark.parametrize("gradients", ["given", "own"])
def test_gradients_have_the_hypotheses_of_their_forward(gradients):
    (kernel,) = array_kernel(of_p, dtypes=("bf16",), gradients=gradients)
    problem = AttentionProblem(1, 1, 1, 4, 4, 64, dtype="bf16")
    expected = BackwardModel.hypotheses("bf16", gradients, "fp32")
    assert {name: side.order(kernel.code.configure(problem)) for name, side in under(kernel).items()} == expected
