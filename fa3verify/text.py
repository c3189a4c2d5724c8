"""Texts that come from other people's kernels, such as messages and names, made harmless: one printable line each.

Reports, JUnit, JSON and terminals then need no rules of their own for NUL, lone surrogates or terminal escapes.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sysconfig
import traceback
from dataclasses import dataclass
from types import TracebackType

MOST = 600  # characters of one message
MOST_BYTES = 4096  # of any text that a kernel supplies, as UTF-8
MOST_OF_TRACEBACK = 4096  # characters
_OURS = os.path.dirname(__file__) + os.sep


def one_line(text: object, most: int = MOST) -> str:
    r"""Return a text on one line, with escapes for unprintable characters, and without the middle of a long one.

    An object whose ``__str__`` raises is named by its type. Of more than ``most`` characters the first and the last
    half of ``most`` stay, with " ... " between them, which is not counted. Escapes make a text longer: the result is
    cut to :data:`MOST_BYTES`, or to ``most`` bytes where that is more.

    >>> one_line("a\n  b\x00\x1b[2J\ud800")
    'a b\\x00\\x1b[2J\\ud800'
    """
    try:
        raw = str(text)
    except BaseException as error:  # a kernel's own class may raise anything, SystemExit too
        raw = f"{type(text).__name__} without a text: its __str__ raised {type(error).__name__}"
    if len(raw) > most:
        raw = f"{raw[: most // 2]} ... {raw[len(raw) - most // 2 :]}"
    return _cut(_printable(" ".join(raw.split())), max(most, MOST_BYTES))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _cut(text: str, most_bytes: int) -> str:
    """Return the beginning of a text that is too long, with a note of its length; a shorter text as it is."""
    raw = text.encode()
    if len(raw) <= most_bytes:
        return text
    note = f" ... (cut from {len(raw)} bytes)"
    return raw[: most_bytes - len(note)].decode(errors="ignore") + note


def of_error(error: BaseException) -> str:
    """Return type and message of an exception on one line.

    >>> of_error(ValueError("two\\nlines"))
    'ValueError: two lines'
    """
    return one_line(f"{type(error).__name__}: {one_line(error)}")


@dataclass(frozen=True, slots=True)
class Failure:
    """Says how a call, or all of a kernel, ended without a result.

    Parameters
    ----------
    message : str
        One line.
    raised : str
        Type of the exception; empty where none was raised, as of a process that died or an output of a wrong shape.
    traceback : dict, optional
        Of the exception, as :func:`of_traceback` gives it.
    """

    message: str
    raised: str = ""
    traceback: dict[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure that an exception stands for."""
        return cls(of_error(error), one_line(type(error).__name__), of_traceback(error))

    @property
    def cause(self) -> str:
        """Return the message with # for every number: messages of one cause differ in addresses and sizes only."""
        return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]?\d+)?", "#", self.message)


def install_hint(*packages: str) -> str:
    """Return the command that installs other people's packages, in the versions that an extra of fa3verify asks for.

    The extra itself is not named: no package index has fa3verify, and pip would install whatever took the name there.
    A package that fa3verify does not list is named without a version.

    >>> install_hint("torch")
    "pip install 'torch>=2.9'"
    """
    try:
        stated = importlib.metadata.requires("fa3verify") or []
    except importlib.metadata.PackageNotFoundError:
        stated = []
    wanted = {re.split(r"[^\w.-]", line, maxsplit=1)[0]: line.partition(";")[0].strip() for line in stated}
    return " ".join(["pip install", *(f"'{wanted.get(name, name)}'" for name in packages)])


def of_traceback(error: BaseException) -> dict[str, str] | None:
    """Return the traceback of an exception that a kernel raised, printable and bounded.

    Returns
    -------
    dict or None
        ``text`` has a line per line of the traceback, at most :data:`MOST_OF_TRACEBACK` characters without the middle
        of a longer one; its first frame is the first that is neither this package's nor the import system's. ``frame``
        is the last frame of the kernel's own code, or of a library's where there is none: ``file.py:12 in function:
        source``. None where no frame is left.
    """
    first = error.__traceback__
    while first is not None and _is_harness(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    if first is None:
        return None
    try:
        text = "".join(traceback.TracebackException(type(error), error, first).format())
    except BaseException:  # what an exception has of its own may raise anything
        text = f"{''.join(traceback.format_tb(first))}{of_error(error)}"
    most = 8 * MOST_OF_TRACEBACK  # what is made harmless at all: a message may have any length
    lines = [_printable(line[:MOST]) for line in _without_middle(text, most).splitlines()]
    return {"frame": _last_frame(first), "text": _without_middle("\n".join(lines), MOST_OF_TRACEBACK)}


def _without_middle(text: str, most: int) -> str:
    """Return a text of at most so many characters."""
    cut = "\n[...]\n"
    half = (most - len(cut)) // 2
    return text if len(text) <= most else f"{text[:half]}{cut}{text[-half:]}"


def _last_frame(first: TracebackType) -> str:
    """Return the last frame of code that is not installed, in one line; the last frame of all where there is none."""
    frames = traceback.extract_tb(first)
    own = [frame for frame in frames if not _is_installed(frame.filename)]
    last = (own or frames)[-1]
    return one_line(f"{os.path.basename(last.filename)}:{last.lineno} in {last.name}: {last.line}")


def _is_harness(file: str) -> bool:
    return file.startswith((_OURS, "<frozen importlib")) or file.endswith(f"importlib{os.sep}__init__.py")


def _is_installed(file: str) -> bool:
    """Tell whether a file came with Python, with a package, or with this one."""
    if file.startswith((_OURS, "<", sysconfig.get_path("stdlib") + os.sep)):
        return True
    return any(f"{os.sep}{folder}{os.sep}" in file for folder in ("site-packages", "dist-packages"))


def plural(count: int, noun: str) -> str:
    """Write a count and its noun.

    >>> plural(1, "kernel"), plural(0, "kernel")
    ('1 kernel', '0 kernels')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
