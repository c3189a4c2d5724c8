"""How a kernel is handed its arguments: as they lie in memory, and with a check that it has not changed them.

Kernels of arrays get contiguous arguments unless a caller arranges them otherwise (:func:`arranged`), as properties do
that ask what a kernel makes of views. This works on the tensors themselves, whatever device they are on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np

from fa3verify.files import Json
from fa3verify.operations import WrongOutput

MOST_BYTES = 2**26  # of an array that spans more memory only the elements are compared, not what lies between


class Arrangement:
    """How the arguments of calls are arranged: ``give`` gets all of them by name and returns those that a kernel gets.

    ``slack`` is how many tokens packed arrays have behind those of the last sequence, which outputs have as well.
    ``call`` calls the kernel. Where torch differentiates it, the operands in ``frozen`` need no gradient, and the same
    graph is differentiated ``times`` times. ``given`` and ``returned`` are the last call's arguments, and what it
    returned before that was copied.
    """

    def __init__(
        self,
        give: Callable[[Json], Json] = dict,
        *,
        slack: int = 0,
        call: Callable[[Callable[[], Any]], Any] = lambda kernel: kernel(),
        frozen: tuple[str, ...] = (),
        times: int = 1,
    ) -> None:
        self.give, self.slack, self.call = give, slack, call
        self.frozen, self.times = frozen, times
        self.given: Json = {}
        self.returned: Any = None


_CURRENT: ContextVar[Arrangement | None] = ContextVar("arrangement", default=None)


@contextlib.contextmanager
def arranged(give: Callable[[Json], Json] = dict, **rest: Any) -> Iterator[Arrangement]:
    """Arrange all calls of kernels of tensors in a ``with`` block, in this thread; fields are as in Arrangement."""
    arrangement = Arrangement(give, **rest)
    token = _CURRENT.set(arrangement)
    try:
        yield arrangement
    finally:
        _CURRENT.reset(token)


def current() -> Arrangement:
    """Return the arrangement of this thread's calls; outside of :func:`arranged` one that changes nothing."""
    return _CURRENT.get() or Arrangement()


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
