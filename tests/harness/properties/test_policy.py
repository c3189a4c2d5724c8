"""Every row of the NaN and Inf policy, on the twins and on kernels that break it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels.record import Candidate
from fa3verify.kernels.twins import twin
from fa3verify.properties import POLICY, Rule, Trial, replay_trial

LAW = "special_values_follow_policy"
# 5 queries, 132 keys, causal: key 129 is seen by queries 2, 3 and 4; its tile is visited by all of them.
CAUSAL = {"batch": 2, "nheads": 2, "nheads_kv": 1, "seqlen_q": 5, "seqlen_k": 132, "head_dim": 64, "causal": True}


def _trial(candidate: Candidate, rule: Rule, **changes) -> Trial:
    problem = AttentionProblem(dtype=candidate.dtype, **(CAUSAL | changes))
    scheme = QuantScheme() if candidate.dtype == "e4m3" else None
    row = 2 if rule.tensor == "q" else min(129, problem.seqlen_k - 1)
    place = {"sequence": 1, "head": 0, "row": row, "channel": 7}
    return Trial(LAW, Case(candidate.name, problem, Recipe("normal"), scheme), {"rule": rule.name, **place})


def _rules(dtype: str) -> list[Rule]:
    return [rule for rule in POLICY if dtype != "e4m3" or math.isnan(rule.value)]


@pytest.mark.parametrize(
    ("dtype", "rule"),
    [pytest.param(d, rule, id=f"{d}-{rule.name}") for d in ("fp16", "bf16", "e4m3") for rule in _rules(d)],
)
def test_twin_follows_policy(dtype, rule):
    candidate = twin(dtype)
    violation = replay_trial(LAW, candidate, _trial(candidate, rule))
    assert violation is None, violation.message
    only_key = replay_trial(LAW, candidate, _trial(candidate, rule, seqlen_k=1, seqlen_q=5, causal=False))
    assert only_key is None, only_key.message


def _hides_nan(candidate: Candidate) -> Candidate:
    def run(problem, operands, config):
        out, lse = candidate.run(problem, operands, config)
        return np.where(np.isfinite(out), out, np.zeros(1, out.dtype)), lse

    return replace(candidate, run=run)


def _spreads_nan(candidate: Candidate) -> Candidate:
    def run(problem, operands, config):
        out, lse = candidate.run(problem, operands, config)
        return np.where(np.isnan(out).any(), np.full(1, np.nan, out.dtype), out), lse

    return replace(candidate, run=run)


@pytest.mark.parametrize("rule", [r for r in POLICY if r.seen != "unchanged"], ids=lambda rule: rule.name)
def test_kernel_that_hides_nan_breaks_policy(rule):
    candidate = _hides_nan(twin("fp16"))
    assert "promised" in replay_trial(LAW, candidate, _trial(candidate, rule)).message


@pytest.mark.parametrize("rule", [r for r in POLICY if r.seen == "nan"], ids=lambda rule: rule.name)
def test_kernel_that_spreads_nan_breaks_policy(rule):
    candidate = _spreads_nan(twin("fp16"))
    assert "promised: unchanged" in replay_trial(LAW, candidate, _trial(candidate, rule)).message


def test_every_rule_has_a_reason():
    assert all(rule.reason for rule in POLICY)
    assert len({rule.name for rule in POLICY}) == len(POLICY)


def test_a_low_score_that_still_has_a_weight_says_nothing():
    rule = next(rule for rule in POLICY if rule.name == "minus_inf_score")
    candidate = twin("bf16")
    trial = _trial(candidate, rule, seqlen_k=2, causal=False)
    loud = replace(trial, case=replace(trial.case, recipe=Recipe("normal", {"std": 64.0})))
    with pytest.raises(ValueError, match="does not take the trial: beside scores as large as these"):
        replay_trial(LAW, candidate, loud)
