"""The quantiser kernel: tiles of fp16 or bf16 become e4m3 with a descale per block.

Its order is that of :mod:`fa3_kernels.twin.quantize`. :mod:`fa3_kernels.gluon.quantize` plans and starts it,
:mod:`fa3_kernels.gluon.quantize_mean` has the kernels of K's mean that run before it, and
:mod:`fa3_kernels.gluon.quantize_steps` the arithmetic of rotation and mean.

All warps of a program run the same code. A tile goes from global to shared memory by cp.async, 16 bytes a thread and
swizzled, so that a thread can then read up to 128 channels of one row: seven rounds of the rotation then need no other
thread, the eighth one needs a shuffle. The buffer is free as soon as it is read, and the next tile of the program is on
its way while this one is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from fa3_kernels.gluon.quantize_steps import butterflies, store_lse_correction, without_mean


class Correction(NamedTuple):
    """Holds the mean of K, with the rotation's signs, and where the LSE correction goes."""

    mean: Any  # float32 (batch, nheads_kv, channels)
    lse: Any  # float32 (batch, nheads, seqlen_q) or (nheads, total_q)
    lse_stride: int
    softmax_scale: float
    group: int


class QuantizedOperand(NamedTuple):
    """One operand; strides in elements, ``tiles`` and descale ``blocks`` per head; ``group`` heads share a maximum."""

    x: Any  # int16 view
    out: Any  # uint8 view, contiguous
    descale: Any  # float32 (batch, heads, blocks)
    amax: Any  # int32 (batch, heads / group, blocks): bits of the maxima, two passes only
    cu_seqlens: Any  # int32 (batch + 1,); of packed sequences only
    stride_batch: int
    stride_row: int
    stride_head: int
    heads: int
    seqlen: int
    tiles: int
    blocks: int
    tiles_per_block: int
    group: int


