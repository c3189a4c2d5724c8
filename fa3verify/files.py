"""Text files: written whole or not at all, read plain or packed by xz; and values as strict JSON, csv or Markdown.

A file is written to a temporary neighbour, flushed, and renamed into place. Files that are kept for long may be packed:
where there is no file at a path, the one beside it with the ending .xz is read. Records are turned into JSON values by
:mod:`fa3verify.records`.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import lzma
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PACKED = ".xz"
Json = dict[str, Any]  # an object whose keys a schema of its own names: a case, a trial, the arguments of a task


def of_schema(values: object, schema: str, what: str) -> Json:
    """Return decoded JSON if it is an object whose key "schema" is ``schema``.

    Otherwise a ValueError says what was expected; its message begins with ``what``.
    """
    if isinstance(values, dict) and values.get("schema") == schema:
        return values
    got = values.get("schema") if isinstance(values, dict) else type(values).__name__
    raise ValueError(f"{what}: expected schema {schema!r}, got {got!r}")


def parsed(text: str | bytes, schema: str, what: str) -> Json:
    """Decode JSON as :func:`of_schema` wants it; a ValueError for what is no JSON begins with ``what`` too."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    return of_schema(values, schema, what)


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
        os.umask(mask := os.umask(0))  # the mask can only be read by setting another one
        temporary.chmod(0o666 & ~mask)  # mkstemp is private, a report is not
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def stored(path: Path) -> Path:
    """Return the file that a path names: itself, or the packed one beside it where there is only that."""
    packed = path.with_name(path.name + PACKED)
    return packed if packed.is_file() and not path.exists() else path


def read_bytes(path: Path) -> bytes:
    """Return what a file holds, unpacked where it is packed.

    Raises
    ------
    OSError
        As from the file system.
    ValueError
        For a packed file that is damaged.
    """
    held = stored(path)
    content = held.read_bytes()
    try:
        return lzma.decompress(content) if held.suffix == PACKED else content
    except lzma.LZMAError as error:
        raise ValueError(f"{held} is damaged: {error}") from None


def read_text(path: Path) -> str:
    """Return a UTF-8 text, unpacked where it is packed; raises as :func:`read_bytes` does."""
    return read_bytes(path).decode()


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text with ``\\n`` line ends, whole or not at all; a packed file is replaced by a packed one."""
    held = stored(path)
    content = text.encode()
    write_bytes(held, lzma.compress(content, preset=9) if held.suffix == PACKED else content)


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes as they are, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


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
    """Return why :func:`write_output` could not write to a path, None if it can; no file is left behind."""
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
    return csv_lines([head, *rows])


def csv_cell(value: Any) -> Any:
    """Return a value as a cell of csv: six digits of a float, an empty text for None, all else as it is."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def csv_lines(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as lines of csv, to be added to a table."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]], rule: str = "---") -> list[str]:
    """Return the lines of a table, and an empty one behind it; ``rule`` stands below each head."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, *rows)]
    return [lines[0], f"|{rule}" * len(header) + "|", *lines[1:], ""]


def json_text(value: Any) -> str:
    """Return strict JSON, one key per line."""
    return json.dumps(plain(value), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
