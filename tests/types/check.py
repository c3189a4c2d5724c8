"""Check what a user's type checker sees: ``python tests/types/check.py``, by a Python that has the packages and torch.

The user's script must pass pyright and mypy in strict mode, and no public name, field, method or property may have a
type that is unknown, or ``Any`` but for :data:`FREE`. It is checked in an empty folder, so that nothing of the checkout
is seen but what is installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = (
    "fa3verify",
    "fa3verify.kernels.functions",
    "fa3verify.inputs.strategies",
    "fa3_kernels",
    "fa3_simulator",
    "fa3_reference",
    "fa3_reference.bounds",
)
SCRIPT = Path(__file__).with_name("user_script.py")
# What numpy itself says: of the shapes of its NDArray, and of generic.
OF_NUMPY = re.compile(r"tuple\[Any, \.\.\.\], |(?<=generic)\[Any\]")
# Types that follow from a value: of stored arrays from the format of a problem, of options from a kernel's operation.
FREE = {
    "Kernel.__init__",
    "Kernel.altered",  # the functions of a kernel, of which each operation has its own
    "Kernel.order",
    'Facts.get("order")',
    'FunctionFacts.get("order")',
    'KernelFacts.get("order")',
    "Judgement.__init__",
    "Judgement.outputs",
    "Operands.__init__",
    "Operands.k",
    "Operands.q",
    "Operands.v",
    "Result.outputs",
    "Result.__new__",
    "Result.out",
}


def public_names() -> Iterator[tuple[str, str]]:
    """Yield every public expression with the class it is of, empty for a name of a module."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            found = getattr(module, name)
            yield f"{package}.{name}", ""
            if inspect.isclass(found):
                yield from ((member, f"{package}.{name}") for member in members(found))


def members(found: type) -> list[str]:
    """Return the public attributes of a class, and what makes a record of it."""
    if hasattr(found, "__required_keys__"):  # a TypedDict
        return [f'get("{key}")' for key in found.__annotations__]
    names = {name for name in vars(found) if not name.startswith("_")}
    if dataclasses.is_dataclass(found):
        names |= {field.name for field in dataclasses.fields(found)} | {"__init__"}
    return sorted(names | ({"__new__"} if hasattr(found, "_fields") else set()))


def revealing() -> str:
    """Return a program that asks a type checker for the type of every public name."""
    lines = [*(f"import {package}" for package in PACKAGES), ""]
    for number, (name, owner) in enumerate(public_names()):
        if owner:
            lines.append(f"def _{number}(x: {owner}) -> None: reveal_type(x.{name})  # {owner}.{name}")
        else:
            lines.append(f"reveal_type({name})  # {name}")
    return "\n".join(lines) + "\n"


def pyright(folder: Path, file: str) -> list[dict[str, Any]]:
    """Return what pyright says of a file."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", file]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    return json.loads(said)["generalDiagnostics"]


def hidden(folder: Path) -> list[str]:
    """Return the public names whose type is unknown or ``Any``."""
    program = revealing()
    (folder / "revealing.py").write_text(program)
    lines = program.splitlines()
    found = []
    asked = {number for number, line in enumerate(lines) if "reveal_type" in line}
    for said in pyright(folder, "revealing.py"):
        number = said["range"]["start"]["line"]
        name = lines[number].rpartition("  # ")[2]
        asked.discard(number)
        told = OF_NUMPY.sub("", said["message"])
        is_any = re.search(r"\bAny\b", told) and ".".join(name.split(".")[-2:]) not in FREE
        if said["severity"] == "error" or "Unknown" in told or is_any:
            found.append(f"{name}: {said['message']}")
    return found + [f"{lines[number]}: nothing is said of it" for number in asked]


def main() -> int:
    """Print what is wrong; return 1 if anything is."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copy(SCRIPT, folder)
        wrong = [f"pyright: {said['message']}" for said in pyright(folder, SCRIPT.name)]
        unknown = hidden(folder)
        command = [sys.executable, "-m", "mypy", "--strict", SCRIPT.name]
        mypy = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    print("\n".join([*wrong, *unknown]), mypy.stdout, file=sys.stderr)
    print(f"user's script: pyright {len(wrong)} errors, mypy exit code {mypy.returncode}")
    print(f"public names of unknown type, or Any: {len(unknown)} of {len(list(public_names()))}")
    return int(bool(wrong or unknown or mypy.returncode))


if __name__ == "__main__":
    sys.exit(main())
