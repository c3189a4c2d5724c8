"""Which kernel sources a measurement belongs to: evidence older than the kernel is stale, and says so."""

from __future__ import annotations

import hashlib
from pathlib import Path


def source_sha256(package: str = "gluon") -> str:
    """Hash of every module of a kernel package, in name order."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent / package).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
