"""The fp16 and bf16 forward kernel: one to three consumer warpgroups of 64 rows and one TMA producer warp.

The schedule is that of FlashAttention-3 (arXiv 2407.08608, algorithm 2): Q K^T of the next key block is issued together
with P V of this one, and the softmax of the next block runs beside P V. Where shared memory holds two Q tiles this goes
on across tiles. :mod:`fa3_kernels.gluon.pipeline` has the producer and says what each barrier guards. The order of
every operation on a value is that of :mod:`fa3_kernels.twin.forward`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from fa3_kernels.gluon import softmax
from fa3_kernels.gluon.boxes import awaited, groups, no_sums, parts
from fa3_kernels.gluon.dependent import await_grid
from fa3_kernels.gluon.geometry import (
    WARPGROUP_ROWS,
    key_blocks,
    read_tile,
    read_tile_again,
    visible_scores,
)
from fa3_kernels.gluon.output import scaled, store
from fa3_kernels.gluon.pages import slot_shape
from fa3_kernels.gluon.pipeline import (
    K_EMPTY,
    Q_EMPTY,
    V_EMPTY,
    issue_scores,
    pass_turn,
    phase,
    produce,
    program,
    queries,
    release,
    serving,
    start_tile,
    take_turn,
)
from fa3_kernels.gluon.stamps import (
    ISSUED,
    OUTPUT,
    SCORES,
    TURN_TAKEN,
    at_step,
    begin_stamps,
    declare_stamps,
    stamp,
)


@gluon.jit
def _packed(x):
    """Return a matrix of 16-bit elements with two columns in each int32, (64, columns / 2).

    LLVM does not see through the packing. Otherwise it would carry 16-bit values from one loop to the next and put
    every pair together again in every step (64 PRMT of about 460 instructions).
    """
    columns: gl.constexpr = x.shape[1]
    even, odd = gl.split(gl.reshape(x, [WARPGROUP_ROWS, columns // 2, 2]))
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};",
        "=r,h,h",
        [even.to(gl.int16, bitcast=True), odd.to(gl.int16, bitcast=True)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _unpacked(p, words):
    """Undo :func:`_packed`."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    dtype: gl.constexpr = p.q_desc.dtype
    pairs = gl.join(even.to(dtype, bitcast=True), odd.to(dtype, bitcast=True))
    return gl.reshape(pairs, [WARPGROUP_ROWS, 2 * words.shape[1]])


@gluon.jit
def _issue_part(probabilities, v, o):
    """Start one part of the channels of O = O + P V, asynchronously."""
    operand: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(probabilities, operand, assert_trivial=True), v, o, is_async=True)


@gluon.jit
def _issue_output(p, operand, o, step):
    """Start O = O + P V of key block ``step``, with packed P from registers; O is a tuple of parts of its channels.

    ``operand`` is P and what O is to be multiplied with; with ``scales_late`` that is done here, while the tensor core
    is at the scores that were started before.
    """
    if p.variant.scales_late:
        o = scaled(o, operand[1])
    probabilities = _unpacked(p, operand[0])
    v = parts(p.v_smem, step % p.variant.stages, p.variant.v_boxes)
    result = ()
    for i in gl.static_range(len(v)):
        result = result + (_issue_part(probabilities, v[i], o[i]),)
    return result


@gluon.jit
def _softmax(
    p, tile, s, row_max, thread_sums, first_key, IS_FIRST: gl.constexpr, MASKED: gl.constexpr, WARPGROUP: gl.constexpr
):
    """Cap and mask the scores of one block, and advance the running statistics as :func:`softmax.update` does."""
    if p.variant.softcap:
        s = softmax.capped(s, p.cap_scale)
    if MASKED:
        s = visible_scores(p, s, tile, first_key, WARPGROUP)
    return softmax.update(s, row_max, thread_sums, p.scale_log2, 0, p.variant.integer_max, IS_FIRST)


