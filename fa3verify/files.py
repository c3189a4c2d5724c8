"""Output files: whole or not at all (a temporary neighbour, flushed, then renamed into place), and strict JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
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
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def json_text(value: Any) -> str:
    """Return strict JSON, one key per line."""
    return json.dumps(plain(value), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
