"""Small problems at the corners of the forward bound's domain, each said in a few words: see test_terms_corners.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.order import SoftmaxOrder
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, Descale, Operands

FILE = Path(__file__).with_name("corners.json")
CORNERS: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
TILE = 8
CHANNELS = 3


def pseudo_random(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers between -1 and 1 that no version of numpy changes."""
    n = np.arange(1, np.prod(shape) + 1, dtype=np.uint64) + np.uint64(1000 * seed)
    bits = (n * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    return (bits.astype(np.float64) / 2.0**23 - 1.0).reshape(shape)


def model_of(corner: dict[str, Any]) -> KernelModel:
    """The model of a corner: any order, or tiles of 8 keys and what else is said of it."""
    said = dict(corner["model"])
    order = dict(said.pop("order", {}))
    said = {"out_dtype": "fp32", **said}
    if said.pop("any_order", False):
        row_sum_of = order.pop("row_sum_of", "weights")
        model = KernelModel.any_order(
            corner["dtype"], said.pop("out_dtype"), said.pop("accumulator", "fp32"), row_sum_of
        )
        return replace(model, **said, order=replace(model.order, **order))
    return KernelModel(corner["dtype"], tile_m=64, tile_n=TILE, order=SoftmaxOrder(**order), **said)


def operands_of(corner: dict[str, Any]) -> tuple[AttentionProblem, Operands]:
    """The problem of a corner and what the kernel sees.

    ``q``, ``k``, ``v`` say what random numbers are multiplied with; ``signs`` those of which only +-1 is left;
    ``is`` gives rows instead, again and again; ``mean`` is added to V, and ``far`` multiplies it beyond the first tile;
    ``apart`` are scores of the first tile and of the others, in a channel of their own; ``put`` are single numbers, by
    tensor, row and channel; ``factors`` are descales of Q, K and V by tile.
    """
    said: dict[str, Any] = {"softmax_scale": 0.6, **corner.get("problem", {})}
    rows = said.pop("seqlen_q", 1)
    said = {name: tuple(x) if isinstance(x, list) else x for name, x in said.items()}
    problem = AttentionProblem(1, 1, 1, rows, corner["keys"], CHANNELS, 2, dtype=corner["dtype"], **said)
    arrays: dict[str, np.ndarray] = {}
    for seed, (name, shape) in enumerate(zip("qkv", (problem.q_shape, problem.k_shape, problem.v_shape), strict=True)):
        x = pseudo_random(shape, seed + 3 * corner.get("seed", 0))
        x = np.sign(x) if name in corner.get("signs", "") else x
        x = x * corner.get(name, 1.0) + (corner.get("mean", 0.0) if name == "v" else 0.0)
        if name in corner.get("is", {}):  # the rows of a tensor, again and again
            x = np.resize(np.array(corner["is"][name], np.float64), shape)
        arrays[name] = x
    arrays["v"][:, TILE:] *= corner.get("far", 1.0)
    if "apart" in corner:
        arrays["q"][..., 0] = 1.0
        arrays["k"][:, :TILE, :, 0], arrays["k"][:, TILE:, :, 0] = corner["apart"]
    for name, row, channel, value in corner.get("put", []):
        arrays[name][0, row, 0, channel] = float(value)
    with np.errstate(all="ignore"):
        overflow = "saturate" if corner["dtype"] == "e4m3" else "ieee"
        q, k, v = (encode(x, FORMATS[corner["dtype"]], overflow) for x in arrays.values())
    if corner["dtype"] != "e4m3" or "factors" not in corner:
        return problem, Operands(q, k, v)
    blocks = max(1, -(-corner["keys"] // TILE))
    factors = [
        Descale(np.resize(np.asarray(x, np.float32), n)[None, None], rows)
        for x, n, rows in zip(corner["factors"], (1, blocks, blocks), (0, TILE, TILE), strict=True)
    ]
    return problem, Operands(q, k, v, *factors)


def sums(corner: dict[str, Any]) -> list[float]:
    """Geometric mean of the bounds of O that are neither 0 nor infinite, numbers of those that are, the same of lse."""
    found = []
    for bound in forward_bound(*operands_of(corner), model_of(corner)):
        inner = bound[(bound > 0) & np.isfinite(bound)]
        mean = float(np.exp(np.log(inner).mean())) if inner.size else 0.0
        found += [mean, int((bound == 0).sum()), int(np.isinf(bound).sum())]
    return found


def renew() -> None:
    """Write the corners with the sums that their bounds have now, a line each."""
    lines = [f"{json.dumps(name)}: {json.dumps({**corner, 'sums': sums(corner)})}" for name, corner in CORNERS.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