@gluon.jit
def _step(
    p, tile, q, zeros, o, operand, row_max, thread_sums, step, first_key, MASKED: gl.constexpr, WARPGROUP: gl.constexpr
):
    """Run one step of a consumer warpgroup: P V of block ``step``, and scores and softmax of the next block.

    With overlap both products are in flight at once; a slot is released as soon as the product that reads it is done.
    """
    at_step(p, step)
    v_slot = step % p.variant.stages
    v_phase = phase(step, p.variant.stages)
    k_slot = (step + 1) % p.variant.stages
    if p.variant.overlap:
        mbarrier.wait(p.k_full.index(k_slot), phase(step + 1, p.variant.stages))
        take_turn(p, WARPGROUP)
        stamp(p, TURN_TAKEN)
        s = issue_scores(p, q, zeros, step + 1)
        mbarrier.wait(p.v_full.index(v_slot), v_phase)
        o = _issue_output(p, operand, o, step)
        pass_turn(p, WARPGROUP)
        stamp(p, ISSUED)
        s = warpgroup_mma_wait(len(o), deps=(s,))  # the parts of P V may still be under way
        release(p, K_EMPTY, k_slot)
        stamp(p, SCORES)
        probabilities, row_max, thread_sums, rescale = _softmax(
            p, tile, s, row_max, thread_sums, first_key, False, MASKED, WARPGROUP
        )
        o = awaited(o, 0)
        release(p, V_EMPTY, v_slot)
        stamp(p, OUTPUT)
        if p.variant.scales_late:
            o = awaited(o, 0)  # ptxas moves the release no further than this; else to the end of the step
    else:
        thread_sums = softmax.executed(thread_sums)
        mbarrier.wait(p.v_full.index(v_slot), v_phase)
        mbarrier.wait(p.k_full.index(k_slot), phase(step + 1, p.variant.stages))
        take_turn(p, WARPGROUP)
        o = awaited(_issue_output(p, operand, o, step), 0)
        release(p, V_EMPTY, v_slot)
        s = warpgroup_mma_wait(0, deps=(issue_scores(p, q, zeros, step + 1),))
        release(p, K_EMPTY, k_slot)
        pass_turn(p, WARPGROUP)
        probabilities, row_max, thread_sums, rescale = _softmax(
            p, tile, s, row_max, thread_sums, first_key, False, MASKED, WARPGROUP
        )
    if not p.variant.scales_late:
        o = scaled(o, rescale)
    return o, (_packed(probabilities.to(p.q_desc.dtype)), rescale), row_max, thread_sums, step + 1


@gluon.jit
def _held_part(x):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, x.shape[1], 16])
    return _packed(x.load(layout))


@gluon.jit
def _held_queries(p, number, WARPGROUP: gl.constexpr):
    """Return this warpgroup's packed Q in registers, so that products read no rows of shared memory; else nothing."""
    result = ()
    if p.variant.holds_queries:
        q = queries(p, number, WARPGROUP)
        for i in gl.static_range(len(q)):
            result = result + (_held_part(q[i]),)
    return result


@gluon.jit
def _operands(p, words, LAYOUT: gl.constexpr):
    result = ()
    for i in gl.static_range(len(words)):
        result = result + (gl.convert_layout(_unpacked(p, words[i]), LAYOUT, assert_trivial=True),)
    return result


@gluon.jit
def _queries_again(p, number, held, zeros, WARPGROUP: gl.constexpr):
    """Return Q for one more loop over key blocks: unpacked if it is held, else its address as a value new to ptxas.

    Without that ptxas 12.8 takes parts of Q's wgmma descriptor from registers that the loop before sets, even where
    that loop is skipped: seen in SASS, and as an illegal memory access, when P was first carried packed.
    """
    number = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)
    if p.variant.holds_queries:
        operand: gl.constexpr = gl.DotOperandLayout(0, zeros.type.layout, 2)
        return _operands(p, held, operand)
    else:
        return queries(p, number, WARPGROUP)


