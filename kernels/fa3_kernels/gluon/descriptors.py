"""TMA views of q, k, v and out: dense, ragged (varlen) and packed (PackGQA)."""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}
RAGGED_ROWS = 1 << 30
_RAGGED_EXTENT = 0x7FFF0000  # any coordinate is inside
_WRAP = 1 << 34  # times RAGGED_ROWS and the element size: a multiple of 2^64 bytes


@lru_cache(maxsize=64)
def block_layout(block: tuple[int, ...], dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """Shared layout of a block: rows of head_dim, swizzled as TMA and wgmma share it."""
    return gl.NVMMASharedLayout.get_default_for(list(block), dtype)  # pyright: ignore[reportReturnType]


def _descriptor(x: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]):
    return TensorDescriptor(x, list(shape), list(strides), list(block), block_layout(block, DTYPES[x.dtype]))


def key_view(x: torch.Tensor, block_rows: int, head_dim: int, *, is_varlen: bool) -> TensorDescriptor:
    """View of (batch, seqlen, nheads, head_dim), or (total, nheads, head_dim), in blocks of rows of one head.

    TMA fills with zeros, and does not write, beyond each sequence and beyond the tensor's head_dim.
    """
    if not is_varlen:
        batch, seqlen, nheads, dim = x.shape
        strides = (x.stride(0), x.stride(2), x.stride(1), 1)
        return _descriptor(x, (batch, nheads, seqlen, dim), strides, (1, 1, block_rows, head_dim))
    _, nheads, dim = x.shape
    row, head, _ = x.stride()
    shape = (_RAGGED_EXTENT, _RAGGED_EXTENT, nheads, RAGGED_ROWS, dim)
    return _descriptor(x, shape, (_WRAP - row, row, head, row, 1), (1, 1, 1, block_rows, head_dim))


def query_view(x: torch.Tensor, head_dim: int, *, group: int, pack: int, is_varlen: bool) -> TensorDescriptor:
    """View of q or out in blocks of the 64 rows of a warpgroup; with ``pack`` > 1 a row is (position, head in group).

    The ragged view ends every sequence for the hardware's bounds check, wherever it lies in the packed tensor: two
    leading dimensions, whose strides add up to a multiple of 2^64 bytes, shift the rows so that the sequence ends
    where the row dimension ends (at RAGGED_ROWS). The idea is Triton's (triton/tools/ragged_tma.py).
    """
    if pack == 1:
        return key_view(x, 64, head_dim, is_varlen=is_varlen)
    block = (1, 1, 64 // pack, pack, head_dim)
    if is_varlen:
        _, nheads, dim = x.shape
        row, head, _ = x.stride()
        shape = (_RAGGED_EXTENT, _RAGGED_EXTENT, RAGGED_ROWS, nheads, dim)
        return _descriptor(x, shape, (_WRAP - row, row, row, head, 1), block)
    batch, seqlen, nheads, dim = x.shape
    shape = (batch, nheads // group, seqlen, group, dim)
    strides = (x.stride(0), group * x.stride(2), x.stride(1), x.stride(2), 1)
    return _descriptor(x, shape, strides, block)
