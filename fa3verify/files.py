"""Output files: whole or not at all (a temporary neighbour, flushed, then renamed into place), strict JSON, and csv."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it takes its place, on any error it vanishes.

    Raises
    ------
    OSError
        As from the file system; ``path`` is then what it was before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp is private, a report is not
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text with ``\\n`` line ends, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def write_output(path: Path, text: str) -> None:
    """Write UTF-8 text where a user asked for it: a regular file whole or not at all, anything else in place.

    A symbolic link keeps pointing where it did; devices, FIFOs and open files (``/dev/fd/3``) are written and never
    replaced. A reader who closes a pipe has seen enough: that is no error.
    """
    if _is_stream(path):
        with contextlib.suppress(BrokenPipeError), path.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    else:
        write_text(Path(os.path.realpath(path)), text)


def why_unwritable(path: Path) -> str | None:
    """Return why :func:`write_output` could not write there, None if it can; leaves nothing behind."""
    try:
        if _is_stream(path):
            return None if os.access(path, os.W_OK) else "permission denied"
        target = Path(os.path.realpath(path))
        if target.is_dir():
            return "it is a directory"
        above = next(folder for folder in target.parents if folder.exists())
        with tempfile.TemporaryFile(dir=above):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _is_stream(path: Path) -> bool:
    """Tell whether a path is something to write into, rather than a name to be given to a new file."""
    if path.absolute().parts[1:2] in (("dev",), ("proc",)):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def plain(value: Any) -> Any:
    """Return a value in JSON types; numbers that are not finite become the texts NaN, Infinity and -Infinity.

    >>> plain({"a": (0.5, float("inf"))})
    {'a': [0.5, 'Infinity']}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # a lone surrogate is no text
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def csv_text(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as csv, a line per row."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([head, *rows])
    return file.getvalue()


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table, and an empty one behind it."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, *rows)]
    return [lines[0], "|---" * len(header) + "|", *lines[1:], ""]


def json_text(value: Any) -> str:
    """Return strict JSON, one key per line."""
    return json.dumps(plain(value), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
