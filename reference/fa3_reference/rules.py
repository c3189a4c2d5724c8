"""What the records of all packages check their fields by, and the type of a field that may be left open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar


def require(ok: object, rule: str) -> None:
    """Raise ValueError with the rule, in words, unless it is kept."""
    if not ok:
        raise ValueError(rule)


def is_integer(value: object, least: int) -> bool:
    """Tell whether a value is an integer, not a bool, and at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


Given = TypeVar("Given", contravariant=True)
Held = TypeVar("Held", covariant=True)


class Filled(Generic[Given, Held]):
    """``Filled[float | None, float]`` annotates a field that takes a float or None and always reads as a float.

    Only type checkers see it: at run time the record's ``__post_init__`` fills the value in.
    """

    if TYPE_CHECKING:

        def __get__(self, record: object, owner: object = None) -> Held: ...

        def __set__(self, record: object, value: Given) -> None: ...
