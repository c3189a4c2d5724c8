"""O of the e4m3 forward: kept in slices of channels, summed from parts of P V, stored with its columns in V's order.

The consumer warpgroups run all of this; :mod:`fa3_kernels.gluon.output` stores O of the 16-bit forward.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from fa3_kernels.gluon import softmax
from fa3_kernels.gluon.boxes import joined, power_of_two, slices_of
from fa3_kernels.gluon.descale import value_descale
from fa3_kernels.gluon.geometry import WARPGROUP_ROWS, matrix, output_rows, query_coordinates
from fa3_kernels.gluon.operand_fp8 import key_halves, unpack
from fa3_kernels.gluon.output import scaled, sinks_of, staging, store_rows
from fa3_kernels.gluon.v_transpose import channels_in_order


@gluon.jit
def values(p, x, step, SLICE: gl.constexpr):
    """Return V^T (channels, keys) of block ``step``, of the channels of one slice of O, in shared memory."""
    slot = step % p.variant.stages
    boxes: gl.constexpr = p.variant.v_boxes
    channels: gl.constexpr = p.v_channels
    found: gl.constexpr = slices_of(boxes * channels - p.variant.v_spare, channels, p.variant.slices)
    first: gl.constexpr = found[SLICE][0] // channels
    if channels > found[SLICE][1] and boxes > 1:
        return x.vt_smem.index(slot * boxes + first).slice(0, found[SLICE][1], dim=0)
    elif boxes > 1:
        return joined(x.vt_smem, slot * boxes + first, found[SLICE][1] // channels, 0)
    elif len(found) > 1:
        return x.vt_smem.index(slot).slice(found[SLICE][0], found[SLICE][1], dim=0)
    else:
        return x.vt_smem.index(slot)


@gluon.jit
def issue_part(p, x, words, o, step, UNIT: gl.constexpr):
    """Start one part of P V: a chunk of the keys times a slice of the channels. UNIT numbers the parts, slices fastest.

    With promotion a part starts from zero, without it from O.
    """
    chunk: gl.constexpr = UNIT // len(o)
    index: gl.constexpr = UNIT % len(o)
    layout: gl.constexpr = o[index].type.layout
    width: gl.constexpr = o[index].shape[1]
    operand = unpack(words[chunk], gl.DotOperandLayout(0, layout, 4))
    vt = values(p, x, step, index)
    if operand.shape[1] != vt.shape[1]:
        vt = vt.slice(chunk * operand.shape[1], operand.shape[1], dim=1)
    if p.variant.promotion_interval:
        zeros = gl.zeros([WARPGROUP_ROWS, width], gl.float32, layout)
        return warpgroup_mma(operand, vt.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(operand, vt.permute((1, 0)), o[index], is_async=True)


@gluon.jit
def with_part(p, o, rescale, part, UNIT: gl.constexpr):
    """Return O with one finished part added; the first part of a block rescales O in the same fma."""
    index: gl.constexpr = UNIT % len(o)
    if not p.variant.promotion_interval:
        changed = part
    elif len(o) > UNIT:
        changed = gl.fma(o[index], gl.broadcast(softmax.column(rescale, part), part)[0], part)
    else:
        changed = o[index] + part
    return o[:index] + (changed,) + o[index + 1 :]


@gluon.jit
def _in_order(o, WIDTH: gl.constexpr):
    """Return O in slices of at most WIDTH channels, with their columns in the order of V's."""
    result = ()
    for i in gl.static_range(len(o)):
        if o[i].shape[1] > WIDTH:
            result = result + _in_order(key_halves(o[i]), WIDTH)
        else:
            result = result + (channels_in_order(o[i]),)
    return result


@gluon.constexpr_function
def _at_most(n, limit):
    """Return the smaller one of two compile-time numbers."""
    return min(n, limit)


@gluon.jit
def store(p, x, tile, blocks, o, row_max, thread_sums, WARPGROUP: gl.constexpr):
    """Normalise O, round it once and write it by TMA, which clips rows beyond the sequence; write lse.

    O is staged a few boxes at a time, as many as shared memory has room for. A split writes fp32 and the base-2 lse to
    the workspace instead, straight from registers.
    """
    row_layout: gl.constexpr = row_max.type.layout
    out_width: gl.constexpr = p.out_desc.block_type.shape[-1]
    v_descale = value_descale(x, tile, blocks.first)
    inverse, lse = softmax.finalize(row_max, thread_sums, *sinks_of(p, tile, row_layout))
    o = _in_order(scaled(o, inverse * v_descale), out_width - p.variant.v_spare)
    layout: gl.constexpr = o[0].type.layout
    width: gl.constexpr = o[0].shape[1]
    slices: gl.constexpr = len(o)
    lse_index, _, exists = output_rows(p, tile, row_layout, WARPGROUP)
    if p.variant.is_split:
        _, row, is_row = output_rows(p, tile, gl.SliceLayout(1, layout), WARPGROUP)
        rows = p.num_rows * tile.split  # rows of the splits before
        columns = gl.arange(0, width, gl.SliceLayout(0, layout))
        of_a_row: gl.constexpr = power_of_two(width * slices)
        first = p.partial_ptr + rows.to(gl.int64) * of_a_row
        offsets = gl.expand_dims(row * of_a_row, 1) + gl.expand_dims(columns, 0)
        for i in gl.static_range(slices):
            gl.store(first + offsets + i * width, o[i], mask=gl.expand_dims(is_row, 1))
        gl.store(p.lse_ptr + rows + lse_index, lse, mask=exists)
    elif p.variant.stored_channels:
        for i in gl.static_range(slices):
            store_rows(p, tile, o[i], i * width, p.variant.stored_channels, WARPGROUP)
        gl.store(p.lse_ptr + lse_index, lse * softmax.LN2, mask=exists)
    else:
        where = query_coordinates(p, tile, WARPGROUP)
        staged: gl.constexpr = p.variant.staged_boxes
        buffers, number = staging(p, staged, WARPGROUP)
        at_once: gl.constexpr = out_width // width
        parts: gl.constexpr = (slices + at_once - 1) // at_once
        for group in gl.static_range(0, parts, staged):
            tma.store_wait(0)  # TMA has read what these buffers held
            for part in gl.static_range(group, _at_most(group + staged, parts)):
                buffer = matrix(buffers.index(number * staged + part - group))
                for i in gl.static_range(_at_most(at_once, slices - part * at_once)):
                    rounded = o[part * at_once + i].to(p.out_desc.dtype)
                    buffer.slice(i * width, width, dim=1).store(rounded)
            fence_async_shared()
            for part in gl.static_range(group, _at_most(group + staged, parts)):
                buffer = buffers.index(number * staged + part - group)
                tma.async_copy_shared_to_global(p.out_desc, where[:-1] + [part * out_width], buffer)
        gl.store(p.lse_ptr + lse_index, lse * softmax.LN2, mask=exists)
