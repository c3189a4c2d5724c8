"""Rooms: what must run without torch does, and every module is on one side of that line."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"fa3verify": "", "fa3_simulator": "simulator", "fa3_kernels": "kernels", "fa3_reference": "reference"}
GPU_ROOMS = ("fa3verify.bench", "fa3verify.known", "fa3verify.tensors")
GPU_ROOMS += ("fa3_kernels.gluon", "fa3_kernels.audit", "fa3_kernels.api")
GPU_ROOMS += ("fa3_kernels.operators", "fa3_kernels.frameworks")
PLUGIN = ("fa3verify.pytest_plugin", "fa3verify.conformance")  # which pytest alone loads


def modules() -> list[str]:
    """Names of all modules, by their files."""
    found = []
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def is_inside(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def without_torch() -> tuple[str, ...]:
    """Sources of the import contract."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = (c for c in settings["contracts"] if "torch" in c.get("forbidden_modules", ()))
    return tuple(contract["source_modules"])


def test_every_module_is_under_the_contract_or_in_a_gpu_room() -> None:
    packages = (*FOLDERS, "fa3verify.__main__")  # which only import what is below them
    outside = [m for m in modules() if not is_inside(m, (*without_torch(), *GPU_ROOMS)) and m not in packages]
    assert outside == []


def test_what_the_contract_names_and_the_list_of_kernels_import_neither_torch_nor_extras() -> None:
    names = [m for m in modules() if is_inside(m, without_torch()) and not is_inside(m, PLUGIN)]
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
