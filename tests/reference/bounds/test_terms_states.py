"""Terms of the a-priori bound that a whole problem hides: single steps of it, on scores and sums that are made up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fa3_reference.bounds.epilogue import _is_power_of_two, _row_sum_error, combine, finish
from fa3_reference.bounds.forward import _move_maximum
from fa3_reference.bounds.forward_sums import _exact, _grouped, accumulate
from fa3_reference.bounds.forward_weights import BlockWeights, weights_of
from fa3_reference.bounds.head import Head
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.order import SoftmaxOrder
from fa3_reference.bounds.state import SplitResult, State
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, Descale, Operands
from tests.quality.weighed_bound import SOURCES, weighed
from tests.reference.bounds.by_hand import FLOAT64_ROOM, U, g
from tests.reference.bounds.by_hand_forward import LN2, e, score
from tests.reference.bounds.test_terms_forward import model_of, query_of

ROW = np.arange(1)
NONE = dict.fromkeys(SOURCES, 0.0)  # what is not a source of error of its own is left


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """The bound itself runs so: what is infinite or NaN on its way is part of it."""
    with np.errstate(all="ignore"):
        yield


def operands_of(
    dtype: str, q: list[float], k: list[list[float]], v: float = 1.0, factors: tuple[float, ...] = (), **rest: Any
) -> tuple[AttentionProblem, Operands]:
    """One query of three channels, keys and a constant V, with descales of Q, K and V."""
    problem = AttentionProblem(1, 1, 1, 1, len(k), 3, 2, dtype=dtype, **rest)  # type: ignore[arg-type]
    arrays = np.resize(q, problem.q_shape), np.resize(k, problem.k_shape), np.full(problem.v_shape, v)
    q_stored, k_stored, v_stored = (encode(x, FORMATS[dtype], "ieee") for x in arrays)
    descales = [Descale(np.full((1, 1, 1), x, np.float32)) for x in factors]
    return problem, Operands(q_stored, k_stored, v_stored, *descales)


def head_of(*args: Any, **rest: Any) -> Head:
    problem, x = operands_of(*args, **rest)
    return Head.of(problem, x, next(iter(problem.sequences())), range(1))


def state_of(rows: int = 1, channels: int = 2, **sums: Any) -> State:
    state = State(rows, channels)
    for name, value in sums.items():
        old = getattr(state, name)
        is_array = isinstance(old, np.ndarray)
        setattr(state, name, np.broadcast_to(np.array(value, old.dtype), old.shape).copy() if is_array else value)
    return state


@pytest.mark.parametrize("name", ["as it is", "binary32 sums", "either accumulator"])
def test_a_factor_below_the_normal_numbers_lifts_what_a_score_errs_by(name: str) -> None:
    """In the whole bound such scores are below 2^-100; here their errors stand alone, also where scores cancel."""
    q, k = [224.0, 224.0, 13.0], [[240.0, -240.0, 0.0], [240.0, -240.0, 11.0], [3.0, 5.0, 7.0], [240.0, 240.0, 0.0625]]
    problem, x = operands_of("e4m3", q, k, 1.0, (1.0, 2.0**-127, 1.0))
    model = model_of("e4m3", name)
    found = Head.of(problem, x, next(iter(problem.sequences())), range(1)).scores(ROW, slice(0, 4), model)
    scores = [score(query_of(problem, x), j, model) for j in range(4)]
    np.testing.assert_allclose(found[0][0], [s.x for s in scores], rtol=1e-13, atol=0)
    np.testing.assert_allclose(found[1][0], [s.dx for s in scores], rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("key", "is_known"),
    [
        ([1.5 * 2.0**40, -1.5 * 2.0**40, 0.0], False),  # they cancel, and are off by g(4) of 2^-23: by 1.5 2^60
        ([2.0**39, -(2.0**39), 0.0], True),
        ([1.5 * 2.0**20, 0.0, 0.0], False),
        ([1.5 * 2.0**19, 0.0, 0.0], True),
    ],
)
def test_a_raw_score_meets_a_factor_that_is_subnormal_with_its_error(key: list[float], is_known: bool) -> None:
    """2 c / softcap is below 2^-126, which is known of scores below 2^60 only."""
    head = head_of("bf16", [2.0**40, 2.0**40, 0.0], [key], softmax_scale=2.0**-60, softcap=2.0**68)
    model = KernelModel("bf16", "fp32", 64, 8, accumulator="fp32")
    x, *_ = head.scores(ROW, slice(0, 1), model)
    assert np.isfinite(x).item() == is_known


@pytest.mark.parametrize(("size", "is_known"), [(0.75, False), (0.25, True)])
def test_products_that_cancel_are_known_where_their_sizes_cannot_overflow(size: float, is_known: bool) -> None:
    """Of a folded scale: two products of 0.75 2^126 have sizes beyond a quarter of binary32's end, two of 2^124 not."""
    large = size * 2.0**63
    head = head_of("bf16", [2.0**63, 2.0**63, 0.0], [[large, -large, 0.0]], softmax_scale=2.0**-20)
    model = KernelModel("bf16", "fp32", 64, 8, order=SoftmaxOrder(scale="folded"))
    s, *_ = head._raw_scores(ROW, slice(0, 1), model)
    assert np.isfinite(s).item() == is_known


