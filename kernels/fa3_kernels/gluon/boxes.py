"""Tiles in boxes: a tensor has a power of two of rows and channels, three boxes side by side have three times that.

A tile of 192 channels is three boxes of 64, as TMA copies them; products take the first two as one operand of 128
channels and the third as another one, and likewise keys. Shared memory and registers are those of the true size.

Boxes of a tile lie in the order of its parts: those of the first keys before those of the last, in each of them box of
channels after box of channels. In a swizzled layout boxes one behind the other are then one larger tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from fa3_kernels.gluon.geometry import WARPGROUP_ROWS, matrix


@gluon.constexpr_function
def groups(boxes):
    """Boxes that make one part of a tile, as (first, count): two and one, or the only one."""
    return ((0, 2), (2, 1)) if boxes == 3 else ((0, 1),)


@gluon.jit
def allocate_boxes(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT boxes of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.constexpr_function
def _enlarged(shape, rows, channels):
    return [*shape[:-2], rows * shape[-2], channels * shape[-1]]


@gluon.jit
def _joined(buffers, first, ROWS: gl.constexpr, CHANNELS: gl.constexpr):
    """ROWS x CHANNELS boxes from ``first`` on as one matrix."""
    box = buffers.index(first)
    if ROWS * CHANNELS > 1:
        box = box._reinterpret(box.dtype, _enlarged(box.shape, ROWS, CHANNELS), box.layout)
    return matrix(box)


@gluon.jit
def _of_rows(buffers, first, ROWS: gl.constexpr, BOXES: gl.constexpr):
    """The parts of BOXES boxes of channels, of ascending channels; each has ROWS boxes of rows."""
    found: gl.constexpr = groups(BOXES)
    result = ()
    for i in gl.static_range(len(found)):
        result = result + (_joined(buffers, first + found[i][0] * ROWS, ROWS, found[i][1]),)
    return result


@gluon.jit
def parts(buffers, number, BOXES: gl.constexpr):
    """Tile ``number`` of a ring of tiles with BOXES boxes of channels, as matrices of ascending channels."""
    return _of_rows(buffers, number * BOXES, 1, BOXES)


@gluon.jit
def key_parts(p, buffers, step, BOXES: gl.constexpr):
    """The tile of K or V of a step: of ascending keys the matrices of ascending channels."""
    found: gl.constexpr = groups(p.v.key_boxes)
    first = step % p.v.stages * (p.v.key_boxes * BOXES)
    result = ()
    for i in gl.static_range(len(found)):
        result = result + (_of_rows(buffers, first + found[i][0] * BOXES, found[i][1], BOXES),)
    return result


@gluon.jit
def load_boxes(desc, where, full, buffers, number, BOXES: gl.constexpr):
    """Start the loads of tile ``number`` of a ring of tiles with BOXES boxes of channels."""
    channels: gl.constexpr = desc.block_type.shape[-1]
    for i in gl.static_range(BOXES):
        tma.async_copy_global_to_shared(desc, where[:-1] + [i * channels], full, buffers.index(number * BOXES + i))


@gluon.jit
def _load_rows(desc, where, full, buffers, first, ROWS: gl.constexpr, BOXES: gl.constexpr):
    """Start the loads of a part of a tile, of ROWS boxes of rows, into the boxes from ``first`` on."""
    rows: gl.constexpr = desc.block_type.shape[-2]
    channels: gl.constexpr = desc.block_type.shape[-1]
    for i in gl.static_range(BOXES):
        for j in gl.static_range(ROWS):
            at = where[:-2] + [where[-2] + j * rows, i * channels]
            tma.async_copy_global_to_shared(desc, at, full, buffers.index(first + (i * ROWS + j)))


@gluon.jit
def load_key_boxes(p, desc, where, full, buffers, slot, BOXES: gl.constexpr):
    """Start the loads of a tile of K or V into a slot."""
    rows: gl.constexpr = desc.block_type.shape[-2]
    found: gl.constexpr = groups(p.v.key_boxes)
    first = slot * (p.v.key_boxes * BOXES)
    for i in gl.static_range(len(found)):
        at = where[:-2] + [where[-2] + found[i][0] * rows, where[-1]]
        _load_rows(desc, at, full, buffers, first + found[i][0] * BOXES, found[i][1], BOXES)


@gluon.jit
def _no_sums(COLUMNS: gl.constexpr, K: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, K])
    return gl.zeros([WARPGROUP_ROWS, COLUMNS], gl.float32, layout)


@gluon.jit
def no_sums(BOXES: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr):
    """Zeros of a warpgroup's rows and BOXES boxes of COLUMNS, in parts, as products of K a time accumulate them."""
    found: gl.constexpr = groups(BOXES)
    result = ()
    for i in gl.static_range(len(found)):
        result = result + (_no_sums(found[i][1] * COLUMNS, K),)
    return result


@gluon.jit
def awaited(sums, PENDING: gl.constexpr):
    """The parts of a product, waited for until no more than PENDING later parts are under way."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(PENDING, deps=sums),)
    else:
        return warpgroup_mma_wait(PENDING, deps=sums)
