"""The bound of gradients: no admissible execution leaves it, and mistakes do."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from fa3_kernels.faults.table import BackwardFault, faulty
from fa3_kernels.plan.backward import BackwardConfig, backward_config
from fa3_kernels.plan.order import BackwardOrder
from fa3_kernels.twin.backward import backward
from fa3_reference.attention import Attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.bounds.backward import backward_bound
from fa3_reference.bounds.device import TANH_REL
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, BackwardOperands
from fa3verify import operations
from fa3verify.inputs.recipe import FAMILIES, Recipe
from fa3verify.operations.operation import error_over_bound
from tests.sampling import sampled

NAMES = tuple(family.name for family in FAMILIES if family.name != "activations")
OPERATION = operations.find("backward")


def drawn(rng: np.random.Generator, family: str) -> tuple[AttentionProblem, BackwardOperands]:
    """A small problem; what the forward returned may be shifted, scaled or missing, so that it fits no softmax."""
    masks = ({}, {"causal": True}, {"window": (5, 3)})
    sizes = (1, int(rng.choice((1, 3))), 1, int(rng.choice((1, 17, 40))), int(rng.choice((1, 40, 130))))
    problem = AttentionProblem(
        *sizes,
        int(rng.choice((64, 128))),
        dtype=str(rng.choice(("fp16", "bf16"))),  # type: ignore[arg-type]
        softmax_scale=float(rng.choice((0.125, 1.0, 0.003))),
        **masks[rng.integers(3)],  # type: ignore[arg-type]
    )
    template = next(f for f in FAMILIES if f.name == family)
    recipe = Recipe(template.distribution, template.params, int(rng.integers(2**40)))
    operands = OPERATION.prepare(problem, OPERATION.draw(problem, recipe), None, {}).operands
    assert isinstance(operands, BackwardOperands)
    scale = 2.0 ** rng.integers(-12, 4) * (rng.random(operands.dout.shape) < rng.choice((1, 0.1)))
    fmt = FORMATS[problem.dtype]
    dout, out = (encode(x.astype(np.float64) * y, fmt, "ieee") for x, y in ((operands.dout, scale), (operands.out, 3)))
    shift = np.float32(rng.choice((0, 0, -3, 2, 30)))
    return problem, replace(operands, dout=dout, out=out, lse=operands.lse + shift)


def largest_ratio(
    problem: AttentionProblem,
    operands: BackwardOperands,
    model: BackwardModel,
    fault: BackwardFault | None = None,
    order: BackwardOrder | None = None,
    config: BackwardConfig | None = None,
) -> float:
    q, k, v, dout, out, lse, *dlse = operands.dequantized(problem)
    truth = attention_bwd(problem, q, k, v, dout, Attention(out, lse), *dlse)
    got = (faulty(fault) if fault else backward)(problem, operands, config or config_of(problem), order=order)
    bound = backward_bound(problem, operands, model)
    return max(float(error_over_bound(*x).max(initial=0)) for x in zip(got, truth, bound, strict=True))


def config_of(problem: AttentionProblem) -> BackwardConfig:
    return backward_config(problem, family="flash3.dew")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("part", range(4))
def test_no_execution_leaves_the_bound(part: int) -> None:
    rng = np.random.default_rng(part)
    for family in NAMES[part::4]:
        for _ in range(2):
            problem, operands = drawn(rng, family)
            for model in (
                config_of(problem).model,
                BackwardModel(problem.dtype),
                BackwardModel.any_order(problem.dtype),
            ):
                assert largest_ratio(problem, operands, model) <= 1, (family, problem)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_no_execution_with_a_gradient_of_lse_leaves_the_bound(size: float) -> None:
    rng = np.random.default_rng(5)
    for family in NAMES[::4]:
        problem, operands = drawn(rng, family)
        dlse = (size * rng.standard_normal(problem.lse_shape)).astype(np.float32)
        given, config = replace(operands, dlse=dlse), backward_config(problem, family="gluon")
        for model in (config.model, BackwardModel.any_order(problem.dtype)):
            assert largest_ratio(problem, given, model, config=config) <= 1, (family, problem)


@pytest.mark.parametrize("mistake", [0, -1, 2])
def test_a_mistaken_gradient_of_lse_leaves_the_bound(mistake: int) -> None:
    """It is left out, as FlashAttention-3 does, added instead of subtracted, or counted twice."""
    operands = OPERATION.prepare(PLAIN, OPERATION.draw(PLAIN, Recipe("normal", seed=4)), None, {}).operands
    assert isinstance(operands, BackwardOperands)
    dlse = np.random.default_rng(0).standard_normal(PLAIN.lse_shape).astype(np.float32)
    config = backward_config(PLAIN, family="gluon")
    truth = attention_bwd(PLAIN, *operands.dequantized(PLAIN)[:4], Attention(operands.out, operands.lse), dlse)
    bound = backward_bound(PLAIN, replace(operands, dlse=dlse), config.model)
    for times, is_right in ((1, True), (mistake, False)):
        got = backward(PLAIN, replace(operands, dlse=np.float32(times) * dlse), config)
        ratios = [float(error_over_bound(*x).max()) for x in zip(got, truth, bound, strict=True)]
        assert (ratios[0] <= 1, ratios[1] <= 1, ratios[2] <= 1) == (is_right, is_right, True)


# Orders of other families, and what a model says of each beyond the default.
ORDERS = {
    "contracted dS": (BackwardOrder(contracts_ds=True), {}),
    "natural exponents": (BackwardOrder(exponent="natural"), {}),
    "rounded scores": (BackwardOrder(contracts_exponent=False), {"exponent": "rounded"}),
    "scaled weights": (BackwardOrder(scales_ds=True), {"scales": "weights"}),
    "scaled sums": (BackwardOrder(scales_sums=True, keeps_subnormals=True), {}),
    "descending": (BackwardOrder(keys="descending", rows="descending", factor="float64"), {}),
}


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ORDERS)
def test_no_declared_order_leaves_its_bound_nor_that_of_any_order(name: str) -> None:
    order, facts = ORDERS[name]
    rng = np.random.default_rng(len(name))
    for family in NAMES[::3]:
        problem, operands = drawn(rng, family)
        for model in (replace(config_of(problem).model, **facts), BackwardModel.any_order(problem.dtype)):
            assert largest_ratio(problem, operands, model, order=order) <= 1, (family, problem)


def test_a_model_of_another_order_is_left() -> None:
    """dS that is rounded in the scale of the scores lies outside the bound of dS that is not."""
    problem = replace(PLAIN, softmax_scale=2.0**-12)  # where its subnormal numbers begin elsewhere
    operands = OPERATION.prepare(problem, OPERATION.draw(problem, Recipe("normal", seed=4)), None, {}).operands
    assert isinstance(operands, BackwardOperands)
    model, order = config_of(problem).model, BackwardOrder(scales_ds=True)
    assert largest_ratio(problem, operands, model, order=order) > 1
    assert largest_ratio(problem, operands, replace(model, scales="weights"), order=order) <= 1


def test_weights_at_the_end_of_float64_stay_within_the_bound() -> None:
    """Weights of 5e-324 that are 0 if they are rounded differently once met a bound of zero."""
    problem = AttentionProblem(1, 200, 200, 1, 1, 64, softmax_scale=4.0)  # before which products of dS vanish
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 1, 200, 64)).astype(np.float16) for _ in range(4))
    scores = problem.softmax_scale * np.einsum("abhd,abhd->bh", q.astype(np.float64), k.astype(np.float64))
    lse = (scores + np.linspace(744.3, 745.3, 200)).T[None].astype(np.float32)
    operands = BackwardOperands(q, k, v, dout=dout, out=np.zeros_like(q), lse=lse)
    assert largest_ratio(problem, operands, replace(config_of(problem).model, out_dtype="fp32")) <= 1


def test_nothing_is_promised_of_a_scale_that_binary32_loses() -> None:
    """c of a subnormal scale is flushed, and 0 times the -inf of a hidden score is NaN."""
    problem = replace(PLAIN, softmax_scale=2.0**-128)
    operands = OPERATION.prepare(problem, OPERATION.draw(problem, Recipe("normal", seed=4)), None, {}).operands
    assert isinstance(operands, BackwardOperands)
    assert largest_ratio(problem, operands, config_of(problem).model) == 0
    assert np.isnan(backward(problem, operands, config_of(problem)).dq).any()


PLAIN = AttentionProblem(1, 2, 1, 60, 150, 64, causal=True)
CAPPED = replace(PLAIN, softcap=3.0)
SLOPES = (BackwardFault.NO_SOFTCAP_SLOPE, BackwardFault.SLOPE_OF_UNCAPPED)
# Of what a worst case cannot tell, bits and the range of orders tell all; some faults need other problems.
UNSEEN = {
    *SLOPES,
    BackwardFault.ROUNDED_P_IN_DS,
    BackwardFault.TRUNCATED_P,
    BackwardFault.TRUNCATED_DS,
    BackwardFault.ROUNDED_PARTS,
    BackwardFault.KV_HEAD_MODULO,
    BackwardFault.EMPTY_ROW_LSE,
}


@pytest.mark.parametrize("fault", [fault for fault in BackwardFault if fault not in UNSEEN])
def test_a_mistake_leaves_the_bound(fault: BackwardFault) -> None:
    arrays = OPERATION.draw(PLAIN, Recipe("normal", seed=4))
    operands = OPERATION.prepare(PLAIN, arrays, None, {}).operands
    assert isinstance(operands, BackwardOperands)
    assert largest_ratio(PLAIN, operands, config_of(PLAIN).model) <= 1
    assert largest_ratio(PLAIN, operands, config_of(PLAIN).model, fault) > 1


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("softcap", ["ex2", "tanh"])
@pytest.mark.parametrize("cap", sampled([2.0**-60, 0.01, 1.0, 30.0, 1e4, 2.0**80], [0.01, 30.0, 2.0**80]))
def test_no_execution_with_a_softcap_leaves_the_bound(cap: float, softcap: Literal["ex2", "tanh"]) -> None:
    """Of caps far below all scores, where each saturates, up to caps that no score feels; rows without a key too."""
    rng = np.random.default_rng(int(np.log2(cap)) + 100)
    tanh_error = TANH_REL if softcap == "tanh" else 0.0
    for family in ("normal", "peaky", "outlier_channels", "faint", NAMES[rng.integers(len(NAMES))]):
        problem, operands = drawn(rng, family)
        problem, config = replace(problem, softcap=cap), backward_config(problem, family="gluon")
        for order in (replace(BackwardOrder(), softcap=softcap), replace(config.backward.order, softcap=softcap)):
            for model in (replace(config.model, tanh_error=tanh_error), BackwardModel.any_order(problem.dtype)):
                assert largest_ratio(problem, operands, model, order=order, config=config) <= 1, (family, problem)


@pytest.mark.parametrize("fault", SLOPES)
def test_a_mistaken_derivative_of_a_softcap_leaves_the_bound_of_dq_and_dk(fault: BackwardFault) -> None:
    operands = OPERATION.prepare(CAPPED, OPERATION.draw(CAPPED, Recipe("normal", seed=4)), None, {}).operands
    assert isinstance(operands, BackwardOperands)
    config = backward_config(CAPPED, family="gluon")
    truth = attention_bwd(CAPPED, *operands.dequantized(CAPPED)[:4], Attention(operands.out, operands.lse))
    for model in (config.model, BackwardModel.any_order(CAPPED.dtype)):
        bound = backward_bound(CAPPED, operands, model)
        for planted, is_right in ((None, True), (fault, False)):
            got = (faulty(planted) if planted else backward)(CAPPED, operands, config)
            ratios = [float(error_over_bound(*x).max()) for x in zip(got, truth, bound, strict=True)]
            assert [ratio <= 1 for ratio in ratios] == [is_right, is_right, True]


def test_a_score_that_a_build_may_flush_counts_with_its_factor() -> None:
    """S of 2^-130 or 0: a softmax_scale of 2^126 makes of it exponents of 2^-4 or 0, and dV is P."""
    problem = AttentionProblem(1, 1, 1, 1, 1, 64, dtype="bf16", softmax_scale=2.0**126)
    q, k, v, dout = (np.zeros((1, 1, 1, 64), FORMATS["bf16"].dtype) for _ in range(4))
    for x, value in ((q, 2.0**-65), (k, 2.0**-65), (v, 1.0), (dout, 1.0)):
        x[..., 0] = value
    operands = BackwardOperands(q, k, v, dout=dout, out=np.zeros_like(v), lse=np.zeros((1, 1, 1), np.float32))
    assert backward_bound(problem, operands, config_of(problem).model).dv[..., 0] >= np.expm1(2.0**-4)


def test_a_softcap_of_scores_in_16_bits_is_refused() -> None:
    operands = OPERATION.prepare(CAPPED, OPERATION.draw(CAPPED, Recipe("normal", seed=4)), None, {}).operands
    assert isinstance(operands, BackwardOperands)
    with pytest.raises(ValueError, match=r"a softcap of scores in bf16 is not known, got 3\.0"):
        backward_bound(CAPPED, operands, BackwardModel("fp16", scores="bf16"))


def test_nothing_is_allowed_where_nothing_is_visible_and_nothing_is_promised_beside_nan() -> None:
    problem = AttentionProblem(1, 1, 1, 8, 3, 64, causal=True)
    operands = OPERATION.prepare(problem, OPERATION.draw(problem, Recipe("normal", seed=1)), None, {}).operands
    assert isinstance(operands, BackwardOperands)
    bound = backward_bound(problem, operands, BackwardModel("fp16", 128))
    assert not bound.dq[:, :5].any()
    assert (bound.dq[:, 5:] > 0).any()
    k = operands.k.copy()
    k[0, 2] = np.nan
    poisoned = backward_bound(problem, replace(operands, k=k), BackwardModel("fp16", 128))
    assert np.isinf(poisoned.dq[0, 7]).all()
    assert np.isfinite(poisoned.dv[0, 0]).all()


def test_the_bound_grows_with_what_it_knows_less() -> None:
    operands = OPERATION.prepare(PLAIN, OPERATION.draw(PLAIN, Recipe("normal", seed=4)), None, {}).operands
    assert isinstance(operands, BackwardOperands)
    stated, free = (backward_bound(PLAIN, operands, m) for m in (config_of(PLAIN).model, BackwardModel("fp16")))
    assert all((a <= b * (1 + 1e-12)).all() for a, b in zip(stated, free, strict=True))
    exact = backward_bound(PLAIN, operands, replace(config_of(PLAIN).model, out_dtype="fp32"))
    assert all(np.median(a / b) < 1 for a, b in zip(exact, stated, strict=True))
