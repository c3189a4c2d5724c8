"""Compilation without a cache, which changed copies of the twin use in place of :mod:`fa3_kernels.twin.compiled`.

Numba identifies a stored loop by its file, its line and its bytecode; constants are not part of the bytecode. A changed
loop may agree with the original in all three, so it must be neither looked up in the cache nor stored there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop on its first call, with the options of the original, for this process alone."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function to be copied into the compiled loops that call it."""
    return numba.njit(inline="always", error_model="numpy")(function)
