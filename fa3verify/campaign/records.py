"""Records of JSON values: a dataclass as :func:`dataclasses.asdict` and JSON leave it, and back."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fa3verify.inputs.edits import exact_keys


def read(kind: Any, value: Any, where: str) -> Any:
    """Return a record of JSON values.

    Parameters
    ----------
    kind : dataclass
    value : object
        What :func:`json.loads` gave for it; tuples are lists there, numbers that are not finite may be texts.
    where : str
        Its place, for messages.

    Raises
    ------
    ValueError
        With the place, unless every field is there and of its type, and no other.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {type(value).__name__}")
    exact_keys(where, value, tuple(field.name for field in fields(kind)))
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """A JSON value as a field's type says; ValueError, with the place, if it is not one."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint):
        return read(hint, value, where)
    if origin in (Union, types.UnionType):
        return None if value is None else _value(inner[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _value(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Literal and value in inner:
        return value
    if hint is float and value in ("NaN", "Infinity", "-Infinity"):  # as strict JSON has them
        return float(value)
    legal: dict[Any, tuple[type, ...]] = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}
    if isinstance(value, legal.get(hint, ())) and isinstance(value, bool) == (hint is bool):
        return value
    raise ValueError(f"{where} must be {getattr(hint, '__name__', hint)}, got {value!r}")
