"""The consumers of the backward at head_dim 256, where dK and dV of 64 keys fill the registers of two warpgroups.

The first warpgroup forms S^T and keeps dV, the second dP^T and keeps dK. The second takes the scores from the first
through shared memory, in binary32, and forms P once more. It gives dS back, and each forms half of the channels of dQ,
which it hands on in two parts.
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

from fa3_kernels.gluon.backward_geometry import advanced, key_coordinates, key_tile, opaque, row_blocks
from fa3_kernels.gluon.backward_pipeline import (
    DOUT_EMPTY,
    DQ_EMPTY,
    DQ_FULL,
    KV_EMPTY,
    Q_EMPTY,
    exchange,
    probabilities,
    scores_ready,
    statistics,
    warpgroup_barrier,
)
from fa3_kernels.gluon.geometry import WARPGROUP_ROWS, matrix
from fa3_kernels.gluon.pipeline import slot_barrier


@gluon.jit
def _hand_on(p, dq, WARPGROUP: gl.constexpr):
    """Give a part of dQ to the warp that adds it."""
    warpgroup_barrier("sync", DQ_EMPTY, WARPGROUP)
    p.dq_smem.index(WARPGROUP).store(dq)
    warpgroup_barrier("arrive", DQ_FULL, WARPGROUP)


@gluon.jit
def consume_wide(p, WARPGROUP: gl.constexpr):
    """The consumer warpgroup of S and dV (0), or of dP and dK (1)."""
    tile: gl.constexpr = WARPGROUP_ROWS
    head_dim: gl.constexpr = p.q_desc.block_type.shape[-1]
    part: gl.constexpr = head_dim // 4
    first: gl.constexpr = WARPGROUP * 2 * part
    dtype: gl.constexpr = p.q_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, part, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    zeros = gl.zeros([tile, tile], gl.float32, s_layout)
    dq_zeros = gl.zeros([tile, part], gl.float32, dq_layout)
    keys = matrix(p.k_smem.index(0))
    low = keys.slice(first, part, dim=1)
    high = keys.slice(first + part, part, dim=1)
    shared_ds = p.ds_smem.index(0)
    number = 0
    step = 0
    entry = gl.load(p.tiles)
    while entry >= 0:
        this = key_tile(p, entry)
        entry = gl.load(p.tiles + number + 1)
        rows = row_blocks(p, this)
        total = gl.zeros([tile, head_dim], gl.float32, sum_layout)
        mbarrier.wait(p.kv_full, number & 1)
        cursor = rows.start
        for _i in range(rows.count * p.group):
            step = opaque(step)
            slot = step & 1
            first_row = (rows.first + cursor) * tile
            cursor = advanced(p, rows, cursor)
            q = matrix(p.q_smem.index(slot))
            dout = matrix(p.dout_smem.index(0))
            mbarrier.wait(p.q_full.index(slot), (step >> 1) & 1)
            if WARPGROUP == 0:
                s = warpgroup_mma(keys, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                lse = statistics(p, step, 0, s_layout)
                s = warpgroup_mma_wait(0, deps=(s,))
                slot_barrier("arrive", Q_EMPTY, p.v.slot_threads, slot)
                p.scores_smem.store(s)
                scores_ready("arrive")
            else:
                mbarrier.wait(p.dout_full.index(0), step & 1)
                dp = warpgroup_mma(matrix(p.v_smem), dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
                lse = statistics(p, step, 0, s_layout)
                scores_ready("sync")
                s = p.scores_smem.load(s_layout)
            weights, slope = probabilities(p, this, rows, s, first_row, lse, 0)
            if WARPGROUP == 0:
                left = gl.convert_layout(weights.to(dtype), operand, assert_trivial=True)
                mbarrier.wait(p.dout_full.index(0), step & 1)
                total = warpgroup_mma(left, dout, total, is_async=True)
                exchange()
            else:
                dp = warpgroup_mma_wait(0, deps=(dp,))
                slot_barrier("arrive", DOUT_EMPTY, p.v.slot_threads, 0)
                ds = weights * (dp - statistics(p, step, 1, s_layout))
                if p.v.softcap:
                    ds = ds * slope
                ds16 = ds.to(dtype)
                shared_ds.store(ds16)
                fence_async_shared()
                exchange()
                left = gl.convert_layout(ds16, operand, assert_trivial=True)
                total = warpgroup_mma(left, q, total, is_async=True)
            dq_ds = shared_ds.permute((1, 0))
            dq_low = warpgroup_mma(dq_ds, low, dq_zeros, use_acc=False, is_async=True)
            dq_high = warpgroup_mma(dq_ds, high, dq_zeros, use_acc=False, is_async=True)
            total, dq_low = warpgroup_mma_wait(1, deps=(total, dq_low))
            if WARPGROUP == 0:
                slot_barrier("arrive", DOUT_EMPTY, p.v.slot_threads, 0)
            else:
                slot_barrier("arrive", Q_EMPTY, p.v.slot_threads, slot)
            _hand_on(p, dq_low, WARPGROUP)
            dq_high = warpgroup_mma_wait(0, deps=(dq_high,))
            _hand_on(p, dq_high, WARPGROUP)
            step += 1
        exchange()  # the other warpgroup has read K and V
        where = key_coordinates(p, this, this.first_key)
        if WARPGROUP == 0:
            matrix(p.v_smem).store(total.to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(p.dv_desc, where, p.v_smem)
        else:
            keys.store((total * p.softmax_scale).to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(p.dk_desc, where, p.k_smem.index(0))
        tma.store_wait(0)
        slot_barrier("arrive", KV_EMPTY, p.v.slot_threads, 0)
        number += 1
