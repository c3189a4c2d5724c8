"""O of a consumer warpgroup, as parts of its channels: rescaled, and stored by the 16-bit forward.

The e4m3 forward stores its O by :mod:`fa3_kernels.gluon.output_fp8`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from fa3_kernels.gluon import softmax
from fa3_kernels.gluon.boxes import groups, parts, power_of_two
from fa3_kernels.gluon.geometry import WARPGROUP_ROWS, output_rows, query_coordinates


@gluon.jit
def scaled(o, factor):
    """Return every part of O times a factor per row."""
    result = ()
    for i in gl.static_range(len(o)):
        result = result + (softmax.scaled(o[i], factor),)
    return result


@gluon.jit
def staging(p, BOXES: gl.constexpr, WARPGROUP: gl.constexpr):
    """Return the ring of tiles of BOXES boxes in which warpgroups stage O for TMA, and which tile is this one's.

    The ring has a tile for each warpgroup; where memory is short it is the warpgroup's buffer of Q, with one tile.
    """
    if p.variant.out_in_query_slot:
        block: gl.constexpr = p.out_desc.block_type.shape
        of_q = p.q_smem.index(WARPGROUP * p.variant.qk_boxes)
        return of_q._reinterpret(p.out_desc.dtype, [BOXES] + block, p.out_desc.layout), 0
    else:
        return p.out_smem, WARPGROUP


@gluon.jit
def store_rows(p, tile, part, FIRST: gl.constexpr, ROW: gl.constexpr, WARPGROUP: gl.constexpr):
    """Write a part of O from registers, and return the rows of the splits before this one.

    A split writes fp32 to its workspace, others round to the output. Their rows have ROW channels; FIRST is the part's
    first one.
    """
    layout: gl.constexpr = part.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    channels: gl.constexpr = part.shape[1]
    _, row, exists = output_rows(p, tile, row_layout, WARPGROUP)
    rows = p.num_rows * tile.split
    columns = gl.arange(FIRST, FIRST + channels, gl.SliceLayout(0, layout))
    first = p.partial_ptr + rows.to(gl.int64) * ROW
    offsets = gl.expand_dims(row * ROW, 1) + gl.expand_dims(columns, 0)
    exists = gl.expand_dims(exists, 1)
    if FIRST + channels > ROW:
        exists = exists & gl.expand_dims(columns < ROW, 0)
    gl.store(first + offsets, part.to(p.partial_ptr.dtype.element_ty), mask=exists)
    return rows


@gluon.jit
def sinks_of(p, tile, LAYOUT: gl.constexpr):
    """Return the score of each row's sink as a tuple of one; an empty one without sinks.

    Only the first part of the keys takes the sink: in all others its score is -inf.
    """
    if p.variant.has_sinks:
        head = gl.zeros([WARPGROUP_ROWS], gl.int32, LAYOUT) + tile.head
        if p.variant.pack > 1:
            member = gl.arange(0, WARPGROUP_ROWS, LAYOUT) & (p.variant.pack - 1)
            head = tile.head * p.group + gl.minimum(member, p.group - 1)
        return (gl.where(tile.split == 0, gl.load(p.sinks[0] + head), float("-inf")),)
    else:
        return ()


@gluon.jit
def store(p, tile, o, row_max, thread_sums, WARPGROUP: gl.constexpr):
    """Normalise O, round it once and write it by TMA, which clips rows beyond the sequence; write lse.

    All threads of the warpgroup run this. A split writes fp32 and the base-2 lse to the workspace instead, straight
    from registers, and so is O written where TMA would write more heads than there are.
    """
    row_layout: gl.constexpr = row_max.type.layout
    of_a_box: gl.constexpr = p.out_desc.block_type.shape[-1]
    boxes: gl.constexpr = p.variant.v_boxes
    inverse, lse = softmax.finalize(row_max, thread_sums, *sinks_of(p, tile, row_layout))
    o = scaled(o, inverse)
    lse_index, _, exists = output_rows(p, tile, row_layout, WARPGROUP)
    if p.variant.is_split or p.variant.stored_channels:
        row: gl.constexpr = power_of_two(boxes * of_a_box) if p.variant.is_split else p.variant.stored_channels
        found: gl.constexpr = groups(boxes)
        for i in gl.static_range(len(found)):
            rows = store_rows(p, tile, o[i], found[i][0] * of_a_box, row, WARPGROUP)
        if p.variant.is_split:
            gl.store(p.lse_ptr + rows + lse_index, lse, mask=exists)
        else:
            gl.store(p.lse_ptr + lse_index, lse * softmax.LN2, mask=exists)
    else:
        buffers, number = staging(p, boxes, WARPGROUP)
        staged = parts(buffers, number, boxes)
        tma.store_wait(0)  # TMA has read the O that was staged before
        for i in gl.static_range(len(staged)):
            staged[i].store(o[i].to(p.q_desc.dtype))
        fence_async_shared()
        where = query_coordinates(p, tile, WARPGROUP)
        for i in gl.static_range(boxes):
            of_box = buffers.index(number * boxes + i)
            tma.async_copy_shared_to_global(p.out_desc, where[:-1] + [i * of_a_box], of_box)
        gl.store(p.lse_ptr + lse_index, lse * softmax.LN2, mask=exists)
