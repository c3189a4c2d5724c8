"""The forward without warp specialisation, for the ablation: two warpgroups load, multiply and exponentiate in step.

All eight warps of the CTA run the same code. One thread starts the TMA loads into a slot, after a barrier over the
whole CTA, behind which no warp reads the slot. The specialised kernels have a producer warp that waits in their place
(:mod:`fa3_kernels.gluon.pipeline`).

A CTA computes one row tile of a dense or causal problem; :func:`fa3_kernels.plan.choose.check_lockstep` refuses
everything else. The bits are those of :mod:`fa3_kernels.gluon.forward_fp16`.
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
from fa3_kernels.gluon.geometry import matrix
from fa3_kernels.gluon.pipeline import full_barriers

STAGES = gl.constexpr(2)


@gluon.jit
def _load(desc, smem, full, where, step, pred):
    """Start the load of one key tile of K or V into the slot of a step, after a barrier over the CTA.

    ``where`` are the coordinates of the tile. Steps count key tiles from the right; ``pred`` is false for a step that
    the row tile does not have, and nothing is loaded then.
    """
    slot = step % STAGES
    mbarrier.expect(full.index(slot), desc.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(desc, where, full.index(slot), smem.index(slot), pred=pred)


@gluon.jit
def _wait(full, step):
    """Wait until the key tile of a step is in its slot; a slot's phase flips with every load into it."""
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)


@gluon.jit
def _masked(s, diagonal, seqlen_k, first_key, IS_CAUSAL: gl.constexpr):
    """Set scores to -inf for keys beyond the sequence or above the diagonal.

    ``diagonal`` is the last key that row 0 sees, ``first_key`` the first one of the tile.
    """
    rows = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    if IS_CAUSAL:
        stop = gl.minimum(rows + (diagonal + 1), seqlen_k)
    else:
        stop = rows * 0 + seqlen_k
    return softmax.visible(s, stop - first_key)


@gluon.jit(do_not_specialize=["nheads", "group", "seqlen_q", "seqlen_k"])
def forward_lockstep(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    nheads,
    group,
    seqlen_q,
    seqlen_k,
    scale_log2,
    IS_CAUSAL: gl.constexpr,
    HAS_KEY_TAIL: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Compute one row tile of one head; the grid is (row tiles, batch * nheads).

    Descriptors are dense views (batch, nheads, seqlen, head_dim) of fp16 or bf16. ``group`` query heads share a kv
    head. lse_ptr is float32 (batch, nheads, seqlen_q), natural. HAS_KEY_TAIL says that the last key tile reaches beyond
    the keys. With OVERLAP the softmax of a key tile runs beside P V of the one before.
    """
    dtype: gl.constexpr = q_desc.dtype
    tile_m: gl.constexpr = q_desc.block_type.shape[-2]
    tile_n: gl.constexpr = k_desc.block_type.shape[-2]
    head_dim: gl.constexpr = q_desc.block_type.shape[-1]
    warps: gl.constexpr = gl.num_warps()
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, tile_n, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, head_dim, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_smem = gl.allocate_shared_memory(dtype, q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    q_full = full_barriers(1)
    k_full = full_barriers(STAGES)
    v_full = full_barriers(STAGES)
    fence_async_shared()

    batch = gl.program_id(1) // nheads
    head = gl.program_id(1) % nheads
    kv_head = head // group
    first_row = (gl.num_programs(0) - 1 - gl.program_id(0)) * tile_m  # the longest tiles first
    diagonal = first_row + seqlen_k - seqlen_q
    stop = seqlen_k
    if IS_CAUSAL:
        stop = gl.minimum(diagonal + tile_m, seqlen_k)
    blocks = gl.cdiv(stop, tile_n)
    mbarrier.expect(q_full.index(0), q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [batch, head, first_row, 0], q_full.index(0), q_smem)
    for j in gl.static_range(STAGES):
        where = [batch, kv_head, (blocks - 1 - j) * tile_n, 0]
        _load(k_desc, k_smem, k_full, where, j, j < blocks)
        _load(v_desc, v_smem, v_full, where, j, j < blocks)

    q = matrix(q_smem)
    zeros = gl.zeros([tile_m, tile_n], gl.float32, s_layout)
    row_max = gl.full([tile_m], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    thread_sums = softmax.thread_row_sums(zeros)
    o = gl.zeros([tile_m, head_dim], gl.float32, o_layout)
    mbarrier.wait(q_full.index(0), 0)
    _wait(k_full, 0)
    s = warpgroup_mma(q, matrix(k_smem.index(0)).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    _load(k_desc, k_smem, k_full, [batch, kv_head, (blocks - 1 - STAGES) * tile_n, 0], STAGES, blocks > STAGES)
    if IS_CAUSAL or HAS_KEY_TAIL:
        s = _masked(s, diagonal, seqlen_k, (blocks - 1) * tile_n, IS_CAUSAL)
    probabilities, row_max, thread_sums, _ = softmax.update(s, row_max, thread_sums, scale_log2)
    operand = gl.convert_layout(probabilities.to(dtype), operand_layout, assert_trivial=True)
    for j in range(1, blocks):  # scores and softmax of key tile j from the right, P V of tile j - 1
        key = (blocks - 1 - j) * tile_n
        _wait(k_full, j)
        _wait(v_full, j - 1)
        k = matrix(k_smem.index(j % STAGES)).permute((1, 0))
        v = matrix(v_smem.index((j - 1) % STAGES))
        if OVERLAP:  # both products are in flight; 1 may be left, so that the softmax below runs beside P V
            s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
            sums = warpgroup_mma(operand, v, o, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
        else:  # one product after the other, then the softmax
            o = warpgroup_mma_wait(0, deps=(warpgroup_mma(operand, v, o, is_async=True),))
            sums = o
            s = warpgroup_mma_wait(0, deps=(warpgroup_mma(q, k, zeros, use_acc=False, is_async=True),))
        later = key - STAGES * tile_n  # the tile that takes the slot of K just read
        _load(k_desc, k_smem, k_full, [batch, kv_head, later, 0], j + STAGES, j + STAGES < blocks)
        if IS_CAUSAL:
            s = _masked(s, diagonal, seqlen_k, key, True)
        probabilities, row_max, thread_sums, rescale = softmax.update(s, row_max, thread_sums, scale_log2)
        if OVERLAP:
            o = warpgroup_mma_wait(0, deps=(sums,))
        # V is read one step behind K: the slot of tile j - 1 takes tile j + 1
        _load(v_desc, v_smem, v_full, [batch, kv_head, later + tile_n, 0], j + 1, j + 1 < blocks)
        o = softmax.scaled(o, rescale)
        operand = gl.convert_layout(probabilities.to(dtype), operand_layout, assert_trivial=True)
    _wait(v_full, blocks - 1)
    v = matrix(v_smem.index((blocks - 1) % STAGES))
    o = warpgroup_mma_wait(0, deps=(warpgroup_mma(operand, v, o, is_async=True),))
    inverse, lse = softmax.finalize(row_max, thread_sums)
    # O leaves through the buffer of Q, which no product reads any more
    matrix(q_smem).store(softmax.scaled(o, inverse).to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [batch, head, first_row, 0], q_smem)
    rows = first_row + gl.arange(0, tile_m, gl.SliceLayout(1, s_layout))
    gl.store(lse_ptr + gl.program_id(1) * seqlen_q + rows, lse * softmax.LN2, mask=rows < seqlen_q)
    tma.store_wait(0)
