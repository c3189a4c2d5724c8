"""Attention in Triton, each kernel with what its interpreter gets wrong or the mistake that its name says.

Run where the environment has ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import fa3verify

DEVICE = triton.runtime.driver.active.get_active_torch_device()  # as Triton's tutorials ask it, before any kernel runs
KEYS = 32  # of a tile


@triton.jit
def attended(acc, total, top, s, v, forgets: tl.constexpr):
    """Add a tile of keys to the running sums."""
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp(s - new[:, None])
    rescale = tl.exp(top - new)
    if forgets:
        rescale = rescale * 0 + 1
    return tl.dot(p.to(v.dtype), v, acc * rescale[:, None]), total * rescale + tl.sum(p, 1), new


@triton.jit
def forward(  # noqa: PLR0913 (a launch)
    q_ptr, k_ptr, v_ptr, out_ptr, lengths, scale, n, d: tl.constexpr, tile: tl.constexpr, kind: tl.constexpr
):
    """Compute the queries of one head, at most a tile of them, over keys whose number is loaded."""
    head = tl.program_id(0)
    m = tl.load(lengths + head)
    rows = tl.arange(0, tile)
    columns = tl.arange(0, d)
    q = tl.load(q_ptr + (head * n + rows[:, None]) * d + columns, mask=rows[:, None] < n, other=0.0)
    acc = tl.zeros([tile, d], tl.float32)
    total = tl.zeros([tile], tl.float32)
    top = tl.full([tile], -float("inf"), tl.float32)
    for start in range(0, m, tile):
        keys = start + tl.arange(0, tile)
        place = (head * m + keys[:, None]) * d + columns
        k = tl.load(k_ptr + place, mask=keys[:, None] < m, other=0.0)
        v = tl.load(v_ptr + place, mask=keys[:, None] < m, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        if kind == "rounded":
            s = s.to(tl.bfloat16).to(tl.float32)
        s = tl.where(keys[None, :] < m - (1 if kind == "short" else 0), s, -float("inf"))
        acc, total, top = attended(acc, total, top, s, v, kind == "forgets")
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (head * n + rows[:, None]) * d + columns, out, mask=rows[:, None] < n)


@triton.jit
def one_row(  # noqa: PLR0913 (a launch)
    q_ptr, k_ptr, v_ptr, out_ptr, scale, n, m, d: tl.constexpr, tile: tl.constexpr, kind: tl.constexpr
):
    """Compute one query over a tile of keys without a tensor core; a float of a launch makes float32 of the product."""
    row = tl.program_id(0)
    columns = tl.arange(0, d)
    keys = tl.arange(0, tile)
    place = (row // n * m + keys[:, None]) * d + columns
    q = tl.load(q_ptr + row * d + columns)
    k = tl.load(k_ptr + place, mask=keys[:, None] < m, other=0.0)
    v = tl.load(v_ptr + place, mask=keys[:, None] < m, other=0.0)
    if kind == "assembler":
        q = tl.inline_asm_elementwise("mov.b16 $0, $1;", "=h,h", [q], dtype=q.dtype, is_pure=True, pack=1)
    s = tl.where(keys < m, tl.sum((q * scale)[None, :] * k, 1), -float("inf"))
    p = tl.exp(s - tl.max(s, 0))
    out = tl.sum(p[:, None] * v, 0) / tl.sum(p, 0)
    tl.store(out_ptr + row * d + columns, out.to(out_ptr.dtype.element_ty))


tuned = triton.autotune([triton.Config({"tile": KEYS}), triton.Config({"tile": 2 * KEYS})], key=["n"])(forward)


def launched(kind: str, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> Tensor:
    batch, heads, n, d = q.shape
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = torch.empty_like(q)
    grid = (batch * heads,)
    launch: Any = one_row[(batch * heads * n,)] if kind in ("row", "assembler") else forward[grid]
    if kind in ("row", "assembler"):
        launch(q, k, v, out, softmax_scale, n, k.shape[2], d, KEYS, kind)
        return out
    lengths = torch.full(grid, k.shape[2], dtype=torch.int32, device=DEVICE)
    if kind == "tuned":
        tuned[grid](q, k, v, out, lengths, softmax_scale, n, d, kind=kind)
    else:
        launch(q, k, v, out, lengths, softmax_scale, n, d, KEYS, kind)
    return out


declared = fa3verify.kernel(dtypes=("fp16", "bf16"), library="torch", head_dims=(16,), features=())


def _kernel(kind: str) -> Callable[..., Tensor]:
    @declared
    def attention(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float) -> Tensor:
        return launched(kind, q, k, v, softmax_scale)

    return attention


right = _kernel("right")
autotuned = _kernel("tuned")
row = _kernel("row")
assembler = _kernel("assembler")
short = _kernel("short")
forgets = _kernel("forgets")
rounded = _kernel("rounded")
