"""The fp16 and bf16 forward kernel: two consumer warpgroups of 64 rows and one TMA producer warp.

Schedule of FlashAttention-3 (arXiv 2407.08608, algorithm 2): Q K^T of the next block is issued together with P V of this
one, and the softmax of the next block runs under P V. Across tiles too: the first Q K^T of the next tile is issued with
the last P V of this one. The order of every operation on a value is that of :mod:`fa3_kernels.twin.forward`.
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

from fa3_kernels.gluon import softmax
from fa3_kernels.gluon.pipeline import (
    CONSUMERS,
    K_EMPTY,
    Q_EMPTY,
    STAGES,
    TILE_M,
    V_EMPTY,
    WARPGROUP_ROWS,
    Program,
    decode,
    key_blocks,
    pass_turn,
    produce,
    release,
    take_turn,
)


@gluon.jit
def _matrix(buffer):
    """Shared tile (1, 1, rows, columns) as a matrix."""
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def _phase(step):
    return (step // STAGES) & 1


@gluon.jit
def _issue_scores(p, q, zeros, step):
    """Start S = Q K^T with C = 0."""
    k = _matrix(p.k_smem.index(step % STAGES))
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _issue_output(p, probabilities, o, step):
    """Start O = O + P V."""
    return warpgroup_mma(probabilities, _matrix(p.v_smem.index(step % STAGES)), o, is_async=True)


@gluon.jit
def _as_operand(p, probabilities, o):
    """P in the operand format, round to nearest even, as the A operand (in registers) of a product added to ``o``."""
    operand: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    return gl.convert_layout(probabilities.to(p.q_desc.dtype), operand, assert_trivial=True)


@gluon.jit
def _scaled(o, factor):
    """O times one factor per row."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout), assert_trivial=True)
    return o * gl.expand_dims(factor, 1)


@gluon.jit
def _softmax(p, s, row_max, thread_sums, first_row, first_key, MASKED: gl.constexpr):
    """Mask one block and advance the running statistics."""
    if MASKED:
        rows = gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, s.type.layout))
        if p.CAUSAL:
            visible = gl.minimum(rows + (first_row + p.seqlen_k - p.seqlen_q + 1), p.seqlen_k) - first_key
        else:
            visible = rows * 0 + (p.seqlen_k - first_key)
        s = softmax.masked(s, visible)
    return softmax.update(s, row_max, thread_sums, p.scale_log2)


@gluon.jit
def _step(p, q, zeros, o, operand, row_max, thread_sums, step, first_row, first_key,
          MASKED: gl.constexpr, WARPGROUP: gl.constexpr):  # fmt: skip
    """P V of block ``step`` and scores and softmax of the next one."""
    v_slot = step % STAGES
    v_phase = _phase(step)
    k_slot = (step + 1) % STAGES
    if p.OVERLAP:
        mbarrier.wait(p.k_full.index(k_slot), _phase(step + 1))
        take_turn(p, WARPGROUP)
        s = _issue_scores(p, q, zeros, step + 1)
        mbarrier.wait(p.v_full.index(v_slot), v_phase)
        o = _issue_output(p, operand, o, step)
        pass_turn(p, WARPGROUP)
        s = warpgroup_mma_wait(1, deps=(s,))
        release(K_EMPTY, k_slot)
        probabilities, row_max, thread_sums, rescale = _softmax(
            p, s, row_max, thread_sums, first_row, first_key, MASKED
        )
        o = warpgroup_mma_wait(0, deps=(o,))
        release(V_EMPTY, v_slot)
    else:
        mbarrier.wait(p.v_full.index(v_slot), v_phase)
        mbarrier.wait(p.k_full.index(k_slot), _phase(step + 1))
        take_turn(p, WARPGROUP)
        o = warpgroup_mma_wait(0, deps=(_issue_output(p, operand, o, step),))
        release(V_EMPTY, v_slot)
        s = warpgroup_mma_wait(0, deps=(_issue_scores(p, q, zeros, step + 1),))
        release(K_EMPTY, k_slot)
        pass_turn(p, WARPGROUP)
        probabilities, row_max, thread_sums, rescale = _softmax(
            p, s, row_max, thread_sums, first_row, first_key, MASKED
        )
    o = _scaled(o, rescale)
    return o, _as_operand(p, probabilities, o), row_max, thread_sums, step + 1


