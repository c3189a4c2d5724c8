"""The kernel that merges the fp32 partial results of split-KV, in ascending order, as :mod:`fa3_kernels.twin.combine`.

The plan of a launch (:mod:`fa3_kernels.plan.plan`) puts it behind the forward where the keys are split.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from fa3_kernels.gluon import softmax
from fa3_kernels.gluon.dependent import await_grid


@gluon.jit
def _lses(pointers, first, num_splits, one_split, AT_ONCE: gl.constexpr):
    """Return the lse of AT_ONCE parts from ``first`` on; -inf, which weighs nothing, for parts that do not exist."""
    loaded = ()
    for i in gl.static_range(AT_ONCE):
        loaded = loaded + (gl.load(pointers + gl.minimum(first + i, num_splits - 1) * one_split),)
    result = ()
    for i in gl.static_range(AT_ONCE):
        result = result + (gl.where(first + i < num_splits, loaded[i], float("-inf")),)
    return result


@gluon.jit
def _start(staged, pointers, part, num_splits, one_part):
    """Start to copy the rows of some parts to shared memory; parts that do not exist are not read.

    The caller waits for the group, and leaves out of its sum what was not read.
    """
    is_there = gl.expand_dims(part < num_splits, 1)
    async_copy.async_copy_global_to_shared(staged, pointers + gl.expand_dims(part, 1) * one_part, mask=is_there)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["num_rows", "seqlen_q", "nheads", "num_splits", "head_dim"])
def combine(
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    seqlen_q,
    nheads,
    num_splits,
    head_dim,
    ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    AT_ONCE: gl.constexpr,
    WAITS: gl.constexpr = False,
):
    """Merge ROWS output rows, one program; AT_ONCE parts of them are copied to shared memory together.

    The lse of the parts is read three times: for the maximum, for the sum of weights, and for each weight. WAITS says
    that this grid starts before the one in front of it has ended, so that it must wait for its results.

    Parameters
    ----------
    partial_ptr : float32 (splits, num_rows, HEAD_DIM)
        Normalised outputs; a row is (sequence, position, head), head fastest.
    partial_lse_ptr : float32 (splits, num_rows)
        Base-2 lse, ordered (sequence, head, position); -inf where a split saw no key.
    out_ptr : float16 or bfloat16 (num_rows, head_dim)
    lse_ptr : float32 (num_rows,)
        Natural lse, ordered as the partials.
    seqlen_q : int
        Positions per sequence; with varlen all of them count as one sequence.
    """
    if WAITS:
        await_grid()
    columns_in_warp: gl.constexpr = HEAD_DIM // 4 if HEAD_DIM < 128 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // columns_in_warp, columns_in_warp], [4, 1], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    exists = row < num_rows
    row = gl.minimum(row, num_rows - 1)  # programs beyond the rows read the last one, and store nothing
    sequence = row // (seqlen_q * nheads)
    position = row // nheads % seqlen_q
    lse_index = (sequence * nheads + row % nheads) * seqlen_q + position
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    one_split = num_rows.to(gl.int64)

    in_rows: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    staged = gl.allocate_shared_memory(gl.float32, [AT_ONCE * ROWS, HEAD_DIM], in_rows)
    index = gl.arange(0, AT_ONCE * ROWS, gl.SliceLayout(1, layout))
    part = index // ROWS
    row_of_part = gl.minimum(gl.program_id(0) * ROWS + index % ROWS, num_rows - 1).to(gl.int64)
    parts = partial_ptr + (gl.expand_dims(row_of_part * HEAD_DIM, 1) + gl.expand_dims(column, 0))
    one_part = one_split * HEAD_DIM
    _start(staged, parts, part, num_splits, one_part)
    lse_ptrs = partial_lse_ptr + lse_index
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    for first in range(0, num_splits, AT_ONCE):
        lses = _lses(lse_ptrs, first, num_splits, one_split, AT_ONCE)
        for i in gl.static_range(AT_ONCE):
            top = gl.maximum(top, lses[i])
    base = gl.where(top == float("-inf"), 0.0, top)
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    for first in range(0, num_splits, AT_ONCE):
        lses = _lses(lse_ptrs, first, num_splits, one_split, AT_ONCE)
        for i in gl.static_range(AT_ONCE):
            total = total + softmax.ex2(lses[i] - base)
    is_empty = total == 0
    inverse = gl.where(is_empty, 0.0, softmax.rcp(total))
    merged = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout)
    for first in range(0, num_splits, AT_ONCE):
        lses = _lses(lse_ptrs, first, num_splits, one_split, AT_ONCE)
        async_copy.wait_group(0)
        for i in gl.static_range(AT_ONCE):
            weight = softmax.ex2(lses[i] - base) * inverse
            added = gl.fma(staged.slice(i * ROWS, ROWS).load(layout), gl.expand_dims(weight, 1), merged)
            merged = gl.where(first + i < num_splits, added, merged)  # adding 0 would turn a sum of -0 into +0
        if first + AT_ONCE < num_splits:
            _start(staged, parts, first + AT_ONCE + part, num_splits, one_part)
    out_offset = gl.expand_dims(row.to(gl.int64) * head_dim, 1) + gl.expand_dims(column, 0)
    inside = gl.expand_dims(exists, 1) & gl.expand_dims(column < head_dim, 0)
    gl.store(out_ptr + out_offset, merged.to(out_ptr.dtype.element_ty), mask=inside)
    log = gl.where(is_empty, float("-inf"), base + softmax.lg2(total))
    gl.store(lse_ptr + lse_index, log * softmax.LN2, mask=exists)
