"""Kernels of users, by reference: ``module:function`` or ``file.py:function``.

The function was declared to be a kernel by :func:`fa3verify.kernel`, or takes no arguments and returns a
:class:`~fa3verify.kernels.record.Kernel`. Any name of a kernel is looked up by :func:`fa3verify.known.registry.find`,
which calls :func:`load` for a reference.

So are the functions of scores and masks that a kernel has built in. A problem holds their names, so that it can travel
to other processes, and they are evaluated where a truth or a bound is computed. Importing this module lets
:mod:`fa3_reference.mods` do so.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, get_args

import numpy as np

from fa3_reference.mods import plug
from fa3_reference.problem import Dtype
from fa3_reference.rules import require
from fa3_reference.score_term import ScoreTerm
from fa3verify import operations
from fa3verify.files import Json
from fa3verify.kernels.record import Kernel
from fa3verify.tensors import interpreter
from fa3verify.text import of_error, of_traceback

SHAPES = 1024  # of calls, for which a process may have torch compile a kernel
MADE = "__fa3verify_kernels__"  # attribute of a function that was declared to be a kernel; holds a tuple of kernels
MODS = ("score_mod", "mask_mod")


class Unloadable(ValueError):
    """A kernel's own code failed while it was loaded."""


class Several(ValueError):
    """A reference names kernels of several dtypes; ``names`` are theirs."""

    def __init__(self, message: str, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.names = names


def load(reference: str) -> Kernel:
    """Import ``module:function`` or ``file.py:function``, and name the kernel by its reference so that anyone can
    find it again.

    The function returns one kernel or a tuple of several, or :func:`fa3verify.kernel` declared it to be some. Where
    there are several, the reference names one by its dtype: ``module:function.bf16``.

    Raises
    ------
    ValueError
        If the reference is malformed, or names nothing, several kernels (:class:`Several`), or a function that takes
        arguments and is not declared to be a kernel; if the kernel has an unknown operation, dtype or feature; or if
        importing the module raises an Exception, whose last frame is in the message then.
    Unloadable
        If the function raises, or if importing the module raises SystemExit, which is no Exception.
    """
    module, _, function = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a kernel beside the user, as python -m would find it
    require(module and function and ":" not in function, f"a kernel reference is module:function, got {reference!r}")
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
    return replace(kernel, name=reference, mods=_located(kernel.mods, module))


def _located(mods: ScoreTerm | None, module: str) -> ScoreTerm | None:
    """Return functions with the file of their kernel in place of its module, so that any process can load them."""
    if mods is None or not module.endswith(".py"):
        return mods
    own = os.path.basename(module).removesuffix(".py") + ":"
    named = ((name, getattr(mods, name)) for name in ("score_mod", "mask_mod"))
    return replace(mods, **{name: f"{module}:{x[len(own) :]}" for name, x in named if x.startswith(own)})


def _named(reference: str, module: str, name: str) -> Any:
    """Return the function that a reference names, declared to be a kernel or without arguments.

    Raises ValueError and Unloadable as :func:`load` says.
    """
    failed = f"kernel {reference!r} could not be loaded"
    imported = _loaded(module, failed)
    named = getattr(imported, name, None)
    if named is None:
        functions = [key for key, value in vars(imported).items() if callable(value)]
        raise ValueError(f"{failed}: {module} has no function {name}{meant(name, functions)}")
    if not hasattr(named, MADE) and (arguments := required(named)):
        rule = f"{name} takes {', '.join(arguments)}; write @fa3verify.kernel(...) above it to declare it a kernel"
        raise ValueError(f"{failed}: {rule}, or name a function without arguments that returns a Kernel")
    return named


def bare(reference: str) -> Callable[..., Any]:
    """Return the function that a reference names, which was not declared to be a kernel.

    Raises what :func:`load` raises of a module, and ValueError where it was declared.
    """
    module, _, name = reference.partition(":")
    failed = f"function {reference!r} could not be loaded"
    function = getattr(_loaded(module, failed), name, None)
    if not callable(function) or hasattr(function, MADE):
        why = "it is declared to be a kernel already" if function else f"{module} has no function {name}"
        raise ValueError(f"{failed}: {why}")
    return function


def declared(module: str) -> list[Kernel]:
    """Return the kernels that functions of a module or a file are declared to be, named as :func:`load` takes them.

    Raises
    ------
    ValueError
        If it cannot be imported, or declares none.
    """
    imported = _loaded(module, f"{module} could not be loaded")
    kernels = [
        replace(kernel, name=f"{module}:{name}" + (f".{kernel.dtype}" if len(made) > 1 else ""))
        for name, made in ((name, getattr(x, MADE, ())) for name, x in vars(imported).items())
        for kernel in made
    ]
    require(kernels, f"{module} has no function with @fa3verify.kernel(...) above it")
    return kernels


def _loaded(module: str, failed: str) -> ModuleType:
    """Import a module; ValueError and Unloadable, which begin with ``failed``, as :func:`load` says."""
    try:
        return _imported(module)
    except KeyboardInterrupt:
        raise
    except Exception as error:
        # A SyntaxError's own message names its file and line, and its last frame is only the import statement.
        raised = of_traceback(error)
        where = f" ({raised['frame']})" if raised and not isinstance(error, SyntaxError) else ""
        raise ValueError(f"{failed}: {interpreter.advised(of_error(error))}{where}") from error
    except BaseException as error:  # a third party's module may raise anything, SystemExit included
        raise Unloadable(f"{failed}: {of_error(error)}") from error


def required(function: Any) -> list[str]:
    """Return the names of the arguments without a default; an empty list where Python knows no signature."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters(function).values() if p.default is p.empty and p.kind not in optional]


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none where Python knows no signature.

    Those of the ``apply`` of one of torch's autograd functions are those of its ``forward``.
    """
    owner = getattr(inspect.unwrap(function), "__self__", None)
    is_apply = getattr(function, "__name__", "") == "apply" and hasattr(owner, "forward")
    try:
        known = inspect.signature(owner.forward if is_apply else function).parameters  # type: ignore[union-attr]
    except (TypeError, ValueError):
        return {}
    return dict(list(known.items())[is_apply:])  # all but its context


def meant(name: str, known: Iterable[str]) -> str:
    """Return a question for the known name that is most like ``name``; an empty text where none is like it."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _imported(module: str) -> ModuleType:
    """Import a module by its name, or a file by its path; the file's folder is put on ``sys.path`` for its imports.

    Raises what the module raises, ModuleNotFoundError for a missing file, ImportError if another module has its name.
    """
    interpreter.correct()  # in front of the import, which may ask for the GPU
    if not module.endswith(".py"):
        return importlib.import_module(module)
    file = os.path.realpath(module)
    folder, name = os.path.split(file.removesuffix(".py"))
    if not os.path.isfile(file):
        raise ModuleNotFoundError(f"there is no file {module} in {os.getcwd()}", name=module)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    imported = importlib.import_module(name)
    if (other := os.path.realpath(str(imported.__file__))) != file:
        raise ImportError(f"the module {name} is {other}: rename {module}")
    return imported


def compile_for_many_shapes() -> None:
    """Let ``torch.compile`` compile for all shapes of a campaign: past its own limit of 8 it runs code uncompiled.

    It is asked in front of every call, as a kernel may import or call it late.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    if dynamo is not None:
        dynamo.recompile_limit = max(dynamo.recompile_limit, SHAPES)
        dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, SHAPES)