@gluon.jit
def _finish(p, operand, o, step, WARPGROUP: gl.constexpr):
    """Add the last P V of a tile to O, and release its slot of V."""
    mbarrier.wait(p.v_full.index(step % p.variant.stages), phase(step, p.variant.stages))
    take_turn(p, WARPGROUP)
    o = _issue_output(p, operand, o, step)
    pass_turn(p, WARPGROUP)
    o = awaited(o, 0)
    release(p, V_EMPTY, step % p.variant.stages)
    return o


@gluon.jit
def _finish_and_start(p, zeros, operand, o, number, step, is_more, WARPGROUP: gl.constexpr):
    """Add the last P V of a tile to O and start the first scores of tile ``number``, void unless ``is_more``."""
    slot = number % p.variant.query_slots
    mbarrier.wait(p.q_full.index(slot), phase(number, p.variant.query_slots), pred=is_more)
    mbarrier.wait(p.v_full.index(step % p.variant.stages), phase(step, p.variant.stages))
    take_turn(p, WARPGROUP)
    o = _issue_output(p, operand, o, step)
    k_full = p.k_full.index((step + 1) % p.variant.stages)
    mbarrier.wait(k_full, phase(step + 1, p.variant.stages), pred=is_more)
    s = issue_scores(p, queries(p, number, WARPGROUP), zeros, step + 1)
    pass_turn(p, WARPGROUP)
    o = awaited(o, len(groups(p.variant.qk_boxes)))
    release(p, V_EMPTY, step % p.variant.stages)
    return o, s


