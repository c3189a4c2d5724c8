"""Make Triton's TMA descriptors from the views of a plan (:mod:`fa3_kernels.plan.call`)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fa3_kernels.plan.call import Block, View

DTYPES = {
    "float16": gl.float16,
    "bfloat16": gl.bfloat16,
    "float8_e4m3fn": gl.float8e4nv,
    "float32": gl.float32,
    "int32": gl.int32,
    "int64": gl.int64,
}


@lru_cache(maxsize=64)
def block_layout(block: tuple[int, ...], dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """Return the shared layout of a block: swizzled as TMA and wgmma share it, or plain for a row of numbers.

    A block of one dimension is a row of numbers, such as row statistics.
    """
    if len(block) == 1:
        return gl.NVMMASharedLayout(0, dtype.primitive_bitwidth, 1)
    return gl.NVMMASharedLayout.get_default_for(list(block), dtype)  # pyright: ignore[reportReturnType]


def descriptor(view: View | Block, x: torch.Tensor | Any) -> TensorDescriptor:
    """Return the descriptor of a view of a tensor; ``x`` may be anything with dtype, shape, stride() and data_ptr()."""
    shape, strides = view.of(tuple(x.shape), x.stride())
    layout = block_layout(view.block, DTYPES[view.dtype])
    return TensorDescriptor(x, list(shape), list(strides), list(view.block), layout)
