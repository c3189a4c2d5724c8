"""The kernel that writes new keys and values to a cache, and rotates them and the queries, before attention.

A program handles one row of the queries and one row of the new keys and values. An angle rotates a pair of channels (x,
y) to x cos - y sin and x sin + y cos, in fp32 with every product and sum rounded; the result is then rounded to the
operands' format. :mod:`fa3_kernels.gluon.launch_append` starts the kernel, :mod:`fa3_kernels.twin.append` has its
arithmetic. It is written in Triton, as :mod:`fa3_kernels.gluon.packed_order` is: there is no layout to choose, and
Triton's interpreter runs it on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _owner(starts, row, batch):
    """Return the packed sequence that holds a row, and where it starts.

    For a row that no sequence holds the number is ``batch`` or larger.
    """
    CHUNK: tl.constexpr = 128
    sequence = 0
    for first in range(0, batch, CHUNK):
        index = first + tl.arange(0, CHUNK)
        stop = tl.load(starts + 1 + index, mask=index < batch, other=0x7FFFFFFF)
        sequence += tl.sum((stop <= row).to(tl.int32))
    return sequence, tl.load(starts + tl.minimum(sequence, batch))


@triton.jit
def _move(
    source,
    destination,
    source_head,
    destination_head,
    cos,
    sin,
    heads,
    head_dim,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Copy a row of all heads, with its first ROTARY channels rotated by the angles at ``cos`` and ``sin``.

    HEADS heads are moved at a time. With ROTARY 0 the angles are not read.
    """
    column = tl.arange(0, CHANNELS)
    HALF: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        angle = column // 2
        partner = column ^ 1
        is_first = column % 2 == 0
    else:
        angle = tl.where(column < HALF, column, column - HALF)
        is_first = column < HALF
        partner = tl.where(is_first, column + HALF, column - HALF)
    is_rotated = column < ROTARY
    if ROTARY:
        c = tl.load(cos + angle, mask=is_rotated, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + angle, mask=is_rotated, other=0.0).to(tl.float32)[None, :]
    for first in range(0, heads, HEADS):
        head = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        inside = (head < heads) & (column < head_dim)[None, :]
        x = tl.load(source + head * source_head + column[None, :], mask=inside)
        if ROTARY:
            y = tl.load(source + head * source_head + partner[None, :], mask=inside & is_rotated[None, :])
            y = tl.where(is_first[None, :], -y.to(tl.float32), y.to(tl.float32))
            turned = x.to(tl.float32) * c + y * s
            x = tl.where(is_rotated[None, :], turned.to(x.dtype), x)
        tl.store(destination + head * destination_head + column[None, :], x, mask=inside)


@triton.jit(
    do_not_specialize=[
        *("rotary_cos", "rotary_sin", "starts_q", "starts_k", "seqlens", "rotary_seqlens", "page_table", "used"),
        *("rows_q", "rows_k", "table_row", "room", "angles", "batch", "page_keys", "page_rows"),
    ]
)
def append(
    q,
    q_rotated,
    k,
    v,
    k_cache,
    v_cache,
    rotary_cos,
    rotary_sin,
    starts_q,
    starts_k,
    seqlens,
    rotary_seqlens,
    page_table,
    used,
    rows_q,
    rows_k,
    table_row,
    room,
    angles,
    batch,
    page_keys,
    page_rows,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    k_cache_row,
    k_cache_head,
    v_cache_row,
    v_cache_head,
    nheads,
    nheads_kv,
    head_dim,
    head_dim_v,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STEPS_QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNELS_V: tl.constexpr,
):
    """Write rows; the grid is as large as the largest of the rows of q, the rows of k, and the number of sequences.

    Parameters
    ----------
    q_rotated : like q, contiguous
        Written where ROTARY is not 0. With STEPS_QUERIES the position of a query grows with its row, otherwise all
        queries of a sequence have the position of its first new key.
    rotary_cos, rotary_sin : (angles, ROTARY / 2)
        Their last row serves positions behind it.
    starts_q, starts_k : int32 (batch + 1,)
        Of the rows of q and of k.
    seqlens : int32 (batch,)
        Keys in the cache. New ones are written behind them as far as the cache has ``room``; the rest are dropped.
    rotary_seqlens : int32 (batch,)
        Positions of the first new key and query.
    used : int32 (batch,)
        Written by the program of a sequence's number: keys of the sequence, new ones counted, with or without room.
    page_table, table_row, page_keys, page_rows
        As :mod:`fa3_kernels.gluon.pages`.
    """
    row = tl.program_id(0)
    if row < batch:
        count = tl.load(starts_k + row + 1) - tl.load(starts_k + row)
        tl.store(used + row, tl.load(seqlens + row) + tl.maximum(count, 0))
    HALF: tl.constexpr = ROTARY // 2
    if ROTARY:  # noqa: SIM102 (one at compile time, one at run time)
        if row < rows_q:
            sequence, start = _owner(starts_q, row, batch)
            if sequence < batch:
                position = tl.load(rotary_seqlens + sequence)
                if STEPS_QUERIES:
                    position += row - start
                of_row = tl.maximum(tl.minimum(position, angles - 1), 0).to(tl.int64) * HALF
                source = q + row.to(tl.int64) * q_row
                destination = q_rotated + row.to(tl.int64) * nheads * head_dim
                _move(
                    source,
                    destination,
                    q_head,
                    head_dim,
                    rotary_cos + of_row,
                    rotary_sin + of_row,
                    nheads,
                    head_dim,
                    ROTARY,
                    INTERLEAVED,
                    HEADS,
                    CHANNELS,
                )
    if row < rows_k:
        sequence, start = _owner(starts_k, row, batch)
        if sequence < batch:
            key = tl.load(seqlens + sequence) + row - start
            if (key >= 0) & (key < room):
                page = tl.load(page_table + sequence.to(tl.int64) * table_row + key // page_keys)
                of_cache = page.to(tl.int64) * page_rows + key % page_keys
                position = tl.load(rotary_seqlens + sequence) + row - start
                of_row = tl.maximum(tl.minimum(position, angles - 1), 0).to(tl.int64) * HALF
                _move(
                    k + row.to(tl.int64) * k_row,
                    k_cache + of_cache * k_cache_row,
                    k_head,
                    k_cache_head,
                    rotary_cos + of_row,
                    rotary_sin + of_row,
                    nheads_kv,
                    head_dim,
                    ROTARY,
                    INTERLEAVED,
                    HEADS,
                    CHANNELS,
                )
                _move(
                    v + row.to(tl.int64) * v_row,
                    v_cache + of_cache * v_cache_row,
                    v_head,
                    v_cache_head,
                    rotary_cos,
                    rotary_sin,
                    nheads_kv,
                    head_dim_v,
                    0,
                    INTERLEAVED,
                    HEADS,
                    CHANNELS_V,
                )
