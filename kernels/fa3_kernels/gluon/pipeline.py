"""What the forward kernels share: their barriers and rings, the Program record, and the TMA producer warp.

A CTA has one to three consumer warpgroups of 64 query rows each and a producer. The producer fills slots of Q, K and V
in shared memory by TMA, and the consumers read them. An mbarrier ``*_full`` guards a slot against being read too early:
the producer arms it with the bytes it will load, and consumers wait for it. A named barrier ``*_EMPTY`` guards a slot
against being overwritten too early: every consumer thread arrives at it after its last read, and the producer warp
waits. An arrival costs a consumer one instruction, where an mbarrier would take a barrier over its warpgroup. The named
barriers TURN make the pingpong: a consumer warpgroup issues its GEMMs only when the one before it has issued its own.

The consumers are those of :mod:`fa3_kernels.gluon.forward_fp16` and :mod:`fa3_kernels.gluon.forward_fp8`; the latter
has a producer of its own, :mod:`fa3_kernels.gluon.produce_fp8`. Ids of named barriers:
:mod:`fa3_kernels.plan.barriers`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

from fa3_kernels.gluon.boxes import allocate_boxes, load_boxes, parts, product
from fa3_kernels.gluon.geometry import key_blocks, query_coordinates, read_tile
from fa3_kernels.gluon.pages import allocate_slots, first_page, hold_rows, landed, load_slot, slot_shape
from fa3_kernels.gluon.stamps import K_FREE, V_FREE, at_step, begin_stamps, stamp
from fa3_kernels.plan import barriers
from fa3_kernels.plan.barriers import NamedBarrier

K_EMPTY = gl.constexpr(int(NamedBarrier.K_EMPTY))
V_EMPTY = gl.constexpr(int(NamedBarrier.V_EMPTY))
Q_EMPTY = gl.constexpr(int(NamedBarrier.Q_EMPTY))
TURN = gl.constexpr(int(NamedBarrier.TURN))
first_of_ring = gluon.constexpr_function(barriers.first_of_ring)
TURN_THREADS = gl.constexpr(barriers.TURN_THREADS)


@gluon.constexpr_function
def _barrier_asm(operation, barrier, threads):
    """PTX of one arrival or wait at a named barrier; the assembly must give a value, so it gives 0."""
    return f"bar.{operation} {barrier}, {threads}; mov.u32 $0, 0;"


@gluon.jit
def slot_barrier(OPERATION: gl.constexpr, FIRST: gl.constexpr, THREADS: gl.constexpr, slot):
    """Arrive or sync at the named barrier of a ring slot, whose id, FIRST + slot, is known only at run time.

    Both calls name the number of threads that must come; sync waits for them, arrive does not.
    """
    asm: gl.constexpr = _barrier_asm(OPERATION, "$1", THREADS)
    gl.inline_asm_elementwise(asm, "=r,r", [slot + FIRST], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release(p, FIRST: gl.constexpr, slot):
    """Say that this consumer thread has read a slot for the last time; run by every thread of every consumer."""
    slot_barrier("arrive", first_of_ring(FIRST, p.variant.stages), p.variant.slot_threads, slot)


@gluon.jit
def acquire(p, FIRST: gl.constexpr, slot):
    """Wait, in the producer, until every consumer thread has released a slot, so that it may be overwritten."""
    slot_barrier("sync", first_of_ring(FIRST, p.variant.stages), p.variant.slot_threads, slot)


@gluon.jit
def named_barrier(OPERATION: gl.constexpr, ID: gl.constexpr, THREADS: gl.constexpr):
    """Arrive or sync at a named barrier whose id is known when the kernel is compiled."""
    asm: gl.constexpr = _barrier_asm(OPERATION, ID, THREADS)
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(p, WARPGROUP: gl.constexpr):
    """Wait, in a consumer warpgroup, until the one before it has passed its turn; without pingpong do nothing."""
    if p.variant.pingpong:
        named_barrier("sync", TURN + WARPGROUP, TURN_THREADS)


@gluon.jit
def pass_turn(p, WARPGROUP: gl.constexpr):
    """Let the next consumer warpgroup issue its GEMMs; without pingpong do nothing."""
    if p.variant.pingpong:
        named_barrier("arrive", TURN + (WARPGROUP + 1) % p.variant.consumers, TURN_THREADS)


@aggregate
class Program:
    """Holds what every partition of the kernel sees: arguments, buffers in shared memory, mbarriers and the variant.

    The decorator reads these annotations as types: no postponed annotations in this file.
    """

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    out_desc: tma.tensor_descriptor
    lse_ptr: gl.tensor
    partial_ptr: gl.tensor  # float32 (splits, rows, nheads, head_dim) with split-KV; O where stored_channels are set
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
    chunk: gl.tuple  # the keys of a chunk; empty where rows see keys of others
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
        self.pages, self.sinks, self.chunk = serving
        self.q_smem, self.k_smem, self.v_smem, self.out_smem = buffers
        self.q_full, self.k_full, self.v_full = full
        k_block = self.k_desc.block_type.shape
        v_block = self.v_desc.block_type.shape
        self.tile_n = gl.constexpr(slot_shape(k_block, variant.page_boxes, variant.qk_panels)[-2])
        self.v_channels = gl.constexpr(slot_shape(v_block, variant.page_boxes, variant.v_panels)[-1])
        self.variant = gl.constexpr(variant)


@gluon.jit
def serving(variant: gl.constexpr, pages, sinks, gathered, attention_chunk, TILE_N: gl.constexpr):
    """Return a kernel's arguments for pages, sinks and chunks as the Program holds them: tuples, empty where there are
    none.
    """
    of_tiles = ()
    if variant.gathered_v:
        rows = gl.allocate_shared_memory(gl.int32, [TILE_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        of_tiles = pages + (rows,) + gathered
    elif variant.page_boxes:
        of_tiles = pages
    of_heads = ()
    if variant.has_sinks:
        of_heads = (sinks,)
    of_rows = ()
    if variant.is_chunked:
        of_rows = (attention_chunk,)
    return of_tiles, of_heads, of_rows


@gluon.jit
def phase(step, SLOTS: gl.constexpr):
    """Return the parity of the mbarrier of a ring slot at a step: it flips every time that the slot is filled again."""
    return (step // SLOTS) & 1


@gluon.jit
def full_barriers(SLOTS: gl.constexpr):
    """Make one mbarrier per slot; its count of 1 is the producer, which arms it, and TMA completes the bytes."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    return full


