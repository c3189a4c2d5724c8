"""A check that a kernel has not changed the arrays that it was called with, on whatever device they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fa3verify.operations import WrongOutput

MOST_BYTES = 2**26  # of an array that spans more memory only the elements are compared, not what lies between


@contextlib.contextmanager
def unchanged(given: Mapping[str, Any]) -> Iterator[None]:
    """Raise WrongOutput at the end of a ``with`` block if arguments of a call have other bits than at its begin.

    ``given`` has the arguments by name; those that are neither arrays nor tensors are left out. What lies between the
    elements of a strided tensor is compared as well: in a serving stack it belongs to another tensor. ``k_cache`` and
    ``v_cache`` are left to :func:`fa3_reference.cache.check_written`, because a call may append to them.
    """
    fixed = {name: _memory(x) for name, x in given.items() if name not in ("k_cache", "v_cache")}
    before = {name: x.copy() if isinstance(x, np.ndarray) else x.clone() for name, x in fixed.items() if x is not None}
    yield
    if changed := [name for name, x in before.items() if not bool((x == fixed[name]).all())]:
        raise WrongOutput(f"changed its operand {' and '.join(changed)}")


def _memory(x: Any) -> Any:
    """Return the memory of an array or a tensor as integers, a view of it; None for anything else."""
    if isinstance(x, np.ndarray):
        return x.view(f"u{x.itemsize}")
    if not hasattr(x, "untyped_storage"):
        return None
    from fa3verify.tensors.convert import memory_of

    return memory_of(x, MOST_BYTES)