@gluon.jit
def _store(p, o, row_max, thread_sums, batch, head, first_row, WARPGROUP: gl.constexpr):
    """Normalise, round once, and write O by TMA (which clips rows beyond the sequence) and the lse."""
    inverse, lse = softmax.finalize(row_max, thread_sums)
    o = _scaled(o, inverse)
    buffer = p.out_smem.index(WARPGROUP)
    tma.store_wait(0)
    _matrix(buffer).store(o.to(p.q_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(p.out_desc, [batch, head, first_row, 0], buffer)
    rows = first_row + gl.arange(0, WARPGROUP_ROWS, row_max.type.layout)
    gl.store(p.lse_ptr + (batch * p.nheads + head) * p.seqlen_q + rows, lse, mask=rows < p.seqlen_q)


@gluon.jit
def _consume(p, WARPGROUP: gl.constexpr):
    """A consumer warpgroup: its 64 rows of every tile of this CTA."""
    tile_n: gl.constexpr = p.k_desc.block_type.shape[2]
    head_dim: gl.constexpr = p.v_desc.block_type.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile_n, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    mask_first: gl.constexpr = p.CAUSAL or not p.EVEN_K
    zeros = gl.zeros([WARPGROUP_ROWS, tile_n], gl.float32, s_layout)
    if WARPGROUP == CONSUMERS - 1:
        pass_turn(p, WARPGROUP)
    tile = 0
    step = 0
    entry = gl.load(p.tiles)
    mbarrier.wait(p.q_full.index(0), 0)
    mbarrier.wait(p.k_full.index(0), 0)
    take_turn(p, WARPGROUP)
    s_next = _issue_scores(p, _matrix(p.q_smem.index(WARPGROUP)), zeros, step)
    pass_turn(p, WARPGROUP)
    while entry >= 0:
        m_block, batch, head = decode(p, entry)
        entry = gl.load(p.tiles + tile + 1)
        blocks, unmasked = key_blocks(p, m_block)
        first_row = m_block * TILE_M + WARPGROUP * WARPGROUP_ROWS
        q = _matrix(p.q_smem.index(tile % STAGES * CONSUMERS + WARPGROUP))
        row_max = gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        thread_sums = softmax.thread_row_sums(zeros)
        o = gl.zeros([WARPGROUP_ROWS, head_dim], gl.float32, o_layout)
        s = warpgroup_mma_wait(0, deps=(s_next,))
        release(K_EMPTY, step % STAGES)
        probabilities, row_max, thread_sums, _ = _softmax(
            p, s, row_max, thread_sums, first_row, (blocks - 1) * tile_n, mask_first
        )
        operand = _as_operand(p, probabilities, o)
        full = blocks - 1
        if p.CAUSAL:
            full = gl.minimum(full, unmasked)
            for j in range(1, blocks - full):
                o, operand, row_max, thread_sums, step = _step(
                    p, q, zeros, o, operand, row_max, thread_sums, step, first_row, (blocks - 1 - j) * tile_n,
                    True, WARPGROUP,
                )  # fmt: skip
        for _j in range(full):
            o, operand, row_max, thread_sums, step = _step(
                p, q, zeros, o, operand, row_max, thread_sums, step, 0, 0, False, WARPGROUP
            )
        release(Q_EMPTY, tile % STAGES)
        tile += 1
        is_more = entry >= 0
        next_slot = tile % STAGES
        mbarrier.wait(p.q_full.index(next_slot), _phase(tile), pred=is_more)
        mbarrier.wait(p.v_full.index(step % STAGES), _phase(step))
        take_turn(p, WARPGROUP)
        o = _issue_output(p, operand, o, step)
        mbarrier.wait(p.k_full.index((step + 1) % STAGES), _phase(step + 1), pred=is_more)
        s_next = _issue_scores(p, _matrix(p.q_smem.index(next_slot * CONSUMERS + WARPGROUP)), zeros, step + 1)
        pass_turn(p, WARPGROUP)
        o = warpgroup_mma_wait(1, deps=(o,))
        release(V_EMPTY, step % STAGES)
        step += 1
        _store(p, o, row_max, thread_sums, batch, head, first_row, WARPGROUP)
    warpgroup_mma_wait(0, deps=(s_next,))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["max_tiles", "nheads", "group", "seqlen_q", "seqlen_k"])
def forward_fp16(q_desc, k_desc, v_desc, out_desc, lse_ptr, schedule, max_tiles, nheads, group, seqlen_q, seqlen_k,
                 scale_log2, CAUSAL: gl.constexpr, EVEN_K: gl.constexpr, PINGPONG: gl.constexpr, OVERLAP: gl.constexpr,
                 CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """Persistent kernel; see :func:`fa3_kernels.gluon.launch.forward` for the meaning of the arguments."""
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    out_smem = gl.allocate_shared_memory(dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    p = Program(
        (q_desc, k_desc, v_desc, out_desc),
        lse_ptr,
        schedule + gl.program_id(0) * max_tiles,
        (nheads, group, seqlen_q, seqlen_k, scale_log2),
        (q_smem, k_smem, v_smem, out_smem, q_full, k_full, v_full),
        (CAUSAL, EVEN_K, PINGPONG, OVERLAP),
    )
    gl.warp_specialize(
        [(_consume, (p, 0)), (_consume, (p, 1)), (produce, (p,))], [4, 1], [CONSUMER_REGS, PRODUCER_REGS]
    )
