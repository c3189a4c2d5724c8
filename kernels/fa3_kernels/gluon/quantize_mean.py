"""The kernels of K's mean over the tokens, in the order of :mod:`fa3_kernels.twin.quantize`.

The first kernel sums chunks of rows, the second one the chunks. :mod:`fa3_kernels.gluon.quantize` starts both before
the quantiser when its caller asks for the mean to be subtracted.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa3_kernels.gluon.quantize_kernel import as_float32, load_layout
from fa3_kernels.gluon.quantize_steps import log2


@gluon.jit
def folded_rows(x):
    """Sum over the rows as a tree, the upper half onto the lower one. float32 (rows, channels) -> (channels,)."""
    rows: gl.constexpr = x.shape[0]
    channels: gl.constexpr = x.shape[1]
    for i in gl.static_range(log2(rows)):
        x = gl.sum(gl.reshape(x, [2, rows >> (i + 1), channels]), axis=0)
    return gl.reshape(x, [channels])


@gluon.jit
def k_mean_chunks(
    k,
    partial,
    chunks,
    HEAD_DIM: gl.constexpr,
    CHUNK: gl.constexpr,
    SLICE: gl.constexpr,
    CHANNELS: gl.constexpr,
    IS_BF16: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Sum chunks of CHUNK rows: ``partial`` is float32 (batch, heads, chunks, CHANNELS), one program a chunk.

    Rows beyond the sequence and padded channels count as 0. A chunk is added up in slices of SLICE rows, which are then
    folded.
    """
    layout: gl.constexpr = load_layout(CHANNELS, gl.num_warps())
    pid = gl.program_id(0)
    head = pid % k.heads
    chunk = pid // k.heads % chunks
    sequence = pid // k.heads // chunks
    start = 0
    length = k.seqlen
    if PACKED:
        start = gl.load(k.cu_seqlens + sequence)
        length = gl.load(k.cu_seqlens + sequence + 1) - start
    channel = gl.arange(0, CHANNELS, gl.SliceLayout(0, layout))
    base = k.x + sequence.to(gl.int64) * k.stride_batch + head.to(gl.int64) * k.stride_head
    total = gl.full([SLICE, CHANNELS], 0.0, gl.float32, layout)
    for i in gl.static_range(CHUNK // SLICE):
        row = chunk * CHUNK + i * SLICE + gl.arange(0, SLICE, gl.SliceLayout(1, layout))
        pointers = base + gl.expand_dims((start + row).to(gl.int64) * k.stride_row, 1) + gl.expand_dims(channel, 0)
        mask = gl.expand_dims(row < length, 1) & gl.expand_dims(channel < HEAD_DIM, 0)
        total += as_float32(gl.load(pointers, mask=mask, other=0), IS_BF16)
    sums = folded_rows(total)
    at = partial + ((sequence * k.heads + head) * chunks + chunk) * CHANNELS
    gl.store(at + gl.arange(0, CHANNELS, sums.type.layout), sums)


@gluon.jit
def k_mean(
    partial,
    mean,
    signs,
    cu_seqlens,
    seqlen,
    heads,
    chunks,
    CHUNK: gl.constexpr,
    SLICE: gl.constexpr,
    CHANNELS: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Compute the mean of k, with the rotation's signs: float32 (batch, heads, CHANNELS), one program a (sequence,
    head).

    ``signs`` is None without a rotation. The mean of a sequence without keys is 0.
    """
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 4], [128 // CHANNELS if CHANNELS < 128 else 1, min(32, CHANNELS // 4)], [gl.num_warps(), 1], [1, 0]
    )
    pid = gl.program_id(0)
    length = seqlen
    if PACKED:
        length = gl.load(cu_seqlens + pid // heads + 1) - gl.load(cu_seqlens + pid // heads)
    channel = gl.arange(0, CHANNELS, gl.SliceLayout(0, layout))
    filled = (length + CHUNK - 1) // CHUNK
    total = gl.full([SLICE, CHANNELS], 0.0, gl.float32, layout)
    for first in range(0, filled, SLICE):
        row = first + gl.arange(0, SLICE, gl.SliceLayout(1, layout))
        pointers = partial + gl.expand_dims((pid * chunks + row) * CHANNELS, 1) + gl.expand_dims(channel, 0)
        total += gl.load(pointers, mask=gl.expand_dims(row < filled, 1), other=0.0)
    sums = folded_rows(total)
    average = gl.where(length > 0, gl.div_rn(sums, gl.maximum(length, 1).to(gl.float32)), 0.0)
    at = gl.arange(0, CHANNELS, sums.type.layout)
    if signs is not None:
        masks = gl.load(signs + at).to(gl.int32) << 16
        average = (average.to(gl.int32, bitcast=True) ^ masks).to(gl.float32, bitcast=True)
    gl.store(mean + pid * CHANNELS + at, average)
