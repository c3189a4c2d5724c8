"""Right merges of partial results against their bound: parts are bred towards the largest error / bound.

python -m tests.quality.merge_search --problems 10000
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fa3_reference.bounds.merging import merge_bound
from fa3_reference.merging import merge
from tests.quality import merge_kernels
from tests.quality.breeding import report, worst_of_each
from tests.quality.merge_kernels import F, Pair

LARGEST, FARTHEST = 2.0**99, 1e6  # of an output, and of an lse from 0
Merge = Callable[[np.ndarray, np.ndarray], Pair]


@dataclass(frozen=True)
class Order:
    """A merge of all parts; whether by two, and whether in turn with what is stored in between."""

    merge: Merge
    by_two: bool = False
    stores: bool = False


def in_turn(function: Callable[..., Pair]) -> Merge:
    """The merge of all parts by a function of two results."""

    def folded(outs: np.ndarray, lses: np.ndarray) -> Pair:
        out, lse = outs[0], lses[0]
        for o, own in zip(outs[1:], lses[1:], strict=True):
            out, lse = function(out, lse, o, own)
        return out.astype(outs.dtype), lse

    return folded


def in_base_2(outs: np.ndarray, lses: np.ndarray) -> Pair:
    """Change the base of every lse first, and take weights of their rounded differences."""
    with np.errstate(all="ignore"):
        two = lses * merge_kernels.LOG2_E
        top = merge_kernels.finite(two.max(axis=0))
        w = np.exp2(two - top)
        total = w.sum(axis=0)
        weights = w / np.where(total == 0, F(1), total)
        lse = (top + np.log2(total)) * merge_kernels.LN2
        return merge_kernels.sums(merge_kernels.rows(weights) * outs.astype(F)).astype(outs.dtype), lse


def less_lse_in_base_2(outs: np.ndarray, lses: np.ndarray) -> Pair:
    """Weigh by exponentials of differences whose two sides change their base each by itself."""
    lse = in_base_2(outs, lses)[1]
    with np.errstate(all="ignore"):
        w = np.exp2(lses * merge_kernels.LOG2_E - merge_kernels.finite(lse) * merge_kernels.LOG2_E)
    return merge_kernels.sums(merge_kernels.rows(w) * outs.astype(F)).astype(outs.dtype), lse


def in_turn_backwards(outs: np.ndarray, lses: np.ndarray) -> Pair:
    return in_turn(merge_kernels.pair)(outs[::-1], lses[::-1])


def by_next_lse(out_a: np.ndarray, lse_a: np.ndarray, out_b: np.ndarray, lse_b: np.ndarray) -> Pair:
    """Weigh two results by exponentials of their lse less the rounded lse of both, which has no error of a distance."""
    lse = np.logaddexp(lse_a, lse_b)
    wa, wb = (merge_kernels.rows(np.exp(x - merge_kernels.finite(lse))) for x in (lse_a, lse_b))
    return wa * out_a.astype(F) + wb * out_b.astype(F), lse


AT_ONCE = {name: steps for name, steps in merge_kernels.RIGHT.items() if isinstance(steps, dict)}
ORDERS = {
    **{name: Order(partial(merge_kernels.at_once, **steps)) for name, steps in AT_ONCE.items()},
    "a running maximum": Order(merge_kernels.online),
    "base 2": Order(in_base_2),
    "less the lse, each in base 2": Order(less_lse_in_base_2),
    "a tree of pairs": Order(merge_kernels.tree, by_two=True),
    "last in turn first": Order(in_turn_backwards, by_two=True),
    "sigmoids in turn": Order(in_turn(merge_kernels.pair), by_two=True, stores=True),
    "the next lse in turn": Order(in_turn(by_next_lse), by_two=True, stores=True),
    "less the larger lse in turn": Order(in_turn(merge_kernels.max_shifted), by_two=True, stores=True),
}


@dataclass(frozen=True)
class Individual:
    """Parts (parts, rows, 1, channels), lse (parts, 1, rows), both in binary32, and their error / bound."""

    order: str
    outs: np.ndarray
    lses: np.ndarray
    ratio: float = 0.0


def measured(one: Individual) -> Individual:
    order = ORDERS[one.order]
    one = replace(one, outs=np.where(merge_kernels.rows(np.isneginf(one.lses)), F(0), one.outs))
    outs, lses = one.outs.astype(float), one.lses.astype(float)
    truth = merge(outs, lses)
    bound = merge_bound(outs, lses, "fp32", by_two=order.by_two, stores=order.stores)
    with np.errstate(all="ignore"):
        got = order.merge(one.outs, one.lses)
    ratios = [0.0]
    for mine, want, limit in zip(got, truth, bound, strict=True):
        differs = mine != want
        error = np.abs(mine[differs] - want[differs]) / limit[differs]
        ratios.append(float(np.max(np.where(np.isnan(error), np.inf, error), initial=0.0)))
    return replace(one, ratio=max(ratios))


def born(rng: np.random.Generator, order: str) -> Individual:
    parts, rows, channels = int(rng.choice([2, 3, 4, 8, 17, 64])), int(rng.choice([1, 3])), int(rng.choice([1, 4]))
    outs = rng.standard_normal((parts, rows, 1, channels))
    lses = rng.standard_normal((parts, 1, rows)) * 2.0 ** rng.uniform(-6, 4)
    match rng.integers(7):
        case 0:
            outs = np.abs(outs) + 1
        case 1:
            outs *= 2.0 ** rng.integers(-30, 30, (parts, 1, 1, 1))
        case 2:
            lses += rng.choice([0, 0, 20, -20, 100, -100, 1e4, -1e4], (parts, 1, 1))
        case 3:
            lses[rng.random(parts) < 0.5] = -np.inf
        case 4:
            lses += 2.0 ** rng.integers(0, 12)
        case 5:
            lses = np.sort(lses, axis=0) * rng.integers(1, 20)
    return Individual(order, outs.astype(F), lses.astype(F))


def bred(one: Individual, rng: np.random.Generator) -> Individual:
    outs, lses = one.outs.copy(), one.lses.copy()
    part = rng.integers(len(outs))
    match rng.integers(8):
        case 0:
            outs[part] *= F(1 + rng.standard_normal() * 2.0 ** -rng.integers(1, 22))
        case 1:
            outs[part] = rng.standard_normal(outs[part].shape) * 2.0 ** rng.integers(-12, 12)
        case 2:
            lses[part] += F(rng.standard_normal() * 2.0 ** -rng.integers(-4, 20))
        case 3:
            lses += F(rng.standard_normal() * 2.0 ** rng.integers(-10, 8))
        case 4:
            one = replace(one, lses=lses[::-1])
            outs, lses = outs[::-1].copy(), lses[::-1].copy()
        case 5:
            lses *= F(2.0 ** rng.integers(-1, 2))
        case 6:
            outs[part] = -outs[part - 1]
        case _:
            lses = np.where(rng.random(lses.shape) < 0.5, np.nextafter(lses, F(0)), lses)
    lses = np.where(np.isneginf(one.lses), one.lses, np.clip(lses, F(-FARTHEST), F(FARTHEST)))
    return replace(one, outs=np.clip(outs, F(-LARGEST), F(LARGEST)), lses=lses)


def searched(problems: int, seed: int = 0) -> list[Individual]:
    """Breed parts, most for the orders that come nearest; return the worst of each order, the worst first."""
    rng = np.random.default_rng([54, seed])
    return worst_of_each(list(ORDERS), problems, rng, born=born, bred=bred, measured=measured)


if __name__ == "__main__":
    report(
        __doc__, searched, told=lambda one: f"{len(one.outs)} parts, lse {one.lses.min():.6g} to {one.lses.max():.6g}"
    )
