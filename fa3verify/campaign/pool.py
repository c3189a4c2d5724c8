"""A process pool whose workers may crash or hang: only the task that did so fails, and its error names the case.

:class:`IsolatingPool` is a ``concurrent.futures.Executor``. Any other executor works in its place (a Dask cluster's
``Client.get_executor()``, for instance), without the isolation. Pools with time limits exist (pebble), but count the
time of a first call that compiles, and keep neither the case nor what a dead worker printed. This is the parent's side;
what runs in a worker's process is :mod:`fa3verify.campaign.worker`.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from fa3verify.campaign import worker
from fa3verify.campaign.worker import ENDING_S
from fa3verify.files import Json
from fa3verify.text import of_error, one_line

WARM_UP = 5  # a worker that imports or compiles may take so many times the limit of a task
TAIL_BYTES = 4000  # how much of a worker's last output is kept for the message about its death
DEVICES_VARIABLE = "FA3VERIFY_DEVICES"  # GPUs of the workers, or "all", which the option --devices puts there
LIST_DEVICES = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
AN_HOUR_S = 3600.0
A_DAY_S = 86_400.0
PATIENCE_S = 5.0  # for a worker that has nothing to do, or has closed its pipe, to end by itself


class TaskError(RuntimeError):
    """A task that raised or was lost: a message of one line, and in ``raised`` the name of the exception's type.

    ``raised`` is empty where the task raised nothing; ``at`` is the case it was at, None where that is unknown.
    ``waited_s`` are the seconds after which a process that did not answer was stopped, 0 where none was.
    """

    def __init__(self, message: str, raised: str = "", at: Json | None = None, waited_s: float = 0.0) -> None:
        super().__init__(message)
        self.raised = raised
        self.at = at
        self.waited_s = waited_s


class WorkerLost(TaskError):
    """A task whose process died or was stopped; ``at`` is the case it was at, as in a replay file, None if unknown."""


class Timed(Future):
    """A future that knows the CPU seconds of its worker, and can be given up while it runs."""

    cpu_s = 0.0  # seconds of the worker's CPU

    def give_up(self) -> None:
        """Cancel the call, and where it already runs end its process, if that can be ended."""
        self.cancel()


class _Isolated(Timed):
    """A future of :class:`IsolatingPool`, which knows the worker that runs it and can end that."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._is_given_up = False

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up = True
            if not self.cancel() and self._worker:
                self._worker.end()

    def given_to(self, worker: _Worker | None) -> None:
        """Note which worker runs the call, None when it has ended; a worker of a given-up call is ended at once."""
        with self._lock:
            self._worker = worker
            if worker and self._is_given_up:
                worker.end()


