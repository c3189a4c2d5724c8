"""What the bound of an unstated order assumes of the machine and of the row sum, and orders that can only be stated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.bounds.forward import ErrorBound, forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.order import SoftmaxOrder
from fa3_reference.bounds.steps import grouped_score_error
from fa3_reference.bounds.tensor_core import multiply
from fa3_reference.formats import FORMATS
from fa3_reference.problem import DTYPES, AttentionProblem, Operands
from tests.quality.legal_orders import ORDERS, Order, Result, added, attend
from tests.quality.weighed_bound import weighed_bound

ADDS_P, ADDS_ROUNDED_P, DIVIDES_P = KernelModel.hypotheses("fp16", "fp16")


def ratio(problem: AttentionProblem, x: Operands, got, bound: ErrorBound) -> float:
    """Largest error / bound of O and LSE."""
    truth = attention(problem, *x.dequantized(problem))
    pairs = ((got.out, truth.out, bound.out), (got.lse, truth.lse, bound.lse))
    errors = [np.abs(a.astype(np.float64) - b) / np.where(c > 0, c, np.inf) for a, b, c in pairs]
    return max(float(error.max()) for error in errors)


def zeros(problem: AttentionProblem) -> list[np.ndarray]:
    dtype = FORMATS[problem.dtype].dtype
    return [np.zeros(shape, dtype) for shape in (problem.q_shape, problem.k_shape, problem.v_shape)]


def normal(problem: AttentionProblem, seed: int = 0) -> Operands:
    rng = np.random.default_rng(seed)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    return Operands(*(rng.standard_normal(shape).astype(FORMATS[problem.dtype].dtype) for shape in shapes))


@pytest.mark.parametrize("family", ["flash3", "gluon"])
def test_e4m3_on_hopper_keeps_the_bound_of_either_accumulator_and_leaves_that_of_binary32(family):
    problem = AttentionProblem(1, 1, 1, 64, 64, 128, dtype="e4m3")
    x = normal(problem)
    x = replace(x, q=(3 * x.q.astype(np.float32)).astype(x.q.dtype), k=(3 * x.k.astype(np.float32)).astype(x.k.dtype))
    got = forward(problem, x, default_config(problem, family=family))
    found = {
        accumulator: ratio(problem, x, got, forward_bound(problem, x, model))
        for accumulator in ("fp32", "either")
        for model in (KernelModel.hypotheses("e4m3", "bf16", accumulator)[ADDS_P],)
    }
    assert found["fp32"] > 2
    assert found["either"] <= 1


def test_one_key_under_a_softcap_keeps_the_bound_of_any_tanh():
    """FlashAttention-3's tanh.approx of a score of 19.9375: nothing else errs, so that its error is all of lse."""
    problem = AttentionProblem(1, 1, 1, 1, 1, 64, dtype="bf16", softcap=20.0, softmax_scale=0.125)
    q, k, v = zeros(problem)
    q[..., 0] = 159.5
    k[..., 0] = 1
    x = Operands(q, k, v)
    got = forward(problem, x, default_config(problem, family="flash3"))
    model = KernelModel.any_order("bf16", "bf16")
    assert ratio(problem, x, got, forward_bound(problem, x, model)) <= 1
    assert ratio(problem, x, got, forward_bound(problem, x, replace(model, tanh_error=0.0))) > 1.5


def test_either_tanh_keeps_its_bound_and_half_of_tanh_approx_does_not():
    problem = AttentionProblem(1, 1, 1, 8, 4, 16, softcap=5.0, softmax_scale=1.0)
    x = normal(problem)
    x = replace(x, q=(12 * x.q.astype(np.float32)).astype(np.float16))
    model = KernelModel.any_order("fp16", "fp32")
    for name in ("tanh.approx", "tanh of ex2 and rcp"):
        got = attend(ORDERS[name], problem, x, np.random.default_rng(0), "fp32")
        assert ratio(problem, x, got, forward_bound(problem, x, model)) <= 1
    approx = attend(ORDERS["tanh.approx"], problem, x, np.random.default_rng(0), "fp32")
    halved = replace(model, tanh_error=model.tanh_error / 2)
    assert ratio(problem, x, approx, forward_bound(problem, x, halved)) > 1
    # Where scores are tiny the tanh of ex2 and rcp errs by much more than tanh.approx does.
    tiny = replace(x, q=(2.0**-16 * x.q.astype(np.float32)).astype(np.float16))
    alone = replace(model, order=replace(model.order, keys="left_to_right"))
    assert alone.tanh_errors == (model.tanh_error,)
    assert (forward_bound(problem, tiny, alone).lse < forward_bound(problem, tiny, model).lse).all()


