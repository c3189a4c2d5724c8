"""Positive controls of the error bound: inputs that attain one term of it, so that the bound without it is broken.

Each construction makes one source of error dominate. Either everything else is exact, because numbers are small
integers times one power of two or cancel, or a weight is so placed that its small error carries it over the middle of
two numbers of P's format, where the half unit of rounding is known and what is left is that error. Random draws and a
screening by single operations of the twin do the rest.

    python -m tests.quality.positive_controls --out table.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fa3_kernels.twin import mufu
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.bounds.device import TENSOR_CORE, U_FP32
from fa3_reference.bounds.steps import LN2
from fa3_reference.formats import FORMATS
from fa3_reference.problem import DTYPES, Dtype
from fa3_reports.adversary.forward import UNROUNDED
from fa3verify.search.colony import Environment, rounded
from fa3verify.search.forward.colony import ForwardColony, Island
from fa3verify.search.forward.judge import truth_error
from tests.quality.weighed_bound import weighed_bound

ROWS, SCREENED = 16, 100_000
FAR = 240.0  # log2 units below a maximum, where a weight is exactly 0


def _island(dtype: Dtype, keys: int, rows: int = 1, columns: int = 1, **rest: Any) -> Island:
    """One tile, unless ``rest`` says otherwise, of the least keys that a twin takes."""
    rest.setdefault("tile_n", 32 if dtype == "e4m3" else 16)
    return Island("control", dtype, keys, width=1 if dtype == "e4m3" else 3, rows=rows, columns=columns, **rest)


def _colony(island: Island, scores: np.ndarray, v: np.ndarray, scale: float = 1.0, digit: int = 1) -> ForwardColony:
    """Rows with scores (rows, keys) in log2 units before ``scale``, and V (columns, keys).

    16-bit K has three digits for a score. e4m3 has its least score in the descale of Q, so that K may be ``-digit``.
    """
    descale = np.ones(len(scores), np.float32)
    if island.dtype == "e4m3":
        least = np.where(scores == -FAR, 0.0, scores).min(1)
        descale = np.where(least < 0, -least / digit, 1.0).astype(np.float32)
        scores = np.where(scores == -FAR, -448.0, np.round(scores / descale[:, None].astype(float)))
    weights = np.exp2(-(FORMATS[island.dtype].fraction_bits + 1) * np.arange(island.width))
    k, left = np.zeros((*scores.shape, island.width)), scores.astype(np.float64)
    for i, weight in enumerate(weights):
        k[..., i] = rounded(left / weight, island.dtype)
        left = left - k[..., i] * weight
    ones = np.ones(island.descales, np.float32)
    environment = Environment(LN2 * scale, 0.0, ones, ones)
    q = np.tile(weights, (len(scores), 1))
    return ForwardColony(island, environment, q, k, descale, rounded(v, island.dtype))


def _binary32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(np.float64)


def _best(height: np.ndarray, count: int = ROWS) -> np.ndarray:
    return np.argsort(-height)[:count]


def _weight(dtype: Dtype, rng: np.random.Generator, orders: tuple[int, int], scale: float) -> ForwardColony:
    """A weight whose error takes it over the middle of two numbers of P's format, and maxima that cancel it."""
    fmt, is_fp8 = FORMATS[dtype], dtype == "e4m3"
    offset, digit = (8, 15) if is_fp8 else (0, 1)
    order = rng.integers(*orders, SCREENED)
    middle = np.ldexp(1 + (rng.integers(0, 2**fmt.fraction_bits, SCREENED) + 0.5) * fmt.epsilon, order)
    wanted = np.log2(middle) + rng.uniform(-4, 4, SCREENED) * U_FP32 * (1 + np.abs(order + offset))
    raw = _binary32(wanted / (scale * digit))
    x = raw * digit * scale
    stored = rounded(mufu.ex2((x + offset).astype(np.float32)), dtype) * 2.0**-offset
    chosen = _best(np.abs(stored - np.exp2(x)) / np.exp2(order) - fmt.epsilon / 2)
    lift, middle = np.exp2(-np.round(order[chosen] / 2)), middle[chosen]
    few_bits = np.exp2(order[chosen] - 3.0)
    first = np.round(middle / few_bits) * few_bits
    v = np.stack([-first, (first - middle) * is_fp8, np.ones(ROWS)], axis=1) * lift[:, None]
    scores = np.stack([np.zeros(ROWS), np.zeros(ROWS), raw[chosen] * digit], axis=1)
    return _colony(_island(dtype, 3, ROWS, ROWS), scores, v, scale, digit)