def _one_of(reference: str, made: tuple[Any, ...], dtype: str) -> Kernel:
    """Return the only kernel, or that of a dtype; ValueError where it is no Kernel, or not one alone fits.

    An empty ``dtype`` means that the reference names none.
    """
    for kernel in made:
        if not isinstance(kernel, Kernel):
            rule = "must be declared by @fa3verify.kernel(...), or return a fa3verify Kernel"
            raise ValueError(f"kernel {reference!r} {rule}, got {type(kernel).__name__}")
    chosen = [kernel for kernel in made if kernel.dtype == dtype] if dtype else made
    if len(chosen) == 1:
        return chosen[0]
    names = tuple(f"{reference.removesuffix(f'.{dtype}')}.{kernel.dtype}" for kernel in made)
    message = f"kernel {reference!r} must name one of {', '.join(names)}"
    raise ValueError(message) if dtype else Several(message, names)


def _check(reference: str, kernel: Kernel) -> None:
    """Raise ValueError, with the list, for an operation, a dtype or a feature that is misspelt."""
    known = {"operation": operations.OPERATIONS, "dtype": get_args(Dtype)}
    for name, choices in known.items():
        if (value := getattr(kernel, name)) not in choices:
            raise ValueError(f"kernel {reference!r}: {name} must be one of {', '.join(choices)}, got {value!r}")
    known_features = frozenset[str]().union(
        *(operation.features | operation.serving for operation in operations.OPERATIONS.values())
    )
    if unknown := set(kernel.features) - known_features:
        names = f"{', '.join(sorted(known_features))}, got {', '.join(map(repr, unknown))}"
        raise ValueError(f"kernel {reference!r}: features must be among {names}")


def _evaluated(function: str, *places: Any) -> np.ndarray:
    from fa3verify.tensors.mods import evaluated

    return evaluated(bare(function), *places)


plug(_evaluated)


def declared_mods(facts: Json, function: Callable[..., object]) -> ScoreTerm | None:
    """Return the term of a kernel that declares a ``score_mod`` or a ``mask_mod``, each a function or ``module:name``.

    Parameters
    ----------
    facts : dict
        What it declares; the two and ``score_mod_ulp`` are taken out of it.
    function : callable
        The kernel's function, in whose module the two are looked for as well.

    Returns
    -------
    ScoreTerm or None
        None for a kernel that declares neither.

    Raises
    ------
    ValueError
        For a function that no name at the top of a module stands for, and for ulp without a ``score_mod``.
    """
    named = {name: _name(name, mod, function) for name in MODS if (mod := facts.pop(name, None)) is not None}
    ulp = facts.pop("score_mod_ulp", 4.0 if "score_mod" in named else 0.0)
    if ulp and "score_mod" not in named:
        raise ValueError(f"score_mod_ulp is that of a score_mod, got {ulp!r} without one")
    return ScoreTerm("mods", **named, score_mod_ulp=ulp) if named else None


def _name(what: str, mod: Any, function: Callable[..., object]) -> str:
    """Return ``module:name`` of a function, which is looked for in its own module and in that of the kernel."""
    if isinstance(mod, str):
        return mod
    modules = [getattr(x, "__module__", None) or "" for x in (mod, function)]
    for module in modules:
        for name, value in vars(sys.modules.get(module, mod)).items():
            if value is mod:
                return f"{module}:{name}"
    raise ValueError(
        f"{what} must have a name at the top of the kernel's module, above the kernel, by which other processes find "
        f"it, got {getattr(mod, '__qualname__', mod)!r} of {', '.join(dict.fromkeys(modules))}"
    )
