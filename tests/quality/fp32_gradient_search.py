"""Gradients of binary32 by legal orders against their bound: problems are bred towards the largest error / bound.

python -m tests.quality.fp32_gradient_search --problems 10000
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fa3_reference.attention import Attention, attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.bounds.backward import backward_bound
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.problem import AttentionProblem, BackwardOperands
from tests.quality.breeding import Individual, report, worst_of_each
from tests.quality.legal_orders import added, in_tf32

F = np.float32


@dataclass(frozen=True)
class Order:
    """How products add; where the scale meets Q and K; whose forward; what D is of; parts of dQ; tf32, as cut."""

    how: str = "serial"
    scale: Literal["after", "query", "root", "gradient"] = "after"
    forward: Literal["own", "given"] = "own"
    dots: Literal["out", "weights"] = "weights"
    by_lse: bool = False
    tile: int = 0
    tf32: str = ""


ORDERS = {
    "autograd of eager": Order(),
    "autograd, sums in pairs": Order("pairs"),
    "autograd, scale in Q": Order(scale="query"),
    "autograd, root of scale in Q and K": Order("toward zero", scale="root"),
    "recomputed from an own lse": Order(by_lse=True, dots="out"),
    "recomputed, parts of four keys": Order("reverse", by_lse=True, dots="out", tile=4),
    "given": Order(forward="given", dots="out"),
    "given, scale in dS, parts of one key": Order(forward="given", dots="out", scale="gradient", tile=1),
    "given, D of P dP": Order("pairs", forward="given"),
    "autograd in tf32": Order(tf32="cut"),
    "autograd in tf32, scale in Q": Order("chained", scale="query", tf32="cut"),
    "given in tf32": Order("chained", forward="given", dots="out", tf32="nearest"),
    "recomputed in tf32": Order("toward zero", by_lse=True, dots="out", tf32="cut", tile=8),
}


def product(order: Order, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = (in_tf32(x, order.tf32) for x in (a, b)) if order.tf32 else (a, b)
    return added(order.how, a, b, "fp32")


def gradients(order: Order, problem: AttentionProblem, x: BackwardOperands) -> list[np.ndarray]:
    """dQ, dK and dV of one head without a mask."""
    q, k, v, dout, out = (a[0, :, 0] for a in (x.q, x.k, x.v, x.dout, x.out))
    scale = F(problem.softmax_scale)
    before_q, before_k, c = F(1), F(1), scale
    if order.scale == "query":
        before_q, c = scale, F(1)
    if order.scale == "root":
        before_q = before_k = np.sqrt(scale)
        c = F(1)
    q1, k1 = q * before_q, k * before_k
    s = product(order, q1, k1.T) * c
    if order.forward == "given":
        p = np.exp(s - x.lse[0, 0][:, None])
    else:
        top = s.max(1, keepdims=True)
        p = np.exp(s - top)
        total = p.sum(1, keepdims=True)
        out = product(order, p, v) / total
        p = np.exp(s - (top + np.log(total))) if order.by_lse else p / total
    dp = product(order, dout, v.T)
    terms = dout * out if order.dots == "out" else p * dp
    ds = p * (dp - terms.sum(1, keepdims=True))
    late = c
    if order.scale == "gradient":
        ds, late = ds * c, F(1)
    dq = np.zeros_like(q)
    for start in range(0, len(k), order.tile or len(k)):
        part = slice(start, start + (order.tile or len(k)))
        dq = dq + product(order, ds[:, part], k1[part])
    dk = product(order, np.ascontiguousarray(ds.T), q1)
    dv = product(order, np.ascontiguousarray(p.T), dout)
    return [dq * late * before_q, dk * late * before_k, dv]


def measured(one: Individual) -> Individual:
    order, problem = ORDERS[one.order], one.problem
    q, k, v, dout = (x.astype(F)[None, :, None] for x in one.arrays)
    exact = tuple(x.astype(float) for x in (q, k, v))
    own = attention(problem, *exact)
    given = BackwardOperands(q, k, v, dout=dout, out=own.out.astype(F), lse=own.lse.astype(F))
    seen = own if order.forward == "own" else Attention(given.out.astype(float), given.lse.astype(float))
    truth = attention_bwd(problem, *exact, dout.astype(float), seen)
    accumulator: Literal["fp32", "tf32"] = "tf32" if order.tf32 else "fp32"
    with np.errstate(all="ignore"):
        got = gradients(order, problem, given)
    ratios = []
    for model in BackwardModel.hypotheses("fp32", order.forward, accumulator).values():
        bound = backward_bound(problem, given, model)
        each = [0.0]
        for mine, want, limit in zip(got, truth, bound, strict=True):
            counts = np.isfinite(limit[0, :, 0]) & (mine != want[0, :, 0])
            error = np.abs(mine - want[0, :, 0])[counts] / limit[0, :, 0][counts]
            each.append(float(np.max(np.where(np.isnan(error), np.inf, error), initial=0.0)))
        ratios.append(max(each))
    return replace(one, ratio=min(ratios))


def born(rng: np.random.Generator, order: str) -> Individual:
    rows, keys, dim = int(rng.choice([1, 2, 5])), int(rng.choice([1, 2, 3, 8, 17])), int(rng.choice([1, 4, 16]))
    scale = float(2.0 ** rng.uniform(-6, 2))
    problem = AttentionProblem(1, 1, 1, rows, keys, dim, dtype="fp32", softmax_scale=scale)
    gain = 2.0 ** rng.uniform(-3, 4)
    q, k, v, dout = (rng.standard_normal((n, dim)) for n in (rows, keys, keys, rows))
    match rng.integers(5):
        case 0:
            q, k, v, dout = np.abs(q), np.abs(k), np.abs(v), np.abs(dout)
        case 1:
            v = v + 2.0 ** rng.integers(0, 8)
        case 2:
            k[:] = k[:1] * (1 + 2.0**-10 * rng.standard_normal((keys, 1)))
        case 3:
            q[:, 0], k[:, 0] = 30.0, 8.0 / scale
    return Individual(order, problem, (gain * q, gain * k, v, dout))


def bred(one: Individual, rng: np.random.Generator) -> Individual:
    arrays = [x.copy() for x in one.arrays]
    x = arrays[rng.integers(4)]
    row = x[rng.integers(len(x))]
    problem = one.problem
    match rng.integers(7):
        case 0:
            row[rng.integers(row.size)] *= 1 + rng.standard_normal() * 2.0 ** -rng.integers(1, 22)
        case 1:
            row[rng.integers(row.size)] = rng.standard_normal() * 2.0 ** rng.integers(-12, 8)
        case 2:
            row *= 2.0 ** rng.integers(-2, 3)
        case 3:
            row[:] = x[rng.integers(len(x))]
        case 4:
            x += rng.standard_normal(x.shape) * np.abs(x) * 2.0 ** -rng.integers(4, 24)
        case 5:
            row[rng.random(row.size) < 0.3] = 0
        case _:
            problem = replace(problem, softmax_scale=float(problem.softmax_scale * 2.0 ** rng.uniform(-1, 1)))
    return replace(one, arrays=tuple(arrays), problem=problem)


def searched(problems: int, seed: int = 0) -> list[Individual]:
    """Breed problems, most for the orders that come nearest; return the worst of each order, the worst first."""
    rng = np.random.default_rng([54, seed])
    return worst_of_each(list(ORDERS), problems, rng, born=born, bred=bred, measured=measured)


if __name__ == "__main__":
    report(__doc__, searched)
