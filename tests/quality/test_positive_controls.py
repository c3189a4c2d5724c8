"""The error bound is tight: without one of its terms, or with half of it, some input leaves it."""

from __future__ import annotations

import pytest

from fa3_reference.problem import DTYPES
from tests.quality.positive_controls import CONSTRUCTIONS, control, promotion

# No input is known that attains these far enough (reports/notes/bounds.md), or evolution finds it.
NOT_ATTAINED = {("exponent", "e4m3", 0.5), ("exponent", "e4m3", 0.0), ("exp", "e4m3", 0.5)}
EVOLVED = {("products", "e4m3", 0.5), ("products", "e4m3", 0.0)}
CASES = [
    pytest.param(construction, dtype, weight, id=f"{construction.__name__} {dtype} times {weight:g}")
    for construction in CONSTRUCTIONS
    for dtype in (("e4m3",) if construction is promotion else DTYPES)
    for weight in (0.5, 0.0)
    if (construction.__name__, dtype, weight) not in NOT_ATTAINED | EVOLVED
]


@pytest.mark.parametrize(("construction", "dtype", "weight"), CASES)
def test_the_bound_with_less_of_a_term_is_broken_and_the_whole_one_holds(construction, dtype, weight):
    found = control(construction, dtype, weight, seed=1)
    assert found.weighted > 1 >= found.whole, f"{construction.__name__} {dtype}, largest error / bound {found}"
