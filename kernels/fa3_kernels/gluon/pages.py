"""K and V in pages of a cache: where the rows of a key tile lie, and their loads, one box of TMA a page.

``p.pages`` are page_table, int32 (batch, entries); its entries a sequence; the keys of a page; the rows from one page
to the next; and how many pages a key tile lies in. The last is a number that no compiler knows, for unrolled the loop
over pages spilled 260 bytes of the producer's 24 registers, and ptxas gave the consumers others.

Entries behind the last key of a sequence are not read. A box that ends behind it is clipped by the ragged view
(:mod:`fa3_kernels.plan.call`), so that what a page holds there, NaN included, never reaches shared memory: a weight of
0 times NaN is NaN.

A page of fewer keys than a tile is a box of TMA of its own, of channels that fill one row of the swizzled layout: in
that layout a tile is panels of so many channels, each of all rows, and pages lie below each other in a panel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from fa3_kernels.gluon.boxes import allocate_boxes, load_boxes
from fa3_kernels.gluon.geometry import RAGGED_ROWS, key_coordinates


@gluon.constexpr_function
def slot_shape(block, pages, panels):
    """Shape of a box of a slot of K or V, of the box that TMA copies: as many pages below each other, panels aside."""
    return [*block[:-2], max(1, pages) * block[-2], panels * block[-1]]


@gluon.jit
def allocate_slots(desc, COUNT: gl.constexpr, PAGES: gl.constexpr, PANELS: gl.constexpr):
    """Shared memory for COUNT boxes of K or V."""
    if PAGES > 1:
        shape: gl.constexpr = slot_shape(desc.block_type.shape, PAGES, PANELS)
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, desc.dtype)
        return gl.allocate_shared_memory(desc.dtype, [COUNT] + shape, layout)
    else:
        return allocate_boxes(desc, COUNT)


@gluon.jit
def _page(p, tile, key):
    """The page that holds a key; 0 for keys that there are not, whose entries may be anything."""
    rows: gl.constexpr = p.k_desc.block_type.shape[-2]
    if p.variant.page_boxes > 1:  # a box is a page, and a division by a constant a shift
        index = key // rows
    else:
        index = key // p.pages[2]
    entry = p.pages[0] + tile.batch * p.pages[1] + index
    return gl.load(entry, mask=(key >= 0) & (key < tile.seqlen_k), other=0)


@gluon.jit
def first_page(p, tile, row):
    """The page of the key tile that begins at ``row``, in a tuple: the first, where there are several; none without
    pages.

    The producer finds it one tile ahead, so that no load of K or V waits for the page table: of entries side by side
    the others are then in L1.
    """
    if p.variant.page_boxes:
        return (_page(p, tile, row),)
    else:
        return ()


@gluon.jit
def _copy_page(p, tile, key, page, i, operand, slot, COUNT: gl.constexpr):
    """Start the copies of the rows of a page that begin at ``key``, as page ``i`` of a slot of K or V."""
    desc, full, smem = operand
    pages: gl.constexpr = p.variant.page_boxes
    channels: gl.constexpr = desc.block_type.shape[-1]
    start = page * p.pages[3] + tile.k_start  # row of the cache that holds this key
    if pages == 1:
        start += key % p.pages[2]
    where = [RAGGED_ROWS, start + tile.seqlen_k - key, tile.kv_head, RAGGED_ROWS - tile.seqlen_k + key]
    copies = smem._reinterpret(desc.dtype, [p.variant.stages * COUNT * pages] + desc.block_type.shape, desc.layout)
    for panel in gl.static_range(COUNT):
        box = copies.index((slot * COUNT + panel) * pages + i)
        tma.async_copy_global_to_shared(desc, where + [panel * channels], full, box)


@gluon.jit
def load_slot(p, tile, row, first, operands, slot, SIZES: gl.constexpr):
    """Start the loads of the key tile that begins at ``row`` into a slot: of K, of V, or of both.

    ``operands`` are tuples of a descriptor, the barrier of the slot and the buffers, and SIZES their boxes and panels.
    Pages are copied by twos: a copy waits until TMA has read the registers of the one that had them before.
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