@gluon.constexpr_function
def load_layout(channels, warps):
    """Return the layout of a tile as it is loaded: 8 channels, which are 16 bytes, a thread."""
    return gl.BlockedLayout([1, 8], [256 // channels, channels // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def store_layout(channels, lanes, warps):
    """Return the layout of codes, 16 bytes a lane; a warp stores the rows that it has, so it waits for no other."""
    rows = 512 // channels
    return gl.BlockedLayout([32 // (lanes * rows), 16], [rows, channels // 16], [warps, 1], [1, 0])


@gluon.constexpr_function
def shared_layout(channels):
    """Return 16-byte chunks swizzled over 128 bytes: chunks of a column in eight rows lie in different banks."""
    rows_per_line = max(1, 64 // channels)
    return gl.SwizzledSharedLayout(8, rows_per_line, 8 // rows_per_line, [1, 0])


@gluon.constexpr_function
def row_layout(channels, lanes, warps):
    """Return the layout of a tile as it is computed: ``lanes`` lanes share a row, each with neighbouring channels."""
    return gl.BlockedLayout([1, channels // lanes], [32 // lanes, lanes], [warps, 1], [0, 1])


@gluon.jit
def descale_of(amax, norm, SCALE_UP: gl.constexpr):
    """Return max / 448, clamped, and with SCALE_UP rounded up to a power of two; 1 where the maximum is 0 or NaN."""
    descale = gl.minimum(gl.maximum(gl.div_rn(amax * norm, 448.0), 2.0**-126), 2.0**126)
    if SCALE_UP:
        descale = ((descale.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
    return gl.where(amax > 0, descale, 1.0)


@gluon.jit
def _chosen(q, k, v, q_tiles, k_tiles, index):
    """Return a tile's operand and its index there: k's from the last on, just read for the mean, then q's, then v's."""
    t = k
    at = k_tiles - 1 - index
    if index >= k_tiles:
        t = q
        at = index - k_tiles
    if index >= k_tiles + q_tiles:
        t = v
        at = index - k_tiles - q_tiles
    return t, at


@gluon.jit
def _place(t, index, ROWS: gl.constexpr, PACKED: gl.constexpr):
    """Return where a tile lies: head (fastest), sequence, first row; start and length of the sequence in rows."""
    head = index % t.heads
    sequence = index // t.heads // t.tiles
    start = 0
    length = t.seqlen
    if PACKED:
        start = gl.load(t.cu_seqlens + sequence)
        length = gl.load(t.cu_seqlens + sequence + 1) - start
    return head, sequence, index // t.heads % t.tiles * ROWS, start, length


@gluon.jit
def _fetch(t, index, smem, PART: gl.constexpr, PARTS: gl.constexpr, HEAD_DIM: gl.constexpr, PACKED: gl.constexpr):
    """Start to copy part PART of a tile into shared memory, by cp.async.

    Rows beyond the sequence and padded channels become zeros: for an element that the mask leaves out cp.async reads no
    bytes and writes zeros to shared memory (PTX ISA, cp.async with a source size of 0). The caller waits for the group
    before it reads.
    """
    rows: gl.constexpr = smem.shape[0]
    channels: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = load_layout(channels, gl.num_warps())
    head, sequence, first_row, start, length = _place(t, index, rows * PARTS, PACKED)
    row = first_row + PART * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))
    channel = gl.expand_dims(gl.arange(0, channels, gl.SliceLayout(0, layout)), 0)
    base = t.x + sequence.to(gl.int64) * t.stride_batch + head.to(gl.int64) * t.stride_head
    pointers = base + gl.expand_dims((start + row).to(gl.int64) * t.stride_row, 1) + channel
    mask = gl.expand_dims(row < length, 1)
    if channels != HEAD_DIM:
        mask = mask & (channel < HEAD_DIM)
    async_copy.async_copy_global_to_shared(smem, pointers, mask)
    async_copy.commit_group()


@gluon.jit
def as_float32(bits, IS_BF16: gl.constexpr):
    """Return int16 bits of bf16 or fp16 as float32."""
    if IS_BF16:
        return bits.to(gl.bfloat16, bitcast=True).to(gl.float32)
    else:
        return bits.to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _sign_changed(bits, signs):
    """Return 16-bit patterns with their signs changed by the sign masks of their channels, two patterns at a time."""
    layout: gl.constexpr = bits.type.layout
    masks = gl.load(signs + gl.arange(0, bits.shape[1], gl.SliceLayout(0, layout)))
    masks = gl.expand_dims(masks, 0) + gl.full(bits.shape, 0, gl.int16, layout)
    return gl.inline_asm_elementwise(
        "xor.b32 $0, $1, $2;", "=r,r,r", [bits, masks], dtype=gl.int16, is_pure=True, pack=2
    )


@gluon.jit
def _store(t, y, place, HEAD_DIM: gl.constexpr, PACKED: gl.constexpr, LANES: gl.constexpr):
    """Write float32 ``y``, already scaled, as e4m3; rows beyond the sequence and padded channels are not written."""
    head, sequence, first_row, start, length = place
    rows: gl.constexpr = y.shape[0]
    channels: gl.constexpr = y.shape[1]
    layout: gl.constexpr = store_layout(channels, LANES, gl.num_warps())
    codes = gl.convert_layout(y.to(gl.float8e4nv).to(gl.uint8, bitcast=True), layout)
    row = first_row + gl.arange(0, rows, gl.SliceLayout(1, layout))
    channel = gl.expand_dims(gl.arange(0, channels, gl.SliceLayout(0, layout)), 0)
    if not PACKED:
        start = sequence * t.seqlen
    line = (start + row).to(gl.int64) * t.heads + head
    mask = gl.expand_dims(row < length, 1)
    if channels != HEAD_DIM:
        mask = mask & (channel < HEAD_DIM)
    gl.store(t.out + gl.expand_dims(line * HEAD_DIM, 1) + channel, codes, mask)


@gluon.jit
def _conditioned(
    t,
    bits,
    signs,
    correction,
    is_k,
    place,
    ROTATE: gl.constexpr,
    WRITE_LSE: gl.constexpr,
    IS_BF16: gl.constexpr,
    PACKED: gl.constexpr,
    LANES: gl.constexpr,
):
    """Return a part of a tile of q or k as float32: k less its mean, both rotated; store q's LSE correction on the way.

    Without a mean ``correction`` is None.
    """
    head, sequence, first_row, start, length = place
    if ROTATE:
        bits = _sign_changed(bits, signs)
    y = as_float32(bits, IS_BF16)
    if correction is not None:
        if is_k:
            y = without_mean(y, correction.mean + (sequence * t.heads + head) * bits.shape[1], first_row, length, LANES)
        elif WRITE_LSE:
            mean = correction.mean + (sequence * t.heads + head) // correction.group * bits.shape[1]
            line = head if PACKED else sequence * t.heads + head
            at = correction.lse + line.to(gl.int64) * correction.lse_stride + start
            store_lse_correction(y, mean, at, correction.softmax_scale, first_row, length, LANES)
    if ROTATE:
        y = butterflies(y, LANES)
    return y


@gluon.jit
def _part(
    t,
    index,
    bits,
    signs,
    correction,
    is_k,
    is_v,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    ROTATE: gl.constexpr,
    WRITE_LSE: gl.constexpr,
    IS_BF16: gl.constexpr,
    PACKED: gl.constexpr,
    LANES: gl.constexpr,
):
    """Return part PART of a tile, float32, as it is to be scaled and cast; v is neither centred nor rotated."""
    head, sequence, first_row, start, length = _place(t, index, bits.shape[0] * PARTS, PACKED)
    place = (head, sequence, first_row + PART * bits.shape[0], start, length)
    if is_v:
        y = as_float32(bits, IS_BF16)
    else:
        y = _conditioned(t, bits, signs, correction, is_k, place, ROTATE, WRITE_LSE, IS_BF16, PACKED, LANES)
    return y


@gluon.jit
def _largest(y, LANES: gl.constexpr):
    """Return max |y|, in eight chains of comparisons a thread: in a single one each would wait for the one before."""
    rows: gl.constexpr = y.shape[0]
    n: gl.constexpr = y.shape[1] // LANES
    eighths = gl.max(gl.reshape(gl.abs(y), [rows, LANES, n // 8, 8]), axis=2)
    return gl.max(gl.max(gl.max(eighths, axis=2), axis=1), axis=0)


@gluon.jit
def _tile(
    t,
    index,
    bits,
    kept,
    kept_amax,
    signs,
    correction,
    is_k,
    is_v,
    PARTS: gl.constexpr,
    PHASE: gl.constexpr,
    SCALE_UP: gl.constexpr,
    NORM: gl.constexpr,
    ROTATE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    IS_BF16: gl.constexpr,
    PACKED: gl.constexpr,
    LANES: gl.constexpr,
):
    """Quantise one tile, or only find its maximum in PHASE "amax".

    ``bits`` is the last part of the tile. Of a tile in two parts ``kept`` has the first one in shared memory, float32,
    and ``kept_amax`` its maximum. Maxima of two passes are collected in ``t.amax`` as the bits of floats >= 0, which
    are ordered as integers. A tile with no row in the sequence stores nothing but the descale 1 of its block.
    """
    rows: gl.constexpr = bits.shape[0]
    LAST: gl.constexpr = PARTS - 1
    head, sequence, first_row, start, length = _place(t, index, rows * PARTS, PACKED)
    tile = first_row // (rows * PARTS)
    block = tile // t.tiles_per_block
    descale_at = t.descale + (sequence * t.heads + head) * t.blocks + block
    is_first = tile == block * t.tiles_per_block
    if first_row < length:
        y = _part(
            t, index, bits, signs, correction, is_k, is_v, LAST, PARTS, ROTATE, PHASE != "amax", IS_BF16, PACKED, LANES
        )
        if PHASE != "cast":
            amax = _largest(y, LANES)
            if PARTS == 2:
                amax = gl.maximum(amax, kept_amax)
        if PHASE != "one_pass":
            amax_at = t.amax + (sequence * t.heads + head) // t.group * t.blocks + block
        if PHASE == "amax":
            gl.atomic_max(amax_at, gl.where(amax > 0, amax, 0.0).to(gl.int32, bitcast=True), sem="relaxed")
        else:
            if PHASE == "cast":
                amax = gl.load(amax_at).to(gl.float32, bitcast=True)
            norm = gl.where(is_v, 1.0, NORM)
            descale = descale_of(amax, norm, SCALE_UP)
            gl.store(descale_at, descale, mask=is_first)
            factor = norm * gl.div_rn(1.0, descale)
            _store(t, y * factor, (head, sequence, first_row + LAST * rows, start, length), HEAD_DIM, PACKED, LANES)
            if PARTS == 2:
                y = kept.load(y.type.layout)
                _store(t, y * factor, (head, sequence, first_row, start, length), HEAD_DIM, PACKED, LANES)
    elif PHASE != "amax":
        gl.store(descale_at, 1.0, mask=is_first)


@gluon.jit
def quantize(
    q,
    k,
    v,
    q_tiles,
    k_tiles,
    v_tiles,
    signs,
    correction,
    ROWS: gl.constexpr,
    PARTS: gl.constexpr,
    CHANNELS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    ROTATE: gl.constexpr,
    NORM: gl.constexpr,
    PHASE: gl.constexpr,
    SCALE_UP: gl.constexpr,
    IS_BF16: gl.constexpr,
    PACKED: gl.constexpr,
    LANES: gl.constexpr,
):
    """Quantise tiles of k, then of q, then of v, dealt out to the programs in turn; an operand may have no tiles.

    The later half of the programs, which share multiprocessors with the others, walk over their tiles backwards where
    tiles have two parts and K a mean: v, which is not rotated, is then loaded while q and k are computed.

    PHASE is "one_pass" where a tile is all that shares a descale, else "amax" and then "cast". A tile has PARTS parts
    of ROWS rows: one part, or two where registers cannot hold a whole tile. The first part then waits in shared memory,
    in float32, for the maximum of the second one.
    """
    layout: gl.constexpr = row_layout(CHANNELS, LANES, gl.num_warps())
    smem = gl.allocate_shared_memory(gl.int16, [ROWS, CHANNELS], shared_layout(CHANNELS))
    kept = None
    kept_amax = gl.to_tensor(0.0)
    if PARTS == 2:
        kept = gl.allocate_shared_memory(gl.float32, [ROWS, CHANNELS], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    count = (q_tiles + k_tiles + v_tiles - program + programs - 1) // programs
    index = program
    step = programs
    if PARTS == 2 and correction is not None and 2 * program >= programs:
        index = program + (count - 1) * programs
        step = -programs
    t, at = _chosen(q, k, v, q_tiles, k_tiles, index)
    _fetch(t, at, smem, 0, PARTS, HEAD_DIM, PACKED)
    for number in range(count):
        is_k = index < k_tiles
        is_v = index >= k_tiles + q_tiles
        t, at = _chosen(q, k, v, q_tiles, k_tiles, index)
        async_copy.wait_group(0)
        bits = smem.load(layout)
        if PARTS == 2:
            _fetch(t, at, smem, 1, PARTS, HEAD_DIM, PACKED)
            y = _part(
                t, at, bits, signs, correction, is_k, is_v, 0, PARTS, ROTATE, PHASE != "amax", IS_BF16, PACKED, LANES
            )
            kept_amax = _largest(y, LANES)
            kept.store(y)
            async_copy.wait_group(0)
            bits = smem.load(layout)
        if number + 1 < count:
            after, after_at = _chosen(q, k, v, q_tiles, k_tiles, index + step)
            _fetch(after, after_at, smem, 0, PARTS, HEAD_DIM, PACKED)
        _tile(
            t,
            at,
            bits,
            kept,
            kept_amax,
            signs,
            correction,
            is_k,
            is_v,
            PARTS,
            PHASE,
            SCALE_UP,
            NORM,
            ROTATE,
            HEAD_DIM,
            IS_BF16,
            PACKED,
            LANES,
        )
        index += step


SCALES = {"amax": False, "power_of_two": True}  # SCALE_UP by the name of a rounding in fa3_reference.scales
