"""The consumers of the backward from head_dim 160 on, where a warpgroup holds dK or dV, not both.

The two warpgroups share a tile of 64 keys. The first one forms S^T and keeps dV, the second one forms dP^T and keeps
dK. The second one reads the scores of the first from shared memory, in binary32, and computes P again from them. It
gives dS back through shared memory, and each warpgroup forms some of the channels of dQ: at 256 one half, handed on in
two parts; below it the first 128, or the rest. All else is as in :mod:`fa3_kernels.gluon.backward`, which starts these
consumers; :mod:`fa3_kernels.gluon.backward_pipeline` says what each barrier guards.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa3_kernels.gluon.backward_dq import DQ_EMPTY, DQ_FULL, share_of_dq, warpgroup_barrier
from fa3_kernels.gluon.backward_geometry import advanced, key_coordinates, key_tile, opaque, row_blocks
from fa3_kernels.gluon.backward_pipeline import (
    DOUT_EMPTY,
    KV_EMPTY,
    Q_EMPTY,
    add_product,
    exchange,
    probabilities,
    scaled,
    scores_ready,
    statistics,
    store_parts,
)
from fa3_kernels.gluon.boxes import no_sums, parts, product
from fa3_kernels.gluon.geometry import WARPGROUP_ROWS
from fa3_kernels.gluon.pipeline import slot_barrier


@gluon.jit
def _hand_on(p, dq, WARPGROUP: gl.constexpr):
    """Stage a part of dQ for the warp that adds it: wait for the buffer, store, and say that it is full."""
    warpgroup_barrier("sync", DQ_EMPTY, WARPGROUP)
    share_of_dq(p, WARPGROUP).store(dq)
    warpgroup_barrier("arrive", DQ_FULL, WARPGROUP)


@gluon.jit
def _tile(p, buffers, BOXES: gl.constexpr):
    """Return K or V in parts of its channels, below head_dim 256 at an address new to the compiler, as ``backward.py``.

    At 256 a new address gains nothing.
    """
    if p.variant.qk_boxes > 1:
        return parts(buffers, opaque(0), BOXES)
    else:
        return parts(buffers, 0, BOXES)


@gluon.jit
def _issue_dq(p, ds, zeros, WARPGROUP: gl.constexpr):
    """Start a warpgroup's share of dQ = dS K, as a tuple of the parts in which it is handed on."""
    keys = _tile(p, p.k_smem, p.variant.qk_boxes)
    count: gl.constexpr = p.variant.dq_parts
    channels: gl.constexpr = zeros.shape[1]
    if p.variant.qk_boxes > 1:
        return (warpgroup_mma(ds, keys[WARPGROUP], zeros, use_acc=False, is_async=True),)
    else:
        result = ()
        for i in gl.static_range(count):
            some = keys[0].slice((WARPGROUP * count + i) * channels, channels, dim=1)
            result = result + (warpgroup_mma(ds, some, zeros, use_acc=False, is_async=True),)
        return result


@gluon.jit
def _store(desc, where, buffers, total, BOXES: gl.constexpr):
    """Round dK or dV to the shared memory of K or V, and start the TMA store from there."""
    channels: gl.constexpr = desc.block_type.shape[-1]
    store_parts(total, desc.dtype, parts(buffers, 0, BOXES))
    fence_async_shared()
    for i in gl.static_range(BOXES):
        tma.async_copy_shared_to_global(desc, where[:-1] + [i * channels], buffers.index(i))


