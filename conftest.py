"""Hypothesis profiles and the summary line that names what could not run here."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

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


def _imports(text: str, package: str) -> bool:
    """Whether a module imports a package at its top level."""
    return any(line.startswith((f"import {package}", f"from {package}")) for line in text.splitlines())


# Modules that cannot be imported here have no doctests here. A Gluon module without Triton drags down those above it.
_KERNELS = Path(__file__).parent / "kernels" / "fa3_kernels"
collect_ignore = [
    str(path)
    for path in sorted(_KERNELS.rglob("*.py"))
    if (_imports(path.read_text(), "torch") and not _HAS_TORCH)
    or (_imports(path.read_text(), "triton") and not _HAS_TRITON)
    or (path.parent.name == "gluon" and path.stem != "__init__" and not (_HAS_TORCH and _HAS_TRITON))
]


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
