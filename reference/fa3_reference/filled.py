"""The type of a record's field that may be left open when the record is made, and has a value once it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

Given = TypeVar("Given", contravariant=True)
Held = TypeVar("Held", covariant=True)


class Filled(Generic[Given, Held]):
    """``Filled[float | None, float]`` annotates a field that takes a float or None and always reads as a float.

    Only type checkers see it: at run time the record's ``__post_init__`` fills the value in.
    """

    if TYPE_CHECKING:

        def __get__(self, record: object, owner: object = None) -> Held: ...

        def __set__(self, record: object, value: Given) -> None: ...
