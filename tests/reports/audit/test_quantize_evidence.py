"""What the quantiser's recorded H200 run shows: equal bits, speed beside a copy, and errors beside their prediction."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest

from fa3_reports.stored import read_csv

QUANTISER = Path(__file__).parents[3] / "reports" / "h200" / "quantiser"


def rows(name: str) -> list[dict[str, str]]:
    return read_csv(QUANTISER / name)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def test_every_recorded_bit_is_the_twins():
    cases = rows("quantize_bits.csv")
    assert sum(int(r["values"]) for r in cases) > 10**8
    assert all(int(r["values_differing"]) == int(r["floats_differing"]) == 0 for r in cases)
    for column, least in (("dtype", 2), ("family", 6), ("packed", 2), ("head_dims", 8), ("options", 50)):
        assert len({r[column] for r in cases}) >= least, column


def test_block_scales_keep_four_fifths_of_the_copy_bandwidth_but_for_one_shape():
    found = {
        (r["tokens"], r["head_dim"], r["quantiser"]): float(r["share_of_copy_bandwidth"])
        for r in rows("quantize_speed.csv")
    }
    one_pass = {key: share for key, share in found.items() if key[2].startswith("block") and "mean" not in key[2]}
    slow = {key: share for key, share in one_pass.items() if share < 0.8}
    assert len(one_pass) == 24
    assert all(dim == "256" and "rotated" in name and "64" not in name for _, dim, name in slow), slow
    assert all(share > 0.65 for share in slow.values()), slow


@pytest.mark.parametrize(("k_mean", "share_in_band"), [("False", 0.97), ("True", 0.9)])
@pytest.mark.parametrize("rotate", ["False", "True"])
def test_errors_on_real_activations_are_the_predicted_ones(rotate: str, k_mean: str, share_in_band: float):
    ratios = [
        float(r["measured_over_predicted"])
        for r in rows("quantize_accuracy.csv")
        if (r["rotate"], r["subtract_k_mean"]) == (rotate, k_mean) and float(r["rel_rmse"]) > 0.01  # not saturated
    ]
    assert len(ratios) > 100
    assert 0.95 < geometric_mean(ratios) < 1.1
    assert sum(0.75 <= x <= 1.35 for x in ratios) / len(ratios) > share_in_band


def test_a_rotation_helps_one_real_model_and_not_the_other():
    errors: dict[tuple, dict[str, float]] = defaultdict(dict)
    for r in rows("quantize_accuracy.csv"):
        if (r["scope"], r["subtract_k_mean"]) == ("block", "False"):
            errors[r["model"], r["file"], r["head"]][r["rotate"]] = float(r["rel_rmse"])
    gains: dict[str, list[float]] = defaultdict(list)
    for (model, *_), by_rotation in errors.items():
        gains[model].append(by_rotation["False"] / by_rotation["True"])
    smollm, minilm = (geometric_mean(gains[name]) for name in ("SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"))
    assert 1.1 < smollm < 1.5
    assert 0.9 < minilm < 1.05
