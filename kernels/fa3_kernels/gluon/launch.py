"""Host side of the Gluon forward: checks, tensor descriptors, schedule, launch."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fa3_kernels.gluon.forward_fp16 import forward_fp16
from fa3_kernels.gluon.pipeline import TILE_M, WARPGROUP_ROWS
from fa3_kernels.gluon.schedule import Shape, empty_rows, static_schedule

LOG2_E = 1.4426950408889634
MIN_NORMAL = 2.0**-126
TILE_N = 128
HEAD_DIM = 128
CONSUMER_REGS, PRODUCER_REGS, ENTRY_REGS = 240, 24, 168  # 2 x 128 x 240 + 128 x 24 <= 384 x 168
_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def scale_log2(softmax_scale: float) -> float:
    """Return softmax_scale * log2(e) as the kernel gets it: rounded to fp32 once, at least the smallest normal."""
    return max(float(np.float32(softmax_scale * LOG2_E)), MIN_NORMAL)


def block_layout(rows: int, dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """Shared layout of a (1, 1, rows, head_dim) block."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, HEAD_DIM], dtype)


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """TMA view (batch, nheads, seqlen, head_dim) of a (batch, seqlen, nheads, head_dim) tensor: per-sequence bounds."""
    view = x.transpose(1, 2)
    layout = block_layout(rows, _DTYPES[x.dtype])
    return TensorDescriptor(view, list(view.shape), list(view.stride()), [1, 1, rows, HEAD_DIM], layout)


@lru_cache(maxsize=64)
def _device_schedule(shape: Shape, num_ctas: int, device: torch.device) -> torch.Tensor:
    table = static_schedule(shape, num_ctas, tile_m=TILE_M.value, tile_n=TILE_N, head_dim=HEAD_DIM)
    return torch.from_numpy(table).to(device)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    tensors = (q, k, v)
    batch, _, nheads, head_dim = q.shape
    nheads_kv = k.shape[2]
    is_one_dtype = q.dtype in _DTYPES and k.dtype == v.dtype == q.dtype
    filled = [x for x in tensors if x.numel()]  # the strides of an empty tensor mean nothing
    is_aligned = all(x.data_ptr() % 16 == 0 and not any(n % 8 for n in x.stride()[:3]) for x in filled)
    rules = (
        (all(x.is_cuda and x.device == q.device for x in tensors), "q, k and v must be on one GPU"),
        (is_one_dtype, f"q, k and v must all be fp16 or all bf16, got {q.dtype}, {k.dtype} and {v.dtype}"),
        (k.shape == v.shape, f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}"),
        (k.shape[0] == batch and k.shape[3] == head_dim, f"k must fit q {tuple(q.shape)}, got {tuple(k.shape)}"),
        (nheads % nheads_kv == 0, f"nheads must be a multiple of nheads_kv, got {nheads} and {nheads_kv}"),
        (
            HEAD_DIM // 2 < head_dim <= HEAD_DIM and head_dim % 8 == 0,
            f"head_dim must be a multiple of 8 in (64, 128], got {head_dim}",
        ),
        (all(x.stride(3) == 1 for x in filled), "the last dimension of q, k and v must be contiguous"),
        (is_aligned, "addresses must be multiples of 16 bytes and outer strides of 8 elements (TMA)"),
    )
    for ok, rule in rules:
        if not ok:
            raise ValueError(rule)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    pingpong: bool = True,
    intra_wg_overlap: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the forward kernel.

    Parameters
    ----------
    q : float16 or bfloat16 (batch, seqlen_q, nheads, head_dim), on a Hopper GPU
        head_dim a multiple of 8 in (64, 128]; TMA pads it to 128 with zeros. Last dimension contiguous, other strides
        multiples of 8 elements.
    k, v : same dtype (batch, seqlen_k, nheads_kv, head_dim)
        Likewise; seqlen_k may be 0.
    causal : bool
        Bottom-right aligned.
    softmax_scale : float, optional
        1 / sqrt(head_dim) by default.
    pingpong, intra_wg_overlap : bool
        Schedule only: no bit depends on them.

    Returns
    -------
    out : like q
    lse : float32 (batch, nheads, seqlen_q)
        Bits of :func:`fa3_kernels.twin.forward.forward`, which states what NaN, Inf and rows without a key become.

    Raises
    ------
    ValueError
        For shapes, dtypes or strides the kernel does not take.
    """
    _check(q, k, v)
    batch, seqlen_q, nheads, head_dim = q.shape
    seqlen_k, nheads_kv = k.shape[1:3]
    shape = Shape(batch, nheads, nheads_kv, seqlen_q, seqlen_k, causal)
    out = torch.empty((batch, seqlen_q, nheads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
    if empty := empty_rows(shape, TILE_M.value, TILE_N):
        out[:, :empty] = 0
        lse[:, :, :empty] = -math.inf
        if empty == seqlen_q:
            return out, lse
    schedule = _device_schedule(shape, torch.cuda.get_device_properties(q.device).multi_processor_count, q.device)
    scale = softmax_scale or 1 / math.sqrt(head_dim)
    with torch.cuda.device(q.device):
        forward_fp16[(schedule.shape[0],)](
            _descriptor(q, WARPGROUP_ROWS.value), _descriptor(k, TILE_N), _descriptor(v, TILE_N),
            _descriptor(out, WARPGROUP_ROWS.value), lse, schedule, schedule.shape[1], nheads, nheads // nheads_kv,
            seqlen_q, seqlen_k, scale_log2(scale), causal, seqlen_k % TILE_N == 0, pingpong, intra_wg_overlap,
            CONSUMER_REGS, PRODUCER_REGS, num_warps=4, maxnreg=ENTRY_REGS, enable_fp_fusion=False,
        )  # fmt: skip
    return out, lse
