"""Functions of a module that run edited code for a while: lines of it are looked up, and what they mark is changed.

Only code is exchanged, so that everybody who holds a function runs the edit, and nobody does afterwards.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

from tests.quality.bound_terms import codes_of, functions_of


class Edit(NamedTuple):
    """A line of a module as ast.unparse writes it, with « » around what is changed; ``made`` has {} in its place."""

    module: ModuleType
    line: str
    made: str


def edited(edits: Sequence[Edit]) -> list[tuple[FunctionType, CodeType]]:
    """Return the functions of the edited modules, and the code that they then run.

    Raises
    ------
    ValueError
        If a line is not in its module exactly once.
    """
    changes: dict[ModuleType, dict[str, list[tuple[int, int, str]]]] = defaultdict(lambda: defaultdict(list))
    for module, line, made in edits:
        pieces = re.split("[«»]", line)
        ends = [len("".join(pieces[: i + 1])) for i in range(len(pieces) - 1)]
        changes[module]["".join(pieces)] += zip(ends[::2], ends[1::2], [made] * (len(ends) // 2), strict=True)
    found = []
    for module, lines in changes.items():
        source = ast.unparse(ast.parse(inspect.getsource(module)))
        for line, spans in lines.items():
            new = line
            for start, stop, made in sorted(spans, reverse=True):
                new = f"{new[:start]}({made.format(line[start:stop])}){new[stop:]}"
            source, count = re.subn(rf"(?m)^( *){re.escape(line)}$", lambda m, new=new: m[1] + new, source)
            if count != 1:
                raise ValueError(f"{module.__name__} must have this line once, got {count}: {line}")
        codes = codes_of(compile(source, str(module.__file__), "exec"))
        functions = [function for function, _ in functions_of(module) if function.__code__.co_qualname in codes]
        found += [(function, codes[function.__code__.co_qualname]) for function in functions]
    return found


@contextmanager
def running(codes: Sequence[tuple[FunctionType, CodeType]]) -> Iterator[None]:
    """Let functions run other code."""
    before = [function.__code__ for function, _ in codes]
    for function, code in codes:
        function.__code__ = code
    try:
        yield
    finally:
        for (function, _), code in zip(codes, before, strict=True):
            function.__code__ = code
