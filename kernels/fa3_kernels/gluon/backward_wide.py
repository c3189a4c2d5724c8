"""The consumers of the backward at head_dim 256, where dK and dV of 64 keys fill the registers of two warpgroups.

Both warpgroups see all 64 keys of a tile. Each forms S^T and dP^T of half of the rows; P and dS meet in shared memory,
and each then adds to half of the channels of dV, dK and dQ, of which it hands dQ on in two parts.
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

from fa3_kernels.gluon.backward_pipeline import (
    DOUT_EMPTY,
    DQ_EMPTY,
    DQ_FULL,
    KV_EMPTY,
    Q_EMPTY,
    advanced,
    exchange,
    key_coordinates,
    key_tile,
    opaque,
    probabilities,
    row_blocks,
    statistics,
    warpgroup_barrier,
)
from fa3_kernels.gluon.geometry import WARPGROUP_ROWS, matrix
from fa3_kernels.gluon.pipeline import slot_barrier


@gluon.jit
def _rows_of(buffer, WARPGROUP: gl.constexpr):
    """A warpgroup's rows of Q or dO, as the right operand of S^T or dP^T."""
    half: gl.constexpr = WARPGROUP_ROWS // 2
    return matrix(buffer).slice(WARPGROUP * half, half).permute((1, 0))


@gluon.jit
def _share(p, shared, x, WARPGROUP: gl.constexpr):
    """Write a warpgroup's columns of a tile that both read."""
    half: gl.constexpr = WARPGROUP_ROWS // 2
    shared.slice(WARPGROUP * half, half, dim=1).store(x.to(p.q_desc.dtype))


@gluon.jit
def _hand_on(p, dq, WARPGROUP: gl.constexpr):
    """Give a part of dQ to the warp that adds it."""
    warpgroup_barrier("sync", DQ_EMPTY, WARPGROUP)
    p.dq_smem.index(WARPGROUP).store(dq)
    fence_async_shared()
    warpgroup_barrier("arrive", DQ_FULL, WARPGROUP)


@gluon.jit
def consume_wide(p, WARPGROUP: gl.constexpr):
    """A consumer warpgroup: its half of the rows and of the channels of every tile of this CTA."""
    half: gl.constexpr = WARPGROUP_ROWS // 2
    channels: gl.constexpr = p.q_desc.block_type.shape[-1] // 2
    part: gl.constexpr = channels // 2
    first: gl.constexpr = WARPGROUP * channels
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, half, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, channels, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, part, 16])
    zeros = gl.zeros([WARPGROUP_ROWS, half], gl.float32, s_layout)
    dq_zeros = gl.zeros([WARPGROUP_ROWS, part], gl.float32, dq_layout)
    keys = matrix(p.k_smem)
    values = matrix(p.v_smem)
    number = 0
    step = 0
    entry = gl.load(p.tiles)
    while entry >= 0:
        tile = key_tile(p, entry)
        entry = gl.load(p.tiles + number + 1)
        rows = row_blocks(p, tile)
        dk = gl.zeros([WARPGROUP_ROWS, channels], gl.float32, kv_layout)
        dv = gl.zeros([WARPGROUP_ROWS, channels], gl.float32, kv_layout)
        mbarrier.wait(p.kv_full, number & 1)
        cursor = rows.start
        for _i in range(rows.count * p.group):
            step = opaque(step)
            slot = step & 1
            first_row = (rows.first + cursor) * WARPGROUP_ROWS
            cursor = advanced(p, rows, cursor)
            mbarrier.wait(p.q_full.index(slot), (step >> 1) & 1)
            s = warpgroup_mma(keys, _rows_of(p.q_smem.index(slot), WARPGROUP), zeros, use_acc=False, is_async=True)
            mbarrier.wait(p.dout_full.index(0), step & 1)
            dp = warpgroup_mma(values, _rows_of(p.dout_smem.index(0), WARPGROUP), zeros, use_acc=False, is_async=True)
            lse = statistics(p, step, 0, s_layout, WARPGROUP * half, half)
            dots = statistics(p, step, 1, s_layout, WARPGROUP * half, half)
            s = warpgroup_mma_wait(1, deps=(s,))
            is_masked = (first_row < rows.right_unmasked) | (first_row + WARPGROUP_ROWS > rows.left_unmasked)
            weights, slope = probabilities(p, tile, s, first_row + WARPGROUP * half, lse, is_masked, 0)
            shared_p = p.ds_smem.index(2 + slot)
            _share(p, shared_p, weights, WARPGROUP)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = weights * (dp - dots)
            if p.v.softcap:
                ds = ds * slope
            shared_ds = p.ds_smem.index(slot)
            _share(p, shared_ds, ds, WARPGROUP)
            fence_async_shared()
            exchange()
            dout = matrix(p.dout_smem.index(0)).slice(first, channels, dim=1)
            q = matrix(p.q_smem.index(slot)).slice(first, channels, dim=1)
            low, high = keys.slice(first, part, dim=1), keys.slice(first + part, part, dim=1)
            dq_ds = shared_ds.permute((1, 0))
            dv = warpgroup_mma(shared_p, dout, dv, is_async=True)
            dq_low = warpgroup_mma(dq_ds, low, dq_zeros, use_acc=False, is_async=True)
            dq_high = warpgroup_mma(dq_ds, high, dq_zeros, use_acc=False, is_async=True)
            dk = warpgroup_mma(shared_ds, q, dk, is_async=True)
            dv, dq_low = warpgroup_mma_wait(2, deps=(dv, dq_low))
            slot_barrier("arrive", DOUT_EMPTY, p.v.slot_threads, 0)
            _hand_on(p, dq_low, WARPGROUP)
            dq_high = warpgroup_mma_wait(1, deps=(dq_high,))
            _hand_on(p, dq_high, WARPGROUP)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            slot_barrier("arrive", Q_EMPTY, p.v.slot_threads, slot)
            step += 1
        exchange()  # the other warpgroup has read K and V
        dtype: gl.constexpr = p.q_desc.dtype
        values.slice(first, channels, dim=1).store(dv.to(dtype))
        keys.slice(first, channels, dim=1).store((dk * p.softmax_scale).to(dtype))
        fence_async_shared()
        exchange()
        if WARPGROUP == 0:
            where = key_coordinates(p, tile, tile.first_key)
            tma.async_copy_shared_to_global(p.dv_desc, where, p.v_smem)
            tma.async_copy_shared_to_global(p.dk_desc, where, p.k_smem)
            tma.store_wait(0)
        slot_barrier("arrive", KV_EMPTY, p.v.slot_threads, 0)
        number += 1
