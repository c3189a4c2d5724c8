"""The producer warpgroup of the e4m3 forward: TMA loads, factors that travel with K, and the transposition of V.

All four warps run these functions, as the transposition needs them; :func:`fa3_kernels.gluon.pipeline.produce` is the
producer warp of the 16-bit forward. A slot of V as loaded is guarded by ``v_full`` and read by this warpgroup alone. A
slot of transposed V is guarded by ``vt_full``, on which the consumers wait, and handed back through V_EMPTY.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fa3_kernels.gluon.descale import load_factors, store_factors
from fa3_kernels.gluon.geometry import key_blocks, matrix, read_tile
from fa3_kernels.gluon.pages import first_page, hold_rows, landed, load_slot
from fa3_kernels.gluon.pipeline import (
    K_EMPTY,
    V_EMPTY,
    acquire,
    load_queries,
    phase,
)
from fa3_kernels.gluon.stamps import K_FREE, K_ISSUED, V_FREE, V_ISSUED, at_step, begin_stamps, stamp
from fa3_kernels.gluon.v_transpose import transpose


@gluon.jit
def _load_block(p, x, tile, block, factors, page, step):
    """Start the loads of K and V of a block and put its factors beside them, once the consumers have released K's
    slot.
    """
    tile_n: gl.constexpr = p.tile_n
    slot = step % p.variant.stages
    at_step(p, step)
    if step >= p.variant.stages:
        acquire(p, K_EMPTY, slot)
    stamp(p, K_FREE)
    store_factors(p, x, factors[0], factors[1], factors[2], slot)
    row = block * tile_n
    k = (p.k_desc, p.k_full.index(slot), p.k_smem)
    v = (p.v_desc, p.v_full.index(slot), p.v_smem)
    sizes: gl.constexpr = ((p.variant.qk_boxes, p.variant.qk_panels), (p.variant.v_boxes, p.variant.v_panels))
    hold_rows(p, page)
    load_slot(p, tile, row, page, (k, v), slot, sizes)
    stamp(p, K_ISSUED)


@gluon.jit
def _transpose_block(p, x, step, LATER: gl.constexpr):
    """Transpose V of a step into its slot of V^T, once V has arrived and the consumers have released that slot.

    LATER says how many operands of later steps are being loaded.

    The fence makes what was written visible to wgmma before ``vt_full`` lets the consumers read it.
    """
    slot = step % p.variant.stages
    at_step(p, step)
    landed(p, p.k_full, step, LATER)
    landed(p, p.v_full, step, LATER)
    mbarrier.wait(p.v_full.index(slot), phase(step, p.variant.stages))
    if step >= p.variant.stages:
        acquire(p, V_EMPTY, slot)
    stamp(p, V_FREE)
    boxes: gl.constexpr = p.variant.v_boxes
    for i in gl.static_range(boxes):
        transpose(matrix(p.v_smem.index(slot * boxes + i)), x.vt_smem.index(slot * boxes + i))
    fence_async_shared()
    mbarrier.arrive(x.vt_full.index(slot), count=1)
    stamp(p, V_ISSUED)


@gluon.jit
def produce_fp8(p, x):
    """Run the producer: load Q, then K and V from right to left, of every tile of this CTA.

    V is transposed one step behind its load, and factors are loaded one step ahead. A slot of V as loaded is free as
    soon as this warpgroup has transposed it. With one Q slot the last V of a tile must be transposed before the next Q
    is waited for: the consumers need it to finish the tile, and only then release Q.
    """
    number = 0
    step = 0
    begin_stamps(p, p.variant.consumers)
    pending = 0  # steps loaded but not transposed
    entry = gl.load(p.tiles)
    while entry >= 0:
        tile = read_tile(p, entry)
        entry = gl.load(p.tiles + number + 1)
        blocks = key_blocks(p, tile)
        last = blocks.stop - 1
        next_factors = load_factors(p, x, tile, last, last)
        if p.variant.query_slots == 1:  # noqa: SIM102 (one at compile time, one at run time)
            if pending > 0:
                _transpose_block(p, x, step - 1, 0)
                pending = 0
        load_queries(p, tile, number)
        next_page = first_page(p, tile, last * p.tile_n)
        for j in range(1, blocks.stop - blocks.first + 1):
            factors = next_factors
            next_factors = load_factors(p, x, tile, gl.maximum(last - j, blocks.first), last)
            page = next_page
            next_page = first_page(p, tile, (last - j) * p.tile_n)
            _load_block(p, x, tile, blocks.stop - j, factors, page, step)
            if pending > 0:
                _transpose_block(p, x, step - 1, 2)
            pending = 1
            step += 1
        number += 1
    if pending > 0:
        _transpose_block(p, x, step - 1, 0)
