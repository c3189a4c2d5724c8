"""Every term of the a-priori bound: one query whose bound is worked out by hand, one number at a time."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa3_reference.bounds.device import TANH_REL
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.order import SoftmaxOrder
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import DTYPES, AttentionProblem, Descale, Operands
from tests.reference.bounds.by_hand_forward import Query, bound

KEYS, TILE = 17, 8
# What a model says beyond the default, by what it brings into the bound.
ORDERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "left to right, pairs": {"order": SoftmaxOrder(keys="left_to_right", row_sum="pairs")},
    "blocks, builds that flush": {"order": SoftmaxOrder(row_sum="blocks"), "keeps_subnormals": False},
    "unscaled maxima": {"order": SoftmaxOrder("unscaled", row_sum="blocks"), "keeps_subnormals": False},
    "contracted factors": {"order": SoftmaxOrder("unscaled", "contracted")},
    "lazy": {"order": SoftmaxOrder("unscaled", "lazy")},
    "scaled, lazy": {"order": SoftmaxOrder("scaled", "lazy")},
    "normalised": {"order": SoftmaxOrder(weights="normalised")},
    "rounded exponents": {"order": SoftmaxOrder(exponent="rounded"), "exp_error": 2.0**-14},
    "a scale in binary32": {"order": SoftmaxOrder(scale="float32", lse="apart")},
    "splits": {"num_splits": 2},
    "splits by lse": {"num_splits": 3, "order": SoftmaxOrder(combine="lse", maxima="unscaled")},
    "stated splits by lse": {"num_splits": 3, "order": SoftmaxOrder(combine="lse")},
    "a coarse exponential": {"exp_error": 2.0**-12},
    "binary32 sums": {"accumulator": "fp32"},
    "binary16 sums": {"accumulator": "fp16"},
    "row sum of rounded weights": {"order": SoftmaxOrder(row_sum_of="rounded")},
    "scores in bf16": {"scores": "bf16"},
    "scores in fp16": {"scores": "fp16"},
    "weights in bf16": {"probabilities": "bf16"},
}
FREE = {
    "binary32": ("fp32", "weights"),
    "either accumulator": ("either", "weights"),
    "the tensor core": ("wgmma", "weights"),
    "either, running weights": ("either", "weights", "running"),
    "either, row sum of rounded weights": ("either", "rounded"),
}


def model_of(dtype: str, name: str, **rest: Any) -> KernelModel:
    """A model whose output is in binary32, so that its error is that before the last rounding."""
    if name in FREE:
        return replace(KernelModel.any_order(dtype, "fp32", *FREE[name]), **rest)  # type: ignore[arg-type]
    stated = KernelModel(dtype, "fp32", 64, TILE, **ORDERS[name])  # type: ignore[arg-type]
    return replace(stated, **rest)


def drawn(dtype: str, seed: int = 0, keys: int = KEYS, spread: float = 1.0, **rest: Any) -> tuple:
    """One query of three channels and its operands, with a factor for each and, of K and V, for each block of keys."""
    problem = AttentionProblem(1, 1, 1, 1, keys, 3, 2, dtype=dtype, **{"softmax_scale": 0.6, **rest})  # type: ignore
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    arrays = [encode(x, FORMATS[dtype], "saturate") for x in (spread * q, k, v)]
    if dtype != "e4m3":
        return problem, Operands(*arrays)
    blocks = -(-keys // TILE)
    k_factor, v_factor = (rng.uniform(0.5, 2, (1, 1, blocks)).astype(np.float32) for _ in range(2))
    q_factor = Descale(np.full((1, 1, 1), 0.7, np.float32))
    return problem, Operands(*arrays, q_factor, Descale(k_factor, TILE), Descale(v_factor, TILE))


def times(x: Operands, **factors: float) -> Operands:
    """The same operands, some of them times a number."""
    each = {name: getattr(x, name).astype(np.float64) * factor for name, factor in factors.items()}
    return replace(x, **{name: a.astype(getattr(x, name).dtype) for name, a in each.items()})


def query_of(problem: AttentionProblem, x: Operands) -> Query:
    def factors(descale: Descale | None) -> list[float] | None:
        return None if descale is None else descale.rows(0, 0, problem.seqlen_k).astype(float).tolist()

    q, k, v = (a.astype(np.float64) for a in (x.q, x.k, x.v))
    q_factor = None if x.q_descale is None else float(x.q_descale.values[0, 0, 0])
    rows = (q[0, 0, 0].tolist(), k[0, :, 0].tolist(), v[0, :, 0].tolist())
    scale, cap = problem.softmax_scale, problem.softcap
    return Query(*rows, scale, cap, q_factor, factors(x.k_descale), factors(x.v_descale))


def visits(model: KernelModel, keys: int) -> list[list[range]]:
    """Blocks of each part in the order of their visits."""
    if not model.tile_n:
        return [[range(keys)]]
    blocks = [range(a, min(a + model.tile_n, keys)) for a in range(0, keys, model.tile_n)]
    size = -(-len(blocks) // model.num_splits)
    parts = [blocks[a : a + size] for a in range(0, len(blocks), size)]
    if not model.is_blocked:
        return [[range(part[0].start, part[-1].stop)] for part in parts]
    return [part[::-1] if model.order.keys == "right_to_left" else part for part in parts]


_BY_HAND: dict[bytes, tuple[list[float], float]] = {}  # a survey runs these tests on thousands of mutants of the bound


def assert_is_by_hand(problem: AttentionProblem, x: Operands, model: KernelModel, rtol: float = 1e-8) -> None:
    key = pickle.dumps((problem, x, model))
    if key not in _BY_HAND:
        _BY_HAND[key] = bound(query_of(problem, x), visits(model, problem.seqlen_k), model)
    out, lse = _BY_HAND[key]
    found = forward_bound(problem, x, model)
    assert np.isfinite(found.out).all()
    np.testing.assert_allclose(found.out[0, 0, 0], out, rtol=rtol, atol=0, err_msg=f"O of {model}")
    np.testing.assert_allclose(found.lse.item(), lse, rtol=rtol, atol=0, err_msg=f"lse of {model}")


@pytest.mark.parametrize("name", [*ORDERS, *FREE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_is_what_its_formulas_make_by_hand(dtype: str, name: str) -> None:
    for spread, mean in ((1.0, 0.0), (6.0, 1.0)):
        problem, x = drawn(dtype, len(name), spread=spread)
        x = replace(x, v=(x.v.astype(np.float32) + np.float32(mean)).astype(x.v.dtype))
        assert_is_by_hand(problem, x, model_of(dtype, name))
    assert_is_by_hand(problem, x, model_of(dtype, name, out_dtype="bf16"))


@pytest.mark.parametrize("name", ["as it is", "unscaled maxima", "a scale in binary32", *FREE])
@pytest.mark.parametrize("tanh", [0.0, TANH_REL])
def test_a_softcap_adds_what_its_operations_err_by(name: str, tanh: float) -> None:
    for dtype in ("bf16", "e4m3"):
        for cap, spread in ((1.5, 1.0), (20.0, 30.0), (1e-3, 1.0), (300.0, 2.0**-6)):
            problem, x = drawn(dtype, 3, spread=spread, softcap=cap)
            assert_is_by_hand(problem, x, model_of(dtype, name, tanh_error=tanh), rtol=1e-8)


@pytest.mark.parametrize("interval", [4, 8])
def test_promotion_costs_a_binary32_addition_for_each_part_of_a_block(interval: int) -> None:
    for name in ("as it is", "unscaled maxima", "splits"):
        for mean in (0.0, 3.0):
            problem, x = drawn("e4m3", 4)
            x = replace(x, v=(x.v.astype(np.float32) + np.float32(mean)).astype(x.v.dtype))
            assert_is_by_hand(problem, x, model_of("e4m3", name, promotion_interval=interval))


LONG = ("as it is", "unscaled maxima", "lazy", "binary32 sums", "splits", *FREE)


@pytest.mark.parametrize("name", LONG)
def test_chains_of_several_steps_count_each_of_them(name: str) -> None:
    for dtype in DTYPES:
        problem, x = drawn(dtype, 5, 75)
        x = replace(x, k_descale=None, v_descale=None)
        assert_is_by_hand(problem, x, model_of(dtype, name, **({} if name in FREE else {"tile_n": 64})))


@pytest.mark.parametrize("power", [-16, -9, -118, -126])
def test_subnormal_operands_and_results_count_with_the_least_normal_number(power: int) -> None:
    """V beside the least normal number of its format, or of binary32: what flushed and lost results cost is seen."""
    dtype = "bf16" if power < -100 else {-16: "fp16", -9: "e4m3"}[power]
    for name in ("as it is", "blocks, builds that flush", "splits", "weights in bf16", "binary32 sums", *FREE):
        problem, x = drawn(dtype, 6)
        assert_is_by_hand(problem, times(x, v=2.0**power), model_of(dtype, name))
        far = times(x, q=9.0)  # weights below the least normal number of P
        assert_is_by_hand(problem, far, model_of(dtype, name))
        assert_is_by_hand(problem, times(far, v=2.0 ** min(power, -3)), model_of(dtype, name))


@pytest.mark.parametrize("name", ["as it is", "unscaled maxima", "splits", "stated splits by lse", *FREE])
def test_weights_and_factors_below_the_end_of_the_exponential_may_vanish(name: str) -> None:
    """Scores some 100 to 200 binary orders apart, in the first block or in the last."""
    for apart in (100.0, 119.0, 122.0, 200.0):
        for first in (True, False):
            problem, x = drawn("bf16", 7, softmax_scale=float(np.log(2)))
            k = np.zeros(x.k.shape)
            k[:, : TILE if first else None, :, 0] = 1.0
            k[:, TILE:, :, 0] *= np.linspace(0.9, 1.0, KEYS - TILE)[:, None]
            x = replace(x, q=np.full(x.q.shape, apart).astype(x.q.dtype), k=k.astype(x.k.dtype))
            assert_is_by_hand(problem, x, model_of("bf16", name))


@pytest.mark.parametrize("name", ["as it is", "unscaled maxima", "scores in bf16", "row sum of rounded weights", *FREE])
def test_where_next_to_nothing_is_known_of_the_weights_they_are_a_mean_all_the_same(name: str) -> None:
    """Scores of thousands in bf16 or of a coarse exponential; V is next to constant, or is not."""
    for dtype in ("bf16", "fp16"):
        for large, mean in ((30.0, 0.0), (300.0, 10.0), (3000.0, 1.0)):
            problem, x = drawn(dtype, 8, spread=large)
            x = replace(x, v=(x.v.astype(np.float32) + np.float32(mean)).astype(x.v.dtype))
            coarse = model_of(dtype, name, exp_error=2.0**-5)
            assert_is_by_hand(problem, x, coarse, rtol=1e-5)
            if dtype == "bf16":
                assert_is_by_hand(problem, x, replace(coarse, scores="bf16"), rtol=1e-5)


def of_few_bits(dtype: str, keys: int, v_factor: float, above: float = 0.0) -> tuple[AttentionProblem, Operands]:
    """Equal scores, whose log2 is ``above``, and V of two bits, so that next to nothing is rounded."""
    problem = AttentionProblem(1, 1, 1, 1, keys, 3, 2, dtype=dtype, softmax_scale=float(np.log(2)))  # type: ignore
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    q, k, v = (np.zeros(shape) for shape in shapes)
    q[..., 0] = 1.0
    k[..., 0] = above
    v[0, :, 0, 0] = 1.0 + np.arange(keys) % 2
    v[0, :, 0, 1] = 2.0 ** (np.arange(keys) % 3)
    arrays = [encode(x, FORMATS[dtype], "ieee") for x in (q, k, v)]
    ones = [Descale(np.full((1, 1, 1), x, np.float32)) for x in (1.0, 1.0, v_factor)]
    return problem, Operands(*arrays, *(ones if dtype == "e4m3" else ()))


@pytest.mark.parametrize("above", [0.0, 1.0, 8.0, -3.0])
@pytest.mark.parametrize("keys", [4, 8, 13, 16, 24])
def test_what_is_exact_is_charged_nothing(keys: int, above: float) -> None:
    for dtype in ("fp16", "e4m3"):
        for v_factor in (1.0, 0.25, 0.3) if dtype == "e4m3" else (1.0,):
            problem, x = of_few_bits(dtype, keys, v_factor, above)
            for interval in (0, 4) if dtype == "e4m3" else (0,):
                for name in ("as it is", "splits" if keys > TILE else "as it is"):
                    assert_is_by_hand(problem, x, model_of(dtype, name, promotion_interval=interval))
            k = x.k.astype(np.float32)
            k[0, ::3, 0, 0] -= 1  # some weights are one half
            k[0, -1, 0, 0] += 2  # and the maximum moves
            assert_is_by_hand(problem, replace(x, k=k.astype(x.k.dtype)), model_of(dtype, "as it is"))


def test_a_factor_below_the_normal_numbers_is_lifted_to_them() -> None:
    problem, x = drawn("e4m3", 9)
    x = replace(x, k_descale=Descale(np.full((1, 1, 3), 2.0**-128, np.float32), TILE))
    for name in ("as it is", "unscaled maxima", *FREE):
        assert_is_by_hand(problem, times(x, q=100.0, k=100.0), model_of("e4m3", name))


@pytest.mark.parametrize("name", ["as it is", *FREE])
def test_nothing_is_known_where_the_scale_of_a_row_is_below_the_normal_numbers(name: str) -> None:
    """softmax_scale times the descale of Q meets that of K, which makes it normal, only after it was rounded."""
    problem, x = drawn("e4m3", 9)
    for power, is_known in ((-124, True), (-128, False)):
        far = replace(
            x,
            q_descale=Descale(np.full((1, 1, 1), 2.0**power, np.float32)),
            k_descale=Descale(np.full((1, 1, 3), 2.0**100, np.float32), TILE),
        )
        found = forward_bound(problem, far, model_of("e4m3", name))
        assert bool(np.isfinite(found.out).all()) == is_known


@pytest.mark.parametrize("name", ["as it is", "blocks, builds that flush", "binary32 sums", "scores in bf16", *FREE])
def test_scores_that_may_be_flushed_count_with_their_factor(name: str) -> None:
    for power in (-63, -66):
        problem, x = drawn("bf16", 10, softmax_scale=2.0**100)
        assert_is_by_hand(problem, times(x, q=2.0**power, k=2.0**power), model_of("bf16", name))


@pytest.mark.parametrize("accumulator", ["wgmma", "fp32", "either"])
def test_a_folded_scale_rounds_q_once_more(accumulator: str) -> None:
    for dtype, power in (("fp16", 0), ("fp16", -12), ("bf16", 0)):
        problem, x = drawn(dtype, 11, softmax_scale=0.1)
        x = times(x, q=2.0**power, k=2.0**-power)
        free = model_of(dtype, "either accumulator", accumulator=accumulator)
        assert_is_by_hand(problem, x, replace(free, order=replace(free.order, scale="folded")))
        stated = model_of(dtype, "as it is", accumulator=accumulator, order=SoftmaxOrder(scale="folded"))
        assert_is_by_hand(problem, x, stated)


@pytest.mark.parametrize("name", ["either, running weights", "either, row sum of rounded weights"])
@pytest.mark.parametrize("spread", [0.0, 2.0**-14, 2.0**-6])
def test_running_weights_that_are_nearly_equal_are_nearly_exact(name: str, spread: float) -> None:
    for dtype in DTYPES:
        for keys, scale in ((1, 0.6), (1, 2.0**12), (KEYS, 0.6)):
            problem, x = drawn(dtype, 14, keys, spread, softmax_scale=scale)
            assert_is_by_hand(problem, x, model_of(dtype, name))
            assert_is_by_hand(problem, x, replace(model_of(dtype, name), accumulator="fp32"))


@pytest.mark.parametrize("keeps_subnormals", [True, False])
def test_scores_that_take_the_scale_in_turn_may_be_flushed_once_more(keeps_subnormals: bool) -> None:
    for scale, power, cap in ((0.6, 0, 0.0), (2.0**-100, -10, 0.0), (2.0**-100, -10, 1.5)):
        problem, x = drawn("bf16", 13, softmax_scale=scale, softcap=cap)
        x = times(x, q=2.0**power, k=2.0**power)
        order = SoftmaxOrder("unscaled", scale="in_turn")
        model = model_of("bf16", "as it is", order=order, keeps_subnormals=keeps_subnormals)
        assert_is_by_hand(problem, x, model)
        assert_is_by_hand(problem, x, replace(model_of("bf16", "binary32"), order=replace(order, keys="any")))


@pytest.mark.parametrize(
    ("dtype", "scale", "power", "cap"),
    [
        ("e4m3", 0.6, 0, 0.0),
        ("bf16", 2.0**-127, 0, 0.0),
        ("bf16", 2.0**100, 16, 0.0),
        ("bf16", 0.6, 0, 2.0**101),
        ("bf16", 0.6, 0, 2.0**-101),
    ],
)
def test_nothing_is_promised_of_scores_in_turn_that_may_leave_binary32(dtype, scale, power, cap) -> None:
    problem, x = drawn(dtype, 13, softmax_scale=scale, softcap=cap)
    if power:
        x = times(x, q=2.0**power, k=2.0**power)
    model = model_of(dtype, "as it is", order=SoftmaxOrder("unscaled", scale="in_turn"))
    assert np.isinf(forward_bound(problem, x, model).out).all()


def test_the_float64_of_the_truth_counts_where_scores_cancel() -> None:
    for dtype in ("fp16", "bf16"):
        for size in (1.0, 2.0**8):
            problem, x = drawn(dtype, 12, softmax_scale=1.0)
            q, k = (a.astype(np.float64) for a in (x.q, x.k))
            q[..., 0], q[..., 1], q[..., 2] = size, -size, 1.0
            k[..., 1] = k[..., 0]
            k[..., 2] = 0
            x = replace(x, q=q.astype(x.q.dtype), k=k.astype(x.k.dtype))
            for name in ("as it is", "splits", *FREE):
                assert_is_by_hand(problem, x, model_of(dtype, name))


def test_scores_in_16_bits_must_leave_room_for_their_scale() -> None:
    """A score of 12,000 times 4 is more than half of the largest number of fp16, so that nothing is promised."""
    problem, x = drawn("fp16", 0, softmax_scale=4.0)
    q, k = np.zeros(x.q.shape, np.float16), np.zeros(x.k.shape, np.float16)
    q[..., 0] = 120
    for size, is_promised in ((100, False), (60, True)):
        k[..., 0] = size
        found = forward_bound(problem, replace(x, q=q, k=k), model_of("fp16", "scores in fp16"))
        assert np.isfinite(found.out).all() == is_promised
