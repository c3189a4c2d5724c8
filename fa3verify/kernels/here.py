"""What runs on a GPU: our kernels as candidates, the bench, the campaign of bits, timelines and tuning.

Modules here import torch and triton at their top, and nothing outside this room and :mod:`fa3verify.kernels.adapters`
does. The room is entered from inside functions, after :func:`unavailable` has been asked. Tables, cells, records and
files of measurements are read without a GPU: those modules need no torch (``pyproject.toml`` lists them in an import
contract).
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec

from fa3_kernels.gluon import unsupported


def unavailable() -> str | None:
    """Why our kernels cannot run here, or None; torch is imported only where a supported Triton is beside it."""
    return unsupported() or no_device()


@cache
def no_device() -> str | None:
    """Why no kernel for a Hopper GPU can run here, whosever it is, or None; torch is imported only beside a driver."""
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