def _mean(rng: np.random.Generator) -> ForwardColony:
    """Equal values of two keys: in e4m3 no weight crosses a middle by enough, but the row sum errs as well."""
    digit, v_descale = 15, np.float32(rng.uniform(1, 2))
    descale = rng.uniform(0.002, 1.5, 4 * SCREENED) / digit
    x = -digit * np.round(descale * 2.0**21) * 2.0**-21
    x = x[(x + 8 == _binary32(x + 8))]
    weight = mufu.ex2((x + 8).astype(np.float32))
    total = np.float32(256) + weight
    stored, exact = 256 + rounded(weight.astype(float), "e4m3"), 256 + 256 * np.exp2(x)
    inverse = mufu.rcp(total) * v_descale
    v = 1 + np.arange(8) / 8
    out = (stored[:, None] * v).astype(np.float32) * inverse[:, None]
    error = np.abs(out / (v * float(v_descale)) - 1) - np.abs(stored / exact - 1)[:, None]
    scores = np.stack([np.zeros(ROWS), x[_best(error.max(1))]], axis=1)
    colony = _colony(_island("e4m3", 2, ROWS, 8), scores, np.repeat(v[:, None], 2, axis=1), digit=digit)
    colony.environment = replace(colony.environment, v_descale=np.array([v_descale]))
    return colony


def exp(dtype: Dtype, rng: np.random.Generator) -> ForwardColony:
    return _mean(rng) if dtype == "e4m3" else _weight(dtype, rng, (-1, 0), 1.0)


def exponent(dtype: Dtype, rng: np.random.Generator) -> ForwardColony:
    orders = {"fp16": (-14, -8), "bf16": (-100, -64), "e4m3": (-4, 0)}[dtype]
    return _weight(dtype, rng, orders, 1.0 if dtype == "e4m3" else float(np.float32(rng.uniform(1, 2))))


def rescale(dtype: Dtype, rng: np.random.Generator) -> ForwardColony:
    """A factor that errs much, of an O that the next block cancels."""
    island = _island(dtype, 33 if dtype == "e4m3" else 17, ROWS, ROWS, promotion_interval=32 * (dtype == "e4m3"))
    x = np.round(rng.uniform(-1, -0.01, SCREENED) * 2.0**20) * 2.0**-20
    x = x[_best(np.abs(mufu.ex2(x.astype(np.float32)) * np.exp2(-x) - 1))]
    fmt = FORMATS[dtype]
    first = np.ceil(np.exp2(-x) / fmt.epsilon) * fmt.epsilon
    scores, v = np.full((ROWS, island.keys), -FAR), np.zeros((ROWS, island.keys))
    scores[:, 0], scores[:, -1] = 0, x
    v[:, 0] = -first * np.exp2(x) if dtype == "e4m3" else -1 + 2.0 ** -rng.integers(4, 7)
    v[:, -1] = first
    return _colony(island, scores, v)


def _ties(dtype: Dtype, v: np.ndarray, v_descale: float = 1.0, **rest: Any) -> ForwardColony:
    """One row of equal scores, whose weights and their sum are exact."""
    columns, keys = v.shape
    colony = _colony(_island(dtype, keys, 1, columns, **rest), np.zeros((1, keys)), v)
    if dtype == "e4m3":
        colony.environment = replace(colony.environment, v_descale=np.array([v_descale], np.float32))
    return colony


