"""Rooms: what stands outside those of the GPU runs without torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"fa3verify": "", "fa3_simulator": "simulator", "fa3_kernels": "kernels", "fa3_reference": "reference"}
PLUGIN = ("fa3verify.pytest_plugin", "fa3verify.conformance")  # which pytest alone loads


def modules() -> list[str]:
    """Return the names of all modules, by their files."""
    found = []
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def is_inside(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def of_the_gpu() -> tuple[str, ...]:
    """Return the rooms that may import torch and triton, from the import contract."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = (c for c in settings["contracts"] if "torch" in c.get("protected_modules", ()))
    return tuple(contract["allowed_importers"])


def test_all_other_rooms_and_the_list_of_kernels_import_neither_torch_nor_extras() -> None:
    apart = (*of_the_gpu(), *PLUGIN, "fa3verify.__main__")  # which runs the command line
    names = [module for module in modules() if not is_inside(module, apart)]
    program = f"""
import sys, importlib
sys.modules["pytest"] = sys.modules["junitparser"] = None  # an import of either fails
for name in {names!r}:
    importlib.import_module(name)
import fa3verify.tensors.here
from fa3verify.known.registry import discover
fa3verify.tensors.here.unsupported = lambda: "no torch"
print({{c.unavailable for name, c in discover().items() if name.startswith("gluon.")}})
print([name for name in ("torch", "triton") if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.stdout == "{'no torch'}\n[]\n", found.stderr


def test_what_only_pytest_and_junit_need_is_an_extra_that_the_tests_install() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for line in (*extras["pytest"], *extras["junit"]):
        assert line in extras["test"]
        assert line not in project["dependencies"]
