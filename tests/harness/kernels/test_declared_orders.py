"""Each order that the page of declarations shows: a kernel that computes so passes by it, and a worse one fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fa3verify
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import Judgement
from fa3verify.public import AttentionProblem, judge

PAGE = Path(__file__).parents[3] / "docs" / "declarations.md"
ROWS = dict(
    re.findall(r"^\| ([^|]+) \| `((?:replace|fa3verify\.\w+\.any_order)\(.*\))` \|$", PAGE.read_text(), re.MULTILINE)
)
BF16 = ml_dtypes.bfloat16
CHAIN = 4  # keys of a tile, whose sum moves into the accumulator


def attention(q, k, v, scale, *, scores=np.float32, query=None, sums=np.float32, weights=np.float16):
    """Attention in fp16 with one step in another format; nothing else rounds to less than binary32."""
    factor = scale
    if query is not None:
        q, factor = (q * np.float32(scale)).astype(query), 1.0
    s = (q.astype(np.float32) @ k.swapaxes(-1, -2).astype(np.float32)).astype(scores).astype(np.float32)
    s = (s * np.float32(factor)).astype(scores).astype(np.float32)
    p = np.exp(s - s.max(-1, keepdims=True))
    total = p.sum(-1, keepdims=True)
    p = p.astype(weights).astype(np.float32)
    out = np.zeros((*q.shape[:-1], v.shape[-1]), sums)
    for start in range(0, k.shape[2], CHAIN):
        tile = slice(start, start + CHAIN)
        out = (out.astype(np.float32) + p[..., tile] @ v[:, :, tile].astype(np.float32)).astype(sums)
    return (out.astype(np.float32) / total).astype(np.float16)


def gradients(  # noqa: PLR0913 (what a backward gets)
    q, k, v, dout, out, lse, scale, *, scores=np.float32, weights=np.float16
):
    """Gradients in fp16 with one step in another format."""
    q, k, v, dout, out = (x.astype(np.float32) for x in (q, k, v, dout, out))
    s = ((q @ k.swapaxes(-1, -2)).astype(scores).astype(np.float32) * np.float32(scale)).astype(scores)
    p = np.exp(s.astype(np.float32) - lse[..., None])
    ds = p * (dout @ v.swapaxes(-1, -2) - (dout * out).sum(-1, keepdims=True))
    p, ds = (x.astype(weights).astype(np.float32) for x in (p, ds))
    found = scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout
    return tuple(x.astype(np.float16) for x in found)


# By row of the page: what computes so, and what computes worse.
KERNELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "S is kept in fp16 between the two products": ({"scores": np.float16}, {"scores": BF16}),
    "Q is multiplied by `softmax_scale` and rounded again": ({"query": np.float16}, {"query": BF16}),
    "O is added in fp16": ({"sums": np.float16}, {"sums": ml_dtypes.float8_e5m2}),
    "P enters the second product in binary32": ({"weights": np.float32}, {"weights": np.float16}),
    "gradients, with S in fp16": ({"scores": np.float16}, {"scores": BF16}),
    "gradients, with P and dS in binary32": ({"weights": np.float32}, {"weights": np.float16}),
}
WIDER = [name for name in KERNELS if "binary32" not in name]  # others are sharper than what is assumed without an order


def judged(row: str, changed: dict[str, Any], order: Callable[[Any], Any] | None) -> Judgement:
    def forward(q, k, v, *, softmax_scale):
        return attention(q, k, v, softmax_scale, **changed)

    def backward(q, k, v, dout, out, lse, *, softmax_scale):
        return gradients(q, k, v, dout, out, lse, softmax_scale, **changed)

    is_backward = row.startswith("gradients")
    made = fa3verify.array_kernel(
        backward if is_backward else forward,
        features=(),
        gradients="given" if is_backward else "",
        **({"order": order} if order else {}),
    )
    return judge(made[0], AttentionProblem(1, 2, 2, 64, 32, 8, softmax_scale=0.6), Recipe("normal", {"std": 2.0}))


def declared(row: str) -> Callable[[Any], Any]:
    model = eval(
        ROWS[row],
        {
            "replace": replace,
            "fa3verify": fa3verify,
            "any_order": fa3verify.KernelModel.any_order("fp16", "fp16"),
            "any_gradients": fa3verify.BackwardModel.any_order("fp16"),
        },
    )
    return lambda config: model


def test_every_row_of_the_page_has_its_kernels():
    assert ROWS.keys() == KERNELS.keys()


@pytest.mark.parametrize("row", KERNELS)
def test_a_kernel_that_computes_as_it_declares_passes_and_a_worse_one_fails(row):
    right, worse = KERNELS[row]
    order = declared(row)
    assert judged(row, right, order).measures["ratio_max"] <= 1
    assert judged(row, worse, order).measures["ratio_max"] > 1


@pytest.mark.parametrize("row", WIDER)
def test_the_same_kernel_fails_without_its_declaration(row):
    assert judged(row, KERNELS[row][0], None).measures["ratio_max"] > 1
