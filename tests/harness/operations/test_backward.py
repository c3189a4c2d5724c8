"""The backward in the harness: a case is drawn, judged and kept like one of the forward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.problem import AttentionProblem
from fa3verify import operations
from fa3verify.campaign.profiles import PROFILES, families, family_cases
from fa3verify.cases.case import Case
from fa3verify.inputs.loss import CLASSES, readout_dout
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import judge, passes
from fa3verify.kernels import calls, record
from fa3verify.known import registry
from fa3verify.properties import run_law
from fa3verify.properties.gradients import GRADIENT_LAWS, SHIFTS

NAME = "twin.flash3.dew.backward.{}"
CASE = Case(NAME.format("fp16"), AttentionProblem(1, 2, 1, 30, 50, 64), Recipe("normal", seed=2), operation="backward")


def twin(dtype: str = "fp16", fault: str = "") -> record.Kernel:
    return registry.find(NAME.format(dtype) + (f"+{fault}" if fault else ""))


def test_the_twin_passes_and_its_case_survives_json() -> None:
    judged = judge(twin(), CASE)
    assert passes(twin(), judged.measures)
    assert judged.measures["outputs"] == 2 * 30 * 64 + 2 * 50 * 64
    assert judged.measures["rel_rmse_unrounded"] < 2e-3
    again = Case.from_json(CASE.to_json())
    assert again == CASE
    assert all(np.array_equal(a, b) for a, b in zip(again.draw()[0], CASE.draw()[0], strict=True))


@pytest.mark.parametrize("fault", ["no_row_dots", "unscaled_dk", "causal_top_left", "last_head_only"])
def test_a_faulty_twin_fails_and_differs_from_the_sound_one(fault: str) -> None:
    case = replace(CASE, problem=replace(CASE.problem, causal=True))
    judged = judge(replace(twin(fault=fault), twin=twin()), case)
    assert not passes(twin(), judged.measures)
    assert judged.measures["bits_differing"] > 0


def test_dout_is_not_v_and_is_drawn_by_the_seed() -> None:
    square = replace(CASE.problem, nheads_kv=2, seqlen_k=30)
    case, other = replace(CASE, problem=square), replace(CASE, problem=square, recipe=replace(CASE.recipe, seed=3))
    (_, _, v, dout), (_, _, _, another) = case.draw()[0], other.draw()[0]
    assert v.shape == dout.shape
    assert not np.array_equal(v, dout)
    assert not np.array_equal(dout, another)


def test_a_kernel_that_changes_dout_is_found() -> None:
    def run(problem, operands, config):
        operands.dout.flags.writeable = True
        operands.dout[...] = 0
        return operations.find("backward").twin(problem, operands, config)

    with pytest.raises(calls.KernelError, match="changed its operand dout"):
        judge(twin().altered(run=run), CASE)


def test_only_what_the_family_computes_is_claimed() -> None:
    assert twin().features == {"causal", "window", "varlen", "gqa"}
    assert "softcap" in (twin().refusal(replace(CASE.problem, softcap=2.0)) or "")
    assert twin("bf16").refusal(CASE.problem) == "dtype must be bf16, got fp16"
    with pytest.raises(ValueError, match="no backward of cuDNN"):
        operations.find("backward").configure(CASE.problem, family="cudnn")


def test_a_campaign_has_cases_of_grouped_heads_several_blocks_and_windows() -> None:
    problems = [case.problem for case in family_cases(twin(), "normal", PROFILES["quick"], 0)]
    assert any(p.group > 1 and p.causal for p in problems)
    assert any(p.seqlen_k > 2 * 128 for p in problems)
    assert any(p.window != (-1, -1) for p in problems)
    name = next(name for name in families(twin(), PROFILES["quick"]) if "SmolLM2" in name)
    grouped = family_cases(twin(), name, PROFILES["quick"], 0)
    assert any(case.problem.group > 1 for case in grouped)  # real activations, whose dO is that of a loss
    assert all(case.problem.seqlen_q % 128 == 64 for case in grouped if case.problem.seqlen_q > 129)
    assert all(case.draw()[0][3].shape == case.problem.out_shape for case in grouped[:2])


# No twin takes sinks.
@pytest.mark.parametrize(
    "rule", [law for law in GRADIENT_LAWS if law.name != "gradients_with_sinks"], ids=lambda law: law.name
)
def test_the_twin_obeys_every_law_of_gradients(rule) -> None:
    kernel = twin("bf16") if rule.applies(twin("bf16")) else registry.find("twin.backward.bf16")
    outcome = run_law(rule, kernel, max_examples=2, seed=1)
    assert (outcome.status, outcome.violation) == ("pass", None)


def test_the_truth_is_the_derivative_of_the_forward() -> None:
    problem = AttentionProblem(1, 2, 1, 5, 7, 8, causal=True, softmax_scale=0.4)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s) for s in (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape)]
    *qkv, dout = arrays
    directions = [rng.standard_normal(x.shape) for x in qkv]
    gradients = attention_bwd(problem, *qkv, dout, attention(problem, *qkv))
    step = 1e-6
    ends = [
        np.sum(attention(problem, *(x + sign * step * d for x, d in zip(qkv, directions, strict=True))).out * dout)
        for sign in (1, -1)
    ]
    slope = sum(np.sum(g * d) for g, d in zip(gradients, directions, strict=True))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-7)


def _mixed_channels(problem, operands, found):
    """dV of every channel takes a little of the first one."""
    return found._replace(dv=(found.dv + found.dv[..., :1] / 64).astype(found.dv.dtype))


def _leaking(problem, operands, found):
    """dV starts from what V holds, in the first key."""
    dv = found.dv.copy()
    dv[..., 0, 0, :] += operands.v[..., 0, 0, :] / 2**6
    return found._replace(dv=dv)


def _leaking_upwards(problem, operands, found):
    """dV starts from the size of what V holds, so that no number of it is too small."""
    return found._replace(dv=(found.dv + np.abs(operands.v) / 2**6).astype(found.dv.dtype))


def _batch_dependent(problem, operands, found):
    """A sequence beside others is rounded once more."""
    coarse = found.dk.astype(np.float16).astype(found.dk.dtype) * (1 + 2.0**-7)
    return found if problem.batch == 1 else found._replace(dk=coarse.astype(found.dk.dtype))


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("dv_channels_are_independent", _mixed_channels),
        ("gradients_do_not_depend_on_the_batch", _batch_dependent),
        ("zero_dout_gives_zero_gradients", _leaking),
        ("zero_dout_gives_zero_gradients", _leaking_upwards),
    ],
)
def test_a_law_finds_a_mistake_around_the_twin(name: str, mistake) -> None:
    sound = twin()

    def run(problem, operands, config):
        return mistake(problem, operands, sound.code.run(problem, operands, config))

    rule = next(law for law in GRADIENT_LAWS if law.name == name)
    outcome = run_law(rule, sound.altered(run=run), max_examples=20, seed=0, shrink_seconds=0)
    assert outcome.violation is not None, outcome.status


def test_far_scores_have_an_lse_beyond_what_binary32_exponentiates(monkeypatch) -> None:
    seen = []

    def run(problem, operands, config):
        seen.append((operands.lse.min(), operands.lse.max()))
        return sound.code.run(problem, operands, config)

    sound = twin()
    rule = next(law for law in GRADIENT_LAWS if law.name == "gradients_of_far_scores")
    assert run_law(rule, sound.altered(run=run), max_examples=6, seed=0).status == "pass"
    assert min(low for low, _ in seen) < -88 < 88 < max(high for _, high in seen)
    assert len({int(np.sign(low)) for low, _ in seen}) == 2
    assert min(SHIFTS) < -88


def test_dout_of_a_loss_is_its_derivative() -> None:
    problem = AttentionProblem(1, 2, 1, 5, 6, 8)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    dout = readout_dout(problem, q, k, v, seed=3)
    assert np.abs(dout.reshape(5, -1)).max(axis=1).min() > 0.01
    draws = np.random.default_rng(3)  # as the loss draws its readout and targets
    readout = draws.standard_normal((16, CLASSES)) / 4
    targets = draws.integers(CLASSES, size=5)

    def loss(v: np.ndarray) -> float:
        logits = attention(problem, q, k, v).out.reshape(5, 16) @ readout
        return float(np.sum(np.log(np.exp(logits).sum(1)) - logits[np.arange(5), targets]))

    direction, step = rng.standard_normal(v.shape), 1e-5
    dv = attention_bwd(problem, q, k, v, dout, attention(problem, q, k, v)).dv
    slope = (loss(v + step * direction) - loss(v - step * direction)) / (2 * step)
    assert slope == pytest.approx(float(np.sum(dv * direction)), rel=1e-7)
