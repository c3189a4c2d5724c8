"""Legal orders with a term of scores against their bound: problems are bred towards the largest error / bound.

python -m tests.quality.term_search --problems 20000
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import ml_dtypes
import numpy as np

from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reference.score_term import ScoreTerm
from tests.quality import order_survey
from tests.quality.breeding import report, worst_of_each
from tests.quality.legal_orders import attend, orders_of
from tests.quality.order_survey import Case, judged, operands_of, problem_of

KINDS = ("bias", "bias_fp32", "alibi", "attn_mask")
ISLANDS: tuple[tuple[Dtype, str], ...] = tuple(product(("fp16", "bf16", "fp32"), KINDS))


@dataclass(frozen=True)
class Individual(order_survey.Individual):
    """A problem that is bred, with the operand of its term before that is rounded."""

    term: np.ndarray = field(default_factory=lambda: np.zeros(0))


def format_of(problem: AttentionProblem) -> np.dtype:
    kind = problem.term.kind if problem.term else ""
    return np.dtype({"bias": FORMATS[problem.dtype].dtype, "attn_mask": bool}.get(kind, np.float32))


def case_of(one: Individual) -> Case:
    fmt = format_of(one.problem)
    term = one.term
    if fmt.kind != "b":
        least = -float(ml_dtypes.finfo(fmt).max)
        term = np.where(np.isneginf(term), term, np.clip(term, least, -least))
    operands = operands_of(one.problem, *one.arrays, one.descale)
    return Case("", one.problem, replace(operands, term=term.astype(fmt)))


def measured(one: Individual) -> Individual:
    case = case_of(one)
    order = orders_of(one.problem.dtype)[one.order]
    got = attend(order, case.problem, case.operands, np.random.default_rng(one.seed), "fp32")
    return replace(one, ratio=judged(case, {one.order: got})[one.order].best)


def scores_of(problem: AttentionProblem, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Scores in nats of what is not rounded yet, in the shape of the term, whose shared axes have their first index."""
    q, k = (np.clip(x, -6e4, 6e4)[0].swapaxes(0, 1) for x in (q, k))
    s = q @ np.repeat(k, problem.group, axis=0).swapaxes(1, 2) * problem.softmax_scale
    s = problem.softcap * np.tanh(s / problem.softcap) if problem.softcap else s
    return s[None][tuple(slice(n) for n in problem.term_shape)]


def one_of_each_row(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return np.arange(shape[-1]) == rng.integers(shape[-1], size=shape[:-1])[..., None]


def drawn(problem: AttentionProblem, arrays: tuple[np.ndarray, ...], rng: np.random.Generator) -> np.ndarray:
    """The operand of a term, of one family of its kind."""
    shape = problem.term_shape
    one = one_of_each_row(shape, rng) if len(shape) == 4 else np.zeros(shape, bool)
    some = rng.random(shape) < rng.choice([0.2, 0.5, 0.9])
    if problem.term and problem.term.kind == "attn_mask":
        return (one, some, some | one, ~one, some | True)[rng.integers(5)]
    if problem.term and problem.term.kind == "alibi":
        return 2.0 ** rng.uniform(-12, 12, shape) * rng.choice([1, 1, 1, 0, -1], shape)
    bias = rng.standard_normal(shape) * 2.0 ** rng.integers(-4, 5)
    least = -float(ml_dtypes.finfo(format_of(problem)).max)
    match rng.integers(9):
        case 0 | 1:
            bias = -scores_of(problem, *arrays[:2]) + bias * rng.choice([0, 0, 2.0**-10, 1])
        case 2:
            bias = bias + 2.0 ** rng.integers(0, 16) * rng.choice([-1, 1])
        case 3:
            bias = bias + 2.0 ** rng.integers(4, 12) * one
        case 4:
            bias = np.where(some | one, bias, least)
        case 5:
            bias = np.where(some | one, bias, -np.inf)
        case 6:
            bias = np.where(one, bias, rng.choice([least, -np.inf, -1e4, -1e9]))
        case 7:
            bias = np.where(some, bias, -np.inf)
    return bias


def born(dtype: Dtype, kind: str, rng: np.random.Generator, order: str) -> Individual:
    shared = (
        "".join(axis for axis in "bhqk" if rng.random() < 0.2) if kind in ("bias", "bias_fp32", "attn_mask") else ""
    )
    problem = problem_of(
        dtype,
        nheads=int(rng.integers(1, 3)),
        seqlen_q=int(rng.integers(1, 5)),
        seqlen_k=int(rng.choice([1, 2, 3, 8, 17, 40, 64])),
        head_dim=int(rng.choice([1, 2, 4, 8])),
        head_dim_v=2,
        softmax_scale=float(2.0 ** rng.uniform(-6, 3)),
        softcap=float(rng.choice([0.0, 0.0, 0.0, 2.0, 20.0])),
        causal=bool(rng.random() < 0.3),
        term=ScoreTerm(kind, shared),  # type: ignore[arg-type]
    )
    arrays = order_survey.drawn(problem, str(rng.choice(order_survey.KINDS)), rng)
    arrays = tuple(np.clip(x, -6e4, 6e4) for x in arrays)
    if rng.random() < 0.25:  # scores without an error of their own
        arrays = (np.zeros_like(arrays[0]), *arrays[1:])
    term = drawn(problem, arrays, rng)
    return Individual(order, problem, arrays, 1.0, int(rng.integers(2**31)), term=term)


def bred(one: Individual, rng: np.random.Generator) -> Individual:
    """Change one thing: of the term, or what a problem without a term has."""
    if rng.random() < 0.4:
        changed = order_survey.bred(one, rng)
        assert isinstance(changed, Individual)
        return changed
    term = one.term.copy()
    if term.dtype == bool:
        term.flat[rng.integers(term.size)] ^= True
        return replace(one, term=term)
    row = term.reshape(-1, term.shape[-1])[rng.integers(term.size // term.shape[-1])]
    at = rng.integers(row.size)
    match rng.integers(9):
        case 0:
            row[at] *= 1 + rng.standard_normal() * 2.0 ** -rng.integers(1, 24)
        case 1:
            row[at] = rng.standard_normal() * 2.0 ** rng.integers(-12, 12)
        case 2:
            row += rng.standard_normal() * 2.0 ** rng.integers(-6, 12)
        case 3:
            row *= 2.0 ** rng.integers(-2, 3)
        case 4 if term.ndim == 4:
            row[at] = rng.choice([-np.inf, -1e4, -3.0e38])
        case 5 if term.ndim == 4:
            term = -scores_of(one.problem, *one.arrays[:2]) + rng.standard_normal()
        case 6:
            term = term * (1 + rng.standard_normal(term.shape) * 2.0 ** -rng.integers(4, 24))
        case 7:
            row[:] = row[at]
        case _:
            return replace(one, seed=int(rng.integers(2**31)))
    return replace(one, term=term)


def searched(dtype: Dtype, kind: str, problems: int, seed: int = 0) -> list[Individual]:
    """Breed problems, most for the orders that come nearest; return the worst of each order, the worst first."""
    rng = np.random.default_rng([54, seed, ISLANDS.index((dtype, kind))])
    with np.errstate(all="ignore"):
        return worst_of_each(
            list(orders_of(dtype)),
            problems,
            rng,
            born=partial(born, dtype, kind),
            bred=bred,
            measured=measured,
            favour=3,
        )


if __name__ == "__main__":
    report(__doc__, searched, ISLANDS, problems=20_000, most=3)
