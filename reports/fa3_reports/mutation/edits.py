"""Small mistakes in a source file: every edit that one of a few operators can make of it, as data.

The operators are the usual ones of mutation analysis (another operator, constant, comparison, condition, index;
swapped arguments; a dropped statement), and one of numerics: a rounding that is left out. What plants a known fault or
idealises a source of error is no part of a kernel and stays as it is, as do refusals, annotations and texts.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice

from fa3_kernels.faults import table
from fa3_kernels.faults.table import source

_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.MatMult: ast.Mult,
}
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_FUNCTIONS = {
    "maximum": "minimum",
    "minimum": "maximum",
    "max": "min",
    "min": "max",
    "zeros": "ones",
    "ones": "zeros",
    "floor": "ceil",
    "ceil": "floor",
    "rint": "floor",
    "any": "all",
    "all": "any",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
}
_DROPPED_CALLS = {"reversed", "float32", "float64", "abs", "flushed", "ascontiguousarray"}  # f(x) becomes x
_COMMUTATIVE = {"maximum", "minimum", "fmax", "max", "min", "fma", "fma_one"}  # in their first two arguments
_SLIGHTLY = 1 + 2.0**-7  # what a wrong float constant is wrong by


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of one module of the twin.

    Parameters
    ----------
    module, function : str
        Below the twin's package; the qualified name of the innermost function or class, empty at module level.
    operator : str
        Kind of mistake.
    before, after : str
        The statement, of a compound one its head.
    number : int
        Among equal edits of the function, in the order of the file.
    lines : (int, int)
        First and last of the statement.
    place : int
        Among all edits of the module.
    """

    module: str
    function: str
    operator: str
    before: str
    after: str
    number: int
    lines: tuple[int, int]
    place: int

    @property
    def identity(self) -> str:
        """One line that stays when other lines of the file move."""
        again = f" #{self.number}" if self.number else ""
        return f"{self.module}.{self.function or '-'}: {self.before} -> {self.after}{again}"

    def tree(self) -> ast.Module:
        """Return the tree of the module with this edit."""
        tree = ast.parse(source(self.module))
        next(islice(_edits(tree), self.place, None)).swap()
        return ast.fix_missing_locations(tree)


@dataclass(slots=True)
class _Edit:
    """Put ``new`` in a field of ``parent``, or in one place of a list there; done and undone in place."""

    operator: str
    statement: ast.stmt
    function: str
    parent: ast.AST
    field: str
    index: int | None
    new: object

    def swap(self) -> None:
        if self.index is None:
            old = getattr(self.parent, self.field)
            setattr(self.parent, self.field, self.new)
        else:
            items = getattr(self.parent, self.field)
            old = items[self.index]
            items[self.index] = self.new
        self.new = old


@cache
def modules() -> tuple[str, ...]:
    """Return the modules of the twin that have arithmetic, in alphabetical order."""
    return tuple(name for name in table.modules() if name != "compiled")


@cache
def mutants(module: str) -> tuple[Mutant, ...]:
    """Return every edit of a module, in the order of the file; ValueError if there is no such module."""
    if module not in modules():
        raise ValueError(f"unknown module {module!r} of the twin; known are {', '.join(modules())}")
    found: list[Mutant] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for place, edit in enumerate(_edits(ast.parse(source(module)))):
        before = _head(edit.statement)
        edit.swap()
        after = "pass" if edit.operator == "dropped statement" else _head(edit.statement)
        edit.swap()
        if before == after:  # two equal arguments, exchanged
            continue
        key = edit.function, before, after
        lines = edit.statement.lineno, _last_line(edit.statement)
        found.append(Mutant(module, edit.function, edit.operator, before, after, seen[key], lines, place))
        seen[key] += 1
    return tuple(found)


def find(identity: str) -> Mutant:
    """Return a mutant by identity; ValueError if the source has no such edit any more."""
    module = identity.partition(".")[0]
    for mutant in mutants(module):
        if mutant.identity == identity:
            return mutant
    raise ValueError(f"no mutant is {identity!r}")


def _head(statement: ast.stmt) -> str:
    """The text of a statement without what it contains."""
    if isinstance(getattr(statement, "body", None), list):
        bare = copy.copy(statement)
        for field in ("body", "orelse", "finalbody", "decorator_list"):
            if hasattr(bare, field):
                setattr(bare, field, [ast.Pass()] if field == "body" else [])
        return ast.unparse(bare).partition("\n")[0]
    return ast.unparse(statement)


def _last_line(statement: ast.stmt) -> int:
    body = getattr(statement, "body", None)
    return body[0].lineno if isinstance(body, list) else statement.end_lineno or statement.lineno


def _edits(tree: ast.Module) -> Iterator[_Edit]:
    for statement in tree.body:
        yield from _of_statement(statement, tree, "body", tree.body.index(statement), "")


