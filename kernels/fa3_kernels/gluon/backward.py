"""The backward kernel: two consumer warpgroups of 64 keys, a TMA producer warp, and a warp that adds dQ in memory.

A CTA keeps one tile of K and V and walks over the row blocks of all query heads that share it, so that dK and dV of a
group of heads are one chain of additions. S and dP are formed transposed (keys by rows), so that their P and dS are, in
registers, the left operands of dV = P^T dO and dK = dS^T Q. For dQ = dS K the two warpgroups exchange dS through shared
memory and form half of the tile each; the fourth partition adds the halves to fp32 sums in memory by TMA
(:mod:`.backward_dq`). The scores of the next row block are issued with dK of this one, so that its exponentials run
beside dP. From head_dim 160 on the consumers are those of :mod:`.backward_wide`. :mod:`.backward_pipeline` has the
producer and says what each barrier guards; :mod:`.backward_ends` has the kernels before and after this one. The order
of every operation on a value is that of :mod:`fa3_kernels.twin.backward`.

Triton puts two barriers over the warps of a warpgroup around the exchange of dS. :mod:`.surplus_barriers` takes them
out of the compiled code, since named barriers order everything that they would order:

- *dS before the products of dQ that read it.* Every thread executes the fence behind its own store and then meets all
  256 threads in ``exchange()``, which stands in front of the products.
- *The products of dQ before dS overwrites what they read.* There are two slots for dS, so the last products that read a
  slot are those of two row blocks before. Every warp of both warpgroups waits for these products, and then comes to the
  ``exchange()`` of the row block between. The slot is written again only behind that.
- *One staged dQ before the next.* A thread writes the same elements in every row block. DQ_EMPTY and DQ_FULL, for which
  all 128 threads come, stand around the TMA that reads them.
- *Waits for mbarriers.* No thread misses a phase: a slot of Q, dO or keys is loaded again only after all 256 threads
  have released it, each behind its own wait. The statistics are read beside these barriers and belong to a slot of Q.
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

from fa3_kernels.gluon.backward_dq import DQ_EMPTY, DQ_FULL, add_dq, share_of_dq, warpgroup_barrier
from fa3_kernels.gluon.backward_geometry import advanced, key_coordinates, key_tile, opaque, row_blocks
from fa3_kernels.gluon.backward_pipeline import (
    DOUT_EMPTY,
    KV_EMPTY,
    Q_EMPTY,
    add_product,
    exchange,
    probabilities,
    produce,
    program,
    scaled,
    statistics,
    store_parts,
)
from fa3_kernels.gluon.backward_wide import consume_wide
from fa3_kernels.gluon.boxes import awaited, no_sums, parts, product
from fa3_kernels.gluon.geometry import WARPGROUP_ROWS
from fa3_kernels.gluon.pipeline import slot_barrier
from fa3_kernels.gluon.surplus_barriers import surplus_barriers

SURPLUS = gl.constexpr(2)  # barriers of Triton's in a row block that are left out


@gluon.jit
def _keys(p):
    """Return K as parts of its channels, at an address that is new to the compiler.

    Otherwise LLVM computes the descriptors of K's products once and holds them in 16 registers of every thread. Each
    step then moves them to uniform registers (R2UR, for which a warp waits), and ptxas spills what has no room.
    """
    return parts(p.k_smem, opaque(0), p.variant.qk_boxes)


@gluon.jit
def _own(tile, WARPGROUP: gl.constexpr):
    """Return a warpgroup's 64 keys of every part of a tile."""
    result = ()
    for i in gl.static_range(len(tile)):
        result = result + (tile[i].slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS),)
    return result


@gluon.jit
def _issue_scores(p, zeros, step, WARPGROUP: gl.constexpr):
    """Start S^T = K Q^T of a warpgroup's keys and of row block ``step``, from zero."""
    return product(_own(_keys(p), WARPGROUP), parts(p.q_smem, step & 1, p.variant.qk_boxes), zeros)


@gluon.jit
def _issue_dq(p, zeros, ds, WARPGROUP: gl.constexpr):
    """Start a warpgroup's share of dQ = dS K, from zero: some of the channels, or half of the rows.

    ``ds`` is the dS of both warpgroups in shared memory, (keys, rows).
    """
    keys = _keys(p)
    rows: gl.constexpr = zeros.shape[0]
    channels: gl.constexpr = zeros.shape[1]
    if p.variant.qk_boxes > 1:
        of_dq = keys[WARPGROUP]
    elif p.variant.splits_channels:
        of_dq = keys[0].slice(WARPGROUP * channels, channels, dim=1)
    else:
        of_dq = keys[0]
        ds = ds.slice(WARPGROUP * rows, rows, dim=1)
    return warpgroup_mma(ds.permute((1, 0)), of_dq, zeros, use_acc=False, is_async=True)


@gluon.jit
def _store_keys(desc, where, buffers, BOXES: gl.constexpr, WARPGROUP: gl.constexpr):
    """Start the TMA store of a warpgroup's 64 keys of dK or dV, box by box of the channels."""
    channels: gl.constexpr = desc.block_type.shape[-1]
    dim: gl.constexpr = len(desc.block_type.shape) - 2
    for i in gl.static_range(BOXES):
        own = buffers.index(i).slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS, dim=dim)
        tma.async_copy_shared_to_global(desc, where[:-1] + [i * channels], own)


