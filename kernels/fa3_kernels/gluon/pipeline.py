"""Roles and rings of the forward kernels: named barriers, what every partition sees, and the TMA producer warp.

Data arrives on mbarriers (``*_full``). Slots are handed back through named barriers: each consumer thread arrives, the
producer warp waits; that costs a consumer one instruction instead of a barrier over its warpgroup. Pingpong: a
warpgroup issues its GEMMs only when the one before it has issued its own. Ids: :mod:`fa3_kernels.plan.barriers`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

from fa3_kernels.gluon.boxes import allocate_boxes, load_boxes, parts, product
from fa3_kernels.gluon.geometry import key_blocks, query_coordinates, read_tile
from fa3_kernels.gluon.pages import allocate_slots, first_page, load_slot, slot_shape
from fa3_kernels.gluon.stamps import K_FREE, V_FREE, at_step, begin_stamps, stamp
from fa3_kernels.plan import barriers
from fa3_kernels.plan.barriers import NamedBarrier

K_EMPTY = gl.constexpr(int(NamedBarrier.K_EMPTY))
V_EMPTY = gl.constexpr(int(NamedBarrier.V_EMPTY))
Q_EMPTY = gl.constexpr(int(NamedBarrier.Q_EMPTY))
TURN = gl.constexpr(int(NamedBarrier.TURN))
TURN_THREADS = gl.constexpr(barriers.TURN_THREADS)


@gluon.constexpr_function
def _barrier_asm(operation, barrier, threads):
    return f"bar.{operation} {barrier}, {threads}; mov.u32 $0, 0;"


@gluon.jit
def slot_barrier(OPERATION: gl.constexpr, FIRST: gl.constexpr, THREADS: gl.constexpr, slot):
    """Arrive or sync at the named barrier of a ring slot."""
    asm: gl.constexpr = _barrier_asm(OPERATION, "$1", THREADS)
    gl.inline_asm_elementwise(asm, "=r,r", [slot + FIRST], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release(p, FIRST: gl.constexpr, slot):
    """A consumer thread has read a slot for the last time."""
    slot_barrier("arrive", FIRST, p.variant.slot_threads, slot)


@gluon.jit
def acquire(p, FIRST: gl.constexpr, slot):
    """The producer warp waits until every consumer thread has released a slot."""
    slot_barrier("sync", FIRST, p.variant.slot_threads, slot)


@gluon.jit
def named_barrier(OPERATION: gl.constexpr, ID: gl.constexpr, THREADS: gl.constexpr):
    """Arrive or sync at a named barrier whose id is known when compiled."""
    asm: gl.constexpr = _barrier_asm(OPERATION, ID, THREADS)
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(p, WARPGROUP: gl.constexpr):
    if p.variant.pingpong:
        named_barrier("sync", TURN + WARPGROUP, TURN_THREADS)


@gluon.jit
def pass_turn(p, WARPGROUP: gl.constexpr):
    if p.variant.pingpong:
        named_barrier("arrive", TURN + (WARPGROUP + 1) % p.variant.consumers, TURN_THREADS)


@aggregate
class Program:
    """Holds what every partition of the kernel sees.

    The decorator reads these annotations as types: no postponed annotations in this file.
    """

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    out_desc: tma.tensor_descriptor
    lse_ptr: gl.tensor
    partial_ptr: gl.tensor  # float32 (splits, rows, nheads, head_dim): used by split-KV alone
    sequences: gl.tensor  # int32 (batch, 4): q_start, seqlen_q, k_start, seqlen_k; used by varlen alone
    stamps: gl.tensor  # int32 (ctas, consumers + 1, steps, EVENTS): used by timelines alone
    tiles: gl.tensor  # pointer to this CTA's row of the schedule
    nheads: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor  # varlen: of all sequences together
    seqlen_k: gl.tensor
    left: gl.tensor
    right: gl.tensor
    num_splits: gl.tensor
    num_rows: gl.tensor  # rows of all sequences and query heads: what one split writes
    scale_log2: gl.tensor  # takes scores, after the cap if there is one, to log2 units
    cap_scale: gl.tensor  # takes raw scores to the argument of ex2 in the cap
    pages: gl.tuple  # see fa3_kernels.gluon.pages; empty where K and V are in no pages
    sinks: gl.tuple  # a pointer to float32 (nheads,); empty where there are none
    q_smem: gl.shared_memory_descriptor
    k_smem: gl.shared_memory_descriptor
    v_smem: gl.shared_memory_descriptor
    out_smem: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    tile_n: gl.constexpr
    v_channels: gl.constexpr  # of a box of V in shared memory
    variant: gl.constexpr  # the Variant

    @gluon.constexpr_function
    def __init__(self, descriptors, pointers, sizes, serving, buffers, full, variant):
        self.q_desc, self.k_desc, self.v_desc, self.out_desc = descriptors
        self.lse_ptr, self.partial_ptr, self.sequences, self.stamps, self.tiles = pointers
        (
            self.nheads,
            self.group,
            self.seqlen_q,
            self.seqlen_k,
            self.left,
            self.right,
            self.num_splits,
            self.num_rows,
            self.scale_log2,
            self.cap_scale,
        ) = sizes
        self.pages, self.sinks = serving
        self.q_smem, self.k_smem, self.v_smem, self.out_smem = buffers
        self.q_full, self.k_full, self.v_full = full
        k_block = self.k_desc.block_type.shape
        v_block = self.v_desc.block_type.shape
        self.tile_n = gl.constexpr(slot_shape(k_block, variant.page_boxes, variant.qk_panels)[-2])
        self.v_channels = gl.constexpr(slot_shape(v_block, variant.page_boxes, variant.v_panels)[-1])
        self.variant = gl.constexpr(variant)


@gluon.jit
def serving(variant: gl.constexpr, page_table, table_entries, page_keys, page_rows, tile_pages, sinks):
    """What a kernel is given of pages and sinks, as the Program holds it."""
    pages = ()
    if variant.page_boxes:
        pages = (page_table, table_entries, page_keys, page_rows, tile_pages)
    of_heads = ()
    if variant.has_sinks:
        of_heads = (sinks,)
    return pages, of_heads


@gluon.jit
def phase(step, SLOTS: gl.constexpr):
    """Parity of the mbarrier of a ring slot at a step."""
    return (step // SLOTS) & 1


@gluon.jit
def full_barriers(SLOTS: gl.constexpr):
    """One mbarrier per slot, armed by the producer alone."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    return full


