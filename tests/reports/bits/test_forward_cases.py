"""Cases of the forward's campaign: how much they compute and what they meet. No GPU, no torch."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from fa3_kernels.plan.choose import config_of
from fa3_reports.bits.forward_cases import DTYPES, cases, operands

ALL = cases()


def test_every_dtype_computes_more_than_a_hundred_million_outputs():
    values = Counter()
    for case in ALL:
        values[case.problem.dtype] += int(np.prod(case.problem.out_shape))
    assert min(values[dtype] for dtype in DTYPES) > 120_000_000


def test_e4m3_masks_meet_every_promotion_format_scope_and_family():
    """All pairs of promotion and format; scopes and families with each of three promotions in the other features."""
    fp8 = [case for case in ALL if case.problem.dtype == "e4m3"]
    for feature in ("dense", "causal"):
        found = {(x.choices["promotion_interval"], x.choices["out_dtype"]) for x in fp8 if x.feature == feature}
        assert found == set(product((128, 64, 0), ("bf16", "fp16")))
    for feature in ("window", "softcap", "splits", "varlen", "varlen-packed-splits"):
        chosen = [case for case in fp8 if case.feature == feature]
        assert {case.choices["promotion_interval"] for case in chosen} == {128, 64, 0}
        for which in range(3):  # of q, k and v
            assert {"none", "tensor", "head", "128"} <= {case.scopes[which] for case in chosen}
        assert {"special", "mean", "tiny"} <= {case.family for case in chosen}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [128, 192])
def test_both_tiles_of_head_dim_64_compute_ten_million_outputs_and_are_what_some_launches_choose(rows, dtype):
    chosen = [case for case in ALL if (case.feature, case.problem.dtype) == (f"{rows}-rows", dtype)]
    assert sum(int(np.prod(case.problem.out_shape)) for case in chosen) > 10_000_000
    assert {case.choices["tile"] for case in chosen} == {(rows, 128)}
    assert any(config_of(case.problem).tile_m == rows for case in chosen)


@pytest.mark.parametrize("feature", ["varlen", "splits", "activation", "padded"])
def test_operands_of_a_case_fit_it(feature):
    for dtype in DTYPES:
        case = next(case for case in ALL if (case.feature, case.problem.dtype) == (feature, dtype))
        given = operands(case)
        given.check(case.problem)


def test_tiny_descales_reach_the_clamp_of_their_product():
    products = []
    for case in ALL:
        if case.family == "tiny" and case.scopes[0] == case.scopes[1] == "head" and case.problem.nheads < 5:
            given = operands(case)
            assert given.q_descale is not None
            assert given.k_descale is not None
            q, k = (float(d.values.astype(np.float64).min()) for d in (given.q_descale, given.k_descale))
            products.append(q * k)
    assert min(products) < 2.0**-126
