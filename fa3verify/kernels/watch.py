"""What a process says about its work while it does it, so that another one knows where it died or
hung.

Nobody listens unless a listener is set; a worker of :class:`fa3verify.campaign.pool.IsolatingPool` sets one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from fa3verify.files import Json


class Listener(Protocol):
    """Is told what a process says of its work."""

    def trying(self, what: str, content: Json) -> None:
        """A case or a trial begins; ``what`` and ``content`` are those of a replay file."""

    def warming(self, begins: bool) -> None:
        """Something that may compile or import begins or has ended: its time is not that of the task."""


_listeners: list[Listener] = []
_warm: set[str] = set()


def listen(listener: Listener) -> None:
    """Tell a listener from now on."""
    _listeners.append(listener)


def trying(what: str, content: Callable[[], Json]) -> None:
    """Say which case begins; the content is only made where somebody listens."""
    for listener in _listeners:
        listener.trying(what, content())


@contextlib.contextmanager
def warming(what: str) -> Iterator[None]:
    """Say that something begins and ends which takes longer the first time in a process; silent from then on."""
    listeners = [] if what in _warm else _listeners
    _warm.add(what)
    for listener in listeners:
        listener.warming(True)
    try:
        yield
    finally:
        for listener in listeners:
            listener.warming(False)
