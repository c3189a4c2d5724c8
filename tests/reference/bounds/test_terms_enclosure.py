"""Every term of the enclosure: one query whose ends are worked out by hand, one number at a time."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa3_reference.bounds.device import TANH_REL
from fa3_reference.bounds.enclosure import forward_enclosure
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.order import SoftmaxOrder
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import DTYPES, AttentionProblem, Descale, Operands
from tests.reference.bounds.by_hand_enclosure import Ends, enclosure
from tests.reference.bounds.by_hand_forward import Query

KEYS, TILE = 17, 8
ORDERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "left to right, pairs": {"order": SoftmaxOrder(keys="left_to_right", row_sum="pairs")},
    "builds that flush": {"keeps_subnormals": False},
    "unscaled maxima": {"order": SoftmaxOrder("unscaled"), "keeps_subnormals": False},
    "contracted factors": {"order": SoftmaxOrder("unscaled", "contracted")},
    "rounded exponents": {"order": SoftmaxOrder(exponent="rounded", lse="apart")},
    "a scale in binary32": {"order": SoftmaxOrder(scale="float32")},
    "splits": {"num_splits": 2},
    "splits by lse": {"num_splits": 3, "order": SoftmaxOrder(combine="lse")},
}


def model_of(dtype: str, name: str, **rest: Any) -> KernelModel:
    stated = KernelModel(dtype, "fp32", 64, TILE, **ORDERS[name])  # type: ignore[arg-type]
    return replace(stated, **rest)


def drawn(dtype: str, seed: int = 0, spread: float = 1.0, **rest: Any) -> tuple[AttentionProblem, Operands]:
    problem = AttentionProblem(1, 1, 1, 1, KEYS, 3, 2, dtype=dtype, **{"softmax_scale": 0.6, **rest})  # type: ignore
    rng = np.random.default_rng(seed)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    arrays[0] *= spread
    stored = [encode(x, FORMATS[dtype], "saturate") for x in arrays]
    if dtype != "e4m3":
        return problem, Operands(*stored)
    k_factor, v_factor = (rng.uniform(0.5, 2, (1, 1, 3)).astype(np.float32) for _ in range(2))
    q_factor = Descale(np.full((1, 1, 1), 0.7, np.float32))
    return problem, Operands(*stored, q_factor, Descale(k_factor, TILE), Descale(v_factor, TILE))


def query_of(problem: AttentionProblem, x: Operands) -> Query:
    def factors(descale: Descale | None) -> list[float] | None:
        return None if descale is None else descale.rows(0, 0, KEYS).astype(float).tolist()

    q, k, v = (a.astype(np.float64) for a in (x.q, x.k, x.v))
    q_factor = None if x.q_descale is None else float(x.q_descale.values[0, 0, 0])
    rows = (q[0, 0, 0].tolist(), k[0, :, 0].tolist(), v[0, :, 0].tolist())
    return Query(*rows, problem.softmax_scale, problem.softcap, q_factor, factors(x.k_descale), factors(x.v_descale))


def visits(model: KernelModel) -> list[list[range]]:
    blocks = [range(a, min(a + TILE, KEYS)) for a in range(0, KEYS, TILE)]
    size = -(-len(blocks) // model.num_splits)
    parts = [blocks[a : a + size] for a in range(0, len(blocks), size)]
    return [part[::-1] if model.order.keys == "right_to_left" else part for part in parts]


_BY_HAND: dict[bytes, tuple[list[Ends], Ends]] = {}  # a survey runs these tests on thousands of mutants


def assert_is_by_hand(problem: AttentionProblem, x: Operands, model: KernelModel) -> None:
    key = pickle.dumps((problem, x, model))
    if key not in _BY_HAND:
        _BY_HAND[key] = enclosure(query_of(problem, x), visits(model), model)
    out, lse = _BY_HAND[key]
    found = forward_enclosure(problem, x, model)
    ends = [[found.out.low[0, 0, 0, d], found.out.high[0, 0, 0, d]] for d in range(2)]
    np.testing.assert_allclose(ends, out, rtol=1e-15, atol=0, err_msg=f"O of {model}")
    got = [found.lse.low.item(), found.lse.high.item()]
    np.testing.assert_allclose(got, lse, rtol=0, atol=1e-15 * (1 + abs(lse[0])), err_msg=f"lse of {model}")


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_enclosure_is_what_its_program_makes_by_hand(dtype: str, name: str) -> None:
    for seed, spread in ((0, 1.0), (1, 6.0), (2, 0.1)):
        problem, x = drawn(dtype, seed, spread)
        model = model_of(dtype, name)
        assert_is_by_hand(problem, x, model)
        assert_is_by_hand(problem, x, replace(model, out_dtype="bf16"))
        if dtype == "e4m3":
            for interval in (4, 8):
                assert_is_by_hand(problem, x, replace(model, promotion_interval=interval))


@pytest.mark.parametrize("tanh", [0.0, TANH_REL])
@pytest.mark.parametrize("name", ["as it is", "unscaled maxima", "contracted factors"])
def test_a_softcap_widens_scores_by_what_its_tanh_errs(name: str, tanh: float) -> None:
    for cap, spread in ((1.5, 1.0), (20.0, 30.0), (0.05, 1.0)):
        for dtype in ("bf16", "e4m3"):
            problem, x = drawn(dtype, 3, spread, softcap=cap)
            assert_is_by_hand(problem, x, model_of(dtype, name, tanh_error=tanh))


@pytest.mark.parametrize("maxima", ["scaled", "unscaled"])
def test_scores_that_take_the_scale_in_turn_are_rounded_once_more(maxima: Any) -> None:
    for dtype, cap, tanh in (("fp16", 0.0, 0.0), ("bf16", 0.0, 0.0), ("bf16", 1.5, 0.0), ("bf16", 1.5, TANH_REL)):
        for scale in (0.6, 7.0):
            problem, x = drawn(dtype, 5, softmax_scale=scale, softcap=cap)
            order = SoftmaxOrder(maxima, scale="in_turn")
            assert_is_by_hand(problem, x, model_of(dtype, "as it is", order=order, tanh_error=tanh))


def test_the_order_of_e4m3_scores_that_take_the_scale_in_turn_is_not_stated() -> None:
    problem, x = drawn("e4m3")
    with pytest.raises(ValueError, match="only a stated order"):
        forward_enclosure(problem, x, model_of("e4m3", "as it is", order=SoftmaxOrder(scale="in_turn")))


@pytest.mark.parametrize("power", [-118, -126])
def test_results_below_the_normal_numbers_may_be_flushed_or_lost(power: int) -> None:
    for name in ("as it is", "builds that flush", "unscaled maxima", "splits"):
        problem, x = drawn("bf16", 4)
        v = (x.v.astype(np.float64) * 2.0**power).astype(x.v.dtype)
        assert_is_by_hand(problem, replace(x, v=v), model_of("bf16", name))


@pytest.mark.parametrize("apart", [100.0, 125.0, 126.5, 140.0])
def test_weights_and_factors_below_the_normal_numbers_are_nothing(apart: float) -> None:
    for first in (True, False):
        problem, x = drawn("bf16", 7, softmax_scale=float(np.log(2)))
        k = np.zeros(x.k.shape)
        k[:, : TILE if first else None, :, 0] = 1.0
        k[:, TILE:, :, 0] *= np.linspace(0.9, 1.0, KEYS - TILE)[:, None]
        x = replace(x, q=np.full(x.q.shape, apart).astype(x.q.dtype), k=k.astype(x.k.dtype))
        for name in ("as it is", "unscaled maxima", "builds that flush"):
            assert_is_by_hand(problem, x, model_of("bf16", name))