@gluon.jit
def program(descriptors, pointers, sizes, serving, variant: gl.constexpr):
    """Allocate the shared memory and the mbarriers of a forward kernel and return its Program.

    Rings hold Q, K and V in boxes (:mod:`fa3_kernels.gluon.boxes`). O has buffers of its own, or those of Q where
    memory is short. The fence makes the initialised mbarriers visible to TMA.
    """
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
    """Start S = Q K^T of key tile ``step`` from zero, asynchronously; ``q`` are the parts of Q."""
    k = parts(p.k_smem, step % p.variant.stages, p.variant.qk_boxes, p.variant.qk_spare)
    return product(q, k, zeros)


@gluon.jit
def queries(p, number, WARPGROUP: gl.constexpr):
    """Return this warpgroup's Q of tile ``number`` in shared memory, in parts of its channels."""
    return parts(
        p.q_smem,
        number % p.variant.query_slots * p.variant.consumers + WARPGROUP,
        p.variant.qk_boxes,
        p.variant.qk_spare,
    )


@gluon.jit
def start_tile(p, zeros, number, step, WARPGROUP: gl.constexpr):
    """Wait for Q and the first K of a tile, then start its first scores in this warpgroup's turn."""
    mbarrier.wait(p.q_full.index(number % p.variant.query_slots), phase(number, p.variant.query_slots))
    mbarrier.wait(p.k_full.index(step % p.variant.stages), phase(step, p.variant.stages))
    take_turn(p, WARPGROUP)
    s = issue_scores(p, queries(p, number, WARPGROUP), zeros, step)
    pass_turn(p, WARPGROUP)
    return s


@gluon.jit
def load_queries(p, tile, number):
    """Start the loads of Q of this CTA's tile ``number``, counted from 0; run by the producer.

    A slot of Q is acquired from the consumers unless it is used for the first time.
    """
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
    """Start the load of one key tile of K or V; run by the producer warp.

    ``row`` is its first key, ``page`` what :func:`fa3_kernels.gluon.pages.first_page` gave, ``operand`` a descriptor
    with its ring and its mbarriers. ``step`` counts the key tiles of the CTA. FREE is the stamp of the acquired slot,
    and the event behind it that of the started load.
    """
    desc, smem, full = operand
    slot = step % p.variant.stages
    if step >= p.variant.stages:
        acquire(p, EMPTY, slot)
    stamp(p, FREE)
    of_v: gl.constexpr = FREE == V_FREE
    load_slot(p, tile, row, page, ((desc, full.index(slot), smem),), slot, ((BOXES, PANELS),), of_v)
    stamp(p, FREE + 1)


@gluon.jit
def produce(p):
    """Run the producer warp of the 16-bit forward: load Q, then K and V from right to left, of every tile of this CTA.

    The schedule ends with a negative entry. The next entry and the next tile's first page are read one step ahead, so
    that no load waits for them.
    """
    tile_n: gl.constexpr = p.tile_n
    lag: gl.constexpr = p.variant.stages // 2 - 1  # steps after which a gathered slot is said to be full
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
            hold_rows(p, page)
            load_keys(p, tile, row, page, k, K_EMPTY, step, K_FREE, p.variant.qk_boxes, p.variant.qk_panels)
            if j > lag:
                landed(p, p.v_full, step - 1 - lag, 2 * lag + 1)
            load_keys(p, tile, row, page, v, V_EMPTY, step, V_FREE, p.variant.v_boxes, p.variant.v_panels)
            if j >= lag:
                landed(p, p.k_full, step - lag, 2 * lag + 1)
            step += 1
        for _i in gl.static_range(lag):
            if blocks.stop - blocks.first > 1:
                landed(p, p.v_full, step - 2, 2)
            landed(p, p.k_full, step - 1, 1)
        landed(p, p.v_full, step - 1, 0)
        number += 1
