"""The planted mistakes: bugs that real attention kernels have shipped with, each as a rewrite of the twin's source.

``faults.toml`` says for every mistake what goes wrong and which text of the twin is replaced by which. A rewrite whose
text does not stand in the twin raises ValueError, so that a mistake cannot silently be planted nowhere. Users of this
table are the tests that ask whether a mistake is found, and ``fa3verify``'s own check of its comparisons.

A mistake is run in a changed copy of the twin, a package with a name of its own beside the sound one. Only the changed
module and the modules that import it are loaded again for the copy. The truth, the bound, the plan of a launch and the
twin's other modules are shared with the sound package, so nothing that judges a mistake can contain it. The mutation
study of the reports loads its own edits in the same way.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import fa3_kernels.twin as sound

PACKAGE = sound.__name__
FOLDER = Path(sound.__path__[0])
_UNCACHED = "fa3_kernels.faults.uncached"


class Changed(Protocol):
    """A change of one module: the name of a module of the twin, and the syntax tree that is run in its place."""

    @property
    def module(self) -> str: ...

    def tree(self) -> ast.Module: ...


class Rewrite:
    """Replaces texts in the source of one module of the twin: ``Rewrite("softmax", (before, after), ...)``."""

    def __init__(self, module: str, *edits: tuple[str, str]) -> None:
        self.module = module
        self.edits = edits

    def tree(self) -> ast.Module:
        """Return the syntax tree of the rewritten module.

        Raises
        ------
        ValueError
            Unless each ``before`` stands exactly once in the source, as the edits in front of it have left it.
        """
        text = source(self.module)
        for before, after in self.edits:
            if text.count(before) != 1:
                raise ValueError(f"{self.module} has {text.count(before)} times {before!r}, expected once")
            text = text.replace(before, after)
        return ast.parse(text)


@cache
def modules() -> tuple[str, ...]:
    """Return the names of the twin's modules, without the package's, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"))


@cache
def source(module: str) -> str:
    """Return the source text of a module of the twin; FileNotFoundError for a name that is none."""
    return (FOLDER / f"{module}.py").read_text(encoding="utf-8")


@cache
def imports(module: str) -> frozenset[str]:
    """Return the modules of the twin that a module imports by ``from``, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
            names.add((node.module or "").removeprefix(f"{PACKAGE}."))
    return frozenset(names)


@cache
def dependent(module: str) -> frozenset[str]:
    """Return the module itself and every module of the twin that imports it, directly or through others."""
    again = {module}
    while more := {m for m in modules() if imports(m) & again} - again:
        again |= more
    return frozenset(again)


class _Finder(MetaPathFinder, Loader):
    """Finds and runs the modules of one changed copy, whose package is called ``alias``.

    Python asks it for every import that is not loaded yet. It answers for the copy's package and for a module of every
    name that the twin has; one that need not be loaded again is the sound module itself, and the copy's ``compiled``
    is :mod:`fa3_kernels.faults.uncached`, which stores no compiled loop.
    """

    def __init__(self, alias: str, changed: Changed) -> None:
        self.alias = alias
        self.module = changed.module
        self.tree = changed.tree()
        self.shared = {name: f"{PACKAGE}.{name}" for name in modules() if name not in dependent(changed.module)}
        self.shared["compiled"] = _UNCACHED

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how a module of the copy is loaded; None for every other module.

        Python calls this with the full name of a module that is being imported.
        """
        package, _, name = fullname.rpartition(".")
        if fullname == self.alias:
            return spec_from_loader(fullname, self, is_package=True)
        if package != self.alias or name not in modules():
            return None  # not a module of this copy: the next finder is asked
        spec = spec_from_loader(fullname, self, origin=str(FOLDER / f"{name}.py"))
        if spec is not None:
            spec.has_location = True  # sets __file__: mufu_tables reads a table that lies beside its own file
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Run a module of the copy: the changed one from its new tree, the others from their source.

        What they import from the twin they import from the copy. A shared module is put in the place of the empty one.
        """
        name = module.__name__.rpartition(".")[2]
        if module.__name__ == self.alias:
            return  # the package itself is empty, as the twin's is
        if name in self.shared:
            sys.modules[module.__name__] = import_module(self.shared[name])
            return
        tree = self.tree if name == self.module else ast.parse(source(name))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}."):
                node.module = self.alias + str(node.module).removeprefix(PACKAGE)
        exec(compile(tree, str(FOLDER / f"{name}.py"), "exec"), module.__dict__)


def load(alias: str, changed: Changed) -> str:
    """Make a changed copy of the twin importable in this process.

    Nothing of the copy is imported yet: errors of its code are raised by the first import from it.

    Parameters
    ----------
    alias : str
        Name of the copy's package, which no other copy in this process may have.
    changed : Changed
        The module that differs, and its syntax tree.

    Returns
    -------
    str
        The alias.

    Raises
    ------
    RuntimeError
        If this process has a copy of that name.
    ValueError
        If the source cannot be edited, as :meth:`Rewrite.tree` says.
    """
    if any(isinstance(finder, _Finder) and finder.alias == alias for finder in sys.meta_path):
        raise RuntimeError(f"this process has a package {alias} already")
    sys.meta_path.insert(0, _Finder(alias, changed))
    return alias


_TABLE: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("faults.toml").read_text(encoding="utf-8")
)


def _named(kind: str) -> list[tuple[str, str]]:
    return [(name.upper(), name) for name in _TABLE[kind]]


# Mistakes of the forward, of the quantiser and of the backward: MEMBER = "member" for each entry of faults.toml.
Fault = StrEnum("Fault", _named("Fault"))
QuantizerFault = StrEnum("QuantizerFault", _named("QuantizerFault"))
BackwardFault = StrEnum("BackwardFault", _named("BackwardFault"))
AnyFault = Fault | QuantizerFault | BackwardFault
_FUNCTIONS = {Fault: "forward", QuantizerFault: "quantize_qkv", BackwardFault: "backward"}


def description(fault: AnyFault) -> str:
    """Return in words what goes wrong."""
    return _TABLE[type(fault).__name__][fault]["what"]


def rewrite(fault: AnyFault) -> Rewrite:
    """Return the change of the twin's source that plants the mistake."""
    row = _TABLE[type(fault).__name__][fault]
    # one edit stands in the row itself, several in its list "edits"
    return Rewrite(row["module"], *((edit["before"], edit["after"]) for edit in row.get("edits", [row])))


def planted(fault: AnyFault) -> str:
    """Return the name of a changed copy of the twin that has this mistake; it becomes importable on first use.

    Raises
    ------
    ValueError
        If a text that the rewrite replaces does not stand in the twin exactly once.
    """
    return _loaded(type(fault), str(fault))


@cache
def _loaded(kind: type[AnyFault], name: str) -> str:
    """Load a mistake once.

    The kind is part of the key: members of two enumerations may share a name, and as strings they then are equal.
    """
    return load(f"fa3_twin_with_{kind.__name__.lower()}_{name}", rewrite(kind(name)))


def faulty(fault: AnyFault) -> Callable[..., Any]:
    """Return the function of the changed twin that computes with this mistake: forward, quantize_qkv or backward.

    It takes what the sound function takes. ValueError as :func:`planted` says.
    """
    function = _FUNCTIONS[type(fault)]
    return getattr(import_module(f"{planted(fault)}.{function.removesuffix('_qkv')}"), function)
