"""P V of the e4m3 forward, promoted from head_dim 160 on: in parts of 64 channels whose registers go round.

O takes 80 to 128 of a thread's registers, which leaves room for two or three accumulators of 32; at 160 the last part
has 32 channels, in registers of its own. So many GEMMs are in
flight at a time. A part of P V is started in the registers of the part that was just added to O; behind the last parts
the scores of the next block are started likewise, in pieces of 64 keys. So the tensor core has a GEMM of this warpgroup
while its multiply-adds run. Smaller heads take :mod:`fa3_kernels.gluon.sums_fp8`.

Two things keep the compilers from undoing this order. LLVM would move additions to where O is read next, the end of a
tile or the next block, where all parts had to be alive: the additions are volatile. ptxas would give a GEMM that starts
from zero new registers and start it early: each GEMM is told to continue from the part before under a condition that
never holds.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from fa3_kernels.gluon import softmax
from fa3_kernels.gluon.boxes import parts
from fa3_kernels.gluon.geometry import WARPGROUP_ROWS
from fa3_kernels.gluon.operand_fp8 import unpack
from fa3_kernels.gluon.output_fp8 import values
from fa3_kernels.gluon.pipeline import V_EMPTY, issue_scores, pass_turn, phase, release, take_turn
from fa3_kernels.gluon.stamps import ISSUED, OUTPUT, TURN_TAKEN, stamp


@gluon.constexpr_function
def rotates(slices):
    """Tell whether O is kept in so many slices that its sums are taken in the order of this module."""
    return slices > 2


@gluon.constexpr_function
def _depth(slices):
    """Return how many GEMMs are in flight at a time: as many accumulators as registers hold beside O."""
    return 2 if slices == 4 else 3


@gluon.constexpr_function
def _behind(unit, units, depth, pieces, groups):
    """Return how many groups of wgmma were started behind a part when it is awaited: other parts, and pieces of the
    scores.

    A piece of the scores has ``groups`` of them, one for each part of Q's channels.
    """
    following = min(unit + depth, units + max(pieces, 1)) - unit - 1
    parts = min(following, units - unit - 1)
    return parts + (following - parts) * groups


@gluon.jit
def _never(p):
    """Return a condition that is always false, which neither compiler can know."""
    return p.nheads < 0


@gluon.jit
def _issue_part(p, x, words, free, step, UNIT: gl.constexpr, continues):
    """Start one part of P V, a chunk of the keys times a slice of the channels, in the registers ``free``.

    ``continues`` is false: the part starts from zero, whatever ``free`` holds.
    """
    layout: gl.constexpr = free.type.layout
    operand = unpack(words[UNIT // p.variant.slices], gl.DotOperandLayout(0, layout, 4))
    keys: gl.constexpr = operand.shape[1]
    vt = values(p, x, step, UNIT % p.variant.slices)
    if keys != vt.shape[1]:
        vt = vt.slice(UNIT // p.variant.slices * keys, keys, dim=1)
    return warpgroup_mma(operand, vt.permute((1, 0)), free, use_acc=continues, is_async=True)


@gluon.jit
def _issue_scores(p, q, free, step, PIECE: gl.constexpr, continues):
    """Start a piece of S = Q K^T, of as many keys as ``free`` has columns, in the registers ``free``."""
    keys: gl.constexpr = free.shape[1]
    k = parts(p.k_smem, step % p.variant.stages, p.variant.qk_boxes, p.variant.qk_spare)
    of_piece = k[0].slice(PIECE * keys, keys, dim=0)
    s = warpgroup_mma(q[0], of_piece.permute((1, 0)), free, use_acc=continues, is_async=True)
    for i in gl.static_range(1, len(k)):
        of_piece = k[i].slice(PIECE * keys, keys, dim=0)
        s = warpgroup_mma(q[i], of_piece.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _added(p, o, rescale, part, UNIT: gl.constexpr):
    """Return O with one finished part added; the first part of a block rescales O in the same fma."""
    index: gl.constexpr = UNIT % p.variant.slices
    if p.variant.slices > UNIT:
        factor = gl.broadcast(softmax.column(rescale, part), part)[0]
        asm: gl.constexpr = "fma.rn.f32 $0, $1, $2, $3;"
        changed = gl.inline_asm_elementwise(
            asm, "=f,f,f,f", [o[index], factor, part], dtype=gl.float32, is_pure=False, pack=1
        )
    else:
        asm: gl.constexpr = "add.rn.f32 $0, $1, $2;"
        changed = gl.inline_asm_elementwise(asm, "=f,f,f", [o[index], part], dtype=gl.float32, is_pure=False, pack=1)
    return o[:index] + (changed,) + o[index + 1 :]


@gluon.jit
def _blank(like):
    """Return zeros like a slice of O, whose registers its first part takes."""
    width: gl.constexpr = like.shape[1]
    layout: gl.constexpr = like.type.layout
    return gl.zeros([WARPGROUP_ROWS, width], gl.float32, layout)


@gluon.jit
def add_block(p, x, q, zeros, o, words, rescale, step, WARPGROUP: gl.constexpr):
    """Add P V of block ``step`` to O and start the scores of the next block in pieces; the caller passes the turn.

    A piece has as many keys as a part has channels. A tile of fewer keys is one piece, in registers of its own.
    """
    units: gl.constexpr = p.variant.slices * len(words)
    width: gl.constexpr = o[0].shape[1]
    pieces: gl.constexpr = zeros.shape[1] // width
    stages: gl.constexpr = p.variant.stages
    depth: gl.constexpr = _depth(p.variant.slices)
    never = _never(p)
    mbarrier.wait(x.vt_full.index(step % stages), phase(step, stages))
    take_turn(p, WARPGROUP)
    stamp(p, TURN_TAKEN)
    under_way = ()
    for unit in gl.static_range(depth):
        under_way = under_way + (_issue_part(p, x, words, _blank(o[unit]), step, unit, False),)
    s = ()
    for unit in gl.static_range(units):
        done = warpgroup_mma_wait(_behind(unit, units, depth, pieces, len(q)), deps=(under_way[0],))
        under_way = under_way[1:]
        if unit + 1 == units:
            release(p, V_EMPTY, step % stages)
            stamp(p, OUTPUT)
        o = _added(p, o, rescale, done, unit)
        if unit + depth < units:
            under_way = under_way + (_issue_part(p, x, words, done, step, unit + depth, never),)
        elif unit + depth == units:
            mbarrier.wait(p.k_full.index((step + 1) % stages), phase(step + 1, stages))
            if pieces == 0:
                s = (issue_scores(p, q, zeros, step + 1),)
            else:
                s = (_issue_scores(p, q, done, step + 1, 0, never),)
        elif unit + depth - units < pieces:
            s = s + (_issue_scores(p, q, done, step + 1, unit + depth - units, never),)
    stamp(p, ISSUED)
    return o, s


@gluon.jit
def finished_scores(s, zeros):
    """Wait for all pieces of the scores and return them as one tile."""
    layout: gl.constexpr = zeros.type.layout
    if len(s) == 2:
        left, right = warpgroup_mma_wait(0, deps=s)
        s = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), zeros.shape)
    else:
        s = warpgroup_mma_wait(0, deps=s)
    return gl.convert_layout(s, layout, assert_trivial=True)


@gluon.jit
def _last_parts(p, x, o, words, rescale, step, WARPGROUP: gl.constexpr):
    """Take the turn and add the last P V of a tile, part after part in the same registers where they are as wide."""
    never = _never(p)
    mbarrier.wait(x.vt_full.index(step % p.variant.stages), phase(step, p.variant.stages))
    take_turn(p, WARPGROUP)
    part = _blank(o[0])
    for unit in gl.static_range(p.variant.slices * len(words)):
        if part.shape[1] != o[unit % p.variant.slices].shape[1]:
            part = _blank(o[unit % p.variant.slices])
        part = _issue_part(p, x, words, part, step, unit, False if unit == 0 else never)
        part = warpgroup_mma_wait(0, deps=(part,))
        o = _added(p, o, rescale, part, unit)
    return o


@gluon.jit
def finish(p, x, o, words, rescale, step, WARPGROUP: gl.constexpr):
    """Add the last P V of a tile to O, pass the turn and release the slot of V."""
    o = _last_parts(p, x, o, words, rescale, step, WARPGROUP)
    pass_turn(p, WARPGROUP)
    release(p, V_EMPTY, step % p.variant.stages)
    return o


@gluon.jit
def finish_and_start(p, x, q, zeros, o, words, rescale, step, is_more, WARPGROUP: gl.constexpr):
    """Add the last P V of a tile to O, and start behind it the first scores of the next one, if ``is_more``."""
    o = _last_parts(p, x, o, words, rescale, step, WARPGROUP)
    release(p, V_EMPTY, step % p.variant.stages)
    mbarrier.wait(p.k_full.index((step + 1) % p.variant.stages), phase(step + 1, p.variant.stages), pred=is_more)
    s = issue_scores(p, q, zeros, step + 1)
    pass_turn(p, WARPGROUP)
    return o, s
