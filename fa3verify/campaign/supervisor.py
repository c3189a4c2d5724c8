"""The supervisor, a process between the pool and a worker: it ends all processes that the worker has begun.

On Linux a process whose parent has ended becomes a child of the nearest subreaper above it. So daemons and new sessions
stay below the supervisor, which ends them when the worker is lost, when the pool asks (SIGTERM), and when the pool's
own process dies, however that happens. Whoever kills the supervisor itself with SIGKILL is out of its reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import warnings
from multiprocessing.connection import Connection
from typing import NoReturn

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
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
