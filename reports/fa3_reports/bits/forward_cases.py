"""Cases of the bit campaign: every head_dim, mask, packing, split, varlen, family of values, and for e4m3 every scope.

Drawn the same on every machine: seeds count the cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, product
from typing import Any

import numpy as np

from fa3_kernels.plan.choose import choose_num_splits, config_of
from fa3_kernels.plan.tile_order import count_items, shape_of
from fa3_kernels.plan.tile_times import can_pack
from fa3_kernels.twin.quantize import quantize_qkv
from fa3_reference.formats import FORMATS, narrowed
from fa3_reference.problem import AttentionProblem, Descale, Dtype, Operands
from fa3verify.inputs import activations, captures

DTYPES: tuple[Dtype, ...] = ("fp16", "bf16", "e4m3")
FAMILIES = ("normal", "outlier", "peaky", "subnormal", "special")
E4M3_FAMILIES = (*FAMILIES, "mean", "tiny")
# What shares a descale of q, k and v: nothing is given, the tensor, a head, so many rows of a head.
WHOLE_SCOPES = (
    ("head", "head", "head"),
    ("none", "none", "none"),
    ("tensor", "tensor", "tensor"),
    ("128", "tensor", "head"),
    ("64", "none", "none"),
)
BLOCK_SCOPES = (
    ("64", "128", "128"),
    ("128", "128", "128"),
    ("64", "head", "128"),
    ("head", "128", "tensor"),
    ("none", "256", "128"),
)
SCOPES = tuple(scopes for pair in zip(WHOLE_SCOPES, BLOCK_SCOPES) for scopes in pair)
DEFAULTS = {"promotion_interval": 128, "out_dtype": "bf16"}
# Of the kernels that differ in these, everything is compiled for two masks, a part for the others.
ALL_CHOICES = [dict(zip(DEFAULTS, pair)) for pair in product((128, 64, 0), ("bf16", "fp16"))]
SOME_CHOICES = [ALL_CHOICES[i] for i in (0, 3, 4)]  # 128 bf16, 64 fp16, 0 bf16


@dataclass(frozen=True)
class Case:
    """One launch.

    ``choices`` are num_splits and pack_gqa, and for e4m3 promotion_interval and out_dtype, as the launcher takes them;
    ``scopes`` says what shares a descale of q, k and v; a family may also be a stored activation.
    """

    feature: str
    problem: AttentionProblem
    family: str = "normal"
    seed: int = 0
    choices: dict[str, Any] = field(default_factory=dict)
    scopes: tuple[str, str, str] = ("none", "none", "none")


def operands(case: Case) -> Operands:
    """Draw q, k and v, and the descales; every family is a fixed recipe of one generator."""
    if case.feature == "activation":
        return _activation(case)
    rng = np.random.default_rng(case.seed)
    is_fp8 = case.problem.dtype == "e4m3"
    arrays = []
    for shape in (case.problem.q_shape, case.problem.k_shape, case.problem.v_shape):
        x = rng.standard_normal(shape)
        if case.family == "outlier":
            x += rng.standard_normal(shape) * 10 * (rng.random(shape) < 0.001)
        elif case.family == "peaky":
            x *= 6
        elif case.family == "subnormal":
            x *= 2.0 ** rng.integers(-24, 3, shape)
        elif case.family == "mean":
            x += 1
        elif case.family == "special":
            values = np.array(
                [np.nan, 448.0, -448.0, -0.0, 0.0] if is_fp8 else [np.inf, -np.inf, np.nan, 60000.0, -0.0]
            )
            x = np.where(rng.random(shape) < 1e-5, rng.choice(values, shape), x)
        arrays.append(narrowed(np.clip(x, -448, 448) if is_fp8 else x, FORMATS[case.problem.dtype]))
    q, k, v = arrays
    return Operands(q, k, v, *_descales(case, rng))


def _descales(case: Case, rng: np.random.Generator) -> Iterator[Descale | None]:
    """Log-uniform descales; family tiny has some whose product underflows, which the kernel must not let become 0."""
    problem = case.problem
    sizes = ((problem.nheads, problem.seqlen_q), *((problem.nheads_kv, problem.seqlen_k),) * 2)
    for name, scope, (heads, seqlen) in zip("qkv", case.scopes, sizes, strict=True):
        if scope == "none":
            yield None
            continue
        rows = int(scope) if scope.isdigit() else 0
        blocks = max(1, -(-seqlen // rows)) if rows else 1
        low, high = (-75, -55) if case.family == "tiny" and name != "v" else (-3, 3)
        values = 2.0 ** rng.uniform(low, high, (problem.batch, heads, blocks))
        if scope == "tensor":
            values[:] = values[0, 0, 0]
        yield Descale(values.astype(np.float32), rows)


def _activation(case: Case) -> Operands:
    """Stored activations; for e4m3 by the quantiser's twin, with a descale per block, or per head where asked."""
    dtype = case.problem.dtype
    stored = captures.load(case.family)
    q, k, v = (x.astype(FORMATS["fp16" if dtype == "e4m3" else dtype].dtype) for x in (stored.q, stored.k, stored.v))
    if dtype != "e4m3":
        return Operands(q, k, v)
    by_head = case.scopes[0] == "head"
    return quantize_qkv(q, k, v, scope="head" if by_head else "block", rotate=not by_head).operands()