class _Worker:
    """One worker process, as the parent sees it: a pipe, the note of its present case, and what it printed last."""

    def __init__(self, memory_bytes: int | None, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        ours, printed = context.Pipe(duplex=False)
        self.is_ended = False
        self.note = worker.Note(Path(tempfile.gettempdir()) / f"fa3verify-{os.getpid()}-{id(self):x}.json")
        self.printed = b""
        arguments = (theirs, printed, os.getpid(), self.note.path, memory_bytes, device)
        self.process = context.Process(target=worker.serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        printed.close()
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    def _read(self, pipe: Connection) -> None:
        """Read what the worker prints and keep its end, so that it never waits for a full pipe nor fills the memory."""
        with contextlib.suppress(OSError):
            while piece := os.read(pipe.fileno(), 1 << 16):
                self.printed = (self.printed + piece)[-TAIL_BYTES:]
        pipe.close()

    def run(self, call: memoryview, limit_s: float) -> worker.Message:
        """Send one pickled call and wait for the message with its value.

        Raises TaskError if the call raised, and WorkerLost if it took too long or the process died; the process has
        then ended.
        """
        # A process that has just started imports first; it says "warm" as soon as it has read the call.
        allowed_s = limit_s * WARM_UP
        deadline = time.monotonic() + allowed_s
        self.note.clear()
        case = None
        try:
            self.pipe.send_bytes(call)
            while True:
                if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                    former = case
                    case = self.note.read()
                    if case == former:
                        break
                    # Another case has begun since the clock was set, and has the time of one case from now on.
                    allowed_s = limit_s
                    deadline = time.monotonic() + limit_s
                    continue
                message: worker.Message = self.pipe.recv()
                if message.kind == "value":
                    return message
                if message.kind in ("error", "spoilt"):
                    self.is_ended |= message.kind == "spoilt"
                    raise TaskError(*message.value, at=self.note.read() if self.is_ended else None)
                if message.kind == "warming":
                    case = self.note.read()  # the case that warms up: the clock that starts now is its own
                allowed_s = limit_s * (WARM_UP if message.kind == "warming" else 1)
                deadline = time.monotonic() + allowed_s
            at = case
            self.stop()
            words = f"no answer within {allowed_s:g} s; its process was stopped"
        except (EOFError, OSError):
            allowed_s = 0.0
            at = self.note.read()
            self.stop(PATIENCE_S)
            code = self.process.exitcode or 0
            words = f"its process was killed by {signal.Signals(-code).name}" if code < 0 else ""
            words = words or f"its process died with exit code {code}"
        except TaskError:
            raise
        except Exception as error:  # whatever reads garbage raises
            allowed_s = 0.0
            at = self.note.read()
            self.stop()
            words = f"something else wrote into its pipe ({of_error(error)}); its process was stopped"
        self._reader.join(timeout=0.2)
        printed = one_line(self.printed.decode("utf-8", "replace"))
        raise WorkerLost(f"{words}; it printed last: {printed}" if printed else words, at=at, waited_s=allowed_s)

    def end(self) -> None:
        """Ask the supervisor to end the worker and all that it has forked; return at once."""
        self.is_ended = True
        with contextlib.suppress(OSError, AttributeError, ValueError):
            self.process.terminate()
            os.kill(self.process.pid or 0, signal.SIGCONT)  # a process that a kernel has stopped handles no SIGTERM

    def stop(self, patience_s: float = 0.0) -> None:
        """Close the pipe, end the process and all that it has forked, and return when they have ended.

        A worker that waits for a call ends by itself when its pipe is closed: ``patience_s`` is the time for that.
        """
        self.pipe.close()
        if patience_s:
            wait([self.process.sentinel], timeout=patience_s)
        self.end()
        wait([self.process.sentinel], timeout=2 * ENDING_S)
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)  # before it is reaped, so that the number is still its own
        self.process.kill()
        self.process.join()
        self.note.clear()


class IsolatingPool(Executor):
    """Run tasks in ``workers`` processes, and give each call of a kernel at most ``limit_s`` seconds.

    A future of this pool raises nothing but :class:`TaskError`, :class:`WorkerLost` among them, or CancelledError.

    Parameters
    ----------
    workers : int
    limit_s : float
        A worker that exceeds the limit is killed and replaced; the task's future raises :class:`WorkerLost`. The clock
        starts at the begin and the end of each call of a kernel (:func:`fa3verify.kernels.watch.warming`), the first of
        which may take :data:`WARM_UP` times as long. When it runs out, it starts again if the task has begun another
        case (:func:`fa3verify.kernels.watch.trying`), so that a call that never ends is stopped after at most twice
        the limit.
    memory_bytes : int, optional
        Private memory of each worker; no limit by default.
    devices : sequence of str, optional
        GPUs as CUDA_VISIBLE_DEVICES names them, dealt out to the workers, each of which sees its own alone. By default
        all see what this process sees.
    """

    def __init__(
        self, workers: int, limit_s: float, *, memory_bytes: int | None = None, devices: Sequence[str] = ()
    ) -> None:
        self._limit_s = limit_s
        self._memory_bytes = memory_bytes
        self._tasks: queue.SimpleQueue[tuple[_Isolated, memoryview] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._workers: set[_Worker] = set()
        owned = itertools.islice(itertools.cycle(devices or [""]), workers)
        self._threads = [threading.Thread(target=self._own_worker, args=(each,), daemon=True) for each in owned]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Queue a call; RuntimeError after shutdown, and pickle's error for a call that cannot be pickled."""
        if self._stopped.is_set():
            raise RuntimeError("the pool is shut down")
        future = _Isolated()
        self._tasks.put((future, ForkingPickler.dumps((fn, args, kwargs))))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; with ``cancel_futures`` also end the running ones and begin no queued one.

        When it returns with ``wait``, no process is left that a task began.
        """
        if cancel_futures:
            self._stopped.set()
            for each in list(self._workers):
                each.end()
        for _ in self._threads:
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()
        self._stopped.set()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Shut down; an error or an interruption ends what still runs."""
        self.shutdown(cancel_futures=kind is not None)

    def _own_worker(self, device: str) -> None:
        """Run in one thread per worker process: hand it tasks, watch it, replace it when lost.

        Linux ends a worker when the thread that started it ends, so that thread must live as long.
        """
        mine: _Worker | None = None
        while (item := self._tasks.get()) is not None:
            future, call = item
            if self._stopped.is_set() or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            try:
                mine = mine or _Worker(self._memory_bytes, device)
            except OSError as error:  # too many processes, or too little memory for another
                future.set_exception(WorkerLost(f"no process could be started for it: {of_error(error)}"))
                continue
            self._workers.add(mine)
            if not self._is_done(future, call, mine):
                self._workers.discard(mine)
                mine = None
        if mine is not None:
            mine.stop(0.0 if self._stopped.is_set() else PATIENCE_S)

    def _is_done(self, future: _Isolated, call: memoryview, mine: _Worker) -> bool:
        """Run a call and set its future; return whether its worker can run another."""
        end: worker.Message | TaskError
        future.given_to(mine)
        if self._stopped.is_set():
            mine.end()
        try:
            end = mine.run(call, self._limit_s)
        except TaskError as error:
            end = error
        future.given_to(None)
        if mine.is_ended and not isinstance(end, WorkerLost):  # a lost worker has been stopped already
            mine.stop()
        if isinstance(end, TaskError):
            future.set_exception(end)
        else:
            future.cpu_s = end.cpu_s
            future.set_result(end.value)
        return not mine.is_ended


def default_workers() -> int:
    """Return the number of worker processes by default: one per core."""
    return os.cpu_count() or 1


def processes(workers: int = 0, limit_s: float = A_DAY_S, *, memory_bytes: int | None = None) -> Executor:
    """Return an :class:`IsolatingPool` on this machine whose processes use one core each; 0 workers are one per core.

    The variables are set in this process, whose children inherit them, unless they are set already. The last one keeps
    torch's compiler from starting a process per core in each worker. :data:`DEVICES_VARIABLE` has their GPUs; OSError
    if it asks for all of a machine that has none.
    """
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(variable, "1")
    devices = os.environ.get(DEVICES_VARIABLE, "")
    if devices == "all":
        devices = os.environ.get("CUDA_VISIBLE_DEVICES") or subprocess.check_output(LIST_DEVICES, text=True)
    names = [name for name in re.split(r"[,\s]+", devices) if name]
    return IsolatingPool(workers or default_workers(), limit_s, memory_bytes=memory_bytes, devices=names)
