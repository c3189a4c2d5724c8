"""Compilation without a cache: what mutants take for :mod:`fa3_kernels.twin.compiled`.

Numba finds a stored loop by its file, its line and its bytecode, of which constants are no part. A mutant's loop may
have all three of the original, so that it must neither be looked up nor stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop on first call, with the options of the original and in this process only."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function to be copied into the compiled loops that call it."""
    return numba.njit(inline="always", error_model="numpy")(function)
