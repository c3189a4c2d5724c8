"""The e4m3 forward kernel: one to three consumer warpgroups of 64 rows, and one warpgroup that loads and transposes V.

P V of a block is summed by the tensor core from zero and then added to O in fp32 (promotion); the rescaling of O is
part of the same fused multiply-add. The reason is that e4m3 wgmma keeps 13 bits of its sum: chained through it, the
output loses 10 % at 8k keys when V has mean 1.

How many products are in flight depends on the registers. Where V has up to 128 channels, or nothing is promoted, S of
the next block is started first and P V behind it; with promotion at 128 channels P V is taken in two slices with one
partial sum each, of 96 and 192 channels these are all boxes but the last, and that. Sums over chunks of the keys have
two parts in flight, and S is started behind the last of them. With promotion from 160 channels on each slice, and S, is
started when the one before is done. :mod:`fa3_kernels.gluon.sums_fp8` and :mod:`fa3_kernels.gluon.rotated_fp8` have
these orders, :mod:`fa3_kernels.gluon.produce_fp8` the producer, and :mod:`fa3_kernels.gluon.pipeline` says what each
barrier guards. The order of every operation on a value is that of :mod:`fa3_kernels.twin.forward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from fa3_kernels.gluon import rotated_fp8, softmax
from fa3_kernels.gluon.boxes import no_sums
from fa3_kernels.gluon.dependent import await_grid
from fa3_kernels.gluon.descale import (
    P_OFFSET_LOG2,
    Scaling,
    block_factors,
    row_factors,
)
from fa3_kernels.gluon.geometry import (
    WARPGROUP_ROWS,
    key_blocks,
    read_tile,
    read_tile_again,
    visible_scores,
)
from fa3_kernels.gluon.operand_fp8 import pack_chunks
from fa3_kernels.gluon.output import scaled
from fa3_kernels.gluon.output_fp8 import store
from fa3_kernels.gluon.pages import slot_shape
from fa3_kernels.gluon.pipeline import (
    K_EMPTY,
    Q_EMPTY,
    full_barriers,
    pass_turn,
    phase,
    program,
    queries,
    release,
    serving,
    start_tile,
)
from fa3_kernels.gluon.produce_fp8 import produce_fp8
from fa3_kernels.gluon.stamps import (
    ISSUED,
    SCORES,
    at_step,
    begin_stamps,
    declare_stamps,
    stamp,
)
from fa3_kernels.gluon.sums_fp8 import add_block, add_parts, finish, scaled_now, start_all


@gluon.jit
def _scores(p, x, tile, s, c, block, is_masked, MASKED: gl.constexpr, WARPGROUP: gl.constexpr):
    """Cap and mask the scores of one block; return them and the factor that takes them to log2 units.

    One loop visits all blocks, and the mask stands in a branch. With two loops, masked and unmasked, ptxas 12.8
    computed the wgmma descriptors of Q only on the path through the first loop (seen in SASS; wrong bits on an H200
    when it was empty).
    """
    tile_n: gl.constexpr = s.shape[1]
    if p.variant.softcap:
        s = softmax.capped(s, c * x.cap_factor)
        c = x.cap_log2
    if MASKED:  # noqa: SIM102 (one at compile time, one at run time)
        if is_masked:
            s = visible_scores(p, s, tile, block * tile_n, WARPGROUP)
    return s, c


@gluon.jit
def _step(
    p, x, tile, blocks, q, zeros, o, words, rescale, row_max, thread_sums, c, step, block, WARPGROUP: gl.constexpr
):
    """Run one step of a consumer warpgroup: P V of block ``step``, and scores and softmax of the next one, ``block``.

    ``words`` is P in packed chunks of the keys, ``c`` the factor of the scores by row, ``rescale`` what O is multiplied
    with before P V of this step is added.
    """
    layout: gl.constexpr = gl.DotOperandLayout(0, o[0].type.layout, 4)
    stages: gl.constexpr = p.variant.stages
    limited: gl.constexpr = p.variant.is_right_limited or p.variant.is_left_limited
    promotes: gl.constexpr = p.variant.promotion_interval > 0
    scores_first: gl.constexpr = p.variant.overlap and len(words) == 1
    # Warpgroups that hand on the turn when their GEMMs are started run 0.18 of a step apart, their softmaxes in each
    # other's way. Held until the maxima are known, it keeps them half a step apart: 849 and 940 TFLOP/s at 16k keys of
    # head_dim 128, 640 and 683 of 64; chained 1256 and 1282 of 256, 898 and 908 of 128, but 628 and 614 of 64.
    holds_turn: gl.constexpr = scores_first and (promotes or p.variant.qk_boxes * p.q_desc.block_type.shape[-1] > 64)
    scales_now: gl.constexpr = holds_turn and not promotes and p.variant.v_boxes * p.v_channels > 128
    at_step(p, step)
    is_masked = (block >= blocks.right_unmasked) | (block < blocks.left_masked)
    if scores_first:
        s, products = start_all(p, x, q, zeros, o, words, step, not holds_turn, WARPGROUP)
        stamp(p, ISSUED)
        c, ratio = block_factors(p, x, c, step + 1)
        s = warpgroup_mma_wait(len(o), deps=(s,))
    elif rotated_fp8.rotates(p.variant.slices):
        o, s = rotated_fp8.add_block(p, x, q, zeros, o, words, rescale, step, WARPGROUP)
        c, ratio = block_factors(p, x, c, step + 1)
        s = rotated_fp8.finished_scores(s, zeros)
        pass_turn(p, WARPGROUP)
    else:
        o, s = add_block(p, x, q, zeros, o, words, rescale, step, True, p.variant.overlap, WARPGROUP)
        stamp(p, ISSUED)
        c, ratio = block_factors(p, x, c, step + 1)
        s = warpgroup_mma_wait(0, deps=(s,))
    release(p, K_EMPTY, (step + 1) % stages)
    stamp(p, SCORES)
    s, c = _scores(p, x, tile, s, c, block, is_masked, limited, WARPGROUP)
    new_max = softmax.advance_max(s, row_max, c, P_OFFSET_LOG2, p.variant.integer_max, False)
    if holds_turn:
        pass_turn(p, WARPGROUP)
        o = add_parts(p, o, rescale, products, step)
        if scales_now:
            o = scaled_now(o, softmax.rescaling(row_max, new_max) * ratio)
    probabilities, thread_sums, alpha = softmax.exponentials(s, row_max, new_max, thread_sums, c)
    if scores_first and not holds_turn:
        o = add_parts(p, o, rescale, products, step)
    rescale = alpha * ratio
    if not (promotes or scales_now):
        o = scaled(o, rescale)
    words = pack_chunks(probabilities, layout, probabilities.shape[1] // len(words))
    return o, words, rescale, new_max, thread_sums, step + 1


@gluon.jit
def _in_registers(q, OPERAND: gl.constexpr):
    """Return Q as operands in registers; products of the tile's other blocks then read K alone from shared memory."""
    result = ()
    for i in gl.static_range(len(q)):
        result = result + (q[i].load(OPERAND),)
    return result