def sums(dtype: Dtype, rng: np.random.Generator) -> ForwardColony:
    """Values whose sum outgrows them, and one so small that its bits are lost with the last ones of the sum."""
    core = TENSOR_CORE[dtype]
    keys, columns = int(rng.integers(9, 33 if dtype == "e4m3" else 17)), 64
    v = 32 * rounded(rng.uniform(1, 2, (columns, keys)), dtype)
    unit = np.exp2(np.floor(np.log2(v[:, 1:].sum(1)))) * core.out
    v[:, 0] = unit * (1 - 2.0**-4)
    return _ties(dtype, v)


def products(dtype: Dtype, rng: np.random.Generator) -> ForwardColony:
    """One value, and many so small that all their bits are cut off."""
    keys, columns = 127, 64
    v = np.full((columns, keys), 1 - FORMATS[dtype].epsilon) * rng.uniform(1, 1.05, (columns, 1))
    v[:, 0] = 2.0 ** (25 if dtype != "e4m3" else 13)
    return _ties(dtype, v * 2.0**-10, tile_n=128)


def reciprocal(dtype: Dtype, rng: np.random.Generator) -> ForwardColony:
    """Equal values, whose mean is exact but for the division."""
    keys, columns = int(rng.integers(3, 16)), 64
    return _ties(dtype, np.repeat(rng.uniform(1, 2, (columns, 1)), keys, axis=1), rng.uniform(1, 2))


def lg2(dtype: Dtype, rng: np.random.Generator) -> ForwardColony:
    """A row sum of which lg2 errs most."""
    x = _binary32(rng.uniform(-6, -1, SCREENED))
    offset = 8 if dtype == "e4m3" else 0
    total = mufu.ex2(x.astype(np.float32) + np.float32(offset)) + np.float32(2.0**offset)
    x = x[_best(np.abs(mufu.lg2(total) - offset - np.log2(1 + np.exp2(x))))]
    return _colony(_island(dtype, 2, ROWS), np.stack([np.zeros(ROWS), x], axis=1), np.zeros((1, 2)))


def lse(dtype: Dtype, rng: np.random.Generator) -> ForwardColony:
    """A single key of a large score."""
    scale = float(np.float32(rng.uniform(1, 2)))
    scores = -rng.uniform(2048, 4096, (ROWS, 1))
    return _colony(_island(dtype, 1, ROWS), _binary32(scores), np.zeros((1, 1)), scale)


def factor(dtype: Dtype, rng: np.random.Generator) -> ForwardColony:
    """As for lse, with a factor that is no number of binary32."""
    scale = float(np.exp2(rng.integers(-2, 3)) * (1 + rng.uniform(0.9, 1.1) * U_FP32))
    scores = -rng.uniform(2048, 4096, (ROWS, 1))
    return _colony(_island(dtype, 1, ROWS), _binary32(scores), np.zeros((1, 1)), scale)


def combine(dtype: Dtype, rng: np.random.Generator) -> ForwardColony:
    """Two splits of one key each, of equal values."""
    island = _island(dtype, 33 if dtype == "e4m3" else 17, ROWS, 64, num_splits=2)
    scores, v = np.full((ROWS, island.keys), -FAR), np.zeros((64, island.keys))
    scores[:, 0], scores[:, -1] = 0, np.round(rng.uniform(-3, -0.01, ROWS) * 2.0**20) * 2.0**-20
    v[:, 0] = rng.uniform(1, 2, 64)
    v[:, -1] = v[:, 0]
    return _colony(island, scores, v)


def promotion(dtype: Dtype, rng: np.random.Generator) -> ForwardColony:
    """Parts of less than half a unit of the sum, which the last part cancels; all weights are powers of two."""
    island = _island(dtype, 768, 1, 1, tile_n=128, promotion_interval=32)
    scores, v = np.full((1, 768), -FAR), np.zeros((1, 768))
    small = np.arange(159, 640, 32)
    scores[:, [0, 767]], scores[:, small] = 0, -17
    v[:, 767], v[:, 0], v[:, small] = 256, -256, 1.875
    return _colony(island, scores, v)


def row_sum(dtype: Dtype, rng: np.random.Generator) -> ForwardColony:
    """Weights of less than half a unit of the largest, which vanish in its thread one by one."""
    depth = -25 - rng.uniform(0.001, 0.1, (ROWS, 1))
    scores = np.repeat(depth, 128, axis=1)
    scores[:, 0] = 0
    v = np.zeros((1, 128))
    v[:, 0] = 1
    return _colony(_island(dtype, 128, ROWS, tile_n=128), scores, v)


