"""Legal orders against the bound of a kernel that states none: none may lose every hypothesis about the whole kernel.

The table runs every order of :mod:`tests.quality.legal_orders` on 60 inputs; the search breeds problems in which one of
them comes as near to the bound as it can. Both print the largest error / bound of the hypothesis that is best over all
outputs together.

    python -m tests.quality.order_survey --dtypes fp16 bf16 e4m3 --inputs 60 --problems 10000 --out survey.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from fa3_reference.attention import Attention, attention
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Descale, Dtype, Operands
from tests.quality.legal_orders import Result, attend, orders_of

SETTINGS = (
    {"seqlen_k": 64, "head_dim": 32},
    {"seqlen_k": 200, "head_dim": 64},
    {"seqlen_k": 96, "head_dim": 32, "softcap": 20.0},
    {"seqlen_k": 4, "head_dim": 16, "softcap": 5.0, "softmax_scale": 1.0},
    {"seqlen_k": 40, "head_dim": 16, "seqlen_q": 44, "causal": True, "softmax_scale": 1.0, "nheads": 2},
)
KINDS = (
    "normal",
    "peaky",
    "rising",
    "falling",
    "offset",
    "far",
    "sink",
    "ties",
    "large",
    "small",
    "cancelling",
    "one sign",
)


class Case(NamedTuple):
    name: str
    problem: AttentionProblem
    operands: Operands


class Ratio(NamedTuple):
    """Largest error / bound of O and of LSE, by hypothesis."""

    worst: dict[str, float]

    @property
    def best(self) -> float:
        return min(self.worst.values())


def problem_of(dtype: Dtype, **setting: object) -> AttentionProblem:
    sizes = {"batch": 1, "nheads": 1, "nheads_kv": 1, "seqlen_q": 8, "dtype": dtype} | setting
    return AttentionProblem(**sizes)  # type: ignore[arg-type]


def operands_of(problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, descale: float) -> Operands:
    """Round the operands to their format; an e4m3 problem has descales, of which no two are alike."""
    fmt = FORMATS[problem.dtype]
    largest = 0.9 * fmt.max_finite
    stored = (np.clip(x, -largest, largest).astype(fmt.dtype) for x in (q, k, v))
    if problem.dtype != "e4m3":
        return Operands(*stored)
    heads = (problem.nheads, problem.nheads_kv, problem.nheads_kv)
    given = (np.full((1, h, 1), f * descale, np.float32) for h, f in zip(heads, (0.7, 1.3, 0.9), strict=True))
    return Operands(*stored, *map(Descale, given))


def drawn(problem: AttentionProblem, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Operands of one kind before they are rounded."""
    q, k, v = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    keys, unit = np.arange(problem.seqlen_k)[:, None], 1 / problem.softmax_scale
    match kind:
        case "peaky":
            q, k = 3 * q, 3 * k
        case "rising" | "falling":
            q[...] = 0
            q[..., 0] = 1
            step = 2.0**-6 if kind == "rising" else -(2.0**-4)
            k[0, ..., 0] = keys * step * unit
        case "offset":
            v = v + 4
        case "far":
            q[..., 0] = 12
            k[..., 0] = 4 * unit
        case "sink":
            q, k[..., 0] = q * 0.1, 0
            q[..., 0] = 1
            k[:, 0, :, 0] = np.log(problem.seqlen_k) * unit
            v = np.abs(v)
        case "ties":
            k[:] = k[:, :1]
            v = np.abs(v)
        case "large":
            q, k = 12 * q, 12 * k
        case "small":
            least = FORMATS[problem.dtype].min_normal
            q[..., ::4] *= max(least, 2.0**-20)
            k[..., ::4] /= max(least * 2**6, 2.0**-12)
        case "cancelling":
            q[..., 1::2], k[..., 1::2] = -q[..., ::2], k[..., ::2] * (1 + 2.0**-8)
        case "one sign":
            q, k, v = np.abs(q), np.abs(k), np.abs(v)
    return q, k, v


