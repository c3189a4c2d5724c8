"""The warp of the backward kernel that adds dQ to fp32 sums in memory, by TMA.

It runs as the fourth partition of :mod:`fa3_kernels.gluon.backward`. A consumer warpgroup stages its share of dQ in
shared memory. DQ_FULL tells this warp that the share is staged, DQ_EMPTY tells the warpgroup that TMA has read it; each
warpgroup has its own pair. In deterministic mode the warp waits for its turn at every row block, in the order of
:meth:`fa3_kernels.plan.key_tiles.Walk.parts`: a counter in memory per row block says how many parts its dQ has taken.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from fa3_kernels.gluon.backward_geometry import (
    advanced,
    block_index,
    dq_coordinates,
    key_tile,
    parts_before,
    row_blocks,
)
from fa3_kernels.gluon.boxes import groups, parts
from fa3_kernels.gluon.pipeline import named_barrier
from fa3_kernels.plan import barriers
from fa3_kernels.plan.barriers import BackwardBarrier

DQ_EMPTY = gl.constexpr(int(BackwardBarrier.DQ_EMPTY))
DQ_FULL = gl.constexpr(int(BackwardBarrier.DQ_FULL))
DQ_THREADS = gl.constexpr(barriers.slot_threads(1))


@gluon.jit
def warpgroup_barrier(OPERATION: gl.constexpr, FIRST: gl.constexpr, WARPGROUP: gl.constexpr):
    """Arrive or sync at a barrier of one consumer warpgroup and the warp that adds dQ."""
    named_barrier(OPERATION, FIRST + WARPGROUP, DQ_THREADS)


@builtin
def add_in_memory(desc, coordinates, buffer, _semantic=None):
    """Start a TMA addition of a shared fp32 tile to memory."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, buffer.handle)


@gluon.jit
def _seen(word):
    """Return how many parts a row block's dQ has taken, as memory says at this moment; ``word`` is its counter's
    address.
    """
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [word], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _take_turn(word, count, seen):
    """Wait until a row block's dQ has taken ``count`` parts; memory is not read where ``seen`` is that many already.

    The fence puts the additions by TMA behind the wait.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred %waits; .reg .b32 %taken; mov.b32 %taken, $3; WAIT: setp.lt.s32 %waits, %taken, $2; "
        "@%waits ld.acquire.gpu.global.b32 %taken, [$1]; @%waits bra WAIT; fence.proxy.async.global; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [word, count, seen],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _pass_asm(pending):
    """PTX that waits for all but ``pending`` additions and then, in one lane, adds 1 to the counter."""
    return (
        f"{{ .reg .pred %first; .reg .b32 %lane; cp.async.bulk.wait_group {pending}; fence.proxy.async.global; "
        "bar.warp.sync -1; mov.u32 %lane, %laneid; setp.eq.s32 %first, %lane, 0; "
        "@%first red.release.gpu.global.add.s32 [$1], 1; mov.b32 $0, 0; }"
    )


@gluon.jit
def _pass_turn(word, PENDING: gl.constexpr):
    """Count a part as added, once all but PENDING later additions are in memory.

    Waiting only until TMA has read shared memory would be too early.
    """
    asm: gl.constexpr = _pass_asm(PENDING)
    gl.inline_asm_elementwise(asm, "=r,l", [word], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _share(variant, warpgroup):
    """Return the boxes of dQ that a warpgroup stages, as (first, count)."""
    return groups(variant.qk_boxes)[warpgroup] if variant.qk_boxes > 1 else (warpgroup, 1)


@gluon.jit
def share_of_dq(p, WARPGROUP: gl.constexpr):
    """Return the buffer where a warpgroup stages its share of dQ, or one part of it at a time."""
    if p.variant.qk_boxes > 1:
        return parts(p.dq_smem, 0, p.variant.qk_boxes)[WARPGROUP]
    else:
        return p.dq_smem.index(WARPGROUP)


@gluon.jit
def _add_boxes(p, tile, head, block, part, WARPGROUP: gl.constexpr):
    """Start the additions of the boxes that a warpgroup has staged."""
    first: gl.constexpr = _share(p.variant, WARPGROUP)[0]
    stop: gl.constexpr = first + _share(p.variant, WARPGROUP)[1]
    for i in gl.static_range(first, stop):
        add_in_memory(p.dq_desc, dq_coordinates(p, tile, head, block, part, i), p.dq_smem.index(i))


@gluon.jit
def _start_part(p, tile, head, block, part):
    """Wait until both warpgroups have staged a part of a row block's dQ, and start its additions.

    ``part`` numbers the parts in which a share is handed on: one, or two at head_dim 256.
    """
    for w in gl.static_range(2):
        warpgroup_barrier("sync", DQ_FULL, w)
        fence_async_shared()  # of what the consumers wrote: here it costs them no time
        _add_boxes(p, tile, head, block, part, w)


@gluon.jit
def _hand_back(p):
    """Give the buffers back to the warpgroups, each as soon as TMA has read it."""
    for w in gl.static_range(2):
        tma.store_wait(1 - w)  # the second warpgroup's share is one box
        warpgroup_barrier("arrive", DQ_EMPTY, w)


@gluon.jit
def _add_in_turn(p, tile, head, rows):
    """Add all row blocks of a head, each in its turn; the counter of the next one is read while TMA reads this one.

    A turn is passed when the part is in memory. At head_dim 256 a part comes in two halves, and the warp waits for
    memory only when the first half of the next row block is on its way, so that the consumers have the buffers back in
    time. :mod:`fa3_kernels.plan.key_tiles` puts two row blocks between tiles there.
    """
    dq_parts: gl.constexpr = p.variant.dq_parts
    is_late: gl.constexpr = dq_parts == 2
    cursor = rows.start
    word = p.turns + block_index(p, tile, head, rows.first + cursor)
    seen = cursor * 0
    for i in range(rows.count):
        block = rows.first + cursor
        cursor = advanced(p, rows, cursor)
        before = word
        word = p.turns + block_index(p, tile, head, block)
        _take_turn(word, parts_before(p, tile, block), seen)
        if is_late:
            _start_part(p, tile, head, block, 0)
            _hand_back(p)
            if i > 0:
                _pass_turn(before, p.variant.dq_boxes)
        _start_part(p, tile, head, block, dq_parts - 1)
        seen = _seen(p.turns + block_index(p, tile, head, rows.first + cursor))
        _hand_back(p)
        if not is_late:
            _pass_turn(word, 0)
    if is_late:  # noqa: SIM102 (known when compiled, and known when run)
        if rows.count > 0:
            _pass_turn(word, 0)


@gluon.jit
def add_dq(p):
    """Run the warp that adds dQ: for every row block of every tile of this CTA, in deterministic mode each in its
    turn.
    """
    dq_parts: gl.constexpr = p.variant.dq_parts
    number = 0
    entry = gl.load(p.tiles)
    for w in gl.static_range(2):
        warpgroup_barrier("arrive", DQ_EMPTY, w)
    while entry >= 0:
        tile = key_tile(p, entry)
        entry = gl.load(p.tiles + number + 1)
        rows = row_blocks(p, tile)
        for member in range(p.group):
            head = tile.kv_head * p.group + member
            if p.variant.is_deterministic:
                _add_in_turn(p, tile, head, rows)
            else:
                cursor = rows.start
                for _i in range(rows.count):
                    block = rows.first + cursor
                    cursor = advanced(p, rows, cursor)
                    for part in gl.static_range(dq_parts):
                        _start_part(p, tile, head, block, part)
                        _hand_back(p)
        number += 1
