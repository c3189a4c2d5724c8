"""What is known of an order sharpens its bound, and the page says by how much."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from fa3_reference.problem import DTYPES
from tests.quality.order_gains import gains, table

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_of_today():
    assert table() in (ROOT / "reference/README.md").read_text(encoding="utf-8")


def test_no_knowledge_widens_a_bound_and_all_of_it_is_worth_more_than_a_hundredfold():
    for dtype in DTYPES:
        sizes = list(gains(dtype).values())
        assert all(after <= before * (1 + 1e-9) for before, after in pairwise(sizes))
        assert sizes[0] > 100 * sizes[-1]
