"""Binaries of other people's kernels: how they are found in the folder that ``--peers`` or FA3VERIFY_PEERS names.

The option sets the variable, so that worker processes know the folder as well. Which binary a kernel needs stands in
:mod:`fa3verify.known.peers`. Every verb imports this module, so the modules that open archives are imported late.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

FOLDER_VARIABLE = "FA3VERIFY_PEERS"


class Unsupported(Exception):
    """A kernel does not take a problem, or cannot be loaded; the message is the reason that every output shows."""


class Unavailable(ValueError):
    """A kernel exists and cannot run on this machine."""


def folder() -> Path | None:
    """Return the peers' folder, None where none is named."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else None


def why_missing(name: str) -> str | None:
    """Return why a shared library is not there, packed or not; None where it is."""
    where = folder()
    if where is None:
        return f"{name} is looked for in the folder that --peers or {FOLDER_VARIABLE} names, and none was named"
    if not any((where / file).exists() for file in (name, f"{name}.xz")):
        return f"neither {name} nor {name}.xz is in {where}"
    return None


def library(name: str) -> Path:
    """Return the path of a shared library in the peers' folder, unpacked from ``name.xz`` if only that is there.

    Raises
    ------
    Unsupported
        If neither is there.
    """
    where = folder()
    if (reason := why_missing(name)) or where is None:
        raise Unsupported(reason)
    import lzma
    import shutil
    import tempfile

    path = where / name
    packed = where / f"{name}.xz"
    if path.exists():
        return path
    if not os.access(where, os.W_OK):
        path = Path(tempfile.mkdtemp(prefix="fa3verify-peers-")) / path.name
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # its own: several processes may unpack at once
    with lzma.open(packed) as source, part.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 24)
    part.replace(path)
    return path


def why_not_importable(package: str) -> str | None:
    """Return why a package is not installed; None where it is."""
    return None if find_spec(package) is not None else f"package {package} is not installed"
