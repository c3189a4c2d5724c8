"""Hypothesis profiles, how tests are dealt to workers, and the summary line that names what could not run here."""

from __future__ import annotations

import functools
import importlib.util
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("release", deadline=None, max_examples=300, print_blob=True)
settings.register_profile("soak", deadline=None, max_examples=3000, print_blob=True)
settings.load_profile(os.environ.get("FA3VERIFY_PROFILE", "ci"))

_HAS_TORCH = importlib.util.find_spec("torch") is not None
_HAS_TRITON = importlib.util.find_spec("triton") is not None


# A module that imports torch or triton, or stands in a room above such modules, has no doctests where they are absent;
# what of these rooms needs neither is named by the import contract.
_ROOT = Path(__file__).parent
_CONTRACTS = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
_WITHOUT_TORCH = {
    _ROOT / f"{name.replace('.', '/')}.py"
    for contract in _CONTRACTS
    if contract["name"] == "the CPU side runs without torch or triton"
    for name in contract["source_modules"]
}
_ROOMS = ("kernels/fa3_kernels/gluon", "fa3verify/bench", "fa3verify/kernels", "reports/fa3_reports")


def _needs_torch(path: Path) -> bool:
    if path.stem != "__init__" and any(path.is_relative_to(_ROOT / room) for room in _ROOMS):
        return path not in _WITHOUT_TORCH
    lines = path.read_text(encoding="utf-8").splitlines()
    return any(line.startswith(("import torch", "from torch", "import triton", "from triton")) for line in lines)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files without tests, and those whose packages are absent.

    pytest would resolve a list of them once for each path that it meets. The project of somebody else is run by
    tests/harness/test_pytest_plugin.py.
    """
    if collection_path == _ROOT / "tests" / "foreign_project":
        return True
    if collection_path.suffix != ".py" or collection_path.name.startswith(("test_", "conftest")):
        return None
    if ">>>" not in collection_path.read_text(encoding="utf-8"):
        return True
    return True if not (_HAS_TORCH and _HAS_TRITON) and _needs_torch(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give each worker of xdist one stretch of the tests, so that what those of a module share is made about once.

    Each takes one thread: with as many workers as cores, threads of numpy's products that wait for one another spin.
    """
    if config.getoption("numprocesses", None) and config.getoption("dist") == "no":
        config.option.dist = "worksteal"
        os.environ.setdefault("OMP_NUM_THREADS", "1")


class _OfAnotherMachine(pytest.Module):
    """A module whose tests cannot run here: one line in the summary, instead of a thousand tests that are skipped."""

    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect nothing of tests/gpu where there is no such GPU."""
    if module_path.is_relative_to(_ROOT / "tests" / "gpu") and not _hopper():
        return _OfAnotherMachine.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, the tests whose packages or hardware are absent."""
    for item in items:
        if item.get_closest_marker("optional") and not _HAS_TORCH:
            item.add_marker(pytest.mark.skip(reason="needs torch: pip install torch (and the extra 'oracles')"))
        if item.get_closest_marker("gpu") and not _hopper():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA Hopper GPU"))


@functools.cache
def _hopper() -> bool:
    if not _HAS_TORCH:
        return False
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
