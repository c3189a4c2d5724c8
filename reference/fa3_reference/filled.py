"""The type of a record's field that may be left open when the record is made, and has a value once it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

Given = TypeVar("Given", contravariant=True)
Held = TypeVar("Held", covariant=True)


class Filled(Generic[Given, Held]):
    """``Filled[float | None, float]``: given as a float or None, and always a float when it is read.

    It stands in annotations alone: the record's ``__post_init__`` fills the value in.
    """

    if TYPE_CHECKING:

        def __get__(self, record: object, owner: object = None) -> Held: ...

        def __set__(self, record: object, value: Given) -> None: ...
