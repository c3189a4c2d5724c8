"""A Merkle hash of a function's syntax: names that the packages define become the hashes of their definitions.

Local names become numbers; comments, docstrings, annotations, imports and the texts of errors are left out, so that a
rename, a move or a comment keeps the hash. Constants and tables in JSON or TOML count by value. Nothing is run to find
it.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

# What these give to a twin is in the key of a launch, or (the last one) decides no bit.
BY_VALUE = {"Config", "Order", "OUR_ORDER", "Traits", "default_config", "traits_of", "cache_directory"}
_TABLES = {".json": json.loads, ".toml": tomllib.loads}
_DROPPED = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}
_Place = tuple[str, str]  # a module and a name in it
_Scopes = tuple[Mapping[str, str], ...]  # numbers of local names, outermost first


def short_hash(text: str) -> str:
    """Return 16 hexadecimal digits."""
    return blake2b(text.encode(), digest_size=8).hexdigest()


class Sources:
    """The modules of some packages, each of which is read once; those of the packages ``without`` are none of them."""

    def __init__(self, folders: Mapping[str, Path], without: Collection[str] = ()) -> None:
        self.folders = folders
        self.without = without
        self.path, self.module, self.origin = cache(self._path), cache(self._module), cache(self._origin)

    def _path(self, module: str) -> Path | None:
        """Return the file of a module, None of other packages and of what is no module."""
        package, *rest = module.split(".")
        if package not in self.folders or any(f"{module}.".startswith(f"{other}.") for other in self.without):
            return None
        place = self.folders[package].joinpath(*rest)
        files = (place.with_suffix(".py"), place / "__init__.py")
        return next((file for file in files if file.is_file()), None)

    def _module(self, module: str) -> dict[str, list[ast.stmt]]:
        """Return the statements of a module by the names that they bind or change; imports bind wherever they stand."""
        path = self.path(module)
        tree = ast.parse(path.read_text(encoding="utf-8") if path else "")
        known: dict[str, list[ast.stmt]] = {}
        for statement in (*tree.body, *(x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom))):
            for name in _bound(statement):
                if statement not in known.setdefault(name, []):
                    known[name].append(statement)
        return known

    def _origin(self, module: str, name: str) -> _Place:
        """Return where a name is defined, through the imports of the packages; a module has an empty name."""
        match self.module(module).get(name):
            case [ast.ImportFrom(module=str(source), names=aliases), *_]:
                original = next(x.name for x in aliases if (x.asname or x.name) == name)
                if self.path(f"{source}.{original}"):
                    return f"{source}.{original}", ""
                return self.origin(source, original) if self.path(source) else (source, original)
        return module, name


class Code:
    """The hashes of those definitions of some sources that were reached; those of ``by_value`` are not followed."""

    def __init__(self, sources: Sources, *, by_value: Collection[str] = BY_VALUE) -> None:
        self.path, self.module, self.origin = sources.path, sources.module, sources.origin
        self.by_value = by_value
        self.keys: dict[_Place, str] = {}
        self.open: list[_Place] = []
        self.attributes: set[str] = set()
        self.classes: dict[_Place, ast.ClassDef] = {}

    def key(self, module: str, name: str) -> str:
        """Return the key of a definition, with those members of the classes that it knows whose names are read."""
        if name not in self.module(module):
            raise ValueError(f"{module} defines no {name!r}")
        parts = {("", self.of(module, name))}
        read: set[ast.stmt] = set()
        while True:  # a method that is read may read others
            more = [
                (place, member, statement)
                for (place, _), known in self.classes.items()
                for member, statement in _members(known)
                if member in self.attributes and statement not in read
            ]
            if not more:
                return short_hash(repr(sorted(parts)))
            parts |= {(member, self.text(statement, place, ())) for place, member, statement in more}
            read |= {statement for _, _, statement in more}

    def of(self, module: str, name: str) -> str:
        """Return the hash of a definition, or what other packages call it."""
        place = self.origin(module, name)
        if place[1] in self.by_value:
            return "a value"
        if place in self.open:
            return f"^{len(self.open) - self.open.index(place)}"
        if place not in self.keys:
            self.open.append(place)
            self.keys[place] = self.definition(*place)
            self.open.pop()
        return self.keys[place]

    def definition(self, module: str, name: str) -> str:
        match self.module(module).get(name, []):
            case [] if self.path(module):
                return f"builtin {name}"
            case []:
                return f"{module}.{name}"
            case [ast.Import(names=aliases)]:
                return next(x.name for x in aliases if name in (x.asname, x.name.split(".")[0]))
            case [ast.ClassDef() as one]:
                self.classes[module, name] = one
                return short_hash(self.text(one, module, ()))
            case statements:
                return short_hash("".join(self.text(x, module, ()) + self.tables(x, module) for x in statements))

    def tables(self, statement: ast.stmt, module: str) -> str:
        """Return the values of the files beside the module, in JSON or TOML, that a statement names."""
        path = self.path(module)
        texts = {x.value for x in ast.walk(statement) if isinstance(x, ast.Constant) and isinstance(x.value, str)}
        files = [path.with_name(text) for text in sorted(texts) if text.endswith(tuple(_TABLES))] if path else []
        read = (_TABLES[file.suffix](file.read_text(encoding="utf-8")) for file in files if file.is_file())
        return "".join(json.dumps(table, sort_keys=True) for table in read)

    def text(self, node: Any, module: str, scopes: _Scopes) -> str:
        """Return a tree in one spelling, without what decides nothing."""
        match node:
            case list():
                return f"[{','.join(self.text(x, module, scopes) for x in node if not _is_silent(x))}]"
            case ast.Raise():
                return "raise"
            case ast.Name(id=name):
                return self.name(name, module, scopes)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if room := self.room(name, module, scopes):
                return self.name(attribute, room, ())
            case ast.Attribute(attr=attribute):
                self.attributes.add(attribute)
            case ast.Call():
                return self.call(node, module, scopes)
            case ast.FunctionDef() | ast.Lambda():
                return self.function(node, module, scopes)
            case ast.ClassDef():
                return self.record(node, module)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                scopes = (*scopes, _numbered(_stored(node.generators), len(scopes)))
            case ast.AnnAssign():
                self.annotated(node.annotation, module)
                return f"set({self.text(node.target, module, scopes)},{self.text(node.value, module, scopes)})"
            case ast.Assign(targets=[target]):
                return f"set({self.text(target, module, scopes)},{self.text(node.value, module, scopes)})"
            case ast.AST():
                pass
            case _:
                return repr(node)
        fields = [(name, x) for name, x in ast.iter_fields(node) if name not in _DROPPED and x is not None and x != []]
        return f"{type(node).__name__}({','.join(f'{name}={self.text(x, module, scopes)}' for name, x in fields)})"

    def name(self, name: str, module: str, scopes: _Scopes, *, is_called: bool = False) -> str:
        """Return a local name's number or a definition's hash, with its parameters unless a call names them."""
        for scope in reversed(scopes):
            if name in scope:
                return scope[name]
        known = self.parameters(module, name)
        return self.of(module, name) + ("" if is_called or not known else str(known))

    def parameters(self, module: str, name: str) -> list[str]:
        """Return the names of a function's parameters; of anything else none."""
        room, original = self.origin(module, name)
        match self.module(room).get(original):
            case [ast.FunctionDef(args=args)] if original not in self.by_value:
                return _parameters(args)
        return []

    def room(self, name: str, module: str, scopes: _Scopes) -> str:
        """Return which module of the packages a name is, empty if it is none."""
        if any(name in scope for scope in scopes):
            return ""
        room, original = self.origin(module, name)
        return "" if original else room

    def call(self, node: ast.Call, module: str, scopes: _Scopes) -> str:
        """Return a call; arguments by keyword have their places where the function is known, else their names."""
        place = (module, "")
        function = node.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            place = self.room(function.value.id, module, scopes), function.attr
        elif isinstance(function, ast.Name) and not any(function.id in scope for scope in scopes):
            place = module, function.id
        known = self.parameters(*place) if all(place) else []
        if not known or any(x.arg is None for x in node.keywords):
            known = []
            called = self.text(function, module, scopes)
        else:
            called = self.name(place[1], place[0], (), is_called=True)
        named = [(known.index(x.arg) if x.arg in known else x.arg, x.value) for x in node.keywords]
        named.sort(key=lambda pair: repr(pair[0]))  # two mappings that are unpacked have no name, and keep their order
        given = "".join(f",{name}={self.text(value, module, scopes)}" for name, value in named)
        return f"call({called},{self.text(node.args, module, scopes)}{given})"

    def function(self, node: ast.FunctionDef | ast.Lambda, module: str, scopes: _Scopes) -> str:
        """Return a function with its parameters and locals by number."""
        args = node.args
        body = node.body if isinstance(node.body, list) else [node.body]
        names = _parameters(args)
        for x in (*args.posonlyargs, *args.args, *args.kwonlyargs):
            self.annotated(x.annotation, module)
        inner = (*scopes, _numbered([*names, *_stored(body)], len(scopes)))
        kinds = (len(args.posonlyargs), len(args.args), args.vararg is None, len(args.kwonlyargs), args.kwarg is None)
        outer = [*args.defaults, *args.kw_defaults, *getattr(node, "decorator_list", [])]
        return f"def({kinds},{self.text(outer, module, scopes)},{self.text(body, module, inner)})"

    def record(self, node: ast.ClassDef, module: str) -> str:
        """Return a class: what it is made of when it is made; other members count where they are read."""
        fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
        for x in fields:
            self.annotated(x.annotation, module)
        made = [(str(getattr(x.target, "id", "")), self.text(x.value, module, ())) for x in fields]
        made += [(name, self.text(x, module, ())) for name, x in _members(node) if name.startswith("__")]
        bases = [x for x in node.bases if not self.is_mixed_in(x, module)]
        return f"class({self.text([*node.decorator_list, *bases], module, ())},{made})"

    def is_mixed_in(self, base: ast.expr, module: str) -> bool:
        """Tell whether a base is one of ours that has methods alone, which then count as those of the class do."""
        room, name = place = self.origin(module, base.id) if isinstance(base, ast.Name) else ("", "")
        match self.module(room).get(name):
            case [ast.ClassDef(bases=[], decorator_list=[]) as known]:
                self.classes.setdefault(place, known)
                fields = [x for x in known.body if isinstance(x, ast.AnnAssign) and x.value]
                return not fields and all(not x.startswith("__") for x, _ in _members(known))
        return False

    def annotated(self, annotation: ast.expr | None, module: str) -> None:
        """Note the classes whose members may be read because a value is said to be theirs."""
        for x in ast.walk(annotation) if annotation else ():
            if isinstance(x, ast.Name):
                room, name = place = self.origin(module, x.id)
                match self.module(room).get(name):
                    case [ast.ClassDef() as known] if name not in self.by_value and place not in self.classes:
                        self.classes[place] = known
                        for base in known.bases:
                            self.is_mixed_in(base, room)
                        for field in known.body:
                            if isinstance(field, ast.AnnAssign):
                                self.annotated(field.annotation, room)