def _of_statement(statement: ast.stmt, parent: ast.AST, field: str, index: int, function: str) -> Iterator[_Edit]:
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.Raise | ast.Assert) or _is_text(statement):
        return
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        if statement.name.lstrip("_").startswith("check"):
            return
        function = f"{function}.{statement.name}" if function else statement.name
    if function and _can_be_dropped(statement):
        yield _Edit("dropped statement", statement, function, parent, field, index, ast.Pass())
    for name in statement._fields:
        value = getattr(statement, name)
        if name in ("decorator_list", "returns", "annotation", "type_params", "bases", "keywords"):
            continue
        if name in ("body", "orelse", "finalbody") and isinstance(value, list):
            for i, inner in enumerate(value):
                yield from _of_statement(inner, statement, name, i, function)
            continue
        yield from _of_field(value, statement, name, statement, function)
    if isinstance(statement, ast.If | ast.While) and not _is_ideal(statement.test):
        for value in (True, False) if isinstance(statement, ast.If) else (False,):
            yield _Edit("condition", statement, function, statement, "test", None, ast.Constant(value))
    if isinstance(statement, ast.AugAssign) and type(statement.op) in _ARITHMETIC:
        other = _ARITHMETIC[type(statement.op)]()
        yield _Edit("arithmetic", statement, function, statement, "op", None, other)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _can_be_dropped(statement: ast.stmt) -> bool:
    """Statements without which names still exist: calls, additions in place, and stores in arrays and attributes."""
    if isinstance(statement, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in statement.targets)
    return isinstance(statement, ast.AugAssign | ast.Expr | ast.Continue | ast.Break)


def _of_field(value: object, parent: ast.AST, field: str, statement: ast.stmt, function: str) -> Iterator[_Edit]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, ast.AST):
                yield from _of_node(item, parent, field, index, statement, function)
    elif isinstance(value, ast.AST):
        yield from _of_node(value, parent, field, None, statement, function)


def _of_node(
    node: ast.AST, parent: ast.AST, field: str, index: int | None, statement: ast.stmt, function: str
) -> Iterator[_Edit]:
    if isinstance(node, ast.arguments):
        for name in ("defaults", "kw_defaults"):
            yield from _of_field(getattr(node, name), node, name, statement, function)
        return
    if isinstance(node, ast.expr) and not isinstance(node, ast.BoolOp | ast.IfExp) and _is_ideal(node):
        return
    if isinstance(node, ast.JoinedStr | ast.Lambda):
        return
    for operator, new in _replacements(node, is_index=field in ("slice", "lower", "upper")):
        yield _Edit(operator, statement, function, parent, field, index, new)
    fields = node._fields
    if isinstance(node, ast.IfExp) and _is_ideal(node.test):
        fields = ("orelse",)
    for name in fields:
        yield from _of_field(getattr(node, name), node, name, statement, function)


def _is_ideal(node: ast.AST) -> bool:
    """Tell whether an expression asks for an idealised source of error."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    return "ideal" in names


def _replacements(node: ast.AST, *, is_index: bool) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
            yield "constant", ast.Constant(value - 1)
        case ast.Constant(value=float(value)):
            yield "constant", ast.Constant(value * _SLIGHTLY if value else 1.0)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            yield "arithmetic", ast.BinOp(left, _ARITHMETIC[type(op)](), right)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield "sign", operand
        case ast.Compare(left=left, ops=[op], comparators=comparators):
            for other in _COMPARISONS[type(op)]:
                yield "comparison", ast.Compare(left, [other()], comparators)
        case ast.BoolOp(op=op, values=values) if not _is_ideal(node):
            yield "guard", ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.IfExp(test=test, body=body, orelse=orelse) if not _is_ideal(test):
            yield "condition", body
            yield "condition", orelse
        case ast.Call():
            yield from _other_calls(node)
    if is_index and isinstance(node, ast.Name | ast.BinOp | ast.Attribute):
        yield "index", ast.BinOp(node, ast.Add(), ast.Constant(1))
        yield "index", ast.BinOp(node, ast.Sub(), ast.Constant(1))


def _other_calls(call: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    args = call.args
    if len(args) > 1 and not any(isinstance(a, ast.Starred) for a in args[:2]) and name not in _COMMUTATIVE | {"where"}:
        yield "swapped arguments", ast.Call(function, [args[1], args[0], *args[2:]], call.keywords)
    if name == "where" and len(args) == 3:
        yield "swapped arguments", ast.Call(function, [args[0], args[2], args[1]], call.keywords)
    if name in _FUNCTIONS:
        if isinstance(function, ast.Attribute):
            other: ast.expr = ast.Attribute(function.value, _FUNCTIONS[name], ast.Load())
        else:
            other = ast.Name(_FUNCTIONS[name], ast.Load())
        yield "function", ast.Call(other, args, call.keywords)
    if name in _DROPPED_CALLS and len(args) == 1 and not isinstance(args[0], ast.Constant):  # which arrays round
        yield "dropped rounding" if name.startswith("float") or name == "flushed" else "function", args[0]
    if name == "astype" and isinstance(function, ast.Attribute):
        yield "dropped rounding", function.value
