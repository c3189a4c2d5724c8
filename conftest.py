"""Hypothesis profiles and the summary line that names what could not run here."""

from __future__ import annotations

import importlib.util
import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("release", deadline=None, max_examples=300, print_blob=True)
settings.register_profile("soak", deadline=None, max_examples=3000, print_blob=True)
settings.load_profile(os.environ.get("FA3VERIFY_PROFILE", "ci"))

_HAS_TORCH = importlib.util.find_spec("torch") is not None
_HAS_TRITON = importlib.util.find_spec("triton") is not None

# Modules that cannot be imported here have no doctests here.
_NEED_TRITON = ("compile", "forward_fp16", "pipeline", "softmax")
collect_ignore = [] if _HAS_TRITON else [f"kernels/fa3_kernels/gluon/{name}.py" for name in _NEED_TRITON]
if not (_HAS_TORCH and _HAS_TRITON):
    collect_ignore.append("kernels/fa3_kernels/gluon/launch.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, the tests whose packages or hardware are absent."""
    for item in items:
        if "optional" in item.keywords and not _HAS_TORCH:
            item.add_marker(pytest.mark.skip(reason="needs torch: pip install torch (and the extra 'oracles')"))
        if "gpu" in item.keywords and not _hopper():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA Hopper GPU"))


def _hopper() -> bool:
    if not _HAS_TORCH:
        return False
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
