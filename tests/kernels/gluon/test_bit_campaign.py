"""The campaign that compares GPU bits with the twin, as far as it goes without a GPU: its cases, controls and tables."""

from __future__ import annotations

import csv
import json
from collections import Counter
from itertools import product

import numpy as np
import pytest
from bit_cases import DTYPES, cases, operands
from measure_gluon_bits import (
    BITS,
    COLUMNS,
    CONTROLS,
    E4M3_CONTROLS,
    batches,
    control_case,
    differing,
    merge,
    twin_bits,
    write_all,
)

from fa3_kernels.plan.choose import config_of
from fa3_kernels.twin.faults import Fault

ALL = cases()


def test_every_case_has_a_configuration_and_is_run_once():
    pieces = batches(ALL)  # groups by what config_of returns
    assert Counter(map(id, ALL)) == Counter(id(case) for piece in pieces for case in piece)


def test_every_dtype_computes_more_than_a_hundred_million_outputs():
    values = Counter()
    for case in ALL:
        values[case.problem.dtype] += int(np.prod(case.problem.out_shape))
    assert min(values[dtype] for dtype in DTYPES) > 120_000_000


def test_e4m3_masks_meet_every_promotion_format_scope_and_family():
    """All pairs of promotion and format; scopes and families with every one of three promotions in the other features."""
    fp8 = [case for case in ALL if case.problem.dtype == "e4m3"]
    for feature in ("dense", "causal"):
        found = {tuple(case.choices.values()) for case in fp8 if case.feature == feature}
        assert found == set(product((128, 64, 0), ("bf16", "fp16")))
    for feature in ("window", "softcap", "splits", "varlen", "varlen-packed-splits"):
        chosen = [case for case in fp8 if case.feature == feature]
        assert {case.choices["promotion_interval"] for case in chosen} == {128, 64, 0}
        for which in range(3):  # of q, k and v
            assert {"none", "tensor", "head", "128"} <= {case.scopes[which] for case in chosen}
        assert {"special", "mean", "tiny"} <= {case.family for case in chosen}


@pytest.mark.parametrize("feature", ["varlen", "splits", "activation", "padded"])
def test_operands_of_a_case_fit_it(feature):
    for dtype in DTYPES:
        case = next(case for case in ALL if (case.feature, case.problem.dtype) == (feature, dtype))
        given = operands(case)
        given.check(case.problem)
        out, lse = twin_bits(case, given)
        assert out.shape == case.problem.out_shape
        assert lse.shape == case.problem.lse_shape


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


@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
def test_planted_faults_of_the_controls_change_bits(dtype):
    case = control_case(dtype)
    given = operands(case)
    sound = twin_bits(case, given)
    for fault in E4M3_CONTROLS if dtype == "e4m3" else CONTROLS:
        assert differing(twin_bits(case, given, Fault(fault)), sound)[0] > 0, fault
    assert config_of(case.problem, **case.choices).promotion_interval == (128 if dtype == "e4m3" else 0)


def row(dtype: str, seed: int) -> list:
    return [{"dtype": dtype, "seed": seed}.get(name, 0) for name in COLUMNS]


def test_tables_of_different_dtypes_of_one_kernel_merge_and_others_do_not(tmp_path):
    for name, dtypes, launches in (("a", ["e4m3"], "1"), ("b", ["fp16", "bf16"], "1"), ("c", ["fp16"], "2")):
        facts = {"launches_sha256": launches, "dtypes": dtypes, "date_utc": name}
        write_all(tmp_path / name, [row(d, 10 - i) for i, d in enumerate(dtypes)], [[d] * 6 for d in dtypes], facts)
    merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    with (tmp_path / "all" / BITS).open(newline="") as file:
        assert [(r["dtype"], r["seed"]) for r in csv.DictReader(file)] == [
            ("bf16", "9"),
            ("e4m3", "10"),
            ("fp16", "10"),
        ]
    facts = json.loads((tmp_path / "all" / "gluon_forward_bits_provenance.json").read_text())
    assert (facts["dtypes"], facts["date_utc"]) == (["e4m3", "fp16", "bf16"], "b")
    for others in (("a", "c"), ("a", "a")):
        with pytest.raises(ValueError, match="of one kernel and different dtypes"):
            merge(tmp_path / "none", [tmp_path / name for name in others])
