"""Stamps of the SM's clock inside the forward kernels, for timelines; a kernel without them has none of this code.

The kernels call these functions where an event may be stamped. A stamp is two instructions: a clock read, and a store
by the first thread of an actor. The address of the next stamps is kept in PTX registers that are declared once, at the
head of the kernel. :mod:`fa3_kernels.plan.stamps` says what the events mean.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa3_kernels.plan import stamps as timeline

_EVENTS = (*timeline.CONSUMER_EVENTS, *timeline.PRODUCER_EVENTS)
TURN_TAKEN, ISSUED, SCORES, OUTPUT, K_FREE, K_ISSUED, V_FREE, V_ISSUED = (gl.constexpr(i) for i in range(len(_EVENTS)))
COLUMNS = gl.constexpr(timeline.COLUMNS)
_ROW_BYTES = gl.constexpr(4 * timeline.COLUMNS)


@gluon.jit
def declare_stamps(variant: gl.constexpr):
    """Declare the registers that the other functions use; stands at the head of a kernel."""
    if variant.stamps:
        gl.inline_asm_elementwise(
            ".reg .b64 %stamp_base, %stamp_row; .reg .pred %stamp_first, %stamp_on; mov.u32 $0, 0;",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def begin_stamps(p, ACTOR: gl.constexpr):
    """Point the registers of an actor, a consumer warpgroup or the producer, to its rows of the array."""
    if p.variant.stamps:
        row = (gl.program_id(0) * (p.variant.consumers + 1) + ACTOR) * p.variant.stamps
        gl.inline_asm_elementwise(
            "{ .reg .b32 %lane; mov.u32 %lane, %tid.x; and.b32 %lane, %lane, 127; setp.eq.u32 %stamp_first, %lane, 0; "
            "mov.b64 %stamp_base, $1; mov.u32 $0, 0; }",
            "=r,l",
            [(p.stamps + row * COLUMNS).to(gl.int64)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.constexpr_function
def _at_step_asm(steps, row_bytes):
    """PTX that computes the row of a step, and that turns stamps off beyond the last row."""
    return (
        f"mad.wide.s32 %stamp_row, $1, {row_bytes}, %stamp_base; "
        f"setp.lt.and.s32 %stamp_on, $1, {steps}, %stamp_first; mov.u32 $0, 0;"
    )


@gluon.jit
def at_step(p, step):
    """Say that the stamps that follow belong to a step; for a step beyond the array nothing is stored."""
    if p.variant.stamps:
        asm: gl.constexpr = _at_step_asm(p.variant.stamps, _ROW_BYTES)
        gl.inline_asm_elementwise(asm, "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _is_stamped(variant, event):
    """Tell whether a kernel keeps stamps, and this event is among those that are kept."""
    return variant.stamps > 0 and _EVENTS[event] in timeline.STAMPED


@gluon.constexpr_function
def _stamp_asm(event):
    """PTX of one stamp; consumer and producer events share the columns, as they have rows of their own."""
    return (
        "{ .reg .b32 %now; mov.u32 %now, %clock; "
        f"@%stamp_on st.global.u32 [%stamp_row+{4 * (event % len(timeline.CONSUMER_EVENTS))}], %now; mov.u32 $0, 0; }}"
    )


@gluon.jit
def stamp(p, EVENT: gl.constexpr):
    """Store the clock as an event of the current step."""
    if _is_stamped(p.variant, EVENT):
        asm: gl.constexpr = _stamp_asm(EVENT)
        gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
