"""The worker's side of :mod:`fa3verify.campaign.pool`: a process that runs the calls it receives, confined and watched.

What a worker prints goes into a pipe to the parent, its memory is limited, and a file notes the case that it is at. It
may have children of its own (``multiprocessing.Pool``).

It runs below a supervisor, a process between the pool and itself. On Linux a process whose parent has ended becomes a
child of the nearest subreaper above it. So daemons and new sessions stay below the supervisor, which ends them when the
worker is lost, when the pool asks (SIGTERM), and when the pool's own process dies, however that happens. Whoever kills
the supervisor itself with SIGKILL is out of its reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from fa3verify.files import Json
from fa3verify.kernels import watch
from fa3verify.text import of_error, one_line

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl(2)
ENDING_S = 10.0  # for all processes below a supervisor to end, which takes milliseconds unless one cannot be killed


def fork_below(parent: int, *, not_shared: tuple[Connection, ...]) -> None:
    """Fork: return in the new process, while the calling one stays above it as its supervisor and never returns.

    On other systems than Linux nothing is forked, and it returns in the calling process, without a supervisor.

    Parameters
    ----------
    parent : int
        Process that the supervisor must not outlive.
    not_shared : tuple of Connection
        Connections that the supervisor closes, so that their other ends see when the worker has ended.
    """
    if sys.platform != "linux":
        return
    die_with(parent, signal.SIGTERM)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads that libraries keep are not needed on the other side
        worker = os.fork()
    if worker:
        for connection in not_shared:
            connection.close()
        _supervise(worker)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    die_with(supervisor, signal.SIGKILL)
    os.setsid()  # so that what is sent to the worker's whole group stays there


def die_with(parent: int, number: signal.Signals) -> None:
    """Have a signal sent to this process when its parent dies; it ends at once if that has happened already."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        os._exit(1)


def _supervise(worker: int) -> NoReturn:
    """Wait for the worker's end, or to be asked for it; then end all that is left and die as the worker did."""
    ended: dict[int, int] = {}
    while worker not in ended:
        if signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) == signal.SIGTERM:
            ended[worker] = signal.SIGTERM
        _reap(ended)
    status = ended[worker]
    deadline = time.monotonic() + ENDING_S
    while (left := below(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap(ended)
        time.sleep(0.002)
    if os.WIFSIGNALED(status):
        # Die by the same signal, so that the pool reads it as the worker's exit code.
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _reap(ended: dict[int, int]) -> None:
    """Add the wait status of children that have ended, orphans included, to ``ended``; the first status counts."""
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.setdefault(*child)


def below(pid: int) -> list[int]:
    """Return the ids of all processes that run below one, its children and theirs, as Linux lists them in /proc."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # Behind the name, in parentheses: state, parent, ..., and as the 18th field the number of threads.
            fields = file.read().rpartition(b")")[2].split()
            has_ended = fields[0] in (b"Z", b"X") and int(fields[17]) <= 1  # a first thread may end before the others
            if not has_ended:
                children.setdefault(int(fields[1]), []).append(int(name))
    descendants = list(children.get(pid, ()))
    for child in descendants:  # the list grows while it is walked
        descendants += children.get(child, ())
    return descendants


NOTE_BYTES = 1 << 20  # the most of a note that is read: a longer one was not written by us


class Message(NamedTuple):
    """What a worker sends to its parent.

    "warming" and "warm" say that something begins, or has ended, that takes longer the first time. "value" ends a task
    with its value and CPU seconds, "error" with the words and the type of an exception as ``value``. "spoilt" is an
    error after which the process ends, as no later call could use its GPU.
    """

    kind: Literal["warming", "warm", "value", "error", "spoilt"]
    value: Any = None
    cpu_s: float = 0.0


class Note:
    """A file that holds the case a worker is at; its parent reads it after the worker's death.

    In a worker, which has the ``pipe``, it is a listener of :mod:`fa3verify.kernels.watch`.
    """

    def __init__(self, path: Path, pipe: Connection | None = None) -> None:
        self.path = path
        self._pipe = pipe
        self._process = os.getpid()

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
        """Tell the parent that something that takes longer the first time begins, or has ended.

        A call after which the GPU fails ends its process: no other case is to be blamed for it, and none made of it by
        shrinking. A process that a call forked says nothing: its bytes would stand in the middle of its worker's.
        """
        if self._pipe and os.getpid() == self._process:
            if not begins and (error := _gpu_error()):
                self._pipe.send(Message("spoilt", (of_error(error), type(error).__name__)))
                os._exit(1)
            self._pipe.send(Message("warming" if begins else "warm"))


def _gpu_error() -> RuntimeError | None:
    """Return what every later call of torch on the GPU would raise in this process, such as after a bad address."""
    torch = sys.modules.get("torch")
    try:
        if torch and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return error
    return None


def serve(
    pipe: Connection, printed: Connection, parent: int, note: Path, memory_bytes: int | None, device: str
) -> None:
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
    device : str
        The GPU that it sees, as CUDA_VISIBLE_DEVICES names it; empty for all that its parent sees.
    """
    if device:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    confine(printed, memory_bytes)
    fork_below(parent, not_shared=(pipe,))
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
