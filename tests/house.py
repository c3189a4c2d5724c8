"""The size of the house as figures, each with a budget in ``tests/house.toml`` that only falls.

Counted is what no linter counts, in the packages of the wheel. ``python -m tests.house`` prints the figures and writes
those that have fallen into the table. It raises none: an issue that says how much it may add is the only reason to,
and who merges it edits the table by hand.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain
from pathlib import Path

import click

from fa3verify.cli.main import main

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
PACKAGES = ("fa3verify", "kernels/fa3_kernels", "simulator/fa3_simulator", "reference/fa3_reference")
MODELS = Path("fa3verify/models")  # an extra: its statements and verbs have budgets of their own
VERBS_OF_MODELS = {"watch", "logprobs"}
DEVICE_CODE = "gluon"  # bodies of kernels are longer by nature
LONG_MODULE = 400
LONG_FUNCTION = 70
LONG_SIGNATURE = 12  # parameters: FlashAttention-3's functions, of which signature and docstring fill a page
MANY_FIELDS = 6
SLACK = {"statements": 100}  # by how much a figure may lie below its budget before the budget has to follow

House = dict[Path, list[ast.AST]]


@cache
def wheel() -> House:
    """Return the syntax of the wheel's modules."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT): syntax(path.read_text(encoding="utf-8")) for path in files}


def house() -> House:
    """Return the syntax of the wheel's modules but those of the extra for models."""
    return {path: nodes for path, nodes in wheel().items() if not path.is_relative_to(MODELS)}


def syntax(source: str) -> list[ast.AST]:
    """Return all nodes of a module's syntax tree."""
    return list(ast.walk(ast.parse(source)))


def _nodes(modules: House) -> Iterable[ast.AST]:
    return chain.from_iterable(modules.values())


def _name(node: ast.expr) -> str:
    """Return the last part of a name, of what is called where it is a call."""
    called = node.func if isinstance(node, ast.Call) else node
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def statements(modules: House) -> int:
    """Count statements; docstrings are none."""
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in _nodes(modules))


def statements_of_models(_modules: House) -> int:
    """Count statements of the extra for models."""
    return statements({path: nodes for path, nodes in wheel().items() if path.is_relative_to(MODELS)})


def _records(modules: House) -> set[str]:
    kinds = {"dataclass", "NamedTuple", "TypedDict"}
    return {
        node.name
        for node in _nodes(modules)
        if isinstance(node, ast.ClassDef) and kinds & {_name(each) for each in (*node.bases, *node.decorator_list)}
    }


def records(modules: House) -> int:
    """Count dataclasses, named tuples and typed dictionaries; no two share a name."""
    return len(_records(modules))


def _built(modules: House) -> list[ast.Call]:
    known = _records(modules)
    return [node for node in _nodes(modules) if isinstance(node, ast.Call) and _name(node) in known]


def records_by_position(modules: House) -> int:
    """Count records built from so many positional arguments that an exchange of two goes unseen."""
    return sum(len(call.args) >= MANY_FIELDS for call in _built(modules))


def splatted_records(modules: House) -> int:
    """Count records built from a tuple whose fields no reader and no type checker sees."""
    return sum(any(isinstance(given, ast.Starred) for given in call.args) for call in _built(modules))


def untyped_mappings(modules: House) -> int:
    """Count annotations ``dict[str, Any]`` and ``Mapping[str, Any]``."""
    kinds = {"dict", "Mapping"}
    mappings = [node for node in _nodes(modules) if isinstance(node, ast.Subscript) and _name(node.value) in kinds]
    return sum(isinstance(each.slice, ast.Tuple) and _name(each.slice.elts[-1]) == "Any" for each in mappings)


def long_modules(modules: House) -> int:
    """Count modules of more than :data:`LONG_MODULE` lines."""
    return sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) > LONG_MODULE for path in modules)


def long_functions(modules: House) -> int:
    """Count functions of more than :data:`LONG_FUNCTION` lines, but for device code and public signatures."""
    host = {path: nodes for path, nodes in modules.items() if DEVICE_CODE not in path.parts}
    functions = [node for node in _nodes(host) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum(
        (each.end_lineno or 0) - each.lineno >= LONG_FUNCTION
        and len(each.args.args) + len(each.args.kwonlyargs) <= LONG_SIGNATURE
        for each in functions
    )


def verbs(_modules: House) -> int:
    """Count the verbs of the command line but those of the extra for models."""
    return len(set(main.list_commands(click.Context(main))) - VERBS_OF_MODELS)


def verbs_of_models(_modules: House) -> int:
    """Count the verbs of the command line that need the extra for models."""
    return len(set(main.list_commands(click.Context(main))) & VERBS_OF_MODELS)


FIGURES: tuple[Callable[[House], int], ...] = (
    statements,
    records,
    records_by_position,
    splatted_records,
    untyped_mappings,
    long_modules,
    long_functions,
    verbs,
    statements_of_models,
    verbs_of_models,
)


def budget() -> dict[str, int]:
    """Return the figures that must not be exceeded."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))["at_most"]


def renew() -> None:
    """Print all figures beside their budgets, and write the budgets that are too large."""
    text = TABLE.read_text(encoding="utf-8")
    for name, most in budget().items():
        today = next(figure for figure in FIGURES if figure.__name__ == name)(house())
        print(f"{name} {today}, at most {most}")
        text = text.replace(f"{name} = {most}\n", f"{name} = {min(today, most)}\n")
    TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    renew()