def dense_cases(dtype: Dtype, head_dim: int, seeds: Iterator[int]) -> list[Case]:
    """Whole tiles, every kind of tail, GQA, more keys than queries and the reverse; masks and the cap."""
    shapes = [(512, 512), (1024, 1024), (1000, 1000), (384, 1000), (1000, 384), (777, 640), (129, 1023)]
    rng = np.random.default_rng(2026)
    tails = [tuple(int(n) for n in rng.integers(1, 301, 2)) for _ in range(30)] + [
        (n, n) for n in (1, 127, 128, 129, 300)
    ]
    masks: dict[str, dict[str, Any]] = {
        "dense": {},
        "causal": {"causal": True},
        "window": {"window": (200, 0)},
        "band": {"window": (90, 150)},
        "left": {"window": (250, -1)},
        "right": {"window": (-1, 40)},
        "softcap": {"softcap": 20.0},
        "softcap-window": {"softcap": 5.0, "window": (300, 20)},
    }
    if dtype == "bf16":  # the same code but for the formats: fewer kernels to compile
        masks = {name: masks[name] for name in ("dense", "causal", "window")}
    found = []
    for name, mask in masks.items():
        for i, (m, n) in enumerate(shapes):
            heads, kv = ((4, 4), (4, 2), (6, 1))[i % 3]
            problem = AttentionProblem(2 - i % 2, heads, kv, m, n, head_dim, dtype=dtype, **mask)
            families = FAMILIES if name in ("dense", "causal") else (FAMILIES[i % 5],)
            found += [Case(name, problem, family, next(seeds)) for family in families]
        for i, (m, n) in enumerate(tails):
            heads, kv = ((2, 2), (4, 2), (3, 1))[i % 3]
            scale: Any = (None, 1.0, 0.003)[i // 3 % 3]
            problem = AttentionProblem(2, heads, kv, m, n, head_dim, dtype=dtype, softmax_scale=scale, **mask)
            found.append(Case(name, problem, FAMILIES[i % 5], next(seeds)))
    return found


def grouped_cases(dtype: Dtype, head_dim: int, seeds: Iterator[int]) -> list[Case]:
    """PackGQA with every padded group, splits with and without empty ones, decode shapes."""
    groups = [(8, 4), (6, 2), (12, 3), (8, 1), (28, 2), (32, 1), (48, 1)]
    if (dtype, head_dim) != ("fp16", 128):
        groups = [(8, 1)] if dtype == "bf16" else [(6, 2), (8, 1)]
    found = []
    shapes: tuple[tuple[int, int, dict[str, Any]], ...]
    shapes = ((1, 900, {}), (70, 333, {"causal": True}), (130, 520, {"window": (100, 0)}))
    for heads, kv in groups:
        for m, n, mask in shapes:
            problem = AttentionProblem(2, heads, kv, m, n, head_dim, dtype=dtype, **mask)
            family = FAMILIES[next(seeds) % 5]
            found.append(Case("packed", problem, family, next(seeds), {"pack_gqa": True}))
            found.append(Case("packed-splits", problem, family, next(seeds), {"pack_gqa": True, "num_splits": 3}))
    shapes = (
        (1, 4000, {}),
        (300, 1100, {"causal": True}),
        (200, 40, {"causal": True}),
        (333, 777, {"window": (150, 30)}),
        (64, 700, {"softcap": 15.0}),
    )
    for m, n, mask in shapes:
        if dtype == "bf16" and mask:
            continue
        for splits in (2, 5, 0):
            problem = AttentionProblem(3, 4, 2, m, n, head_dim, dtype=dtype, **mask)
            choices = {"num_splits": splits, "pack_gqa": False}
            found += [Case("splits", problem, family, next(seeds), choices) for family in FAMILIES]
    return found


def varlen_cases(dtype: Dtype, head_dim: int, seeds: Iterator[int]) -> list[Case]:
    """Packed sequences, empty ones among them; family special and the neighbours' rows test the clipping."""
    lengths = (
        ((100, 1, 0, 257, 64), (130, 500, 70, 0, 64)),
        ((513, 128, 7), (385, 129, 1000)),
        ((1, 1, 1, 1), (1, 300, 0, 700)),
    )
    masks: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (120, 10)}, {"causal": True, "softcap": 10.0})
    masks = masks[1:2] if dtype == "bf16" else masks
    found = []
    for i, (m, n) in enumerate(lengths):
        for mask in masks:
            for family in (FAMILIES[i], "special"):
                problem = AttentionProblem.varlen(m, n, nheads=4, nheads_kv=2, head_dim=head_dim, dtype=dtype, **mask)
                found.append(Case("varlen", problem, family, next(seeds), {"pack_gqa": False}))
                found.append(Case("varlen-packed", problem, family, next(seeds), {"pack_gqa": True}))
                choices = {"pack_gqa": True, "num_splits": 3}
                found.append(Case("varlen-packed-splits", problem, family, next(seeds), choices))
    return found


