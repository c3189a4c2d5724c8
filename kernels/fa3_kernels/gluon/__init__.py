"""The GPU kernels, in Gluon (Triton 3.6) for Hopper, whose bits are those of :mod:`fa3_kernels.twin`; importing needs
no GPU.

Start reading at :mod:`fa3_kernels.gluon.launch` (host) or :mod:`fa3_kernels.gluon.pipeline` (device).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

SUPPORTED_TRITON = "3.6"  # Gluon is experimental: private names, barrier ids and generated code move between versions


def unsupported() -> str | None:
    """Return why the kernels cannot be compiled here, or None if they can; only installed packages are looked at."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"package {package} is not installed (extra 'gpu')"
    found = importlib.metadata.version("triton")
    if found.split(".")[:2] != SUPPORTED_TRITON.split("."):
        return f"needs triton {SUPPORTED_TRITON}, found {found} (extra 'gpu')"
    return None
