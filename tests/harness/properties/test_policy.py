"""Every row of the NaN and Inf policy, on the twins and on kernels that break it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels.policy import Policy
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.twins import twin
from fa3verify.properties import POLICY, Rule, Trial, replay_trial
from tests.quality.outside.declared import KERNELS

LAW = "special_values_follow_policy"
# 5 queries, 132 keys, causal: key 129 is seen by queries 2, 3 and 4; its tile is visited by all of them.
CAUSAL = {"batch": 2, "nheads": 2, "nheads_kv": 1, "seqlen_q": 5, "seqlen_k": 132, "head_dim": 64, "causal": True}


def _trial(kernel: Kernel, rule: Rule, **changes) -> Trial:
    problem = AttentionProblem(dtype=kernel.dtype, **(CAUSAL | changes))
    scheme = QuantScheme() if kernel.dtype == "e4m3" else None
    row = 2 if rule.tensor == "q" else min(129, problem.seqlen_k - 1)
    place = {"sequence": 1, "head": 0, "row": row, "channel": 7}
    return Trial(LAW, Case(kernel.name, problem, Recipe("normal"), scheme), {"rule": rule.name, **place})


def _rules(dtype: str) -> list[Rule]:
    return [rule for rule in POLICY if dtype != "e4m3" or math.isnan(rule.value)]


@pytest.mark.parametrize(
    ("dtype", "rule"),
    [pytest.param(d, rule, id=f"{d}-{rule.name}") for d in ("fp16", "bf16", "e4m3") for rule in _rules(d)],
)
def test_twin_follows_policy(dtype, rule):
    kernel = twin(dtype)
    violation = replay_trial(LAW, kernel, _trial(kernel, rule))
    assert violation is None, violation.message
    only_key = replay_trial(LAW, kernel, _trial(kernel, rule, seqlen_k=1, seqlen_q=5, causal=False))
    assert only_key is None, only_key.message


def _hides_nan(kernel: Kernel) -> Kernel:
    def run(problem, operands, config):
        out, lse = kernel.code.run(problem, operands, config)
        return np.where(np.isfinite(out), out, np.zeros(1, out.dtype)), lse

    return kernel.altered(run=run)


def _spreads_nan(kernel: Kernel) -> Kernel:
    def run(problem, operands, config):
        out, lse = kernel.code.run(problem, operands, config)
        return np.where(np.isnan(out).any(), np.full(1, np.nan, out.dtype), out), lse

    return kernel.altered(run=run)


@pytest.mark.parametrize("rule", [r for r in POLICY if r.seen != "unchanged"], ids=lambda rule: rule.name)
def test_kernel_that_hides_nan_breaks_policy(rule):
    kernel = _hides_nan(twin("fp16"))
    assert "promised" in replay_trial(LAW, kernel, _trial(kernel, rule)).message


@pytest.mark.parametrize("rule", [r for r in POLICY if r.seen == "nan"], ids=lambda rule: rule.name)
def test_kernel_that_spreads_nan_breaks_policy(rule):
    kernel = _spreads_nan(twin("fp16"))
    assert "promised: unchanged" in replay_trial(LAW, kernel, _trial(kernel, rule)).message


def test_every_rule_has_a_reason():
    assert all(rule.reason for rule in POLICY)
    assert len({rule.name for rule in POLICY}) == len(POLICY)


def test_a_low_score_that_still_has_a_weight_says_nothing():
    rule = next(rule for rule in POLICY if rule.name == "minus_inf_score")
    kernel = twin("bf16")
    trial = _trial(kernel, rule, seqlen_k=2, causal=False)
    loud = replace(trial, case=replace(trial.case, recipe=Recipe("normal", {"std": 64.0})))
    with pytest.raises(ValueError, match="does not take the trial: beside scores as large as these"):
        replay_trial(LAW, kernel, loud)


FAR = Recipe("peaky", (("gain", 30.0),))  # scores hundreds of nats apart


def _planted_far(kernel: Kernel, rule: str, recipe: Recipe = FAR) -> list[str]:
    """What the law finds where a value is planted in each of several keys, most of which have no weight."""
    problem = AttentionProblem(1, 1, 1, 5, 132, 64)
    found = []
    for row in range(0, 132, 12):
        place = {"rule": rule, "sequence": 0, "head": 0, "row": row, "channel": 7}
        found.append(replay_trial(LAW, kernel, Trial(LAW, Case(kernel.name, problem, recipe), place)))
    return [violation.message for violation in found if violation]


@pytest.mark.parametrize("rule", ["nan_in_value", "inf_in_value", "minus_inf_in_value"])
@pytest.mark.parametrize("name", ["tree", "ring"])
def test_a_value_in_a_part_of_weight_0_reaches_the_row_or_does_not(name, rule):
    """0 times NaN happens in a kernel that adds every part, and not in one that skips a part of weight 0."""
    kernel = replace(KERNELS[name].kernel, dtype="fp16")
    assert not _planted_far(kernel, rule)
    never = kernel.altered(run=partial(_with, kernel, skip=-1.0))
    assert not _planted_far(never, rule)


def test_a_value_in_a_part_that_has_weight_must_reach_the_row():
    kernel = KERNELS["tree"].kernel
    skips = kernel.altered(run=partial(_with, kernel, skip=1e-5))
    near = Recipe("peaky", (("gain", 6.0),))
    assert not _planted_far(kernel, "nan_in_value", near)
    assert any("promised" in message for message in _planted_far(skips, "nan_in_value", near))
    hides = kernel.altered(run=_hides_nan(kernel).code.run)
    assert any("promised" in message for message in _planted_far(hides, "nan_in_value"))


def _with(kernel: Kernel, *call, **options):
    """Run a kernel of arrays whose function has other options."""
    code = kernel.code
    return replace(code, function=partial(code.function, **options)).run(*call)


@pytest.mark.parametrize(("declared", "is_right"), [("-inf", False), ("+inf", True), ("undefined", True)])
def test_a_row_whose_sum_is_0_has_the_lse_that_is_declared_of_rows_without_a_key(declared, is_right):
    """FlashAttention-2 writes +inf wherever a row sum is 0, also beside a lone score of -inf."""
    kernel = replace(KERNELS["plus_infinity"].kernel, policy=Policy(empty_lse=declared))
    rule = next(rule for rule in POLICY if rule.name == "minus_inf_score")
    found = replay_trial(LAW, kernel, _trial(kernel, rule, seqlen_q=2, seqlen_k=1, causal=False, nheads=1))
    assert (found is None) == is_right
    zero = kernel.altered(run=partial(_with, kernel, lse_of_none=0.0))
    found = replay_trial(LAW, zero, _trial(kernel, rule, seqlen_q=2, seqlen_k=1, causal=False, nheads=1))
    assert (found is None) == (declared == "undefined")


def test_rows_without_a_key_show_no_effect_where_nothing_is_declared_of_them():
    """Their bits are whatever memory held, so that they differ from those of the call without the planted value."""
    sound = twin("fp16")
    calls = count()

    def garbage(problem, operands, config):
        out, lse = (x.copy() for x in sound.code.run(problem, operands, config))
        out[:, 0] = lse[..., 0] = next(calls)  # 4 queries over 3 keys: the first one sees none
        return out, lse

    rule = next(rule for rule in POLICY if rule.name == "nan_in_key")
    trial = _trial(sound, rule, seqlen_q=4, seqlen_k=3)
    silent = replace(sound.altered(run=garbage), policy=Policy(empty_out="undefined", empty_lse="undefined"))
    assert replay_trial(LAW, silent, trial) is None
    assert "promised: unchanged" in replay_trial(LAW, sound.altered(run=garbage), trial).message
