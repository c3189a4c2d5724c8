"""Work in a fork of this process, which may crash or hang: what it said until then counts."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from fa3verify.text import of_error

MEMORY_BYTES = 8 << 30
PATIENCE = 20  # wall seconds for each CPU second that is allowed: machines are shared


class Said(NamedTuple):
    """What a fork said, one JSON value per step, and how it ended: ``words`` say more where it did not finish."""

    values: list[Any]
    end: Literal["finished", "raised", "died", "hung"]
    words: str = ""


def apart(work: Callable[[], Iterator[Any]], limit_s: float) -> Said:
    """Run ``work`` in a fork, each step of it for at most ``limit_s`` CPU seconds, or :data:`PATIENCE` times as long.

    A fork starts in milliseconds with everything that is imported and compiled here; what it changes is its own. Only
    POSIX has it.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # of threads, which numpy and numba start here only for what is not called
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reader)
        _work(work, writer, limit_s)
    os.close(writer)
    values = []
    end = None
    try:
        for line in _lines(reader, limit_s * PATIENCE):
            kind, value = json.loads(line)
            if kind == "value":
                values.append(value)
            else:
                end = Said(values, kind, value)
    except TimeoutError:
        end = Said(values, "hung", f"no answer within {limit_s * PATIENCE:g} s")
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if end is None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return Said(values, "hung", f"no answer within {limit_s:g} s of CPU time")
    return end or Said(values, "died", f"its process ended with status {status}")


def _work(work: Callable[[], Iterator[Any]], writer: int, limit_s: float) -> None:
    """The fork's side, which never returns."""
    import resource

    def allow_a_step() -> None:
        most = math.ceil(time.process_time() + limit_s)
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    warnings.simplefilter("ignore")  # of a kernel's overflows: they are no errors of its process
    try:
        allow_a_step()
        for value in work():
            _send(writer, ["value", value])
            allow_a_step()
        _send(writer, ["finished", ""])
    except BaseException as error:  # SystemExit included: how it ended is what is asked
        _send(writer, ["raised", of_error(error)])
    finally:
        os._exit(0)


def _send(writer: int, message: list[Any]) -> None:
    os.write(writer, (json.dumps(message) + "\n").encode())


def _lines(reader: int, limit_s: float) -> Iterator[bytes]:
    """Yield whole lines; TimeoutError if none comes in time."""
    rest = b""
    deadline = time.monotonic() + limit_s
    while True:
        if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        if not (piece := os.read(reader, 1 << 16)):
            return
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
            deadline = time.monotonic() + limit_s
