"""Where arithmetic is exact the bound charges nothing: numbers of few bits, which it takes for exact, stay inside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_reports.adversary.forward import ISLANDS, judge
from fa3verify.search.colony import positive, rounded
from fa3verify.search.forward.colony import ForwardColony, Island

ROUNDS = 6


def few_bits(rng: np.random.Generator, shape: tuple[int, ...], spread: float) -> np.ndarray:
    """Integers of up to 4 bits, a third of them zero, times powers of two up to ``spread`` orders apart."""
    digits = rng.integers(-15, 16, shape) * (rng.random(shape) > 0.3)
    return digits * np.exp2(np.round(spread * rng.uniform(-1, 1, shape)))


def simple_colony(island: Island, rng: np.random.Generator) -> ForwardColony:
    """Scores, values and factors of few bits, so that rows tie, cancel, vanish, and sum to powers of two."""
    colony = ForwardColony.normal(island, rng)
    sparse = rng.random(colony.k.shape) < rng.random() ** 2
    colony.q = rounded(np.exp2(rng.integers(-3, 2, colony.q.shape)), island.dtype)
    colony.k = rounded(np.where(sparse, few_bits(rng, colony.k.shape, rng.choice([0, 2, 8])), 0.0), island.dtype)
    colony.v = rounded(few_bits(rng, colony.v.shape, rng.choice([0, 2, 10])), island.dtype)
    environment = colony.environment
    is_power = rng.random() < 0.5
    for name in ("k_descale", "v_descale"):
        factor = np.exp2(rng.integers(-2, 3, island.descales)) * (1.0 if is_power else rng.uniform(1, 2))
        if island.dtype == "e4m3":
            environment = replace(environment, **{name: positive(factor)})
    scale = float(np.exp2(rng.integers(-4, 2)) * (np.log(2) if rng.random() < 0.7 else rng.uniform(1, 2)))
    colony.environment = replace(environment, softmax_scale=scale)
    return colony


@pytest.mark.parametrize("island", ISLANDS, ids=lambda island: f"{island.dtype} {island.name}")
def test_numbers_of_few_bits_stay_inside_the_bound(island):
    rng = np.random.default_rng([1, ISLANDS.index(island)])
    for _ in range(ROUNDS):
        verdict = judge(simple_colony(island, rng))
        for ratio in (verdict["out"], verdict["lse"]):
            assert not (ratio > 1).any(), f"error / bound {np.nanmax(ratio)}"