def softcap(dtype: Dtype, rng: np.random.Generator) -> ForwardColony:
    """A single key, whose tanh errs by units of the cap."""
    cap, is_fp8 = float(np.exp2(rng.uniform(4, 8))), dtype == "e4m3"
    x = -_binary32(cap * rng.uniform(0.01, 0.5, SCREENED))
    steep = np.float32(2 / cap) * (-x.astype(np.float32) if is_fp8 else np.float32(1))
    grown = mufu.ex2((-1 if is_fp8 else x.astype(np.float32)) * steep)
    error = 1 - 2 * mufu.rcp(grown + np.float32(1)).astype(float) - np.tanh(x * LN2 / cap)
    scores = x[_best(np.abs(error))][:, None]
    colony = _colony(_island(dtype, 1, ROWS, softcap=True), scores, np.zeros((1, 1)))
    colony.environment = replace(colony.environment, softcap=cap)
    return colony


Construction = Callable[[Dtype, np.random.Generator], ForwardColony]
CONSTRUCTIONS: tuple[Construction, ...] = (
    *(factor, exponent, exp, rescale, products, sums, promotion, row_sum, reciprocal, lg2, lse, combine, softcap),
)


def ratios(colony: ForwardColony, *several: dict[str, float]) -> list[float]:
    """Largest error / bound of O, before its last rounding, and of LSE, for each of some weights of its sources."""
    problem, operands, config = colony.problem, colony.operands, colony.island.config
    model = replace(config.kernel_model(), out_dtype="fp32")
    result = []
    with np.errstate(all="ignore"):
        got = forward(problem, operands, config, ideal=UNROUNDED)
        truth = attention(problem, *operands.dequantized(problem))
        _, *own = truth_error(colony, truth.lse.reshape(-1))
        for weights in several:
            bound = weighed_bound(**weights)(problem, operands, model)
            errors = (np.abs(got.out - truth.out), np.abs(got.lse - truth.lse))
            each = [
                (error.reshape(floor.shape) - floor) / limit.reshape(floor.shape)
                for error, floor, limit in zip(errors, own, bound, strict=True)
            ]
            result.append(max(float(np.nanmax(ratio)) for ratio in each))
    return result


class Ratio(NamedTuple):
    """Largest error / bound that was met, of the weighted and of the whole bound, after so many problems."""

    weighted: float
    whole: float
    problems: int


def control(construction: Construction, dtype: Dtype, weight: float, seed: int, draws: int = 60) -> Ratio:
    """Draw inputs until one of them breaks the bound with a term so weighted; the whole bound is of the same inputs."""
    rng, best = np.random.default_rng(seed), Ratio(0.0, 0.0, 0)
    problems = 0
    for _ in range(draws):
        colony = construction(dtype, rng)
        problems += colony.island.problems * colony.island.columns
        weighted, whole = ratios(colony, {construction.__name__: weight}, {})
        best = max(best, Ratio(weighted, whole, problems), key=lambda ratio: ratio.weighted)
        if best.weighted > 1:
            break
    return best


def _row(construction: Construction, dtype: Dtype) -> str:
    cells = []
    for weight in (0.5, 0.0):
        found = control(construction, dtype, weight, 1)
        cells += [f"{found.weighted:.7g}", f"{found.whole:.6f}", f"{found.problems:,}"]
    return " | ".join((construction.__name__, dtype, *cells))


def main() -> None:
    """Write the largest error / bound of every term and dtype, halved and removed, as a Markdown table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    head = "term | dtype | halved | whole | problems | removed | whole | problems"
    rows = [_row(c, dtype) for c in CONSTRUCTIONS for dtype in DTYPES if c is not promotion or dtype == "e4m3"]
    table = [head, " | ".join(["---"] * 8), *rows]
    parser.parse_args().out.write_text("".join(f"| {row} |\n" for row in table), encoding="utf-8")


if __name__ == "__main__":
    main()
