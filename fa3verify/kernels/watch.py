"""Announcements of a process about the work that it begins, so that another process knows where it died or hung.

Code that runs kernels calls :func:`trying` and :func:`warming`. They do nothing unless a listener is set; a worker of
:class:`fa3verify.campaign.pool.IsolatingPool` sets one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from fa3verify.files import Json


class Listener(Protocol):
    """Receives the announcements."""

    def trying(self, what: str, content: Json) -> None:
        """A case or a trial begins; ``what`` and ``content`` are those of a replay file."""

    def warming(self, begins: bool) -> None:
        """Something that may compile or import begins or has ended: its time is not that of the task."""


_listeners: list[Listener] = []
_warm: set[str] = set()


def listen(listener: Listener) -> None:
    """Add a listener, which gets all announcements from then on."""
    _listeners.append(listener)


def trying(what: str, content: Callable[[], Json]) -> None:
    """Say which case begins; the content is only made where somebody listens."""
    for listener in _listeners:
        listener.trying(what, content())


@contextlib.contextmanager
def warming(what: str) -> Iterator[None]:
    """Announce the begin and the end of something that takes longer the first time in a process.

    ``what`` names it, such as a kernel; nothing is announced when the same name comes again.
    """
    listeners = [] if what in _warm else _listeners
    _warm.add(what)
    for listener in listeners:
        listener.warming(True)
    try:
        yield
    finally:
        for listener in listeners:
            listener.warming(False)
