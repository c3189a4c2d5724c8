"""The number that ranks: defined by hand-made rows, right in order for known kernels, one line of text."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from fa3_reference.formats import FORMATS, encode, round_to, ulp
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme
from fa3verify import operations
from fa3verify.campaign.introduction import introduce
from fa3verify.campaign.junit import junit
from fa3verify.campaign.plan import JudgeFamily
from fa3verify.campaign.profiles import PROFILES, family_cases, judged_cases
from fa3verify.campaign.summary import summarize
from fa3verify.campaign.tasks import Outcome
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging import bits_lost, metrics
from fa3verify.judging.family import CaseResult, pooled
from fa3verify.judging.judgement import judge
from fa3verify.kernels import calls
from fa3verify.kernels.record import Kernel
from fa3verify.known.registry import find
from fa3verify.report.words import bits_line

FP16 = FORMATS["fp16"]
HALF_ULP, ULP = 2.0**-11, 2.0**-10  # of fp16 in [1, 2)


def lost(out, truth, judged=None):
    truth = np.asarray(truth)
    judged = np.ones(truth.shape, bool) if judged is None else np.asarray(judged)
    rounded = round_to(truth, FP16, "ieee")
    return bits_lost.of_rows(np.asarray(out) - truth, rounded - truth, ulp(truth, FP16), judged)[0]


@pytest.mark.parametrize(
    ("out", "truth", "bits"),
    [
        pytest.param([[1.0, 1.0]], [[1 + HALF_ULP, 1.0]], 0.0, id="the rounded truth loses nothing"),
        pytest.param([[1 + 2 * ULP]], [[1 + HALF_ULP]], math.log2(3), id="three times the error of the ideal"),
        pytest.param([[1 + ULP]], [[1.0]], math.log2(math.sqrt(12)), id="an exact row counts an average rounding"),
        pytest.param([[1 + 2 * ULP], [1.0]], [[1 + HALF_ULP], [1.0]], math.log2(3) / 2, id="the mean is over rows"),
        pytest.param([[3e4, 1.0]], [[3e4, 1 + HALF_ULP]], 0.0, id="rows of unlike values"),
        pytest.param([[0.0]], [[0.0]], 0.0, id="zeros"),
        pytest.param([[np.inf]], [[1.0]], math.inf, id="an infinite output"),
        pytest.param([[np.nan, 1.0]], [[1.0, 1.0]], math.inf, id="a NaN"),
    ],
)
def test_bits_lost_are_those_worked_out_by_hand(out, truth, bits):
    assert lost(out, truth) == pytest.approx(bits, abs=1e-12)


def test_an_exact_zero_that_comes_back_has_no_error():
    """Without keys the truth is 0, of which no share can be taken."""
    nothing = Case("twin.fp16", AttentionProblem(1, 1, 1, 4, 0, 64), Recipe("normal"))
    measures = judge(find("twin.fp16"), nothing).measures
    assert {measures[f"rel_rmse_{name}"] for name in ("seen", "ideal", "unrounded")} == {0.0}


def test_what_is_not_judged_does_not_count():
    assert lost([[np.nan, 1.0], [9.0, 9.0]], [[1.0, 1.0], [1.0, 1.0]], [[False, True], [False, False]]) == 0.0


def test_a_large_row_does_not_hide_a_small_one():
    """Pooled over both rows the error of the second would be 1e-4 of the first's, and nothing lost."""
    truth = [[1024 * (1 + HALF_ULP)], [1 + HALF_ULP]]
    assert lost([[1024.0], [1 + 8 * ULP]], truth) == pytest.approx(math.log2(15) / 2)


PROBLEMS = {
    "fp16": AttentionProblem(1, 2, 1, 40, 200, 64, dtype="fp16", causal=True),
    "e4m3": AttentionProblem(1, 2, 2, 40, 400, 64, dtype="e4m3", causal=True),
}
RECIPES = (Recipe("normal"), Recipe("offset_v"))
SCHEMES = {"fp16": None, "e4m3": QuantScheme("head")}


def ideal(kernel: Kernel) -> Kernel:
    """A kernel that computes in float64 and rounds its output once."""
    forward = operations.find("forward")

    def run(problem, operands, config):
        exact = forward.truth(problem, operands.dequantized(problem), config, {})
        return {
            "out": encode(exact["out"], FORMATS[config.out_dtype], "ieee"),
            "lse": exact["lse"].astype(np.float32),
        }

    return kernel.altered(run=run)


def descaled_wrong(kernel: Kernel) -> Kernel:
    """A kernel that takes the descale of V of one head of one sequence for 1 % more than it is."""

    def run(problem, operands, config):
        values = operands.v_descale.values.copy()
        values[0, 0] *= np.float32(1.01)
        return kernel.code.run(problem, replace(operands, v_descale=replace(operands.v_descale, values=values)), config)

    return kernel.altered(run=run)


KERNELS = {
    "ideal": lambda dtype: ideal(find(f"twin.{dtype}")),
    "ours": lambda dtype: find(f"twin.{dtype}"),
    "chained": lambda dtype: find("twin.flash3.e4m3"),
    "one descale wrong": lambda dtype: descaled_wrong(find("twin.e4m3")),
    "truncated P": lambda dtype: find(f"twin.{dtype}+truncated_p"),
    "bf16 P": lambda dtype: find("twin.fp16+bf16_p"),
}