@gluon.jit
def consume_wide(p, WARPGROUP: gl.constexpr):
    """Run a consumer warpgroup: the one of S and dV (0), or the one of dP and dK (1)."""
    tile: gl.constexpr = WARPGROUP_ROWS
    channels: gl.constexpr = share_of_dq(p, WARPGROUP).shape[1]
    dtype: gl.constexpr = p.q_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, channels, 16])
    zeros = gl.zeros([tile, tile], gl.float32, s_layout)
    dq_zeros = gl.zeros([tile, channels], gl.float32, dq_layout)
    shared_ds = p.ds_smem.index(0)
    number = 0
    step = 0
    entry = gl.load(p.tiles)
    while entry >= 0:
        this = key_tile(p, entry)
        entry = gl.load(p.tiles + number + 1)
        rows = row_blocks(p, this)
        if WARPGROUP == 0:
            total = no_sums(p.variant.v_boxes, p.v_desc.block_type.shape[-1])
        else:
            total = no_sums(p.variant.qk_boxes, p.k_desc.block_type.shape[-1])
        mbarrier.wait(p.kv_full, number & 1)
        cursor = rows.start
        for _i in range(rows.count * p.group):
            step = opaque(step)
            slot = step & 1  # of two for Q and its statistics; the phase of the mbarrier is (step >> 1) & 1
            first_row = (rows.first + cursor) * tile
            cursor = advanced(p, rows, cursor)
            dout_slot = step % p.variant.dout_stages
            dout_phase = (step // p.variant.dout_stages) & 1
            q = parts(p.q_smem, slot, p.variant.qk_boxes)
            dout = parts(p.dout_smem, dout_slot, p.variant.v_boxes)
            mbarrier.wait(p.q_full.index(slot), (step >> 1) & 1)
            if WARPGROUP == 0:
                s = product(_tile(p, p.k_smem, p.variant.qk_boxes), q, zeros)
                lse = statistics(p, step, 0, s_layout)
                s = warpgroup_mma_wait(0, deps=(s,))
                slot_barrier("arrive", Q_EMPTY, p.variant.slot_threads, slot)
                p.scores_smem.store(s)
                scores_ready("arrive")  # they are overwritten behind the exchange() that follows their reading
            else:
                mbarrier.wait(p.dout_full.index(dout_slot), dout_phase)
                dp = product(_tile(p, p.v_smem, p.variant.v_boxes), dout, zeros)
                lse = statistics(p, step, 0, s_layout)
                scores_ready("sync")
                s = p.scores_smem.load(s_layout)
            weights, slope = probabilities(p, this, rows, s, first_row, lse, 0)
            if WARPGROUP == 0:
                left = weights.to(dtype)  # P, the left operand of dV
                mbarrier.wait(p.dout_full.index(dout_slot), dout_phase)
                total = add_product(total, left, dout)
                exchange()  # the other warpgroup has stored dS
            else:
                dp = warpgroup_mma_wait(0, deps=(dp,))
                slot_barrier("arrive", DOUT_EMPTY, p.variant.slot_threads, dout_slot)
                ds = weights * (dp - statistics(p, step, 1, s_layout))
                if p.variant.softcap:
                    ds = ds * slope
                ds16 = ds.to(dtype)
                shared_ds.store(ds16)
                fence_async_shared()
                exchange()
                total = add_product(total, ds16, q)
            dq = _issue_dq(p, shared_ds.permute((1, 0)), dq_zeros, WARPGROUP)
            dq_total = warpgroup_mma_wait(len(dq) - 1, deps=(dq[0],) + total)
            total = dq_total[1:]
            if WARPGROUP == 0:
                slot_barrier("arrive", DOUT_EMPTY, p.variant.slot_threads, dout_slot)
            else:
                slot_barrier("arrive", Q_EMPTY, p.variant.slot_threads, slot)
            _hand_on(p, dq_total[0], WARPGROUP)
            for part in gl.static_range(1, len(dq)):
                other = warpgroup_mma_wait(len(dq) - 1 - part, deps=(dq[part],))
                _hand_on(p, other, WARPGROUP)
            step += 1
        # dK and dV leave through the memory of K and V. Both warpgroups join first, as the other one reads them, too.
        exchange()
        where = key_coordinates(p, this, this.first_key)
        if WARPGROUP == 0:
            _store(p.dv_desc, where, p.v_smem, total, p.variant.v_boxes)
        else:
            _store(p.dk_desc, where, p.k_smem, scaled(total, p.softmax_scale), p.variant.qk_boxes)
        tma.store_wait(0)
        slot_barrier("arrive", KV_EMPTY, p.variant.slot_threads, 0)
        number += 1
