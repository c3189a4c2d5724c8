"""Tell why a kernel for a Hopper GPU cannot run on this machine.

Only the rooms ``tensors``, ``known`` and ``bench`` import torch. Other rooms enter them from inside functions, after
they have asked :func:`unavailable`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec

from fa3_kernels.gluon import unsupported


def unavailable() -> str | None:
    """Return why our kernels cannot run here, None if they can; torch is imported only if Triton is supported."""
    return unsupported() or no_device()


@cache
def no_device() -> str | None:
    """Return why no kernel for a Hopper GPU can run here, None if one can; torch is imported only beside a driver."""
    if find_spec("torch") is None:
        return "package torch is not installed"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA device"
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return None if major == 9 else f"needs a Hopper GPU (compute capability 9.0), found {major}.{minor}"
