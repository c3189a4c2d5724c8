"""Loops of the bounds, compiled by numba, whose cache watches one file: each loop calls only what is in its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba

inlined = numba.njit(inline="always", error_model="numpy")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop on its first call, and keep it on disk where there is a place for it."""
    try:
        return forgiving(numba.njit(cache=True, nogil=True, error_model="numpy")(function))
    except RuntimeError:  # neither the package nor the user's cache directory can be written
        return numba.njit(nogil=True, error_model="numpy")(function)


def forgiving(dispatcher: Any) -> Any:
    """Let a loop run that was compiled but could not be stored: numba would raise the error of a full disk."""
    save = dispatcher._cache.save_overload

    def save_if_possible(*given: Any) -> None:
        with suppress(OSError):
            save(*given)

    dispatcher._cache.save_overload = save_if_possible
    return dispatcher