def other_cases(dtype: Dtype, seeds: Iterator[int]) -> list[Case]:
    """Head dims that are zero-padded to 64, 128 or 256, those of V that differ, and pretrained heads' own inputs."""
    padded = (8, 40, 72, 96, 120, 136, 200)
    values = ((192, 128), (64, 256), (128, 72))
    if dtype == "e4m3":
        padded = (16, 48, 80, 96, 112, 144, 208)
        values = ((192, 128), (64, 256), (128, 80))
    found = []
    for head_dim in padded:
        problem = AttentionProblem(2, 4, 2, 515, 515, head_dim, dtype=dtype, causal=True)
        found.append(Case("padded", problem, "normal", next(seeds)))
    for dim, dim_v in values:
        problem = AttentionProblem(2, 4, 2, 300, 515, dim, dim_v, dtype=dtype, causal=True)
        found.append(Case("head_dim_v", problem, "outlier", next(seeds)))
    return found


def boxed_cases(dtype: Dtype, seeds: Iterator[int]) -> list[Case]:
    """Every third case of head dims in three boxes of channels, and the same of V with a width of its own."""
    sizes = ((96, 96), (192, 192), (192, 128))
    found = [
        replace(case, problem=replace(case.problem, head_dim_v=head_dim_v))
        for head_dim, head_dim_v in sizes
        for family in (dense_cases, grouped_cases, varlen_cases)
        for case in family(dtype, head_dim, seeds)
    ][::3]
    problems = [
        AttentionProblem(2, 4, 2, 515, 700, d, v, dtype=dtype, causal=True)
        for d, v in ((80, 80), (160, 160), (128, 64), (128, 96), (96, 64), (256, 128), (256, 192), (64, 192))
    ]
    return found + [Case("boxes", problem, "outlier", next(seeds)) for problem in problems]


def wrapping_cases(dtype: Dtype, seeds: Iterator[int]) -> list[Case]:
    """More tiles than SMs."""
    n, causal = {"fp16": (1024, True), "bf16": (1000, False), "e4m3": (1000, True)}[dtype]
    problems = [AttentionProblem(2, 40, 8, n, n, d, dtype=dtype, causal=causal) for d in (64, 128, 256)]
    return [Case("wraps", problem, "outlier", next(seeds)) for problem in problems]


def activation_cases(dtype: Dtype, seeds: Iterator[int]) -> list[Case]:
    """Q, K and V of pretrained heads; for e4m3 rotated with a descale per block, and plain with one per head."""
    problems = {stored.name: stored.problem(dtype=dtype) for stored in activations.list_activations()}
    found = [Case("activation", problem, name, next(seeds)) for name, problem in problems.items()]
    if dtype == "e4m3":
        found = [replace(case, scopes=scopes) for case in found for scopes in (("128",) * 3, ("head",) * 3)]
    return found


