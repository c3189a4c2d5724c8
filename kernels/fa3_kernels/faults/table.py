"""The planted mistakes: bugs that real attention kernels have shipped with, each as a rewrite of the twin's source.

``faults.toml`` says for every mistake what goes wrong and which text of the twin is replaced by which.
:mod:`fa3_kernels.faults.package` loads the changed twin. A rewrite whose text does not stand in the twin raises
ValueError, so that a mistake cannot silently be planted nowhere. Users of this table are the tests that ask whether a
mistake is found, and ``fa3verify``'s own check of its comparisons.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from fa3_kernels.faults.package import Rewrite, load

_TABLE: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("faults.toml").read_text(encoding="utf-8")
)


def _named(kind: str) -> list[tuple[str, str]]:
    return [(name.upper(), name) for name in _TABLE[kind]]


# Mistakes of the forward, of the quantiser and of the backward: MEMBER = "member" for each entry of faults.toml.
Fault = StrEnum("Fault", _named("Fault"))
QuantizerFault = StrEnum("QuantizerFault", _named("QuantizerFault"))
BackwardFault = StrEnum("BackwardFault", _named("BackwardFault"))
AnyFault = Fault | QuantizerFault | BackwardFault
_FUNCTIONS = {Fault: "forward", QuantizerFault: "quantize_qkv", BackwardFault: "backward"}


def description(fault: AnyFault) -> str:
    """Return in words what goes wrong."""
    return _TABLE[type(fault).__name__][fault]["what"]


def rewrite(fault: AnyFault) -> Rewrite:
    """Return the change of the twin's source that plants the mistake."""
    row = _TABLE[type(fault).__name__][fault]
    # one edit stands in the row itself, several in its list "edits"
    return Rewrite(row["module"], *((edit["before"], edit["after"]) for edit in row.get("edits", [row])))


def planted(fault: AnyFault) -> str:
    """Return the name of a changed copy of the twin that has this mistake; it becomes importable on first use.

    Raises
    ------
    ValueError
        If a text that the rewrite replaces does not stand in the twin exactly once.
    """
    return _loaded(type(fault), str(fault))


@cache
def _loaded(kind: type[AnyFault], name: str) -> str:
    """Load a mistake once.

    The kind is part of the key: members of two enumerations may share a name, and as strings they then are equal.
    """
    return load(f"fa3_twin_with_{kind.__name__.lower()}_{name}", rewrite(kind(name)))


def faulty(fault: AnyFault) -> Callable[..., Any]:
    """Return the function of the changed twin that computes with this mistake: forward, quantize_qkv or backward.

    It takes what the sound function takes. ValueError as :func:`planted` says.
    """
    function = _FUNCTIONS[type(fault)]
    return getattr(import_module(f"{planted(fault)}.{function.removesuffix('_qkv')}"), function)
