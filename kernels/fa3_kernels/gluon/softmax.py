"""Online softmax of one warpgroup's rows, in the order of :mod:`fa3_kernels.twin.softmax`.

The consumers of the forward and backward kernels call these functions. Scores are in the layout of a wgmma accumulator:
a thread has two neighbouring columns of every eight, in two rows. Every fused multiply-add is written as one; kernels
are compiled with enable_fp_fusion=False, so that the compiler makes no other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LN2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _mufu(INSTRUCTION: gl.constexpr, x):
    """Run one special-function instruction (.approx.ftz.f32); Triton's own log2 and division are longer sequences."""
    return gl.inline_asm_elementwise(INSTRUCTION, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def ex2(x):
    """Return 2^x."""
    return _mufu("ex2.approx.ftz.f32 $0, $1;", x)


@gluon.jit
def rcp(x):
    """Return 1 / x."""
    return _mufu("rcp.approx.ftz.f32 $0, $1;", x)


@gluon.jit
def lg2(x):
    """Return log2(x)."""
    return _mufu("lg2.approx.ftz.f32 $0, $1;", x)


@gluon.jit
def thread_row_sums(p):
    """Sum the columns of each thread: pairs first, then one after the other. (rows, keys) -> (rows, 4 threads)."""
    rows: gl.constexpr = p.shape[0]
    keys: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(gl.reshape(p, [rows, keys // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def _of_lane(key, layout: gl.constexpr):
    """Return ``key``, int32 (rows,), less the first column of each of four lanes, 2 * lane, as (rows, 1, 4, 1)."""
    by_lane: gl.constexpr = gl.SliceLayout(3, layout)
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, by_lane)))
    lane = gl.expand_dims(gl.expand_dims(gl.expand_dims(lane, 0), 1), 3)
    key = gl.convert_layout(key, gl.SliceLayout(1, gl.SliceLayout(2, by_lane)), assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(key, 1), 2), 3) - 2 * lane


