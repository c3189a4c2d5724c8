"""The backward kernel: two consumer warpgroups of 64 keys, a TMA producer warp and a warp that adds dQ in memory.

A CTA keeps one tile of K and V and walks over the row blocks of all query heads that share it, so that dK and dV of a
group are one chain of additions. S and dP are formed transposed (keys by rows): their P and dS are then, in registers,
the left operands of dV = P^T dO and dK = dS^T Q. For dQ = dS K both warpgroups exchange dS through shared memory, each
forms half of the tile, and a warp of its own adds the halves to fp32 sums in memory by TMA. The scores of the next row
block are issued with dK of this one, so that its exponentials run beside dP. The order of every operation on a value is
that of :mod:`fa3_kernels.twin.backward`.

Around that exchange Triton puts two barriers over the warps of a warpgroup. :mod:`.surplus_barriers` takes them out, as
named barriers order all that they do:

- *dS before the products of dQ that read it.* Every thread executes the fence behind its own store and then meets all
  256 threads in ``exchange()``, which stands in front of the products.
- *The products of dQ before dS overwrites what they read.* A slot's last products are those of two row blocks before.
  Every warp of both warpgroups waits for them, and then comes to the ``exchange()`` of the row block between, behind
  which alone the slot is written again.
- *One staged dQ before the next.* A thread writes the same elements in every row block, and DQ_EMPTY and DQ_FULL, for
  which all 128 threads come, stand around the TMA that reads them.
- *Waits for mbarriers.* No thread misses a phase: a slot of Q, dO or keys is loaded again only after all 256 threads
  have released it, each behind its own wait. The statistics, which are read beside these barriers, are a slot of Q's.
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
    add_dq,
    exchange,
    probabilities,
    produce,
    program,
    statistics,
    warpgroup_barrier,
)
from fa3_kernels.gluon.backward_wide import consume_wide
from fa3_kernels.gluon.geometry import WARPGROUP_ROWS, matrix
from fa3_kernels.gluon.pipeline import slot_barrier
from fa3_kernels.gluon.surplus_barriers import surplus_barriers

SURPLUS = gl.constexpr(2)


@gluon.jit
def _keys(p):
    """K as a matrix, at an address that is new to the compiler.

    LLVM otherwise computes the descriptors of K's products once and holds them in 16 registers of every thread, from
    which each step moves them to uniform ones (R2UR, for which a warp waits), and ptxas spills what has no room.
    """
    return matrix(p.k_smem.index(opaque(0)))


@gluon.jit
def _issue_scores(p, zeros, step, WARPGROUP: gl.constexpr):
    """Start S^T = K Q^T from zero."""
    keys = _keys(p).slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS)
    return warpgroup_mma(keys, matrix(p.q_smem.index(step & 1)).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _consume(p, WARPGROUP: gl.constexpr):
    """A consumer warpgroup: its 64 keys of every tile of this CTA."""
    tile_m: gl.constexpr = p.q_desc.block_type.shape[-2]
    head_dim: gl.constexpr = p.q_desc.block_type.shape[-1]
    dq_rows: gl.constexpr = p.dq_desc.block_type.shape[0]
    dq_channels: gl.constexpr = p.dq_desc.block_type.shape[1]
    dtype: gl.constexpr = p.q_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile_m, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dq_channels, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    zeros = gl.zeros([WARPGROUP_ROWS, tile_m], gl.float32, s_layout)
    dq_zeros = gl.zeros([dq_rows, dq_channels], gl.float32, dq_layout)
    values = matrix(p.v_smem).slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS)
    number = 0
    step = 0
    entry = gl.load(p.tiles)
    while entry >= 0:
        tile = key_tile(p, entry)
        entry = gl.load(p.tiles + number + 1)
        rows = row_blocks(p, tile)
        steps = rows.count * p.group
        dk = gl.zeros([WARPGROUP_ROWS, head_dim], gl.float32, kv_layout)
        dv = gl.zeros([WARPGROUP_ROWS, head_dim], gl.float32, kv_layout)
        mbarrier.wait(p.kv_full, number & 1)
        mbarrier.wait(p.q_full.index(step & 1), (step >> 1) & 1, pred=steps > 0)
        s_next = _issue_scores(p, zeros, step, WARPGROUP)
        cursor = rows.start
        for i in range(steps):
            step = opaque(step)
            slot = step & 1
            first_row = (rows.first + cursor) * tile_m
            cursor = advanced(p, rows, cursor)
            s = warpgroup_mma_wait(0, deps=(s_next,))
            mbarrier.wait(p.dout_full.index(slot), (step >> 1) & 1)
            dout = matrix(p.dout_smem.index(slot))
            dp = warpgroup_mma(values, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
            lse = statistics(p, step, 0, s_layout)
            weights, slope = probabilities(p, tile, rows, s, first_row, lse, WARPGROUP)
            p16 = gl.convert_layout(weights.to(dtype), operand, assert_trivial=True)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            dots = statistics(p, step, 1, s_layout)
            dv = warpgroup_mma(p16, dout, dv, is_async=True)
            ds = weights * (dp - dots)
            if p.v.softcap:
                ds = ds * slope
            ds16 = ds.to(dtype)
            shared_ds = p.ds_smem.index(slot)
            surplus_barriers(SURPLUS)
            shared_ds.slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS).store(ds16)
            fence_async_shared()
            exchange()
            dq_keys = _keys(p)
            if p.v.splits_channels:
                dq_keys = dq_keys.slice(WARPGROUP * dq_channels, dq_channels, dim=1)
                dq_ds = shared_ds
            else:
                dq_ds = shared_ds.slice(WARPGROUP * dq_rows, dq_rows, dim=1)
            dq = warpgroup_mma(dq_ds.permute((1, 0)), dq_keys, dq_zeros, use_acc=False, is_async=True)
            surplus_barriers("end")
            q = matrix(p.q_smem.index(slot))
            dk = warpgroup_mma(gl.convert_layout(ds16, operand, assert_trivial=True), q, dk, is_async=True)
            dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))
            slot_barrier("arrive", DOUT_EMPTY, p.v.slot_threads, slot)
            warpgroup_barrier("sync", DQ_EMPTY, WARPGROUP)
            p.dq_smem.index(WARPGROUP).store(dq)
            warpgroup_barrier("arrive", DQ_FULL, WARPGROUP)
            next_slot = (step + 1) & 1
            mbarrier.wait(p.q_full.index(next_slot), ((step + 1) >> 1) & 1, pred=i + 1 < steps)
            s_next = _issue_scores(p, zeros, step + 1, WARPGROUP)
            dk = warpgroup_mma_wait(1, deps=(dk,))
            slot_barrier("arrive", Q_EMPTY, p.v.slot_threads, slot)
            step += 1
        warpgroup_mma_wait(0, deps=(s_next,))
        exchange()  # the other warpgroup has read K for its dQ
        values.store(dv.to(dtype))
        _keys(p).slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS).store((dk * p.softmax_scale).to(dtype))
        fence_async_shared()
        where = key_coordinates(p, tile, tile.first_key + WARPGROUP * WARPGROUP_ROWS)
        mine: gl.constexpr = WARPGROUP * WARPGROUP_ROWS
        dim: gl.constexpr = len(p.v_smem.shape) - 2
        tma.async_copy_shared_to_global(p.dv_desc, where, p.v_smem.slice(mine, WARPGROUP_ROWS, dim=dim))
        tma.async_copy_shared_to_global(p.dk_desc, where, p.k_smem.index(0).slice(mine, WARPGROUP_ROWS, dim=dim))
        tma.store_wait(0)
        slot_barrier("arrive", KV_EMPTY, p.v.slot_threads, 0)
        number += 1


@gluon.jit(
    do_not_specialize=[
        "max_tiles",
        "nheads",
        "group",
        "seqlen_q",
        "seqlen_k",
        "left",
        "right",
        "gang",
        "fold",
        "turn",
        "num_blocks",
    ]
)
def backward(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    dq_desc,
    stats_desc,
    dk_desc,
    dv_desc,
    starts_q,
    starts_k,
    turns,
    schedule,
    max_tiles,
    nheads,
    group,
    seqlen_q,
    seqlen_k,
    left,
    right,
    gang,
    fold,
    turn,
    num_blocks,
    scale_log2,
    cap_scale,
    softmax_scale,
    VARIANT: gl.constexpr,
):
    """Persistent kernel; see :mod:`fa3_kernels.plan.backward_plan` for the meaning of the arguments."""
    sizes = (nheads, group, seqlen_q, seqlen_k, left, right, gang, fold, turn, num_blocks)
    p = program(
        (q_desc, k_desc, v_desc, dout_desc, dq_desc, stats_desc, dk_desc, dv_desc),
        (starts_q, starts_k, turns, schedule + gl.program_id(0) * max_tiles),
        sizes + (scale_log2, cap_scale, softmax_scale),
        VARIANT,
    )
    if VARIANT.is_wide:
        gl.warp_specialize(
            [(consume_wide, (p, 0)), (consume_wide, (p, 1)), (produce, (p,)), (add_dq, (p,))],
            [4, 1, 1],
            [VARIANT.consumer_regs, VARIANT.producer_regs, VARIANT.producer_regs],
        )
    else:
        gl.warp_specialize(
            [(_consume, (p, 0)), (_consume, (p, 1)), (produce, (p,)), (add_dq, (p,))],
            [4, 1, 1],
            [VARIANT.consumer_regs, VARIANT.producer_regs, VARIANT.producer_regs],
        )
