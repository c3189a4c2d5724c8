"""Binaries of other people's kernels, found in the folder that ``--peers`` names."""

from __future__ import annotations

import lzma
import os
import shutil
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from fa3verify.gpu.bench.kernels import Unsupported


def library(folder: Path | None, name: str) -> Path:
    """Return the path of a shared library in the peers' folder, unpacked from ``name.xz`` if only that is there.

    Raises
    ------
    Unsupported
        If neither is there.
    """
    if folder is None:
        raise Unsupported(f"{name} is looked for in the folder that --peers names, and none was named")
    path, packed = folder / name, folder / f"{name}.xz"
    if path.exists():
        return path
    if not packed.exists():
        raise Unsupported(f"neither {name} nor {name}.xz is in {folder}")
    if not os.access(folder, os.W_OK):
        path = Path(tempfile.mkdtemp(prefix="fa3verify-peers-")) / name
    part = path.with_name(f".{name}.part")
    with lzma.open(packed) as source, part.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 24)
    part.replace(path)
    return path


def make_importable(folder: Path | None, pattern: str, package: str) -> None:
    """Make a package importable that is not installed, from a wheel in the peers' folder; Unsupported without one."""
    if find_spec(package) is not None:
        return
    found = sorted(folder.glob(pattern)) if folder else []
    if not found:
        raise Unsupported(f"package {package} is not installed and no {pattern} is in the peers' folder")
    site = Path(tempfile.mkdtemp(prefix="fa3verify-peers-"))
    with zipfile.ZipFile(found[-1]) as archive:
        archive.extractall(site)
    sys.path.insert(0, str(site))
