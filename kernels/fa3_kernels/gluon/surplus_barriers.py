"""Remove from PTX those barriers of Triton's around an exchange between warpgroups that are surplus.

Triton puts a barrier over the warps of a warpgroup in front of every access to shared memory that follows a conflicting
one. It reads no inline assembly, so it does not know the named barriers, which order the same accesses over more warps.
No arrangement of the code avoids these barriers: store and product use one buffer, and nothing but Triton's own barrier
counts for it. So a kernel marks where surplus barriers stand and how many there are, and its module explains why each
is surplus; :mod:`fa3_kernels.gluon.backward` is that kernel.

The removal is one of Triton's compilation stages, only for what is compiled inside :func:`left_out`. Triton's cache is
not keyed by it, but by the kernel's source, of which the markers are a part; so raise ``VERSION`` with any change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

VERSION = 1
_MARKER = f"// surplus barriers {VERSION}:"
_SPAN = re.compile(rf"^[^\n]*{_MARKER} (\d+)\n(.*?)^[^\n]*{_MARKER} end\n", re.MULTILINE | re.DOTALL)
_BARRIER = re.compile(r"^\s*bar\.sync\s+\d+, 128;\n", re.MULTILINE)


@gluon.constexpr_function
def _marker(text):
    """An instruction without effect whose comment is the marker; the assembly must give a value, so it gives 0."""
    return f"mov.u32 $0, 0; {_MARKER} {text}"


@gluon.jit
def surplus_barriers(TEXT: gl.constexpr):
    """Mark in a kernel where surplus barriers begin, with their number as TEXT, and where they ``end``."""
    marker: gl.constexpr = _marker(TEXT)  # type: ignore[assignment]
    gl.inline_asm_elementwise(marker, "=r", [], dtype=gl.int32, is_pure=False, pack=1)  # type: ignore[arg-type]


def without_surplus(ptx: str) -> str:
    """Return PTX without the barriers of a warpgroup that stand between markers, and without the markers.

    Raises
    ------
    RuntimeError
        Where another number of barriers stands between two markers than the first one says.

    >>> start, end = f"mov; {_MARKER} 1\\n", f"mov; {_MARKER} end\\n"
    >>> without_surplus(start + "bar.sync 0, 128;\\nbar.sync 14, 256;\\n" + end + "bar.sync 0, 128;\\n")
    'bar.sync 14, 256;\\nbar.sync 0, 128;\\n'
    """

    def emptied(span: re.Match[str]) -> str:
        kept, found = _BARRIER.subn("", span[2])
        if found != int(span[1]):
            raise RuntimeError(f"{span[1]} surplus barriers are marked, {found} stand there: Triton's code has changed")
        return kept

    return _SPAN.sub(emptied, ptx)


@contextmanager
def left_out() -> Iterator[None]:
    """Compile without surplus barriers inside the block; kernels without markers are compiled as elsewhere."""
    given = knobs.runtime.add_stages_inspection_hook

    def add_pass(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
        if given is not None:
            given(backend, stages, *rest)
        make_ptx = stages["ptx"]
        stages["ptx"] = lambda source, metadata: without_surplus(make_ptx(source, metadata))

    knobs.runtime.add_stages_inspection_hook = add_pass  # type: ignore[assignment]
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = given


def check(ptx: str) -> None:
    """Raise RuntimeError for PTX that still has a marker: compiled outside of :func:`left_out`, and kept by Triton."""
    if "// surplus barriers" in ptx:
        raise RuntimeError("Triton's cache holds a kernel with surplus barriers: clear it (~/.triton/cache)")
