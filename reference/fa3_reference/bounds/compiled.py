"""How the loops of the bounds are compiled by numba.

numba's cache is renewed when the file of a loop changes, and does not see other files. So each loop calls only what is
in its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba

inlined = numba.njit(inline="always", error_model="numpy")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop on its first call, and keep the machine code on disk where a directory can be written."""
    try:
        return forgiving(numba.njit(cache=True, nogil=True, error_model="numpy")(function))
    except RuntimeError:  # neither the package nor the user's cache directory can be written
        return numba.njit(nogil=True, error_model="numpy")(function)


def forgiving(dispatcher: Any) -> Any:
    """Return the dispatcher, whose loop now also runs where its code cannot be stored: numba raises on a full disk."""
    save = dispatcher._cache.save_overload

    def save_if_possible(*given: Any) -> None:
        with suppress(OSError):
            save(*given)

    dispatcher._cache.save_overload = save_if_possible
    return dispatcher
