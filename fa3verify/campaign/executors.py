"""The executor of a Dask cluster, :class:`Cluster`, for ``fa3verify verify --scheduler``.

The executor of this machine is :func:`fa3verify.campaign.pool.processes`; on each Dask worker tasks run in the same
isolating pool. :func:`fa3verify.commands.verify.make_executor` chooses one of the two.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple
from uuid import uuid4

from fa3verify.campaign.pool import IsolatingPool, TaskError, Timed
from fa3verify.campaign.tasks import source_stamp
from fa3verify.text import of_error

LEAST_MEMORY_BYTES = 8 << 30  # of a worker, however many there are: cases of practice are chosen to fit in it


def fair_share(workers: int) -> int | None:
    """Return the bytes of memory for each of some workers; None where the machine does not say how much it has."""
    try:
        return max(LEAST_MEMORY_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // workers)
    except (AttributeError, ValueError, OSError):
        return None


class _Remote(Timed):
    """A future of our own that follows a future of the cluster: cancelling it cancels only the cluster's."""

    def __init__(self, theirs: Future) -> None:
        super().__init__()
        self._theirs = theirs
        self._is_unwanted = False
        theirs.add_done_callback(self._take)

    def cancel(self) -> bool:
        self._is_unwanted = True
        return self._theirs.cancel()

    def _take(self, theirs: Future) -> None:
        """Take over the end of the cluster's future; one that we did not cancel is an error: its scheduler is gone."""
        if theirs.cancelled() and self._is_unwanted:
            super().cancel()
        self.set_running_or_notify_cancel()
        if theirs.cancelled():
            if not self._is_unwanted:
                self.set_exception(TaskError("the cluster gave it up: its scheduler is gone"))
        elif error := theirs.exception():
            self.set_exception(TaskError(of_error(error), type(error).__name__))
        else:
            value, self.cpu_s = theirs.result()
            self.set_exception(value) if isinstance(value, TaskError) else self.set_result(value)


class Cluster(Executor):
    """Run tasks on the workers of a Dask cluster, which need the same sources as this process.

    Each worker runs one task at a time, in a process isolated as on this machine. If a Dask worker itself dies, Dask
    gives its task to another one. Whoever reaches the scheduler can run code on its workers.

    Parameters
    ----------
    address : str
        Of the scheduler, such as ``tcp://10.0.0.1:8786``.
    limit_s, memory_bytes
        As of :class:`~fa3verify.campaign.pool.IsolatingPool`.

    Raises
    ------
    OSError
        If no scheduler answers there.
    """

    def __init__(self, address: str, limit_s: float, *, memory_bytes: int | None = None) -> None:
        from distributed import Client  # pyright: ignore[reportMissingImports]  # extra: distributed

        self._client = Client(address, set_as_default=False)
        self._executor = self._client.get_executor(pure=False)
        self._terms = _Terms(source_stamp(), uuid4().hex, limit_s, memory_bytes)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Queue a picklable call of a function that the workers can import; its future raises nothing but TaskError."""
        return _Remote(self._executor.submit(_run, self._terms, fn, args, kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Close our connection to the cluster, which goes on without us and forgets tasks that have not ended."""
        self._executor.shutdown(wait=wait and not cancel_futures)
        self._client.close()


class _Terms(NamedTuple):
    """States what a campaign demands of a Dask worker: the hash of its sources, an id, and the limits of a task."""

    stamp: str
    campaign: str
    limit_s: float
    memory_bytes: int | None


_alone = threading.Lock()
_own_stamp = functools.cache(source_stamp)
_here: dict[_Terms, IsolatingPool] = {}  # the pool of this Dask worker, one at most


def _isolated(terms: _Terms) -> IsolatingPool:
    """Return the pool of one process for this Dask worker, a new one for each campaign: kernels may be edited."""
    if terms not in _here:
        for other in _here.values():
            other.shutdown(wait=False)
        _here.clear()
        # Dask makes its workers daemons, which may have no children; there is no public way to change that afterwards.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        _here[terms] = IsolatingPool(1, terms.limit_s, memory_bytes=terms.memory_bytes)
    return _here[terms]


def _run(terms: _Terms, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple[Any, float]:
    """Run a call on a Dask worker; return its value, or the TaskError that it ended with, and its CPU seconds."""
    with _alone:
        if _own_stamp() != terms.stamp:
            return TaskError("the worker has other sources of fa3verify than the campaign"), 0.0
        future = _isolated(terms).submit(function, *args, **kwargs)
        try:
            return future.result(), getattr(future, "cpu_s", 0.0)
        except TaskError as error:
            return error, 0.0
