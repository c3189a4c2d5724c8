"""Right kernels that quantise inside against their bound: problems are bred towards the largest error / bound.

python -m tests.quality.quantised_search --problems 10000
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fa3_reference.attention import attention
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.quantises import CODES, Quantises
from fa3_reference.problem import AttentionProblem, Operands
from tests.quality.breeding import Individual, report, worst_of_each
from tests.quality.legal_orders import Result
from tests.quality.order_survey import errors, largest
from tests.quality.quantised_kernels import LARGEST, RIGHT, attend

F = np.float32
Rng = np.random.Generator
KINDS = ("normal", "halves", "halves", "halves of one sign", "peaky", "outlier", "ties", "offset", "small")


def measured(one: Individual) -> Individual:
    """Error / bound before the last rounding, by the hypothesis that is best over out and lse together."""
    by, steps = RIGHT[one.order]
    problem = one.problem
    q, k, v = (np.clip(each, -6e4, 6e4).astype(np.float16) for each in one.arrays)
    x = Operands(q, k, v)
    heads = (np.swapaxes(each, 1, 2) for each in (q, k, v))
    with np.errstate(all="ignore"):
        out, lse = attend(
            *heads, by=by, softmax_scale=problem.softmax_scale, causal=problem.causal, kept=np.dtype(F), **steps
        )
        truth = attention(problem, *x.dequantized(problem))
    found = errors(Result(np.swapaxes(out, 1, 2), lse), truth)
    models = KernelModel.hypotheses("fp16", "fp32").values()
    bounds = [forward_bound(problem, x, replace(model, quantises=by)) for model in models]
    return replace(one, ratio=min(max(map(largest, found, bound)) for bound in bounds))


def halves(x: np.ndarray, group: tuple | None, rng: Rng) -> np.ndarray:
    """Put most numbers half between two codes, beside one that sets the scale of all."""
    if group is None:
        return x
    codes = rng.integers(0, 6 if LARGEST[group[0]] < 100 else 30, x.shape) + 0.5
    moved = np.sign(x) * codes / CODES[group[0]].max_finite * 2.0 ** rng.integers(-2, 3)
    moved[..., 0] = np.abs(moved).max() * CODES[group[0]].max_finite / codes.max()
    return moved * (1 + rng.choice([0, 0, 2.0**-9, -(2.0**-9)]))


def drawn(problem: AttentionProblem, by: Quantises, rng: Rng) -> tuple[np.ndarray, ...]:
    q, k, v = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    match kind := str(rng.choice(KINDS)):
        case "halves" | "halves of one sign":
            if kind == "halves of one sign":
                q, k, v = np.abs(q), np.abs(k), np.abs(v)
            else:  # the errors of a key's channels add up in every score
                k = np.abs(k) * np.sign(q[:, :1, :1])
            some = [name for name in "qkv" if rng.random() < 0.6]
            q, k, v = (
                halves(x, getattr(by, name), rng) if name in some else x
                for name, x in zip("qkv", (q, k, v), strict=True)
            )
        case "peaky":
            q, k = 3 * q, 3 * k
        case "outlier":
            k[..., 0] *= 50
        case "ties":
            k[:] = k[:, :1]
        case "offset":
            k, v = k + 4, v + 4
        case "small":
            q, k, v = (x * 2.0 ** -rng.integers(2, 14) for x in (q, k, v))
    return q, k, v


def born(rng: Rng, order: str) -> Individual:
    problem = AttentionProblem(
        1,
        nheads=1,
        nheads_kv=1,
        seqlen_q=int(rng.integers(1, 5)),
        seqlen_k=int(rng.choice([1, 2, 3, 8, 17, 40, 130])),
        head_dim=int(rng.choice([1, 2, 8, 32])),
        head_dim_v=4,
        softmax_scale=float(2.0 ** rng.uniform(-6, 2)),
        causal=bool(rng.random() < 0.2),
    )
    return Individual(order, problem, drawn(problem, RIGHT[order][0], rng))


def bred(one: Individual, rng: Rng) -> Individual:
    """Change one thing: a few numbers of an operand, a row, or the scale of scores."""
    arrays = [x.copy() for x in one.arrays]
    which = int(rng.integers(3))
    rows = arrays[which].reshape(-1, arrays[which].shape[-1])
    row = rows[rng.integers(len(rows))]
    at = rng.integers(row.size)
    match rng.integers(8):
        case 0:
            row[at] *= 1 + rng.standard_normal() * 2.0 ** -rng.integers(1, 12)
        case 1:
            row[at] = rng.standard_normal() * 2.0 ** rng.integers(-10, 6)
        case 2:
            row *= 2.0 ** rng.integers(-2, 3)
        case 3:
            row[:] = rows[rng.integers(len(rows))]
        case 4:
            row[at] = -row[at]
        case 5:
            row[rng.random(row.size) < 0.3] = 0
        case 6:  # near half between two codes of the whole operand
            step = max(np.abs(rows).max(), 1e-4) / 127
            row[at] = (np.round(row[at] / step - 0.5) + 0.5 + rng.standard_normal() * 2.0**-10) * step
        case _:
            scale = one.problem.softmax_scale * 2.0 ** rng.uniform(-1, 1)
            return replace(one, problem=replace(one.problem, softmax_scale=float(scale)))
    return replace(one, arrays=tuple(arrays))


def searched(problems: int, seed: int = 0) -> list[Individual]:
    """Breed problems, most for the kernels that come nearest; return the worst of each, the worst first."""
    rng = np.random.default_rng([54, 2, seed])
    return worst_of_each(list(RIGHT), problems, rng, born=born, bred=bred, measured=measured)


if __name__ == "__main__":
    report(__doc__, searched)
