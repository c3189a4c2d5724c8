"""Names of a package that are imported when they are first asked for, so that importing the package costs little.

The ``__init__`` modules of all packages of the project use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def exporter(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package.

    Parameters
    ----------
    package : str
        Name of the package.
    homes : mapping of str to str
        The module that holds each public name; ``module:other`` where the name is ``other`` there.

    Returns
    -------
    __getattr__ : callable
        ``__getattr__(name)`` imports the module and returns the object; AttributeError for a name that is not in
        ``homes``, and whatever importing the module raises.
    __dir__ : callable
        ``__dir__()`` returns the names that the package has already and those of ``homes``, sorted.
    """

    def found(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, there = homes[name].partition(":")
        value = getattr(import_module(module), there or name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return found, names
