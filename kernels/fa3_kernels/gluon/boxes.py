"""Tiles in boxes of channels, so that a tile may have 96, 160 or 192 channels although Triton's tensors have powers of
two.

A tile of 192 channels is three boxes of 64 side by side, as TMA copies them. Products take all boxes but the last as
one operand, here of 128 channels, and the last as another one. So shared memory and registers are those of the true
size, but for a last box that e4m3 leaves empty in part. :func:`fa3_kernels.plan.call.boxes` says how many boxes a size
has: one, two, three or five. Forward and backward kernels use this module.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from fa3_kernels.gluon.geometry import WARPGROUP_ROWS, matrix
from fa3_kernels.plan import call, tiles

power_of_two = gluon.constexpr_function(tiles.power_of_two)
slices_of = gluon.constexpr_function(call.slices_of)


@gluon.constexpr_function
def groups(boxes):
    """Return the boxes that make one operand each, as pairs (first, count): all but the last one and that, else the
    only one.
    """
    return ((0, boxes - 1), (boxes - 1, 1)) if boxes > 1 else ((0, 1),)


@gluon.jit
def allocate_boxes(desc, COUNT: gl.constexpr):
    """Allocate shared memory for COUNT boxes of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.constexpr_function
def _widened(shape, count, dim):
    """Return a shape whose dimension ``dim`` is ``count`` times as large."""
    dim = dim % len(shape)
    return [*shape[:dim], count * shape[dim], *shape[dim + 1 :]]


@gluon.jit
def joined(buffers, first, COUNT: gl.constexpr, DIM: gl.constexpr = -1):
    """Return COUNT boxes from ``first`` on as one buffer along dimension DIM, without a copy.

    In the swizzled layout a box of all rows is followed by the next one. DIM is the last dimension, or the first one
    for transposed boxes.
    """
    box = buffers.index(first)
    if COUNT > 1:
        box = box._reinterpret(box.dtype, _widened(box.shape, COUNT, DIM), box.layout)
    return box


@gluon.jit
def parts(buffers, number, BOXES: gl.constexpr, SPARE: gl.constexpr = 0):
    """Return tile ``number`` of a ring, a tile being BOXES boxes, as a tuple of matrices of ascending channels.

    The last SPARE channels of the last box are left out.
    """
    found: gl.constexpr = groups(BOXES)
    result = ()
    for i in gl.static_range(len(found)):
        part = matrix(joined(buffers, number * BOXES + found[i][0], found[i][1]))
        if SPARE * i > 0:
            part = part.slice(0, part.shape[1] - SPARE, dim=1)
        result = result + (part,)
    return result


@gluon.jit
def load_boxes(desc, where, full, buffers, number, BOXES: gl.constexpr):
    """Start the loads of tile ``number`` of a ring, of BOXES boxes, all of which report to the mbarrier ``full``."""
    channels: gl.constexpr = desc.block_type.shape[-1]
    for i in gl.static_range(BOXES):
        tma.async_copy_global_to_shared(desc, where[:-1] + [i * channels], full, buffers.index(number * BOXES + i))


@gluon.jit
def _no_slice(CHANNELS: gl.constexpr, K: gl.constexpr):
    """Return zeros (64, CHANNELS) in the layout of a wgmma accumulator."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHANNELS, K])
    return gl.zeros([WARPGROUP_ROWS, CHANNELS], gl.float32, layout)


@gluon.jit
def no_sums(
    BOXES: gl.constexpr,
    CHANNELS: gl.constexpr,
    SLICES: gl.constexpr = 1,
    K: gl.constexpr = 16,
    SPARE: gl.constexpr = 0,
):
    """Return zeros for 64 rows of BOXES boxes of CHANNELS, in the slices of :func:`fa3_kernels.plan.call.slices_of`;
    one instruction adds K products.
    """
    found: gl.constexpr = slices_of(BOXES * CHANNELS - SPARE, CHANNELS, SLICES)
    result = ()
    for i in gl.static_range(len(found)):
        result = result + (_no_slice(found[i][1], K),)
    return result


@gluon.jit
def product(left, right, zeros):
    """Start the product of two tiles over their channels, from zero, in ascending parts; nothing is waited for."""
    sums = warpgroup_mma(left[0], right[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(right)):
        sums = warpgroup_mma(left[i], right[i].permute((1, 0)), sums, is_async=True)
    return sums


@gluon.jit
def awaited(sums, PENDING: gl.constexpr):
    """Return the parts of a sum once no more than PENDING later products are under way."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(PENDING, deps=sums),)
    else:
        return warpgroup_mma_wait(PENDING, deps=sums)
