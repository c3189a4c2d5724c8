"""Cycle counter and time of every SM, read by a kernel: two readings give the clock an SM ran at between them.

What the driver reports is the clock it asks for; under a power cap an SM runs at less.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SLOTS = 256  # numbers of SMs may have gaps: more than any GPU of compute capability 9.0 has


@gluon.jit
def read_clocks(readings_ptr, SLOTS: gl.constexpr):
    """Store (cycles, nanoseconds) of the SM of every CTA.

    Parameters
    ----------
    readings_ptr : int64 (SLOTS, 2)
        Indexed by the number of the SM; of several CTAs of one SM the last counts. Other slots are left alone.
    """
    sm = gl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    cycles = gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)
    time_ns = gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)
    gl.store(readings_ptr + 2 * sm, cycles, mask=sm < SLOTS)
    gl.store(readings_ptr + 2 * sm + 1, time_ns, mask=sm < SLOTS)