MODEL = KernelModel("fp16", "fp32", 64, 8)


def test_a_rounded_maximum_is_as_far_off_as_the_farther_of_its_ends() -> None:
    """A later block that is lower leaves 5, which is between 3 and 5.5, and its rounding adds half an ulp of 7."""
    state = state_of(max=5.0, max_low=3.0, max_high=5.5)
    moved = _move_maximum(state, np.array([[1.0]]), np.zeros((1, 1)), 0.0, MODEL)
    assert not moved.any()
    assert state.tau.item() == 2.0 + 2.0**-22


def test_the_factor_of_a_moved_maximum_rounds_the_farthest_that_its_exponent_may_be() -> None:
    """From -(2 - 2^-10) the exponent may be 1.5 2^-10 off, past -2, beyond which half an ulp is 2^-23."""
    state = state_of(max=0.0, max_low=0.0, max_high=0.0, tau=1.5 * 2.0**-10)
    _move_maximum(state, np.array([[2 - 2.0**-10]]), np.zeros((1, 1)), 0.0, MODEL)
    np.testing.assert_allclose(state.worst, e(MODEL.exp_error) + LN2 * 2.0**-23, rtol=1e-12)


def test_the_largest_weight_is_1_but_for_the_rounding_of_its_maximum() -> None:
    """Of e4m3 the maximum is 8 less; a coarse exponential and a score that is 0.2 off would allow more."""
    model = KernelModel("e4m3", "fp32", 64, 8, exp_error=0.25)
    w = weights_of(state_of(max=0.0), np.zeros((1, 1)), np.full((1, 1), 0.2), model)
    np.testing.assert_allclose(w.either, 2.0 ** (2 * U * 8) * 1.5 - 1, rtol=1e-12)


def test_normalised_weights_cannot_leave_their_format() -> None:
    """A lazy factor lets a running weight be 2^8 times 1.9, above e4m3's 448; a normalised one is 1 at most."""
    for weights, leaves in (("normalised", False), ("running", True)):
        order = SoftmaxOrder(rescale="lazy", weights=weights)  # type: ignore[arg-type]
        model = KernelModel("e4m3", "fp32", 64, 8, order=order, exp_error=0.45)
        state = state_of(max=0.0)
        weights_of(state, np.zeros((1, 1)), np.zeros((1, 1)), model)
        assert state.outside.all() == leaves


