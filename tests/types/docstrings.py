"""Check the docstrings of all public names by numpydoc's validator: ``python tests/types/docstrings.py``.

Public is what the packages list in ``__all__``, with the public methods and properties of the classes among it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from functools import cached_property

from numpydoc.validate import ERROR_MSGS, validate

PACKAGES = (
    "fa3verify",
    "fa3verify.kernels.functions",
    "fa3verify.inputs.strategies",
    "fa3_kernels",
    "fa3_kernels.api",
    "fa3_kernels.frameworks",
    "fa3_simulator",
    "fa3_reference",
    "fa3_reference.bounds",
)
# What is not asked, and why; every other check of numpydoc's is.
IGNORED = {
    "ES01": "a summary that says it all needs no second paragraph",
    "SA01": "links stand in the text, where they are needed",
    "SS06": "a summary of one sentence may need two lines of 120 columns",
    "PR08": "a description may start with a name, such as head_dim or c > 0",
    "RT02": "a returned tuple names its parts",
    "RT04": "a description may start with a name",
}
EXAMPLE = "EX01"  # asked of functions alone: records and their methods are shown by what makes them
WITHOUT_EXAMPLE = ("register_with_torch", "register_with_transformers")  # one call each, which changes the process
UNREADABLE = ("edits", "recipes")  # Hypothesis composes these, without a source


def public_names() -> Iterator[tuple[str, object]]:
    """Yield every public name with its object: functions, classes, and the members that a class defines itself."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            found = getattr(module, name)
            yield f"{package}.{name}", found
            if inspect.isclass(found):
                yield from ((f"{package}.{name}.{member}", x) for member, x in members(found))


def members(found: type) -> Iterator[tuple[str, object]]:
    """Yield the public methods and properties of a class."""
    for name, member in vars(found).items():
        is_code = inspect.isfunction(member) or isinstance(member, classmethod | staticmethod)
        if not name.startswith("_") and (is_code or isinstance(member, property | cached_property)):
            yield name, member


def complaints(name: str, found: object) -> list[str]:
    """Return what numpydoc finds wrong with one docstring, but for what is ignored."""
    last = name.rpartition(".")[2]
    if last in UNREADABLE:
        return []
    is_shown = inspect.isfunction(found) and found.__qualname__ == found.__name__ and last not in WITHOUT_EXAMPLE
    checks = set(ERROR_MSGS) - set(IGNORED) - (set() if is_shown else {EXAMPLE})
    return [f"{name}: {code} {words}" for code, words in validate(name)["errors"] if code in checks]


def main() -> int:
    """Print every complaint; return 1 if there is one."""
    seen: set[int] = set()
    found, count = [], 0
    for name, thing in public_names():
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        count += 1
        found += complaints(name, thing)
    print("\n".join(found), file=sys.stderr)
    print(f"{count} public docstrings, {len(found)} complaints")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
