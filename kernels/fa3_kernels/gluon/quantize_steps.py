"""Rotation and centring of a tile in registers: steps 2, 3 and 7 of :mod:`fa3_kernels.twin.quantize`, in its order.

The quantiser kernel (:mod:`fa3_kernels.gluon.quantize_kernel`) calls these functions; all are on tiles in its
row_layout, where LANES lanes share a row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def log2(x):
    """Return the base-2 logarithm of a power of two."""
    return x.bit_length() - 1


@gluon.constexpr_function
def exchange(lane_distance):
    """PTX that reads the value of the lane ``lane_distance`` away; and PTX that gives +1 in the lower lane of such a
    pair, -1 in the upper.
    """
    shuffle = f"shfl.sync.bfly.b32 $0, $1, {lane_distance}, 0x1f, 0xffffffff;"
    side = f"""{{
        .reg .pred p; .reg .b32 lane;
        mov.u32 lane, %laneid; and.b32 lane, lane, {lane_distance}; setp.eq.u32 p, lane, 0;
        selp.f32 $0, 0f3F800000, 0fBF800000, p;
    }}"""
    return shuffle, side


@gluon.jit
def _round_in_thread(y, HALF: gl.constexpr):
    """Do the butterflies at distance HALF, whose ends are in one thread."""
    rows: gl.constexpr = y.shape[0]
    channels: gl.constexpr = y.shape[1]
    a, b = gl.split(gl.permute(gl.reshape(y, [rows, channels // (2 * HALF), 2, HALF]), (0, 1, 3, 2)))
    pairs = gl.permute(gl.join(a + b, a - b), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(pairs, [rows, channels]), y.type.layout, assert_trivial=True)


@gluon.jit
def _round_between_lanes(y, LANE_DISTANCE: gl.constexpr):
    """Do the butterflies whose ends are in two lanes: a + b in the lower lane, a - b in the upper one.

    The fma multiplies by +-1, so it rounds as that sum does.
    """
    asm: gl.constexpr = exchange(LANE_DISTANCE)
    other = gl.inline_asm_elementwise(asm[0], "=r,r", [y], dtype=gl.float32, is_pure=True, pack=1)
    side = gl.inline_asm_elementwise(asm[1], "=r", [], dtype=gl.float32, is_pure=True, pack=1)
    return gl.fma(y, side, other)


@gluon.jit
def butterflies(y, LANES: gl.constexpr):
    """Return y H, not normalised, of float32 (rows, channels) in row_layout, H being Sylvester's Hadamard matrix."""
    for i in gl.static_range(log2(y.shape[1] // LANES)):
        y = _round_in_thread(y, 1 << i)
    for i in gl.static_range(log2(LANES)):
        y = _round_between_lanes(y, (32 // LANES) << i)
    return y


@gluon.jit
def neighbours_sum(x):
    """Sum over the last axis as a tree, neighbours first."""
    shape: gl.constexpr = x.shape
    for i in gl.static_range(log2(shape[-1])):
        x = gl.sum(gl.reshape(x, shape[:-1] + [shape[-1] >> (i + 1), 2]), axis=len(shape))
    return gl.reshape(x, shape[:-1])


@gluon.jit
def _halves(y):
    """Split float32 (rows, lanes, n) into the lower and the upper half of each thread's channels."""
    rows: gl.constexpr = y.shape[0]
    lanes: gl.constexpr = y.shape[1]
    return gl.split(gl.permute(gl.reshape(y, [rows, lanes, 2, y.shape[2] // 2]), (0, 1, 3, 2)))


@gluon.jit
def _joined(a, b):
    """Undo :func:`_halves`."""
    rows: gl.constexpr = a.shape[0]
    lanes: gl.constexpr = a.shape[1]
    return gl.reshape(gl.permute(gl.join(a, b), (0, 1, 3, 2)), [rows, lanes, 2 * a.shape[2]])


@gluon.jit
def _mean_of(mean, like, STRIDE: gl.constexpr):
    """Load the means of the channels of ``like``, float32 (rows, lanes, n); the lanes' channels begin STRIDE apart."""
    layout: gl.constexpr = gl.SliceLayout(0, like.type.layout)
    lane = gl.arange(0, like.shape[1], gl.SliceLayout(1, layout))
    channel = gl.arange(0, like.shape[2], gl.SliceLayout(0, layout))
    return gl.expand_dims(gl.load(mean + gl.expand_dims(lane * STRIDE, 1) + gl.expand_dims(channel, 0)), 0)


@gluon.jit
def _in_order(x):
    """Return ``x`` by a volatile identity: LLVM would otherwise move all loads before the arithmetic, which spills."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _less_mean(y, mean, filled, AT: gl.constexpr, STRIDE: gl.constexpr):
    """Return float32 (rows, lanes, n) less its means, which begin at channel AT of a lane.

    Means are loaded for 16 channels at a time, as registers do not hold all. Only the first ``filled`` rows are of the
    sequence; the others take -0 times the mean.
    """
    n: gl.constexpr = y.shape[2]
    if n > 16:
        a, b = _halves(y)
        a = _less_mean(a, mean, filled, AT, STRIDE)
        y = _joined(a, _less_mean(b, mean, filled, AT + n // 2, STRIDE))
    else:
        row = gl.arange(0, y.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, y.type.layout)))
        minus = gl.expand_dims(gl.expand_dims(gl.where(row < filled, -1.0, -0.0), 1), 2)
        y = _in_order(gl.fma(minus, _mean_of(mean + AT, y, STRIDE), y))
    return y


@gluon.jit
def _dot_mean(y, mean, AT: gl.constexpr, STRIDE: gl.constexpr):
    """Return the sums over the channels of float32 (rows, lanes, n) times their means, (rows, lanes)."""
    n: gl.constexpr = y.shape[2]
    if n > 16:
        a, b = _halves(y)
        total = _dot_mean(a, mean, AT, STRIDE)
        total += _dot_mean(b, mean, AT + n // 2, STRIDE)
    else:
        total = _in_order(neighbours_sum(y * _mean_of(mean + AT, y, STRIDE)))
    return total


@gluon.jit
def without_mean(y, mean, first_row, length, LANES: gl.constexpr):
    """Return y - mean; rows beyond the sequence stay 0, or become NaN beside a mean that is not finite."""
    rows: gl.constexpr = y.shape[0]
    n: gl.constexpr = y.shape[1] // LANES
    parts = gl.reshape(y, [rows, LANES, n])
    centred = gl.reshape(_less_mean(parts, mean, length - first_row, 0, n), y.shape)
    return gl.convert_layout(centred, y.type.layout, assert_trivial=True)


@gluon.jit
def store_lse_correction(y, mean, at, softmax_scale, first_row, length, LANES: gl.constexpr):
    """Store softmax_scale * (q . mean) for a tile's rows, the first one at ``at + first_row``.

    The sum over the channels is a tree, neighbours first. Rows beyond the sequence are not stored.
    """
    rows: gl.constexpr = y.shape[0]
    layout: gl.constexpr = gl.SliceLayout(1, y.type.layout)
    n: gl.constexpr = y.shape[1] // LANES
    of_lanes = _dot_mean(gl.reshape(y, [rows, LANES, n]), mean, 0, n)
    total = gl.convert_layout(neighbours_sum(of_lanes), layout)  # (rows, lanes) -> (rows,)
    row = first_row + gl.arange(0, rows, layout)
    gl.store(at + row, total * softmax_scale, row < length)
