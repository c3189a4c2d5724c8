"""P V of the e4m3 forward kernel, summed in parts that are added to O in fp32, while the next scores are under way.

The consumer warpgroups call these functions. A part is a chunk of the keys times a slice of the channels. From head_dim
160 on promoted sums take the order of :mod:`fa3_kernels.gluon.rotated_fp8` instead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from fa3_kernels.gluon import softmax
from fa3_kernels.gluon.boxes import awaited
from fa3_kernels.gluon.output_fp8 import issue_part, with_part
from fa3_kernels.gluon.pipeline import V_EMPTY, issue_scores, pass_turn, phase, release, take_turn
from fa3_kernels.gluon.stamps import OUTPUT, TURN_TAKEN, stamp


@gluon.jit
def add_block(p, x, q, zeros, o, words, rescale, step, is_more, EARLY: gl.constexpr, WARPGROUP: gl.constexpr):
    """Add P V of block ``step`` to O part by part and start the scores of the next block.

    With EARLY two parts are in flight at a time, and the scores are started before the last part is waited for.
    Otherwise one part is in flight, and the scores are started behind all of them. The turn is taken here and passed
    once the scores are started. Without a next block (``is_more`` false) K is not waited for, and the scores mean
    nothing.
    """
    units: gl.constexpr = len(o) * len(words)
    stages: gl.constexpr = p.variant.stages
    k_full = p.k_full.index((step + 1) % stages)
    mbarrier.wait(x.vt_full.index(step % stages), phase(step, stages))
    take_turn(p, WARPGROUP)
    stamp(p, TURN_TAKEN)
    part = issue_part(p, x, words, o, step, 0)
    following = part
    for unit in gl.static_range(units):
        if EARLY:
            if unit + 1 < units:
                following = issue_part(p, x, words, o, step, unit + 1)
            else:
                mbarrier.wait(k_full, phase(step + 1, stages), pred=is_more)
                s = issue_scores(p, q, zeros, step + 1)
                pass_turn(p, WARPGROUP)
        part = warpgroup_mma_wait((1 if unit + 1 < units else len(q)) if EARLY else 0, deps=(part,))
        o = with_part(p, o, rescale, part, unit)
        if not EARLY and unit + 1 < units:
            following = issue_part(p, x, words, o, step, unit + 1)
        part = following
    release(p, V_EMPTY, step % stages)
    stamp(p, OUTPUT)
    if not EARLY:
        mbarrier.wait(k_full, phase(step + 1, stages), pred=is_more)
        s = issue_scores(p, q, zeros, step + 1)
        pass_turn(p, WARPGROUP)
    return o, s


@gluon.jit
def start_all(p, x, q, zeros, o, words, step, PASSES: gl.constexpr, WARPGROUP: gl.constexpr):
    """Start the scores of the next block and P V of block ``step``, in one part per slice of the channels.

    The turn is taken here. With PASSES it is passed here too, otherwise by the caller.
    """
    stages: gl.constexpr = p.variant.stages
    mbarrier.wait(p.k_full.index((step + 1) % stages), phase(step + 1, stages))
    take_turn(p, WARPGROUP)
    stamp(p, TURN_TAKEN)
    s = issue_scores(p, q, zeros, step + 1)
    mbarrier.wait(x.vt_full.index(step % stages), phase(step, stages))
    products = ()
    for i in gl.static_range(len(o)):
        products = products + (issue_part(p, x, words, o, step, i),)
    if PASSES:
        pass_turn(p, WARPGROUP)
    return s, products


@gluon.jit
def add_parts(p, o, rescale, products, step):
    """Wait for the parts of P V of block ``step``, release its slot of V, and add the parts to O."""
    products = awaited(products, 0)
    release(p, V_EMPTY, step % p.variant.stages)
    stamp(p, OUTPUT)
    for i in gl.static_range(len(products)):
        o = with_part(p, o, rescale, products[i], i)
    return o


@gluon.jit
def scaled_now(o, factor):
    """Multiply O by one factor per row at this point of the code: ptxas would put it behind the exponentials."""
    asm: gl.constexpr = "mul.rn.f32 $0, $1, $2;"
    result = ()
    for i in gl.static_range(len(o)):
        column = gl.broadcast(softmax.column(factor, o[i]), o[i])[0]
        part = gl.inline_asm_elementwise(asm, "=f,f,f", [o[i], column], dtype=gl.float32, is_pure=False, pack=1)
        result = result + (part,)
    return result


@gluon.jit
def finish(p, x, o, words, rescale, step, WARPGROUP: gl.constexpr):
    """Add the last P V of a tile to O, one part at a time, and release its slot of V."""
    units: gl.constexpr = len(o) * len(words)
    mbarrier.wait(x.vt_full.index(step % p.variant.stages), phase(step, p.variant.stages))
    take_turn(p, WARPGROUP)
    for unit in gl.static_range(units):
        part = warpgroup_mma_wait(0, deps=(issue_part(p, x, words, o, step, unit),))
        o = with_part(p, o, rescale, part, unit)
    pass_turn(p, WARPGROUP)
    release(p, V_EMPTY, step % p.variant.stages)
    return o
