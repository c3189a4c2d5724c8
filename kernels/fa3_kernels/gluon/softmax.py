"""Online softmax of one warpgroup's rows, in the order of :mod:`fa3_kernels.twin.softmax`.

Every multiply-add that is fused is written as one; kernels are compiled with enable_fp_fusion=False so that no other
is.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LN2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _mufu(INSTRUCTION: gl.constexpr, x):
    """One special-function instruction (.approx.ftz.f32): Triton's own log2 and division are other sequences."""
    return gl.inline_asm_elementwise(INSTRUCTION, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def ex2(x):
    return _mufu("ex2.approx.ftz.f32 $0, $1;", x)


@gluon.jit
def rcp(x):
    return _mufu("rcp.approx.ftz.f32 $0, $1;", x)


@gluon.jit
def lg2(x):
    return _mufu("lg2.approx.ftz.f32 $0, $1;", x)


@gluon.jit
def thread_row_sums(p):
    """Sum of each quad lane's own columns: pairs first, then serially. (rows, keys) -> (rows, 4), one per thread."""
    rows: gl.constexpr = p.shape[0]
    keys: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(gl.reshape(p, [rows, keys // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def _of_lane(key, layout: gl.constexpr):
    """``key`` int32 (rows,) less the first column of each quad lane, 2 * lane, as (rows, 1, 4, 1)."""
    by_lane: gl.constexpr = gl.SliceLayout(3, layout)
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, by_lane)))
    lane = gl.expand_dims(gl.expand_dims(gl.expand_dims(lane, 0), 1), 3)
    key = gl.convert_layout(key, gl.SliceLayout(1, gl.SliceLayout(2, by_lane)), assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(key, 1), 2), 3) - 2 * lane


@gluon.jit
def visible(s, stop, start=None):
    """-inf for columns at or beyond ``stop`` and before ``start``, int32 (rows,), counted from the block's first key.

    Column 8 i + 2 lane + e: i and e are constants of a register, so that a comparison has an immediate operand and no
    column number is computed or held.
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
    """tanh of the scores in units of the cap; ``cap_scale`` (one, or one per row) is 2 / softcap times their scale."""
    grown = ex2(s * per_row(cap_scale))
    return gl.fma(rcp(grown + 1.0), -2.0, 1.0)


@gluon.jit
def per_row(x):
    """A factor per row as a column; a scalar stays one."""
    if x.type.is_block():
        return gl.expand_dims(x, 1)
    else:
        return x


@gluon.jit
def declare_sign():
    """Declare, at the head of a kernel, the register in which a warp keeps whether none of its maxima is negative."""
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
    """``zero`` is what a score of 0 has become in the maxima, the two of a thread."""
    return (
        "{ .reg .pred %first, %any; "
        f"setp.lt.f32 %first, $2, {zero}; setp.lt.or.f32 %any, $3, {zero}, %first; "
        "vote.sync.any.pred %any, %any, 0xffffffff; selp.b32 %none_negative, 0, 1, %any; "
        "mov.b32 $0, 0; mov.b32 $1, 0; }"
    )


@gluon.jit
def _largest_where_none_is_negative(s):
    """Largest score per row, or below 0 any other, if no running maximum of the warp is negative; else the largest.

    Bits of a float >= 0 are ordered as integers, of which one instruction compares three where of floats it compares
    two at the same cost (68 of the 460 instructions of a step become 36). If the largest score is negative, the
    integers give another negative one, which a running maximum that is not negative does not notice.
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
    """Running maximum, in log2 units less the offset, after one block of masked scores.

    INTEGER_MAX: by integers where their order is known to be right, see :func:`declare_sign`; no bit depends on it.
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
    """The factor that earlier sums take on with a new maximum."""
    return ex2(row_max - gl.where(new_max == float("-inf"), 0.0, new_max))


@gluon.jit
def exponentials(s, row_max, new_max, thread_sums, scale_log2):
    """P of a block, the sums with it, and the factor that earlier sums take on; ``row_max`` is the maximum before."""
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
    """Advance the running statistics by one block of masked scores.

    ``scale_log2`` takes them to log2 units, > 0, a scalar or one factor per row. P is scaled by 2 ** P_OFFSET_LOG2.
    Returns p, row_max, thread_sums, rescale.
    """
    new_max = advance_max(s, row_max, scale_log2, P_OFFSET_LOG2, INTEGER_MAX, IS_FIRST)
    p, thread_sums, rescale = exponentials(s, row_max, new_max, thread_sums, scale_log2)
    return p, new_max, thread_sums, rescale


@gluon.jit
def column(factor, o):
    """One factor per row as a column beside ``o``."""
    return gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout), assert_trivial=True), 1)


@gluon.jit
def scaled(o, factor):
    """O times one factor per row."""
    return o * column(factor, o)


@gluon.jit
def finalize(row_max, thread_sums, sink=None):
    """Return 1 / row_sum and the base-2 lse; (0, -inf) for a row that saw no key.

    A sink, in nats, is one more term of the sum, taken last; a row that saw no key counts from a maximum of 0 then.
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
    """``x`` itself, read by a side effect that never happens: no arithmetic behind it sinks below a later barrier.

    ptxas moves exponentials across named barriers; measured on an H200, a warpgroup that waits for its turn with its
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
