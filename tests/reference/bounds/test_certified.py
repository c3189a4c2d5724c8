"""OUTWARD covers the float64 in which the bound is evaluated: it is not below the same bound in ball arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from fa3_reference.bounds import forward, forward_sums, forward_weights
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.order import SoftmaxOrder
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import DTYPES, AttentionProblem, Descale, Operands

pytest.importorskip("flint")

KEYS, CHANNELS = 40, 6
TILE = {"fp16": 16, "bf16": 16, "e4m3": 32}
ORDERS = {
    "right to left": {},
    "left to right": {"order": SoftmaxOrder(keys="left_to_right")},
    "neighbours of a row sum": {"order": SoftmaxOrder(row_sum="pairs")},
    "unscaled maxima": {"order": SoftmaxOrder(maxima="unscaled"), "keeps_subnormals": False},
    "lazy": {"order": SoftmaxOrder("unscaled", "lazy")},
    "normalised": {"order": SoftmaxOrder(weights="normalised")},
    "splits": {"num_splits": 2},
    "binary32 sums": {"accumulator": "fp32", "exp_error": 2.0**-20},
    "binary16 scores": {"scores": "fp16"},
    "any": {},
    "any, either accumulator": {"accumulator": "either"},
    "any, row sum of rounded P": {"accumulator": "either", "row_sum_of": "rounded"},
}


def model_of(dtype: str, name: str) -> KernelModel:
    changes = ORDERS[name]
    if name.startswith("any"):
        return KernelModel.any_order(dtype, "fp32", **changes)
    return KernelModel(dtype, "fp32", 64, TILE[dtype], **changes)


def structured(dtype: str, kind: str, seed: int = 0) -> tuple[AttentionProblem, Operands]:
    """A problem of one head; ``kind`` is what is unusual in it."""
    rng = np.random.default_rng(seed)
    softcap = 3.0 if kind == "softcap" else 0.0
    problem = AttentionProblem(
        1, 1, 1, 2, KEYS, CHANNELS, dtype=dtype, causal=kind == "causal", softcap=softcap, softmax_scale=0.5
    )
    q, k, v = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    if kind == "huge exponents":
        far = np.log2(FORMATS[dtype].max_finite) - 3
        q, k = q * np.exp2(0.9 * far), k * np.exp2(-0.9 * far)
        v *= np.exp2(rng.uniform(-far, min(far, 100), v.shape))  # sums of larger ones may overflow in some order
    elif kind == "large scores":
        q, k = q * 28, k * 3.5
        v *= np.exp2(rng.uniform(-5, 5, v.shape))
    elif kind == "cancelling":
        v[:, 1::2] = -v[:, ::2]
    elif kind == "equal scores":
        q[:, :2] = 0
    elif kind == "far maxima":
        k[:, :20] -= 60 * np.sign(q[:, 1:2])
    descales = ()
    if dtype == "e4m3":
        each = (np.exp2(rng.uniform(-3, 3, (1, 1, 2))).astype(np.float32) for _ in range(2))
        descales = Descale(np.full((1, 1, 1), 0.7, np.float32), 0), *(Descale(values, 32) for values in each)
    return problem, Operands(*(encode(x, FORMATS[dtype], "saturate") for x in (q, k, v)), *descales)


KINDS = ("normal", "large scores", "huge exponents", "cancelling", "equal scores", "far maxima", "softcap", "causal")


def compared(dtype: str, name: str, kind: str) -> np.ndarray:
    """Float64 bound over the lower end of the certified one, of what is finite and not 0; the rest must agree."""
    from tests.reference.bounds.certified import certified_bound

    problem, operands = structured(dtype, kind)
    model = model_of(dtype, name)
    ratios = []
    for bound, certified in zip(
        forward_bound(problem, operands, model), certified_bound(problem, operands, model), strict=True
    ):
        least = np.array([float(ball.lower()) if ball != 0 else 0.0 for ball in certified.ravel()])
        bound = bound.ravel()
        counts = np.isfinite(bound) & (bound > 0)
        assert (bound[~counts] == least[~counts]).all()
        ratios.append(bound[counts] / least[counts])
    return np.concatenate(ratios)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_is_at_least_its_certified_value_and_next_to_it(dtype, name):
    for kind in KINDS:
        ratios = compared(dtype, name, kind)
        assert ratios.min() >= 1, f"{kind}: float64 loses {1 - ratios.min():.2g} of the bound"
        # Where weights are off by factors, allowances are in the exponent, and differences of sums are allowed for too.
        assert ratios.max() <= 1 + (2.0**-9 if kind == "large scores" else 2.0**-18), kind


def test_without_the_outward_factor_float64_falls_short_of_the_certified_bound(monkeypatch):
    for module in (forward, forward_sums, forward_weights):
        monkeypatch.setattr(module, "OUTWARD", 1 - 2.0**-30)
    assert compared("bf16", "right to left", "normal").min() < 1
