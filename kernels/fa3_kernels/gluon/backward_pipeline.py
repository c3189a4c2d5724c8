"""Roles and rings of the backward kernel: named barriers, what every partition sees, the producer and the warp of dQ.

In deterministic mode that warp waits for its turn at every row block, in the order of
:meth:`fa3_kernels.plan.key_tiles.Walk.parts`.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.language.core import _aggregate as aggregate

from fa3_kernels.gluon import softmax
from fa3_kernels.gluon.backward_geometry import (
    advanced,
    block_index,
    dq_coordinates,
    key_coordinates,
    key_tile,
    parts_before,
    query_coordinates,
    row_blocks,
    visible_scores,
)
from fa3_kernels.gluon.boxes import allocate_boxes, groups, load_boxes, parts
from fa3_kernels.gluon.pipeline import full_barriers, named_barrier, slot_barrier
from fa3_kernels.plan import barriers
from fa3_kernels.plan.barriers import BackwardBarrier

Q_EMPTY = gl.constexpr(int(BackwardBarrier.Q_EMPTY))
DOUT_EMPTY = gl.constexpr(int(BackwardBarrier.DOUT_EMPTY))
KV_EMPTY = gl.constexpr(int(BackwardBarrier.KV_EMPTY))
DQ_EMPTY = gl.constexpr(int(BackwardBarrier.DQ_EMPTY))
DQ_FULL = gl.constexpr(int(BackwardBarrier.DQ_FULL))
EXCHANGE = gl.constexpr(int(BackwardBarrier.EXCHANGE))
SCORES_READY = gl.constexpr(int(BackwardBarrier.SCORES_READY))
EXCHANGE_THREADS = gl.constexpr(2 * barriers.WARPGROUP_THREADS)
DQ_THREADS = gl.constexpr(barriers.slot_threads(1))


@gluon.jit
def warpgroup_barrier(OPERATION: gl.constexpr, FIRST: gl.constexpr, WARPGROUP: gl.constexpr):
    """Arrive or sync where one consumer warpgroup meets the warp that adds dQ."""
    named_barrier(OPERATION, FIRST + WARPGROUP, DQ_THREADS)


@gluon.jit
def exchange():
    """Both consumer warpgroups have come here."""
    named_barrier("sync", EXCHANGE, EXCHANGE_THREADS)


@gluon.jit
def scores_ready(OPERATION: gl.constexpr):
    """Let the warpgroup that forms the scores meet the other one, which reads them."""
    named_barrier(OPERATION, SCORES_READY, EXCHANGE_THREADS)


@builtin
def add_in_memory(desc, coordinates, buffer, _semantic=None):
    """Start a TMA addition of a shared fp32 tile to memory."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, buffer.handle)


@aggregate
class Program:
    """Holds what every partition of the kernel sees.

    The decorator reads these annotations as types: no postponed annotations in this file.
    """

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    dout_desc: tma.tensor_descriptor
    dq_desc: tma.tensor_descriptor  # float32 sums (rows of all heads in whole blocks, channels)
    stats_desc: tma.tensor_descriptor  # float32: of every row block -lse * log2(e), then D
    dk_desc: tma.tensor_descriptor
    dv_desc: tma.tensor_descriptor
    starts_q: gl.tensor  # int32 (batch + 1,) of packed sequences
    starts_k: gl.tensor
    turns: gl.tensor  # int32, one per row block: parts that its dQ has taken; deterministic mode alone
    tiles: gl.tensor  # pointer to this CTA's row of the schedule
    nheads: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor  # varlen: the longest
    seqlen_k: gl.tensor
    left: gl.tensor
    right: gl.tensor
    gang: gl.tensor  # these three: :class:`fa3_kernels.plan.key_tiles.Walk`
    fold: gl.tensor
    turn: gl.tensor
    num_blocks: gl.tensor  # row blocks of one head of all sequences
    scale_log2: gl.tensor  # as of the forward
    cap_scale: gl.tensor
    softmax_scale: gl.tensor
    q_smem: gl.shared_memory_descriptor
    k_smem: gl.shared_memory_descriptor
    v_smem: gl.shared_memory_descriptor
    dout_smem: gl.shared_memory_descriptor
    stats_smem: gl.shared_memory_descriptor
    ds_smem: gl.shared_memory_descriptor
    dq_smem: gl.shared_memory_descriptor
    scores_smem: gl.shared_memory_descriptor  # float32 (keys, rows): where roles are split
    q_full: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    variant: gl.constexpr  # the BackwardVariant

    @gluon.constexpr_function
    def __init__(self, descriptors, pointers, sizes, buffers, full, variant):
        (
            self.q_desc,
            self.k_desc,
            self.v_desc,
            self.dout_desc,
            self.dq_desc,
            self.stats_desc,
            self.dk_desc,
            self.dv_desc,
        ) = descriptors
        self.starts_q, self.starts_k, self.turns, self.tiles = pointers
        (
            self.nheads,
            self.group,
            self.seqlen_q,
            self.seqlen_k,
            self.left,
            self.right,
            self.gang,
            self.fold,
            self.turn,
            self.num_blocks,
            self.scale_log2,
            self.cap_scale,
            self.softmax_scale,
        ) = sizes
        (
            self.q_smem,
            self.k_smem,
            self.v_smem,
            self.dout_smem,
            self.stats_smem,
            self.ds_smem,
            self.dq_smem,
            self.scores_smem,
        ) = buffers
        self.q_full, self.dout_full, self.kv_full = full
        self.variant = gl.constexpr(variant)


