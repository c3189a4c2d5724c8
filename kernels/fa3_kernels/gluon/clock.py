"""A kernel that reads the cycle counter and the time of every SM; two readings give the clock rate between them.

The reports measure by it at which clock a kernel ran. The driver reports the clock that it asks for; under a power cap
an SM runs slower.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SLOTS = 256  # more SM numbers than any GPU of compute capability 9.0 has; the numbers may have gaps


@gluon.jit
def read_clocks(readings_ptr, SLOTS: gl.constexpr):
    """Store (cycles, nanoseconds) of the SM on which each CTA runs.

    Parameters
    ----------
    readings_ptr : int64 (SLOTS, 2)
        Indexed by the number of the SM. Where several CTAs run on one SM the last one counts; all other slots are left
        as they are.
    """
    sm = gl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    cycles = gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)
    time_ns = gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)
    gl.store(readings_ptr + 2 * sm, cycles, mask=sm < SLOTS)
    gl.store(readings_ptr + 2 * sm + 1, time_ns, mask=sm < SLOTS)
