"""Declarations of the functions of scores and masks that a kernel has built in.

A problem holds their names, so that it can travel to other processes, and they are evaluated where a truth or a bound
is computed. Importing this module lets :mod:`fa3_reference.mods` do so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from fa3_reference.mods import plug
from fa3_reference.score_term import ScoreTerm
from fa3verify.files import Json
from fa3verify.kernels import loading

NAMES = ("score_mod", "mask_mod")


def _evaluated(function: str, *places: Any) -> np.ndarray:
    from fa3verify.tensors.mods import evaluated

    return evaluated(loading.bare(function), *places)


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
    named = {name: _name(name, mod, function) for name in NAMES if (mod := facts.pop(name, None)) is not None}
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