@gluon.jit
def _consume(p, WARPGROUP: gl.constexpr):
    """Run a consumer warpgroup: its 64 rows of every tile of this CTA, the key blocks of each from right to left."""
    tile_n: gl.constexpr = p.tile_n
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile_n, 16])
    crosses_tiles: gl.constexpr = not p.variant.out_in_query_slot
    mask_first: gl.constexpr = p.variant.is_first_block_masked
    zeros = gl.zeros([WARPGROUP_ROWS, tile_n], gl.float32, s_layout)
    if p.variant.consumers - 1 == WARPGROUP:  # the first turn is warpgroup 0's
        pass_turn(p, WARPGROUP)
    number = 0
    step = 0
    begin_stamps(p, WARPGROUP)
    entry = gl.load(p.tiles)
    if crosses_tiles:
        s_next = start_tile(p, zeros, 0, 0, WARPGROUP)
    while entry >= 0:
        this_entry = entry
        tile = read_tile(p, this_entry)
        entry = gl.load(p.tiles + number + 1)
        blocks = key_blocks(p, tile)
        row_max = gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        thread_sums = softmax.thread_row_sums(zeros)
        o = no_sums(p.variant.v_boxes, p.v_channels)
        if not crosses_tiles:
            s_next = start_tile(p, zeros, number, step, WARPGROUP)
        held = _held_queries(p, number, WARPGROUP)
        s = warpgroup_mma_wait(0, deps=(s_next,))
        release(p, K_EMPTY, step % p.variant.stages)
        if p.variant.holds_queries:
            release(p, Q_EMPTY, number % p.variant.query_slots)
        block = blocks.stop - 1
        probabilities, row_max, thread_sums, _ = _softmax(
            p, tile, s, row_max, thread_sums, block * tile_n, True, mask_first, WARPGROUP
        )
        operand = (
            _packed(probabilities.to(p.q_desc.dtype)),
            gl.full([WARPGROUP_ROWS], 1.0, gl.float32, row_max.type.layout),
        )
        unmasked = block - blocks.first  # blocks still to come; those with a mask are taken off
        if p.variant.is_right_limited:
            unmasked = gl.minimum(unmasked, gl.maximum(blocks.right_unmasked - blocks.first, 0))
            q = _queries_again(p, number, held, zeros, WARPGROUP)
            for j in range(1, block - blocks.first - unmasked + 1):
                o, operand, row_max, thread_sums, step = _step(
                    p, tile, q, zeros, o, operand, row_max, thread_sums, step, (block - j) * tile_n, True, WARPGROUP
                )
        left_masked = gl.minimum(gl.maximum(blocks.left_masked - blocks.first, 0), unmasked)
        q = _queries_again(p, number, held, zeros, WARPGROUP)
        for _j in range(unmasked - left_masked):
            o, operand, row_max, thread_sums, step = _step(
                p, tile, q, zeros, o, operand, row_max, thread_sums, step, 0, False, WARPGROUP
            )
        if p.variant.is_left_limited:
            q = _queries_again(p, number, held, zeros, WARPGROUP)
            for j in range(1, left_masked + 1):
                first_key = (blocks.first + left_masked - j) * tile_n
                o, operand, row_max, thread_sums, step = _step(
                    p, tile, q, zeros, o, operand, row_max, thread_sums, step, first_key, True, WARPGROUP
                )
        number += 1
        if crosses_tiles:
            if not p.variant.holds_queries:
                release(p, Q_EMPTY, (number - 1) % p.variant.query_slots)
            o, s_next = _finish_and_start(p, zeros, operand, o, number, step, entry >= 0, WARPGROUP)
            store(p, read_tile_again(p, this_entry), o, row_max, thread_sums, WARPGROUP)
        else:
            o = _finish(p, operand, o, step, WARPGROUP)
            store(p, read_tile_again(p, this_entry), o, row_max, thread_sums, WARPGROUP)
            tma.store_wait(0)  # TMA has read O, which is staged in the slot of Q
            release(p, Q_EMPTY, 0)
        step += 1
    if crosses_tiles:
        warpgroup_mma_wait(0, deps=(s_next,))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        *("max_tiles", "nheads", "group", "seqlen_q", "seqlen_k", "left", "right", "num_splits", "num_rows"),
        *("page_table", "table_entries", "page_keys", "page_rows", "tile_pages", "sinks"),
        *("k_cache", "k_cache_row", "k_cache_head", "v_cache", "v_cache_row", "v_cache_head", "attention_chunk"),
    ]
)
def forward_fp16(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    partial_ptr,
    sequences,
    stamps,
    schedule,
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
    cap_scale,
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
    """Run the persistent kernel; :func:`fa3_kernels.gluon.launch.forward` has the meaning of the arguments."""
    declare_stamps(VARIANT)
    if VARIANT.integer_max:
        softmax.declare_sign()
    tile_n: gl.constexpr = slot_shape(k_desc.block_type.shape, VARIANT.page_boxes, VARIANT.qk_panels)[-2]
    pages = (page_table, table_entries, page_keys, page_rows, tile_pages)
    gathered = (k_cache, k_cache_row, k_cache_head, v_cache, v_cache_row, v_cache_head)
    p = program(
        (q_desc, k_desc, v_desc, out_desc),
        (lse_ptr, partial_ptr, sequences, stamps, schedule + gl.program_id(0) * max_tiles),
        (nheads, group, seqlen_q, seqlen_k, left, right, num_splits, num_rows, scale_log2, cap_scale),
        serving(VARIANT, pages, sinks, gathered, attention_chunk, tile_n),
        VARIANT,
    )
    if VARIANT.page_boxes:
        await_grid()
    if VARIANT.consumers == 1:
        gl.warp_specialize([(_consume, (p, 0)), (produce, (p,))], [VARIANT.producer_warps], [VARIANT.producer_regs])
    elif VARIANT.consumers == 2:
        gl.warp_specialize(
            [(_consume, (p, 0)), (_consume, (p, 1)), (produce, (p,))],
            [4, VARIANT.producer_warps],
            [VARIANT.consumer_regs, VARIANT.producer_regs],
        )
    else:
        gl.warp_specialize(
            [(_consume, (p, 0)), (_consume, (p, 1)), (_consume, (p, 2)), (produce, (p,))],
            [4, 4, VARIANT.producer_warps],
            [VARIANT.consumer_regs, VARIANT.consumer_regs, VARIANT.producer_regs],
        )
