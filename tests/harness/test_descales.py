"""Which descales a kernel is given: those that it claims to take, and none that it would be judged wrong by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import find, given, settings, strategies as st
from ml_dtypes import bfloat16

import fa3verify
from fa3_reference.problem import AttentionProblem, Descale
from fa3_reference.quantize import QuantScheme
from fa3verify.campaign.profiles import PROFILES
from fa3verify.campaign.replay_files import ReplayFile
from fa3verify.cases.case import Case
from fa3verify.commands.replay import run as replayed
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import judge, passes
from fa3verify.judging.verdict import What
from fa3verify.kernels.calls import run
from fa3verify.kernels.functions import array_kernel
from fa3verify.known import registry
from fa3verify.properties import find_law, run_law
from fa3verify.properties.law import Trial
from fa3verify.properties.trials import Wanted, small_cases

GROUPED = AttentionProblem(2, 4, 2, 9, 70, 64, dtype="e4m3", causal=True)
# Query heads differ by factors of two, so that a scale of another head is never nearly right.
RECIPE = Recipe("outlier_channels", seed=3)
EACH = QuantScheme("query_head")
FEW = settings(derandomize=True, database=None, deadline=None, max_examples=40)


def case_of(kernel: str, scheme: QuantScheme, problem: AttentionProblem = GROUPED, **changes) -> Case:
    return Case(kernel, problem, RECIPE, scheme, tuple(sorted(changes.items())))


@pytest.mark.parametrize("pack_gqa", [False, True])
@pytest.mark.parametrize("granularity", ["query_head", "tensor"])
def test_the_twin_takes_scales_of_layers_and_of_query_heads(granularity, pack_gqa):
    judged = fa3verify.judge("twin.e4m3", GROUPED, RECIPE, scheme=QuantScheme(granularity), pack_gqa=pack_gqa)
    assert 0 < judged.measures["ratio_max"] < 1


def _of_the_first_head(problem, operands, config):
    """A kernel that reads one descale for the query heads of a group, as FlashAttention-3's interface has them."""
    values = np.repeat(operands.q_descale.values[:, :: problem.group], problem.group, axis=1)
    kernel = registry.find("twin.e4m3")
    return kernel.code.run(problem, replace(operands, q_descale=Descale(values, 0)), config)


def test_a_kernel_that_reads_one_scale_for_a_group_fails_where_it_claims_more_and_is_not_asked_where_it_does_not():
    claims = replace(registry.find("twin.e4m3").altered(run=_of_the_first_head), name="kernel")
    assert not passes(claims, judge(claims, case_of("kernel", EACH)).measures)
    honest = replace(claims, features=claims.features - {"query_head_descale", "block_descale"})
    with pytest.raises(ValueError, match=r"kernel does not claim query_head_descale: kernel b2 h4/2"):
        judge(honest, case_of("kernel", EACH))
    with pytest.raises(ValueError, match="does not claim block_descale"):
        judge(honest, case_of("kernel", QuantScheme("block")))
    for granularity in ("head", "tensor"):
        assert passes(honest, judge(honest, case_of("kernel", QuantScheme(granularity))).measures)


def test_query_heads_that_share_no_keys_ask_for_nothing_more_than_scales_by_kv_head():
    alone = replace(GROUPED, nheads_kv=4)
    assert not case_of("k", EACH, alone).needed_descales
    assert case_of("k", EACH).needed_descales == {"query_head_descale"}
    assert case_of("k", QuantScheme("row")).needed_descales == {"block_descale"}


def test_released_fp8_kernels_are_not_judged_by_scales_their_interface_lacks():
    with pytest.raises(ValueError, match=r"twin\.flash3\.e4m3 does not claim query_head_descale"):
        fa3verify.judge("twin.flash3.e4m3", GROUPED, RECIPE, scheme=EACH)
    assert fa3verify.judge("twin.flash3.e4m3", GROUPED, RECIPE, scheme=QuantScheme("tensor")).measures["ratio_max"] < 1


