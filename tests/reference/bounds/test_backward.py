"""The bound of gradients: no admissible execution leaves it, and mistakes do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_kernels.plan.backward import BackwardConfig, backward_config
from fa3_kernels.twin.backward import backward
from fa3_kernels.twin.faults import BackwardFault
from fa3_reference.attention import Attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.bounds.backward import backward_bound
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, BackwardOperands
from fa3verify import operations
from fa3verify.inputs.recipe import FAMILIES, Recipe
from fa3verify.metrics import error_over_bound

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
    problem: AttentionProblem, operands: BackwardOperands, model: BackwardModel, fault: BackwardFault | None = None
) -> float:
    q, k, v, dout, out, lse = operands.dequantized(problem)
    truth = attention_bwd(problem, q, k, v, dout, Attention(out, lse))
    got = backward(problem, operands, config_of(problem), fault=fault)
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
            for model in (config_of(problem).model, BackwardModel(problem.dtype)):
                assert largest_ratio(problem, operands, model) <= 1, (family, problem)


PLAIN = AttentionProblem(1, 2, 1, 60, 150, 64, causal=True)
# Of what a worst case cannot tell, bits and the range of orders tell all; two faults need other problems.
UNSEEN = {
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
