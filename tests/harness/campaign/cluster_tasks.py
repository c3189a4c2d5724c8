"""Tasks for the workers of a test's cluster, in a module that takes them no time to load."""

from __future__ import annotations

import os
import signal
import time

from fa3verify.kernels import watch


def double(x: int) -> int:
    watch.trying("doubling", lambda: {"x": x})
    if x == 0:
        raise SystemExit(0)
    if x == -2:
        time.sleep(60)
    if x < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * x


def process(_: int) -> int:
    return os.getpid()
