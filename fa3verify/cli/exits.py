"""Exit codes, one-line errors and output to files: what every verb of the command line shares."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import rich_click as click
from click.exceptions import Exit

from fa3verify import files
from fa3verify.known.libraries import Unavailable

OK = 0
FINDING = 1
USAGE = 2
ENVIRONMENT = 3
INTERNAL = 4
NOTHING = 5
EPILOG = (
    "Exit codes: 0 pass, 1 a finding, 2 usage, 3 environment, 4 internal error, 5 nothing selected or inconclusive, "
    "6 a question, 130 interrupted, 128 + N by signal N."
)
SETTLING_S = 2.0  # after an interruption, for the processes of kernels to end
LABELS = 14  # columns for labels in front of a picture in text


def fail(code: int, message: str) -> NoReturn:
    """Print one line on stderr and raise Exit with a code."""
    click.echo(f"fa3verify: {' '.join(str(message).split())}", err=True)
    raise Exit(code)


def require_device(what: str) -> None:
    """Exit with the reason unless the GPU kernels can run here; ``what`` is the verb that needs them."""
    from fa3verify.tensors import here

    if reason := here.unavailable():
        fail(ENVIRONMENT, f"{what} needs a GPU: {reason}")


class Verb(click.RichCommand):
    """A verb, of which every exception becomes one line on stderr and the documented exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; an Exit and an error of click pass.

        A reader who closes the pipe of our output does not change the code.
        """
        outlive_readers()
        try:
            return super().invoke(ctx)
        except (click.ClickException, Exit):
            raise
        except KeyboardInterrupt as stop:
            number = stop.args[0] if stop.args else signal.SIGINT
            fail(128 + number, f"interrupted by {signal.Signals(number).name}; {_kept(stop, ctx)}")
        except ModuleNotFoundError as error:
            from fa3verify.text import install_hint

            is_optional = error.name in ("torch", "triton", "distributed", "dask")
            hint = f"; install it with: {install_hint(str(error.name))}" if is_optional else ""
            fail(ENVIRONMENT, f"package {error.name} is not installed{hint}")
        except Unavailable as error:
            fail(ENVIRONMENT, str(error))
        except ValueError as error:
            fail(USAGE, str(error))
        except OSError as error:
            fail(ENVIRONMENT, f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))
        except Exception as error:
            from fa3_simulator.engine import DeadlockError

            if isinstance(error, DeadlockError):
                fail(FINDING, f"the schedule does not end: {error}")
            if os.environ.get("FA3VERIFY_TRACEBACK"):
                raise
            fail(INTERNAL, f"internal error: {type(error).__name__}: {error} (FA3VERIFY_TRACEBACK=1 shows where)")


def _kept(stop: KeyboardInterrupt, verb: click.Context) -> str:
    """Return in words what is left of interrupted work: the interruption's own message, if it has one."""
    if len(stop.args) > 1:
        return str(stop.args[1])
    return "only what is in files is kept" + ("; --resume goes on from there" if "resume" in verb.params else "")


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Raise KeyboardInterrupt, with the signal's number, for the first of SIGINT, SIGTERM and SIGHUP.

    A second one ends the process at once, unless it comes within :data:`SETTLING_S`, in which a kernel's process may
    still send some before it has ended. A signal that is ignored, as SIGHUP by nohup, stays ignored.
    """
    first: list[float] = []

    def raised(number: int, frame: object) -> None:
        if not first:
            first.append(time.monotonic())
            raise KeyboardInterrupt(number)
        if time.monotonic() - first[0] > SETTLING_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    wanted = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    may_handle = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, raised) for number in wanted if may_handle}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def emit(value: object, target: str | None) -> bool:
    """Write a value as JSON to a file, or to standard output for "-"; do nothing for None.

    Infinity and NaN become strings, as in summary.json. Tell whether standard output is left for words.
    """
    if target is not None:
        write(files.json_text(value), target)
    return target != "-"


def write(text: str, target: str | None) -> None:
    """Write text to a file, or to standard output for "-"; do nothing for None."""
    if target == "-":
        sys.stdout.write(text)
    elif target is not None:
        files.write_output(Path(target), text)


def letters() -> int:
    """Return the width of a picture in text: what fits beside its labels on a terminal, from 20 to 100; else 100.

    >>> letters()
    100
    """
    return max(20, min(100, shutil.get_terminal_size().columns - LABELS)) if sys.stdout.isatty() else 100


def require_writable(*targets: str | None) -> None:
    """Exit, before anything runs, unless all named files can be written; None and "-" are no files."""
    for target in targets:
        if target and target != "-" and (reason := files.why_unwritable(Path(target))):
            fail(USAGE, f"{target} cannot be written: {reason}")


def require_outputs(json_target: str | None, junit_target: str | None, baseline: str | None) -> None:
    """Exit, before anything runs, unless all files for a verdict can be written, and JUnit XML can be made."""
    require_writable(json_target, junit_target, baseline, os.environ.get("GITHUB_STEP_SUMMARY"))
    if junit_target is not None and find_spec("junitparser") is None:
        from fa3verify.text import install_hint

        hint = install_hint("junitparser")
        fail(ENVIRONMENT, f"--junit needs the package junitparser (extra 'junit'); install it with: {hint}")


class _Pipe(io.FileIO):
    """An open descriptor; once its reader has gone, what is written goes to /dev/null."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def outlive_readers() -> None:
    """Replace stdout and stderr, so that a verb ends with its own exit code when the reader of its output has gone.

    Streams that are no plain files of descriptors 1 and 2, as under a test runner, stay as they are.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or isinstance(getattr(stream.buffer, "raw", None), _Pipe):
            continue
        with contextlib.suppress(OSError):
            if stream.fileno() != descriptor:
                continue
            stream.flush()
            raw = io.BufferedWriter(_Pipe(descriptor, "w", closefd=False))  # type: ignore[arg-type]
            by_line = stream.line_buffering or stream.write_through
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=by_line))


@contextlib.contextmanager
def told_anyhow(code: int) -> Iterator[None]:
    """Raise Exit with the code of a verdict after the context, which prints and writes the verdict.

    A file that cannot be written is named on stderr and turns a pass into an environment error, as it was asked for.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            name = error.filename or "output"
            click.echo(f"fa3verify: {name} cannot be written: {error.strerror or error}", err=True)
        code = code or ENVIRONMENT
    raise Exit(code)
