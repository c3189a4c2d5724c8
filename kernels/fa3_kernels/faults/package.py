"""A changed package of the twin beside the sound one: what depends on the changed module is loaded again.

The truth, the bound, the plan of a launch and the modules below the changed one are those of the untouched package, so
that nothing that judges a mistake can have it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Protocol

import fa3_kernels.twin as sound

PACKAGE = sound.__name__
FOLDER = Path(sound.__path__[0])
_COMPILED = f"{PACKAGE}.compiled"
_UNCACHED = "fa3_kernels.faults.uncached"


class Changed(Protocol):
    """A module of the twin, and what stands in its place."""

    @property
    def module(self) -> str: ...

    def tree(self) -> ast.Module: ...


class Rewrite:
    """Says which texts of a module of the twin are replaced, each by what: ``Rewrite("softmax", (before, after))``."""

    def __init__(self, module: str, *edits: tuple[str, str]) -> None:
        self.module = module
        self.edits = edits

    def tree(self) -> ast.Module:
        """Return the module's tree; ValueError unless each text stands in it exactly once."""
        text = source(self.module)
        for before, after in self.edits:
            if text.count(before) != 1:
                raise ValueError(f"{self.module} has {text.count(before)} times {before!r}, expected once")
            text = text.replace(before, after)
        return ast.parse(text)


@cache
def modules() -> tuple[str, ...]:
    """Return the modules of the twin, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"))


@cache
def source(module: str) -> str:
    """Return the text of a module of the twin."""
    return (FOLDER / f"{module}.py").read_text(encoding="utf-8")


@cache
def imports(module: str) -> frozenset[str]:
    """Modules of the twin that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
            found.add((node.module or "").removeprefix(f"{PACKAGE}."))
    return frozenset(found)


@cache
def dependent(module: str) -> frozenset[str]:
    """The module and all that import it, directly or not."""
    found = {module}
    while more := {m for m in modules() if imports(m) & found} - found:
        found |= more
    return frozenset(found)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of one changed package; all others are the sound package's."""

    def __init__(self, alias: str, changed: Changed) -> None:
        self.alias = alias
        self.module = changed.module
        self.tree = changed.tree()
        self.again = dependent(changed.module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if fullname == self.alias:
            return spec_from_loader(fullname, self, is_package=True)
        if package != self.alias or name not in self.again:
            return None
        spec = spec_from_loader(fullname, self, origin=str(FOLDER / f"{name}.py"))
        if spec is not None:
            spec.has_location = True  # tables lie beside the file
        return spec

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.rpartition(".")[2]
        if module.__name__ == self.alias:
            return
        tree = self.tree if name == self.module else ast.parse(source(name))
        tree = ast.fix_missing_locations(_Redirected(self.alias, self.again).visit(tree))
        exec(compile(tree, str(FOLDER / f"{name}.py"), "exec"), module.__dict__)


class _Redirected(ast.NodeTransformer):
    """Imports of modules that are loaded again go to the mutant's package, of compilation to the one without cache."""

    def __init__(self, alias: str, again: frozenset[str]) -> None:
        self.alias = alias
        self.again = again

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.AST]:
        if node.module == PACKAGE:
            ours = [alias for alias in node.names if alias.name in self.again]
            others = [alias for alias in node.names if alias.name not in self.again]
            parts = [(self.alias, ours), (PACKAGE, others)]
            return [ast.copy_location(ast.ImportFrom(m, names, 0), node) for m, names in parts if names]
        if node.module == _COMPILED:
            node.module = _UNCACHED
        elif (node.module or "").removeprefix(f"{PACKAGE}.") in self.again:
            node.module = f"{self.alias}.{(node.module or '').removeprefix(f'{PACKAGE}.')}"
        return node


def load(alias: str, changed: Changed) -> str:
    """Make a changed package importable in this process under a name that no other has, and return the name.

    What importing it raises comes with the first import from it; what keeps its source from being edited is raised
    here.
    """
    if any(isinstance(finder, _Finder) and finder.alias == alias for finder in sys.meta_path):
        raise RuntimeError(f"this process has a package {alias} already")
    sys.meta_path.insert(0, _Finder(alias, changed))
    return alias
