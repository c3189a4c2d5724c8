"""K and V in pages of a cache: where the rows of a key tile lie, and their loads, one box of TMA a page.

``p.pages`` are page_table, int32 (batch, entries); its entries a sequence; the keys of a page; and the rows from one
page to the next. Entries behind the last key of a sequence are not read. A box that ends behind it is clipped by the
ragged view (:mod:`fa3_kernels.plan.views`), so that what a page holds there, NaN included, never reaches shared memory:
a weight of 0 times NaN is NaN.

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
def find_pages(p, tile, row):
    """The pages of the key tile that begins at ``row``, in a tuple; 0 for those that hold no key. None without pages.

    The producer finds them one tile ahead, so that no load of K or V waits for the page table.
    """
    found = ()
    if p.v.page_boxes:
        rows: gl.constexpr = p.k_desc.block_type.shape[-2]
        entries = p.pages[0] + tile.batch * p.pages[1]
        for i in gl.static_range(p.v.page_boxes):
            key = row + i * rows
            exists = (key >= 0) & (key < tile.seqlen_k)
            found = found + (gl.load(entries + key // p.pages[2], mask=exists, other=0),)
    return found


@gluon.jit
def tile_coordinates(p, tile, row, found):
    """Where the key tile that begins at ``row`` starts in K and V; of pages a tuple, one for each."""
    if p.v.page_boxes:
        rows: gl.constexpr = p.k_desc.block_type.shape[-2]
        where = ()
        for i in gl.static_range(p.v.page_boxes):
            key = row + i * rows
            start = found[i] * p.pages[3] + key % p.pages[2] + tile.k_start  # row of the cache that holds this key
            stop = start + tile.seqlen_k - key
            where = where + ([RAGGED_ROWS, stop, tile.kv_head, RAGGED_ROWS - tile.seqlen_k + key, 0],)
        return where
    else:
        return key_coordinates(p, tile, row)


@gluon.jit
def load_slot(p, desc, where, full, smem, slot, BOXES: gl.constexpr, PANELS: gl.constexpr):
    """Start the loads of one key tile of K or V into a slot, as BOXES boxes of PANELS panels."""
    if p.v.page_boxes:
        pages: gl.constexpr = p.v.page_boxes
        panels: gl.constexpr = BOXES * PANELS
        channels: gl.constexpr = desc.block_type.shape[-1]
        mbarrier.expect(full, panels * pages * desc.block_type.nbytes)
        boxes = smem._reinterpret(
            desc.dtype, [p.v.stages * panels * pages] + desc.block_type.shape, desc.layout
        )
        for i in gl.static_range(pages):
            for panel in gl.static_range(panels):
                box = boxes.index((slot * panels + panel) * pages + i)
                tma.async_copy_global_to_shared(desc, where[i][:-1] + [panel * channels], full, box)
    else:
        mbarrier.expect(full, BOXES * desc.block_type.nbytes)
        load_boxes(desc, where, full, smem, slot, BOXES)