def _members(node: ast.ClassDef) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the methods of a class and its constants, such as the members of an enumeration."""
    for x in node.body:
        match x:
            case ast.Assign(targets=[ast.Name(id="__slots__")]):
                pass  # where values are kept, and none of them
            case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                yield name, x


def _parameters(args: ast.arguments) -> list[str]:
    named = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
    return [x.arg for x in named if x]


def _numbered(names: Iterable[str], depth: int) -> dict[str, str]:
    return {name: f"v{depth}.{i}" for i, name in enumerate(dict.fromkeys(names))}


def _is_silent(node: Any) -> bool:
    """Whether a statement decides nothing where it stands: a docstring, an import, an annotation without a value."""
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    return isinstance(node, ast.Import | ast.ImportFrom) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module binds, or whose values it may change."""
    match statement:
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            yield from ((x.asname or x.name).split(".")[0] for x in aliases)
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case _:  # a loop, a call, an item that is set: whatever it names may be another afterwards
            yield from (x.id for x in ast.walk(statement) if isinstance(x, ast.Name))


def _stored(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that a block binds or whose items it sets, but not those of the blocks within it."""
    for x in nodes:
        match x:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
                continue
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                yield from (y.target.id for y in ast.walk(x) if isinstance(y, ast.NamedExpr))
                continue
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
        yield from _stored(ast.iter_child_nodes(x))