@gluon.jit
def program(descriptors, pointers, sizes, variant: gl.constexpr):
    """Allocate shared memory and mbarriers."""
    q_desc, k_desc, v_desc, dout_desc, dq_desc, stats_desc, dk_desc, dv_desc = descriptors
    tile_m: gl.constexpr = q_desc.block_type.shape[-2]
    tile_n: gl.constexpr = k_desc.block_type.shape[-2]
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tile_n, tile_m], q_desc.dtype)
    q_smem = allocate_boxes(q_desc, variant.stages * variant.qk_boxes)
    k_smem = allocate_boxes(k_desc, variant.qk_boxes)
    v_smem = allocate_boxes(v_desc, variant.v_boxes)
    dout_smem = allocate_boxes(dout_desc, variant.dout_stages * variant.v_boxes)
    stats_smem = gl.allocate_shared_memory(
        gl.float32, [variant.stages] + stats_desc.block_type.shape, stats_desc.layout
    )
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [variant.ds_tiles, tile_n, tile_m], ds_layout)
    dq_smem = allocate_boxes(dq_desc, variant.dq_boxes)
    scores_smem = dq_smem
    if variant.is_wide:
        scores_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tile_n, tile_m], gl.float32)
        scores_smem = gl.allocate_shared_memory(gl.float32, [tile_n, tile_m], scores_layout)
    q_full = full_barriers(variant.stages)
    dout_full = full_barriers(variant.dout_stages)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    fence_async_shared()
    return Program(
        (q_desc, k_desc, v_desc, dout_desc, dq_desc, stats_desc, dk_desc, dv_desc),
        pointers,
        sizes,
        (q_smem, k_smem, v_smem, dout_smem, stats_smem, ds_smem, dq_smem, scores_smem),
        (q_full, dout_full, kv_full),
        variant,
    )


@gluon.jit
def _add_part(sums, left, right):
    operand: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(left, operand, assert_trivial=True), right, sums, is_async=True)


@gluon.jit
def add_product(sums, left, right):
    """Start adding the product of weights, from registers, and a tile to the parts of a sum."""
    result = ()
    for i in gl.static_range(len(sums)):
        result = result + (_add_part(sums[i], left, right[i]),)
    return result


@gluon.jit
def scaled(sums, factor):
    """The parts of a sum times a number."""
    result = ()
    for i in gl.static_range(len(sums)):
        result = result + (sums[i] * factor,)
    return result


@gluon.jit
def store_parts(sums, dtype: gl.constexpr, tile):
    """Round the parts of dK or dV to shared memory."""
    for i in gl.static_range(len(sums)):
        tile[i].store(sums[i].to(dtype))


@gluon.jit
def statistics(p, step, WHICH: gl.constexpr, s_layout: gl.constexpr):
    """-lse in log2 units (0) or D (1) of a row block, one per column of S^T."""
    tile_m: gl.constexpr = p.q_desc.block_type.shape[-2]
    both = p.stats_smem.index(step & 1)
    return gl.expand_dims(both.slice(WHICH * tile_m, tile_m).load(gl.SliceLayout(0, s_layout)), 0)


