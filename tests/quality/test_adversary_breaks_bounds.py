"""The search for inputs beyond the error bound is strong: it breaks bounds that are known to be wrong."""

from __future__ import annotations

import numpy as np
import pytest

from fa3verify.adversary.evolve import Search
from fa3verify.adversary.islands import ISLANDS, Island
from fa3verify.adversary.run import replay
from tests.quality.bound_of_0_1_0 import forward_bound as bound_of_0_1_0

BUDGET = 10_000  # problems

# Rows of reports/findings/0001, the trigger that tells each (fa3verify.adversary.causes), and where it can happen.
HOLES = {
    "V1 e4m3": ("subnormal", "e4m3", "few"),
    "V1 fp16": ("subnormal", "fp16", "few"),
    "V2": ("flushed", "bf16", "two tiles"),
    "V2 combine": ("flushed", "bf16", "splits"),
    "V3": ("unnormalised", "bf16", "few"),
    "V4": ("raw score", "bf16", "few"),
    "V5": ("scale product", "e4m3", "few"),
    "V6": ("descale ratio", "e4m3", "two tiles"),
    "V7": ("softcap", "bf16", "softcap"),
}


def island(dtype: str, name: str) -> Island:
    return next(i for i in ISLANDS if (i.dtype, i.name) == (dtype, name))


@pytest.mark.parametrize("hole", HOLES)
def test_every_hole_in_the_bound_of_0_1_0_is_found_again(hole):
    cause, dtype, name = HOLES[hole]
    run = Search(island(dtype, name), 0, bound_of_0_1_0)
    first = run.generation()
    assert np.nanmax(first.out) <= 1, "normal inputs stay within the bound"
    while cause not in run.found.violations and run.found.problems < BUDGET:
        run.generation()
    found = run.found.violations[cause]
    assert found.problems <= BUDGET
    ratios = replay(found.individual, bound_of_0_1_0)
    assert max(ratios["out"], ratios["lse"]) == found.ratio > 1