@gluon.jit
def program(descriptors, pointers, sizes, serving, variant: gl.constexpr):
    """Allocate shared memory and mbarriers of a kernel with Q, K, V and O buffers of one dtype."""
    q_desc, k_desc, v_desc, out_desc = descriptors
    q_smem = allocate_boxes(q_desc, variant.query_slots * variant.consumers * variant.qk_boxes)
    k_smem = allocate_slots(k_desc, variant.stages * variant.qk_boxes, variant.page_boxes, variant.qk_panels)
    v_smem = allocate_slots(v_desc, variant.stages * variant.v_boxes, variant.page_boxes, variant.v_panels)
    if variant.out_in_query_slot:
        out_smem = q_smem
    else:
        out_smem = allocate_boxes(out_desc, variant.consumers * variant.staged_boxes)
    q_full = full_barriers(variant.query_slots)
    k_full = full_barriers(variant.stages)
    v_full = full_barriers(variant.stages)
    fence_async_shared()
    return Program(
        (q_desc, k_desc, v_desc, out_desc),
        pointers,
        sizes,
        serving,
        (q_smem, k_smem, v_smem, out_smem),
        (q_full, k_full, v_full),
        variant,
    )


@gluon.jit
def issue_scores(p, q, zeros, step):
    """Start S = Q K^T from zero; ``q`` are the parts of Q."""
    k = parts(p.k_smem, step % p.variant.stages, p.variant.qk_boxes)
    return product(q, k, zeros)


@gluon.jit
def load_queries(p, tile, number):
    """Start the loads of Q of this CTA's tile ``number``."""
    consumers: gl.constexpr = p.variant.consumers
    slot = number % p.variant.query_slots
    if number >= p.variant.query_slots:
        acquire(p, Q_EMPTY, slot)
    full = p.q_full.index(slot)
    mbarrier.expect(full, consumers * p.variant.qk_boxes * p.q_desc.block_type.nbytes)
    for w in gl.static_range(consumers):
        where = query_coordinates(p, tile, w)
        load_boxes(p.q_desc, where, full, p.q_smem, slot * consumers + w, p.variant.qk_boxes)


@gluon.jit
def load_keys(
    p,
    tile,
    row,
    page,
    operand,
    EMPTY: gl.constexpr,
    step,
    FREE: gl.constexpr,
    BOXES: gl.constexpr,
    PANELS: gl.constexpr,
):
    """Start the load of one key tile of K or V; FREE and the event behind it are its stamps."""
    desc, smem, full = operand
    slot = step % p.variant.stages
    if step >= p.variant.stages:
        acquire(p, EMPTY, slot)
    stamp(p, FREE)
    load_slot(p, tile, row, page, ((desc, full.index(slot), smem),), slot, ((BOXES, PANELS),))
    stamp(p, FREE + 1)


@gluon.jit
def produce(p):
    """The producer warp: Q, then K and V from right to left, of every tile of this CTA."""
    tile_n: gl.constexpr = p.tile_n
    number = 0
    step = 0
    begin_stamps(p, p.variant.consumers)
    entry = gl.load(p.tiles)
    while entry >= 0:
        tile = read_tile(p, entry)
        entry = gl.load(p.tiles + number + 1)
        blocks = key_blocks(p, tile)
        load_queries(p, tile, number)
        next_page = first_page(p, tile, (blocks.stop - 1) * tile_n)
        for j in range(blocks.stop - blocks.first):
            row = (blocks.stop - 1 - j) * tile_n
            page = next_page
            next_page = first_page(p, tile, row - tile_n)
            at_step(p, step)
            k = (p.k_desc, p.k_smem, p.k_full)
            v = (p.v_desc, p.v_smem, p.v_full)
            load_keys(p, tile, row, page, k, K_EMPTY, step, K_FREE, p.variant.qk_boxes, p.variant.qk_panels)
            load_keys(p, tile, row, page, v, V_EMPTY, step, V_FREE, p.variant.v_boxes, p.variant.v_panels)
            step += 1
        number += 1
