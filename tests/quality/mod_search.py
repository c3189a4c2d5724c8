"""Legal orders with a score_mod against their bound: problems are bred towards the largest error / bound.

python -m tests.quality.mod_search --problems 20000
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from fa3_reference import mods
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reference.score_term import ScoreTerm
from tests.quality.breeding import report, worst_of_each
from tests.quality.legal_orders import LOG2_E, Head, attend, orders_of
from tests.quality.order_survey import KINDS, Case, Individual, bred, drawn, judged, operands_of, problem_of

F = np.float32
ULP = 4
TABLE = (3 * np.random.default_rng(5).standard_normal(256)).astype(F)
Mod = Callable[..., Any]


def affine(s, i, j, off):
    return s * F(3) - F(0.37) * (i - j).astype(s.dtype)


def falling(s, i, j, off):
    return F(0.5) - s


def alibi(s, i, j, off):
    """As some kernels have it: the number of the key alone and that of the query alone."""
    return (s + F(0.7) * j.astype(s.dtype)) - F(0.7) * i.astype(s.dtype)


def tanh(s, i, j, off):
    return F(5) * off(np.tanh(s / F(5)))


def relative(s, i, j, off):
    return s + TABLE[i - j + 128].astype(s.dtype)


def exponential(s, i, j, off):
    return off(np.exp(s / F(4)))


def square(s, i, j, off):
    return s * s / F(4)


def swish(s, i, j, off):
    return s * off(1 / (1 + np.exp(-s)))


def step(s, i, j, off):
    return np.where(s > 0, s + F(1), s)


def threshold(s, i, j, off):
    return np.where(s > F(-0.5), s, -np.inf)


MODS: dict[str, Mod] = {
    mod.__name__: mod for mod in (affine, falling, alibi, tanh, relative, exponential, square, swish, step, threshold)
}
ISLANDS: tuple[tuple[Dtype, str], ...] = tuple(product(("fp16", "bf16", "fp32"), MODS))


class Modified(Head):
    """One head of one order whose scores go through a function in binary32, off by as many ulp as are declared."""

    def scores(self, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.float32]:
        x, unit = super().scores(q, k)
        if unit == 1 and self.in_log2:
            nats = x * F(1 / LOG2_E)
        else:
            nats = x * (self.to_nats if self.in_log2 else unit)
        assert self.problem.term is not None
        lift = F(1 + self.rng.choice([-1, 0, 1]) * 0.99 * ULP * 2.0**-23)
        rows, keys = np.arange(len(q))[:, None], np.arange(len(k))
        f = MODS[self.problem.term.score_mod](nats, rows, keys, lambda y: (y * lift).astype(F)).astype(F)
        if not self.in_log2:
            return f, F(1)
        is_fused = self.order.scale in ("fused", "in_turn") and self.rng.random() < 0.5  # with the maximum
        return (f, F(LOG2_E)) if is_fused else (f * F(LOG2_E), F(1))


def _exact(function: str, b: int, heads: np.ndarray, queries: np.ndarray, keys: np.ndarray, *scores: np.ndarray):
    found = MODS[function](*scores, queries[:, None], keys, lambda y: y)
    return np.broadcast_to(found, (len(queries), len(keys))).astype(float)


@contextmanager
def plugged() -> Iterator[None]:
    """Have functions evaluated by numpy in float64."""
    before = list(mods._plugged)
    mods.plug(_exact)
    try:
        yield
    finally:
        mods._plugged[:] = before


def measured(one: Individual) -> Individual:
    operands = replace(operands_of(one.problem, *one.arrays, one.descale), term=np.zeros(0, F))
    order = orders_of(one.problem.dtype)[one.order]
    got = attend(order, one.problem, operands, np.random.default_rng(one.seed), "fp32", Modified)
    return replace(one, ratio=judged(Case("", one.problem, operands), {one.order: got})[one.order].best)


def born(dtype: Dtype, mod: str, rng: np.random.Generator, order: str) -> Individual:
    problem: AttentionProblem = problem_of(
        dtype,
        nheads=int(rng.integers(1, 3)),
        seqlen_q=int(rng.integers(1, 5)),
        seqlen_k=int(rng.choice([1, 2, 3, 8, 17, 40, 64])),
        head_dim=int(rng.choice([1, 2, 4, 8])),
        head_dim_v=2,
        softmax_scale=float(2.0 ** rng.uniform(-6, 3)),
        causal=bool(rng.random() < 0.3),
        term=ScoreTerm("mods", score_mod=mod, score_mod_ulp=ULP),
    )
    arrays = drawn(problem, str(rng.choice(KINDS)), rng)
    arrays = tuple(np.clip(x, -6e4, 6e4) for x in arrays)
    return Individual(order, problem, arrays, 1.0, int(rng.integers(2**31)))


def searched(dtype: Dtype, mod: str, problems: int, seed: int = 0) -> list[Individual]:
    """Breed problems, most for the orders that come nearest; return the worst of each order, the worst first."""
    rng = np.random.default_rng([55, seed, ISLANDS.index((dtype, mod))])
    with np.errstate(all="ignore"), plugged():
        names = list(orders_of(dtype))
        of_island = {"born": partial(born, dtype, mod), "bred": bred, "measured": measured, "favour": 3}
        return worst_of_each(names, problems, rng, **of_island)


if __name__ == "__main__":
    report(__doc__, searched, ISLANDS, problems=20_000, most=2)
