"""Programmatic dependent launch: a kernel that starts while the one in front of it runs, and waits for its results.

Kernels over a cache are launched so: behind the kernel that makes their schedule, and the combine behind them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa3_kernels.plan.call import Call


@gluon.jit
def await_grid():
    """Wait until the grid in front has ended and all that it wrote is visible; run before any global memory is read.

    This grid lets the one behind it start when each of its CTAs has ended. Letting it start as soon as this grid had
    begun made decoding in two parts 1.9 us slower on an H200.
    """
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


def check_wait(call: Call, ptx: str) -> None:
    """Raise RuntimeError unless a kernel waits exactly if it is started early, and reads global memory only behind
    that.

    >>> check_wait(Call("combine", (), (), {"launch_pdl": 1}), "griddepcontrol.wait; ld.global.b32 %r1, [%rd1];")
    """
    first, _, _ = ptx.partition("griddepcontrol.wait")
    is_waiting = first != ptx
    reads = "ld.global" in first or "cp.async.bulk" in first
    if is_waiting != bool(call.options.get("launch_pdl")) or (is_waiting and reads):
        raise RuntimeError(f"{call.kernel} must wait for the grid in front before it reads, if it is started early")