def test_subnormal_q_beside_large_k_keeps_the_bound_of_either_accumulator():
    """The tensor core aligns a subnormal Q as if it were the least normal number, and cuts what is beside it."""
    problem = AttentionProblem(1, 1, 1, 1, 1, 128, softmax_scale=16.0)
    rng = np.random.default_rng(24)
    q, k, v = zeros(problem)
    q[...] = (1 + rng.integers(0, 1024, q.shape) / 1024) * 2.0**-14
    k[...] = (1 + rng.integers(0, 1024, k.shape) / 1024) * 2.0**-1
    q[..., ::16] = 2.0**-24
    k[..., ::16] = 2.0**14
    x = Operands(q, k, v)
    got = forward(problem, x, default_config(problem, family="gluon"))
    found = [
        ratio(problem, x, got, forward_bound(problem, x, KernelModel.any_order("fp16", "fp16", accumulator)))
        for accumulator in ("fp32", "either")
    ]
    assert found[0] > 4
    assert found[1] <= 1


def grouped(q: np.ndarray, k: np.ndarray, dtype: str) -> float:
    """Largest error / bound of sums of the tensor core, in several groups."""
    core = KernelModel(dtype, "fp32").core
    bound = grouped_score_error(q, k, core)
    exact = q @ k.T
    errors = [np.abs(multiply(q, k.T, core) - exact)]
    for how in ("chained", "promoted", "halves"):
        errors.append(np.abs(added(how, q.astype(np.float32), k.T.astype(np.float32), dtype) - exact))
    assert all((error <= bound).all() for error in errors)
    return float(max((error / np.where(bound > 0, bound, np.inf)).max() for error in errors))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_in_groups_of_any_order_keep_their_bound_and_come_near_it(dtype):
    rng = np.random.default_rng(1)
    for depth in (7, 32, 100):
        q, k = (rng.standard_normal((9, depth)).astype(FORMATS[dtype].dtype).astype(float) for _ in range(2))
        q[:3] *= 2.0 ** rng.integers(-12, 2, (3, depth)) if dtype != "e4m3" else 1.0
        q = q.astype(FORMATS[dtype].dtype).astype(float)
        grouped(q, k, dtype)
        grouped(np.rint(2 * q) / 2, np.rint(2 * k) / 2, dtype)
    # One product sets the grid of a step, and the others are cut by almost a unit of it, each.
    core = KernelModel(dtype, "fp32").core
    most = 2 - core.operand.epsilon
    first, sizes = (2.0**4, 2.0**5), (most * 2.0**-3, most * 2.0**-2)
    if dtype != "e4m3":
        first = (1.0, 1.0)
        sizes = (most * 2.0**-11, 2.0**-14)
    q, k = (np.full((1, core.k_step), size) for size in sizes)
    q[0, 0] = first[0]
    k[0, 0] = first[1]
    assert grouped(q, k, dtype) > 0.5


def test_what_lies_on_one_grid_is_cut_by_no_group():
    q = np.array([[4.0, 2.0, -6.0, 8.0]])
    for dtype in DTYPES:
        assert not grouped_score_error(q, q, KernelModel(dtype, "fp32").core).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [1, 24])
def test_where_weights_are_equal_a_running_p_is_exact_and_a_normalised_one_is_rounded(dtype, keys):
    """One key, or scores of 0: an output off by 3 % leaves the bound of e4m3, by 2 ulp those of 16 bits."""
    out = "bf16" if dtype == "e4m3" else dtype
    problem = AttentionProblem(1, 1, 1, 1, keys, 16, dtype=dtype, softmax_scale=1.0)
    q, k, v = zeros(problem)
    if keys == 1:
        q[...] = 1.5
    k[...] = 1.25
    v[...] = np.linspace(0.5, 1, keys)[:, None, None]
    x = Operands(q, k, v)
    off = 0.03 if dtype == "e4m3" else 2 * FORMATS[dtype].epsilon
    bounds = {name: forward_bound(problem, x, m) for name, m in KernelModel.hypotheses(dtype, out, "either").items()}
    for p_scale in (1.0, 256.0, 448.0, 2.0**8.807) if dtype == "e4m3" else (1.0,):
        order = Order("chained", "chained", tile=16, p_scale=p_scale)
        got = attend(order, problem, x, np.random.default_rng(0))
        assert ratio(problem, x, got, bounds[ADDS_P]) <= 1
        assert ratio(problem, x, got._replace(out=got.out.astype(float) * (1 + off)), bounds[ADDS_P]) > 1
        assert ratio(problem, x, got._replace(out=got.out.astype(float) * (1 + off)), bounds[ADDS_ROUNDED_P]) > 1
    normalised = attend(Order(normalised=True), problem, x, np.random.default_rng(0))
    assert ratio(problem, x, normalised, bounds[DIVIDES_P]) <= 1
    before = attend(Order(normalised=True), problem, x, np.random.default_rng(0), "fp32")
    running = KernelModel.hypotheses(dtype, "fp32")[ADDS_P]
    assert (ratio(problem, x, before, forward_bound(problem, x, running)) > 1) == (keys > 1)


