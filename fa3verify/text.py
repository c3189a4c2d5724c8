"""Text of other people's kernels, made harmless: one line of printable characters, whatever they raise or are called.

Reports, JUnit, JSON and terminals then need no rules of their own for NUL, lone surrogates or terminal escapes.
"""

from __future__ import annotations

import importlib.metadata
import re

MOST = 600  # characters of one message


def one_line(text: object, most: int = MOST) -> str:
    r"""Return a text on one line, what is not printable as its escape, and a long one without its middle.

    A text that cannot be made, because ``__str__`` raises, is named by its type.

    >>> one_line("a\n  b\x00\x1b[2J\ud800")
    'a b\\x00\\x1b[2J\\ud800'
    """
    try:
        raw = str(text)
    except BaseException as error:
        raw = f"{type(text).__name__} without a text: its __str__ raised {type(error).__name__}"
    if len(raw) > most:
        raw = f"{raw[: most // 2]} ... {raw[-(most // 2) :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(raw.split()))


def of_error(error: BaseException) -> str:
    """Return type and message of an exception on one line.

    >>> of_error(ValueError("two\\nlines"))
    'ValueError: two lines'
    """
    return one_line(f"{type(error).__name__}: {one_line(error)}")


def install_hint(*packages: str) -> str:
    """Return the command that installs other people's packages, in the versions that an extra of fa3verify asks for.

    The extra itself is not named: no index has fa3verify, and pip would run whatever took the name there.

    >>> install_hint("torch")
    "pip install 'torch>=2.9'"
    """
    try:
        stated = importlib.metadata.requires("fa3verify") or []
    except importlib.metadata.PackageNotFoundError:
        stated = []
    wanted = {re.split(r"[^\w.-]", line, maxsplit=1)[0]: line.partition(";")[0].strip() for line in stated}
    return " ".join(["pip install", *(f"'{wanted.get(name, name)}'" for name in packages)])


def plural(count: int, noun: str) -> str:
    """Write a count and its noun.

    >>> plural(1, "kernel"), plural(0, "kernel")
    ('1 kernel', '0 kernels')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
