"""A process pool whose workers may crash or hang: each task then fails alone.

:class:`IsolatingPool` is a ``concurrent.futures.Executor``. Any other executor works in its place (a Dask cluster's
``Client.get_executor()``, for instance), without the isolation.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from multiprocessing.connection import Connection
from typing import Any


class TaskError(RuntimeError):
    """A task that raised, crashed its process, or exceeded the time limit; the message is one line."""


def _serve(pipe: Connection) -> None:
    """Worker loop: run what arrives, send back (ok, value)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            reply: tuple[bool, Any] = (True, function(*args, **kwargs))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            reply = (False, f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})")
        pipe.send(reply)


class IsolatingPool(Executor):
    """Run tasks in ``workers`` processes, each task at most ``limit_s`` seconds.

    Parameters
    ----------
    workers : int
    limit_s : float
        A worker that exceeds it is killed and replaced; the task's future raises :class:`TaskError`.
    """

    def __init__(self, workers: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._context = multiprocessing.get_context("spawn")
        self._tasks: queue.SimpleQueue[tuple[Future, tuple] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._processes: set[Any] = set()
        self._threads = [threading.Thread(target=self._own_worker, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Queue a picklable call."""
        if self._stopped.is_set():
            raise RuntimeError("the pool is shut down")
        future: Future = Future()
        self._tasks.put((future, (fn, args, kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop; with ``cancel_futures`` running workers are killed."""
        if cancel_futures:
            self._stopped.set()
            for process in list(self._processes):
                process.kill()
        for _ in self._threads:
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()
        self._stopped.set()

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._processes.add(process)
        return process, ours

    def _own_worker(self) -> None:
        """One thread per worker process: hand it tasks, watch it, replace it."""
        process, pipe = None, None
        while (item := self._tasks.get()) is not None:
            future, call = item
            if self._stopped.is_set() or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            if process is None or pipe is None:
                process, pipe = self._start()
            ok, value, alive = self._exchange(process, pipe, call)
            if not alive:
                process.kill()
                process.join()
                self._processes.discard(process)
                process, pipe = None, None
            if ok:
                future.set_result(value)
            else:
                future.set_exception(TaskError(value))
        if process is not None and pipe is not None:
            pipe.close()
            process.join(timeout=5)

    def _exchange(self, process: Any, pipe: Connection, call: tuple) -> tuple[bool, Any, bool]:
        """Send one call and wait; returns (ok, value or message, worker still usable)."""
        try:
            pipe.send(call)
            if not pipe.poll(self._limit_s):
                return False, f"no answer within {self._limit_s:g} s; its process was stopped", False
            ok, value = pipe.recv()
        except (EOFError, OSError):
            process.join(timeout=5)
            return False, f"its process died with exit code {process.exitcode}", False
        return ok, value, True
