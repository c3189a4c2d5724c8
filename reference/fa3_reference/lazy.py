"""Names of a package that are imported when they are first asked for, so that importing the package costs little.

The ``__init__`` modules of all packages of the project use it. Beside each lies a stub, ``__init__.pyi``, which is the
one list of the package's public names: type checkers read it, and so does :func:`exporter`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path


def exporter(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package, whose stub imports its public names.

    Parameters
    ----------
    package : str
        Name of the package, which must have an ``__init__.pyi`` beside its ``__init__.py``.

    Returns
    -------
    __getattr__ : callable
        ``__getattr__(name)`` imports the module that the stub imports the name from, and returns the object;
        ``__all__`` is the list of these names. AttributeError for any other name, and whatever importing the module
        raises.
    __dir__ : callable
        ``__dir__()`` returns the names that the package has already and those of the stub, sorted.
    """
    module = sys.modules[package]

    @cache
    def homes() -> dict[str, tuple[str, str]]:
        import ast

        stub = ast.parse(Path(str(module.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
        imports = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
        return {x.asname or x.name: (str(each.module), x.name) for each in imports for x in each.names}

    def found(name: str) -> object:
        if name == "__all__":
            return sorted(homes())
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, there = homes()[name]
        value = getattr(import_module(home), there)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(module), *homes()})

    return found, names
