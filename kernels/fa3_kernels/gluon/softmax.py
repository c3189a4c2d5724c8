"""Online softmax of one warpgroup's rows, in the order of :mod:`fa3_kernels.twin.softmax`.

Every multiply-add that is fused is written as one; kernels are compiled with enable_fp_fusion=False so that no other is.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _mufu(INSTRUCTION: gl.constexpr, x):
    """One special-function instruction (.approx.ftz.f32): Triton's own log2 and division are other sequences."""
    return gl.inline_asm_elementwise(INSTRUCTION, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def ex2(x):
    return _mufu("ex2.approx.ftz.f32 $0, $1;", x)


@gluon.jit
def thread_row_sums(p):
    """Sum of each quad lane's own columns: pairs first, then serially. (rows, keys) -> (rows, 4), one value per thread."""
    rows: gl.constexpr = p.shape[0]
    keys: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(gl.reshape(p, [rows, keys // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def masked(s, visible_keys):
    """-inf for columns at or beyond ``visible_keys`` int32 (rows,), both counted from the block's first key.

    The volatile identity keeps LLVM from holding 32 column numbers in registers across the tile loop.
    """
    keys: gl.constexpr = s.shape[1]
    visible = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [visible_keys], dtype=gl.int32, is_pure=False, pack=1
    )
    columns = gl.arange(0, keys, gl.SliceLayout(0, s.type.layout))
    left = gl.expand_dims(visible, 1) - gl.expand_dims(columns, 0)
    return gl.where(left > 0, s, float("-inf"))


@gluon.jit
def update(s, row_max, thread_sums, scale_log2):
    """Advance the running statistics by one block of raw masked scores; returns p, row_max, thread_sums, rescale."""
    block_max = gl.fma(gl.max(s, axis=1), scale_log2, 0.0)
    new_max = gl.maximum(row_max, block_max)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = ex2(row_max - base)
    p = ex2(gl.fma(s, scale_log2, gl.expand_dims(-base, 1)))
    sums = thread_row_sums(p)
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    thread_sums = gl.fma(thread_sums, gl.expand_dims(factor, 1), sums)
    return p, new_max, thread_sums, rescale


@gluon.jit
def finalize(row_max, thread_sums):
    """Return 1 / row_sum and the natural lse; (0, -inf) for a row that saw no key."""
    row_sum = gl.convert_layout(gl.sum(thread_sums, axis=1), row_max.type.layout, assert_trivial=True)
    empty = row_sum == 0
    inverse = gl.where(empty, 0.0, _mufu("rcp.approx.ftz.f32 $0, $1;", row_sum))
    lse_log2 = gl.where(empty, float("-inf"), row_max + _mufu("lg2.approx.ftz.f32 $0, $1;", row_sum))
    return inverse, lse_log2 * LN2
