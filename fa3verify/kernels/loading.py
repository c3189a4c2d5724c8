"""Kernels of somebody's own: ``module:function`` or ``file.py:function``, each a function that was declared to be a
kernel, or one without arguments that returns a :class:`~fa3verify.kernels.record.Kernel`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any

from fa3_reference.problem import DTYPES
from fa3verify import operations
from fa3verify.kernels.record import Kernel
from fa3verify.text import of_error, of_traceback

MADE = "__fa3verify_kernels__"  # of a function that was declared to be a kernel: its kernels


class Unloadable(ValueError):
    """A kernel's own code failed while it was loaded."""


def load(reference: str) -> Kernel:
    """Import ``module:function`` or ``file.py:function``, and name the kernel by its reference so that anyone can
    find it again.

    The function returns a kernel or several, or was made some by :func:`fa3verify.kernel`; of several, the
    reference names one by its dtype: ``module:function.bf16``.

    Raises
    ------
    ValueError
        If the reference is malformed, names nothing, several or a function that takes arguments and is not declared to
        be a kernel, does not give a Kernel of known operation, dtype and features, or if its module cannot be
        imported; the message then has the last frame.
    Unloadable
        If the function raises, or the module ends the process by SystemExit.
    """
    module, _, function = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a kernel beside the user, as python -m would find it
    if not module or not function or ":" in function:
        raise ValueError(f"a kernel reference is module:function, got {reference!r}")
    name, _, dtype = function.partition(".")
    named = _named(reference, module, name)
    try:
        made = getattr(named, MADE, None) or named()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a third party's function may raise anything
        raise Unloadable(f"kernel {reference!r} could not be loaded: {of_error(error)}") from error
    kernel = _one_of(reference, made if isinstance(made, tuple) else (made,), dtype)
    _check(reference, kernel)
    return replace(kernel, name=reference)


def _named(reference: str, module: str, name: str) -> Any:
    """Return what a reference names, a kernel or a function without arguments; ValueError as :func:`load` says."""
    failed = f"kernel {reference!r} could not be loaded"
    try:
        imported = _imported(module)
    except KeyboardInterrupt:
        raise
    except Exception as error:
        raised = of_traceback(error)
        where = f" ({raised['frame']})" if raised and not isinstance(error, SyntaxError) else ""
        raise ValueError(f"{failed}: {of_error(error)}{where}") from error
    except BaseException as error:  # a third party's module may raise anything
        raise Unloadable(f"{failed}: {of_error(error)}") from error
    named = getattr(imported, name, None)
    if named is None:
        functions = [key for key, value in vars(imported).items() if callable(value)]
        raise ValueError(f"{failed}: {module} has no function {name}{meant(name, functions)}")
    if not hasattr(named, MADE) and (arguments := _required(named)):
        rule = f"{name} takes {', '.join(arguments)}; write @fa3verify.kernel(...) above it to declare it a kernel"
        raise ValueError(f"{failed}: {rule}, or name a function without arguments that returns a Kernel")
    return named


def _required(function: Any) -> list[str]:
    """Names of the arguments that a function cannot be called without; none where Python does not know."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def meant(name: str, known: Iterable[str]) -> str:
    """A question for the name that was meant; empty where none is like it."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _imported(module: str) -> ModuleType:
    """Import a module by its name, or a file by its path, whose folder its own imports are then found in."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    file = os.path.realpath(module)
    folder, name = os.path.split(file.removesuffix(".py"))
    if not os.path.isfile(file):
        raise ModuleNotFoundError(f"there is no file {module} in {os.getcwd()}", name=module)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found = importlib.import_module(name)
    if (other := os.path.realpath(str(found.__file__))) != file:
        raise ImportError(f"the module {name} is {other}: rename {module}")
    return found


def _one_of(reference: str, made: tuple[Any, ...], dtype: str) -> Kernel:
    """Return the only one, or the one of a dtype."""
    for kernel in made:
        if not isinstance(kernel, Kernel):
            rule = "must be declared by @fa3verify.kernel(...), or return a fa3verify Kernel"
            raise ValueError(f"kernel {reference!r} {rule}, got {type(kernel).__name__}")
    chosen = [kernel for kernel in made if kernel.dtype == dtype] if dtype else made
    if len(chosen) == 1:
        return chosen[0]
    base = reference.removesuffix(f".{dtype}")
    names = ", ".join(f"{base}.{kernel.dtype}" for kernel in made)
    raise ValueError(f"kernel {reference!r} must name one of {names}")


def _check(reference: str, kernel: Kernel) -> None:
    """Raise ValueError, with the list, for an operation, a dtype or a feature that is misspelt."""
    known = {"operation": operations.OPERATIONS, "dtype": DTYPES}
    for name, choices in known.items():
        if (value := getattr(kernel, name)) not in choices:
            raise ValueError(f"kernel {reference!r}: {name} must be one of {', '.join(choices)}, got {value!r}")
    known_features = frozenset[str]().union(
        *(operation.features | operation.serving for operation in operations.OPERATIONS.values())
    )
    if unknown := set(kernel.features) - known_features:
        names = f"{', '.join(sorted(known_features))}, got {', '.join(map(repr, unknown))}"
        raise ValueError(f"kernel {reference!r}: features must be among {names}")
