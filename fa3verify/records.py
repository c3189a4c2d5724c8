"""Records as JSON values, and back.

A record is a dataclass; :func:`plain` writes its fields as the keys of an object, and :func:`read` takes them back and
refuses what is missing, unknown or of another type. A field may only be missing if it has ``metadata``, which are
arguments of :func:`cattrs.gen.override`: ``OLDER`` for one that files of older versions lack, ``OMITTED`` for one that
is not written where it has its default, ``NOT_WRITTEN``; or ``FLAT`` for an object or a record whose items stand among
the keys of its record. ``PRIVATE`` is what only the processes of a campaign tell each other: no published file has it.
A record that writes its own JSON has the methods ``to_json`` and ``from_json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from cattrs import BaseValidationError, Converter, ForbiddenExtraKeysError, transform_error
from cattrs.cols import list_structure_factory
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from fa3verify.files import Json

OLDER = {"omit_if_default": False}
OMITTED = {"omit_if_default": True}
NOT_WRITTEN = {"omit": True}
PRIVATE = {"omit": True, "rename": None}  # for cattrs the same as the line before
FLAT = {"flat": True}
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as strict JSON has them
_unseen: set[str] = set()  # fields whose records are ``FLAT``: no file has their names
Record = TypeVar("Record")


class DamagedError(ValueError):
    """Values that are no record; ``lines`` say of each what is wrong and where, and its message is the first."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(lines[0])
        self.lines = lines


def plain(record: object, *, private: bool = False) -> Any:
    """Return a record, or records in lists and objects, as JSON values; numbers that are not finite stay numbers."""
    return _converter(private, private).unstructure(record)


def read(kind: type[Record], value: object, where: str, *, private: bool = False, whole: bool = False) -> Record:
    """Return a record of JSON values.

    Parameters
    ----------
    kind : type
        A dataclass, or a list or an object of them.
    value : object
        What :func:`json.loads` gave for it; numbers that are not finite may be texts.
    where : str
        Its place, for messages.
    private : bool
        Whether they have what is ``PRIVATE``; they are whole then.
    whole : bool
        Whether it must have what older versions did not write.

    Raises
    ------
    DamagedError
        With the place, unless every field is there and of its type, and no other.
    """
    try:
        return _converter(private, whole or private).structure(value, kind)
    except (BaseValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
        lines = transform_error(error, where, _told)
        raise DamagedError(
            [reduce(lambda line, name: line.replace(f".{name}", ""), _unseen, line) for line in lines]
        ) from None


def _told(error: BaseException, _: type | None) -> str:
    """Return in words what is wrong with one value."""
    if isinstance(error, ForbiddenExtraKeysError):
        return f"unknown key {', '.join(map(repr, sorted(error.extra_fields)))}"
    return str(error)


@cache
def _converter(private: bool, whole: bool) -> Converter:
    made = Converter(forbid_extra_keys=True, unstruct_collection_overrides={frozenset: sorted})
    for kind in (int, str, bool, float):
        made.register_structure_hook(kind, _scalar)
    made.register_structure_hook_func(lambda kind: kind is object, lambda value, _: value)
    made.register_structure_hook_factory(_is_sequence, lambda kind: _sequence(kind, made))
    made.register_structure_hook_func(_writes_itself, lambda value, kind: kind.from_json(value))
    made.register_unstructure_hook_func(_writes_itself, lambda record: record.to_json())
    made.register_structure_hook_factory(_has_fields, lambda kind: _reader(kind, made, private, whole))
    made.register_unstructure_hook_factory(_has_fields, lambda kind: _writer(kind, made, private))
    return made


def _reader(kind: Any, made: Converter, private: bool, whole: bool) -> Callable[[Any, Any], Any]:
    hook = make_dict_structure_fn(kind, made, **_overrides(kind, private))
    flat = _flat(kind)
    names = [field.name for field in fields(kind) if private or field.metadata != PRIVATE]
    needed = ({}, OLDER, PRIVATE)[: 1 + whole + private]
    required = [field.name for field in fields(kind) if field.metadata in needed]

    def read(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"must be an object, got {type(value).__name__}")
        if missing := [name for name in required if name not in value]:
            raise ValueError(f"{missing[0]!r} is missing")
        if flat:
            others = {key: item for key, item in value.items() if key not in names}
            value = {name: value[name] for name in names if name in value} | {flat: others}
        return hook(value, kind)

    return read


def _writer(kind: Any, made: Converter, private: bool) -> Callable[[Any], Json]:
    hook = make_dict_unstructure_fn(kind, made, **_overrides(kind, private))
    flat = _flat(kind)
    if flat is None:
        return hook

    def write(record: Any) -> Json:
        written = hook(record)
        return written.pop(flat) | written

    return write


def _flat(kind: Any) -> str | None:
    """Return the field whose items stand among the keys of its record."""
    flat = next((field for field in fields(kind) if field.metadata == FLAT), None)
    if flat and is_dataclass(get_type_hints(kind)[flat.name]):
        _unseen.add(flat.name)
    return flat and flat.name


def _scalar(value: Any, kind: type) -> Any:
    """A number, a text or a truth value as it is; ValueError unless it is of its kind."""
    if kind is float and value in _NOT_FINITE:
        return float(value)
    legal = (int, float) if kind is float else kind
    if isinstance(value, legal) and isinstance(value, bool) == (kind is bool):
        return value
    raise ValueError(f"must be {kind.__name__}, got {value!r}")


def _is_sequence(kind: Any) -> bool:
    return get_origin(kind) is list or (get_origin(kind) is tuple and get_args(kind)[-1] is ...)


def _sequence(kind: Any, made: Converter) -> Callable[[Any, Any], Any]:
    """Return what reads a list or a tuple of any length: a text is none."""
    hook = list_structure_factory(list[get_args(kind)[0]], made)

    def listed(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(f"must be a list, got {value!r}")
        return get_origin(kind)(hook(value, None))

    return listed


def _writes_itself(kind: Any) -> bool:
    return hasattr(kind, "from_json")


def _has_fields(kind: Any) -> bool:
    return is_dataclass(kind) and not _writes_itself(kind)


def _overrides(kind: Any, private: bool) -> Any:
    known = ({}, FLAT, PRIVATE) if private else ({}, FLAT)
    return {field.name: override(**field.metadata) for field in fields(kind) if field.metadata not in known}
