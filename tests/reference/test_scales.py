"""Kinds of scale: what each shares and asks a kernel to claim, and roundings that lose no maximum."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fa3_reference.scales import ROUNDINGS, SHARING, Granularity, QuantScheme, Rounding, num_blocks, rounding_fields


def test_every_name_has_its_row_in_a_table():
    assert set(SHARING) == set(get_args(Granularity))
    assert set(ROUNDINGS) == set(get_args(Rounding))
    assert next(iter(SHARING)) == "head"  # the plainest, to which draws shrink


@pytest.mark.parametrize(
    ("granularity", "heads_q", "heads_k", "claims"),
    [
        ("tensor", 6, 2, (None, None)),
        ("head", 3, 1, (None, None)),
        ("query_head", 1, 1, (None, "query_head_descale")),
        ("block", 1, 1, ("block_descale", "block_descale")),
        ("row", 1, 1, ("block_descale", "block_descale")),
    ],
)
def test_a_kind_says_how_many_heads_share_and_what_a_kernel_claims(granularity, heads_q, heads_k, claims):
    sharing = SHARING[granularity]
    assert sharing.heads_per_descale("q", 6, 2) == heads_q
    assert sharing.heads_per_descale("k", 6, 2) == sharing.heads_per_descale("v", 6, 2) == heads_k
    assert tuple(next(iter(sharing.claim(group)), None) for group in (1, 3)) == claims


@pytest.mark.parametrize("name", ROUNDINGS)
@given(x=st.floats(2.0**-126, 2.0**126))
def test_no_rounding_makes_a_descale_smaller(name: Rounding, x: float):
    rounded = float(ROUNDINGS[name](np.array(x)))
    assert x <= rounded < 2 * x


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_scheme_has_the_rounding_of_its_fields(name: Rounding):
    assert QuantScheme(**rounding_fields(name)).rounding == name


def test_blocks_cover_a_sequence():
    assert [num_blocks(n, 32) for n in (0, 1, 32, 33)] == [1, 1, 1, 2]
    assert num_blocks(1000, 0) == 1
