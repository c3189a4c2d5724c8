"""Gradients with a bias by legal orders against their bound: problems are bred towards the largest error / bound.

python -m tests.quality.bias_gradient_search --problems 10000
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

import numpy as np

from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, BackwardOperands, Dtype
from fa3_reference.score_term import ScoreTerm
from fa3verify import operations
from fa3verify.operations.backward import GradientConfig
from tests.quality.breeding import Individual, report, worst_of_each
from tests.quality.legal_orders import added
from tests.quality.term_search import drawn

F = np.float32
ISLANDS: tuple[tuple[Dtype, str], ...] = tuple(product(("fp16", "bf16", "fp32"), ("bias", "bias_fp32")))


@dataclass(frozen=True)
class Order:
    """How sums add; whose forward; what D is of; whether dS is rounded before it is summed; where the bias meets S."""

    how: str = "serial"
    forward: Literal["own", "given"] = "given"
    dots: Literal["out", "weights"] = "out"
    rounds: bool = False
    in_log2: bool = False
    unit: Literal["after", "before"] = "after"  # softmax_scale multiplies S, or divides the bias first


ORDERS = {
    "given": Order(),
    "given, dS rounded, in reverse": Order("reverse", rounds=True),
    "given, in log2 units, in pairs": Order("pairs", in_log2=True),
    "given, bias over the scale": Order(unit="before"),
    "given, D of P dP, dS rounded": Order(dots="weights", rounds=True),
    "own": Order(forward="own", dots="weights"),
    "own, dS rounded, in pairs": Order("pairs", forward="own", dots="weights", rounds=True),
    "own, D of dO O, in log2 units": Order("reverse", forward="own", in_log2=True),
    "own, bias over the scale": Order(forward="own", dots="weights", unit="before"),
}


def summed(how: str, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sum over the axes that have a length of 1 in a shape, in one order of additions in float32."""
    over = [axis for axis in range(4) if shape[axis] == 1]
    flat = np.moveaxis(x, over, range(4 - len(over), 4)).reshape(-1, int(np.prod([x.shape[axis] for axis in over])))
    return added(how, flat, np.ones((flat.shape[1], 1), F), "fp32").reshape(shape)