def cases(dtype: Dtype, count: int = len(SETTINGS) * len(KINDS)) -> Iterator[Case]:
    """The first inputs of the survey; neighbours differ in kind and setting."""
    for i in range(count):
        kind, setting = KINDS[i % len(KINDS)], SETTINGS[(i + i // len(KINDS)) % len(SETTINGS)]
        problem, rng = problem_of(dtype, **setting), np.random.default_rng([29, i])
        yield Case(f"{kind}, {setting}", problem, operands_of(problem, *drawn(problem, kind, rng), 1.0))


def with_sinks(problem: AttentionProblem, x: Operands, rng: np.random.Generator) -> tuple[AttentionProblem, Operands]:
    """Give every head a sink: none, one as large as all keys of a row, one that leaves them much, little or nothing."""
    with np.errstate(all="ignore"):
        lse = attention(problem, *x.dequantized(problem)).lse
    lse = np.nan_to_num(lse, nan=0.0, posinf=0.0, neginf=0.0)
    offsets = rng.choice([0.0, 0.0, 1.0, -3.0, 12.0, -12.0, 40.0, -40.0, 75.0, 100.0, -1e3, -np.inf], problem.nheads)
    chosen = lse[0, :, rng.integers(problem.seqlen_q)] + offsets + rng.standard_normal(problem.nheads)
    return replace(problem, sinks=True), replace(x, sinks=chosen.astype(np.float32))


def largest(error: np.ndarray, bound: np.ndarray) -> float:
    """Largest error / bound; nothing is promised where the bound is infinite, and NaN is beyond every bound."""
    counts = np.isfinite(bound) & (error != 0)
    if not counts.any():
        return 0.0
    with np.errstate(divide="ignore"):
        ratio = error[counts] / bound[counts]
    return float(np.max(np.where(np.isnan(ratio), np.inf, ratio)))


def judged(case: Case, results: dict[str, Result]) -> dict[str, Ratio]:
    """Error / bound of every result, under every hypothesis: before its last rounding, which would hide what is left
    of the bound."""
    problem, x = case.problem, case.operands
    with np.errstate(all="ignore"):
        truth = attention(problem, *x.dequantized(problem))
    orders = orders_of(problem.dtype)
    found: dict[str, Ratio] = {name: Ratio({}) for name in results}
    for accumulator in {orders[name].accumulator for name in results}:
        for hypothesis, model in KernelModel.hypotheses(problem.dtype, "fp32", accumulator).items():
            bound = forward_bound(problem, x, model)
            for name in (name for name in results if orders[name].accumulator == accumulator):
                found[name].worst[hypothesis] = max(map(largest, errors(results[name], truth), bound))
    return found


def errors(got: Result, truth: Attention) -> tuple[np.ndarray, np.ndarray]:
    """Errors of O and of LSE, whose rows without a key are -inf in both."""
    same = np.isneginf(truth.lse) & np.isneginf(got.lse)
    with np.errstate(invalid="ignore"):
        return np.abs(got.out - truth.out), np.where(same, 0.0, np.abs(got.lse - truth.lse))


class Survey(NamedTuple):
    """Of one order: largest error / bound by hypothesis over all inputs, and the input that has it."""

    worst: dict[str, float]
    where: dict[str, str]

    @property
    def best(self) -> str:
        return min(self.worst, key=lambda name: self.worst[name])


def table(dtype: Dtype, count: int, sinks: bool = False) -> dict[str, Survey]:
    """Run every order on the inputs; a hypothesis is about all of them together."""
    found: dict[str, Survey] = {name: Survey({}, {}) for name in orders_of(dtype)}
    for number, case in enumerate(cases(dtype, count)):
        if sinks:
            case = Case(case.name, *with_sinks(case.problem, case.operands, np.random.default_rng([31, number])))
        results = {
            name: attend(order, case.problem, case.operands, np.random.default_rng([number, i]), "fp32")
            for i, (name, order) in enumerate(orders_of(dtype).items())
        }
        for name, ratio in judged(case, results).items():
            for hypothesis, value in ratio.worst.items():
                if value >= found[name].worst.get(hypothesis, 0.0):
                    found[name].worst[hypothesis], found[name].where[hypothesis] = value, case.name
    return found


@dataclass(frozen=True)
class Individual:
    """A problem that is bred: one order, its operands before they are rounded, and how near its error is."""

    order: str
    problem: AttentionProblem
    arrays: tuple[np.ndarray, ...]
    descale: float
    seed: int
    ratio: float = 0.0
    sinks: bool = False


def measured(one: Individual) -> Individual:
    case = Case("", one.problem, operands_of(one.problem, *one.arrays, one.descale))
    if one.sinks:
        case = Case("", *with_sinks(case.problem, case.operands, np.random.default_rng([one.seed, 1])))
    got = attend(
        orders_of(one.problem.dtype)[one.order], case.problem, case.operands, np.random.default_rng(one.seed), "fp32"
    )
    return replace(one, ratio=judged(case, {one.order: got})[one.order].best)


def born(dtype: Dtype, rng: np.random.Generator, order: str) -> Individual:
    keys, dim = int(rng.choice([1, 2, 3, 8, 17, 40])), int(rng.choice([8, 16, 40]))
    scale, cap = float(2.0 ** rng.integers(-6, 3)), float(rng.choice([0.0, 0.0, 2.0, 20.0]))
    problem = problem_of(dtype, seqlen_k=keys, head_dim=dim, head_dim_v=4, softmax_scale=scale, softcap=cap)
    arrays = tuple(np.clip(x, -6e4, 6e4) for x in drawn(problem, str(rng.choice(KINDS)), rng))
    return Individual(order, problem, arrays, 2.0 ** rng.integers(-3, 4), int(rng.integers(2**31)))


def bred(one: Individual, rng: np.random.Generator) -> Individual:
    """Change one thing of a problem: a few numbers, the size of a row, its scale, its softcap or what is left free."""
    arrays = [x.copy() for x in one.arrays]
    x = arrays[rng.integers(3)]
    rows = x.reshape(-1, x.shape[-1])
    row = rows[rng.integers(len(rows))]
    problem, descale, seed = one.problem, one.descale, one.seed
    match rng.integers(9):
        case 0:
            row[rng.integers(row.size)] *= 1 + rng.standard_normal() * 2.0 ** -rng.integers(1, 12)
        case 1:
            row[rng.integers(row.size)] = rng.standard_normal() * 2.0 ** rng.integers(-12, 8)
        case 2:
            row *= 2.0 ** rng.integers(-2, 3)
        case 3:
            row[:] = rows[rng.integers(len(rows))]
        case 4:
            rows += rng.standard_normal(rows.shape) * np.abs(rows) * 2.0**-8
        case 5:
            row[rng.random(row.size) < 0.3] = 0
        case 6:
            problem = replace(problem, softmax_scale=float(problem.softmax_scale * 2.0 ** rng.uniform(-1, 1)))
        case 7:
            problem = replace(problem, softcap=float(problem.softcap * 2.0 ** rng.uniform(-1, 1)))
        case _:
            descale, seed = descale * 2.0 ** rng.uniform(-1, 1), int(rng.integers(2**31))
    return replace(one, arrays=tuple(arrays), problem=problem, descale=descale, seed=seed)


def searched(dtype: Dtype, problems: int, seed: int = 0, sinks: bool = False) -> list[Individual]:
    """Breed problems, most for the orders that come nearest; return the worst of each order, the worst first."""
    rng, names = np.random.default_rng([seed, get_args(Dtype).index(dtype)]), list(orders_of(dtype))
    best: dict[str, Individual] = {}
    for i in range(problems):
        ahead = sorted(names, key=lambda name: -best[name].ratio if name in best else -np.inf)
        name = ahead[int(len(names) * rng.random() ** 3)]
        is_new = name not in best or rng.random() < max(0.1, 1 - 4 * i / problems)
        one = measured(replace(born(dtype, rng, name) if is_new else bred(best[name], rng), sinks=sinks))
        if name not in best or one.ratio >= best[name].ratio:
            best[name] = one
    return sorted(best.values(), key=lambda one: -one.ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=get_args(Dtype), default=get_args(Dtype))
    parser.add_argument("--inputs", type=int, default=len(SETTINGS) * len(KINDS))
    parser.add_argument("--problems", type=int, default=10_000)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    lines = []
    for dtype in arguments.dtypes:
        for name, survey in table(dtype, arguments.inputs).items():
            best = survey.best
            ratios = " | ".join(f"{value:.3g}" for value in survey.worst.values())
            lines.append(f"| {dtype} | {name} | {ratios} | {best} | {survey.where[best]} |\n")
        arguments.out.write_text("".join(lines))
        for one in searched(dtype, arguments.problems) if arguments.problems else ():
            lines.append(f"| {dtype} | {one.order} | bred: {one.ratio:.3g} | {one.problem.to_json()} |\n")
        arguments.out.write_text("".join(lines))


if __name__ == "__main__":
    main()