def test_a_trial_with_other_scales_says_nothing_of_a_kernel_that_does_not_claim_them():
    trial = Trial("repeated_run_is_identical", case_of("twin.e4m3", EACH))
    body = ReplayFile("twin.e4m3", What.from_json(f"law {trial.law}"), trial.to_json())
    assert replayed(body).holds
    with pytest.raises(ValueError, match=r"does not take the trial: .* does not claim query_head_descale"):
        replayed(body, "twin.flash3.e4m3")


@given(st.data())
@FEW
def test_a_kernel_is_sent_only_the_scales_that_it_claims(data):
    kernel = replace(registry.find("twin.e4m3"), features=frozenset({"gqa", "causal"}))
    case = data.draw(small_cases(kernel, Wanted(grouped=True, descales="uniform")))
    assert not case.needed_descales


@pytest.mark.parametrize("name", ["twin.e4m3", "twin.quantize"])
def test_scales_of_query_heads_are_among_the_trials_of_kernels_that_claim_them(name):
    kernel = registry.find(name)
    told = find(
        small_cases(kernel, Wanted()),
        lambda case: "query_head_descale" in case.needed_descales,
        settings=FEW,
    )
    assert told.problem.group > 1
    assert passes(kernel, judge(kernel, told).measures)


def test_the_quantiser_is_judged_by_scales_of_query_heads():
    judged = fa3verify.judge("twin.quantize", GROUPED, RECIPE, scope="query_head", rotate=True)
    assert judged.measures["ratio_max"] < 1
    assert judged.measures["ratio_q_descale_max"] <= 1
    grouped = run(
        registry.find("twin.quantize"), GROUPED, judged.operands, replace(_config(), scope="head", rotate=True)
    )
    assert not np.array_equal(grouped["q_descale"], judged.outputs["q_descale"])
    left_out = fa3verify.judge(
        "twin.quantize+rounded_down_descale", GROUPED, RECIPE, scope="query_head", scale="power_of_two"
    )
    assert left_out.measures["ratio_q_descale_max"] > 1


def _config():
    return registry.find("twin.quantize").code.configure(GROUPED)


def plain_kernel(elsewhere: str = "", read=lambda descale: descale):
    """A user's kernel in float32 that states no order; one of its descales may be read at another place."""

    def attention(q, k, v, *, softmax_scale, **descales):
        if elsewhere:
            descales[elsewhere] = read(descales[elsewhere]).reshape(descales[elsewhere].shape)
        q, k, v = (
            x.astype(np.float32).repeat(q.shape[1] // x.shape[1], axis=1)
            * descales[name].repeat(q.shape[1] // k.shape[1], axis=1)[:, :, None, None]
            for x, name in ((q, "q_descale"), (k, "k_descale"), (v, "v_descale"))
        )
        s = q @ k.swapaxes(-1, -2) * np.float32(softmax_scale)
        p = np.exp(s - s.max(-1, keepdims=True))
        return (p @ v / p.sum(-1, keepdims=True)).astype(bfloat16)

    return array_kernel(attention, dtypes=("e4m3",), features=("gqa",), min_seqlen=1)[0]


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
@pytest.mark.parametrize("read", [np.transpose, lambda x: np.roll(x, 1, axis=1)], ids=["transposed", "next head's"])
def test_a_descale_read_for_another_sequence_or_head_is_found_in_the_first_trials(name, read):
    law, trials = find_law("descales_reach_their_heads"), PROFILES["quick"].law_examples
    assert run_law(law, plain_kernel(), max_examples=trials, seed=0).status == "pass"
    outcome = run_law(law, plain_kernel(name, read), max_examples=trials, seed=0, shrink_seconds=0)
    assert outcome.violation is not None
    assert outcome.violation.failure is None, outcome.violation.message
