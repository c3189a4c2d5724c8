"""What a quantiser's outputs alone tell: scores are kept, by whatever rotation all heads of a group share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fa3_reference.problem import AttentionProblem
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels.record import Kernel
from fa3verify.known.registry import find
from fa3verify.properties import Trial, replay_trial

LAW = "codes_keep_the_scores"
PROBLEM = AttentionProblem(2, 6, 2, 40, 70, 64, dtype="e4m3")
CHANGES = (("rotate", True), ("subtract_k_mean", True))
TRIAL = Trial(LAW, Case("twin.quantize", PROBLEM, Recipe("normal"), None, CHANGES, "quantize"))


def _quantiser(run) -> Kernel:
    return find("twin.quantize").altered(run=run)


def _named(problem, operands, config) -> dict[str, np.ndarray]:
    twin = find("twin.quantize")
    names = ("q", "k", "v", "q_descale", "k_descale", "v_descale", "k_mean", "lse_correction")
    stored = twin.code.run(problem, operands, config)
    return {name: getattr(stored, name) for name in names}


def _of_other_signs(problem, operands, config):
    """Turn q and k by the signs of another seed than the one that was asked for."""
    return _named(problem, operands, replace(config, seed=config.seed + 1))


def _last_heads_turned_apart(problem, operands, config):
    """Turn the last query head of every group by signs of its own."""
    plain, other = (f(problem, operands, config) for f in (_named, _of_other_signs))
    last = np.arange(problem.nheads) % problem.group == problem.group - 1
    codes = np.where(last[:, None], other["q"], plain["q"])
    return plain | {"q": codes, "q_descale": np.where(last[:, None], other["q_descale"], plain["q_descale"])}


def _mean_kept_to_itself(problem, operands, config):
    """Centre K and correct nothing."""
    plain = _named(problem, operands, config)
    return plain | {"lse_correction": np.zeros_like(plain["lse_correction"])}


def test_query_heads_of_a_group_must_be_turned_as_their_kv_head():
    violation = replay_trial(LAW, _quantiser(_last_heads_turned_apart), TRIAL)
    assert violation is not None
    assert violation.where.startswith("scores of sequence 0[2"), violation.message  # the third head of the first group


def test_a_mean_that_nobody_adds_back_is_seen_in_the_scores():
    far = replace(TRIAL, case=replace(TRIAL.case, recipe=Recipe("positive")))  # whose mean is far from 0
    assert replay_trial(LAW, find("twin.quantize"), far) is None
    assert replay_trial(LAW, _quantiser(_mean_kept_to_itself), far) is not None


def test_any_rotation_that_q_and_k_share_keeps_the_scores():
    assert replay_trial(LAW, find("twin.quantize"), TRIAL) is None
    assert replay_trial(LAW, _quantiser(_of_other_signs), TRIAL) is None
    exact = "stored_values_within_bound"
    assert replay_trial(exact, _quantiser(_of_other_signs), replace(TRIAL, law=exact)) is not None