@gluon.jit
def probabilities(p, tile, rows, s, first_row, lse, WARPGROUP: gl.constexpr):
    """P of a block and what the softcap multiplies dS with."""
    tile_m: gl.constexpr = p.q_desc.block_type.shape[-2]
    is_masked = (first_row < rows.right_unmasked) | (first_row + tile_m > rows.left_unmasked)
    slope = 1.0
    if p.variant.softcap:
        s = softmax.capped(s, p.cap_scale)
        slope = gl.fma(-s, s, 1.0)
    if p.variant.is_masked:  # noqa: SIM102 (known when compiled, and known when run)
        if is_masked:
            s = visible_scores(p, s, tile, first_row, WARPGROUP)
    return softmax.ex2(gl.fma(s, p.scale_log2, lse)), slope


@gluon.jit
def _seen(word):
    """How many parts a row block's dQ has taken, as memory says now."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [word], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _take_turn(word, count, seen):
    """Wait until a row block's dQ has taken ``count`` parts; memory is not asked where ``seen`` says so already."""
    gl.inline_asm_elementwise(
        "{ .reg .pred %waits; .reg .b32 %taken; mov.b32 %taken, $3; WAIT: setp.lt.s32 %waits, %taken, $2; "
        "@%waits ld.acquire.gpu.global.b32 %taken, [$1]; @%waits bra WAIT; fence.proxy.async.global; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [word, count, seen],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _pass_asm(pending):
    return (
        f"{{ .reg .pred %first; .reg .b32 %lane; cp.async.bulk.wait_group {pending}; fence.proxy.async.global; "
        "bar.warp.sync -1; mov.u32 %lane, %laneid; setp.eq.s32 %first, %lane, 0; "
        "@%first red.release.gpu.global.add.s32 [$1], 1; mov.b32 $0, 0; }"
    )


@gluon.jit
def _pass_turn(word, PENDING: gl.constexpr):
    """Say that a part was added, once all but PENDING later additions truly are in memory.

    A wait for the reads of shared memory alone would be too early.
    """
    asm: gl.constexpr = _pass_asm(PENDING)
    gl.inline_asm_elementwise(asm, "=r,l", [word], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_keys(p, tile, number):
    """Start the loads of K and V of a tile once those of the tile before are no longer read."""
    if number > 0:
        slot_barrier("sync", KV_EMPTY, p.variant.slot_threads, 0)
    where = key_coordinates(p, tile, tile.first_key)
    mbarrier.expect(
        p.kv_full, p.variant.qk_boxes * p.k_desc.block_type.nbytes + p.variant.v_boxes * p.v_desc.block_type.nbytes
    )
    load_boxes(p.k_desc, where, p.kv_full, p.k_smem, 0, p.variant.qk_boxes)
    load_boxes(p.v_desc, where, p.kv_full, p.v_smem, 0, p.variant.v_boxes)


@gluon.jit
def produce(p):
    """The producer warp: K and V of every tile of this CTA, behind the first row block; then the other row blocks."""
    tile_m: gl.constexpr = p.q_desc.block_type.shape[-2]
    stats: gl.constexpr = p.stats_desc.block_type.shape[0]
    number = 0
    step = 0
    entry = gl.load(p.tiles)
    while entry >= 0:
        tile = key_tile(p, entry)
        entry = gl.load(p.tiles + number + 1)
        rows = row_blocks(p, tile)
        first = step
        for member in range(p.group):
            head = tile.kv_head * p.group + member
            cursor = rows.start
            for _i in range(rows.count):
                block = rows.first + cursor
                cursor = advanced(p, rows, cursor)
                where = query_coordinates(p, tile, head, block * tile_m)
                slot = step % p.variant.stages
                if step >= p.variant.stages:
                    slot_barrier("sync", Q_EMPTY, p.variant.slot_threads, slot)
                full = p.q_full.index(slot)
                mbarrier.expect(full, p.variant.qk_boxes * p.q_desc.block_type.nbytes + p.stats_desc.block_type.nbytes)
                load_boxes(p.q_desc, where, full, p.q_smem, slot, p.variant.qk_boxes)
                of_block = block_index(p, tile, head, block) * stats
                tma.async_copy_global_to_shared(p.stats_desc, [of_block], full, p.stats_smem.index(slot))
                slot = step % p.variant.dout_stages
                if step >= p.variant.dout_stages:
                    slot_barrier("sync", DOUT_EMPTY, p.variant.slot_threads, slot)
                full = p.dout_full.index(slot)
                mbarrier.expect(full, p.variant.v_boxes * p.dout_desc.block_type.nbytes)
                load_boxes(p.dout_desc, where, full, p.dout_smem, slot, p.variant.v_boxes)
                if step == first:
                    _load_keys(p, tile, number)
                step += 1
        if step == first:
            _load_keys(p, tile, number)
        number += 1


@gluon.constexpr_function
def _share(variant, warpgroup):
    """Boxes of dQ that a warpgroup stages, as (first, count)."""
    return groups(variant.qk_boxes)[warpgroup] if variant.qk_boxes > 1 else (warpgroup, 1)


@gluon.jit
def share_of_dq(p, WARPGROUP: gl.constexpr):
    """Where a warpgroup stages its share of dQ, or the part that it hands on."""
    if p.variant.qk_boxes > 1:
        return parts(p.dq_smem, 0, p.variant.qk_boxes)[WARPGROUP]
    else:
        return p.dq_smem.index(WARPGROUP)


@gluon.jit
def _add_boxes(p, tile, head, block, part, WARPGROUP: gl.constexpr):
    """Start the additions of what a warpgroup has staged."""
    first: gl.constexpr = _share(p.variant, WARPGROUP)[0]
    stop: gl.constexpr = first + _share(p.variant, WARPGROUP)[1]
    for i in gl.static_range(first, stop):
        add_in_memory(p.dq_desc, dq_coordinates(p, tile, head, block, part, i), p.dq_smem.index(i))


@gluon.jit
def _start_part(p, tile, head, block, part):
    """Start the additions of what both warpgroups hand on of a row block, or of one half of it."""
    for w in gl.static_range(2):
        warpgroup_barrier("sync", DQ_FULL, w)
        fence_async_shared()  # of what the consumers wrote: here it costs them no time
        _add_boxes(p, tile, head, block, part, w)


@gluon.jit
def _hand_back(p):
    """Give what is staged back to the consumers, as soon as memory has read it."""
    for w in gl.static_range(2):
        tma.store_wait(1 - w)  # the second warpgroup's share is one box
        warpgroup_barrier("arrive", DQ_EMPTY, w)


@gluon.jit
def _add_in_turn(p, tile, head, rows):
    """Add all row blocks of a head, each in its turn, for which memory is asked while it reads the one before.

    A turn is passed when its part is in memory. Of parts in two halves, as at head_dim 256, that is not waited for
    until the first half of the next row block is on its way, so that the consumers have the buffers back in time:
    :mod:`fa3_kernels.plan.key_tiles` gives tiles a distance of two row blocks there.
    """
    dq_parts: gl.constexpr = p.variant.dq_parts
    is_late: gl.constexpr = dq_parts == 2
    cursor = rows.start
    word = p.turns + block_index(p, tile, head, rows.first + cursor)
    seen = cursor * 0
    for i in range(rows.count):
        block = rows.first + cursor
        cursor = advanced(p, rows, cursor)
        before = word
        word = p.turns + block_index(p, tile, head, block)
        _take_turn(word, parts_before(p, tile, block), seen)
        if is_late:
            _start_part(p, tile, head, block, 0)
            _hand_back(p)
            if i > 0:
                _pass_turn(before, p.variant.dq_boxes)
        _start_part(p, tile, head, block, dq_parts - 1)
        seen = _seen(p.turns + block_index(p, tile, head, rows.first + cursor))
        _hand_back(p)
        if not is_late:
            _pass_turn(word, 0)
    if is_late:  # noqa: SIM102 (known when compiled, and known when run)
        if rows.count > 0:
            _pass_turn(word, 0)


@gluon.jit
def add_dq(p):
    """The warp that adds dQ: by TMA to fp32 sums in memory, in deterministic mode when its turn has come."""
    dq_parts: gl.constexpr = p.variant.dq_parts
    number = 0
    entry = gl.load(p.tiles)
    for w in gl.static_range(2):
        warpgroup_barrier("arrive", DQ_EMPTY, w)
    while entry >= 0:
        tile = key_tile(p, entry)
        entry = gl.load(p.tiles + number + 1)
        rows = row_blocks(p, tile)
        for member in range(p.group):
            head = tile.kv_head * p.group + member
            if p.variant.is_deterministic:
                _add_in_turn(p, tile, head, rows)
            else:
                cursor = rows.start
                for _i in range(rows.count):
                    block = rows.first + cursor
                    cursor = advanced(p, rows, cursor)
                    for part in gl.static_range(dq_parts):
                        _start_part(p, tile, head, block, part)
                        _hand_back(p)
        number += 1
