"""Where tasks run: in isolated processes of this machine, or on the workers of a Dask cluster."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from fa3verify.campaign.pool import IsolatingPool, TaskError, Timed, WorkerLost
from fa3verify.campaign.profiles import PROFILES
from fa3verify.campaign.tasks import source_stamp
from fa3verify.text import of_error

if TYPE_CHECKING:
    from fa3verify.campaign.verify import Settings

LEAST_MEMORY_BYTES = 8 << 30


def make_executor(settings: Settings) -> Executor:
    """Return local isolated processes, or the executor of the cluster that the settings name.

    Raises
    ------
    ModuleNotFoundError
        If a scheduler is named and ``distributed`` is not installed.
    OSError
        If no scheduler answers.
    """
    if settings.scheduler:
        return Cluster(settings.scheduler)
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # one core per worker process
    workers = settings.workers or os.cpu_count() or 1
    limit_s = settings.task_limit_s or PROFILES[settings.profile].task_limit_s
    memory_bytes = _fair_share(workers) if settings.memory_bytes is None else settings.memory_bytes
    return IsolatingPool(workers, limit_s, memory_bytes=memory_bytes)


def _fair_share(workers: int) -> int | None:
    """Bytes of memory for each worker, None where the machine does not say how much it has."""
    try:
        return max(LEAST_MEMORY_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // workers)
    except (AttributeError, ValueError, OSError):
        return None


class _Remote(Timed):
    """A future whose state is that of the cluster's, which alone is cancelled."""

    def __init__(self, theirs: Future) -> None:
        super().__init__()
        self._theirs, self._is_unwanted = theirs, False
        theirs.add_done_callback(self._take)

    def cancel(self) -> bool:
        self._is_unwanted = True
        return self._theirs.cancel()

    def _take(self, theirs: Future) -> None:
        """Take over what became of the task; one that was lost with its scheduler is an error, not a silence."""
        if theirs.cancelled() and self._is_unwanted:
            super().cancel()
        self.set_running_or_notify_cancel()
        if theirs.cancelled():
            if not self._is_unwanted:
                self.set_exception(TaskError("the cluster gave it up: its scheduler is gone"))
        elif error := theirs.exception():
            lost = type(error).__name__ == "KilledWorker"
            words = "its workers ended, one after the other: it did that, or another task that waited there"
            self.set_exception(WorkerLost(words) if lost else TaskError(of_error(error)))
        else:
            value, self.cpu_s, words = theirs.result()
            self.set_exception(TaskError(words)) if words else self.set_result(value)


class Cluster(Executor):
    """Run tasks on the workers of a Dask cluster, which need the same sources as this process.

    A worker that dies is no failure: Dask gives its tasks to another one. A task of which several have died is a
    :class:`~fa3verify.campaign.pool.WorkerLost`; Dask cannot tell it from one that waited for the same worker. There
    are no limits of time and memory, no process of a task's own and no note of the case it was at; whoever reaches the
    scheduler runs code on its workers.

    Parameters
    ----------
    address : str
        Of the scheduler, such as ``tcp://10.0.0.1:8786``.

    Raises
    ------
    OSError
        If no scheduler answers there.
    """

    def __init__(self, address: str) -> None:
        from distributed import Client  # pyright: ignore[reportMissingImports]  # extra: distributed

        self._client = Client(address, set_as_default=False)
        self._executor = self._client.get_executor(pure=False)
        self._stamp = source_stamp()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Queue a picklable call of a function that the workers can import."""
        return _Remote(self._executor.submit(_run, self._stamp, fn, args, kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, which goes on without us; what is not done is then forgotten there."""
        self._executor.shutdown(wait=wait and not cancel_futures)
        self._client.close()


_alone = threading.Lock()
_own_stamp = functools.cache(source_stamp)


def _run(stamp: str, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple[Any, float, str]:
    """On a worker: the value of a call and its CPU seconds, or words about what it raised.

    One at a time: Hypothesis keeps its random state by process, and CPU seconds are those of the process.
    """
    with _alone:
        if _own_stamp() != stamp:
            return None, 0.0, "the worker has other sources of fa3verify than the campaign"
        try:
            before = time.process_time()
            return function(*args, **kwargs), time.process_time() - before, ""
        except BaseException as error:  # SystemExit included: it must not end the worker
            return None, 0.0, of_error(error)