@gluon.jit
def visible(s, stop, start=None):
    """Set scores to -inf in columns at or beyond ``stop`` and before ``start``, which count from the block's first key.

    Both limits are int32 (rows,); without ``start`` there is no lower one. A score's column is 8 i + 2 lane + e, where
    i and e are constants of its register. So 2 lane is taken off the limit, once a row, and each comparison has a
    constant operand: no column number is computed or held.
    """
    rows: gl.constexpr = s.shape[0]
    keys: gl.constexpr = s.shape[1]
    by_lane = gl.reshape(s, [rows, keys // 8, 4, 2])
    layout: gl.constexpr = by_lane.type.layout
    eighth = gl.arange(0, keys // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    eighth = gl.expand_dims(gl.expand_dims(gl.expand_dims(eighth, 0), 2), 3)
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    column = 8 * eighth + gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 1), 2)
    is_visible = column < _of_lane(stop, layout)
    if start is not None:
        is_visible = is_visible & (column >= _of_lane(start, layout))
    by_lane = gl.where(is_visible, by_lane, float("-inf"))
    return gl.convert_layout(gl.reshape(by_lane, [rows, keys]), s.type.layout, assert_trivial=True)


@gluon.jit
def capped(s, cap_scale):
    """Return the tanh of scores over the cap: scores in units of the cap.

    ``cap_scale``, one number or one per row, is 2 / softcap times the factor of the scores.
    """
    grown = ex2(s * per_row(cap_scale))
    return gl.fma(rcp(grown + 1.0), -2.0, 1.0)


@gluon.jit
def per_row(x):
    """Return a factor per row as a column; a scalar stays as it is."""
    if x.type.is_block():
        return gl.expand_dims(x, 1)
    else:
        return x


@gluon.jit
def declare_sign():
    """Declare the register in which a warp remembers that none of its maxima is negative; stands at the kernel's
    head.
    """
    gl.inline_asm_elementwise(
        ".reg .b32 %none_negative; mov.b32 %none_negative, 0; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _keep_sign_asm(zero):
    """PTX that sets that register from the two maxima of a thread, by a vote of the warp.

    ``zero`` is what a score of 0 has become in the maxima: minus the offset of P.
    """
    return (
        "{ .reg .pred %first, %any; "
        f"setp.lt.f32 %first, $2, {zero}; setp.lt.or.f32 %any, $3, {zero}, %first; "
        "vote.sync.any.pred %any, %any, 0xffffffff; selp.b32 %none_negative, 0, 1, %any; "
        "mov.b32 $0, 0; mov.b32 $1, 0; }"
    )


@gluon.jit
def _largest_where_none_is_negative(s):
    """Return the largest score per row, by integer comparisons if no running maximum of the warp is negative.

    The bits of floats >= 0 are ordered as integers are, and one integer instruction compares three numbers where one of
    floats compares two at the same cost (68 of the 460 instructions of a step become 36). If the largest score of a row
    is negative, the integers give some other negative score; the running maximum, which is not negative, stays the
    larger one.
    """
    is_simple = gl.inline_asm_elementwise(
        "mov.b32 $0, %none_negative;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    if is_simple != 0:
        largest = gl.max(s.to(gl.int32, bitcast=True), axis=1).to(gl.float32, bitcast=True)
    else:
        largest = gl.max(s, axis=1)
    return largest


@gluon.jit
def advance_max(
    s,
    row_max,
    scale_log2,
    P_OFFSET_LOG2: gl.constexpr = 0,
    INTEGER_MAX: gl.constexpr = False,
    IS_FIRST: gl.constexpr = True,
):
    """Return the running maximum, in log2 units less the offset, after one block of masked scores.

    With INTEGER_MAX integers are compared where that is known to be right, see :func:`declare_sign`; no bit depends on
    it. On the first block of a tile nothing is known yet.
    """
    if INTEGER_MAX and not IS_FIRST:
        largest = _largest_where_none_is_negative(s)
    else:
        largest = gl.max(s, axis=1)
    new_max = gl.maximum(row_max, gl.fma(largest, scale_log2, 0.0 - P_OFFSET_LOG2))
    if INTEGER_MAX:
        asm: gl.constexpr = _keep_sign_asm(0.0 - P_OFFSET_LOG2)
        gl.inline_asm_elementwise(asm, "=r,=r,f,f", [new_max], dtype=gl.int32, is_pure=False, pack=2)
    return new_max


@gluon.jit
def rescaling(row_max, new_max):
    """Return the factor by which earlier sums are multiplied when the maximum changes to ``new_max``."""
    return ex2(row_max - gl.where(new_max == float("-inf"), 0.0, new_max))


@gluon.jit
def exponentials(s, row_max, new_max, thread_sums, scale_log2):
    """Return P of a block, the row sums with it, and the factor of earlier sums; ``row_max`` is the maximum before."""
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = ex2(row_max - base)
    p = ex2(gl.fma(s, per_row(scale_log2), gl.expand_dims(-base, 1)))
    sums = thread_row_sums(p)
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return p, gl.fma(thread_sums, gl.expand_dims(factor, 1), sums), rescale


@gluon.jit
def update(
    s,
    row_max,
    thread_sums,
    scale_log2,
    P_OFFSET_LOG2: gl.constexpr = 0,
    INTEGER_MAX: gl.constexpr = False,
    IS_FIRST: gl.constexpr = True,
):
    """Advance the running statistics by one block of masked scores; return p, row_max, thread_sums and rescale.

    ``scale_log2`` > 0, a scalar or one factor per row, takes scores to log2 units. P is scaled by 2 ** P_OFFSET_LOG2.
    ``rescale`` is the factor per row of what O has summed before.
    """
    new_max = advance_max(s, row_max, scale_log2, P_OFFSET_LOG2, INTEGER_MAX, IS_FIRST)
    p, thread_sums, rescale = exponentials(s, row_max, new_max, thread_sums, scale_log2)
    return p, new_max, thread_sums, rescale


@gluon.jit
def column(factor, o):
    """Return one factor per row as a column in the layout of ``o``."""
    return gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout), assert_trivial=True), 1)


@gluon.jit
def scaled(o, factor):
    """Multiply O by one factor per row."""
    return o * column(factor, o)


@gluon.jit
def finalize(row_max, thread_sums, sink=None):
    """Return 1 / row_sum and the base-2 lse of every row; (0, -inf) for a row that saw no key.

    A sink, in nats, is one more term of the sum, added last. A row that saw no key but has a sink counts from a maximum
    of 0.
    """
    row_sum = gl.convert_layout(gl.sum(thread_sums, axis=1), row_max.type.layout, assert_trivial=True)
    if sink is not None:
        row_max = gl.where(row_max == float("-inf"), 0.0, row_max)
        row_sum = row_sum + ex2(gl.fma(sink, LOG2_E, -row_max))
    empty = row_sum == 0
    inverse = gl.where(empty, 0.0, rcp(row_sum))
    lse_log2 = gl.where(empty, float("-inf"), row_max + lg2(row_sum))
    return inverse, lse_log2


@gluon.jit
def executed(x):
    """Return ``x``, read by a side effect that never happens, so that its arithmetic cannot sink below a later barrier.

    ptxas moves exponentials across named barriers. Measured on an H200, a warpgroup that waits for its turn with its
    softmax still to do runs at 467 instead of 670 TFLOP/s.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred %never; setp.lt.f32 %never, $1, 0fBF800000; @%never nanosleep.u32 1; mov.b32 $0, $1; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )
