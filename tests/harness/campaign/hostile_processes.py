"""Kernels whose processes misbehave: they leave daemons, signal, stop, hang, write where they must not.

A campaign names the folder for their notes, its reports and its process by the environment. Every process that is left
behind writes its pid there, and would forge the summary for as long as it lives.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import numpy as np

from fa3_kernels.plan.config import default_config
from fa3_reference.attention import attention
from fa3_reference.formats import FORMATS, encode
from fa3verify.kernels.record import Functions, Kernel
from fa3verify.operations.forward import Result

FORGED = '{"verdict": "pass", "exit_code": 0}'
CALLS = {"made": 0}


def _notes() -> Path:
    return Path(os.environ["HOSTILE_NOTES"])


def _out() -> Path:
    return Path(os.environ["HOSTILE_OUT"])


def _forge() -> None:
    _out().mkdir(parents=True, exist_ok=True)
    for name in ("summary.json", "report.html", "report.md"):
        (_out() / name).write_text(FORGED)


def _stay(told: int | None = None) -> NoReturn:
    """Live on, and forge the summary again and again; a pipe is told when the note is written."""
    (_notes() / str(os.getpid())).touch()
    if told is not None:
        os.write(told, b"noted")
    while True:
        _forge()
        time.sleep(0.05)


def ideal(problem, operands, config):
    exact = attention(problem, *operands.dequantized(problem))
    return Result(encode(exact.out, FORMATS[config.out_dtype], "ieee"), exact.lse.astype(np.float32))


def wrong(problem, operands, config):
    out, lse = ideal(problem, operands, config)
    return Result(out * 2, lse)


def double_fork(*call):
    heard, told = os.pipe()
    if not (child := os.fork()):
        os.setsid()
        if not os.fork():
            _stay(told)
        os._exit(0)
    os.waitpid(child, 0)
    os.read(heard, 5)
    os.close(heard)
    os.close(told)
    return wrong(*call)


def new_session(*call):
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _stay; _stay()"
    subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    return wrong(*call)


def forks_twenty(*call):
    os.fork() or _chain(19)
    return wrong(*call)


def _chain(left: int) -> NoReturn:
    os.setsid()
    if left and not os.fork():
        _chain(left - 1)
    _stay()


def ignores_and_dies(*call):
    heard, told = os.pipe()
    if not os.fork():
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        _stay(told)
    os.read(heard, 5)  # or the supervisor ends it before it is noted
    os._exit(0)


def signals_its_parent(*call):
    double_fork(*call)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)


def _is_first() -> bool:
    """Whether this is the first call of a process, which may take five times as long as others."""
    CALLS["made"] += 1
    return CALLS["made"] == 1


def stops_itself(*call):
    if not _is_first():
        os.kill(os.getpid(), signal.SIGSTOP)
    return ideal(*call)


def hangs(*call):
    if not _is_first():
        threading.Thread(target=_stay, daemon=True).start()
        time.sleep(600)
    return ideal(*call)


def closes_its_pipes(*call):
    os.closerange(3, 100)
    return ideal(*call)


def writes_over_the_reports(*call):
    _forge()
    for stream in (f"/proc/{os.getppid()}/fd/1", f"/proc/{os.getppid()}/fd/2"):
        Path(stream).write_text("VERIFY PASS\n")
    return wrong(*call)


def raises_ten_megabytes(*call):
    raise RuntimeError("x" * 10**7)


def leaves_a_thread(*call):
    threading.Thread(target=_stay).start()
    return wrong(*call)


def uses_a_pool(problem, operands, config):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    return ideal(problem, operands, config)


def signals_the_campaign(*call):
    CALLS["made"] += 1
    if CALLS["made"] <= 3:  # which are timed before there is anything to report
        return ideal(*call)
    double_fork(*call)
    os.kill(int(os.environ["HOSTILE_CAMPAIGN"]), signal.SIGTERM)
    time.sleep(600)


def lse_for_full_attention(problem, operands, config):
    out, lse = ideal(problem, operands, config)
    return Result(out, None if problem.causal else lse)


def lse_but_once(problem, operands, config):
    out, lse = ideal(problem, operands, config)
    return Result(out, lse if problem.seqlen_q > 64 else None)


def uses_no_lse(problem, operands, config):
    return Result(ideal(problem, operands, config).out, None)


def of(run, **fields) -> Kernel:
    return Kernel("anything", "fp16", Functions(run, default_config), frozenset({"causal", "gqa"}), **fields)


def has_an_endless_identity() -> Kernel:
    return of(wrong).altered(identity=lambda: {"version": "x" * 10**7, "device": "y" * 10**7})


RUNS = (
    double_fork,
    new_session,
    forks_twenty,
    ignores_and_dies,
    signals_its_parent,
    stops_itself,
    hangs,
    closes_its_pipes,
    writes_over_the_reports,
    raises_ten_megabytes,
    leaves_a_thread,
    uses_a_pool,
    signals_the_campaign,
    lse_for_full_attention,
    lse_but_once,
    uses_no_lse,
    ideal,
)
globals().update({f"kernel_{run.__name__}": lambda run=run: of(run) for run in RUNS})
