"""Orders that no shipped family has keep the bound that is proved for them."""

from __future__ import annotations

import pytest

from tests.quality.adversary_of_orders import ORDERS, searched


@pytest.mark.parametrize("name", ORDERS)
def test_no_bred_input_breaks_the_bound_of_an_order(name):
    for dtype in ("fp16", "bf16"):
        found = searched(name, dtype, 100, 1)
        assert not found["above_1"], found
        assert found["largest"]["out"] + found["largest"]["lse"] > 0.1


def test_the_search_breaks_the_bound_of_another_order():
    """A bound that knows nothing of the scale in Q, and one of a row sum of the weights themselves."""
    for name in ("a folded scale", "a row sum of rounded weights"):
        assert searched(name, "fp16", 100, 1, assumed="binary32 products and P")["above_1"]
