"""Split-KV combine: merge the splits' fp32 partialsin ascending order, as :func:`fa3_kernels.twin.forward.combine`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa3_kernels.gluon import softmax
from fa3_kernels.gluon.dependent import await_grid


@gluon.jit(do_not_specialize=["num_rows", "seqlen_q", "nheads", "num_splits", "head_dim"])
def combine(
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    seqlen_q,
    nheads,
    num_splits,
    head_dim,
    ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WAITS: gl.constexpr = False,
):
    """Merge ROWS output rows; WAITS says that the grid starts before the one in front of it has ended.

    Parameters
    ----------
    partial_ptr : float32 (splits, num_rows, HEAD_DIM)
        Normalised outputs; a row is (sequence, position, head), head fastest.
    partial_lse_ptr : float32 (splits, num_rows)
        Base-2 lse, ordered (sequence, head, position); -inf where a split saw no key.
    out_ptr : float16 or bfloat16 (num_rows, head_dim)
    lse_ptr : float32 (num_rows,)
        Natural lse, ordered as the partials.
    seqlen_q : int
        Positions per sequence; with varlen all of them count as one sequence.
    """
    if WAITS:
        await_grid()
    columns_in_warp: gl.constexpr = HEAD_DIM // 4 if HEAD_DIM < 128 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // columns_in_warp, columns_in_warp], [4, 1], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    exists = row < num_rows
    sequence = row // (seqlen_q * nheads)
    position = row // nheads % seqlen_q
    lse_index = (sequence * nheads + row % nheads) * seqlen_q + position
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    offset = gl.expand_dims(row.to(gl.int64) * HEAD_DIM, 1) + gl.expand_dims(column, 0)
    one_split = num_rows.to(gl.int64)

    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    for split in range(num_splits):
        lse = gl.load(partial_lse_ptr + split * one_split + lse_index, mask=exists, other=float("-inf"))
        top = gl.maximum(top, lse)
    base = gl.where(top == float("-inf"), 0.0, top)
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    for split in range(num_splits):
        lse = gl.load(partial_lse_ptr + split * one_split + lse_index, mask=exists, other=float("-inf"))
        total = total + softmax.ex2(lse - base)
    is_empty = total == 0
    inverse = gl.where(is_empty, 0.0, softmax.rcp(total))
    merged = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout)
    for split in range(num_splits):
        lse = gl.load(partial_lse_ptr + split * one_split + lse_index, mask=exists, other=float("-inf"))
        weight = softmax.ex2(lse - base) * inverse
        part = gl.load(partial_ptr + split * one_split * HEAD_DIM + offset, mask=gl.expand_dims(exists, 1), other=0.0)
        merged = gl.fma(part, gl.expand_dims(weight, 1), merged)
    out_offset = gl.expand_dims(row.to(gl.int64) * head_dim, 1) + gl.expand_dims(column, 0)
    inside = gl.expand_dims(exists, 1) & gl.expand_dims(column < head_dim, 0)
    gl.store(out_ptr + out_offset, merged.to(out_ptr.dtype.element_ty), mask=inside)
    log = gl.where(is_empty, float("-inf"), base + softmax.lg2(total))
    gl.store(lse_ptr + lse_index, log * softmax.LN2, mask=exists)
