"""The kernels before and after the backward kernel.

The first one computes D = rowsum(dO * O) and the lse in log2 units and zeroes the sums of dQ. The last one makes dQ of
its sums. Both run four warps a program, one program a row block of a head; :mod:`fa3_kernels.gluon.backward` is the
kernel between them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa3_kernels.gluon.boxes import power_of_two

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def _layout(channels):
    """Return a layout with 8 channels a thread and 16 threads a row, or 8 threads where there are 64 channels."""
    threads = min(16, channels // 8)
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def _rows_of(starts_q, seqlen_q, TILE_M: gl.constexpr, IS_VARLEN: gl.constexpr):
    """Return the first row in memory, the length and the first row block of a program's sequence.

    Sequences that are longer than ``seqlen_q`` are cut to it.
    """
    batch = gl.program_id(2)
    if IS_VARLEN:
        start = gl.load(starts_q + batch)
        length = gl.minimum(gl.load(starts_q + batch + 1) - start, seqlen_q)
        first_block = start // TILE_M + batch
    else:
        start = batch * seqlen_q
        length = seqlen_q
        first_block = batch * gl.cdiv(seqlen_q, TILE_M)
    return start, length, first_block


@gluon.jit(do_not_specialize=["seqlen_q", "nheads", "num_blocks", "lse_rows"])
def backward_start(
    out,
    dout,
    lse,
    stats,
    dq_sums,
    turns,
    starts_q,
    seqlen_q,
    nheads,
    head_dim,
    num_blocks,
    lse_rows,
    TILE_M: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    """Compute D and the lse of one row block of a head, and zero its sums of dQ.

    Neighbouring programs take the heads of the same rows, which lie side by side in memory.

    Parameters
    ----------
    out, dout : float16 or bfloat16 (rows, nheads, head_dim)
    lse : float32 (batch, nheads, seqlen_q) or (nheads, rows)
        Natural; -inf of a row without a key counts as 0.
    stats : float32 (nheads * num_blocks, 2, TILE_M)
        Filled: -lse * log2(e), -inf beyond the sequence; D = rowsum(dO * O), in the order of
        :func:`fa3_kernels.twin.backward.row_dots`.
    dq_sums : float32 (nheads * num_blocks * TILE_M, HEAD_DIM)
        Zeroed.
    turns : int32 (nheads * num_blocks,)
        Zeroed.
    """
    start, length, first_block = _rows_of(starts_q, seqlen_q, TILE_M, IS_VARLEN)
    first_row = gl.program_id(1) * TILE_M
    if first_row >= length:
        return
    head = gl.program_id(0)
    block = head * num_blocks + first_block + gl.program_id(1)
    channels: gl.constexpr = power_of_two(HEAD_DIM)
    layout: gl.constexpr = _layout(channels)
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    column = gl.arange(0, channels, gl.SliceLayout(0, layout))
    row = gl.arange(0, TILE_M, by_row)
    exists = first_row + row < length
    offset = ((start + first_row + row).to(gl.int64) * nheads + head) * head_dim
    offsets = gl.expand_dims(offset, 1) + gl.expand_dims(column, 0)
    inside = gl.expand_dims(exists, 1) & gl.expand_dims(column < head_dim, 0)
    o = gl.load(out + offsets, mask=inside, other=0.0).to(gl.float32)
    do = gl.load(dout + offsets, mask=inside, other=0.0).to(gl.float32)
    dots = gl.sum(o * do, axis=1)
    if IS_VARLEN:
        lse_index = head * lse_rows + start + first_row + row
    else:
        lse_index = (gl.program_id(2) * nheads + head) * seqlen_q + first_row + row
    natural = gl.load(lse + lse_index, mask=exists, other=0.0)
    log2 = gl.where(natural == float("-inf"), 0.0, natural) * LOG2_E
    at = stats + block.to(gl.int64) * 2 * TILE_M + row
    gl.store(at, gl.where(exists, -log2, float("-inf")))  # -inf makes P of rows that do not exist 0
    gl.store(at + TILE_M, dots)
    sums = (block.to(gl.int64) * TILE_M + row) * HEAD_DIM
    sums = gl.expand_dims(sums, 1) + gl.expand_dims(column, 0)
    zeros = gl.zeros([TILE_M, channels], gl.float32, layout)
    if channels == HEAD_DIM:
        gl.store(dq_sums + sums, zeros)
    else:
        gl.store(dq_sums + sums, zeros, mask=gl.expand_dims(column < HEAD_DIM, 0))
    gl.store(turns + block, 0)


@gluon.jit(do_not_specialize=["seqlen_q", "nheads", "num_blocks"])
def backward_finish(
    dq_sums,
    dq,
    starts_q,
    seqlen_q,
    nheads,
    head_dim,
    num_blocks,
    softmax_scale,
    TILE_M: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    """Write dQ of one row block of a head, (rows, nheads, head_dim): its sums times softmax_scale, rounded once."""
    start, length, first_block = _rows_of(starts_q, seqlen_q, TILE_M, IS_VARLEN)
    first_row = gl.program_id(1) * TILE_M
    if first_row >= length:
        return
    head = gl.program_id(0)
    block = head * num_blocks + first_block + gl.program_id(1)
    channels: gl.constexpr = power_of_two(HEAD_DIM)
    layout: gl.constexpr = _layout(channels)
    column = gl.arange(0, channels, gl.SliceLayout(0, layout))
    row = gl.arange(0, TILE_M, gl.SliceLayout(1, layout))
    sums = gl.expand_dims((block.to(gl.int64) * TILE_M + row) * HEAD_DIM, 1) + gl.expand_dims(column, 0)
    if channels == HEAD_DIM:
        scaled = gl.load(dq_sums + sums) * softmax_scale
    else:
        scaled = gl.load(dq_sums + sums, mask=gl.expand_dims(column < HEAD_DIM, 0), other=0.0) * softmax_scale
    offset = ((start + first_row + row).to(gl.int64) * nheads + head) * head_dim
    inside = gl.expand_dims(first_row + row < length, 1) & gl.expand_dims(column < head_dim, 0)
    offsets = gl.expand_dims(offset, 1) + gl.expand_dims(column, 0)
    gl.store(dq + offsets, scaled.to(dq.dtype.element_ty), mask=inside)
