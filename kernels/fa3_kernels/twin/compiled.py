"""Compile the twin's inner loops with numba, behind a cache that is never stale.

Numba's own cache looks only at the file that defines a function, and misses edits of callees in other files (measured
with numba 0.68). So the cache directory is named by a SHA-256 over every source file and table of this package and the
versions of numba and numpy: any edit selects a fresh directory. Changed copies of the twin compile without a cache
(:mod:`fa3_kernels.faults.uncached`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import config

from fa3_reference.bounds.compiled import forgiving

_CONFIG: Any = config  # its names are made when numba is loaded: no type checker sees them
CACHE_VARIABLE = "FA3VERIFY_CACHE"
_PACKAGE = Path(__file__).resolve().parent
_ROOM = 1 << 16  # bytes that a directory must have room for: about what a compiled loop takes


def source_hash(package: Path = _PACKAGE) -> str:
    """Return 32 hex digits over all ``*.py`` and ``*.json`` files of the package and the library versions."""
    digest = hashlib.sha256(f"numba {numba.__version__} numpy {np.__version__}\n".encode())
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".json"):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


def _is_private(directory: Path) -> bool:
    """Tell whether nobody else may write to a directory, which matters as numba unpickles what it finds there."""
    status = directory.stat()
    owner = getattr(os, "getuid", lambda: status.st_uid)()
    return status.st_uid == owner and (os.name == "nt" or not stat.S_IMODE(status.st_mode) & 0o022)


@functools.cache
def cache_directory() -> Path:
    """Return a writable directory for this source state.

    Its root is the first of $FA3VERIFY_CACHE, $XDG_CACHE_HOME, ~/.cache and the system's temporary directory that can
    be written, has room, and is nobody else's to write to; without any of them it is a fresh temporary directory.
    """
    roots = [os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME"), os.path.expanduser("~/.cache")]
    roots.append(os.path.join(tempfile.gettempdir(), f"cache-{getattr(os, 'getuid', int)()}"))
    for root in filter(None, roots):
        directory = Path(root).absolute() / "fa3verify" / source_hash()
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                file.write(bytes(_ROOM))  # a full disk still makes empty files
        except OSError:
            continue
        if _is_private(directory) and _is_private(directory.parent):
            return directory
    return Path(tempfile.mkdtemp(prefix="fa3verify-"))


@contextmanager
def _numba_cache_in(directory: Path) -> Iterator[None]:
    """Set numba's CACHE_DIR inside the block; numba reads it only while it decorates a function."""
    before = _CONFIG.CACHE_DIR
    _CONFIG.CACHE_DIR = str(directory)
    try:
        yield
    finally:
        _CONFIG.CACHE_DIR = before


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop on first call (GIL released, no fast-math, no threads), cached on disk where there is room."""
    with _numba_cache_in(cache_directory()):
        return forgiving(numba.njit(cache=True, nogil=True, error_model="numpy")(function))


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function to be copied into the compiled loops that call it, so that these are vectorised."""
    return numba.njit(inline="always", error_model="numpy")(function)
