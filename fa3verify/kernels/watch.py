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
        """Something that may compile or import begins, or anything else begins or has ended: the clock starts again."""


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

    ``what`` names it, such as a kernel, of which each call has the time of one; the first has longer.
    """
    is_first = what not in _warm
    _warm.add(what)
    for listener in _listeners:
        listener.warming(is_first)
    try:
        yield
    finally:
        for listener in _listeners:
            listener.warming(False)
