"""Stamps of the SM's clock inside a kernel, for timelines; a kernel without them has none of this code.

Where the next stamps go is kept in registers of PTX that are declared once, at the head of the kernel: a stamp is a
clock read and a store by the first thread of an actor, two instructions. Meaning of the events:
:mod:`fa3_kernels.plan.stamps`.
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
    """Declare the registers, at the head of a kernel."""
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
    """Point an actor's registers to its rows."""
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
    return (
        f"mad.wide.s32 %stamp_row, $1, {row_bytes}, %stamp_base; "
        f"setp.lt.and.s32 %stamp_on, $1, {steps}, %stamp_first; mov.u32 $0, 0;"
    )


@gluon.jit
def at_step(p, step):
    """The stamps that follow are those of a step; beyond the rows there are none."""
    if p.variant.stamps:
        asm: gl.constexpr = _at_step_asm(p.variant.stamps, _ROW_BYTES)
        gl.inline_asm_elementwise(asm, "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _is_stamped(variant, event):
    return variant.stamps > 0 and _EVENTS[event] in timeline.STAMPED


@gluon.constexpr_function
def _stamp_asm(event):
    return (
        "{ .reg .b32 %now; mov.u32 %now, %clock; "
        f"@%stamp_on st.global.u32 [%stamp_row+{4 * (event % len(timeline.CONSUMER_EVENTS))}], %now; mov.u32 $0, 0; }}"
    )


@gluon.jit
def stamp(p, EVENT: gl.constexpr):
    """Store the clock as an event of the step."""
    if _is_stamped(p.variant, EVENT):
        asm: gl.constexpr = _stamp_asm(EVENT)
        gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
