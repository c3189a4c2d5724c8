"""What a twin's bits depend on: its code and every definition that this code names, directly or not.

Evidence about one kernel is thus of what that kernel runs, and outlives changes of other operations, of other families
and of words. Nothing is run to find it: names are looked up where they are bound, and which methods and fields count
is told by their names alone, whosever they are.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from fa3_kernels.plan.traits import FAMILIES, OURS

_ROOMS = ("fa3_kernels.", "fa3_reference.")
_NO_BITS = "fa3_reference.bounds"  # judges twins and shares no arithmetic with them


class Name(NamedTuple):
    """A definition: the module that holds it, and what it is called there."""

    module: str
    name: str


FORWARD = Name("fa3_kernels.twin.forward", "forward")
ONE_QUERY = Name("fa3_kernels.twin.one_query", "one_query")


@cache
def twin_hash(family: str) -> str:
    """16 hexadecimal digits over what decides the bits of a family's forward twins: :func:`definitions` of them.

    Every version of Python gives the same ones.

    >>> twin_hash("flash3") == twin_hash("cudnn")
    False
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, text in sorted(definitions(family).items()):
        digest.update(f"{name.module}.{name.name} {text}\n".encode())
    return digest.hexdigest()


def definitions(family: str) -> dict[Name, str]:
    """Every definition that the twins of a family depend on, as text: cuDNN has a second one.

    Comments, docstrings, rows of other families, and methods and fields that nothing reads are left out; tables that
    are read from JSON files are held in full.
    """
    roots = (FORWARD, ONE_QUERY) if family == "cudnn" else (FORWARD,)
    view, before = _View(family), -1
    found: dict[Name, list[ast.AST]] = {}
    while len(view.attributes) > before:  # a method that is read may read others
        before, found = len(view.attributes), _reached(roots, view)
        view.attributes |= {x.attr for nodes in found.values() for x in nodes if isinstance(x, ast.Attribute)}
    return {name: view.text(nodes[0]) + _tables(name.module, nodes) for name, nodes in found.items()}


def _reached(roots: Iterable[Name], view: _View) -> dict[Name, list[ast.AST]]:
    """Definitions and what counts of each."""
    found, todo = {}, [*roots]
    while todo:
        name = todo.pop()
        statement = None if name in found else _statements(name.module).get(name.name)
        if isinstance(statement, ast.ImportFrom):
            todo += _imported(statement, name.name)
        elif statement is not None:
            found[name] = list(view.walk(statement))
            todo += _named(name.module, found[name])
    return found


@cache
def _path(module: str) -> Path | None:
    """The source of a module that may decide bits; None of other packages, and of what is no module."""
    if not module.startswith(_ROOMS) or module.startswith(_NO_BITS):
        return None
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # its parent is no package
        return None
    return Path(spec.origin) if spec and spec.origin else None


@cache
def _statements(module: str) -> dict[str, ast.stmt]:
    """The statements of a module by the names that they bind."""
    path = _path(module)
    body = ast.parse(path.read_text()).body if path else []
    return {name: statement for statement in body for name in _bound(statement)}


def _bound(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name for alias in names)
        case ast.Assign(targets=targets):
            yield from (x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def _imported(statement: ast.ImportFrom, name: str | None = None) -> Iterator[Name]:
    """What is imported, or one name of it, by the names of where it is defined."""
    for alias in statement.names:
        if name in (None, alias.asname or alias.name):
            yield Name(statement.module or "", alias.name)


def _named(module: str, nodes: Iterable[ast.AST]) -> Iterator[Name]:
    """What a statement names: definitions, attributes of modules, and what it imports by itself."""
    for x in nodes:
        if isinstance(x, ast.Name):
            yield Name(module, x.id)
        elif isinstance(x, ast.ImportFrom):
            yield from _imported(x)
        elif isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name):
            statement = _statements(module).get(x.value.id)
            if isinstance(statement, ast.ImportFrom):
                yield from (Name(f"{y.module}.{y.name}", x.attr) for y in _imported(statement, x.value.id))


def _tables(module: str, nodes: Iterable[ast.AST]) -> str:
    """JSON files beside a module that a statement names."""
    path, texts = _path(module), {x.value for x in nodes if isinstance(x, ast.Constant)}
    names = sorted(text for text in texts if isinstance(text, str) and text.endswith(".json"))
    return "".join(x.read_text() for x in (path.with_name(name) for name in names) if x.is_file()) if path else ""


class _View:
    """What counts of a syntax tree for a family, where these attributes are read.

    Docstrings do not, nor rows of other families, nor methods and fields that nothing reads.
    """

    def __init__(self, family: str) -> None:
        self.attributes: set[str] = set()
        self._others = {*FAMILIES} - {family}

    def walk(self, node: ast.AST) -> Iterator[ast.AST]:
        """A node and all below it that counts."""
        todo = [node]
        while todo:
            yield (x := todo.pop())
            for _, value in self._fields(x):
                todo += [y for y in (value if isinstance(value, list) else [value]) if isinstance(y, ast.AST)]

    def text(self, x: Any) -> str:
        """A tree in words that every version of Python uses."""
        if isinstance(x, ast.AST):
            return f"{type(x).__name__}({', '.join(f'{name}={self.text(value)}' for name, value in self._fields(x))})"
        return f"[{', '.join(map(self.text, x))}]" if isinstance(x, list) else repr(x)

    def _fields(self, node: ast.AST) -> Iterator[tuple[str, Any]]:
        """Those that are not empty: newer versions of Python have more."""
        rows = None
        if isinstance(node, ast.Dict):
            rows = [_family(key) not in self._others for key in node.keys]
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                value = list(compress(value, rows or [self._counts(node, x) for x in value]))
            if value is not None and value != []:
                yield name, value

    def _counts(self, parent: ast.AST, x: Any) -> bool:
        """Whether an entry of a list does; records are called by capitalised names."""
        match parent, x:
            case _, ast.Expr(value=ast.Constant()):
                return False
            case ast.ClassDef(), ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                return self._is_read(name)
            case ast.Call(func=ast.Name(id=called)), ast.keyword(arg=str(name)):
                return self._is_read(name) or not (called == "replace" or called[0].isupper())
        return True

    def _is_read(self, name: str) -> bool:
        return name in self.attributes or name.startswith("__")


def _family(key: ast.expr | None) -> Any:
    """What a row of the table of families is of, where a dictionary is that table."""
    return OURS if isinstance(key, ast.Name) and key.id == "OURS" else getattr(key, "value", None)
