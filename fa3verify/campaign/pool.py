"""A process pool whose workers may crash or hang: each task then fails alone, and says at which case.

:class:`IsolatingPool` is a ``concurrent.futures.Executor``. Any other executor works in its place (a Dask cluster's
``Client.get_executor()``, for instance), without the isolation. Pools with time limits exist (pebble), but count the
time of a first call that compiles, and keep neither the case nor what a dead worker printed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fa3verify.campaign import worker
from fa3verify.text import one_line

WARM_UP = 5  # times the limit of a task, for what a worker imports or compiles first
TAIL_BYTES = 4000  # kept of what a worker printed last


class TaskError(RuntimeError):
    """A task that raised; the message is one line."""


class WorkerLost(TaskError):
    """A task whose process died or was stopped; ``at`` is the case it was at, as in a replay file, if that is known."""

    def __init__(self, message: str, at: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.at = at


class Timed(Future):
    """A future that says what its worker spent on it."""

    cpu_s = 0.0  # seconds of the worker's CPU


class _Worker:
    """One process: the pipe to it, the note of its case, and the last it printed."""

    def __init__(self, memory_bytes: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        ours, printed = context.Pipe(duplex=False)
        self.note = worker.Note(Path(tempfile.gettempdir()) / f"fa3verify-{os.getpid()}-{id(self):x}.json")
        self.printed = b""
        arguments = (theirs, printed, os.getpid(), self.note.path, memory_bytes)
        self.process = context.Process(target=worker.serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        printed.close()
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    def _read(self, pipe: Connection) -> None:
        """Keep the end of what is printed; a worker that prints without end waits for nobody and fills nothing."""
        with contextlib.suppress(OSError):
            while piece := os.read(pipe.fileno(), 1 << 16):
                self.printed = (self.printed + piece)[-TAIL_BYTES:]
        pipe.close()

    def run(self, call: tuple, limit_s: float) -> worker.Message:
        """Send one call and wait for the message with its value.

        TaskError if it raised, WorkerLost if this worker is lost with it and has ended.
        """
        allowed_s = limit_s * WARM_UP
        deadline = time.monotonic() + allowed_s
        self.note.clear()
        case = None
        try:
            self.pipe.send(call)
            while True:
                if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                    former, case = case, self.note.read()
                    if case == former:
                        break
                    allowed_s, deadline = limit_s, time.monotonic() + limit_s  # another case has begun since
                    continue
                message: worker.Message = self.pipe.recv()
                if message.kind == "value":
                    return message
                if message.kind == "error":
                    raise TaskError(message.value)
                allowed_s = limit_s * (WARM_UP if message.kind == "warming" else 1)
                deadline = time.monotonic() + allowed_s
            at = case
            self.stop()
            words = f"no answer within {allowed_s:g} s; its process was stopped"
        except (EOFError, OSError):
            at = self.note.read()
            self.stop(patience_s=5)
            code = self.process.exitcode or 0
            words = f"its process was killed by {signal.Signals(-code).name}" if code < 0 else ""
            words = words or f"its process died with exit code {code}"
        self._reader.join(timeout=0.2)
        printed = one_line(self.printed.decode("utf-8", "replace"))
        raise WorkerLost(f"{words}; it printed last: {printed}" if printed else words, at)

    def stop(self, patience_s: float = 0.0) -> None:
        """End the process, and what it has forked; a worker that waits for a call ends by itself when asked."""
        self.pipe.close()
        if patience_s:
            wait([self.process.sentinel], timeout=patience_s)
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)  # before it is reaped, so that the number is still its own
        self.process.kill()
        self.process.join()
        self.note.clear()


class IsolatingPool(Executor):
    """Run tasks in ``workers`` processes, each of their cases at most ``limit_s`` seconds.

    Parameters
    ----------
    workers : int
    limit_s : float
        A worker that exceeds it is killed and replaced; the task's future raises :class:`WorkerLost`. The time counts
        from the last warm-up that a task tells (:func:`fa3verify.watch.warming`), which itself has :data:`WARM_UP`
        times as long, and begins again where a task has begun another case (:func:`fa3verify.watch.trying`), so that a
        case that never ends is stopped after at most twice the limit.
    memory_bytes : int, optional
        Private memory of each worker; no limit by default.
    """

    def __init__(self, workers: int, limit_s: float, *, memory_bytes: int | None = None) -> None:
        self._limit_s, self._memory_bytes = limit_s, memory_bytes
        self._tasks: queue.SimpleQueue[tuple[Timed, tuple] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._workers: set[_Worker] = set()
        self._threads = [threading.Thread(target=self._own_worker, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Queue a picklable call."""
        if self._stopped.is_set():
            raise RuntimeError("the pool is shut down")
        future = Timed()
        self._tasks.put((future, (fn, args, kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop; with ``cancel_futures`` running workers are killed."""
        if cancel_futures:
            self._stopped.set()
            for each in list(self._workers):
                each.process.kill()
        for _ in self._threads:
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()
        self._stopped.set()

    def _own_worker(self) -> None:
        """One thread per worker process: hand it tasks, watch it, replace it. Linux ends the worker with its thread."""
        mine: _Worker | None = None
        while (item := self._tasks.get()) is not None:
            future, call = item
            if self._stopped.is_set() or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            if mine is None:
                mine = _Worker(self._memory_bytes)
                self._workers.add(mine)
            try:
                reply = mine.run(call, self._limit_s)
                future.cpu_s = reply.cpu_s
                future.set_result(reply.value)
            except TaskError as error:
                if isinstance(error, WorkerLost):
                    self._workers.discard(mine)
                    mine = None
                future.set_exception(error)
        if mine is not None:
            mine.stop(patience_s=5)
