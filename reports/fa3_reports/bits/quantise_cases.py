"""Cases of the quantiser's campaign: options over head dims, lengths, families and dtypes, and packed sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args

import numpy as np

from fa3_kernels.plan.quantizer import Scale
from fa3_reference.formats import FORMATS, narrowed

FAMILIES = ("normal", "outlier", "offset", "subnormal", "special", "zero blocks")
HIDDEN = 2048


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. ``lengths`` are (seqlen_q, seqlen_k) per sequence; equal ones are batched unless ``packed``."""

    dtype: str
    family: str
    seed: int
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    options: dict[str, Any] = field(hash=False)
    packed: bool = False


def draw(rng: np.random.Generator, family: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw one operand, float64."""
    x = rng.standard_normal(shape)
    if family == "outlier":
        x += rng.standard_normal(shape) * 10 * (rng.random(shape) < 0.001)
    elif family == "offset":
        x = x * 2.0 ** rng.integers(-3, 4, shape[-2:]) + 8 * rng.standard_normal(shape[-2:])
    elif family == "subnormal":
        x *= 2.0 ** rng.integers(-24, -10, shape)
    elif family == "special":
        values = np.array([np.inf, -np.inf, np.nan, 65504.0, -0.0])
        x = np.where(rng.random(shape) < 1e-5, rng.choice(values, shape), x)
    elif family == "zero blocks":
        flat = x.reshape(-1, *shape[-2:])
        flat[: len(flat) // 2] = 0
    return x


def arrays(case: Case) -> dict[str, np.ndarray]:
    """Draw q, k, v, and the cumulative lengths of packed sequences."""
    rng = np.random.default_rng(case.seed)
    (heads, heads_kv), (dim, dim_v) = case.heads, case.head_dims
    queries, keys = ([n[i] for n in case.lengths] for i in (0, 1))
    lead_q, lead_k = ((sum(n),) if case.packed else (len(n), n[0]) for n in (queries, keys))
    shapes = {"q": (*lead_q, heads, dim), "k": (*lead_k, heads_kv, dim), "v": (*lead_k, heads_kv, dim_v)}
    with np.errstate(over="ignore"):
        fmt = FORMATS[case.dtype]
        given = {name: narrowed(draw(rng, case.family, shape), fmt) for name, shape in shapes.items()}
    if case.packed:
        for name, lengths in (("q", queries), ("k", keys)):
            given[f"cu_seqlens_{name}"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return given


@cache
def cases() -> tuple[Case, ...]:
    """Random options over head dims, lengths, families and dtypes, a few large ones, and packed sequences."""
    rng = np.random.default_rng(20261121)
    lengths = [(1, 1), (31, 33), (64, 128), (127, 129), (300, 777), (1000, 1024), (1500, 515), (257, 2100)]
    dims = [(64, 64), (128, 128), (256, 256), (32, 32), (64, 128), (96, 96), (128, 80), (256, 64)]
    rows = [32, 64, 128, 192, 256, (64, 128, 128), (128, 64, 32), (192, 128, 64)]
    grid = []
    for i in range(180):
        m, n = lengths[i % 8] if i % 2 else (int(rng.integers(1, 600)), int(rng.integers(1, 600)))
        dim = dims[int(rng.integers(8))]
        options = {
            "block_rows": rows[int(rng.integers(8))],
            "scope": ("block", "block", "head")[int(rng.integers(3))],
            "scale": get_args(Scale)[int(rng.integers(len(get_args(Scale))))],
            "rotate": bool(rng.integers(2)) and dim[0] != 96,
            "subtract_k_mean": bool(rng.integers(2)),
            "seed": int(rng.integers(3)),
        }
        packed = i % 5 == 4
        several = tuple((int(a), int(b)) for a, b in rng.integers(0, 400, (4, 2))) if packed else ((m, n), (m, n))
        if packed:
            several = ((m, n), *several)
        heads = ((3, 3), (4, 2), (3, 1))[i % 3]
        family = FAMILIES[i % len(FAMILIES)]
        dtype = ("fp16", "bf16")[i // 6 % 2]
        grid.append(Case(dtype, family, i, several, heads, dim, options, packed))
    for i, dim in enumerate((64, 128, 256)):  # more chunks of the K mean than its last step takes at once
        options = {"rotate": i > 0, "subtract_k_mean": True, "seed": i, "scope": ("block", "head", "block")[i]}
        grid.append(Case("bf16", "offset", 900 + i, ((130, 17000 + i),), (2, 1), (dim, dim), options))
    for i, rotate in enumerate((False, True)):
        for j, dim in enumerate((64, 128, 256)):
            options = {"block_rows": 128, "rotate": rotate, "subtract_k_mean": j == 1}
            shape = ((2048, 2048),)
            grid.append(
                Case("fp16", "outlier", 1000 + 10 * i + j, shape, (HIDDEN // dim, HIDDEN // dim), (dim, dim), options)
            )
    return tuple(grid)
