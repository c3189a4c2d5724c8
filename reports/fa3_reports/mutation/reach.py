"""Which lines of the twin a kernel runs: a mutant elsewhere is no mutant of that kernel."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

from fa3_kernels.faults.table import FOLDER, source
from fa3_reports.mutation.edits import Mutant, modules
from fa3verify.campaign.plan import judge_cases
from fa3verify.campaign.profiles import PROFILES, family_cases
from fa3verify.known import registry
from fa3verify.properties import LAWS, run_law

Lines = Mapping[str, frozenset[int]]  # by module
_FAMILIES = ("normal", "huge", "faint")
_JITTED = {"compiled", "inlined"}


@contextmanager
def _traced(lines: dict[str, set[int]]) -> Iterator[None]:
    """Note every line of the twin that this thread runs; compiled loops run no lines."""
    files = {str(FOLDER / f"{module}.py"): lines.setdefault(module, set()) for module in modules()}

    def local(frame: FrameType, event: str, _: Any) -> Any:
        files[frame.f_code.co_filename].add(frame.f_lineno)
        return local

    def called(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)


@cache
def _functions(module: str) -> tuple[tuple[str, bool, range], ...]:
    """Name, whether it is compiled, and lines of every function of a module."""
    found = []
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.FunctionDef):
            is_jitted = any(isinstance(d, ast.Name) and d.id in _JITTED for d in node.decorator_list)
            found.append((node.name, is_jitted, range(node.lineno, (node.end_lineno or node.lineno) + 1)))
    return tuple(found)


@cache
def _mentions(module: str) -> Mapping[str, frozenset[int]]:
    """Lines of a module that name something, by name."""
    found: dict[str, set[int]] = {}
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.Name | ast.Attribute):
            found.setdefault(node.id if isinstance(node, ast.Name) else node.attr, set()).add(node.lineno)
    return {name: frozenset(lines) for name, lines in found.items()}


def _with_compiled(lines: dict[str, set[int]]) -> None:
    """Add the compiled functions that a line names which is run, and those that these name."""
    jitted = [
        (module, name, where) for module in modules() for name, is_jitted, where in _functions(module) if is_jitted
    ]
    while True:
        more = [
            (module, where)
            for module, name, where in jitted
            if not lines[module].issuperset(where)
            and any(lines[other] & _mentions(other).get(name, frozenset()) for other in modules())
        ]
        if not more:
            return
        for module, where in more:
            lines[module].update(where)


def lines_of(kernel: str, seed: int = 0) -> dict[str, list[int]]:
    """Return the lines of the twin that a kernel runs, by module: three families of inputs and every property.

    What stands at module level counts as run where anything of the module is.
    """
    asked = registry.find(kernel)
    lines: dict[str, set[int]] = {}
    with _traced(lines):
        for family in _FAMILIES:
            judge_cases(asked, family, family_cases(asked, family, PROFILES["quick"], seed))
        for law in LAWS:
            run_law(law, asked, max_examples=6, seed=seed)
    _with_compiled(lines)
    for module, run in lines.items():
        inside = {line for _, _, where in _functions(module) for line in where}
        if run:
            run |= set(range(1, source(module).count("\n") + 1)) - inside
    return {module: sorted(run) for module, run in lines.items()}


def is_run(mutant: Mutant, lines: Mapping[str, list[int]]) -> bool:
    """Tell whether a kernel runs a mutant's statement."""
    first, last = mutant.lines
    return any(first <= line <= last for line in lines.get(mutant.module, ()))
