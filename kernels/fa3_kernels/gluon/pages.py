"""K and V in pages of a cache: where the rows of a key tile lie, and their loads, by TMA or row by row.

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

Pages of any other size are gathered: every thread of the producer copies 16 bytes of a row by cp.async, which writes
zeros where the sequence has no key. The rows of a tile's keys are looked up one tile ahead and pass through shared
memory. As wgmma reads through the async proxy, a slot is full once the copies of all threads have landed and a proxy
fence has followed. ``p.pages`` then goes on with that buffer, and with the first element of K, how far apart its rows
and its heads lie, and the same of V.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fa3_kernels.gluon.boxes import allocate_boxes, load_boxes
from fa3_kernels.gluon.geometry import RAGGED_ROWS, key_coordinates, matrix

_VECTOR_BITS = 128  # that a thread copies at once


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

    Where pages are gathered it is the row of the cache of every key instead, and -1 for a key that the sequence does
    not have. The producer asks for it one tile ahead, so that no load of K or V waits for the page table. The entries
    of the tile's other pages lie beside it and are then in L1.
    """
    if p.variant.gathered_v:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [p.variant.producer_warps], [0])
        key = row + gl.arange(0, p.tile_n, layout)
        exists = (key >= 0) & (key < tile.seqlen_k)
        place = tile.k_start + key
        index = place // p.pages[2]
        page = gl.load(p.pages[0] + tile.batch * p.pages[1] + index, mask=exists, other=0)
        return (gl.where(exists, page * p.pages[3] + place - index * p.pages[2], -1),)
    elif p.variant.page_boxes:
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


@gluon.constexpr_function
def _copy_layout(desc, warps):
    """Return how threads copy rows of a box: 16 bytes each, as many as lie together side by side."""
    vector = _VECTOR_BITS // desc.dtype.primitive_bitwidth
    of_row = min(8, desc.block_type.shape[-1] // vector)
    return gl.BlockedLayout([1, vector], [32 // of_row, of_row], [warps, 1], [1, 0])


@gluon.jit
def hold_rows(p, page):
    """Put the rows that :func:`first_page` looked up where all threads of the producer find them."""
    if p.variant.gathered_v:
        p.pages[5].store(page[0])


@gluon.jit
def _gather(p, tile, operand, slot, BOXES: gl.constexpr, OPERAND: gl.constexpr):
    """Start the copies of a tile's rows of K (OPERAND 0) or V (1) into a slot, as one group of cp.async."""
    desc, _, smem = operand
    channels: gl.constexpr = desc.block_type.shape[-1]
    of_row: gl.constexpr = p.variant.gathered_v if OPERAND else p.variant.gathered_qk
    layout: gl.constexpr = _copy_layout(desc, p.variant.producer_warps)
    head = p.pages[6 + 3 * OPERAND] + tile.kv_head.to(gl.int64) * p.pages[8 + 3 * OPERAND]
    column = gl.expand_dims(gl.arange(0, channels, gl.SliceLayout(0, layout)), 0)
    row = gl.expand_dims(p.pages[5].load(gl.SliceLayout(1, layout)), 1)
    start = head + row.to(gl.int64) * p.pages[7 + 3 * OPERAND]
    for box in gl.static_range(BOXES):
        source = gl.max_contiguous(gl.multiple_of(start + (column + box * channels), [1, 16]), [1, 16])
        exists = gl.max_constancy((row >= 0) & (column + box * channels < of_row), [1, 16])
        async_copy.async_copy_global_to_shared(matrix(smem.index(slot * BOXES + box)), source, exists)
    async_copy.commit_group()


@gluon.jit
def landed(p, full, step, LATER: gl.constexpr):
    """Say that the gathered slot of a step is full, once no more than LATER groups of copies are under way.

    Do nothing where TMA says so itself.
    """
    if p.variant.gathered_v:
        async_copy.wait_group(LATER)
        fence_async_shared()
        mbarrier.arrive(full.index(step % p.variant.stages), count=1)


@gluon.jit
def load_slot(p, tile, row, first, operands, slot, SIZES: gl.constexpr, FIRST: gl.constexpr = 0):
    """Start the loads of the key tile that begins at ``row`` into a slot: of K, of V, or of both; run by the producer.

    ``operands`` are tuples of a descriptor, the slot's mbarrier and the ring, and SIZES has the boxes and panels of
    each; FIRST is 1 if V stands alone. ``first`` is what :func:`first_page` gave for the tile.

    Pages are copied two at a time: a copy waits until TMA has read the registers of the copy that used them before.
    """
    for n in gl.static_range(len(operands)):
        desc, full, smem = operands[n]
        if p.variant.gathered_v:
            _gather(p, tile, operands[n], slot, SIZES[n][0], FIRST + n)
        elif p.variant.page_boxes:
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
    elif p.variant.page_boxes and not p.variant.gathered_v:
        for m in gl.static_range(len(operands)):
            _copy_page(p, tile, row, first[0], 0, operands[m], slot, SIZES[m][0] * SIZES[m][1])
