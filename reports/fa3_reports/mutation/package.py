"""A mutant's package beside the sound one: what depends on the mutated module is loaded again under another name.

The truth, the bound, the plan of a launch and the modules below the mutated one are those of the untouched package, so
that nothing that judges a mutant can have its mistake.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Protocol

from fa3_reports.mutation import edits
from fa3_reports.mutation.edits import FOLDER, PACKAGE, source

ALIAS = "fa3_mutant"
_COMPILED = f"{PACKAGE}.compiled"
_UNCACHED = "fa3_reports.mutation.uncached"


class Changed(Protocol):
    """A module of the twin, and what stands in its place."""

    @property
    def module(self) -> str: ...

    def tree(self) -> ast.Module: ...


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
    while more := {m for m in edits.modules() if imports(m) & found} - found:
        found |= more
    return frozenset(found)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of one mutant's package; all others are the sound package's."""

    def __init__(self, mutant: Changed) -> None:
        self.module, self.tree, self.again = mutant.module, mutant.tree(), dependent(mutant.module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if fullname == ALIAS:
            return spec_from_loader(fullname, self, is_package=True)
        if package != ALIAS or name not in self.again:
            return None
        spec = spec_from_loader(fullname, self, origin=str(FOLDER / f"{name}.py"))
        if spec is not None:
            spec.has_location = True  # tables lie beside the file
        return spec

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.rpartition(".")[2]
        if module.__name__ == ALIAS:
            return
        tree = self.tree if name == self.module else ast.parse(source(name))
        tree = ast.fix_missing_locations(_Redirected(self.again).visit(tree))
        exec(compile(tree, str(FOLDER / f"{name}.py"), "exec"), module.__dict__)


class _Redirected(ast.NodeTransformer):
    """Imports of modules that are loaded again go to the mutant's package, of compilation to the one without cache."""

    def __init__(self, again: frozenset[str]) -> None:
        self.again = again

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.AST]:
        if node.module == PACKAGE:
            ours = [alias for alias in node.names if alias.name in self.again]
            others = [alias for alias in node.names if alias.name not in self.again]
            parts = [(ALIAS, ours), (PACKAGE, others)]
            return [ast.copy_location(ast.ImportFrom(m, names, 0), node) for m, names in parts if names]
        if node.module == _COMPILED:
            node.module = _UNCACHED
        elif (node.module or "").removeprefix(f"{PACKAGE}.") in self.again:
            node.module = f"{ALIAS}.{(node.module or '').removeprefix(f'{PACKAGE}.')}"
        return node


def load(mutant: Changed) -> str:
    """Make a mutant's package importable in this process and return its name.

    A process has one mutant: RuntimeError if it has another already. What importing it raises comes with the first
    import from it; what keeps its source from being edited is raised here.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        raise RuntimeError("this process has a mutant already")
    sys.meta_path.insert(0, _Finder(mutant))
    return ALIAS