@gluon.jit
def _consume(p, WARPGROUP: gl.constexpr):
    """Run a consumer warpgroup: its 64 keys of every tile of this CTA, and its share of their dQ."""
    tile_m: gl.constexpr = p.q_desc.block_type.shape[-2]
    dtype: gl.constexpr = p.q_desc.dtype
    staged = share_of_dq(p, WARPGROUP)
    dq_rows: gl.constexpr = staged.shape[0]
    dq_channels: gl.constexpr = staged.shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile_m, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dq_channels, 16])
    zeros = gl.zeros([WARPGROUP_ROWS, tile_m], gl.float32, s_layout)
    dq_zeros = gl.zeros([dq_rows, dq_channels], gl.float32, dq_layout)
    values = _own(parts(p.v_smem, 0, p.variant.v_boxes), WARPGROUP)
    number = 0
    step = 0
    entry = gl.load(p.tiles)
    while entry >= 0:
        tile = key_tile(p, entry)
        entry = gl.load(p.tiles + number + 1)
        rows = row_blocks(p, tile)
        steps = rows.count * p.group
        dk = no_sums(p.variant.qk_boxes, p.k_desc.block_type.shape[-1])
        dv = no_sums(p.variant.v_boxes, p.v_desc.block_type.shape[-1])
        mbarrier.wait(p.kv_full, number & 1)
        mbarrier.wait(p.q_full.index(step & 1), (step >> 1) & 1, pred=steps > 0)
        s_next = _issue_scores(p, zeros, step, WARPGROUP)
        cursor = rows.start
        for i in range(steps):
            step = opaque(step)
            slot = step & 1  # of two for Q, dO and dS; the phase of an mbarrier is that of its use, (step >> 1) & 1
            first_row = (rows.first + cursor) * tile_m
            cursor = advanced(p, rows, cursor)
            s = warpgroup_mma_wait(0, deps=(s_next,))
            mbarrier.wait(p.dout_full.index(slot), (step >> 1) & 1)
            dout = parts(p.dout_smem, slot, p.variant.v_boxes)
            dp = product(values, dout, zeros)
            lse = statistics(p, step, 0, s_layout)
            weights, slope = probabilities(p, tile, rows, s, first_row, lse, WARPGROUP)
            p16 = weights.to(dtype)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            dots = statistics(p, step, 1, s_layout)
            dv = add_product(dv, p16, dout)
            ds = weights * (dp - dots)
            if p.variant.softcap:
                ds = ds * slope
            ds16 = ds.to(dtype)
            shared_ds = p.ds_smem.index(slot)
            surplus_barriers(SURPLUS)
            shared_ds.slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS).store(ds16)
            fence_async_shared()
            exchange()  # the other warpgroup's dS is stored, too
            dq = _issue_dq(p, dq_zeros, shared_ds, WARPGROUP)
            surplus_barriers("end")
            dk = add_product(dk, ds16, parts(p.q_smem, slot, p.variant.qk_boxes))
            dq_dv = warpgroup_mma_wait(len(dk), deps=(dq,) + dv)
            dq = dq_dv[0]
            dv = dq_dv[1:]
            slot_barrier("arrive", DOUT_EMPTY, p.variant.slot_threads, slot)  # dP and dV have read dO
            # DQ_EMPTY: the dQ staged before has been read
            warpgroup_barrier("sync", DQ_EMPTY, WARPGROUP)
            staged.store(dq)
            warpgroup_barrier("arrive", DQ_FULL, WARPGROUP)
            next_slot = (step + 1) & 1
            mbarrier.wait(p.q_full.index(next_slot), ((step + 1) >> 1) & 1, pred=i + 1 < steps)
            s_next = _issue_scores(p, zeros, step + 1, WARPGROUP)
            dk = awaited(dk, len(dk))
            slot_barrier("arrive", Q_EMPTY, p.variant.slot_threads, slot)  # S and dK have read Q
            step += 1
        warpgroup_mma_wait(0, deps=(s_next,))  # behind the last row block these scores mean nothing
        # dK and dV leave through the memory of K and V. Both warpgroups join first, as each reads all of K for its dQ.
        exchange()
        store_parts(dv, dtype, values)
        store_parts(scaled(dk, p.softmax_scale), dtype, _own(_keys(p), WARPGROUP))
        fence_async_shared()
        where = key_coordinates(p, tile, tile.first_key + WARPGROUP * WARPGROUP_ROWS)
        _store_keys(p.dv_desc, where, p.v_smem, p.variant.v_boxes, WARPGROUP)
        _store_keys(p.dk_desc, where, p.k_smem, p.variant.qk_boxes, WARPGROUP)
        tma.store_wait(0)
        slot_barrier("arrive", KV_EMPTY, p.variant.slot_threads, 0)
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
    """Run the persistent kernel; :mod:`fa3_kernels.plan.backward` makes its arguments and says what they mean."""
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
