"""What the partitions of the backward kernel share: named barriers, the Program record, and the TMA producer warp.

The consumers are those of :mod:`fa3_kernels.gluon.backward` or :mod:`fa3_kernels.gluon.backward_wide`; a fourth
partition, :mod:`fa3_kernels.gluon.backward_dq`, adds dQ. An mbarrier ``*_full`` says that TMA has filled a slot:
``q_full`` that of Q and the row statistics, ``dout_full`` that of dO, ``kv_full`` K and V. A named barrier ``*_EMPTY``
says that all consumer threads have read a slot for the last time; the producer waits for it before it loads again.
EXCHANGE is met by all 256 consumer threads: in front of the products that read the other warpgroup's dS, and before K
and V are overwritten by dK and dV. SCORES_READY is met where one warpgroup reads the scores of the other, from head_dim
160 on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.language.core import _aggregate as aggregate

from fa3_kernels.gluon import softmax
from fa3_kernels.gluon.backward_geometry import (
    advanced,
    block_index,
    key_coordinates,
    key_tile,
    query_coordinates,
    row_blocks,
    visible_scores,
)
from fa3_kernels.gluon.boxes import allocate_boxes, load_boxes
from fa3_kernels.gluon.pipeline import full_barriers, named_barrier, slot_barrier
from fa3_kernels.plan import barriers
from fa3_kernels.plan.barriers import BackwardBarrier

Q_EMPTY = gl.constexpr(int(BackwardBarrier.Q_EMPTY))
DOUT_EMPTY = gl.constexpr(int(BackwardBarrier.DOUT_EMPTY))
KV_EMPTY = gl.constexpr(int(BackwardBarrier.KV_EMPTY))
EXCHANGE = gl.constexpr(int(BackwardBarrier.EXCHANGE))
SCORES_READY = gl.constexpr(int(BackwardBarrier.SCORES_READY))
EXCHANGE_THREADS = gl.constexpr(2 * barriers.WARPGROUP_THREADS)


@gluon.jit
def exchange():
    """Wait until all threads of both consumer warpgroups have come here."""
    named_barrier("sync", EXCHANGE, EXCHANGE_THREADS)


@gluon.jit
def scores_ready(OPERATION: gl.constexpr):
    """Arrive in the warpgroup that has stored the scores, sync in the one that reads them."""
    named_barrier(OPERATION, SCORES_READY, EXCHANGE_THREADS)


@aggregate
class Program:
    """Holds what every partition of the kernel sees: arguments, buffers in shared memory, mbarriers and the variant.

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
    """Allocate the shared memory and the mbarriers of the backward kernel and return its Program.

    The fence makes the initialised mbarriers visible to TMA.
    """
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
    """Start adding ``left``, from registers, times ``right`` to one part of a sum."""
    operand: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(left, operand, assert_trivial=True), right, sums, is_async=True)


@gluon.jit
def add_product(sums, left, right):
    """Start adding the product of weights, from registers, and a tile to a sum, part by part of its channels."""
    result = ()
    for i in gl.static_range(len(sums)):
        result = result + (_add_part(sums[i], left, right[i]),)
    return result


@gluon.jit
def scaled(sums, factor):
    """Multiply all parts of a sum by a number."""
    result = ()
    for i in gl.static_range(len(sums)):
        result = result + (sums[i] * factor,)
    return result


@gluon.jit
def store_parts(sums, dtype: gl.constexpr, tile):
    """Round the parts of dK or dV and store them to shared memory."""
    for i in gl.static_range(len(sums)):
        tile[i].store(sums[i].to(dtype))


@gluon.jit
def statistics(p, step, WHICH: gl.constexpr, s_layout: gl.constexpr):
    """Return -lse in log2 units (WHICH 0) or D (1) of a row block, one number per column of S^T."""
    tile_m: gl.constexpr = p.q_desc.block_type.shape[-2]
    both = p.stats_smem.index(step & 1)
    return gl.expand_dims(both.slice(WHICH * tile_m, tile_m).load(gl.SliceLayout(0, s_layout)), 0)


@gluon.jit
def probabilities(p, tile, rows, s, first_row, lse, WARPGROUP: gl.constexpr):
    """Return P of a block, transposed, and the factor that a softcap puts on dS, which is 1 without one.

    Blocks are masked only where some of their rows and keys do not see each other.
    """
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
def _load_keys(p, tile, number):
    """Start the loads of K and V of tile ``number``, once the consumers have stored dK and dV of the tile before."""
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
    """Run the producer warp: load K and V of every tile of this CTA, and Q, statistics and dO of its row blocks.

    K and V of a tile are loaded behind its first row block, whose slots are free earlier. A tile without a row block
    has them loaded too, as the consumers wait for them.
    """
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
        if step == first:  # no row block sees the tile
            _load_keys(p, tile, number)
        number += 1
