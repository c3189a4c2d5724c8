"""The ways in which a warpgroup's share of dQ can reach memory, for a measurement: what the shipped kernel does not do.

The shipped kernel stages dQ in shared memory, and a warp of its own starts TMA additions. Here the consumer starts them
itself, or adds from registers: whole lines with 16 bytes a thread, two neighbouring elements, or one element at a time.
Two more leave additions, or all of it, out: what they could cost at most. :mod:`tests.gpu.dq_paths` builds kernels
of these and times them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from fa3_kernels.gluon.backward_dq import DQ_EMPTY, DQ_FULL, add_in_memory, warpgroup_barrier
from fa3_kernels.gluon.backward_geometry import dq_coordinates, key_tile, opaque, row_blocks
from fa3_kernels.gluon.pipeline import named_barrier
from fa3_kernels.plan import barriers

WARPGROUP_THREADS = gl.constexpr(barriers.WARPGROUP_THREADS)


@gluon.jit
def _where(p, tile, rows, i, first_row, part, WARPGROUP: gl.constexpr):
    """Row and channel of this share among the sums."""
    tile_m: gl.constexpr = p.q_desc.block_type.shape[-2]
    head = opaque(tile.kv_head) * p.group + i // opaque(rows.count)
    return dq_coordinates(p, tile, head, first_row // tile_m, part, WARPGROUP)


@gluon.jit
def stage(p, dq, tile, rows, i, first_row, part, WARPGROUP: gl.constexpr):
    """As shipped: to shared memory, for the warp that adds."""
    warpgroup_barrier("sync", DQ_EMPTY, WARPGROUP)
    p.dq_smem.index(WARPGROUP).store(dq)
    warpgroup_barrier("arrive", DQ_FULL, WARPGROUP)


@gluon.jit
def start_additions(p, dq, tile, rows, i, first_row, part, WARPGROUP: gl.constexpr):
    """To shared memory, from where the warpgroup itself starts a TMA addition."""
    tma.store_wait(0)
    named_barrier("sync", DQ_EMPTY + WARPGROUP, WARPGROUP_THREADS)
    p.dq_smem.index(WARPGROUP).store(dq)
    fence_async_shared()
    named_barrier("sync", DQ_FULL + WARPGROUP, WARPGROUP_THREADS)
    add_in_memory(p.dq_desc, _where(p, tile, rows, i, first_row, part, WARPGROUP), p.dq_smem.index(WARPGROUP))


@gluon.constexpr_function
def _results(count):
    return " ".join(f"mov.b32 ${i}, 0;" for i in range(count))


@gluon.constexpr_function
def _constraints(count, has_pointer):
    return ",".join(["=r"] * count + ["l"] * count * has_pointer + ["r"] * count)


@gluon.constexpr_function
def _read_all(count):
    """PTX that does nothing unless all bits together are one pattern, and then sleeps for a nanosecond."""
    together = " ".join(f"xor.b32 %all, %all, ${count + i};" for i in range(count))
    head = "{ .reg .pred %one; .reg .b32 %all; mov.b32 %all, 0; "
    tail = " setp.eq.b32 %one, %all, 123456789; @%one nanosleep.u32 1; "
    return head + together + tail + _results(count) + " }"


@gluon.jit
def leave_out(p, dq, tile, rows, i, first_row, part, WARPGROUP: gl.constexpr):
    """Nothing: dQ is computed and dropped. Something must read all of it, or ptxas leaves its product out."""
    count: gl.constexpr = p.dq_desc.block_type.shape[0] * p.dq_desc.block_type.shape[1] // 128
    gl.inline_asm_elementwise(
        _read_all(count),
        _constraints(count, False),
        [dq.to(gl.int32, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=count,
    )


@gluon.constexpr_function
def _additions(form, count, row_bytes):
    """PTX that adds a thread's ``count`` elements of a wgmma accumulator of 64 rows to the tile at its first pointer.

    ``lines`` keeps the bytes of a tile, not the places: the four elements that a thread holds of 16 rows and 8 channels
    lie side by side, those of a warp in whole lines.
    """
    address = "mov.u32 %thread, %tid.x; and.b32 %thread, %thread, 127; shr.u32 %warp, %thread, 5; "
    address += "and.b32 %lane, %thread, 31; "
    steps = []
    held = 2 * count  # the first operand that holds an element: behind as many results, and pointers
    if form == "lines":
        per_row = count // 2  # groups of 16 bytes in a row of the tile
        address += (
            f"shl.b32 %row, %warp, 4; shr.u32 %thread, %lane, {per_row.bit_length() - 1}; "
            f"add.u32 %row, %row, %thread; and.b32 %lane, %lane, {per_row - 1}; shl.b32 %lane, %lane, 4; "
        )
        for j in range(count // 4):
            names = ", ".join(f"${held + 4 * j + e}" for e in range(4))
            steps.append(f"red.relaxed.gpu.global.add.v4.f32 [%at+{j * 32 // per_row * row_bytes}], {{{names}}};")
    else:
        address += (
            "shl.b32 %row, %warp, 4; shr.u32 %thread, %lane, 2; add.u32 %row, %row, %thread; "
            "and.b32 %lane, %lane, 3; shl.b32 %lane, %lane, 3; "
        )
        for j in range(count // 2):
            at = j // 2 * 32 + j % 2 * 8 * row_bytes
            low, high = (f"${held + 2 * j + e}" for e in range(2))
            if form == "pairs":
                steps.append(f"red.relaxed.gpu.global.add.v2.f32 [%at+{at}], {{{low}, {high}}};")
            else:
                steps += [
                    f"red.relaxed.gpu.global.add.f32 [%at+{at}], {low};",
                    f"red.relaxed.gpu.global.add.f32 [%at+{at + 4}], {high};",
                ]
    address += f"mad.lo.u32 %row, %row, {row_bytes}, %lane; cvt.u64.u32 %at, %row; add.u64 %at, %at, ${count}; "
    registers = "{ .reg .b32 %thread, %warp, %lane, %row; .reg .b64 %at; "
    return registers + address + " ".join(steps) + " " + _results(count) + " }"


@gluon.jit
def _add_from_registers(p, dq, where, FORM: gl.constexpr):
    tile_m: gl.constexpr = p.q_desc.block_type.shape[-2]
    head_dim: gl.constexpr = p.q_desc.block_type.shape[-1]
    count: gl.constexpr = p.dq_desc.block_type.shape[0] * p.dq_desc.block_type.shape[1] // 128
    asm: gl.constexpr = _additions(FORM, count, 4 * head_dim)
    constraints: gl.constexpr = _constraints(count, True)
    # The launcher's workspace holds sums, statistics of as many rows, and turns, one behind the other.
    num_rows = (p.nheads * p.num_blocks).to(gl.int64) * tile_m
    sums = p.turns - num_rows * (head_dim + 2)
    base = (sums + (where[0].to(gl.int64) * head_dim + where[1])).to(gl.int64)
    gl.inline_asm_elementwise(
        asm, constraints, [base, dq.to(gl.int32, bitcast=True)], dtype=gl.int32, is_pure=False, pack=count
    )


@gluon.jit
def add_lines(p, dq, tile, rows, i, first_row, part, WARPGROUP: gl.constexpr):
    """red of four elements, 512 bytes of a warp side by side: places of a tile are permuted."""
    _add_from_registers(p, dq, _where(p, tile, rows, i, first_row, part, WARPGROUP), "lines")


@gluon.jit
def add_pairs(p, dq, tile, rows, i, first_row, part, WARPGROUP: gl.constexpr):
    """red of two neighbouring elements, where they belong."""
    _add_from_registers(p, dq, _where(p, tile, rows, i, first_row, part, WARPGROUP), "pairs")


@gluon.jit
def add_single(p, dq, tile, rows, i, first_row, part, WARPGROUP: gl.constexpr):
    """An atomic addition for every element."""
    _add_from_registers(p, dq, _where(p, tile, rows, i, first_row, part, WARPGROUP), "single")


@gluon.jit
def idle(p):
    """The warp of dQ has nothing to do."""


@gluon.jit
def hand_back(p):
    """The warp of dQ hands the buffers back and adds nothing."""
    parts: gl.constexpr = p.variant.dq_parts
    number = 0
    entry = gl.load(p.tiles)
    for w in gl.static_range(2):
        warpgroup_barrier("arrive", DQ_EMPTY, w)
    while entry >= 0:
        tile = key_tile(p, entry)
        entry = gl.load(p.tiles + number + 1)
        rows = row_blocks(p, tile)
        for _i in range(rows.count * p.group):
            for _part in gl.static_range(parts):
                for w in gl.static_range(2):
                    warpgroup_barrier("sync", DQ_FULL, w)
                for w in gl.static_range(2):
                    warpgroup_barrier("arrive", DQ_EMPTY, w)
        number += 1
