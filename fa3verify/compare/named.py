"""A kernel in another configuration, by a name such as ``twin.fp16[tile_n=64,num_splits=2]``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fa3verify.kernels.record import Candidate
from fa3verify.kernels.twins import Twin, twin
from fa3verify.known.registry import find


def configured(name: str) -> Candidate:
    """Return a kernel by name, with fields of its configuration changed where brackets say so.

    A twin's family is asked for the changed configuration: ``twin.flash3.fp16[num_splits=0]`` splits as the library
    chooses, and ``twin.fp16[num_splits=0]`` as our launch does.

    >>> from fa3_reference.problem import AttentionProblem
    >>> configured("twin.e4m3[tile_n=96,promotion_interval=96]").config_for(AttentionProblem(
    ...     1, 1, 1, 1, 97, 128, dtype="e4m3")).tile_n
    96
    """
    plain, bracket, rest = name.partition("[")
    candidate = find(plain)
    if not bracket:
        return candidate
    if not rest.endswith("]"):
        raise ValueError(f"a configuration is KERNEL[FIELD=VALUE,...], got {name!r}")
    changes = dict(_change(each, name) for each in rest[:-1].split(","))
    side = getattr(candidate.run, "__self__", None)
    if isinstance(side, Twin):  # its family then fits what else a change asks for
        changed: dict[str, Any] = dict(side.changes) | changes
        rebuilt = twin(candidate.dtype, name=name, fault=side.fault, operation=candidate.operation, **changed)
        return replace(candidate, name=name, run=rebuilt.run, configure=rebuilt.configure)
    own = candidate.configure
    return replace(candidate, name=name, configure=lambda problem: _replaced(own(problem), changes, plain))


def _replaced(config: Any, changes: dict[str, Any], kernel: str) -> Any:
    try:
        return replace(config, **changes)
    except TypeError:
        raise ValueError(f"{kernel} has no configuration with {', '.join(changes)}") from None


def _change(text: str, name: str) -> tuple[str, Any]:
    """A field and its value: an integer, a switch or a word."""
    key, equals, value = text.partition("=")
    if not key or not equals or not value:
        raise ValueError(f"a configuration is KERNEL[FIELD=VALUE,...], got {name!r}")
    if value in ("true", "false"):
        return key, value == "true"
    return key, int(value) if value.lstrip("-").isdigit() else value