@gluon.jit
def _consume(p, x, WARPGROUP: gl.constexpr):
    """Run a consumer warpgroup: its 64 rows of every tile of this CTA, the key blocks of each from right to left."""
    tile_n: gl.constexpr = p.tile_n
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile_n, 32])
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 4)
    interval: gl.constexpr = p.variant.promotion_interval if p.variant.promotion_interval else tile_n
    crosses_tiles: gl.constexpr = p.variant.query_slots > 1
    zeros = gl.zeros([WARPGROUP_ROWS, tile_n], gl.float32, s_layout)
    if p.variant.consumers - 1 == WARPGROUP:  # the first turn is warpgroup 0's
        pass_turn(p, WARPGROUP)
    number = 0
    step = 0
    begin_stamps(p, WARPGROUP)
    entry = gl.load(p.tiles)
    c_next = row_factors(p, x, entry, rows, WARPGROUP)
    if crosses_tiles:
        s_next = start_tile(p, zeros, 0, 0, WARPGROUP)
    while entry >= 0:
        this_entry = entry
        tile = read_tile(p, this_entry)
        entry = gl.load(p.tiles + number + 1)
        blocks = key_blocks(p, tile)
        q = queries(p, number, WARPGROUP)
        row_max = gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, rows)
        thread_sums = softmax.thread_row_sums(zeros)
        o = no_sums(p.variant.v_boxes, p.v_channels, p.variant.slices, 32, p.variant.v_spare)
        if not crosses_tiles:
            s_next = start_tile(p, zeros, number, step, WARPGROUP)
        c, _ = block_factors(p, x, c_next, step)
        s = warpgroup_mma_wait(0, deps=(s_next,))
        if p.variant.holds_queries:
            q = _in_registers(q, operand)
        release(p, K_EMPTY, step % p.variant.stages)
        s, c = _scores(p, x, tile, s, c, blocks.stop - 1, True, p.variant.is_first_block_masked, WARPGROUP)
        probabilities, row_max, thread_sums, rescale = softmax.update(
            s, row_max, thread_sums, c, P_OFFSET_LOG2, p.variant.integer_max, True
        )
        words = pack_chunks(probabilities, operand, interval)
        for j in range(2, blocks.stop - blocks.first + 1):
            o, words, rescale, row_max, thread_sums, step = _step(
                p,
                x,
                tile,
                blocks,
                q,
                zeros,
                o,
                words,
                rescale,
                row_max,
                thread_sums,
                c_next,
                step,
                blocks.stop - j,
                WARPGROUP,
            )
        number += 1
        c_next = row_factors(p, x, entry, rows, WARPGROUP)
        if crosses_tiles:
            release(p, Q_EMPTY, (number - 1) % p.variant.query_slots)
            is_more = entry >= 0
            slot = number % p.variant.query_slots
            mbarrier.wait(p.q_full.index(slot), phase(number, p.variant.query_slots), pred=is_more)
            q = queries(p, number, WARPGROUP)
            if rotated_fp8.rotates(p.variant.slices):
                o, s_next = rotated_fp8.finish_and_start(p, x, q, zeros, o, words, rescale, step, is_more, WARPGROUP)
                tile = read_tile_again(p, this_entry)
                blocks = key_blocks(p, tile)
            else:
                o, s_next = add_block(p, x, q, zeros, o, words, rescale, step, is_more, True, WARPGROUP)
            store(p, x, tile, blocks, o, row_max, thread_sums, WARPGROUP)
        else:
            if rotated_fp8.rotates(p.variant.slices):
                o = rotated_fp8.finish(p, x, o, words, rescale, step, WARPGROUP)
                tile = read_tile_again(p, this_entry)
                blocks = key_blocks(p, tile)
            else:
                o = finish(p, x, o, words, rescale, step, WARPGROUP)
            store(p, x, tile, blocks, o, row_max, thread_sums, WARPGROUP)
            tma.store_wait(0)  # TMA has read O, which is staged in the slot of Q
            release(p, Q_EMPTY, 0)
        step += 1
    if crosses_tiles:
        warpgroup_mma_wait(0, deps=(s_next,))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "max_tiles",
        "nheads",
        "group",
        "seqlen_q",
        "seqlen_k",
        "left",
        "right",
        "num_splits",
        "num_rows",
        "q_block_rows",
        "q_batch",
        "q_head",
        "q_block",
        "k_batch",
        "k_head",
        "k_block",
        "v_batch",
        "v_head",
        "v_block",
        *("page_table", "table_entries", "page_keys", "page_rows", "tile_pages", "sinks"),
        *("k_cache", "k_cache_row", "k_cache_head", "v_cache", "v_cache_row", "v_cache_head", "attention_chunk"),
    ]
)
def forward_fp8(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    partial_ptr,
    sequences,
    stamps,
    schedule,
    q_descale,
    q_batch,
    q_head,
    q_block,
    k_descale,
    k_batch,
    k_head,
    k_block,
    v_descale,
    v_batch,
    v_head,
    v_block,
    q_block_rows,
    cap_factor,
    cap_log2,
    max_tiles,
    nheads,
    group,
    seqlen_q,
    seqlen_k,
    left,
    right,
    num_splits,
    num_rows,
    scale_log2,
    VARIANT: gl.constexpr,
    page_table=None,
    table_entries=None,
    page_keys=None,
    page_rows=None,
    tile_pages=None,
    sinks=None,
    k_cache=None,
    k_cache_row=None,
    k_cache_head=None,
    v_cache=None,
    v_cache_row=None,
    v_cache_head=None,
    attention_chunk=None,
):
    """Run the persistent kernel; :func:`fa3_kernels.gluon.launch.forward` has the meaning of the arguments.

    A descale is followed by its strides by sequence, head and block.
    """
    v_shape: gl.constexpr = slot_shape(v_desc.block_type.shape, VARIANT.page_boxes, VARIANT.v_panels)
    tile_n: gl.constexpr = v_shape[-2]
    channels: gl.constexpr = v_shape[-1]
    stages: gl.constexpr = VARIANT.stages
    declare_stamps(VARIANT)
    if VARIANT.integer_max:
        softmax.declare_sign()
    # V^T lies in boxes of all keys.
    vt_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([channels, tile_n], v_desc.dtype)
    vt_smem = gl.allocate_shared_memory(v_desc.dtype, [stages * VARIANT.v_boxes, channels, tile_n], vt_layout)
    factor_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factor_smem = gl.allocate_shared_memory(gl.float32, [2 * stages, WARPGROUP_ROWS], factor_layout)
    x = Scaling(
        (vt_smem, factor_smem, full_barriers(stages)),
        (q_descale, q_batch, q_head, q_block, q_block_rows),
        (k_descale, k_batch, k_head, k_block),
        (v_descale, v_batch, v_head, v_block),
        (cap_factor, cap_log2),
    )
    pages = (page_table, table_entries, page_keys, page_rows, tile_pages)
    gathered = (k_cache, k_cache_row, k_cache_head, v_cache, v_cache_row, v_cache_head)
    p = program(
        (q_desc, k_desc, v_desc, out_desc),
        (lse_ptr, partial_ptr, sequences, stamps, schedule + gl.program_id(0) * max_tiles),
        (nheads, group, seqlen_q, seqlen_k, left, right, num_splits, num_rows, scale_log2, cap_factor),
        serving(VARIANT, pages, sinks, gathered, attention_chunk, tile_n),
        VARIANT,
    )
    if VARIANT.page_boxes:
        await_grid()
    if VARIANT.consumers == 1:
        gl.warp_specialize([(_consume, (p, x, 0)), (produce_fp8, (p, x))], [4], [VARIANT.producer_regs])
    elif VARIANT.consumers == 2:
        gl.warp_specialize(
            [(_consume, (p, x, 0)), (_consume, (p, x, 1)), (produce_fp8, (p, x))],
            [4, 4],
            [VARIANT.consumer_regs, VARIANT.producer_regs],
        )
    else:
        gl.warp_specialize(
            [(_consume, (p, x, 0)), (_consume, (p, x, 1)), (_consume, (p, x, 2)), (produce_fp8, (p, x))],
            [4, 4, 4],
            [VARIANT.consumer_regs, VARIANT.consumer_regs, VARIANT.producer_regs],
        )
