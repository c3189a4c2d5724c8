"""K and V in pages of a cache: where the rows of a key tile lie, and their loads, one box of TMA a page.

The producers load K and V through :func:`load_slot`, whether or not they lie in pages. ``p.pages`` is a tuple:
page_table, int32 (batch, entries); entries of a sequence; keys of a page; rows from one page to the next; and the
number of pages of a key tile. The last one is passed as a number that no compiler knows, because the unrolled loop over
pages spilled 260 bytes of the producer's 24 registers, and ptxas gave the consumers others.

Entries behind the last key of a sequence are not read. A box that reaches behind that key is clipped by the ragged view
(:mod:`fa3_kernels.plan.call`). So nothing that a page holds there reaches shared memory; a NaN would, as a weight of 0
times NaN is NaN.

A page with fewer keys than a tile is copied as a box of its own, with as many channels as fill one row of the swizzled
layout. In that layout a tile consists of panels of so many channels, each with all rows; the pages of a tile lie below
each other in a panel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from fa3_kernels.gluon.boxes import allocate_boxes, load_boxes
from fa3_kernels.gluon.geometry import RAGGED_ROWS, key_coordinates


@gluon.constexpr_function
def slot_shape(block, pages, panels):
    """Return the shape of one box of a slot of K or V, from the shape of the block that TMA copies.

    The box has ``pages`` blocks below each other and ``panels`` side by side; 0 pages is a cache without pages.
    """
    return [*block[:-2], max(1, pages) * block[-2], panels * block[-1]]


@gluon.jit
def allocate_slots(desc, COUNT: gl.constexpr, PAGES: gl.constexpr, PANELS: gl.constexpr):
    """Allocate shared memory for COUNT boxes of K or V."""
    if PAGES > 1:
        shape: gl.constexpr = slot_shape(desc.block_type.shape, PAGES, PANELS)
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, desc.dtype)
        return gl.allocate_shared_memory(desc.dtype, [COUNT] + shape, layout)
    else:
        return allocate_boxes(desc, COUNT)


@gluon.jit
def _page(p, tile, key):
    """Return the page that holds a key; 0 for a key that the sequence does not have, whose entry may be anything."""
    rows: gl.constexpr = p.k_desc.block_type.shape[-2]
    if p.variant.page_boxes > 1:  # a box is a page, and a division by a constant a shift
        index = key // rows
    else:
        index = key // p.pages[2]
    entry = p.pages[0] + tile.batch * p.pages[1] + index
    return gl.load(entry, mask=(key >= 0) & (key < tile.seqlen_k), other=0)


@gluon.jit
def first_page(p, tile, row):
    """Return the page of the first key of the tile that begins at ``row``, as a tuple; an empty one without pages.

    The producer asks for it one tile ahead, so that no load of K or V waits for the page table. The entries of the
    tile's other pages lie beside it and are then in L1.
    """
    if p.variant.page_boxes:
        return (_page(p, tile, row),)
    else:
        return ()


@gluon.jit
def _copy_page(p, tile, key, page, i, operand, slot, COUNT: gl.constexpr):
    """Start the copies of the rows of a page from key ``key`` on, as page ``i`` of a slot of K or V, panel by panel."""
    desc, full, smem = operand
    pages: gl.constexpr = p.variant.page_boxes
    channels: gl.constexpr = desc.block_type.shape[-1]
    start = page * p.pages[3] + tile.k_start  # row of the cache that holds this key
    if pages == 1:  # the tile is a part of a page, or all of it
        start += key % p.pages[2]
    where = [RAGGED_ROWS, start + tile.seqlen_k - key, tile.kv_head, RAGGED_ROWS - tile.seqlen_k + key]
    copies = smem._reinterpret(desc.dtype, [p.variant.stages * COUNT * pages] + desc.block_type.shape, desc.layout)
    for panel in gl.static_range(COUNT):
        box = copies.index((slot * COUNT + panel) * pages + i)
        tma.async_copy_global_to_shared(desc, where + [panel * channels], full, box)


@gluon.jit
def load_slot(p, tile, row, first, operands, slot, SIZES: gl.constexpr):
    """Start the loads of the key tile that begins at ``row`` into a slot: of K, of V, or of both; run by the producer.

    ``operands`` are tuples of a descriptor, the slot's mbarrier and the ring, and SIZES has the boxes and panels of
    each. ``first`` is what :func:`first_page` gave for the tile.

    Pages are copied two at a time: a copy waits until TMA has read the registers of the copy that used them before.
    """
    for n in gl.static_range(len(operands)):
        desc, full, smem = operands[n]
        if p.variant.page_boxes:
            mbarrier.expect(full, SIZES[n][0] * SIZES[n][1] * p.variant.page_boxes * desc.block_type.nbytes)
        else:
            mbarrier.expect(full, SIZES[n][0] * desc.block_type.nbytes)
            load_boxes(desc, key_coordinates(p, tile, row), full, smem, slot, SIZES[n][0])
    if p.variant.page_boxes > 1:
        rows: gl.constexpr = p.k_desc.block_type.shape[-2]
        page = first[0]
        for i in range(p.pages[4] // 2):
            key = row + 2 * i * rows
            second = _page(p, tile, key + rows)
            following = _page(p, tile, key + 2 * rows)
            for k in gl.static_range(len(operands)):
                _copy_page(p, tile, key, page, 2 * i, operands[k], slot, SIZES[k][0] * SIZES[k][1])
            for m in gl.static_range(len(operands)):
                _copy_page(p, tile, key + rows, second, 2 * i + 1, operands[m], slot, SIZES[m][0] * SIZES[m][1])
            page = following
    elif p.variant.page_boxes:
        for m in gl.static_range(len(operands)):
            _copy_page(p, tile, row, first[0], 0, operands[m], slot, SIZES[m][0] * SIZES[m][1])
