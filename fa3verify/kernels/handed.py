"""What a kernel was handed, the very arrays on whatever device, compared after its call with what they were before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fa3verify.operations import WrongOutput

MOST_BYTES = 2**26  # of an array that is spread over more memory its elements alone are compared


@contextlib.contextmanager
def unchanged(given: Mapping[str, Any]) -> Iterator[None]:
    """Raise WrongOutput at the end, with their names, where arrays or tensors among what a call is made with have other
    bits than before.

    What lies between the elements of a strided tensor is compared as well: in a serving stack it is another one. Left
    to :func:`fa3_reference.cache.check_written` are ``k_cache`` and ``v_cache``, to which a call may append.
    """
    fixed = {name: _memory(x) for name, x in given.items() if name not in ("k_cache", "v_cache")}
    before = {name: x.copy() if isinstance(x, np.ndarray) else x.clone() for name, x in fixed.items() if x is not None}
    yield
    if changed := [name for name, x in before.items() if not bool((x == fixed[name]).all())]:
        raise WrongOutput(f"changed its operand {' and '.join(changed)}")


def _memory(x: Any) -> Any:
    """Return what an array or a tensor lies in as integers; None of anything else."""
    if isinstance(x, np.ndarray):
        return x.view(f"u{x.itemsize}")
    if not hasattr(x, "untyped_storage"):
        return None
    from fa3verify.tensors.convert import memory_of

    return memory_of(x, MOST_BYTES)