def products(how: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Products of matrices (batch, heads, ...) in one order of additions."""
    return np.array([[added(how, x, y, "fp32") for x, y in zip(*of, strict=True)] for of in zip(a, b, strict=True)])


def gradients(order: Order, problem: AttentionProblem, x: BackwardOperands) -> dict[str, np.ndarray]:
    """dQ, dK, dV and the gradient of the bias, in float32 but for what an order rounds, and each in its format."""
    kind = x.q.dtype
    q, k, v, dout, out = (a.astype(F).swapaxes(1, 2) for a in (x.q, x.k, x.v, x.dout, x.out))
    scale = F(problem.softmax_scale)
    bias = np.broadcast_to(x.term.astype(F), (*q.shape[:3], k.shape[2]))  # type: ignore[union-attr]
    s = products(order.how, q, k.swapaxes(2, 3))
    hidden = np.isneginf(bias)
    if problem.causal:
        n, m = s.shape[2:]
        hidden = hidden | ~np.tri(n, m, m - n, dtype=bool)
    bias = np.where(hidden, F(0), bias)
    s = (s + bias / scale) * scale if order.unit == "before" else s * scale + bias
    unit = F(np.log2(np.e)) if order.in_log2 else F(1)
    exp = np.exp2 if order.in_log2 else np.exp
    if order.forward == "given":
        p = exp(s * unit - x.lse[..., None] * unit)
    else:
        top = np.where(hidden, -np.inf, s).max(3, keepdims=True)
        p = np.where(hidden, F(0), exp((s - np.where(np.isneginf(top), F(0), top)) * unit))
        p = p / p.sum(3, keepdims=True)
        out = products(order.how, np.where(hidden, F(0), p), v).astype(kind).astype(F)
    p = np.where(hidden, F(0), p)
    dp = products(order.how, dout, v.swapaxes(2, 3))
    terms = dout * out if order.dots == "out" else p * dp
    ds = np.where(hidden, F(0), p * (dp - terms.sum(3, keepdims=True)))
    ds16, p16 = (y.astype(kind).astype(F) for y in (ds, p)) if order.rounds else (ds, p)
    found = {
        "dq": products(order.how, ds16, k) * scale,
        "dk": products(order.how, ds16.swapaxes(2, 3), q) * scale,
        "dv": products(order.how, p16.swapaxes(2, 3), dout),
    }
    found = {name: y.swapaxes(1, 2).astype(kind) for name, y in found.items()}
    assert problem.term is not None
    dbias = summed(order.how, ds16, problem.term_shape).astype(kind if problem.term.kind == "bias" else F)
    return found | {f"d{problem.term.kind}": dbias}


@dataclass(frozen=True)
class WithBias(Individual):
    """Its arrays are q, k, v, dout and the bias, and its ratio is of the bias, or of what is above its bound."""

    ratio_others: float = 0.0


def measured(one: WithBias) -> WithBias:
    order, problem = ORDERS[one.order], one.problem
    operation = operations.find("backward")
    largest = float(FORMATS[problem.dtype].max_finite) / 4
    arrays = tuple(np.clip(x, -largest, largest) for x in one.arrays[:4])
    operands = operation.prepare(problem, (*arrays, one.arrays[4]), None, {}).operands
    assert isinstance(operands, BackwardOperands)
    config = GradientConfig(problem.dtype, order.forward)
    with np.errstate(all="ignore"):
        got = gradients(order, problem, operands)
        truth = operation.truth(problem, operands.dequantized(problem), config, {})
        worst = []
        for model in operation.hypotheses(config, "fp32").values():
            bound = operation.bound(problem, operands, model, {})
            ratios = {}
            for name, x in got.items():
                counts = np.isfinite(bound[name]) & (x != truth[name])
                ratio = np.abs(x.astype(float) - truth[name])[counts] / bound[name][counts]
                ratios[name] = float(np.max(np.where(np.isnan(ratio), np.inf, ratio), initial=0.0))
            others = max(ratios.pop(name) for name in ("dq", "dk", "dv"))
            worst.append((max(others, *ratios.values()), max(ratios.values()), others))
    most, of_bias, others = min(worst)
    return replace(one, ratio=most if most > 1 else of_bias, ratio_others=others)


def born(dtype: Dtype, kind: str, rng: np.random.Generator, order: str) -> WithBias:
    batch, heads = (int(rng.integers(1, 3)) for _ in range(2))
    rows, keys, dim = int(rng.choice([1, 2, 5])), int(rng.choice([1, 2, 3, 8, 17])), int(rng.choice([1, 4, 16]))
    shared = "".join(axis for axis in "bhqk" if rng.random() < 0.35)
    problem = AttentionProblem(
        batch,
        heads,
        heads,
        rows,
        keys,
        dim,
        dtype=dtype,
        softmax_scale=float(2.0 ** rng.uniform(-6, 2)),
        causal=bool(rng.random() < 0.3),
        term=ScoreTerm(kind, shared),  # type: ignore[arg-type]
    )
    gain = 2.0 ** rng.uniform(-3, 3)
    q, k, v, dout = (rng.standard_normal((batch, n, heads, dim)) for n in (rows, keys, keys, rows))
    match rng.integers(5):
        case 0:
            q, k, v, dout = np.abs(q), np.abs(k), np.abs(v), np.abs(dout)
        case 1:
            v = v + 2.0 ** rng.integers(0, 8)
        case 2:
            k[:] = k[:, :1] * (1 + 2.0**-10 * rng.standard_normal((batch, keys, heads, 1)))
        case 3:
            q, k = np.zeros_like(q), np.zeros_like(k)
    bias = drawn(problem, (q, k, v), rng)
    return WithBias(order, problem, (gain * q, gain * k, v, dout, bias))


def bred(one: WithBias, rng: np.random.Generator) -> WithBias:
    arrays = [x.copy() for x in one.arrays]
    x = arrays[rng.integers(5)]
    row = x.reshape(-1, x.shape[-1])[rng.integers(x.size // x.shape[-1])]
    at = rng.integers(row.size)
    problem = one.problem
    match rng.integers(8):
        case 0:
            row[at] *= 1 + rng.standard_normal() * 2.0 ** -rng.integers(1, 22)
        case 1:
            row[at] = rng.standard_normal() * 2.0 ** rng.integers(-12, 8)
        case 2:
            row *= 2.0 ** rng.integers(-2, 3)
        case 3:
            row[:] = x.reshape(-1, x.shape[-1])[rng.integers(x.size // x.shape[-1])]
        case 4:
            spread = np.where(np.isfinite(x), np.abs(x), 0) * 2.0 ** -rng.integers(4, 24)
            arrays = [y if y is not x else x + rng.standard_normal(x.shape) * spread for y in arrays]
        case 5:
            row[rng.random(row.size) < 0.3] = 0
        case 6:
            arrays[4] = arrays[4] + rng.standard_normal() * 2.0 ** rng.integers(-6, 10)
        case _:
            problem = replace(problem, softmax_scale=float(problem.softmax_scale * 2.0 ** rng.uniform(-1, 1)))
    return replace(one, arrays=tuple(arrays), problem=problem)


def searched(dtype: Dtype, kind: str, problems: int, seed: int = 0) -> list[WithBias]:
    """Breed problems, most for the orders that come nearest; return the worst of each order, the worst first."""
    rng = np.random.default_rng([54, seed, ISLANDS.index((dtype, kind))])
    with np.errstate(all="ignore"):
        return worst_of_each(list(ORDERS), problems, rng, born=partial(born, dtype, kind), bred=bred, measured=measured)


if __name__ == "__main__":
    report(__doc__, searched, ISLANDS, told=lambda one: f"others {one.ratio_others:.6f}: {one.problem.to_json()}")