@pytest.mark.parametrize(("v", "overflows"), [(1.5 * 2.0**109, True), (1.5 * 2.0**108, False)])
def test_an_output_is_at_most_what_its_heaviest_weights_make_of_v(v: float, overflows: bool) -> None:
    """Twice 2^8 for the rounding of a maximum, times 2^8 of a lazy factor; sums may be known to 2^127 only."""
    model = KernelModel("bf16", "fp32", 64, 8, order=SoftmaxOrder("unscaled", "lazy"))
    head = head_of("bf16", [0.0] * 3, [[0.0] * 3], v)
    state = state_of(max=0.0, o_error=2.0**127, v_factor=1.0)
    w = weights_of(state, np.zeros((1, 1)), np.zeros((1, 1)), model)
    accumulate(state, head, slice(0, 1), w, np.zeros((1, 1)), model)
    assert state.outside.all() == overflows


def grid_of_o(o: float, o_error: float) -> float:
    """The power of two of which a rescaled O is a multiple, where products are integers."""
    state = state_of(channels=1, o=o, o_error=o_error, v_factor=1.0)
    one = np.ones((1, 1))
    weights = BlockWeights(one, one > 0, one, one, one, one, np.ones(1, int), np.ones(1), np.ones(1))
    _exact(state, one, weights, (one, one, one), one > 0, 1, MODEL)
    return state.o_grid.item()


def test_a_rescaled_output_is_a_multiple_of_the_last_bit_of_the_least_that_it_may_be() -> None:
    assert grid_of_o(1 + 2.0**-4, 2.0**-5) == 2.0**-23
    assert grid_of_o(1 + 2.0**-4, 1.5 * 2.0**-4) == 2.0**-24  # it may be below 1
    assert grid_of_o(1.0, 1.0) == grid_of_o(1.0, 2.0) == 2.0**-149  # binary32's least number


def test_cuts_toward_zero_take_no_more_than_all_there_is() -> None:
    """A product of 2^40 that others cancel is cut by more than the 2 of C and the 3 of a block: each cut takes 5."""
    model = KernelModel.any_order("e4m3", "fp32", "either")
    sizes = tuple(np.full((1, 1), x) for x in (2.0, 3.0, 2.0**40, 0.0))
    counts = np.full((1, 1), 8), 1
    assert _grouped(sizes, counts, model).item() == 10.0
    for source in ("products", "sums"):
        with weighed(**{source: 0.0}):
            assert _grouped(sizes, counts, model).item() == 5.0


@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
@pytest.mark.parametrize(("high", "low", "off"), [(2.125, 1.97, 0.125), (2.01, 1.75, 0.25)])
def test_a_row_sum_holds_the_largest_weight(dtype: str, high: float, low: float, off: float) -> None:
    """Where errors may take the whole row sum, that weight is left: 2 to minus what its exponent may be off by."""
    head = head_of(dtype, [0.0] * 3, [[0.0] * 3])
    state = state_of(max=2.0, max_high=high, max_low=low, l=1.0, l_down=1.0, worst=40.0, v_min=0.0, v_max=1.0)
    with weighed(**NONE):
        part = finish(state, head, KernelModel(dtype, "fp32", 64, 8, exp_error=2.0**-8))  # type: ignore[arg-type]
    offset = 8 if dtype == "e4m3" else 0
    expected = off + g(3) * (2.0 + offset + off) - math.log2(1 - 2.0**-8)
    np.testing.assert_allclose(part.lse_error, expected * FLOAT64_ROOM, rtol=1e-12)


@pytest.mark.parametrize("factor", [2.0**20, 1.5 * 2.0**30, 0.25])
def test_what_is_flushed_of_an_output_is_multiplied_by_the_descale_of_v(factor: float) -> None:
    """Of an O that is 0 and has no other error; the second product with a descale below 1 is binary32's own."""
    head = head_of("e4m3", [0.0] * 3, [[0.0] * 3], 1.0, (1.0, 1.0, factor))
    state = state_of(max=0.0, max_high=0.0, max_low=0.0, l=1.0, v_min=0.0, v_max=0.0, v_factor=factor)
    with weighed(**NONE):
        part = finish(state, head, KernelModel("e4m3", "fp32", 64, 8))
    np.testing.assert_array_equal(part.error, 2.0**-148 * max(1.0, factor))


