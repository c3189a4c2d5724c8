"""Tolerances: right kernels stay within the pair, a wider pair lets no fewer faults pass, the page's table holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa3verify import check, tolerance
from tests.harness.checking.test_check import RIGHT, ideal

PAGE = Path(__file__).parents[3] / "docs" / "tolerance.md"
SHAPE = (1, 8, 1024, 128)
ROWS = re.findall(r"^\| (fp16|bf16|e4m3|fp32) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", ["empty_rows", "softcap", "e4m3", "packed", "binary32"])
def test_no_output_of_an_ideal_kernel_is_beyond_the_pair_or_the_bound(name: str) -> None:
    tensors, said = ideal(RIGHT[name])
    found = tolerance(tensors["q"], tensors["k"], tensors["v"], **said | {"lse": None})
    assert found.rows
    for rows in found.rows:
        assert rows.largest <= 1
        error = np.abs(rows.got.astype(np.float64) - rows.truth)
        assert (error <= found.atol + found.rtol * np.abs(rows.truth)).all()


@pytest.mark.parametrize("name", ["causal", "e4m3"])
def test_a_wider_pair_lets_no_fewer_faults_pass_and_none_passes_a_pair_of_zeros(name: str) -> None:
    tensors, said = ideal(RIGHT[name])
    del tensors["out"], said["lse"]
    found = tolerance(**tensors, **said)
    assert found.planted
    assert len(found.passed_by(np.inf, 0.0)) == len(found.planted)
    assert set(found.passed_by(found.atol, found.rtol)) <= set(found.passed_by(2 * found.atol, found.rtol))
    assert not found.passed_by(0.0, 0.0)


def test_what_the_bound_lets_pass_the_check_does_too() -> None:
    q, k, v = np.random.default_rng(1).normal(size=(3, 1, 1, 64, 32)).astype(np.float16)
    found = tolerance(q, k, v, layout="bhsd")
    for name, rows in found.planted.items():
        out = rows.got.swapaxes(0, 1)[None]
        assert bool(check(out, q, k, v, layout="bhsd", rows="all")) >= (name in found.passed_by_bound)


def test_a_shape_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="a shape has no tolerance, as errors grow with values"):
        tolerance(SHAPE, SHAPE, SHAPE, layout="bhsd")


SLOW = pytest.mark.nightly


@pytest.mark.parametrize("row", [pytest.param(x, marks=() if x[0] == "bf16" else SLOW, id=x[0]) for x in ROWS])
def test_the_table_of_the_page_is_what_is_computed(row: tuple[str, str]) -> None:
    dtype: Any = row[0]
    found = tolerance(SHAPE, SHAPE, SHAPE, values="normal", dtype=dtype, layout="bhsd", causal=True)
    bounds = np.concatenate([x.bound[np.isfinite(x.bound)] for x in found.rows])
    passed = [len(found.passed_by(pair, pair)) for pair in (1e-3, 1e-2, 2e-2, 5e-2)]
    counts = [len(found.planted), *passed, len(found.passed_by_bound)]
    pair = f"atol {found.atol:.2g}, rtol {found.rtol:.2g}"
    assert row[1] == " | ".join([pair, f"{np.median(bounds):.2g}, {bounds.max():.2g}", *map(str, counts)])


def test_the_page_has_a_row_for_every_format() -> None:
    assert [name for name, _ in ROWS] == ["fp16", "bf16", "e4m3", "fp32"]
