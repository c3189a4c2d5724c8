"""Records as JSON values, and back.

A record is a dataclass. :func:`plain` writes its fields as the keys of a JSON object; :func:`read` builds the record
again and refuses keys that are missing, unknown or of another type. The files themselves are written and parsed by
:mod:`fa3verify.files`.

A field that may be missing says so by its ``metadata``, which is one of the constants below. A record that writes its
own JSON has the methods ``to_json`` and ``from_json``, and its fields are not looked at.
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

# Metadata of a field: arguments of cattrs.gen.override, but for FLAT, which only this module knows.
OLDER = {"omit_if_default": False}  # files of older versions lack it; cattrs writes it always, as without metadata
OMITTED = {"omit_if_default": True}  # it is not written where it has its default
NOT_WRITTEN = {"omit": True}  # no file has it
PRIVATE = {"omit": True, "rename": None}  # only processes of a campaign send it; the rename tells it from NOT_WRITTEN
FLAT = {"flat": True}  # an object or a record whose items stand among the keys of its record
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # texts that fa3verify.files.plain writes for such numbers
_unseen: set[str] = set()  # names of FLAT fields that hold a record: cattrs names them in a place, but no file has them
Record = TypeVar("Record")


class DamagedError(ValueError):
    """JSON values cannot be read as a record: ``lines`` has a line for each fault, what is wrong and where.

    The message of the exception is the first line.
    """

    def __init__(self, lines: list[str]) -> None:
        super().__init__(lines[0])
        self.lines = lines


def plain(record: object, *, private: bool = False) -> Any:
    """Return a record, or records in lists and objects, as JSON values; numbers that are not finite stay numbers.

    ``private`` says whether fields that are ``PRIVATE`` are written.
    """
    return _converter(private, private).unstructure(record)


def read(kind: type[Record], value: object, where: str, *, private: bool = False, whole: bool = False) -> Record:
    """Build a record from JSON values.

    Parameters
    ----------
    kind : type
        The dataclass to build, or a type such as ``list[Find]`` or ``dict[str, Find]``.
    value : object
        What :func:`json.loads` returned; numbers that are not finite may be the texts NaN, Infinity and -Infinity.
    where : str
        What the values are called in messages, such as the name of their file.
    private : bool
        Whether the values must have the fields that are ``PRIVATE``, and those that are ``OLDER`` too.
    whole : bool
        Whether the values must have the fields that are ``OLDER``.

    Raises
    ------
    DamagedError
        If a field is missing or of another type, if a key is unknown, or if a ``from_json`` or a ``__post_init__``
        raises ValueError, TypeError, KeyError or AttributeError. What else these raise passes through.
    """
    try:
        return _converter(private, whole or private).structure(value, kind)
    except (BaseValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
        lines = transform_error(error, where, _told)
        raise DamagedError(
            [reduce(lambda line, name: line.replace(f".{name}", ""), _unseen, line) for line in lines]
        ) from None


def _told(error: BaseException, _: type | None) -> str:
    """Return in words what is wrong with one value, for :func:`cattrs.transform_error`, which adds the place."""
    if isinstance(error, ForbiddenExtraKeysError):
        return f"unknown key {', '.join(map(repr, sorted(error.extra_fields)))}"
    return str(error)


@cache
def _converter(private: bool, whole: bool) -> Converter:
    """Return the cattrs converter for both ways; of its hooks the one that was registered last is asked first."""
    converter = Converter(forbid_extra_keys=True, unstruct_collection_overrides={frozenset: sorted})
    for kind in (int, str, bool, float):
        converter.register_structure_hook(kind, _scalar)
    converter.register_structure_hook_func(lambda kind: kind is object, lambda value, _: value)
    converter.register_structure_hook_factory(
        lambda kind: get_origin(kind) is list or (get_origin(kind) is tuple and get_args(kind)[-1] is ...),
        lambda kind: _sequence(kind, converter),
    )
    converter.register_structure_hook_func(_writes_itself, lambda value, kind: kind.from_json(value))
    converter.register_unstructure_hook_func(_writes_itself, lambda record: record.to_json())
    converter.register_structure_hook_factory(_has_fields, lambda kind: _reader(kind, converter, private, whole))
    converter.register_unstructure_hook_factory(_has_fields, lambda kind: _writer(kind, converter, private))
    return converter


def _reader(kind: Any, converter: Converter, private: bool, whole: bool) -> Callable[[Any, Any], Any]:
    """Return the function that builds a record of one dataclass from an object."""
    hook = make_dict_structure_fn(kind, converter, **_overrides(kind, private))
    flat = _flat(kind)
    names = [field.name for field in fields(kind) if private or field.metadata != PRIVATE]
    needed = ({}, OLDER, PRIVATE)[: 1 + whole + private]  # private is never set without whole
    required = [field.name for field in fields(kind) if field.metadata in needed]

    def read(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"must be an object, got {type(value).__name__}")
        if missing := [name for name in required if name not in value]:
            raise ValueError(f"{missing[0]!r} is missing")
        if flat:
            # The hook wants the flat items under the name of their field.
            others = {key: item for key, item in value.items() if key not in names}
            value = {name: value[name] for name in names if name in value} | {flat: others}
        return hook(value, kind)

    return read


def _writer(kind: Any, converter: Converter, private: bool) -> Callable[[Any], Json]:
    """Return the function that writes a record of one dataclass as an object."""
    hook = make_dict_unstructure_fn(kind, converter, **_overrides(kind, private))
    flat = _flat(kind)
    if flat is None:
        return hook

    def write(record: Any) -> Json:
        written = hook(record)
        return written.pop(flat) | written

    return write


def _flat(kind: Any) -> str | None:
    """Return the name of a dataclass's ``FLAT`` field, None where it has none."""
    flat = next((field for field in fields(kind) if field.metadata == FLAT), None)
    if flat and is_dataclass(get_type_hints(kind)[flat.name]):
        _unseen.add(flat.name)
    return flat and flat.name


def _scalar(value: Any, kind: type) -> Any:
    """Return a number, a text or a truth value as it is; ValueError unless it is of its kind. An integer is a float."""
    if kind is float and value in _NOT_FINITE:
        return float(value)
    legal = (int, float) if kind is float else kind
    if isinstance(value, legal) and isinstance(value, bool) == (kind is bool):
        return value
    raise ValueError(f"must be {kind.__name__}, got {value!r}")


def _sequence(kind: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    """Return the function that reads a list or a tuple of any length; it refuses a text, whose items are texts too."""
    hook = list_structure_factory(list[get_args(kind)[0]], converter)

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
    """Return what cattrs is told of the fields of a dataclass."""
    known = ({}, FLAT, PRIVATE) if private else ({}, FLAT)
    return {field.name: override(**field.metadata) for field in fields(kind) if field.metadata not in known}
