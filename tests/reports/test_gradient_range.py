"""Sums in any order: the ends are those of all permutations, or enclose them."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from fa3_kernels.twin import float32
from fa3_reports.gradient_range import EXHAUSTIVE, range_of_sums


def parts(rng: np.random.Generator, n: int, spread: float, size: int = 40) -> np.ndarray:
    return (rng.standard_normal((n, size)) * np.exp2(rng.uniform(-spread, spread, (n, size)))).astype(np.float32)


def added(x: np.ndarray, order, flushes: bool) -> np.ndarray:
    total = np.zeros(x.shape[1:], np.float32)
    for i in order:
        total = total + x[i]
        total = float32.flushed(total) if flushes else total
    return total


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("spread", [1, 20])
def test_few_parts_give_the_ends_of_all_permutations(n: int, spread: float) -> None:
    x = parts(np.random.default_rng(n), n, spread)
    sums = np.stack([added(x, order, True) for order in permutations(range(n))])
    low, high = range_of_sums(x)
    assert np.array_equal(low, sums.min(0))
    assert np.array_equal(high, sums.max(0))
    assert (low < high).any() == (n > 2)


@pytest.mark.parametrize("spread", [0, 8, 30])
def test_no_permutation_of_many_parts_leaves_the_enclosure(spread: float) -> None:
    rng = np.random.default_rng(9)
    for n in (EXHAUSTIVE + 1, 20, 60):
        x = parts(rng, n, spread)
        x[-1] = -added(x[:-1], range(n - 1), True)  # cancels: the relative error of the sum is large
        low, high = range_of_sums(x)
        exact = x.astype(np.float64).sum(0)
        ascending = np.argsort(np.abs(x).sum(1))
        orders = [rng.permutation(n) for _ in range(60)] + [ascending, ascending[::-1]]
        orders += [np.argsort(x[:, j]) for j in range(4)] + [np.argsort(-x[:, j]) for j in range(4)]
        for order in orders:
            got = added(x, order, True)
            assert ((low <= got) & (got <= high)).all()
        width = (high.astype(np.float64) - low) / np.abs(x).sum(0, dtype=np.float64)
        assert width.max() < 2 * n * 2.0**-23
        assert ((low <= exact) & (exact <= high)).all()


def test_a_lost_part_leaves_the_enclosure() -> None:
    x = parts(np.random.default_rng(3), 20, 1)
    low, high = range_of_sums(x)
    got = added(x[:-1], range(19), True)
    assert ((got < low) | (got > high)).mean() > 0.9


def test_subnormal_parts_and_sums_are_flushed_only_where_asked() -> None:
    x = np.array([[2.0**-130], [1.5 * 2.0**-126], [-(2.0**-126)]], np.float32)
    assert [float(end[0]) for end in range_of_sums(x)] == [0.0, 0.0]
    assert [float(end[0]) for end in range_of_sums(x, flushes=False)] == [2.0**-127 + 2.0**-130] * 2


def test_nan_and_overflow() -> None:
    big = np.finfo(np.float32).max
    x = np.full((EXHAUSTIVE + 1, 3), 1, np.float32)
    x[0, 0], x[1, 1], x[:2, 2] = np.nan, np.inf, big
    low, high = range_of_sums(x)
    assert np.isnan([low[:2], high[:2]]).all()
    assert (low[2], high[2]) == (-np.inf, np.inf)


def test_parts_that_are_zero_everywhere_do_not_count() -> None:
    x = np.zeros((50, 4), np.float32)
    x[7], x[30] = 1, 2.0**-24
    low, high = range_of_sums(x)
    assert np.array_equal(low, high)


@pytest.mark.parametrize("shape", [(0, 3, 4), (0, 3, 0), (2, 0, 4)])
def test_nothing_that_is_added_leaves_zeros_of_its_shape(shape: tuple[int, ...]) -> None:
    for end in range_of_sums(np.ones(shape, np.float32)):
        assert end.shape == shape[1:]
        assert not end.any()