@pytest.mark.parametrize(
    ("row_sum", "up", "error", "is_power"),
    [
        (1.0, 0.9, 0.0, True),  # rounds to 1
        (1.0, 1.5, 0.0, False),  # half of it would
        (1 + 0.9 * U, 0.0, 0.05, True),
        (1 + 0.9 * U, 0.0, 0.18, False),  # may end above 1 + u, and half of it not
        (1 - 0.4 * U, 0.0, 0.05, True),
        (1 - 0.4 * U, 0.0, 0.18, False),  # may end below 1 - u / 2
    ],
)
def test_a_row_sum_is_a_power_of_two_where_both_of_its_ends_round_to_it(
    row_sum: float, up: float, error: float, is_power: bool
) -> None:
    """Errors are in units of u = 2^-24: from 1 upwards numbers are 2 u apart, below 1 they are u apart."""
    state = state_of(l=row_sum, l_up=up * U)
    assert _is_power_of_two(state, np.array([error * U]), MODEL).item() == is_power


def row_sum_error_of(**sums: Any) -> float:
    return _row_sum_error(state_of(**sums), MODEL).item()


def test_a_row_sum_of_more_weights_than_binary32_counts_rounds_as_its_chains_do() -> None:
    """The error of 2^25 additions one after the other is not known; that of two on top of the chains is."""
    assert row_sum_error_of(l=1.0, l_grid=0.0, weights=2**25) == g(2)
    assert row_sum_error_of(l=1.0, l_grid=0.0, weights=2) == g(1)


def test_a_row_sum_that_no_addition_rounds_is_one_in_the_scale_of_the_computed_maximum() -> None:
    """It is 1, of multiples of 1.5 2^-24, beyond 2^24 of which additions round: 2 if the maximum may be 1 lower."""
    assert row_sum_error_of(l=1.0, l_grid=1.5 * U, weights=2) == 0
    assert row_sum_error_of(l=1.0, l_grid=1.5 * U, weights=2, tau=1.0) == g(1)


def part_of(lse: float, lse_error: float, o: float = 1.0, error: float = 0.0) -> SplitResult:
    column = np.ones((1, 1))
    return SplitResult(o * column, error * column, 0 * column, np.array([lse]), np.array([lse_error]))


@pytest.mark.parametrize("order", ["sum", "lse"])
def test_a_split_without_keys_takes_nothing_from_the_others(order: str) -> None:
    """Its lse of -inf is infinitely far from theirs, and its weight is 0 all the same."""
    model = KernelModel("fp16", "fp32", 64, 8, num_splits=2, order=SoftmaxOrder("unscaled", combine=order))  # type: ignore
    empty = part_of(-math.inf, 0.0, 0.0)
    found = combine([part_of(1.0, 2.0**-20), empty], model)
    twice = combine([part_of(1.0, 2.0**-20), part_of(1.0, 2.0**-20)], model)
    assert 0 < found.error.item() <= twice.error.item() < 1e-4
    assert 0 < found.lse_error.item() <= twice.lse_error.item() < 1e-4


def test_a_split_that_may_vanish_lowers_the_lse_of_all() -> None:
    """Errors of 59 leave 2^-59 of the first part, and of one 1.5 lower nothing: it may be 2^-120 of the largest."""
    model = KernelModel("fp16", "fp32", 64, 8, num_splits=2)
    with weighed(**NONE):
        found = combine([part_of(0.0, 59.0), part_of(-1.5, 59.0)], model)
    expected = (59 + math.log2(1 + 2.0**-1.5)) * FLOAT64_ROOM
    np.testing.assert_allclose(found.lse_error, expected, rtol=1e-12)