def beside_middles(dtype: str, keys: int = 200) -> tuple[AttentionProblem, Operands]:
    """All weights but one lie beside the middle of two numbers of P's format, and are rounded upwards; V is 1."""
    fmt = FORMATS[dtype]
    problem = AttentionProblem(1, 1, 1, 1, keys, 16, dtype=dtype, softmax_scale=1.0)
    q, k, v = zeros(problem)
    q[0, 0, 0, :3] = (1, 2.0**-5, 2.0**-9 if dtype == "e4m3" else 2.0**-10)
    left = np.log(0.25 * (1 + 1.02 * fmt.epsilon / 2))
    for channel in range(3):
        unit = float(q[0, 0, 0, channel])
        k[0, 1:, 0, channel] = np.array(left / unit).astype(fmt.dtype)
        left -= float(k[0, 1, 0, channel]) * unit
    v[...] = 1
    return problem, Operands(q, k, v)


def both_row_sums(problem: AttentionProblem, x: Operands) -> list[Result]:
    return [attend(Order(of_rounded=of), problem, x, np.random.default_rng(0), "fp32") for of in (False, True)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_sum_of_rounded_weights_is_another_hypothesis_and_its_rounding_is_attained(dtype):
    problem, x = beside_middles(dtype)
    plain, of_rounded = both_row_sums(problem, x)
    models = KernelModel.hypotheses(dtype, "fp32")
    of_p, of_rounded_p = (forward_bound(problem, x, models[name]) for name in (ADDS_P, ADDS_ROUNDED_P))
    assert ratio(problem, x, plain, of_p) <= 1 < ratio(problem, x, plain, of_rounded_p)
    assert ratio(problem, x, of_rounded, of_rounded_p) <= 1 < ratio(problem, x, of_rounded, of_p)
    halved = weighed_bound(p_rounding=0.5)(problem, x, models[ADDS_ROUNDED_P])
    assert ratio(problem, x, of_rounded, halved) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mix_of_hypotheses_keeps_none_of_their_bounds(dtype):
    """O of a row sum that adds P beside an lse of one that adds the rounded P: each keeps its own bound."""
    problem, x = beside_middles(dtype)
    plain, of_rounded = both_row_sums(problem, x)
    mixed = Result(plain.out, of_rounded.lse)
    for model in KernelModel.hypotheses(dtype, "fp32").values():
        assert ratio(problem, x, mixed, forward_bound(problem, x, model)) > 1


def test_cuts_of_p_v_are_charged_where_p_is_exact():
    """Equal scores: every P is 1, so that an e4m3 sum loses the small V that the tensor core cuts, and nothing else."""
    problem = AttentionProblem(1, 1, 1, 1, 128, 16, dtype="e4m3")
    q, k, v = zeros(problem)
    v[...] = 15 * 2.0**-9
    v[0, ::32] = 256
    x = Operands(q, k, v)
    got = attend(Order(sums="chained"), problem, x, np.random.default_rng(0), "fp32")
    model = KernelModel.any_order("e4m3", "fp32", "either")
    whole, less = (weighed_bound(p_rounding=0.0, products=w)(problem, x, model) for w in (1.0, 0.1))
    assert ratio(problem, x, got, whole) <= 1 < ratio(problem, x, got, less)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("accumulator", ["fp32", "either", "wgmma"])
def test_a_scale_folded_into_q_can_be_stated_and_is_outside_any_order(dtype, accumulator):
    problem = AttentionProblem(1, 1, 1, 8, 64, 64, dtype=dtype, softmax_scale=0.1)
    x = normal(problem)
    x = replace(x, q=(4 * np.abs(x.q.astype(np.float32))).astype(x.q.dtype), k=np.abs(x.k))
    order = Order("chained" if accumulator == "wgmma" else "serial", scale="folded")
    got = attend(order, problem, x, np.random.default_rng(0), "fp32")
    any_order = KernelModel.any_order(dtype, "fp32", accumulator)
    stated = replace(any_order, order=replace(any_order.order, scale="folded"))
    assert ratio(problem, x, got, forward_bound(problem, x, stated)) <= 1
    assert ratio(problem, x, got, forward_bound(problem, x, any_order)) > 4


def test_rounding_of_a_folded_scale_is_attained():
    """One channel whose scaled Q lies beside a middle: half of the bound would not hold."""
    problem = AttentionProblem(1, 1, 1, 64, 1, 16, softmax_scale=0.1)
    q, k, v = zeros(problem)
    q[0, :, 0, 0] = 5 + np.arange(64) / 64
    k[..., 0] = 100
    x = Operands(q, k, v)
    got = attend(Order(scale="folded"), problem, x, np.random.default_rng(0), "fp32")
    model = KernelModel("fp16", "fp32", order=SoftmaxOrder(scale="folded", keys="any"), accumulator="fp32")
    assert 0.5 < ratio(problem, x, got, forward_bound(problem, x, model)) <= 1
    large = replace(x, q=np.full_like(q, 6e4), k=np.zeros_like(k))
    beyond = replace(problem, softmax_scale=2.0)
    assert np.isinf(forward_bound(beyond, large, model).lse).all()  # Q with the scale in it is infinite


def test_a_row_sum_of_rounded_weights_needs_weights_that_are_divided_at_the_end():
    with pytest.raises(ValueError, match="needs weights 'running', got 'normalised'"):
        SoftmaxOrder(weights="normalised", row_sum_of="rounded")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_of_either_accumulator_is_never_below_that_of_one(dtype):
    for seed, cap in ((0, 0.0), (1, 3.0)):
        problem = AttentionProblem(1, 2, 1, 8, 100, 32, dtype=dtype, softcap=cap)
        x = normal(problem, seed)
        either, one = (forward_bound(problem, x, KernelModel.any_order(dtype, "fp32", a)) for a in ("either", "fp32"))
        assert (either.out >= one.out * (1 - 2.0**-20)).all()
        assert (either.lse >= one.lse * (1 - 2.0**-20)).all()


@pytest.mark.parametrize("first", [0.01, 0.5, 1.0])
def test_one_key_a_step_keeps_its_bound_where_every_maximum_moves_and_every_exponential_errs_alike(first):
    """512 scores that rise by 2^-14: the first weight meets 511 factors, each 2 ulp off to the same side."""
    keys = 512
    problem = AttentionProblem(1, 1, 1, 1, keys, 16, softmax_scale=1.0)
    q, k, v = zeros(problem)
    q[..., :2] = 1, 2.0**-10
    k[0, :, 0, 0] = np.arange(keys) * 2.0**-14
    k[0, :, 0, 1] = (np.arange(keys) * 2.0**-14 - k[0, :, 0, 0].astype(float)) * 2.0**10
    v[...] = 1
    v[0, : int(first * keys)] = -1
    x = Operands(q, k, v)
    bound = forward_bound(problem, x, KernelModel.hypotheses("fp16", "fp32")[ADDS_P])
    for seed in range(3):
        got = attend(ORDERS["one key at a time, exponential of 2 ulp"], problem, x, np.random.default_rng(seed), "fp32")
        assert ratio(problem, x, got, bound) <= 1


@pytest.mark.parametrize("is_lazy", [True, False])
def test_nothing_is_promised_where_a_sum_of_some_order_overflows_before_the_maximum_is_met(is_lazy):
    """Keys that end with no weight to speak of have one at first; under a maximum that stays weights exceed 1."""
    problem = AttentionProblem(1, 1, 1, 1, 9, 16, dtype="bf16", softmax_scale=float(np.log(2)))
    q, k, v = zeros(problem)
    q[..., 0] = 1
    k[0, :, 0, 0] = [0, *[7.5] * 8] if is_lazy else [*[-200] * 8, 0]
    v[0, : None if is_lazy else 8] = 2.0**119 if is_lazy else 2.0**126
    x = Operands(q, k, v)
    got = attend(Order(tile=1, lazy=is_lazy), problem, x, np.random.default_rng(0), "fp32")
    assert not np.isfinite(got.out).any()
    assert all(np.isinf(forward_bound(problem, x, m).out).all() for m in hypotheses_that_run("bf16"))
    at_once = KernelModel("bf16", "fp32", 64, 64, order=SoftmaxOrder("unscaled", "lazy" if is_lazy else "always"))
    assert np.isfinite(forward_bound(problem, x, at_once).out).all() != is_lazy


def hypotheses_that_run(dtype: str) -> list[KernelModel]:
    """Return hypotheses of running weights."""
    return [m for name, m in KernelModel.hypotheses(dtype, "fp32").items() if name != DIVIDES_P]