@cache
def number(name: str, dtype: str) -> float:
    """Mean of bits lost over the recipes; no bound is needed, and one of 1 leaves every output in."""
    kernel, problem, forward = KERNELS[name](dtype), PROBLEMS[dtype], operations.find("forward")
    bits = []
    for recipe in RECIPES:
        operands = Case(kernel.name, problem, recipe, SCHEMES[dtype]).draw()[1].operands
        config = kernel.config_for(problem)
        got = calls.run(kernel, problem, operands, config)
        seen = forward.truth(problem, operands.dequantized(problem), config, got)
        bound = {output: np.ones(x.shape) for output, x in seen.items()}
        bits.append(metrics.figures(forward, got, seen, None, bound, config)["bits_lost"])
    return float(np.mean(bits))


@pytest.mark.parametrize(
    ("dtype", "order"),
    [
        ("fp16", ("ideal", "ours", "truncated P", "bf16 P")),
        ("e4m3", ("ideal", "ours", "chained", "one descale wrong", "truncated P")),
    ],
)
def test_bits_lost_rank_kernels_from_the_ideal_one_down(dtype, order):
    bits = [number(name, dtype) for name in order]
    assert bits[0] == 0.0
    assert bits == sorted(bits)
    assert min(np.diff(bits)) > 0.005, dict(zip(order, bits, strict=True))


def test_every_seed_judges_the_cases_that_bits_lost_are_over():
    kernel, quick = find("twin.fp16"), PROFILES["quick"]
    own = family_cases(kernel, "normal", quick, 0)
    assert judged_cases(kernel, "normal", quick, 0) == own
    assert judged_cases(kernel, "normal", quick, 7) == [*family_cases(kernel, "normal", quick, 7), *own]
    real = "activations:all-MiniLM-L6-v2"  # has no draw
    assert judged_cases(kernel, real, quick, 7) == family_cases(kernel, real, quick, 0)


def record(seed, bits, outputs=10, **changes):
    names = dict.fromkeys(metrics.MEASURES, 0.0)
    case = Case(
        "twin.fp16", AttentionProblem(1, 1, 1, 1, 8, 64), Recipe("normal", seed=seed), None, tuple(changes.items())
    )
    return CaseResult("normal", case, names | {"bits_lost": bits, "outputs": outputs})


def lost_by(*records):
    return pooled(records, operations.find("forward"))["bits_lost"]


def test_a_family_loses_what_its_cases_of_seed_0_in_their_own_format_lose():
    records = [record(0, 1.0, 30), record(0, 2.0), record(7, 9.0), record(0, 9.0, out_dtype="fp16")]
    assert lost_by(*records) == 1.25
    assert lost_by(*records[2:]) is None
    assert lost_by(*records, record(0, math.inf)) == math.inf


def test_a_mean_over_fewer_families_than_there_are_is_no_number():
    bits = {"a": 1.0, "b": 2.5, "cover": 9.0}
    told = bits_lost.BitsLost(1.75, 2.5, "b", 2)
    assert bits_lost.of_kernel(bits, ["a", "b"]) == told
    assert bits_lost.of_kernel(bits, ["a", "b", "c"]) is None
    endless = bits_lost.of_kernel(bits | {"b": math.inf}, ["a", "b"])
    assert endless == replace(told, mean=math.inf, worst=math.inf)


def test_bits_lost_stand_in_the_summary_and_in_junit_unless_it_is_of_a_part():
    kernel = replace(introduce("twin.bf16", "quick"), families=("peaky",))
    task = JudgeFamily(kernel="twin.bf16", family="peaky", profile="quick", seed=0, limit=1)
    outcomes = [Outcome(task, task.run())]
    summary = summarize([kernel], outcomes, None, profile="quick", seed=0)
    lost = summary.kernels[0].bits_lost
    assert lost is not None
    assert 0 < lost.mean == lost.worst < 0.1
    suite = next(iter(ElementTree.fromstring(junit(summary))))
    properties = {each.get("name"): each.get("value") for each in suite.find("properties")}
    assert properties["twin.bf16.bits_lost.mean"] == str(lost.mean)
    assert properties["twin.bf16.bits_lost.worst_family"] == "peaky"
    part = summarize([replace(kernel, narrowed="a part")], outcomes, None, profile="quick", seed=0)
    assert part.kernels[0].bits_lost is None
    lacking = summarize([replace(kernel, families=("peaky", "ties"))], outcomes, None, profile="quick", seed=0)
    assert lacking.kernels[0].bits_lost is None


def test_a_quantiser_has_no_number_for_its_truth_follows_its_own_scales():
    records = JudgeFamily(kernel="twin.quantize", family="normal", profile="quick", seed=0, limit=1).run().records
    assert pooled(records, operations.find("quantize"))["bits_lost"] is None


def kernel(name, mean, worst=1.0):
    lost = None if mean is None else bits_lost.BitsLost(mean, worst, "ramp", 2)
    return SimpleNamespace(name=name, dtype="fp16", bits_lost=lost)


def test_one_line_ranks_kernels_the_one_that_loses_most_first():
    two = bits_line([kernel("a", 0.126), kernel("b", math.inf, math.inf), kernel("c", None)])
    head = "bits lost over the ideal kernel of each format (and in its worst family): "
    assert two == head + "b infinitely many (ramp infinitely many), a 0.13 (ramp 1.00)"
    many = bits_line([kernel(str(i), i) for i in range(6)])
    assert many.endswith("2 2.00 (ramp 1.00), and 2 more")
    assert bits_line([kernel("c", None)]) == ""
    assert bits_line([kernel("a", 0.141, 0.41)]) == "a loses 0.14 bits over the ideal fp16 kernel, most in ramp: 0.41"