def tile_cases(dtype: Dtype, seeds: Iterator[int]) -> list[Case]:
    """Launches of many tiles at head_dim 64, in tiles of 192 rows and of 128; and prompts whose heads are packed.

    Of fp16 ten million outputs of a kernel that is a default; e4m3 divides them among its choices.
    """
    part = 1 if dtype == "fp16" else 2
    shapes: tuple[tuple[int, tuple[int, int], int, dict[str, Any], dict[str, Any]], ...] = (
        (192, (80, 80), 2304, {"causal": True}, {}),
        (192, (64, 64), 2480, {"causal": True}, {}),
        (192, (64, 16), 2480, {"causal": True}, {"pack_gqa": True}),
        (192, (32, 8), 2480, {"causal": True, "softcap": 20.0}, {"pack_gqa": False}),
        (192, (32, 32), 2480, {"causal": True}, {"num_splits": 2}),
        (128, (16, 16), 1024, {}, {}),
        (128, (160, 160), 1024, {}, {}),
        (128, (160, 160), 1000, {}, {}),
        (128, (80, 20), 1000, {}, {"pack_gqa": True}),
        (128, (80, 40), 1000, {"softcap": 20.0}, {"pack_gqa": False}),
        (128, (80, 80), 1000, {}, {"num_splits": 2}),
    )
    found = []
    for repeat in range(3 if dtype == "e4m3" else 1):
        for rows, (heads, kv), n, mask, choices in shapes:
            problem = AttentionProblem(1, heads // part, kv // part, n, n, 64, dtype=dtype, **mask)
            family = FAMILIES[(len(found) + repeat) % 5]
            choices = {**choices, "tile": (rows, 128)}
            found.append(Case(f"{rows}-rows", problem, family, next(seeds), choices))
    masks: tuple[dict[str, Any], ...] = ({"causal": True}, {"window": (400, 0)})
    for head_dim, head_dim_v in ((64, 64), (80, 80), (128, 128), (192, 128), (192, 192), (256, 256)):
        for mask in masks:
            problem = AttentionProblem(1, 16, 4, 700, 700, head_dim, head_dim_v, dtype=dtype, **mask)
            found.append(Case("packed-prompt", problem, "normal", next(seeds), {"pack_gqa": True}))
    return found


def _as_first_run(case: Case) -> Case:
    """Return a case with the tile, packing and parts that it was first compared with, whatever a launch chooses now."""
    p = case.problem
    if p.is_varlen:
        return case
    rows = 128
    choices = dict(case.choices)
    if max(p.head_dim, p.head_dim_v) <= 64:
        rows = 128 if p.causal or p.window != (-1, -1) or p.seqlen_q <= 128 else 192
        choices["tile"] = rows, 128
    if can_pack(p) and "pack_gqa" not in choices:
        packed, plain = (count_items(shape_of(p, pack_gqa=pack), rows) for pack in (True, False))
        choices["pack_gqa"] = packed < plain
    if choices.get("num_splits") == 0:  # chosen without the bytes of partial sums
        in_one: dict[str, Any] = choices | {"num_splits": 1}
        choices["num_splits"] = choose_num_splits(p, config_of(p, **in_one), merged_bytes=math.inf)
    return replace(case, choices=choices)


def _with_choices(grid: list[Case]) -> list[Case]:
    """e4m3: give the cases of every feature promotion, output format, scopes and families in turn."""
    found = []
    numbers: dict[str, Iterator[int]] = {}
    for case in grid:
        i = next(numbers.setdefault(case.feature, count()))
        if case.feature == "activation":
            found.append(replace(case, choices=SOME_CHOICES[i // 2 % 3]))
            continue
        family = E4M3_FAMILIES[i % 7] if i % 7 > 4 else case.family
        if case.feature in ("dense", "causal"):
            choice = ALL_CHOICES[i % 6]
            scopes = SCOPES
        else:
            choice = SOME_CHOICES[i % 3]
            scopes = (SCOPES, BLOCK_SCOPES, WHOLE_SCOPES)[i % 3]
        found.append(replace(case, family=family, choices=case.choices | choice, scopes=scopes[i // 6 % len(scopes)]))
    return found


@cache
def cases() -> tuple[Case, ...]:
    """Return all cases; those of one dtype do not depend on the others."""
    found: list[Case] = []
    for dtype, first in zip(DTYPES, (0, 100_000, 200_000)):
        seeds = count(first)
        grid = []
        for head_dim in (64, 128, 256):
            for family in (dense_cases, grouped_cases, varlen_cases):
                grid += family(dtype, head_dim, seeds)
        for family in (other_cases, wrapping_cases, activation_cases):
            grid += family(dtype, seeds)
        found += _with_choices(grid) if dtype == "e4m3" else grid
        more = boxed_cases(dtype, count(first + 50_000))
        found += _with_choices(more) if dtype == "e4m3" else more
    found = [*map(_as_first_run, found)]
    for dtype, first in zip(DTYPES, (0, 100_000, 200_000)):
        more = tile_cases(dtype, count(first + 70_000))
        found += _with_choices(more) if dtype == "e4m3" else more
    return tuple(found)
