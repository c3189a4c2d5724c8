"""The worker's side of :mod:`fa3verify.campaign.pool`: a process that runs the calls it receives, confined and watched.

A worker runs below a supervisor that ends whatever it forks (:mod:`fa3verify.campaign.supervisor`). What it prints goes
into a pipe to the parent, its memory is limited, and a file notes the case that it is at. It may have children of its
own (``multiprocessing.Pool``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fa3verify.campaign import supervisor
from fa3verify.files import Json
from fa3verify.kernels import watch
from fa3verify.text import of_error, one_line

NOTE_BYTES = 1 << 20  # the most of a note that is read: a longer one was not written by us


class Message(NamedTuple):
    """What a worker sends to its parent.

    "warming" and "warm" say that something begins, or has ended, that takes longer the first time. "value" ends a task
    with its value and CPU seconds, "error" with the words and the type of an exception as ``value``.
    """

    kind: Literal["warming", "warm", "value", "error"]
    value: Any = None
    cpu_s: float = 0.0


class Note:
    """A file that holds the case a worker is at; its parent reads it after the worker's death.

    In a worker, which has the ``pipe``, it is a listener of :mod:`fa3verify.kernels.watch`.
    """

    def __init__(self, path: Path, pipe: Connection | None = None) -> None:
        self.path = path
        self._pipe = pipe

    def trying(self, what: str, content: Json) -> None:
        """Replace the note by another case; on a full disk there is no note, and the work goes on."""
        with contextlib.suppress(OSError):
            self.path.write_text(json.dumps({"what": what, "content": content}), encoding="utf-8")

    def read(self) -> Json | None:
        """Return the note, or None where there is none or the worker died while writing it."""
        try:
            with self.path.open("rb") as file:
                return json.loads(file.read(NOTE_BYTES))
        except (OSError, ValueError):
            return None

    def clear(self) -> None:
        """Remove the note."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def warming(self, begins: bool) -> None:
        """Tell the parent that something that takes longer the first time begins, or has ended."""
        if self._pipe:
            self._pipe.send(Message("warming" if begins else "warm"))


def serve(pipe: Connection, printed: Connection, parent: int, note: Path, memory_bytes: int | None) -> None:
    """Run the calls that arrive through the pipe, and send a message with the end of each, until the pipe is closed.

    Parameters
    ----------
    pipe : Connection
        Brings (function, args, kwargs) and takes every :class:`Message`.
    printed : Connection
        Takes what is written to standard output and standard error.
    parent : int
        Process that this one must not outlive.
    note : Path
        File that holds the case it is at.
    memory_bytes : int, optional
        Private memory that may be written, no limit by default; beyond it allocations fail (MemoryError).
    """
    confine(printed, memory_bytes)
    supervisor.fork_below(parent, not_shared=(pipe,))
    watch.listen(Note(note, pipe))
    process = os.getpid()
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        pipe.send(Message("warm"))  # it has started and imported what it is to run
        try:
            before = time.process_time()
            reply = Message("value", function(*args, **kwargs), time.process_time() - before)
        except BaseException as error:  # SystemExit included: no task ends its worker in silence
            where = traceback.extract_tb(error.__traceback__)[-1]
            words = f"{of_error(error)} ({os.path.basename(where.filename)}:{where.lineno})"
            reply = Message("error", (words, one_line(type(error).__name__)))
        if os.getpid() != process:
            os._exit(1)  # a process that the call forked has come back here: the pipe is not its own
        pipe.send(reply)


def confine(printed: Connection, memory_bytes: int | None) -> None:
    """Give this process a session of its own, a memory limit (None for none), and a pipe in place of its output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    multiprocessing.current_process().daemon = False  # daemons may not have children, and a supervisor ends these
    for descriptor in (1, 2):
        os.dup2(printed.fileno(), descriptor)
    faulthandler.enable(file=2)
    if os.name == "posix":
        import resource

        os.setsid()  # signals of the terminal are the parent's business as well
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory_bytes:
            # RLIMIT_DATA, not RLIMIT_AS: CUDA reserves terabytes of address space that it never writes.
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
